// The command line's overrides.

#include <gtest/gtest.h>

#include "sample_job.h"

namespace titan::config::sample {
namespace {

Job job_of(std::vector<std::string> words) {
  Result result = load_words(std::move(words));
  EXPECT_EQ(result.problems, Problems{});
  return result.job;
}

TEST(Words, EveryForm) {
  EXPECT_EQ(job_of({"--training.steps", "5"}).training.steps, 5);
  EXPECT_EQ(job_of({"--training.steps=5"}).training.steps, 5);
  EXPECT_EQ(job_of({"--training.seq-len", "5"}).training.seq_len, 5);
  EXPECT_EQ(job_of({"--training.global_batch_size", "-1"}).training.global_batch_size, -1);
  EXPECT_EQ(job_of({"--training.steps", "1", "--training.steps", "2"}).training.steps, 2);
  EXPECT_EQ(job_of({"--training.dataloader.num_workers", "4"}).training.dataloader.num_workers, 4);
  EXPECT_EQ(job_of({"--training.dataset=a=b"}).training.dataset, "a=b");
  EXPECT_EQ(job_of({"--training.dataset="}).training.dataset, "");
}

TEST(Words, Booleans) {
  EXPECT_TRUE(job_of({"--training.enable_cpu_offload"}).training.enable_cpu_offload);
  EXPECT_TRUE(job_of({"--training.enable-cpu-offload", "true"}).training.enable_cpu_offload);
  EXPECT_FALSE(job_of({"--training.enable_cpu_offload", "false"}).training.enable_cpu_offload);
  EXPECT_FALSE(job_of({"--training.enable_cpu_offload=false"}).training.enable_cpu_offload);
  EXPECT_FALSE(job_of({"--training.enable_cpu_offload", "--training.no_enable_cpu_offload"})
                   .training.enable_cpu_offload);
  EXPECT_FALSE(job_of({"--training.no-enable-cpu-offload"}).training.enable_cpu_offload);
  Job job = job_of({"--training.enable_cpu_offload", "--training.steps", "5"});
  EXPECT_TRUE(job.training.enable_cpu_offload);
  EXPECT_EQ(job.training.steps, 5);
}

TEST(Words, NumbersAndInfinity) {
  EXPECT_EQ(job_of({"--optimizer.lr", "1"}).optimizer.lr, 1.0);
  EXPECT_EQ(job_of({"--optimizer.lr", "3e-4"}).optimizer.lr, 3e-4);
  EXPECT_EQ(job_of({"--training.steps", "1e4"}).training.steps, 10000);
  EXPECT_GT(job_of({"--training.max_norm", "inf"}).training.max_norm, 1e300);
}

TEST(Words, Lists) {
  EXPECT_EQ(job_of({"--optimizer.groups", "norm,bias"}).optimizer.groups, (StringList{"norm", "bias"}));
  EXPECT_EQ(job_of({"--optimizer.groups=norm"}).optimizer.groups, StringList{"norm"});
  EXPECT_EQ(job_of({"--optimizer.groups="}).optimizer.groups, StringList{});
  EXPECT_EQ(job_of({"--optimizer.stages", "a,b;c"}).optimizer.stages,
            (std::vector<StringList>{{"a", "b"}, {"c"}}));
}

TEST(Words, NoneUnsetsOptionalFields) {
  EXPECT_EQ(load_text("[optimizer]\nseed = 3\n", "a.toml", {"--optimizer.seed", "none"}).job.optimizer.seed,
            std::nullopt);
  EXPECT_EQ(job_of({"--optimizer.fused=false"}).optimizer.fused, false);
  EXPECT_EQ(load_words({"--training.steps", "none"}).problems,
            Problems{"--training.steps = none: must be an int, not a string"});
}

TEST(Words, DynamicTables) {
  EXPECT_EQ(job_of({"--model.args.dim=7", "--model.name", "large"}).args().dim, 7);
  EXPECT_TRUE(job_of({"--model.args.tie"}).args().tie);
  EXPECT_FALSE(job_of({"--model.args.tie", "--model.args.no_tie"}).args().tie);
}

TEST(Words, Problems) {
  EXPECT_EQ(load_words({"stray", "--training.steps", "--training.seq_len=x", "--training.enable_cpu_offload",
                        "yes", "--trainng.steps", "5", "--steps=5", "--training.no_steps", "--training",
                        "--optimizer.learning_rat=1"})
                .problems,
            (sample::Problems{
                "'stray': expected --section.key",
                "--training.steps: needs a value (int)",
                "--training.seq_len = x: must be an int, not a string",
                "--training.enable_cpu_offload = yes: must be a bool, not a string",
                "--trainng.steps = 5: unknown key; did you mean 'training.steps' or 'validation.steps'?",
                "--steps = 5: unknown key; did you mean 'training.steps' or 'validation.steps'?",
                "--training.no_steps: unknown key; did you mean 'training.steps'?",
                "--training: is a table of settings, not a value",
                "--optimizer.learning_rat = 1: unknown key; did you mean 'optimizer.learning_rate'?",
            }));
}

TEST(Words, MustBeUtf8) {
  EXPECT_EQ(load_words({"--training.dataset", "\xff"}).problems,
            sample::Problems{"command-line word 2 is not UTF-8"});
  EXPECT_EQ(job_of({"--training.dataset", "日本 é 🙂"}).training.dataset, "日本 é 🙂");
}

TEST(Words, OverrideValueLooksAhead) {
  std::vector<std::string> words{"--job.config-file", "a.toml", "--x", "--job.config_file=b.toml",
                                 "--job.config_file"};
  EXPECT_EQ(override_value({words.begin(), words.begin() + 3}, "job.config_file"), "a.toml");
  EXPECT_EQ(override_value({words.begin(), words.begin() + 4}, "job.config_file"), "b.toml");
  EXPECT_EQ(override_value(words, "job.dump_folder"), std::nullopt);
  EXPECT_EQ(override_value({"--x", "--job.config_file"}, "job.config_file"), std::nullopt);
}

}  // namespace
}  // namespace titan::config::sample
