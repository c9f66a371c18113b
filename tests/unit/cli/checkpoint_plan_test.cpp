// What a job would save, planned without the job: meta tensors, one rank of the `fake` backend at a time.

#include <chrono>
#include <fstream>
#include <map>

#include <gtest/gtest.h>
#include <unistd.h>

#include "titan/checkpoint/layout.h"
#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/state_table.h"
#include "titan/parallel/parameters.h"
#include "titan/train/build.h"
#include "titan/train/dry_run.h"
#include "unit/cli/load_preset.h"
#include "unit/cli/words.h"

namespace titan::cli {
namespace {

using checkpoint::StateTable;
using checkpoint::StateTensor;
using checkpoint::TensorLayout;

struct NamedTensor {
  std::string name;
  at::ScalarType dtype;
  DTensor data;
};

// Parameters and what AdamW remembers of each.
std::vector<NamedTensor> state_of(const train::DryRun& run) {
  std::vector<NamedTensor> state;
  for (const auto& model : run.models())
    for (const Parameter& parameter : parameters(model->root())) {
      if (parameter.duplicate) continue;
      const DTensor& data = parameter.data;
      const DTensor step{.local = {},
                         .mesh = data.mesh,
                         .placements = std::vector(data.placements.size(), Placement::replicate()),
                         .global_shape = {},
                         .box = {}};
      for (const char* kind : {"model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."})
        state.push_back({kind + parameter.name, at::kFloat, data});
      state.push_back({"optimizer.step." + parameter.name, at::kFloat, step});
    }
  return state;
}

std::vector<StateTensor> described(const std::vector<NamedTensor>& state, const DeviceMesh& pipeline) {
  std::vector<StateTensor> tensors;
  for (const NamedTensor& tensor : state)
    tensors.push_back(
        {.name = tensor.name,
         .dtype = tensor.dtype,
         .shape = tensor.data.global_shape,
         .layout = std::make_shared<const TensorLayout>(checkpoint::layout_of(tensor.data, pipeline))});
  return tensors;
}

// --- layouts of what wrappers make
// -----------------------------------------------------------------------------

std::string name_of_mesh(const Words& degrees) {
  std::string name;
  for (size_t i = 0; i < degrees.size(); i += 2) name += degrees[i] + degrees[i + 1];
  return name;
}

class ParallelLayouts : public ::testing::TestWithParam<Words> {};

// "tp", "2" to "--parallelism.tensor_parallel_degree", "2".
Words arguments_of(const Words& degrees) {
  const std::map<std::string, std::string> keys = {{"pp", "pipeline_parallel_degree"},
                                                   {"replicate", "data_parallel_replicate_degree"},
                                                   {"shard", "data_parallel_shard_degree"},
                                                   {"cp", "context_parallel_degree"},
                                                   {"tp", "tensor_parallel_degree"}};
  Words words;
  for (size_t i = 0; i < degrees.size(); i += 2) {
    words.push_back("--parallelism." + keys.at(degrees[i]));
    words.push_back(degrees[i + 1]);
  }
  return words;
}

// One rank's layouts say of all ranks of its stage what these have.
TEST_P(ParallelLayouts, OfOneRankAreRightForAll) {
  constexpr int kRanks = 8;
  const train::JobConfig config = load_preset("llama3_debug", kRanks, arguments_of(GetParam()));
  std::map<std::string, TensorLayout> layouts;
  // Elements that no rank has counted yet; of the copies of a part the first counts.
  std::map<std::string, int64_t> left;
  for (int rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(str("rank ", rank));
    const train::DryRun run(config, kRanks, rank);
    for (const NamedTensor& tensor : state_of(run)) {
      const auto [known, is_new] =
          layouts.emplace(tensor.name, checkpoint::layout_of(tensor.data, run.meshes().pp));
      const TensorLayout& layout = known->second;
      EXPECT_NO_THROW(check_layout(layout, tensor.data.global_shape, kRanks)) << tensor.name;
      EXPECT_EQ(checkpoint::layout_of(tensor.data, run.meshes().pp), layout) << tensor.name;
      ASSERT_TRUE(holds(layout, rank)) << tensor.name;
      EXPECT_EQ(box_of(layout, tensor.data.global_shape, rank), tensor.data.box) << tensor.name;
      if (tensor.data.local.defined()) {
        EXPECT_EQ(tensor.data.local.sizes(), at::IntArrayRef(tensor.data.box.length)) << tensor.name;
      }
      if (is_new) left[tensor.name] = tensor.data.global_numel();
      if (replica_of(layout, kRanks, rank) == 0) left[tensor.name] -= tensor.data.box.numel();
    }
  }
  EXPECT_EQ(layouts.size(), 4u * (6 * 9 + 3));
  for (const auto& [name, elements] : left) EXPECT_EQ(elements, 0) << name;
}

INSTANTIATE_TEST_SUITE_P(Meshes, ParallelLayouts,
                         ::testing::Values(Words{"shard", "8"}, Words{"replicate", "8", "shard", "1"},
                                           Words{"shard", "4", "tp", "2"},
                                           Words{"replicate", "2", "shard", "2", "tp", "2"},
                                           Words{"shard", "2", "cp", "2", "tp", "2"},
                                           Words{"pp", "2", "shard", "2", "tp", "2"},
                                           Words{"pp", "2", "replicate", "2", "cp", "2", "shard", "1"}),
                         [](const auto& info) { return name_of_mesh(info.param); });

// --- 405B on 4,096 ranks
// ------------------------------------------------------------------------------------------

constexpr int kManyRanks = 4096;

int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

struct Large {
  const char* name;
  const char* preset;
  Words degrees;
};

class LargePlans : public ::testing::TestWithParam<Large> {};

// What the other stages have, which a job's ranks hear from each other.
std::vector<StateTensor> of_other_stages(const train::JobConfig& config, const train::Meshes& meshes) {
  std::vector<StateTensor> tensors;
  const int stages = meshes.pp.size();
  for (int stage = 0; stage < stages; ++stage) {
    if (stage == meshes.pp.rank()) continue;
    const train::DryRun run(config, kManyRanks, stage * (kManyRanks / stages));
    for (StateTensor& tensor : described(state_of(run), run.meshes().pp))
      tensors.push_back(std::move(tensor));
  }
  return tensors;
}

int64_t bytes_of(const std::vector<checkpoint::Piece>& pieces) {
  int64_t bytes = 0;
  for (const auto& piece : pieces) bytes += 4 * piece.box.numel();
  return bytes;
}

int64_t bytes_of(const StateTable& table) {
  int64_t bytes = 0;
  for (const StateTensor& tensor : table.tensors()) bytes += 4 * Box{{}, tensor.shape}.numel();
  return bytes;
}

TEST_P(LargePlans, AreQuickAndSmall) {
  const train::JobConfig config =
      load_preset(GetParam().preset, kManyRanks, arguments_of(GetParam().degrees));
  std::string first_text;
  for (const int rank : {0, kManyRanks - 1}) {
    SCOPED_TRACE(str("rank ", rank));
    const train::DryRun run(config, kManyRanks, rank);
    const std::vector<NamedTensor> state = state_of(run);
    std::vector<StateTensor> tensors = of_other_stages(config, run.meshes());

    const int64_t resident_before = resident_bytes();
    const auto start = std::chrono::steady_clock::now();
    for (StateTensor& tensor : described(state, run.meshes().pp)) tensors.push_back(std::move(tensor));
    const StateTable table(std::move(tensors), kManyRanks);
    const auto pieces = table.pieces_of(rank);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const int64_t grown = resident_bytes() - resident_before;
    RecordProperty(str("rank_", rank), str(seconds.count(), " s, ", grown, " bytes"));
    EXPECT_LT(seconds.count(), 1.0);
    EXPECT_LT(grown, int64_t{500} << 20);

    // Layers: 9 parameters each; embedding, norm and head.
    EXPECT_EQ(table.tensors().size(), 4u * (126 * 9 + 3));
    EXPECT_EQ(bytes_of(table) / 1'000'000'000, 3 * 4 * 405'853'388'800 / 1'000'000'000);
    // Stages have layers or less, and the largest matrix is cut among the ranks of one.
    EXPECT_NEAR(static_cast<double>(bytes_of(pieces)), static_cast<double>(bytes_of(table)) / kManyRanks,
                0.15 * static_cast<double>(bytes_of(table)) / kManyRanks);

    const checkpoint::FileRecord record{.num_bytes = bytes_of(pieces),
                                        .header_digest = checkpoint::digest_of("")};
    const std::string text = to_text(checkpoint::Manifest{
        .run_id = checkpoint::digest_of("run"), .table = table, .files = std::vector(kManyRanks, record)});
    RecordProperty("manifest_bytes", static_cast<int>(text.size()));
    EXPECT_LT(text.size(), 5'000'000u);
    // The ranks don't have to agree on more: each plans the same.
    const std::string table_text =
        text.substr(text.find("\"layouts\""), text.find("\"files\"") - text.find("\"layouts\""));
    if (rank == 0) first_text = table_text;
    EXPECT_TRUE(table_text == first_text);
  }
}

INSTANTIATE_TEST_SUITE_P(Llama405B, LargePlans,
                         ::testing::Values(Large{"Shards512Tensor8", "llama3_405b", {"tp", "8"}},
                                           Large{
                                               "Stages16Shards32Tensor8", "llama3_405b_pp", {"shard", "32"}}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan::cli
