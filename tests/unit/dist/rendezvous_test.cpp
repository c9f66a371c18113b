// LibTorch gets addresses instead of host names; other callers get names.

#include <arpa/inet.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <sys/socket.h>
#include <array>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/logging.h>

#include "dist/rendezvous.h"

namespace titan::dist {
namespace {

using ::testing::HasSubstr;

std::string library_of(const void* code) {
  Dl_info library{};
  return ::dladdr(code, &library) != 0 ? library.dli_fname : "";
}

TEST(PeerNames, LibTorchGetsAddresses) {
  const auto flags_of = [](auto* function, int flags) {
    return name_flags(reinterpret_cast<const void*>(function), flags);
  };
  EXPECT_EQ(flags_of(&c10d::detail::isLogLevelEnabled, NI_NUMERICSERV), NI_NUMERICSERV | NI_NUMERICHOST);
  EXPECT_EQ(flags_of(&library_of, NI_NUMERICSERV), NI_NUMERICSERV);
  EXPECT_EQ(flags_of(&::getaddrinfo, NI_NAMEREQD), NI_NAMEREQD);
}

// Every call reaches libtitan's getnameinfo first.
TEST(PeerNames, PrecedesLibc) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's getnameinfo precedes it";
#endif
  EXPECT_THAT(library_of(::dlsym(RTLD_DEFAULT, "getnameinfo")), HasSubstr("libtitan"));
}

TEST(PeerNames, OtherCallersGetLibcsAnswer) {
  void* libc = ::dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  ASSERT_NE(libc, nullptr);
  const auto libcs = reinterpret_cast<decltype(&::getnameinfo)>(::dlsym(libc, "getnameinfo"));
  const auto answer_of = [](decltype(&::getnameinfo) ask) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    std::array<char, NI_MAXHOST> host{};
    const int error = ask(reinterpret_cast<const sockaddr*>(&address), sizeof(address), host.data(),
                          host.size(), nullptr, 0, 0);
    return std::pair(error, std::string(host.data()));
  };
  EXPECT_EQ(answer_of(&::getnameinfo), answer_of(libcs));
  ::dlclose(libc);
}

}  // namespace
}  // namespace titan::dist
