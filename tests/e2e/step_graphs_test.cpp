// Runs whose steps are launched as CUDA graphs (compile.enable) equal runs whose steps aren't, to the bit: losses, gradient
// norms, learning rates, weights and the optimizer's state. Here steps have different numbers of valid tokens, aren't finite,
// or are repeated; tests/virtual_gpu/graphs_test.sh has layouts whose steps are alike. On a GPU for each rank.

#include <set>

#include "e2e/recorded_batches.h"

namespace titan::testing {
namespace {

constexpr int kStrange = 200;  // a token id

/// `labels_of(batch)`: how many labels count in each row of the batch, from 1. `strange` batches have only that token.
fs::path write_batches(const std::string& name, int num_batches, const std::function<int(int)>& labels_of,
                       const std::set<int>& strange = {}) {
  Recording recording;
  for (int batch = 1; batch <= num_batches; ++batch) {
    auto& input = recording.inputs.emplace_back();
    auto& label = recording.labels.emplace_back();
    for (int i = 0; i < kRecordedRows * kRecordedLength; ++i) {
      const int row = i / kRecordedLength, at = i % kRecordedLength;
      const auto token = [&](int place) {
        return strange.contains(batch) ? kStrange : (row + batch + place) % 8;
      };
      input.push_back(token(at));
      label.push_back(at < labels_of(batch) ? token(at + 1) : -100);
    }
  }
  return write(recording, name);
}

int all_labels(int /*batch*/) { return kRecordedLength; }

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

struct GraphCase {
  const char* name;
  int ranks;
  int spoiled_rank;  // with kSpoiler: its losses, or those of its micro-batches, aren't finite
  Words words;
};

void PrintTo(const GraphCase& layout, std::ostream* out) { *out << layout.name; }

class StepGraphs : public ::testing::TestWithParam<GraphCase> {
 protected:
  void SetUp() override {
    if (!tests_on_gpu()) GTEST_SKIP() << "CUDA graphs need a GPU";
  }
  /// Both runs have to end with `status`. Returns the log of the one with graphs.
  std::string run_both(const fs::path& data, int steps, const Words& words, int status = 0) {
    for (const char* compile : {"false", "true"}) {
      const fs::path folder = run_ / compile;
      const Words all = resumable(config_) + of_recording(data, steps) +
                        Words{"--checkpoint.no_last_save_model_only",
                              "--lr_scheduler.total_steps",
                              std::to_string(steps),
                              "--job.dump_folder",
                              folder.string(),
                              "--compile.enable",
                              compile} +
                        ranks(GetParam().ranks, GetParam().words) + words;
      const std::string spoiled =
          std::to_string(GetParam().spoiled_rank) + " tok_embeddings token=" + std::to_string(kStrange);
      const CommandResult result = run(
          train_words(all),
          {{"OMP_NUM_THREADS", "1"}, {"TITAN_TEST_SPOILED", spoiled}, {"TITAN_TEST_SHORTER_ROWS", "5"}}, 300);
      EXPECT_EQ(result.status, status) << result.err << result.out;
      (compile == std::string("true") ? recorded_ : usual_) = result.err + result.out;
    }
    EXPECT_THAT(recorded_, HasSubstr("is recorded as a CUDA graph"));
    return recorded_;
  }
  /// `rows`: of metrics.jsonl. `step`: the last one.
  void expect_equal(size_t rows, int step) const {
    const auto got = numbers_of(run_ / "true"), expected = numbers_of(run_ / "false");
    EXPECT_EQ(expected.size(), rows);
    EXPECT_EQ(got, expected);
    // Whether compile.enable is set is saved, too.
    const CommandResult diff =
        run({titan_program(), "checkpoint", "diff", step_folder(run_ / "false", step).string(),
             step_folder(run_ / "true", step).string()});
    EXPECT_THAT(diff.out + diff.err, ContainsRegex("0 of [1-9][0-9]* tensors differ"));
  }
  static std::vector<nlohmann::json> numbers_of(const fs::path& run) {
    std::vector<nlohmann::json> rows;
    for (const auto& row : whole_rows(run)) {
      nlohmann::json& numbers = rows.emplace_back();
      for (const char* key : {"step", "loss", "max_loss", "grad_norm", "lr", "n_tokens_seen"})
        numbers[key] = row.at(key);
      if (row.contains("skipped_steps")) numbers["skipped_steps"] = row.at("skipped_steps");
    }
    return rows;
  }

  fs::path config_ = fresh_folder("config"), run_ = fresh_folder("run");
  std::string usual_, recorded_;
};

const Words kSpoiler = {"--experimental.custom_import", std::string(TITAN_BINARY_DIR) + "/lib/libspoiler.so"};

// Each step has another number of valid tokens; one without any changes nothing.
TEST_P(StepGraphs, AreOneForAnyNumberOfTokens) {
  const int steps = 12;
  const auto labels_of = [](int batch) { return batch == 7 ? 0 : 3 + (11 * batch) % kRecordedLength; };
  const std::string log = run_both(write_batches("data", steps, labels_of), steps, {});
  EXPECT_EQ(count(log, "step 3 is recorded as a CUDA graph, which further steps of the same sizes launch"), 1)
      << log;
  EXPECT_EQ(count(log, "step 7: the global batch has no valid labels"), 1) << log;
  expect_equal(steps, steps);
}

// Before graphs, in the step that is recorded, and in steps that are launched.
TEST_P(StepGraphs, SkipStepsThatArentFinite) {
  const fs::path data = write_batches("data", 12, all_labels, {2, 3, 6, 7, 10});
  const std::string log = run_both(data, 12, kSpoiler + Words{"--fault_tolerance.on_nonfinite", "skip"});
  EXPECT_THAT(log, HasSubstr("The optimizer step is skipped: number 1 in a row, number 5 of this run"));
  expect_equal(12, 12);
}

// The step is run again without a graph, with the weights that it had.
TEST_P(StepGraphs, StopAtAStepThatIsntFinite) {
  const fs::path data = write_batches("data", 10, all_labels, {7});
  run_both(data, 10, kSpoiler + Words{"--checkpoint.interval", "6"}, 3);
  for (const std::string& log : {usual_, recorded_})
    EXPECT_THAT(log,
                AllOf(HasSubstr("step 7: the loss isn't finite"), HasSubstr("The replay found the source"),
                      HasSubstr("the output of module 'tok_embeddings' is the first")));
  expect_equal(6, 6);
}

// Strange tokens make the loss jump; an earlier step is loaded into the memory that the graphs use.
TEST_P(StepGraphs, ContinueAfterARewind) {
  const fs::path data = write_batches("data", 30, all_labels, {22});
  const std::string log = run_both(data, 27,
                                   {"--fault_tolerance.spike_sigma", "6", "--fault_tolerance.spike_window",
                                    "5", "--fault_tolerance.spike_rewind_steps", "1"});
  EXPECT_THAT(log, HasSubstr("Rewinding to step 20 and skipping the data through step 22"));
  expect_equal(27, 27);
}

// A step with other rows runs without a graph, and the next one is recorded.
TEST_P(StepGraphs, AreRecordedAgainForOtherRows) {
  if (GetParam().ranks > 1) GTEST_SKIP() << "the rows are changed on one rank";
  const fs::path text = write_text(config_);
  const std::string log =
      run_both(text, 10,
               {"--training.dataset", "text", "--training.seq_len", "48", "--training.local_batch_size", "4",
                "--experimental.custom_import", std::string(TITAN_BINARY_DIR) + "/lib/libshorter_rows.so"});
  EXPECT_EQ(count(log, "step 3 is recorded as a CUDA graph"), 1) << log;
  EXPECT_EQ(count(log, "step 6 can't launch the CUDA graph"), 1) << log;
  EXPECT_EQ(count(log, "step 7 is recorded as a CUDA graph"), 1) << log;
  expect_equal(10, 10);
}

// A buffer was replaced on the last rank only: the others' recordings would do, and theirs are dropped with it.
TEST_P(StepGraphs, AreRecordedAgainForOneRanksBuffers) {
  if (GetParam().ranks == 1) GTEST_SKIP() << "there is no other rank";
  const std::string log = run_both(
      write_text(config_), 10,
      {"--training.dataset", "text", "--training.seq_len", "48", "--training.local_batch_size", "4",
       "--experimental.custom_import", std::string(TITAN_BINARY_DIR) + "/lib/libreplaced_memory.so"});
  EXPECT_EQ(count(log, "step 3 is recorded as a CUDA graph"), 1) << log;
  EXPECT_EQ(count(log, "step 6 can't launch the CUDA graph"), 1) << log;
  EXPECT_EQ(count(log, "step 7 is recorded as a CUDA graph"), 1) << log;
  expect_equal(10, 10);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, StepGraphs,
    ::testing::Values(GraphCase{"OneGpu", 1, 0, {}},
                      GraphCase{"Fsdp", 2, 1, {"--checkpoint.async_mode", "async_with_pinned_mem"}},
                      GraphCase{"Pipeline",
                                2,
                                0,
                                {"--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size",
                                 "4"}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace titan::testing
