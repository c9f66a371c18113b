#pragma once

// Evidence that another rank is gone, for calls that no socket ends: those of NCCL, and all calls to a host
// that has lost its power or its network.

#include <memory>
#include <optional>
#include <string>

#include "guard/mail.h"

namespace titan::dist {

/// A ring of TCP connections: each rank holds one to the next rank and one from the previous. When a process
/// ends, its kernel closes them at once; when a host ends, it leaves probes unanswered for some seconds. A
/// stopped process keeps its lines, because its kernel answers for it. A rank whose last beat reports its end
/// isn't lost: it reports that before it closes its lines.
class LifeLines {
 public:
  struct Loss {
    int rank = -1;
    std::string how;  ///< "its process is gone"
  };

  /// Lays the lines in the background. `connect`: as Mail's.
  LifeLines(Mail::Connect connect, int rank, int size);
  ~LifeLines();

  /// The first neighbor that was lost.
  std::optional<Loss> loss() const;
  /// Whether both lines have been laid.
  bool are_laid() const;

 private:
  class Ring;
  std::shared_ptr<Ring> ring_;  // shared with the thread, which may outlive this object
  std::unique_ptr<SideThread> thread_;
};

}  // namespace titan::dist
