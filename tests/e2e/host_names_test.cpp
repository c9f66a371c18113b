// Hosts whose own names are loopback addresses: 127.0.1.1, as in Debian's /etc/hosts. Each host is built from
// the kernel's namespaces, with its own network, name and table of names.

#include <fstream>
#include <optional>

#include <gtest/gtest.h>

#include "e2e/training.h"

namespace titan::testing {
namespace {

// become NAME OTHER'S_NAME OTHER'S_ADDRESS: a host's set-up; await FILE: waits for what the other host does.
constexpr const char* kHost = R"(
become() {
  hostname $1 && ip link set lo up || exit 77
  printf '127.0.0.1 localhost\n127.0.1.1 %s\n%s %s\n' $1 $3 $2 > $FOLDER/hosts.$1
  mount --bind $FOLDER/hosts.$1 /etc/hosts || exit 77
  getent hosts $1 | grep -q '^127\.0\.1\.1 ' || exit 77
}
await() {
  for i in $(seq 1000); do [ -e $FOLDER/$1 ] && return; sleep 0.02; done
  echo "$1 didn't come" >&2; exit 1
}
)";

// Serves the store. The other host knows its name as the address of its end of the link.
constexpr const char* kFirst = R"(
ip link add end1 type veth peer name end2 || exit 77
unshare --net --mount --uts sh $FOLDER/second.sh & second=$!
await second_is_there
ip link set end2 netns $second && touch $FOLDER/linked || exit 77
become first second ${NETWORK}2
ip addr add ${NETWORK}1$MASK dev end1 && ip link set end1 up
await second_is_up
RANK=0 $PROGRAM && wait $second
)";
constexpr const char* kSecond = R"(
touch $FOLDER/second_is_there
await linked
become second first ${NETWORK}1
ip addr add ${NETWORK}2$MASK dev end2 && ip link set end2 up && touch $FOLDER/second_is_up
RANK=1 $PROGRAM
)";

/// nullopt where namespaces or the tools are missing.
std::optional<CommandResult> run_as_host(const fs::path& folder, const std::string& script,
                                         const std::string& network = "", const std::string& mask = "") {
  auto result = run(Words{"unshare", "--user", "--map-root-user", "--net", "--mount", "--uts", "sh", "-c"} +
                        Words{kHost + script},
                    {{"FOLDER", folder.string()},
                     {"NETWORK", network},
                     {"MASK", mask},
                     {"PROGRAM", built("rank_program")},
                     {"WORLD_SIZE", "2"},
                     {"MASTER_ADDR", "first"},
                     {"MASTER_PORT", "29500"}},
                    60);
  if (result.status == 77 || result.status == 127 || result.err.find("unshare: ") != std::string::npos)
    return {};
  return result;
}

TEST(HostNames, OneHostNamedByALoopbackAddress) {
  const auto plain =
      run_as_host(fresh_folder("plain"),
                  "become first second 192.168.77.2; RANK=1 $PROGRAM & RANK=0 $PROGRAM && wait $!");
  if (!plain) GTEST_SKIP() << "no namespaces here";
  EXPECT_EQ(plain->status, 0) << plain->err;
  for (const char* line :
       {"rank 0 of 2, local 0 of 2, by env, sum 1", "rank 1 of 2, local 1 of 2, by env, sum 1"})
    EXPECT_THAT(plain->out, HasSubstr(line)) << plain->err;

  const auto launched =
      run_as_host(fresh_folder("launched"),
                  "become first second 192.168.77.2; " + titan_program() + " launch -n 2 -- $PROGRAM");
  ASSERT_TRUE(launched);
  EXPECT_EQ(launched->status, 0) << launched->err;
  EXPECT_THAT(launched->out, HasSubstr("rank 0 of 2, local 0 of 2, by titan, sum 1")) << launched->err;
}

void expect_two_hosts_meet(const std::string& network, const std::string& mask) {
  const fs::path folder = fresh_folder(network);
  std::ofstream(folder / "second.sh") << kHost << kSecond;
  const auto both = run_as_host(folder, kFirst, network, mask);
  if (!both) GTEST_SKIP() << "no namespaces here, or no links between them";
  EXPECT_EQ(both->status, 0) << network << ": " << both->err;
  for (const char* line :
       {"rank 0 of 2, local 0 of 1, by env, sum 1", "rank 1 of 2, local 0 of 1, by env, sum 1"})
    EXPECT_THAT(both->out, HasSubstr(line)) << network << ": " << both->err;
}

// The first host reaches the store by its own name without leaving the host: its loopback address is
// useless to the second. Tested on either side of 127.0.1.1, as gloo lets the ranks of larger addresses
// connect to those of smaller ones.
TEST(HostNames, TwoHostsNamedByLoopbackAddresses) {
  for (const char* network : {"10.0.77.", "192.168.77."}) expect_two_hosts_meet(network, "/24");
}

TEST(HostNames, TwoHostsWithOnlyIpv6BetweenThem) { expect_two_hosts_meet("fd00:77::", "/64 nodad"); }

}  // namespace
}  // namespace titan::testing
