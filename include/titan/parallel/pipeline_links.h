#pragma once

// The ways between pipeline ranks: one for each direction between two ranks, so that what travels one way
// waits for nothing that travels the other.

#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

/// One direction between this rank and another. Messages arrive in the order in which they are sent, so both
/// sides have to call in one order.
class Link {
 public:
  Link() = default;
  Link(std::shared_ptr<dist::Group> group, int peer) : group_(std::move(group)), peer_(peer) {}
  /// Contiguous; on its way until the Work is waited for, which holds the tensor.
  dist::Work send(const at::Tensor& tensor, const char* label) const;
  dist::Work receive(const at::Tensor& tensor, const char* label) const;
  /// Several messages in one call: dist::Group's of these names.
  bool has_batches(at::Device device) const { return group_->has_batches(device); }
  dist::Work send(const std::vector<at::Tensor>& tensors, const char* label) const;
  dist::Work receive(const std::vector<at::Tensor>& tensors, const char* label) const;
  void close() const { group_->close(); }

 private:
  std::shared_ptr<dist::Group> group_;
  int peer_ = -1;
};

class Links {
 public:
  Links() = default;  ///< of one rank
  /// `pp`: one axis. Collective over it, as connect().
  explicit Links(DeviceMesh pp) : pp_(std::move(pp)) {}
  /// Makes the links that a schedule's stages need, where they don't exist yet.
  void connect(const Schedule& schedule);
  /// To or from the rank at this position of the mesh; connect() has made it.
  const Link& to(int rank) const { return links_.at({pp_.rank(), rank}); }
  const Link& from(int rank) const { return links_.at({rank, pp_.rank()}); }
  /// For good: dist::Group::close(), of all links.
  void close() const;
  const DeviceMesh& mesh() const { return pp_; }

 private:
  DeviceMesh pp_;
  std::map<std::pair<int, int>, Link> links_;  // by sender and receiver
};

}  // namespace titan::pipeline
