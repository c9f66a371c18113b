// LibTorch in a program that links only libtitan finds this getnameinfo before libc's: see [Note: names of peers] in dist/rendezvous.cpp. Weak,
// because a static link has that one, too.

#include <netdb.h>

#include "dist/rendezvous.h"

extern "C" __attribute__((visibility("default"), weak)) int getnameinfo(const sockaddr* address,
                                                                        socklen_t address_bytes, char* host,
                                                                        socklen_t host_bytes, char* service,
                                                                        socklen_t service_bytes, int flags) {
  return titan::dist::name_of_peer(__builtin_return_address(0),
                                   {address, address_bytes, host, host_bytes, service, service_bytes, flags});
}
