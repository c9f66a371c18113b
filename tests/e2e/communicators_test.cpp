// How many NCCL communicators a rank makes in each layout, counted by virtual GPUs: one for each mesh axis and
// direction at most, and none for groups that carry only numbers of the host.

#include <fstream>
#include <nlohmann/json.hpp>

#include "e2e/small_run.h"

namespace titan::testing {
namespace {

struct CommunicatorCase {
  const char* name;
  int num_ranks;
  Words words;
  /// By the names of their groups, as in flight records.
  std::vector<std::string> groups;
};

void PrintTo(const CommunicatorCase& layout, std::ostream* out) { *out << layout.name; }

class Communicators : public ::testing::TestWithParam<CommunicatorCase> {};

int64_t num_communicators(const fs::path& counters) {
  std::ifstream file(counters);
  int64_t number = 0;
  for (const auto& counts : nlohmann::json::parse(file))
    if (counts.is_object() && counts.contains("communicator"))
      number += counts["communicator"].value("calls", 0);
  return number;
}

TEST_P(Communicators, AreOneForEachAxisAndDirection) {
  const CommunicatorCase& layout = GetParam();
  const auto folder = fresh_folder("run");
  const CommandResult result = run(
      train_words(small_run(fresh_folder("config")) + layout.words +
                  Words{"--nproc", std::to_string(layout.num_ranks), "--job.dump_folder", folder.string()}),
      {{"OMP_NUM_THREADS", "1"}, {"VIRTUAL_GPU_COUNTERS", (folder / "counters.%r.json").string()}}, 200);
  ASSERT_EQ(result.status, 0) << result.err;
  for (int rank = 0; rank < layout.num_ranks; ++rank)
    EXPECT_EQ(num_communicators(folder / ("counters." + std::to_string(rank) + ".json")),
              static_cast<int64_t>(layout.groups.size()))
        << "rank " << rank << ", expected: " << ::testing::PrintToString(layout.groups);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, Communicators,
    ::testing::Values(
        // The gathers and the step's sums have the same ranks.
        CommunicatorCase{"Fsdp", 2, {}, {"world", "dp_shard.reduce"}},
        CommunicatorCase{"Hsdp",
                         4,
                         {"--parallelism.data_parallel_replicate_degree", "2"},
                         {"world", "dp_shard", "dp_shard.reduce", "dp_replicate"}},
        CommunicatorCase{"FsdpTensor",
                         4,
                         {"--parallelism.tensor_parallel_degree", "2"},
                         {"world", "dp_shard", "dp_shard.reduce", "tp", "tp.gradient"}},
        // The ring of keys has the same ranks as FSDP's gathers.
        CommunicatorCase{
            "TensorContext",
            4,
            {"--parallelism.tensor_parallel_degree", "2", "--parallelism.context_parallel_degree", "2"},
            {"world", "cp", "cp, gradient_ring", "fsdp.reduce", "tp", "tp.gradient"}},
        CommunicatorCase{
            "AsyncTensor",
            2,
            {"--parallelism.tensor_parallel_degree", "2", "--parallelism.enable_async_tensor_parallel"},
            {"world", "tp.gradient"}},
        CommunicatorCase{"AllToAll",
                         2,
                         {"--parallelism.context_parallel_degree", "2",
                          "--parallelism.context_parallel_rotate_method", "alltoall"},
                         {"world", "world, ring", "world, gradient_ring", "fsdp.reduce"}},
        CommunicatorCase{"FsdpPipeline",
                         4,
                         {"--parallelism.pipeline_parallel_degree", "2"},
                         {"world", "stage", "dp_shard.reduce", "pp", "pp.0-1", "pp.1-0"}},
        CommunicatorCase{
            "Pipeline", 2, {"--parallelism.pipeline_parallel_degree", "2"}, {"world", "pp.0-1", "pp.1-0"}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace titan::testing
