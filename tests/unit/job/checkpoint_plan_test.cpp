// Plans what a job would save, without the job: meta tensors, one rank of the `fake` backend at a time.

#include <ctime>
#include <fstream>
#include <map>

#include <gtest/gtest.h>
#include <unistd.h>

#include "checkpoint/save/save_plan.h"
#include "checkpoint/save/save_writer.h"
#include "job/build.h"
#include "job/dry_run.h"
#include "titan/checkpoint/manifest.h"
#include "titan/config/load.h"
#include "titan/data/loader.h"
#include "titan/parallel/parameters.h"
#include "titan/train/checkpoint_state.h"
#include "unit/job/load_preset.h"

namespace titan::train {
namespace {

using checkpoint::StateTable;
using checkpoint::StateTensor;
using checkpoint::TensorLayout;

struct NamedTensor {
  std::string name;
  at::ScalarType dtype;
  DTensor data;
};

// The parameters, AdamW's state of each, and the random generators of all ranks of the stage.
std::vector<NamedTensor> state_of(const DryRun& run) {
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
      state.push_back({"model." + parameter.name, at::kFloat, data});
      for (const char* kind : {".exp_avg", ".exp_avg_sq"})
        state.push_back({"optimizer." + parameter.name + kind, at::kFloat, data});
      state.push_back({"optimizer." + parameter.name + ".step", at::kFloat, step});
    }
  RngState rng(run.meshes(), at::kCPU, /*seed=*/0);
  for (const checkpoint::ObjectTensor& tensor : rng.state().tensors)
    state.push_back({"rng." + tensor.name, tensor.data.local.scalar_type(), tensor.data});
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

// Layouts of parallelized models.

std::string name_of_mesh(const Words& degrees) {
  std::string name;
  for (size_t i = 0; i < degrees.size(); i += 2) name += degrees[i] + degrees[i + 1];
  return name;
}

class ParallelLayouts : public ::testing::TestWithParam<Words> {};

// Turns "tp", "2" into "--parallelism.tensor_parallel_degree", "2".
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

// A rank's layouts describe the parts of all ranks of its stage.
TEST_P(ParallelLayouts, OfOneRankDescribeAllRanks) {
  constexpr int kRanks = 8;
  const JobConfig config = load_preset("llama3_debug", kRanks, arguments_of(GetParam()));
  std::map<std::string, TensorLayout> layouts;
  // Elements that no rank has counted yet. Only the first copy of a part counts.
  std::map<std::string, int64_t> left;
  for (int rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(str("rank ", rank));
    const DryRun run(config, kRanks, rank);
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
  EXPECT_EQ(layouts.size(),
            4u * (6 * 9 + 3) + static_cast<size_t>(config.parallelism.pipeline_parallel_degree));
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

// 405B on thousands of ranks.

int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

struct Large {
  const char* name;
  const char* preset;
  Words degrees;
  int num_ranks = 4096;
};

class LargePlans : public ::testing::TestWithParam<Large> {};

// The tensors of each stage, which the ranks of a job send each other. Empty without a pipeline.
std::vector<std::string> texts_of_stages(const JobConfig& config, int num_ranks, int stages) {
  std::vector<std::string> texts;
  for (int stage = 0; stage < stages && stages > 1; ++stage) {
    const DryRun run(config, num_ranks, stage * (num_ranks / stages));
    texts.push_back(checkpoint::detail::encode_stage(described(state_of(run), run.meshes().pp)));
  }
  return texts;
}

int64_t bytes_of(const StateTensor& tensor, const std::vector<int64_t>& shape) {
  return Box{{}, shape}.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

int64_t bytes_of(const StateTable& table, const std::vector<checkpoint::Piece>& pieces) {
  int64_t bytes = 0;
  for (const auto& piece : pieces) bytes += bytes_of(table.tensors()[piece.tensor], piece.box.length);
  return bytes;
}

int64_t bytes_of(const StateTable& table) {
  int64_t bytes = 0;
  for (const StateTensor& tensor : table.tensors()) bytes += bytes_of(tensor, tensor.shape);
  return bytes;
}

// Processor time, so that other programs don't count: what is measured here only computes.
double seconds_from(std::clock_t start) { return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC; }

// The data lanes of one of the `dp_degree` ranks that read rows of their own, late in a long run.
std::string lanes_text(int64_t dp_rank, int64_t dp_degree, int64_t num_lanes) {
  data::LoaderState state{.steps = 1'000'000,
                          .num_lanes = num_lanes,
                          .feed_fingerprint =
                              "source=jsonl:30000 files:2000000000000 bytes:400000000 documents:"
                              "0123456789abcdef;tokenizer=bpe:128256:0123456789abcdef;piece=262144;"
                              "shuffle=1;seed=42;repeat=1",
                          .lanes = {}};
  for (int64_t lane = dp_rank; lane < num_lanes; lane += dp_degree)
    state.lanes.push_back({.lane = lane, .epoch = 12, .position = 123'456'789, .token_offset = 65'536});
  return data::to_json(state);
}

// The reports that all ranks of a job send rank 0 after they wrote their files. Only one of the ranks that
// share rows reports texts.
std::vector<std::string> reports_of(int num_ranks, int64_t dp_degree, int64_t num_lanes,
                                    const checkpoint::FileRecord& file, bool with_texts) {
  std::vector<std::string> reports;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const bool speaks = with_texts && rank < dp_degree;
    checkpoint::detail::SaveReport report{
        .step = 1'000'000, .failure = {}, .file = file, .num_threads = 8, .texts = {}};
    if (with_texts)  // "dataloader" and "train_state"
      report.texts = {speaks ? lanes_text(rank, dp_degree, num_lanes) : "", speaks ? "123456789012" : "0"};
    reports.push_back(checkpoint::detail::to_wire(report));
  }
  return reports;
}

int64_t total_size(const std::vector<std::string>& texts) {
  int64_t bytes = 0;
  for (const std::string& text : texts) bytes += static_cast<int64_t>(text.size());
  return bytes;
}

// Makes the manifest as rank 0 does after gathering the reports.
std::string manifest_text(const StateTable& table, const std::string& config,
                          const std::vector<std::string>& reports) {
  checkpoint::Manifest manifest{.run_id = checkpoint::digest_of("run"),
                                .step = 1'000'000,
                                .library = "titan 0.1.0, torch 2.11.0",
                                .num_threads = 8,
                                .config = config,
                                .texts = {},
                                .table = table,
                                .files = {}};
  std::vector<data::LoaderState> lanes;
  int64_t tokens = 0;
  for (const std::string& bytes : reports) {
    const auto report = checkpoint::detail::from_wire<checkpoint::detail::SaveReport>(bytes);
    manifest.files.push_back(report.file);
    if (!report.texts[0].empty()) lanes.push_back(data::loader_state_from_json(report.texts[0]));
    tokens += std::stoll(report.texts[1]);
  }
  manifest.texts = {{"dataloader", data::to_json(data::merge(lanes))},
                    {"lr_scheduler", "1000000"},
                    {"rng", "pp 16, dp_replicate 1, dp_shard 32, cp 1, tp 8, gpu"},
                    {"train_state", str("{\"step\": 1000000, \"tokens\": ", tokens, "}")}};
  return to_text(manifest);
}

TEST_P(LargePlans, AreFastAndSmall) {
  const int num_ranks = GetParam().num_ranks;
  const JobConfig config = load_preset(GetParam().preset, num_ranks, arguments_of(GetParam().degrees));
  std::string first_text;
  for (const int rank : {0, num_ranks - 1}) {
    SCOPED_TRACE(str("rank ", rank));
    const DryRun run(config, num_ranks, rank);
    const std::vector<NamedTensor> state = state_of(run);
    const DeviceMesh& pipeline = run.meshes().pp;
    const auto texts = texts_of_stages(config, num_ranks, pipeline.size());
    const int64_t dp_degree = run.meshes().dp_degree(),
                  num_lanes = dp_degree * config.training.local_batch_size;

    const int64_t resident_before = resident_bytes();
    std::clock_t start = std::clock();
    std::vector<StateTensor> tensors = described(state, pipeline);
    if (!texts.empty()) {
      EXPECT_EQ(checkpoint::detail::encode_stage(tensors), texts.at(static_cast<size_t>(pipeline.rank())));
      tensors = checkpoint::detail::decode_stages(texts);
    }
    const StateTable table(std::move(tensors), num_ranks);
    const auto pieces = table.pieces_of(rank);
    const std::string settings = config::print_toml(job_schema(), config);
    const double seconds = seconds_from(start);

    // 9 parameters per layer, embedding, norm and head. The generators of a stage are one tensor.
    EXPECT_EQ(table.tensors().size(), 4u * (126 * 9 + 3) + static_cast<size_t>(pipeline.size()));
    EXPECT_EQ(bytes_of(table) / 1'000'000'000, 3 * 4 * 405'853'388'800 / 1'000'000'000);
    // Stages differ by some layers, and the largest matrix is sharded over the ranks of one stage.
    const int64_t own_bytes = bytes_of(table, pieces);
    EXPECT_NEAR(static_cast<double>(own_bytes), static_cast<double>(bytes_of(table)) / num_ranks,
                0.15 * static_cast<double>(bytes_of(table)) / num_ranks);

    const checkpoint::FileRecord record{.num_bytes = own_bytes, .header_digest = checkpoint::digest_of("")};
    const auto reports = reports_of(num_ranks, dp_degree, num_lanes, record, /*with_texts=*/true);
    start = std::clock();
    const std::string text = manifest_text(table, settings, reports);
    const double manifest_seconds = seconds_from(start);
    const int64_t grown = resident_bytes() - resident_before;
    RecordProperty(str("rank_", rank),
                   str(seconds, " s, the manifest ", manifest_seconds, " s, ", grown, " bytes"));
    EXPECT_LT(seconds, 1.0);
    EXPECT_LT(manifest_seconds, 1.0);
    EXPECT_LT(grown, int64_t{500} << 20);
    RecordProperty("manifest_bytes", static_cast<int>(text.size()));
    EXPECT_LT(text.size(), 5'000'000u);

    // A report has a digest of 32 bytes and seven numbers. The texts add a count of tokens, and for each rank
    // that reads rows of its own the lanes and the fingerprint of the data.
    const int64_t without_texts =
        total_size(reports_of(num_ranks, dp_degree, num_lanes, record, /*with_texts=*/false));
    EXPECT_EQ(without_texts, num_ranks * (32 + 9 * 8));
    const int64_t of_texts = total_size(reports) - without_texts;
    RecordProperty("gathered_bytes", str(without_texts, " and of texts ", of_texts));
    EXPECT_LT(of_texts, num_ranks * 20 + dp_degree * 300 + num_lanes * 40);

    // Each rank makes the same plan, so the ranks exchange nothing else.
    const std::string table_text =
        text.substr(text.find("\"layouts\""), text.find("\"files\"") - text.find("\"layouts\""));
    if (rank == 0) first_text = table_text;
    EXPECT_TRUE(table_text == first_text);
  }
}

INSTANTIATE_TEST_SUITE_P(Llama405B, LargePlans,
                         ::testing::Values(Large{"Shards512Tensor8", "llama3_405b", {"tp", "8"}},
                                           Large{
                                               "Stages16Shards32Tensor8", "llama3_405b_pp", {"shard", "32"}},
                                           Large{"On16384Ranks", "llama3_405b_pp", {"shard", "128"}, 16384}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan::train
