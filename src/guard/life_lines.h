#pragma once

// Evidence that another rank is gone, for calls that no socket ends: those of NCCL, and all calls to a host
// that has lost its power or its network.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "guard/mail.h"

namespace titan::dist {

/// A ring of TCP connections: each rank holds one to the next rank and one from the previous. When a process
/// ends, its kernel closes them at once; when a host ends, it leaves probes unanswered for some seconds. A
/// stopped process keeps its lines, because its kernel answers for it. A rank whose last beat reports its end
/// isn't lost: it reports that before it closes its lines. Each rank holds a line to rank 0, too: when the
/// host with the job's store is lost, no neighbor can tell the others.
class LifeLines {
 public:
  struct Loss {
    std::vector<int> ranks;  ///< with a host: those on it, as far as the store still says so
    std::string how;         ///< "its process is gone", "host node7 is gone (Connection timed out)"
    bool is_host = false;
  };

  /// Lays the lines in the background. `connect`: as Mail's.
  LifeLines(Mail::Connect connect, int rank, int size);
  ~LifeLines();

  /// The first loss at the other end of a line.
  std::optional<Loss> loss() const;
  /// Whether both lines have been laid.
  bool are_laid() const;

 private:
  class Ring;
  std::shared_ptr<Ring> ring_;  // shared with the thread, which may outlive this object
  std::unique_ptr<SideThread> thread_;
};

}  // namespace titan::dist
