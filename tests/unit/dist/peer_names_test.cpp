// LibTorch doesn't ask for the names of hosts; others who do get them.

#include "dist/peer_names.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace titan::dist {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct Named {
  int error = 0;
  std::string host;
};

Named name_of_loopback() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::array<char, NI_MAXHOST> host{};
  const int error = ::getnameinfo(reinterpret_cast<const sockaddr*>(&address), sizeof(address), host.data(),
                                  host.size(), nullptr, 0, NI_NAMEREQD);
  return {error, host.data()};
}

TEST(PeerNames, LibTorchIsGivenAddresses) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const int64_t before = num_names_withheld();
  options.isServer = false;
  options.port = server->getPort();
  const auto client = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  EXPECT_GT(num_names_withheld(), before);
}

TEST(PeerNames, OthersAreGivenNames) {
  const int64_t before = num_names_withheld();
  const Named named = name_of_loopback();
  EXPECT_EQ(num_names_withheld(), before);
  if (named.error == EAI_NONAME || named.error == EAI_AGAIN) GTEST_SKIP() << "127.0.0.1 has no name here";
  EXPECT_EQ(named.error, 0);
  EXPECT_THAT(named.host, Not(HasSubstr("127.0.0.1")));
}

}  // namespace
}  // namespace titan::dist
