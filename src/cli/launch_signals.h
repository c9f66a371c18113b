#pragma once

// The launcher's signals as reads of a descriptor, so that a child's end, a Ctrl-C and a line of output all
// come through one poll.

#include <signal.h>

namespace titan::cli {

/// As long as it lives, the signals that matter to a launcher do nothing but wait to be read; those that this
/// process was started to ignore do nothing at all. One at a time.
class SignalReader {
 public:
  SignalReader();
  ~SignalReader();
  SignalReader(const SignalReader&) = delete;
  SignalReader& operator=(const SignalReader&) = delete;

  int fd() const { return fd_; }
  /// The next signal, 0 when there is none. SIGHUP comes as SIGTERM: who hangs up wants an orderly end.
  int next() const;

 private:
  int fd_ = -1;
  sigset_t before_{};
  sighandler_t pipe_action_ = SIG_DFL;
  sighandler_t child_action_ = SIG_DFL;
};

}  // namespace titan::cli
