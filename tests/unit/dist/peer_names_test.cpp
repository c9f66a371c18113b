// LibTorch doesn't ask for the names of hosts; others who do get them.

#include "dist/peer_names.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/logging.h>

namespace titan::dist {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string library_of(const void* code) {
  Dl_info library{};
  return ::dladdr(code, &library) != 0 ? library.dli_fname : "";
}

TEST(PeerNames, LibTorchsCallsAreKnown) {
  EXPECT_TRUE(is_of_libtorch(reinterpret_cast<const void*>(&c10d::detail::isLogLevelEnabled)));
  EXPECT_FALSE(is_of_libtorch(reinterpret_cast<const void*>(&library_of)));
  EXPECT_FALSE(is_of_libtorch(reinterpret_cast<const void*>(&::getaddrinfo)));
}

// Whoever asks comes to libtitan's first.
TEST(PeerNames, StandsInFrontOfLibc) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's own stands in front of it";
#endif
  EXPECT_THAT(library_of(::dlsym(RTLD_DEFAULT, "getnameinfo")), HasSubstr("libtitan"));
}

TEST(PeerNames, OthersAreGivenNames) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::array<char, NI_MAXHOST> host{};
  const int error = ::getnameinfo(reinterpret_cast<const sockaddr*>(&address), sizeof(address), host.data(),
                                  host.size(), nullptr, 0, NI_NAMEREQD);
  if (error != 0) GTEST_SKIP() << "127.0.0.1 has no name here: " << ::gai_strerror(error);
  EXPECT_THAT(std::string(host.data()), Not(HasSubstr("127.0.0.1")));
}

}  // namespace
}  // namespace titan::dist
