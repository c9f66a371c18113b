// Hosts whose own names are loopback addresses.

#include <optional>

#include <gtest/gtest.h>

#include "e2e/hosts.h"

namespace titan::testing {
namespace {

Command::Variables job(const std::string& network = "", const std::string& mask = "") {
  return {{"NETWORK", network}, {"MASK", mask},           {"PROGRAM", built("rank_program")},
          {"WORLD_SIZE", "2"},  {"MASTER_ADDR", "first"}, {"MASTER_PORT", "29500"}};
}

/// nullopt where it can't run.
std::optional<CommandResult> run_as_host(const fs::path& folder, const std::string& script) {
  auto result = start_host(folder, script, job()).wait(60);
  if (cannot_run_here(result)) return {};
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
  // The first serves the store. The other knows its name as the address of its end of the link.
  const CommandResult both = start_two_hosts(fresh_folder(network), "RANK=0 $PROGRAM && wait $second",
                                             "RANK=1 $PROGRAM", job(network, mask))
                                 .wait(60);
  if (cannot_run_here(both)) GTEST_SKIP() << "no namespaces here, or no links between them";
  EXPECT_EQ(both.status, 0) << network << ": " << both.err;
  for (const char* line :
       {"rank 0 of 2, local 0 of 1, by env, sum 1", "rank 1 of 2, local 0 of 1, by env, sum 1"})
    EXPECT_THAT(both.out, HasSubstr(line)) << network << ": " << both.err;
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
