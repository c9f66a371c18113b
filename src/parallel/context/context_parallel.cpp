#include "titan/parallel/context_parallel.h"

#include <algorithm>
#include <array>
#include <optional>

#include <torch/nn/module.h>

#include "parallel/context/distributed_attention.h"
#include "parallel/interned.h"
#include "titan/core/error.h"
#include "titan/nn/containers.h"

namespace titan {

namespace {

using context::SequenceLayout;

bool is_of_sequences(const at::Tensor& input) { return input.scalar_type() == at::kLong && input.dim() == 2; }

// Cuts whole sequences down to this rank's tokens when the root is called. Hidden states from an earlier
// pipeline stage have only this rank's tokens already.
class CutSequences final : public nn::CallHook {
 public:
  CutSequences(SequenceLayout layout, int rank, bool expects_tokens, std::shared_ptr<nn::CallHook> inner)
      : layout_(layout), rank_(rank), expects_tokens_(expects_tokens), inner_(std::move(inner)) {}

  void pre_forward(nn::HookHost& host, const nn::TensorRefs& inputs) override {
    const std::optional<int64_t> length = length_of(host, inputs);
    if (length) layout_.check_length(*length);
    for (at::Tensor* input : inputs)
      if (is_of_sequences(*input)) *input = layout_.part(*input, 1, rank_);
    TITAN_CHECK(length || !expects_tokens_, "context_parallel: module '", host.fqn(),
                "' was called without an int64 tensor of [batch, sequence] whose tokens could be spread over "
                "the ranks");
    if (inner_) inner_->pre_forward(host, inputs);
  }

 private:
  static std::optional<int64_t> length_of(const nn::HookHost& host, const nn::TensorRefs& inputs) {
    std::optional<int64_t> length;
    for (const at::Tensor* input : inputs) {
      if (!is_of_sequences(*input)) continue;
      TITAN_CHECK(
          !length || *length == input->size(1), "context_parallel: module '", host.fqn(),
          "' was called with int64 tensors of [batch, ", *length, "] and [batch, ", input->size(1),
          "]; all int64 tensors of two dimensions are cut as sequences and must have the same length");
      length = input->size(1);
    }
    return length;
  }

  SequenceLayout layout_;
  int rank_;
  bool expects_tokens_;
  std::shared_ptr<nn::CallHook> inner_;  // the slot's previous hook
};

// Caches the positions for recent lengths: those of training and of validation.
class LocalPositions final : public nn::TokenPositions {
 public:
  LocalPositions(SequenceLayout layout, int rank) : layout_(layout), rank_(rank) {}

  const at::Tensor& of(int64_t num_tokens, at::Device device) override {
    for (const at::Tensor& known : known_)
      if (known.defined() && known.size(0) == num_tokens && known.device() == device) return known;
    at::Tensor& oldest = known_[next_++ % known_.size()];
    return oldest = layout_.positions(rank_, num_tokens, device);
  }

 private:
  SequenceLayout layout_;
  int rank_;
  std::array<at::Tensor, 8> known_;
  size_t next_ = 0;
};

}  // namespace

void context_parallel(const nn::AnyRef& root, const DeviceMesh& axis, const ContextParallelOptions& options) {
  if (axis.size() == 1) return;
  TITAN_CHECK(axis.num_axes() == 1, "context_parallel: expected a mesh of one axis, got ", axis.num_axes());
  TITAN_CHECK(!is_context_parallel(root), "context_parallel: the sequences of module '", root.host().fqn(),
              "' or of one below it are spread over ranks already");
  const std::shared_ptr<dist::Group> group = axis.group();
  const SequenceLayout layout(group->size(), options.load_balancer);
  const std::shared_ptr<context::DistributedAttention> attention =
      context::make_attention(axis, layout, options);
  const auto positions = std::make_shared<LocalPositions>(layout, group->rank());

  int num_users = 0;
  for (const auto& named : root.module().named_modules()) {
    torch::nn::Module& module = *named.value();
    if (auto* user = dynamic_cast<nn::PositionUser*>(&module)) user->set_token_positions(positions);
    if (auto* user = dynamic_cast<nn::AttentionUser*>(&module)) {
      user->set_attention_core(std::make_shared<context::ContextCore>(attention, interned(named.key())));
      ++num_users;
    }
  }
  const nn::LayerSequence* sequence = nn::layer_sequence(root);
  const bool is_part = sequence && !sequence->is_whole();
  TITAN_CHECK(
      num_users > 0 || is_part, "context_parallel: no module below '", root.host().fqn(),
      "' attends through a core (nn::Attention does; your own module must implement nn::AttentionUser)");
  auto& slot = root.host().prepare_input_hook;
  slot = std::make_shared<CutSequences>(layout, group->rank(), !is_part || sequence->is_first(), slot);
}

Parallelism context_parallelism(const ContextParallelOptions& options) {
  return {.axis = {.name = "cp", .kind = "context"},
          .apply = [options](const nn::AnyRef& root,
                             const DeviceMesh& axis) { context_parallel(root, axis, options); },
          .is_applied = is_context_parallel};
}

ContextParallelOptions ContextParallelSettings::options() const {
  using Rotate = ContextRotateMethod;
  return {.load_balancer =
              load_balancer == "headtail" ? ContextLoadBalancer::HeadTail : ContextLoadBalancer::None,
          .rotate_method = rotate_method == "allgather"  ? Rotate::AllGather
                           : rotate_method == "alltoall" ? Rotate::AllToAll
                                                         : Rotate::SymmetricMemory,
          .attention = attention == "ring" ? ContextAttention::Ring : ContextAttention::AllGatherKv};
}

void describe(config::Table<ContextParallelSettings>& table) {
  using Settings = ContextParallelSettings;
  config::Constraint balancers = config::one_of({"headtail", "None"});
  balancers.allowed += " (\"ptrr\" balances the block masks of flex attention, which isn't here)";
  table.field("degree", &Settings::degree,
              "ranks that share each sequence, or \"auto\": the plan's choice for the ranks of --nproc "
              "(docs/plan.md)",
              config::positive_or_auto());
  table.field("load_balancer", &Settings::load_balancer,
              "how a sequence is divided: an early and a late chunk for each rank, or contiguous parts",
              balancers);
  table.field("rotate_method", &Settings::rotate_method,
              "how keys and values reach the other ranks: gathered at once, or passed around the ring, by "
              "messages or by copies between GPUs that NVLink connects",
              config::one_of({"allgather", "alltoall", "symmetric_memory"}));
  table.field("attention", &Settings::attention,
              "keys arrive block by block (\"ring\", which has the rotate method), or all at once before any "
              "attention: fewer collectives, for short sequences on fast links",
              config::one_of({"ring", "allgather_kv"}));
}

std::shared_ptr<const ParallelismSpec> context_parallelism_spec() {
  using Settings = ContextParallelSettings;
  ParallelismKind<Settings> kind;
  kind.axis = "cp";
  kind.apply = [](const nn::AnyRef& root, const DeviceMesh& axis, const Settings& settings) {
    context_parallel(root, axis, settings.options());
  };
  kind.is_applied = is_context_parallel;
  kind.parts_per_rank = [](const Settings& settings) {
    return settings.options().load_balancer == ContextLoadBalancer::HeadTail ? 2 : 1;
  };
  kind.find_problems = [](const Settings& settings) -> std::vector<SettingProblem> {
    if (settings.attention == "ring" || settings.rotate_method == "allgather") return {};
    return {{"context_parallel_rotate_method", str("is for ring attention; context_parallel_attention = \"",
                                                   settings.attention, "\" supports \"allgather\" only")}};
  };
  kind.key_prefix = "context_parallel_";
  kind.always_in_mesh = true;
  return std::make_shared<const detail::ParallelismOf<Settings>>("context", std::move(kind));
}

bool is_context_parallel(const nn::AnyRef& root) {
  const auto hosts = nn::hook_hosts(root.module());
  return std::any_of(hosts.begin(), hosts.end(), [](const nn::HookHost* host) {
    return dynamic_cast<CutSequences*>(host->prepare_input_hook.get()) != nullptr;
  });
}

}  // namespace titan
