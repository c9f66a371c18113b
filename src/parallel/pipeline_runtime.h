#pragma once

// The links between pipeline ranks: one for each direction between two ranks, so that messages in one
// direction never wait for those in the other.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"
#include "titan/nn/hooks.h"
#include "titan/ops/linear.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

/// One direction between this rank and another. Messages arrive in the order in which they are sent, so both
/// sides make their calls in the same order.
struct Link {
  std::shared_ptr<dist::Group> group;
  int peer = -1;
};

class Links {
 public:
  Links() = default;  ///< for a pipeline of one rank
  /// `pp` is a mesh of one axis. Collective over it, as is connect().
  explicit Links(DeviceMesh pp) : pp_(std::move(pp)) {}
  /// Makes the links that a schedule's stages need and that don't exist yet.
  void connect(const Schedule& schedule);
  /// The link to or from the rank at this position of the mesh. connect() must have made it.
  const Link& to(int rank) const { return links_.at({pp_.rank(), rank}); }
  const Link& from(int rank) const { return links_.at({rank, pp_.rank()}); }
  /// Closes all links for good (dist::Group::close()).
  void close() const;
  const DeviceMesh& mesh() const { return pp_; }

 private:
  DeviceMesh pp_;
  std::map<std::pair<int, int>, Link> links_;  // by sender and receiver
};

}  // namespace titan::pipeline

namespace titan {

// A pipeline stage's parameters are gathered and reduced by a schedule's actions instead of by the hooks
// around each module, so forwards and backwards of micro-batches may run in any order in between.

namespace fsdp {
class CommContext;
class ParamGroup;
}  // namespace fsdp

/// Delayed weight gradients of one backward, the W of a schedule that splits its backwards. Holds their
/// operands, which are a layer's input and the gradient of its output, and the groups that receive them.
class DelayedGradients {
 public:
  using Gradient = std::variant<ops::WeightGrad, ops::DueGradient>;

  void add(std::shared_ptr<fsdp::ParamGroup> group, size_t slot, Gradient gradient) {
    entries_.push_back({std::move(group), slot, std::move(gradient)});
  }
  /// Computes the gradients, adds them to those that their groups have collected, and frees the operands. Calls `added`, if
  /// given, after each.
  void compute(const std::function<void(fsdp::ParamGroup&)>& added = {});
  /// Number of gradients that each group will receive.
  std::map<fsdp::ParamGroup*, size_t> count_by_group() const;
  size_t size() const { return entries_.size(); }
  /// Bytes of the operands, counting each storage once.
  int64_t bytes() const;

 private:
  struct Entry {
    std::shared_ptr<fsdp::ParamGroup> group;
    size_t slot = 0;
    Gradient gradient;
  };
  std::vector<Entry> entries_;
};

/// Permanently takes control of the groups that fully_shard made at and below a root: from now on, the calls
/// below gather, free and reduce them instead of their hooks. All ranks of their meshes make the same calls
/// in the same order. Whole gradients are kept from one backward to the next until reduce(). A root without
/// fully_shard is left as it is, and all calls do nothing.
class ScheduledSharding {
 public:
  explicit ScheduledSharding(nn::AnyRef root);
  ~ScheduledSharding();
  ScheduledSharding(ScheduledSharding&&) noexcept;

  /// Starts gathering all groups that aren't gathered. The first forward or wait() waits for it.
  void unshard();
  void wait();
  /// Frees the gathered parameters.
  void reshard();
  /// Starts summing this step's gradients over the data-parallel ranks; no backward may follow before
  /// finish().
  void reduce();
  /// Forwards between set_last_forward(true) and set_last_forward(false) are those whose backward will be the last before
  /// reduce(). Then that backward starts to reduce each group as soon as its gradients are complete, in the order in
  /// which reduce() does; reduce() starts the rest.
  void set_last_forward(bool last);
  /// Called after that backward.
  void end_last_backward();
  /// The same for a step's last delayed weight gradients: computes them, and starts to reduce the groups one by one.
  void compute_last(DelayedGradients& delayed);
  /// Waits for reduce() and frees parameters that are still gathered, so that the optimizer may write.
  void finish();
  /// Drops gradients that were collected but not reduced, after an abandoned step.
  void discard();

  /// Until stop_delaying(), weight gradients of products and embeddings go into `target`. Those of norms,
  /// which are computed together with the input's gradient, and of weights without a sink are computed at
  /// once.
  void delay_weight_gradients(DelayedGradients& target);
  void stop_delaying();

 private:
  nn::AnyRef root_;
  std::vector<std::shared_ptr<fsdp::CommContext>> contexts_;  // several only if the root isn't sharded itself
};

}  // namespace titan
