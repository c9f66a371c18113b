// The trainer while a save runs in the background, and the logged cost of saves. Besides the toy's weights
// there is a parameter so large that copying and writing it takes longer than the steps do.

#include <gmock/gmock.h>
#include <sys/resource.h>

#include "distributed/trainer_case.h"
#include "titan/checkpoint/step_folder.h"
#include "train/whole_model_runner.h"

namespace titan::train {
namespace {

constexpr int64_t kLargeBytes = int64_t{48} << 20;

// Its name sorts first, so that the other parameters are copied last.
Parameter large_parameter(const DeviceMesh& mesh, int64_t bytes) {
  DTensor data{.local = at::zeros({bytes / 4}, device()),
               .mesh = mesh,
               .placements = std::vector<Placement>(static_cast<size_t>(mesh.num_axes())),
               .global_shape = {bytes / 4},
               .box = {{0}, {bytes / 4}}};
  return {.name = "a_large", .data = data, .compute = data.local, .init = {}};
}

Trainer trainer_that_saves(const std::string& async_mode, bool late, const std::filesystem::path& folder,
                           const CheckpointSettings& given = {}, decltype(Job::at_phase) at_phase = {},
                           const char* buffer = nullptr, int64_t large_bytes = kLargeBytes,
                           int64_t steps = 3) {
  // A run without an end logs nothing after step 1.
  const int64_t freq = steps == 3 ? 1 : steps;
  Job job{.options = {.steps = steps, .log_freq = freq, .read_late = late}, .folder = folder};
  job.at_phase = std::move(at_phase);
  Meshes meshes = build_meshes(world(), {.dp_shard = world().size()});
  auto model = build_model(meshes, job);
  if (buffer) model->root().module().register_buffer(buffer, at::zeros({1}, device()));
  auto list = titan::parameters(model->root());
  auto runner = std::make_unique<WholeModelRunner>(*model, device());
  optim::Optimizer optimizer(list, {.lr = 0.1});
  list.push_back(large_parameter(meshes.fsdp, large_bytes));
  RunCheckpoints::Options options{.settings = given, .folder = folder / "checkpoint"};
  if (given.interval == CheckpointSettings{}.interval) options.settings.interval = 1;
  options.settings.async_mode = async_mode;
  auto policies = fault_tolerance_policies({}, world());
  policies.push_back({"validation", std::make_unique<Validation>(ValidationSettings{.freq = freq, .steps = 1},
                                                                 build_loader(job, meshes))});
  return Trainer({.world = world(),
                  .meshes = meshes,
                  .device = device(),
                  .models = one_model(std::move(model)),
                  .runner = std::move(runner),
                  .parameters = list,
                  .optimizer = std::move(optimizer),
                  .schedule = optim::LrSchedule({.warmup_steps = 2}, job.options.steps),
                  .loader = build_loader(job, meshes),
                  .window = MetricsWindow(device(), {}),
                  .checkpoints = std::make_unique<RunCheckpoints>(world(), meshes, list, options),
                  .observers = observers_of(job, list),
                  .policies = std::move(policies)},
                 job.options);
}

at::Tensor saved_table(const std::filesystem::path& folder, int64_t step) {
  return checkpoint::SavedState(checkpoint::step_path(folder / "checkpoint", step)).read("model.table");
}

TEST(TrainerCheckpoints, WeightsChangeOnlyAfterTheyAreCopied) {
  for (const bool late : {false, true}) {
    const SharedFolder folder;
    trainer_that_saves("disabled", late, folder.path / "plain").train();
    trainer_that_saves("async_with_pinned_mem", late, folder.path / "beside").train();
    for (const int64_t step : {1, 2, 3})
      EXPECT_TRUE(
          at::equal(saved_table(folder.path / "plain", step), saved_table(folder.path / "beside", step)))
          << "step " << step << (late ? ", read late" : "");
    EXPECT_FALSE(at::equal(saved_table(folder.path / "plain", 1), saved_table(folder.path / "plain", 2)));
    world().everyone()->barrier({"test::saved"}).wait();  // before the folder is removed
  }
}

TEST(TrainerCheckpoints, SaveTimeIsNotStepTime) {
  const SharedFolder folder;
  // Far longer than a step takes, even beside other programs.
  trainer_that_saves("disabled", false, folder.path, {}, {}, nullptr, 6 * kLargeBytes).train();
  if (world().rank() == 0) {
    const auto lines = logged(folder.path);
    ASSERT_EQ(lines.size(), 3u);
    int num_shorter = 0;  // one is enough: a step that holds a save is never shorter than the save
    for (const size_t after_a_save : {1u, 2u}) {
      const double saving = lines[after_a_save].at("checkpoint_s"), step = lines[after_a_save].at("step_s");
      EXPECT_GT(saving, 0.01);
      num_shorter += step < saving;
    }
    EXPECT_GT(num_shorter, 0) << "step_s includes checkpoint_s";
  }
  world().everyone()->barrier({"test::saved"}).wait();
}

// A run that resumes after a step doesn't validate it again.
TEST(TrainerCheckpoints, ValidatesAStepBeforeSavingIt) {
  const SharedFolder folder;
  std::vector<Phase> phases;
  const auto at_phase = [&](Phase phase, int64_t, const std::vector<Parameter>&) {
    if (phase == Phase::Save || phase == Phase::Validate) phases.push_back(phase);
  };
  trainer_that_saves("disabled", false, folder.path, {}, at_phase).train();
  EXPECT_THAT(phases, ::testing::ElementsAre(Phase::Validate, Phase::Save, Phase::Validate, Phase::Save,
                                             Phase::Validate, Phase::Save));
  world().everyone()->barrier({"test::saved"}).wait();
}

TEST(TrainerCheckpoints, ReportsBuffersThatAreNotSaved) {
  const SharedFolder folder;
  const auto log_of = [&](const char* buffer) {
    ::testing::internal::CaptureStderr();
    trainer_that_saves("disabled", false, folder.path, {}, {}, buffer);
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string log = log_of("running_mean"), plain = log_of(nullptr);
  if (world().rank() == 0)
    EXPECT_THAT(log, ::testing::HasSubstr("checkpoints don't hold the model's buffers: running_mean"));
  EXPECT_THAT(plain, ::testing::Not(::testing::HasSubstr("buffers")));
  world().everyone()->barrier({"test::logged"}).wait();
}

// As on a full disk: no file may grow beyond a MiB.
void limit_files(bool limited) {
  static const rlimit before = [] {
    rlimit now{};
    getrlimit(RLIMIT_FSIZE, &now);
    return now;
  }();
  const rlimit small{.rlim_cur = 1 << 20, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, limited ? &small : &before);
}

// A save that fails is only logged; but the last one is the run's result.
TEST(TrainerCheckpoints, FailsIfTheLastStateIsNotSaved) {
  const SharedFolder folder;
  const auto at_phase = [](Phase phase, int64_t step, const std::vector<Parameter>&) {
    if (phase == Phase::Save) limit_files(step != 2);
  };
  Trainer trainer = trainer_that_saves("disabled", false, folder.path, {.on_failure = "continue"}, at_phase);
  const std::string message = message_of_training(trainer);
  limit_files(false);
  EXPECT_THAT(message, ::testing::HasSubstr("checkpoint of step 3: "));
  EXPECT_TRUE(folder.has("checkpoint/step-2"));
  EXPECT_FALSE(folder.has("checkpoint/step-1"));
  world().everyone()->barrier({"test::saved"}).wait();
}

// There is no later save that would notice it.
TEST(TrainerCheckpoints, BackgroundFailureStopsTheRunAtAStep) {
  const SharedFolder folder;
  constexpr int64_t far = 1'000'000;
  int64_t last = 0;
  const auto at_phase = [&last](Phase phase, int64_t step, const std::vector<Parameter>&) {
    if (phase == Phase::Save) limit_files(true);
    last = step;
  };
  Trainer trainer =
      trainer_that_saves("async", false, folder.path, {.interval = far, .enable_first_step_checkpoint = true},
                         at_phase, nullptr, kLargeBytes, far);
  const std::string message = message_of_training(trainer);
  limit_files(false);
  EXPECT_THAT(message, ::testing::HasSubstr("checkpoint of step 1: "));
  EXPECT_LT(last, far);
  const auto steps = world().everyone()->all_gather_text(std::to_string(last), {"test::last step"});
  EXPECT_EQ(steps, std::vector<std::string>(steps.size(), steps.front()));
  EXPECT_FALSE(folder.has("checkpoint/step-1"));
  world().everyone()->barrier({"test::stopped"}).wait();
}

// Once the last step's model exists, nothing is trained, logged or written again.
TEST(TrainerCheckpoints, RunThatIsOutOfDataHasEnded) {
  const SharedFolder folder;
  const auto train_and_count = [&](int64_t num_steps) {
    int64_t steps = 0;
    Job job{.feed = std::make_shared<CountedFeed>(num_steps),
            .options = {.steps = 20, .log_freq = 1},
            .folder = folder.path,
            .checkpoints = folder.path / "checkpoint",
            .saves_whole = true,
            .exports_model = true,
            .save_interval = 2};
    job.at_phase = [&](Phase phase, int64_t, const std::vector<Parameter>&) {
      steps += phase == Phase::Step;
    };
    start(job).trainer.train();
    world().everyone()->barrier({"test::trained"}).wait();
    return steps;
  };
  EXPECT_EQ(train_and_count(5), 5);
  const auto model = folder.path / "checkpoint/step-5/model.safetensors";
  ASSERT_TRUE(std::filesystem::exists(model));
  const auto written = std::filesystem::last_write_time(model);
  EXPECT_EQ(train_and_count(5), 0);
  EXPECT_EQ(std::filesystem::last_write_time(model), written);
  if (world().rank() == 0) EXPECT_EQ(logged(folder.path).size(), 5u);
  // More data: after the last whole state, which is from step 4.
  EXPECT_EQ(train_and_count(7), 3);
  EXPECT_TRUE(folder.has("checkpoint/step-7/model.safetensors"));
  world().everyone()->barrier({"test::saved"}).wait();
}

}  // namespace
}  // namespace titan::train
