#include "parallel/fsdp/param_group.h"

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "parallel/interned.h"
#include "parallel/pipeline_runtime.h"
#include "tensor/memory.h"
#include "titan/core/crash.h"
#include "titan/core/error.h"
#include "titan/dist/device_mesh.h"
#include "titan/nn/layers.h"
#include "titan/parallel/fsdp.h"

namespace titan::fsdp {

namespace {

struct MeshGroups {
  int shard_size = 1;
  int shard_rank = 0;
  std::shared_ptr<dist::Group> gather;  ///< shard axis; null for one rank
  /// A separate group of the same ranks as `gather`: see [Note: order of collectives].
  std::shared_ptr<dist::Group> reduce;
  std::shared_ptr<dist::Group> replicate;     ///< null for one rank
  std::shared_ptr<dist::Group> small_gather;  ///< for ReshardAfterForward::to_size, else null
};

std::shared_ptr<dist::Group> small_group(const DeviceMesh& shard, int size) {
  TITAN_CHECK(size > 0 && shard.size() % size == 0, "fully_shard: reshard_after_forward to ", size,
              " ranks, but the shard axis has ", shard.size(), "; allowed: its divisors");
  if (size == 1 || size == shard.size()) return nullptr;
  const int first = shard.rank() / size * size;
  const std::vector<int> neighbors(shard.ranks().begin() + first, shard.ranks().begin() + first + size);
  return shard.world().group(neighbors, shard.axes()[0].name + ".gather" + std::to_string(size), "gather");
}

/// Collective over the world, as World::group. Throws Error for a mesh of more than two axes and for a size
/// that doesn't divide the shard axis.
MeshGroups mesh_groups(const DeviceMesh& mesh, const ReshardAfterForward& reshard) {
  TITAN_CHECK(mesh.num_axes() <= 2, "fully_shard: the mesh has ", mesh.num_axes(),
              " axes; allowed: (shard) or (replicate, shard)");
  MeshGroups groups;
  if (mesh.num_axes() == 0) return groups;
  const DeviceMesh shard = mesh[mesh.axes().back().name];
  groups.shard_size = shard.size();
  groups.shard_rank = shard.rank();
  if (shard.size() > 1) {
    groups.gather = shard.group();
    groups.reduce = shard.world().group(shard.ranks(), shard.axes()[0].name + ".reduce", "reduce");
    if (reshard.kind == ReshardAfterForward::Kind::ToSize)
      groups.small_gather = small_group(shard, reshard.size);
  }
  if (mesh.num_axes() == 2) {
    const DeviceMesh replicate = mesh[mesh.axes().front().name];
    if (replicate.size() > 1) groups.replicate = replicate.group();
  }
  return groups;
}

// Printed after a crash, because LibTorch reads a freed parameter through a null pointer.
constexpr const char* kCrashNote =
    "likely a sharded parameter used outside its module: parameters under fully_shard have memory only while "
    "their module runs; titan::parameters() returns the shards";

std::vector<std::vector<int64_t>> shapes_of(const std::vector<ManagedParam>& params) {
  std::vector<std::vector<int64_t>> shapes;
  for (const ManagedParam& param : params) shapes.push_back(param.compute.sizes().vec());
  return shapes;
}

// Slots are ordered: summands over a tensor-parallel axis, then whole gradients, then no gradients. The axis's ranks have
// equal summands, but their parts of other parameters may differ in size, and registered memory asks for a call's buffers at
// equal offsets.
struct SlotCounts {
  size_t summands = 0;
  size_t trainable = 0;
};

SlotCounts sort_slots(std::vector<ManagedParam>& params) {
  const auto frozen = std::stable_partition(params.begin(), params.end(),
                                            [](const ManagedParam& p) { return p.compute.requires_grad(); });
  const auto whole = std::stable_partition(params.begin(), frozen,
                                           [](const ManagedParam& p) { return p.summand_axis.has_value(); });
  return {static_cast<size_t>(whole - params.begin()), static_cast<size_t>(frozen - params.begin())};
}

std::shared_ptr<dist::Group> summand_group(const std::vector<ManagedParam>& params,
                                           const SlotCounts& counts) {
  if (counts.summands == 0) return nullptr;
  const ManagedParam& first = params[0];
  for (size_t i = 0; i < counts.summands; ++i)
    TITAN_CHECK(*params[i].summand_axis == *first.summand_axis, "fully_shard: parameters '", first.fqn,
                "' and '", params[i].fqn, "' of one group were parallelized over different axes");
  const DeviceMesh& axis = *first.summand_axis;
  return axis.world().group(axis.ranks(), axis.axes()[0].name + ".gradient", "gradient");
}

// The compute tensors of all groups, needed because a frozen one looks like any other leaf.
class ManagedTensors {
 public:
  static ManagedTensors& get() {
    static ManagedTensors tensors;
    return tensors;
  }
  bool contains(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    return tensors_.contains(tensor.unsafeGetTensorImpl());
  }
  void add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    tensors_.insert(tensor.unsafeGetTensorImpl());
  }
  void remove(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    tensors_.erase(tensor.unsafeGetTensorImpl());
  }

 private:
  std::mutex mutex_;
  std::unordered_set<const c10::TensorImpl*> tensors_;
};

void check_uniform(const std::vector<ManagedParam>& params) {
  for (const ManagedParam& param : params) {
    TITAN_CHECK(param.compute.dim() > 0, "fully_shard: parameter '", param.fqn,
                "' is a scalar, which can't be cut along dim 0; give it the shape [1]");
    TITAN_CHECK(
        !ManagedTensors::get().contains(param.compute), "fully_shard: parameter '", param.fqn,
        "' belongs to another group already; modules that share a parameter go into one fully_shard call");
    TITAN_CHECK(param.compute.is_leaf(), "fully_shard: parameter '", param.fqn,
                "' is computed from another tensor");
    TITAN_CHECK(param.compute.scalar_type() == params[0].compute.scalar_type() &&
                    param.compute.device() == params[0].compute.device(),
                "fully_shard: all parameters of a group need one dtype and device: '", params[0].fqn, "' is ",
                params[0].compute.scalar_type(), " on ", params[0].compute.device(), ", '", param.fqn,
                "' is ", param.compute.scalar_type(), " on ", param.compute.device());
  }
}

// Replaces a leaf's AccumulateGrad. Runs before all other ready nodes, so that a group has its gradients
// before its module's backward ends.
class GradientNode : public torch::autograd::Node {
 public:
  GradientNode(std::weak_ptr<ParamGroup> group, size_t slot)
      : Node(/*sequence_nr=*/UINT64_MAX), group_(std::move(group)), slot_(slot) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const auto group = group_.lock();
    if (group && grads[0].defined()) group->take_grad(slot_, grads[0], {});
    return {};
  }
  std::string name() const override { return "FsdpGradient"; }

 private:
  std::weak_ptr<ParamGroup> group_;
  size_t slot_;
};

// Makes gradients of `compute` arrive at group->take_grad(slot). `compute` becomes a non-leaf.
void attach_gradient_node(const at::Tensor& compute, std::weak_ptr<ParamGroup> group, size_t slot) {
  auto node = std::make_shared<GradientNode>(std::move(group), slot);
  const uint32_t input = node->add_input_metadata(compute);
  at::Tensor(compute).set_requires_grad(false);
  torch::autograd::impl::set_gradient_edge(compute, {std::move(node), input});
}

// Receives the weight gradients of products, bypassing autograd.
class GroupSink final : public ops::GradSink {
 public:
  GroupSink(std::weak_ptr<ParamGroup> group, size_t slot) : group_(std::move(group)), slot_(slot) {}
  void accept(ops::WeightGrad grad) override { compute_when_due(std::move(grad)); }
  void accept(ops::DueGradient grad) override { compute_when_due(std::move(grad)); }
  void accept(const at::Tensor& grad_OI, const at::Tensor& scale) override {
    if (const auto group = group_.lock()) group->take_grad(slot_, grad_OI, scale);
  }
  std::vector<at::Tensor> lend(at::ScalarType dtype) override {
    const auto group = group_.lock();
    return group ? group->lend_grad(slot_, dtype) : std::vector<at::Tensor>();
  }
  void accept_lent(const std::vector<at::Tensor>& blocks, const at::Tensor& scale) override {
    if (const auto group = group_.lock()) group->take_lent_grad(slot_, blocks, scale);
  }

 private:
  template <class Gradient>
  void compute_when_due(Gradient grad) {
    const auto group = group_.lock();
    if (!group) return;
    if (DelayedGradients* later = group->delayed()) return later->add(group, slot_, std::move(grad));
    group->take_grad(slot_, grad);
  }

  std::weak_ptr<ParamGroup> group_;
  size_t slot_;
};

// A layer's weight as it was gathered, in Float8.
class GatheredWeight final : public ops::WeightSource {
 public:
  GatheredWeight(std::weak_ptr<ParamGroup> group, size_t slot) : group_(std::move(group)), slot_(slot) {}
  ops::Operand weight() const override {
    const auto group = group_.lock();
    TITAN_CHECK(group, "a weight that was gathered in Float8 is used after its model was destroyed");
    return group->float8_weight(slot_);
  }

 private:
  std::weak_ptr<ParamGroup> group_;
  size_t slot_;
};

}  // namespace

std::shared_ptr<ParamGroup> ParamGroup::create(std::vector<ManagedParam> params, const FsdpOptions& options) {
  check_uniform(params);
  std::shared_ptr<ParamGroup> group(new ParamGroup(std::move(params), options));
  for (const ManagedParam& param : group->params_) ManagedTensors::get().add(param.compute);
  group->make_shards();
  group->connect_gradients();
  return group;
}

ParamGroup::~ParamGroup() {
  for (const ManagedParam& param : params_) ManagedTensors::get().remove(param.compute);
  if (!context_) return;
  context_->remove_group(this);
  leave();
}

// After an exception, a gather or a reduction may still be running that nobody waits for: the memory goes back
// to the allocator when it has ended.
void ParamGroup::leave() {
  leave_stream(gather_work_, context_->gather_stream, {flat_shard_, packed_, full_, kept_part_});
  gradients_.leave();
  context_ = nullptr;
}

ParamGroup::ParamGroup(std::vector<ManagedParam> params, const FsdpOptions& options)
    : options_(options),
      dtype_(params[0].compute.scalar_type()),
      param_dtype_(options.param_dtype.value_or(dtype_)),
      device_(params[0].compute.device()),
      params_(std::move(params)),
      layout_({}, 0, 1),
      gradients_(layout_, shards_) {
  const SlotCounts counts = sort_slots(params_);
  const MeshGroups groups = mesh_groups(options.mesh, options.reshard_after_forward);
  layout_ = ShardLayout(shapes_of(params_), counts.trainable, groups.shard_size);
  shard_rank_ = groups.shard_rank;
  find_float8_weights();
  gather_group_ = groups.gather;
  small_gather_group_ = groups.small_gather;
  gradients_.configure({.grad_dtype = dtype_,
                        .reduce_dtype = options.reduce_dtype.value_or(param_dtype_),
                        .device = device_,
                        .reduce_every_micro_batch = options.reduce_every_micro_batch,
                        .to_host = options.cpu_offload,
                        .shard_group = groups.reduce,
                        .replicate_group = groups.replicate,
                        .summand_group = summand_group(params_, counts),
                        .num_summands = counts.summands});
  backward_reads_parameters_ = std::any_of(params_.begin(), params_.end(), [](const ManagedParam& param) {
    return std::any_of(param.uses.begin(), param.uses.end(), [](const ManagedParam::Use& use) {
      return !use.host || use.host->backward_reads_parameters();
    });
  });
}

void ParamGroup::make_shards() {
  at::NoGradGuard no_grad;
  const at::Device home = options_.cpu_offload ? at::Device(at::kCPU) : device_;
  flat_shard_ = deferred_tensor({layout_.shard_numel()}, at::TensorOptions().dtype(dtype_).device(home));
  for (size_t i = 0; i < params_.size(); ++i) {
    std::vector<int64_t> sizes = layout_.slots()[i].shape;
    sizes[0] = layout_.rows_of(i, shard_rank_).length;
    shards_.push_back(part_of(flat_shard_, layout_.slots()[i].offset, sizes));
    shards_.back().set_requires_grad(layout_.slots()[i].trainable);
  }
  take_initial_values();
  empty_compute_params();
}

// Parameters with values keep them: each rank takes its rows of its own copy. As in FSDP2, copies must be
// equal on all ranks.
void ParamGroup::take_initial_values() {
  const auto has_values = [](const ManagedParam& param) {
    return !is_deferred(param.compute) && param.compute.numel() > 0;
  };
  if (device_.is_meta() || std::none_of(params_.begin(), params_.end(), has_values)) return;
  for (const ManagedParam& param : params_)
    TITAN_CHECK(!is_deferred(param.compute),
                "fully_shard: some parameters of one group have values and some (", param.compute.sizes(),
                ") are deferred; construct all of them the same way");
  allocate_shards();
  for (size_t i = 0; i < params_.size(); ++i) {
    const Chunk rows = layout_.rows_of(i, shard_rank_);
    if (rows.length > 0)
      shards_[i].variable_data().copy_(params_[i].compute.detach().narrow(0, rows.offset, rows.length));
  }
}

void ParamGroup::empty_compute_params() {
  set_crash_note(kCrashNote);
  for (ManagedParam& param : params_) {
    const auto options = at::TensorOptions().dtype(param_dtype_).device(device_);
    param.compute.set_data(deferred_tensor(param.compute.sizes(), options));
  }
}

// Gradients arrive through the group's own node. That makes the compute parameter a non-leaf, so LibTorch
// itself refuses an optimizer over it.
void ParamGroup::connect_gradients() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (float8_.find(i) >= 0)
      for (const ManagedParam::Use& use : params_[i].uses)
        dynamic_cast<nn::LinearImpl&>(*use.host).set_weight_source(
            std::make_shared<GatheredWeight>(weak_from_this(), i));
    if (!layout_.slots()[i].trainable) continue;
    attach_gradient_node(params_[i].compute, weak_from_this(), i);
    auto sink = std::make_shared<GroupSink>(weak_from_this(), i);
    for (const ManagedParam::Use& use : params_[i].uses)
      if (use.host) use.host->set_grad_sink(use.name, sink);
  }
}

bool ParamGroup::allocate_shards() {
  if (layout_.shard_numel() == 0 || param_storage::bytes(flat_shard_) > 0) return false;
  at::NoGradGuard no_grad;
  if (options_.cpu_offload) {
    param_storage::bind(flat_shard_, host_empty(layout_.shard_numel(), dtype_, device_), 0);
  } else {
    param_storage::allocate(flat_shard_);
  }
  if (!device_.is_meta() && layout_.has_padding()) flat_shard_.zero_();
  return true;
}

void ParamGroup::join(CommContext& context, const std::string& name) {
  context_ = &context;
  name_ = interned(name);
  context.add_group(this);
  if (options_.cpu_offload) context.expect_host_shards();
  if (options_.register_buffers && !device_.is_meta()) register_buffers();
  gradients_.join(context, name_);
  takes_batches_ = gather_group_ && gather_group_->has_batches(device_);
}

void ParamGroup::register_buffers() {
  dist::RegisteredMemory& memory = context_->pool.use_registered();
  for (const auto& group : {gather_group_, small_gather_group_})
    if (group) group->add_to(memory);
  gradients_.add_groups_to(memory);
}

DTensor ParamGroup::shard(size_t slot) const {
  const Slot& layout = layout_.slots()[slot];
  DTensor result;
  result.local = shards_[slot];
  result.mesh = options_.mesh;
  result.placements.assign(static_cast<size_t>(options_.mesh.num_axes()), Placement::replicate());
  if (!result.placements.empty()) result.placements.back() = Placement::shard(0);
  result.global_shape = layout.shape;
  const Chunk rows = layout_.rows_of(slot, shard_rank_);
  result.box.offset.assign(layout.shape.size(), 0);
  result.box.offset[0] = rows.offset;
  result.box.length = layout.shape;
  result.box.length[0] = rows.length;
  return result;
}

int64_t ParamGroup::find(const at::Tensor& compute) const {
  for (size_t i = 0; i < params_.size(); ++i)
    if (params_[i].compute.is_same(compute)) return static_cast<int64_t>(i);
  return -1;
}

// The engine runs a parameter's node on the stream that was current when the parameter was made. The caller
// frees `read` when it returns, and the allocator knows only the stream that a tensor was made on.
dist::StreamGuard ParamGroup::on_forward_stream(at::TensorList read) const {
  const dist::Stream current = compute_stream();
  if (!(current == forward_stream_)) {
    forward_stream_.wait(current);
    for (const at::Tensor& tensor : read)
      if (tensor.defined() && tensor.device() == device_) forward_stream_.keep_alive(tensor);
  }
  return dist::StreamGuard(forward_stream_);
}

void ParamGroup::take_grad(size_t slot, const at::Tensor& grad, const at::Tensor& scale) {
  const dist::StreamGuard guard = on_forward_stream({grad, scale});
  gradients_.add(slot, grad, scale);
}

void ParamGroup::take_grad(size_t slot, const ops::WeightGrad& grad) {
  {
    std::vector<at::Tensor> read;
    for (const ops::Operand* operand : {&grad.grad_output_NO, &grad.input_NI}) {
      read.push_back(operand->values);
      for (const ops::ScaledMatrix* form : {&operand->along_rows, &operand->down_columns})
        read.insert(read.end(), {form->data, form->scale, form->inverse});
    }
    const dist::StreamGuard guard = on_forward_stream(read);
    if (gradients_.put(slot, grad)) return;
  }
  take_grad(slot, grad.compute(), {});
}

void ParamGroup::take_lent_grad(size_t slot, const std::vector<at::Tensor>& blocks, const at::Tensor& scale) {
  const dist::StreamGuard guard = on_forward_stream(scale);
  gradients_.add_lent(slot, blocks, scale);
}

}  // namespace titan::fsdp
