#pragma once

// Hosts that are built from the kernel's namespaces: each has its own network, name and table of names, and a
// link to the other.

#include <fstream>
#include <string>

#include "e2e/training.h"

namespace titan::testing {

// become NAME OTHER'S_NAME OTHER'S_ADDRESS: a host's set-up, with a name of its own, or $SHARED_NAME, that is a loopback
// address: 127.0.1.1, as in Debian's /etc/hosts; await FILE: waits for what the other host does.
inline constexpr const char* kHost = R"(
become() {
  hostname ${SHARED_NAME:-$1} && ip link set lo up || exit 77
  printf '127.0.0.1 localhost\n127.0.1.1 %s\n%s %s\n' "$1 $SHARED_NAME" $3 $2 > $FOLDER/hosts.$1
  mount --bind $FOLDER/hosts.$1 /etc/hosts || exit 77
  getent hosts $1 | grep -q '^127\.0\.1\.1 ' || exit 77
}
await() {
  for i in $(seq ${2:-1000}); do [ -e $FOLDER/$1 ] && return; sleep 0.02; done
  echo "$1 didn't come" >&2; exit 1
}
)";

// The hosts "first" and "second" up to their link, whose own end is $END.
inline constexpr const char* kFirst = R"(
ip link add end1 type veth peer name end2 || exit 77
unshare --net --mount --uts sh $FOLDER/second.sh & second=$!
await second_is_there
ip link set end2 netns $second && touch $FOLDER/linked || exit 77
become first second ${NETWORK}2
ip addr add ${NETWORK}1$MASK dev end1 && ip link set end1 up
await second_is_up
END=end1
)";
inline constexpr const char* kSecond = R"(
touch $FOLDER/second_is_there
await linked
become second first ${NETWORK}1
ip addr add ${NETWORK}2$MASK dev end2 && ip link set end2 up && touch $FOLDER/second_is_up
END=end2
)";

/// Starts a host.
inline Command start_host(const fs::path& folder, const std::string& script, Command::Variables variables) {
  variables["FOLDER"] = folder.string();
  return Command(Words{"unshare", "--user", "--map-root-user", "--net", "--mount", "--uts", "sh", "-c"} +
                     Words{kHost + script},
                 variables);
}

/// Starts the first host, which starts the second; once they are linked, each runs its script.
inline Command start_two_hosts(const fs::path& folder, const std::string& on_first,
                               const std::string& on_second, const Command::Variables& variables) {
  std::ofstream(folder / "second.sh") << kHost << kSecond << on_second;
  return start_host(folder, kFirst + on_first, variables);
}

/// Whether namespaces or the tools are missing.
inline bool cannot_run_here(const CommandResult& result) {
  return result.status == 77 || result.status == 127 || result.err.find("unshare: ") != std::string::npos;
}

}  // namespace titan::testing
