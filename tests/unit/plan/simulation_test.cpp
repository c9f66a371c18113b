#include "plan/simulation.h"

#include <functional>
#include <numeric>

#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::plan {
namespace {

// Round numbers: 1 GB takes a second of memory's time (CostModel takes 0.9 of its speed), a message of 1 GB a second.
ClusterSpec round_cluster() {
  ClusterSpec cluster;
  cluster.device = {.name = "round",
                    .memory_gib = 1,
                    .compute_capability = 80,
                    .multiprocessors = 1,
                    .memory_gb_per_s = 1 / 0.9,
                    .tflops = {{"bfloat16", 1}},
                    .efficiency = {},
                    .attention = {}};
  cluster.host = {.devices = 8, .gb_per_s = 1 / 0.8, .latency_us = 0, .pcie_gb_per_s = 1 / 0.85};
  cluster.network = {.gb_per_s = 1 / 0.94, .latency_us = 0};
  return cluster;
}

constexpr double kGB = 1e9;
constexpr double kTolerance = 1e-3;  // the host's time and NCCL's first hop

double of(const StepTime::OfRank& rank, Activity activity) {
  return rank.seconds[static_cast<size_t>(activity)];
}

/// Writes a trace whose second step is the test's, after an empty first one.
class Program {
 public:
  Program() {
    trace_.begin_step();
    trace_.begin_step();
  }
  void kernel(double seconds, int64_t stream = 0, const char* module = "layer") {
    trace_.launched({.name = trace_.number_of("kernel"),
                     .module = trace_.number_of(module),
                     .stream = stream,
                     .bytes_read = seconds * kGB});
  }
  void computation(const char* name, double seconds, const char* module = "layer") {
    trace_.launched({.name = trace_.number_of(name),
                     .module = trace_.number_of(module),
                     .flops = seconds * 1e12,
                     .dtype = c10::kBFloat16,
                     .shape = {.batches = 1, .m = 1024, .n = 1024, .k = 1024}});
  }
  void copy(const char* direction, double seconds, int64_t stream) {
    trace_.launched({.name = trace_.number_of(direction),
                     .module = trace_.number_of("layer"),
                     .stream = stream,
                     .bytes_written = seconds * kGB});
  }
  int64_t record(int64_t stream) {
    const int64_t event = trace_.next_event();
    trace_.synchronized({Sync::Kind::Record, stream, event});
    return event;
  }
  void wait(int64_t stream, int64_t event) { trace_.synchronized({Sync::Kind::Wait, stream, event}); }
  void host_waits(int64_t event) { trace_.synchronized({.kind = Sync::Kind::HostEvent, .number = event}); }
  int message(const char* op, int peer, double seconds, int64_t stream = 0) {
    return call(
        {.op = trace_.number_of(op), .peer = peer, .stream = stream, .bytes = std::llround(seconds * kGB)},
        {0, 1});
  }
  /// That takes so many seconds alone.
  int gather(double seconds, int64_t stream = 0) {
    return call(
        {.op = trace_.number_of("all_gather"), .stream = stream, .bytes = std::llround(2 * seconds * kGB)},
        {0, 1});
  }
  void wait_for_call(int batch, int64_t stream = 0) {
    trace_.synchronized({Sync::Kind::WaitCall, stream, batch});
  }
  void next_step(int64_t stream) { trace_.begin_step(stream); }
  void record_graph(const std::function<void()>& queue) {
    trace_.synchronized({.kind = Sync::Kind::BeginGraph});
    queue();
    trace_.synchronized({.kind = Sync::Kind::EndGraph});
  }
  const Trace& trace() const { return trace_; }

 private:
  int call(Collective collective, const std::vector<int>& members) {
    if (communicator_ < 0) communicator_ = trace_.add_communicator(members);
    collective.group = trace_.number_of("pp");
    collective.communicator = communicator_;
    collective.label = trace_.number_of("");
    collective.module = trace_.number_of("");
    return trace_.called({collective});
  }
  Trace trace_;
  int communicator_ = -1;
};

StepTime simulate_one(const Program& program, int ranks_of_stage = 8) {
  return simulate({{&program.trace(), 0}}, ranks_of_stage, CostModel(round_cluster(), Kernels::Ours));
}

TEST(Simulation, KernelsOfAStreamFollowEachOther) {
  Program program;
  program.kernel(1);
  program.kernel(2, 0, "optimizer");
  const StepTime time = simulate_one(program);
  EXPECT_NEAR(time.seconds, 3, kTolerance);
  EXPECT_NEAR(of(time.ranks[0], Activity::Compute), 1, kTolerance);
  EXPECT_NEAR(of(time.ranks[0], Activity::Optimizer), 2, kTolerance);
}

TEST(Simulation, TellsProductsAndAttentionFromOtherKernels) {
  Program program;
  program.kernel(1);
  program.computation("aten::mm", 2);
  program.computation("aten::_cudnn_attention_backward", 3);
  program.computation("aten::mm", 4, "optimizer");
  const StepTime::OfRank rank = simulate_one(program).ranks[0];
  EXPECT_NEAR(of(rank, Activity::Compute), 6, kTolerance);
  EXPECT_NEAR(rank.products, 2, kTolerance);
  EXPECT_NEAR(rank.attention, 3, kTolerance);
}

// Short kernels take the host longer than the device, unless they are recorded. The third step is measured, on another stream than the default one.
TEST(Simulation, ARecordedStepTakesTheHostNoTime) {
  const auto step_of = [&](bool is_recorded) {
    Program program;
    const auto kernels = [&] {
      for (int i = 0; i < 10'000; ++i) program.kernel(1e-6, 7);
    };
    kernels();
    program.next_step(7);
    if (is_recorded)
      program.record_graph(kernels);
    else
      kernels();
    return simulate_one(program);
  };
  const StepTime usual = step_of(false), recorded = step_of(true);
  EXPECT_GT(usual.seconds, 0.05);
  EXPECT_GT(of(usual.ranks[0], Activity::Host), 0.04);
  EXPECT_NEAR(recorded.seconds, 0.01, 1e-4);
  EXPECT_NEAR(of(recorded.ranks[0], Activity::Compute), 0.01, 1e-4);
}

TEST(Simulation, KernelsOfTwoStreamsShareTheDevice) {
  Program program;
  program.kernel(1, 0);
  program.kernel(2, 1);
  program.wait(0, program.record(1));
  EXPECT_NEAR(simulate_one(program).seconds, 3, kTolerance);
}

TEST(Simulation, AStreamWaitsForAnEvent) {
  Program program;
  program.kernel(1, 1);
  const int64_t event = program.record(1);
  program.kernel(1, 1);  // after it: the other stream needn't wait for this one
  program.wait(0, event);
  program.kernel(1, 0);
  // One second alone, then two kernels of a second side by side.
  EXPECT_NEAR(simulate_one(program).seconds, 3, kTolerance);
}

TEST(Simulation, CopiesToTheHostTakeNothingFromKernels) {
  Program program;
  program.kernel(3);
  program.copy(kCopyToHost, 2, 1);
  program.copy(kCopyToDevice, 2, 2);  // in the other direction, at the same time
  EXPECT_NEAR(simulate_one(program).seconds, 3, kTolerance);
  program.copy(kCopyToHost, 2, 1);
  program.copy(kCopyToHost, 2, 3);  // shares the bus with those of stream 1
  program.wait(0, program.record(1));
  program.wait(0, program.record(3));
  const StepTime time = simulate_one(program);
  EXPECT_NEAR(time.seconds, 6, kTolerance);
  EXPECT_NEAR(of(time.ranks[0], Activity::ExposedCommunication), 3, kTolerance);
}

TEST(Simulation, ACollectiveIsHiddenByComputationThatDoesNotWaitForIt) {
  Program hidden, exposed;
  const int call = hidden.gather(1);
  hidden.kernel(3);
  hidden.wait_for_call(call);
  hidden.kernel(1);
  const StepTime hiding = simulate_one(hidden);
  EXPECT_NEAR(hiding.seconds, 4.16, 0.02);  // computation beside it is slower (contention)
  EXPECT_NEAR(of(hiding.ranks[0], Activity::ExposedCommunication), 0, kTolerance);
  EXPECT_NEAR(hiding.ranks[0].communicating, 1, kTolerance);

  exposed.wait_for_call(exposed.gather(1));
  exposed.kernel(3);
  const StepTime exposing = simulate_one(exposed);
  EXPECT_NEAR(exposing.seconds, 4, kTolerance);
  EXPECT_NEAR(of(exposing.ranks[0], Activity::ExposedCommunication), 1, kTolerance);
}

TEST(Simulation, CollectivesOfOneRankShareItsLinks) {
  Program program;
  const int first = program.message("send", 1, 1), second = program.message("send", 1, 1, 1);
  program.wait_for_call(first);
  program.wait_for_call(second);
  // One group, whose calls follow each other; to a peer that does the same.
  EXPECT_NEAR(simulate_one(program).seconds, 2, kTolerance);
}

TEST(Simulation, CallsOfRanksThatShareCoresBeginLaterTheMoreTheyComputedBefore) {
  Program program;
  program.kernel(2);
  program.wait_for_call(program.gather(1));
  program.wait_for_call(program.gather(1));
  program.kernel(10);
  program.wait_for_call(program.gather(1));
  ClusterSpec cluster = round_cluster();
  cluster.host.late_share = 0.5;
  cluster.host.late_us = 3e6;
  const StepTime time = simulate({{&program.trace(), 0}}, 8, CostModel(cluster, Kernels::Ours));
  EXPECT_NEAR(time.seconds, 2 + (1 + 1) + 1 + 10 + (3 + 1), kTolerance);
}

TEST(Simulation, SendsOfRanksThatShareCoresTakeLonger) {
  Program first, second;
  first.kernel(2);
  first.message("send", 1, 1);
  second.wait_for_call(second.message("receive", 0, 1));
  ClusterSpec cluster = round_cluster();
  cluster.host.late_share = 0.5;
  cluster.host.late_us = 3e6;
  const StepTime time =
      simulate({{&first.trace(), 0}, {&second.trace(), 1}}, 1, CostModel(cluster, Kernels::Ours));
  EXPECT_NEAR(time.seconds, 2 + (1 + 1), kTolerance);
}

TEST(Simulation, APipelineRankWaitsForTheOneBeforeIt) {
  Program first, second;
  first.kernel(2);
  first.message("send", 1, 1);
  second.wait_for_call(second.message("receive", 0, 1));
  second.kernel(2);
  const StepTime time = simulate({{&first.trace(), 0}, {&second.trace(), 1}}, /*ranks_of_stage=*/1,
                                 CostModel(round_cluster(), Kernels::Ours));
  EXPECT_NEAR(time.seconds, 5, kTolerance);
  EXPECT_NEAR(of(time.ranks[1], Activity::Bubble), 2, kTolerance);
  EXPECT_NEAR(of(time.ranks[1], Activity::ExposedCommunication), 1, kTolerance);
  EXPECT_NEAR(of(time.ranks[1], Activity::Compute), 2, kTolerance);
  for (const StepTime::OfRank& rank : time.ranks)
    EXPECT_NEAR(std::accumulate(rank.seconds.begin(), rank.seconds.end(), 0.0), time.seconds, 1e-9);
}

TEST(Simulation, TheHostDelaysWhatItLaunchesLate) {
  Program program;
  program.kernel(1);
  program.host_waits(program.record(0));
  for (int i = 0; i < 1000; ++i) program.kernel(1e-6);  // the host takes longer to launch than they to run
  const StepTime time = simulate_one(program);
  EXPECT_NEAR(of(time.ranks[0], Activity::Host), 1000 * (8e-6 - 1e-6), 1e-3);
}

TEST(Simulation, NamesCallsThatNobodyAnswers) {
  Program first, second;
  first.wait_for_call(first.message("receive", 1, 1));
  second.wait_for_call(second.message("receive", 0, 1));
  try {
    simulate({{&first.trace(), 0}, {&second.trace(), 1}}, 1, CostModel(round_cluster(), Kernels::Ours));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1: receive"), std::string::npos) << error.what();
  }
}

// Doubles are coarse after days.
TEST(Simulation, EndsAlsoAfterALongTime) {
  Program program;
  for (int i = 0; i < 1000; ++i) {
    program.kernel(3e4 / 7, 0);
    program.kernel(1e4 / 3, 1);
  }
  program.wait(0, program.record(1));
  const double seconds = 1000 * (3e4 / 7 + 1e4 / 3);
  EXPECT_NEAR(simulate_one(program).seconds, seconds, 1e-6 * seconds);
}

TEST(Simulation, SpansAreOfTheSecondStep) {
  Program program;
  program.kernel(1);
  const StepTime time = simulate({{&program.trace(), 0}}, 8, CostModel(round_cluster(), Kernels::Ours), true);
  ASSERT_EQ(time.spans.size(), 1U);
  EXPECT_EQ(time.spans[0].name, "kernel");
  EXPECT_NEAR(time.spans[0].end - time.spans[0].begin, 1, kTolerance);
}

}  // namespace
}  // namespace titan::plan
