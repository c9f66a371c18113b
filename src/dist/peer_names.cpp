// [Note: names of peers]
//
// Every connection that LibTorch makes to a store asks for the name of the other side, for messages that
// mostly nobody prints. No local file knows 127.0.0.1 as it is written there (::ffff:127.0.0.1), so even on
// one host a name server is asked, and where that doesn't answer, a connection takes 5 s or 10
// (github.com/pytorch/pytorch/issues/159007). There is no setting for it. So this stands in front of libc's
// getnameinfo: LibTorch gets the address as it is; everybody else's calls go on to libc as they are.

#include "peer_names.h"

#include <dlfcn.h>
#include <netdb.h>
#include <sys/socket.h>

#include <string_view>

namespace titan::dist {

int name_flags(const void* code, int flags) {
  Dl_info library{};
  if (::dladdr(code, &library) == 0 || !library.dli_fname) return flags;
  const std::string_view path = library.dli_fname;
  return path.substr(path.rfind('/') + 1).starts_with("libtorch") ? flags | NI_NUMERICHOST : flags;
}

}  // namespace titan::dist

extern "C" __attribute__((visibility("default"))) int getnameinfo(const sockaddr* address,
                                                                  socklen_t address_bytes, char* host,
                                                                  socklen_t host_bytes, char* service,
                                                                  socklen_t service_bytes, int flags) {
  using Call = decltype(&getnameinfo);
  static const auto libc = reinterpret_cast<Call>(::dlsym(RTLD_NEXT, "getnameinfo"));
  if (!libc) return EAI_SYSTEM;
  return libc(address, address_bytes, host, host_bytes, service, service_bytes,
              titan::dist::name_flags(__builtin_return_address(0), flags));
}
