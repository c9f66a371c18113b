// [profiling]: the contents of traces, the steps that they cover, and that nothing else changes.

#include <gmock/gmock.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "e2e/small_run.h"
#include "e2e/training.h"

namespace titan::testing {
namespace {

using nlohmann::json;

// Throws unless the gzip file is complete: its checksum is verified with the last byte.
std::string unzipped(const std::filesystem::path& path) {
  gzFile file = ::gzopen(path.c_str(), "rb");
  if (!file) throw Error(path.string() + " is missing");
  std::string text;
  std::vector<char> piece(1 << 16);
  int count = 0;
  while ((count = ::gzread(file, piece.data(), static_cast<unsigned>(piece.size()))) > 0)
    text.append(piece.data(), static_cast<size_t>(count));
  const bool packed = !::gzdirect(file);
  if (::gzclose(file) != Z_OK || count < 0 || !packed) throw Error(path.string() + " isn't whole");
  return text;
}

struct Trace {
  explicit Trace(const std::filesystem::path& folder, int step, int rank = 0)
      : all(json::parse(unzipped(folder / "profile_traces" / str("iteration_", step) /
                                 str("rank", rank, "_trace.json.gz")))) {
    for (const json& event : all.at("traceEvents"))
      if (event.value("ph", "") == "X") ranges.push_back(event);
  }
  std::vector<json> named(const std::string& name) const {
    std::vector<json> found;
    for (const json& range : ranges)
      if (range.at("name") == name) found.push_back(range);
    return found;
  }
  bool has(const std::string& name) const { return !named(name).empty(); }
  /// Events whose names begin with `name`.
  std::vector<json> beginning(const std::string& name) const {
    std::vector<json> found;
    for (const json& range : ranges)
      if (range.at("name").get<std::string>().starts_with(name)) found.push_back(range);
    return found;
  }

  json all;
  std::vector<json> ranges;
};

double end_of(const json& range) { return range.at("ts").get<double>() + range.at("dur").get<double>(); }

bool is_within(const json& inner, const json& outer) {
  return inner.at("ts") >= outer.at("ts") && end_of(inner) <= end_of(outer) &&
         inner.at("tid") == outer.at("tid");
}

bool is_within_one(const json& inner, const std::vector<json>& outer) {
  return std::any_of(outer.begin(), outer.end(), [&](const json& each) { return is_within(inner, each); });
}

Words profiled(int freq, int warmup = 1, int active = 1) {
  return {"--profiling.enable_profiling",
          "--profiling.profile_freq",
          str(freq),
          "--profiling.profiler_warmup",
          str(warmup),
          "--profiling.profiler_active",
          str(active)};
}

Words profiled_ranks(int count) {
  return {"--nproc", str(count), "--training.local_batch_size", str(4 / count)};
}

TEST(Profiling, WritesATracePerWindowWithModulesAndPhases) {
  const auto folder = fresh_folder("run"), plain = fresh_folder("plain");
  const auto steps = train(folder, small_run(folder) + profiled_ranks(1) + profiled(2));
  EXPECT_EQ(losses(steps), losses(train(plain, small_run(plain) + profiled_ranks(1))))
      << "a trace changes nothing";
  for (const int step : {2, 4}) {
    const Trace trace(folder, step);
    EXPECT_TRUE(trace.has(str("ProfilerStep#", step)));
    EXPECT_EQ(trace.beginning("ProfilerStep#").size(), 1u);
    for (const char* name :
         {"data", "forward_backward", "optimizer", "log", "validate", "forward 0", "backward 0", "model",
          "tok_embeddings", "layers.0", "layers.1.attention", "layers.0.attention.wq+wk+wv",
          "layers.0.attention.wo", "layers.1.feed_forward", "layers.1 backward", "layers.0 backward"})
      EXPECT_TRUE(trace.has(name)) << name;
    const auto layers = trace.named("layers.0"), steps_of_it = trace.named("forward_backward");
    for (const json& attention : trace.named("layers.0.attention"))
      EXPECT_TRUE(is_within_one(attention, layers));
    EXPECT_TRUE(is_within_one(layers.front(), steps_of_it));
    const auto backward = trace.named("backward 0");
    for (const char* name : {"layers.1 backward", "layers.0 backward"})
      for (const json& range : trace.named(name)) EXPECT_TRUE(is_within_one(range, backward)) << name;
    EXPECT_LE(end_of(trace.named("layers.1 backward").front()),
              end_of(trace.named("layers.0 backward").front()));
  }
  const auto& iterations = folder / "profile_traces";
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(iterations), {}), 2);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(iterations / "iteration_2"), {}), 1)
      << "only the trace";
}

TEST(Profiling, RecordsBytesAndGroupsOfCollectives) {
  const auto folder = fresh_folder("run");
  train(folder, small_run(folder) + profiled_ranks(2) + profiled(2));
  for (const int rank : {0, 1}) {
    const Trace trace(folder, 2, rank);
    EXPECT_EQ(trace.all.at("distributedInfo").at("rank"), rank);
    EXPECT_EQ(trace.all.at("distributedInfo").at("world_size"), 2);
    for (const char* name :
         {"all_gather fsdp::all_gather layers.0", "wait all_gather fsdp::all_gather layers.0",
          "reduce_scatter fsdp::reduce_scatter layers.1"}) {
      const auto calls = trace.named(name);
      ASSERT_FALSE(calls.empty()) << name;
      EXPECT_GT(calls[0].at("args").at("bytes").get<int64_t>(), 0) << calls[0];
      EXPECT_EQ(calls[0].at("args").at("group_size"), 2) << calls[0];
      EXPECT_FALSE(calls[0].at("args").at("group").get<std::string>().empty()) << calls[0];
      EXPECT_EQ(calls[0].at("args").at("dtype"), "Float") << calls[0];
    }
  }
}

TEST(Profiling, ShowsPipelineActions) {
  const auto folder = fresh_folder("run");
  train(folder, small_run(folder) +
                    Words{"--nproc", "2", "--training.local_batch_size", "4",
                          "--parallelism.pipeline_parallel_degree", "2", "--validation.enable", "false"} +
                    profiled(2));
  for (const auto& [rank, names] :
       {std::pair(0, Words{"action 0F3", "action 0B3", "send pp::transfer 0SEND_F1"}),
        std::pair(1, Words{"action 1F3", "action 1B0", "receive pp::transfer 1RECV_F1"})}) {
    const Trace trace(folder, 2, rank);
    for (const std::string& name : names) EXPECT_TRUE(trace.has(name)) << rank << ": " << name;
  }
}

// A recompute that stops early leaves modules through an exception.
TEST(Profiling, ShowsRecomputesAsSeparateRanges) {
  const auto folder = fresh_folder("run");
  train(folder, small_run(folder) + profiled_ranks(1) + profiled(2) +
                    Words{"--activation_checkpoint.mode", "full", "--validation.enable", "false"});
  const Trace trace(folder, 2);
  const auto recomputes = trace.named("recompute layers.1"), calls = trace.named("layers.1.feed_forward");
  ASSERT_EQ(recomputes.size(), 1u);
  ASSERT_EQ(calls.size(), 2u) << "forward and recompute";
  EXPECT_TRUE(is_within(calls[1], recomputes[0]));
  EXPECT_TRUE(is_within_one(recomputes[0], trace.named("layers.1 backward")));
}

TEST(Profiling, CountsStepsFromTheRunsFirst) {
  const auto folder = fresh_folder("run");
  const Words words = small_run(folder) + profiled_ranks(1) +
                      Words{"--checkpoint.enable",
                            "--checkpoint.interval",
                            "2",
                            "--checkpoint.no_last_save_model_only",
                            "--validation.enable",
                            "false"};
  train(folder, words + Words{"--training.steps", "2"});
  train(folder, words + profiled(4, 1, 2) + Words{"--training.steps", "4"});
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "profile_traces"), {}), 1);
  const Trace trace(folder, 4);
  std::set<std::string> steps;
  for (const json& range : trace.beginning("ProfilerStep#")) steps.insert(range.at("name"));
  EXPECT_EQ(steps, (std::set<std::string>{"ProfilerStep#3", "ProfilerStep#4"}));
}

TEST(Profiling, WritesAPartialWindowWhenTrainingEnds) {
  const auto folder = fresh_folder("run");
  train(folder, small_run(folder) + profiled_ranks(1) + profiled(5, 1, 2));
  EXPECT_TRUE(Trace(folder, 4).has("ProfilerStep#4"));
}

TEST(Profiling, WritesNothingWhenOff) {
  const auto folder = fresh_folder("run");
  train(folder, small_run(folder) + profiled_ranks(1));
  EXPECT_FALSE(std::filesystem::exists(folder / "profile_traces"));
  EXPECT_FALSE(std::filesystem::exists(folder / "memory_snapshot"));
}

TEST(Profiling, RefusesAWindowShorterThanItsSteps) {
  const auto folder = fresh_folder("run");
  const CommandResult result = try_train(small_run(folder) + profiled(3, 3, 1));
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, ::testing::HasSubstr("profiling.profile_freq"));
  EXPECT_THAT(result.err, ::testing::HasSubstr("profiler_warmup + profiler_active = 4"));
}

TEST(Profiling, ContinuesIfATraceCannotBeWritten) {
  const auto folder = fresh_folder("run");
  std::ofstream(folder / "profile_traces") << "a file where the folder would be";
  const CommandResult result = try_train(small_run(folder) + profiled_ranks(1) + profiled(2) +
                                         Words{"--job.dump_folder", folder.string()});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(read_metrics(folder).size(), 4u);
  for (const int step : {2, 4})
    EXPECT_THAT(result.err, ::testing::HasSubstr(str("cannot write the trace of step ", step, ": ")));
}

// The first activation, of 4 Mi tokens, exceeds the process's address limit.
TEST(Profiling, OutOfMemoryReportsTheOwnersAndWhatWouldSaveMemory) {
  const auto folder = fresh_folder("run");
  const Words words = {"bash", "-c", "ulimit -v 12000000; exec \"$@\"", "bash"};
  const CommandResult result =
      run(words + train_words(small_run(folder) +
                              Words{"--job.dump_folder", folder.string(), "--model.args.dim", "1024",
                                    "--training.local_batch_size", "2048", "--training.global_batch_size",
                                    "-1", "--training.seq_len", "2048", "--validation.enable", "false",
                                    "--profiling.enable_memory_snapshot"}),
          {{"OMP_NUM_THREADS", "1"}}, 100);
  EXPECT_EQ(result.status, 1);
  for (const char* text :
       {"out of memory on cpu", "activations", "optimizer state", "layers.0 to layers.1",
        "activation_checkpoint.mode = \"full\"", "training.local_batch_size = 1024", "GiB less"})
    EXPECT_THAT(result.err, ::testing::HasSubstr(text));
  EXPECT_TRUE(std::filesystem::exists(folder / "memory_snapshot" / "iteration_0_exit" /
                                      "rank0_memory_snapshot.pickle"))
      << result.err;
}

}  // namespace
}  // namespace titan::testing
