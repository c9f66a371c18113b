// `titan train` in Float8: its losses beside those of high precision, on every layout, across a resume, and
// with the recipe of docs/examples/custom_float8. Emulated unless the GPU has units for the recipe.

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "dist/device_backend.h"
#include "e2e/small_run.h"
#include "titan/float8/recipe.h"

namespace titan::testing {
namespace {

// Recipes that aren't registered here (delayed scales and the custom recipe) use rowwise's settings.
bool has_units(const std::string& recipe) {
  const auto& known = float8::recipes();
  auto* backend = tests_on_gpu() ? dist::open_cuda_plugin() : nullptr;
  return backend && backend->compute_capability(0) >=
                        float8::first_capability(known.get(known.contains(recipe) ? recipe : "rowwise"));
}

Words emulated(const std::string& table, const std::string& recipe) {
  return has_units(recipe) ? Words{} : Words{"--" + table + ".emulate"};
}

// "delayed": tensorwise with a history of four steps; "mxfp8...": without the layers whose blocks would be
// split between two ranks.
Words recipe(const std::string& name) {
  const std::string type = "--quantize.linear.float8.scaling_type_";
  if (name == "delayed")
    return recipe("tensorwise") + Words{type + "input",
                                        "delayed",
                                        type + "weight",
                                        "delayed",
                                        type + "grad_output",
                                        "delayed",
                                        "--quantize.linear.float8.history_len",
                                        "4"};
  if (name.starts_with("mxfp8"))
    return emulated("quantize.linear.mx", name) + Words{"--model.converters",
                                                        "quantize.linear.mx",
                                                        "--quantize.linear.mx.recipe_name",
                                                        name,
                                                        "--quantize.linear.mx.filter_fqns",
                                                        "output,attention.wk,attention.wv"};
  return emulated("quantize.linear.float8", name) +
         Words{"--model.converters", "quantize.linear.float8", "--quantize.linear.float8.recipe_name", name};
}

std::vector<Logged> run(const std::string& name, const Words& words) {
  const auto folder = fresh_folder(name);
  return train(folder, small_run(folder) + Words{"--validation.no_enable"} + words);
}

void expect_near(const std::vector<Logged>& ours, const std::vector<Logged>& wanted, double tolerance) {
  ASSERT_EQ(ours.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(ours[i].loss, wanted[i].loss, tolerance) << "step " << i + 1;
    EXPECT_NEAR(ours[i].grad_norm, wanted[i].grad_norm, 2 * tolerance * wanted[i].grad_norm)
        << "step " << i + 1;
  }
}

// The tolerance of Float8's effect on these losses: several times the effect seen (4e-4), far less than one
// step's (1e-2).
constexpr double kEffect = 2e-3;

struct Float8Run : ::testing::TestWithParam<const char*> {};

// Activations are scaled by micro-batch, so each layout's micro-batches are one rank's: one row each. Only
// the order of sums differs, which now and then rounds a value the other way. Float8 itself changed these
// losses by up to 8e-5 (rowwise_with_gw_hp) to 4e-4 (delayed), in micro-batches of two rows.
TEST_P(Float8Run, LayoutsMatchOneRank) {
  const Words words = recipe(GetParam());
  // A GPU's units sum in fewer bits than fp32; how far apart that leaves layouts was never measured.
  const bool units = has_units(GetParam());
  const auto one = run("one", words + Words{"--training.local_batch_size", "1"});
  const std::vector<std::pair<const char*, Words>> layouts = {
      {"fsdp2", {"--training.local_batch_size", "1"}},
      {"tp2", {"--training.local_batch_size", "1", "--parallelism.tensor_parallel_degree", "2"}},
      {"async_tp2",
       {"--training.local_batch_size", "1", "--parallelism.tensor_parallel_degree", "2",
        "--parallelism.enable_async_tensor_parallel"}},
      {"pp2",
       {"--training.local_batch_size", "4", "--parallelism.pipeline_parallel_degree", "2",
        "--parallelism.pipeline_parallel_microbatch_size", "1", "--parallelism.pipeline_parallel_schedule",
        "ZBVZeroBubble"}}};
  for (const auto& [name, layout] : layouts) {
    SCOPED_TRACE(name);
    expect_near(run(name, words + layout + Words{"--nproc", "2"}), one, units ? kEffect : 2e-5);
  }
}

TEST(Float8, GatheringWeightsInFloat8KeepsTheLosses) {
  const Words words = recipe("tensorwise") + Words{"--training.local_batch_size", "2", "--nproc", "2"};
  const std::string key = "--quantize.linear.float8.";
  const auto plain = run("plain", words);
  expect_near(run("gathered", words + Words{key + "enable_fsdp_float8_all_gather"}), plain, 0);
  expect_near(run("at_once", words + Words{key + "enable_fsdp_float8_all_gather",
                                           key + "precompute_float8_dynamic_scale_for_fsdp"}),
              plain, 0);
}

// Casts and products have references, too.
TEST_P(Float8Run, ReferenceKernelsGiveTheSameLosses) {
  const Words words = recipe(GetParam()) + Words{"--nproc", "2", "--parallelism.tensor_parallel_degree", "2"};
  expect_near(run("reference", words + Words{"--ops.kernels", "reference"}), run("own", words),
              has_units(GetParam()) ? kEffect : 2e-5);
}

TEST_P(Float8Run, LossesAreNearHighPrecision) {
  const auto high = run("high", {}), low = run("low", recipe(GetParam()));
  ASSERT_EQ(low.size(), high.size());
  EXPECT_NE(low[0].loss, high[0].loss);  // Float8 has an effect
  for (size_t i = 0; i < high.size(); ++i) {
    EXPECT_NEAR(low[i].loss, high[i].loss, kEffect);
    EXPECT_NEAR(low[i].grad_norm, high[i].grad_norm, kEffect * high[i].grad_norm);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Float8Run,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "mxfp8_cublas"),
                         [](const auto& info) { return std::string(info.param); });

// The debug model in bf16. CI runs a few steps; the nightly test runs 200 (tests/nightly).
TEST(Float8, LossFallsAsInBf16) {
  const char* asked = std::getenv("TITAN_TEST_FLOAT8_STEPS");
  const std::string steps = asked ? asked : "4";
  const Words words = {source_file("configs/llama3_debug.toml"),
                       "--model.hf_assets_path",
                       source_file("assets/tokenizer"),
                       "--training.seq_len",
                       "64",
                       "--training.steps",
                       steps};
  const auto last_losses = [&](const std::string& name, const Words& more) {
    const auto logged = losses(train(fresh_folder(name), words + more));
    const auto count = std::min<size_t>(10, logged.size());
    return std::accumulate(logged.end() - static_cast<std::ptrdiff_t>(count), logged.end(), 0.0) /
           static_cast<double>(count);
  };
  const double bf16 = last_losses("bf16", {});
  for (const char* name :
       {"tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "mxfp8_cublas", "mxfp8_cublas_rceil"})
    EXPECT_NEAR(last_losses(name, recipe(name)), bf16, 0.01 * bf16) << name;
}

TEST(Float8, RecomputingActivationsChangesNothing) {
  const auto plain = run("plain", recipe("tensorwise") + Words{"--activation_checkpoint.mode", "none"});
  for (const char* option : {"1", "op"}) {
    const auto again =
        run(option, recipe("tensorwise") + Words{"--activation_checkpoint.mode", "selective",
                                                 "--activation_checkpoint.selective_ac_option", option});
    EXPECT_EQ(losses(again), losses(plain)) << option;
  }
}

TEST(Float8, ResumesWithAnotherRecipe) {
  const auto folder = fresh_folder("run");
  const Words words =
      small_run(folder) + Words{"--validation.no_enable", "--checkpoint.enable", "--checkpoint.interval", "2",
                                "--checkpoint.no_last_save_model_only"};
  // Both stop at the same step: the learning rates are those of a run of two steps.
  const auto half = Words{"--training.steps", "2"};
  train(folder / "high", words + half);
  const auto high = train(folder / "high", words);
  const auto first = train(folder / "switched", words + recipe("rowwise") + half);
  const auto switched = train(folder / "switched", words + recipe("tensorwise"));
  // A run from scratch would use its own rows.
  ASSERT_EQ(switched.size(), 4u);
  for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(switched[i].loss, first[i].loss);
  EXPECT_NEAR(switched.back().loss, high.back().loss, kEffect);
}

// The second step already reads the history.
TEST(Float8, ResumesDelayedScales) {
  const auto folder = fresh_folder("run");
  const Words words = small_run(folder) + recipe("delayed") +
                      Words{"--validation.no_enable", "--checkpoint.enable", "--checkpoint.interval", "2"};
  const auto whole = train(folder / "whole", words);
  train(folder / "resumed", words + Words{"--training.steps", "2", "--checkpoint.no_last_save_model_only"});
  const auto resumed = train(folder / "resumed", words);
  ASSERT_EQ(whole.size(), 4u);
  ASSERT_EQ(resumed.back().step, 4);
  for (const Logged& step : resumed) {
    EXPECT_EQ(step.loss, whole[static_cast<size_t>(step.step) - 1].loss) << step.step;
    EXPECT_EQ(step.grad_norm, whole[static_cast<size_t>(step.step) - 1].grad_norm) << step.step;
  }
  const auto dynamic =
      train(folder / "dynamic", small_run(folder) + recipe("tensorwise") + Words{"--validation.no_enable"});
  EXPECT_EQ(dynamic[0].loss, whole[0].loss);
  EXPECT_NE(dynamic[3].loss, whole[3].loss);
}

// The shards, which the bytes are cast from, are saved; a load makes earlier casts stale.
TEST(Float8, SavesWeightsGatheredInFloat8InHighPrecision) {
  const auto folder = fresh_folder("run");
  const std::string key = "--quantize.linear.float8.";
  const Words words = small_run(folder) + recipe("tensorwise") +
                      Words{"--validation.no_enable",
                            "--nproc",
                            "2",
                            "--training.local_batch_size",
                            "2",
                            "--checkpoint.enable",
                            "--checkpoint.interval",
                            "2",
                            "--checkpoint.no_last_save_model_only",
                            key + "enable_fsdp_float8_all_gather",
                            key + "precompute_float8_dynamic_scale_for_fsdp"};
  const auto whole = train(folder / "whole", words);
  train(folder / "resumed", words + Words{"--training.steps", "2", "--lr_scheduler.total_steps", "4"});
  // Each rank's file lists its tensors by dtype; moments and weights are fp32 alone.
  int num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "resumed/checkpoint/step-2")) {
    if (entry.path().extension() != ".safetensors") continue;
    ++num_files;
    std::ifstream file(entry.path(), std::ios::binary);
    uint64_t num_bytes = 0;  // only the header, because weights may contain these letters by chance
    file.read(reinterpret_cast<char*>(&num_bytes), sizeof num_bytes);
    ASSERT_LT(num_bytes, std::filesystem::file_size(entry.path()));
    std::string header(num_bytes, ' ');
    file.read(header.data(), static_cast<std::streamsize>(num_bytes));
    EXPECT_THAT(header, HasSubstr("\"dtype\":\"F32\""));
    for (const char* narrow : {"F8_E4M3", "F8_E5M2", "BF16"}) EXPECT_THAT(header, Not(HasSubstr(narrow)));
  }
  EXPECT_EQ(num_files, 2);
  const auto resumed = train(folder / "resumed", words + Words{"--lr_scheduler.total_steps", "4"});
  ASSERT_EQ(whole.size(), 4u);
  ASSERT_EQ(resumed.size(), 4u);
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_EQ(resumed[i].loss, whole[i].loss) << "step " << i + 1;
    EXPECT_EQ(resumed[i].grad_norm, whole[i].grad_norm) << "step " << i + 1;
  }
}

// To delayed scales, which start from nothing, and back, which drops their histories.
TEST(Float8, SwitchesToDelayedScalesAndBack) {
  const auto folder = fresh_folder("run");
  const Words words =
      small_run(folder) + Words{"--validation.no_enable", "--checkpoint.enable", "--checkpoint.interval", "1",
                                "--checkpoint.no_last_save_model_only"};
  // Each run is a step longer: the learning rates are those of short runs.
  const auto in_four_parts = [&](const std::string& name, const std::vector<Words>& parts) {
    std::vector<Logged> last;
    for (size_t i = 0; i < parts.size(); ++i)
      last = train(folder / name, words + parts[i] + Words{"--training.steps", std::to_string(i + 1)});
    return last;
  };
  const auto high = in_four_parts("high", std::vector<Words>(4));
  const auto switched = in_four_parts(
      "switched", {recipe("rowwise"), recipe("delayed"), recipe("mxfp8_cublas"), recipe("delayed")});
  ASSERT_EQ(switched.back().step, 4);
  EXPECT_NEAR(switched.back().loss, high.back().loss, kEffect);
}

// Before any rank starts.
TEST(Float8, RefusesToSplitBlocks) {
  const auto folder = fresh_folder("run");
  const CommandResult result = try_train(small_run(folder) + recipe("mxfp8_cublas") +
                                         Words{"--job.dump_folder", folder.string(), "--nproc", "2",
                                               "--parallelism.tensor_parallel_degree", "2",
                                               "--quantize.linear.mx.filter_fqns", "output"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, ::testing::Not(HasSubstr("rank 0")));
  EXPECT_THAT(result.err, HasSubstr("MXFP8 of 32: layers.0.attention.wk: 64 to 16"));
  EXPECT_THAT(result.err, HasSubstr("filter_fqns"));
}

TEST(Float8, ReportsWhichLayersUseIt) {
  // For the whole model, whatever part of it the first rank has.
  const std::vector<Words> layouts = {
      {},
      {"--nproc", "2", "--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "2"}};
  for (const Words& layout : layouts) {
    const auto folder = fresh_folder("run");
    const CommandResult result =
        try_train(small_run(folder) + recipe("tensorwise") + layout +
                  Words{"--job.dump_folder", folder.string(), "--training.steps", "1",
                        "--quantize.linear.float8.filter_fqns", "attention.wk,atention.wq",
                        "--model.print_after_conversion"});
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_THAT(
        result.err,
        AllOf(
            HasSubstr("Float8 (tensorwise): 12 of 15 linear layers; in high precision: "
                      "layers.*.attention.wk (2): named by filter_fqns (\"attention.wk\"); output: the loss "
                      "head"),
            HasSubstr("layers.0.attention.wq: Float8"), HasSubstr("layers.1.attention.wq: Float8"),
            HasSubstr("no linear layer's name contains \"atention.wq\"")));
  }
}

TEST(Float8, RunsACustomRecipe) {
  const Words own = recipe("rowwise_e5m2") + Words{"--experimental.custom_import",
                                                   std::string(TITAN_BINARY_DIR) + "/lib/librowwise_e5m2.so"};
  const auto ours = run("own", own), theirs = run("rowwise", recipe("rowwise"));
  ASSERT_EQ(ours.size(), theirs.size());
  EXPECT_EQ(ours[0].loss, theirs[0].loss);  // the forward is the same
  EXPECT_NE(ours[0].grad_norm, theirs[0].grad_norm);
  EXPECT_NEAR(ours.back().loss, theirs.back().loss, 0.02 * theirs.back().loss);
}

}  // namespace
}  // namespace titan::testing
