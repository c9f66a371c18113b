// No second copy of a weight outlives its use by the layer: neither the casts that a product reads, nor the
// weights in bf16 or as gathered bytes that they were cast from.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include "distributed/float8_stack.h"
#include "distributed/recorded_calls.h"

namespace titan {
namespace {

using namespace titan::testing::stack;  // NOLINT: the test's own names
using testing::device;
using testing::world;

// Activations have other sizes than weights and a rank's parts of weights.
constexpr int64_t kWeight = kDim * kHidden, kBatch = 3, kSequence = 32;
static_assert(kBatch * kSequence * kDim != kWeight && kBatch * kSequence * kHidden != kWeight);

bool has_weights_size(int64_t numel) { return numel == kWeight || numel == kWeight / world().size(); }

// Tracks the memory of casts of weights during its lifetime.
class WeightCasts {
 public:
  void note(const std::string& name, const std::vector<c10::IValue>& outputs) {
    if (!name.starts_with("titan::float8_cast")) return;
    for (const c10::IValue& output : outputs) {
      if (output.isTensor()) {
        note(output.toTensor());
      } else {
        for (const at::Tensor& data : output.toTensorVector()) note(data);
      }
    }
  }
  int64_t num_alive() const {
    return std::count_if(casts_.begin(), casts_.end(), [](const auto& cast) { return !cast.expired(); });
  }
  size_t num_seen() const { return casts_.size(); }

 private:
  void note(const at::Tensor& data) {
    if (!data.defined() || data.is_meta() || !has_weights_size(data.numel())) return;
    casts_.emplace_back(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(data.storage().unsafeGetStorageImpl()));
  }

  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> casts_;
};

int64_t num_weights_with_memory(const StackBlock& block) {
  const auto& feed_forward = block->feed_forward;
  int64_t count = 0;
  for (const nn::Linear& linear : {feed_forward->w1, feed_forward->w2, feed_forward->w3})
    count += linear->weight.storage().nbytes() > 0;
  return count;
}

// Checks after each block's forward and backward. By then the next block's backward has gathered its weights.
void expect_no_copies(Case c) {
  SCOPED_TRACE(name_of(c));
  c.fsdp.prefetch = 0;  // only the block that runs is gathered
  Spread spread = make(c);
  auto scales = float8::DelayedScales::collect({spread.model.ptr().get()}, 16, device());
  WeightCasts casts;
  const testing::OperationWatch watch(
      [&](const std::string& name, const auto& outputs) { casts.note(name, outputs); });
  int num_looks = 0;
  const auto look = [&](const char* pass, int next) {
    SCOPED_TRACE(str("after a ", pass, ", before block ", next));
    ++num_looks;
    EXPECT_EQ(casts.num_alive(), 0);
    EXPECT_EQ(fsdp_stats(spread.model).gathered_groups, next >= 0 ? 1 : 0);
    for (int block = 0; block < kBlocks; ++block) {
      if (block == next) continue;
      EXPECT_EQ(num_weights_with_memory(spread.model->blocks[static_cast<size_t>(block)]), 0) << block;
    }
  };
  // A block's input gets its gradient when that block's backward ends.
  const auto look_after_backward = [&](const at::Tensor& read, int next) {
    read.register_hook([&look, next](const at::Tensor& gradient) {
      look("backward", next);
      return gradient;
    });
  };
  int num_forwards = 0;
  spread.model->after_block = [&](const at::Tensor& h) {
    look("forward", -1);
    if (const int block = num_forwards++ % kBlocks; block + 1 < kBlocks) look_after_backward(h, block);
  };
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor x = at::randn({kBatch, kSequence, kDim}).to(device(), at::kBFloat16).requires_grad_();
    look_after_backward(x, -1);
    loss_of(spread.model, x).backward();
    if (!scales.empty())
      scales.update([](const at::Tensor& pending) {
        world().everyone()->all_reduce(pending, dist::ReduceOp::Max, {"test::scales"}).wait();
      });
  }
  EXPECT_EQ(num_looks, kSteps * 2 * kBlocks);
  // Each weight is cast at least once per step; the emulation uses one cast in both products. Shards that are
  // gathered in Float8 are cast into the gather's buffer.
  if (!c.gather.in_float8) EXPECT_GE(casts.num_seen(), size_t{3 * kBlocks * kSteps});
}

TEST(Float8Memory, FreesCopiesOfAWeightAfterTheLayerUsesIt) {
  std::vector<StackLayout> all = layouts();
  if (world().size() > 1) all.push_back({.replicate = world().size()});  // each rank has whole shards
  for (const StackLayout& layout : all)
    for (const std::string& recipe : kRecipes)
      expect_no_copies({.recipe = recipe, .layout = layout, .fsdp = {.param_dtype = at::kBFloat16}});
}

TEST(Float8Memory, FreesGatheredBytesAfterTheLayerUsesThem) {
  for (const bool at_once : {false, true})
    expect_no_copies({.layout = {.shard = world().size()},
                      .gather = {.in_float8 = true, .scales_at_once = at_once},
                      .fsdp = {.param_dtype = at::kBFloat16}});
}

}  // namespace
}  // namespace titan
