#include "titan/config/load.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>

#include "sample_job.h"

namespace titan::config::sample {
namespace {

Job awkward_job() {
  Job job = load_words({"--model.name=large", "--model.args.dim=3"}).job;
  job.training.dataset = std::string("q\"\\ \n\t\x01\x7f # ä 🙂") + '\0' + "after a zero";
  job.training.dataset_path = "";
  job.training.seq_len = std::numeric_limits<int64_t>::max();
  job.training.max_norm = std::numeric_limits<double>::infinity();
  job.optimizer.lr = 0.1 + 0.2;
  job.optimizer.beta1 = 5e-324;
  job.optimizer.eps = 1e22;
  job.optimizer.groups = {"norm", "all"};
  job.optimizer.stages = {{"a,b", "\""}, {}};
  job.optimizer.fused = false;
  job.float8.filter_fqns = {};
  return job;
}

void expect_equal(const Job& a, const Job& b) {
  EXPECT_EQ(a.training, b.training);
  EXPECT_EQ(a.optimizer, b.optimizer);
  EXPECT_EQ(a.validation, b.validation);
  EXPECT_EQ(a.float8, b.float8);
  EXPECT_EQ(a.model, b.model);
  EXPECT_EQ(a.args().dim, b.args().dim);
}

TEST(Print, TomlReadsBackToEqualValues) {
  Job job = awkward_job();
  Result again = load_text(print_toml(schema(), job));
  ASSERT_EQ(again.problems, Problems{}) << print_toml(schema(), job);
  expect_equal(again.job, job);
}

TEST(Print, JsonReadsBackToEqualValues) {
  Job job = awkward_job();
  Result again = load_text(print_json(schema(), job), "a.json");
  ASSERT_EQ(again.problems, Problems{}) << print_json(schema(), job);
  expect_equal(again.job, job);
}

TEST(Print, AnyDoubleSurvives) {
  std::mt19937_64 bits(1);
  for (int i = 0; i < 2000; ++i) {
    uint64_t pattern = bits() >> 1;  // not negative
    double value;
    std::memcpy(&value, &pattern, sizeof value);
    if (!(value <= std::numeric_limits<double>::max())) continue;
    EXPECT_EQ(std::stod(to_text(Value(value))), value);
    EXPECT_NE(to_text(Value(value)).find_first_of(".e"), std::string::npos);
  }
}

TEST(Print, Toml) {
  Job job = load_words({"--optimizer.groups=norm,bias", "--training.max_norm=2"}).job;
  EXPECT_EQ(print_toml(schema(), job), R"([model]
name = "small"

[model.args]
dim = 64
tie = false

[training]
dataset = "c4"
# dataset_path is unset (string)
seq_len = 2048
steps = 10000
global_batch_size = -1
max_norm = 2.0
enable_cpu_offload = false
dtype = "float32"

[training.dataloader]
num_workers = 2
pin_memory = false

[optimizer]
name = "AdamW"
lr = 8e-4
beta1 = 0.9
# eps is unset (float)
# seed is unset (int)
# fused is unset (bool)
groups = ["norm", "bias"]
stages = []

[validation]
enable = false
steps = -1
seq_len = 2048

[quantize.linear.float8]
filter_fqns = []
)");
}

TEST(Print, Json) {
  std::string text = print_json(schema(), load_words({}).job);
  EXPECT_EQ(text.rfind(R"({
  "model": {
    "name": "small",
    "args": {
      "dim": 64,
      "tie": false
    }
  },
  "training": {
    "dataset": "c4",
    "data)",
                       0),
            0u)
      << text;
  EXPECT_NE(text.find("\"dataset_path\": null"), std::string::npos);
}

TEST(Print, RefusesAnotherStruct) { EXPECT_THROW(print_toml(schema(), Training{}), Error); }

TEST(Help, OneEntryPerKeyGroupedByTable) {
  std::string text = help_text(schema(), 60);
  EXPECT_EQ(text.rfind(R"([model]  what is trained
  --model.name string
        which ["small"]

[model.args]  sizes
  --model.args.dim int
        width; at least 1 [64]
  --model.args.tie bool
        one matrix for both ends [false]

[training]
  --training.dataset string
        data source ["c4"]
  --training.dataset_path string?
        path [unset]
)",
                       0),
            0u)
      << text;
  EXPECT_NE(text.find(R"(  --optimizer.name string
        algorithm; one of "Adam", "AdamW" ["AdamW"]
)"),
            std::string::npos);
  EXPECT_NE(text.find("        accepted without effect: there is one stage\n"), std::string::npos);
  EXPECT_NE(text.find("        another name of lr: deprecated\n"), std::string::npos);
  EXPECT_NE(text.find("        not supported: there is no garbage collector\n"), std::string::npos);
  size_t longest = 0;
  for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1)
    longest = std::max(longest, end - at);
  EXPECT_LE(longest, 60u);
}

TEST(Markdown, WritesOneTablePerSection) {
  std::string text = markdown(schema());
  EXPECT_NE(
      text.find(
          "## [optimizer]\n\n| key | type | default | allowed | meaning |\n| --- | --- | --- | --- | --- |\n"
          "| `name` | string | `\"AdamW\"` | one of \"Adam\", \"AdamW\" | algorithm |\n"),
      std::string::npos);
  EXPECT_NE(text.find("| `beta1` | float | `0.9` | from 0 to 1 | decay \\| mean |\n"), std::string::npos);
  EXPECT_NE(
      text.find(
          "| `gc_debug` | bool | `false` | only false | not supported: there is no garbage collector |\n"),
      std::string::npos);
  EXPECT_NE(text.find("| not supported with enable: validation is by steps |\n"), std::string::npos);
  EXPECT_NE(text.find("## [quantize.linear.float8]"), std::string::npos);
}

TEST(KeyTable, SaysWhatHappensToEachKey) {
  EXPECT_EQ(key_table(schema(), {{"optimizer.lr", "8e-4"},
                                 {"optimizer.beta1", "0.8"},
                                 {"optimizer.learning_rate", "unset"},
                                 {"optimizer.schedule", "\"1F1B\""},
                                 {"training.gc_debug", "false"},
                                 {"validation.whole_set", "true"}}),
            R"(| key | here | its default | default here | note |
| --- | --- | --- | --- | --- |
| `optimizer.lr` | accepted | `8e-4` | same | peak learning rate |
| `optimizer.beta1` | accepted | `0.8` | `0.9` | decay \| mean |
| `optimizer.learning_rate` | mapped to `lr` | `unset` |  | deprecated |
| `optimizer.schedule` | without effect | `"1F1B"` | same | there is one stage |
| `training.gc_debug` | refused | `false` | same | there is no garbage collector |
| `validation.whole_set` | refused with `enable` | `true` | same | validation is by steps |
)");
  EXPECT_THROW(key_table(schema(), {{"optimizer.none", ""}}), Error);
}

TEST(Help, ShowsTheDynamicTablesOfAJob) {
  const Result large = load_words({"--model.name", "large", "--model.args.dim", "128"});
  EXPECT_NE(help_text(schema(), large.job).find("width; at least 1 [4096]"), std::string::npos);
  EXPECT_NE(help_text(schema()).find("width; at least 1 [64]"), std::string::npos);
  EXPECT_THROW(help_text(schema(), Training{}), Error);
}

}  // namespace
}  // namespace titan::config::sample
