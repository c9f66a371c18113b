// The bytes that ranks send in Float8, and the values that they represent.

#include "distributed/float8_stack.h"
#include "distributed/recorded_calls.h"
#include "float8/cast.h"
#include "parallel/fsdp/fsdp_state.h"

namespace titan {
namespace {

using namespace titan::testing::stack;  // NOLINT: the test's own names
using testing::calls_of;
using testing::world;

int64_t gathered_bytes(const Spread& spread) {
  at::NoGradGuard no_grad;
  int64_t sum = 0;
  for (const auto& call : calls_of("fsdp::all_gather", [&] { spread.model(global_batch()); }))
    sum += call.bytes;
  return sum;
}

// The elements of [rows, columns] that the ranks send: chunks of whole rows, padded to multiples of 16 elements
// where all parameters go in one gather.
int64_t padded(int64_t rows, int64_t columns) {
  const int64_t ranks = world().size(), chunk = (rows + ranks - 1) / ranks * columns;
  return ranks * (world().everyone()->has_batches(device()) ? chunk : (chunk + 15) / 16 * 16);
}

TEST(Float8, SendsHalfTheBytesOfBf16) {
  if (world().size() == 1) GTEST_SKIP() << "one rank sends nothing";
  const auto bytes = [](bool in_float8, bool mixed) {
    return gathered_bytes(make({.layout = {.shard = world().size()},
                                .gather = {.in_float8 = in_float8},
                                .fsdp = {.param_dtype = at::kBFloat16},
                                .mixed = mixed}));
  };
  const int64_t weights = kBlocks * (2 * padded(kHidden, kDim) + padded(kDim, kHidden));
  const int64_t others = kBlocks * (padded(kDim, kDim) + padded(kDim, 1));
  EXPECT_EQ(bytes(false, false), 2 * weights);
  EXPECT_EQ(bytes(true, false), weights);
  EXPECT_EQ(bytes(false, true), 2 * (weights + others));
  EXPECT_EQ(bytes(true, true), weights + 2 * others);
}

// A product reads the cast of the whole fp32 weight; weights that aren't sent in Float8 are in bf16. Also
// with unevenly divided rows, and with a part that was kept on a smaller mesh.
TEST(Float8, GatheredBytesAreTheCastOfTheWholeWeight) {
  if (world().size() == 1) GTEST_SKIP() << "one rank sends nothing";
  const bool fours = world().size() == 4;
  const Spread spread = make({.layout = {.shard = world().size()},
                              .gather = {.in_float8 = true},
                              .fsdp = {.param_dtype = at::kBFloat16,
                                       .reshard_after_forward = fours ? ReshardAfterForward::to_size(2)
                                                                      : ReshardAfterForward::always()},
                              .mixed = true});
  {
    at::NoGradGuard no_grad;
    spread.model(global_batch());  // the first forward connects the groups
  }
  std::map<std::string, at::Tensor> whole;
  for (const Parameter& parameter : parameters(spread.model))
    whole[parameter.name] = full_tensor(parameter.data);
  int compared = 0;
  for (int block = 0; block < kBlocks; ++block) {
    const StackBlock& ref = spread.model->blocks[static_cast<size_t>(block)];
    const auto group = fsdp::states_below(*ref.ptr()).front()->group();
    for (int time = 0; time < 2; ++time) {
      group->start_unshard();
      group->finish_unshard();
      for (size_t slot = 0; slot < group->num_params(); ++slot) {
        const std::string name = str("blocks.", block, ".", group->param(slot).fqn);
        const at::Tensor& values = whole.at(name);
        if (name.find("feed_forward") == std::string::npos) {
          EXPECT_TRUE(at::equal(group->param(slot).compute.detach(), values.to(at::kBFloat16))) << name;
          continue;
        }
        const at::Tensor scale =
            float8::scale_of(float8::amax(values, float8::Over::Matrix), at::kFloat8_e4m3fn, false);
        const at::Tensor wanted = float8::cast(values, scale, at::kFloat8_e4m3fn, false);
        const ops::ScaledMatrix got = group->float8_weight(slot).along_rows;
        EXPECT_TRUE(at::equal(got.scale, scale)) << name;
        EXPECT_TRUE(at::equal(got.data.view(at::kByte), wanted.view(at::kByte))) << name;
        ++compared;
      }
      group->after_forward();
    }
  }
  EXPECT_EQ(compared, 2 * 3 * kBlocks);
}

TEST(Float8, DoesNotGatherAWeightThatIsCastInTwoWays) {
  EXPECT_THROW(
      make({.recipe = "rowwise", .layout = {.shard = world().size()}, .gather = {.in_float8 = true}}), Error);
}

// The number of a block's gathers, of an input and of a gradient, that are sent as bytes.
int64_t num_narrow_gathers(const std::string& recipe) {
  if (recipe == "tensorwise") return 2 * kBlocks;
  return recipe == "delayed" ? kBlocks : 0;
}

// w1 and w3 share a gather of their input, and w2's gradient is gathered in the backward, with one byte per
// element if one cast serves all the products. (With delayed scales, w1 and w3 have separate casts.) Sums
// stay in bf16.
TEST(Float8, SendsActivationsAsBytes) {
  if (world().size() != 2) GTEST_SKIP() << "needs two ranks";
  for (const std::string& recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    const Spread spread = make({.recipe = recipe,
                                .layout = {.tp = 2, .plan = sequence_plan()},
                                .fsdp = {.param_dtype = at::kBFloat16},
                                .mixed = true});
    const int64_t elements = kRows * kLength * kDim, wide = 2 * elements;
    const auto step = [&] { loss_of(spread.model, global_batch().to(at::kBFloat16)).backward(); };
    int64_t gathers = 0, scatters = 0;
    int64_t narrow = 0;
    for (const auto& call : calls_of("tp::gather", step)) {
      EXPECT_TRUE(call.bytes == elements || call.bytes == wide) << call.bytes;
      narrow += call.bytes == elements;
      ++gathers;
    }
    EXPECT_EQ(narrow, num_narrow_gathers(recipe));
    for (const auto& call : calls_of("tp::reduce_scatter", step)) {
      EXPECT_EQ(call.bytes, wide);
      ++scatters;
    }
    EXPECT_EQ(gathers, 2 * kBlocks);
    EXPECT_EQ(scatters, 2 * kBlocks);
  }
}

// The same bytes in asynchronous tensor parallelism, with one rank's part per message.
TEST(Float8, SendsPartsOfActivationsAsBytes) {
  if (world().size() != 2) GTEST_SKIP() << "needs two ranks";
  for (const std::string& recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    const Spread spread =
        make({.recipe = recipe,
              .layout = {.tp = 2, .plan = sequence_plan(), .transport = OverlapTransport::SendReceive},
              .fsdp = {.param_dtype = at::kBFloat16},
              .mixed = true});
    const int64_t elements = kRows * kLength / 2 * kDim;
    const auto step = [&] { loss_of(spread.model, global_batch().to(at::kBFloat16)).backward(); };
    const auto calls = calls_of("tp::gather parts", step);
    EXPECT_EQ(calls.size(), size_t{2 * 2 * kBlocks}) << "sent and received";
    int64_t narrow = 0;
    for (const auto& call : calls) {
      EXPECT_TRUE(call.bytes == elements || call.bytes == 2 * elements) << call.bytes;
      narrow += call.bytes == elements;
    }
    EXPECT_EQ(narrow, 2 * num_narrow_gathers(recipe));
  }
}
}  // namespace
}  // namespace titan
