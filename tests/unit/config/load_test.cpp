// Files to settings: TOML and JSON, types, constraints, origins.

#include <gtest/gtest.h>

#include <cmath>

#include "sample_job.h"

namespace titan::config::sample {
namespace {

constexpr const char* kToml = R"(
[model]
name = "large"
[model.args]
tie = true
[training]
seq_len = 128
max_norm = 2           # an int is a float
steps = 1e3            # a float without fraction is an int
dataset_path = "data/ä"
dataloader.pin_memory = true
[optimizer]
lr = 1e-3
seed = 7
groups = ["norm", "bias"]
stages = [["a", "b"], []]
[quantize.linear.float8]
filter_fqns = ["output"]
)";

constexpr const char* kJson = R"({
  "model": {"name": "large", "args": {"tie": true}},
  "training": {"seq_len": 128, "max_norm": 2, "steps": 1e3, "dataset_path": "data/ä",
               "dataloader": {"pin_memory": true}},
  "optimizer": {"lr": 1e-3, "eps": null, "seed": 7, "groups": ["norm", "bias"], "stages": [["a", "b"], []]},
  "quantize": {"linear": {"float8": {"filter_fqns": ["output"]}}}
})";

void expect_the_values(const Result& result) {
  ASSERT_EQ(result.problems, Problems{});
  const Job& job = result.job;
  Training training{.dataset_path = "data/ä", .seq_len = 128, .steps = 1000, .max_norm = 2.0};
  training.dataloader.pin_memory = true;
  EXPECT_EQ(job.training, training);
  EXPECT_EQ(job.training.dataloader.num_workers, 2) << "the aggregate's own default";
  Optimizer optimizer;
  optimizer.lr = 1e-3;
  optimizer.seed = 7;
  optimizer.groups = {"norm", "bias"};
  optimizer.stages = {{"a", "b"}, {}};
  EXPECT_EQ(job.optimizer, optimizer);
  EXPECT_EQ(job.float8.filter_fqns, StringList{"output"});
  EXPECT_EQ(job.args().dim, 4096);
  EXPECT_TRUE(job.args().tie);
}

TEST(Load, Toml) { expect_the_values(load_text(kToml)); }

TEST(Load, ReadsJsonLikeToml) { expect_the_values(load_text(kJson, "a.json")); }

// A saved state holds the config as text: no file is read or included.
TEST(Load, ReadsTextInsteadOfAFile) {
  const auto load_toml = [](const std::string& toml) {
    return load_sample({.file = "a state", .overrides = {}, .toml = toml});
  };
  expect_the_values(load_toml(kToml));
  EXPECT_EQ(load_toml("training.steps = 0").problems,
            Problems{"a state:1:10: training.steps = 0: must be at least 1"});
  EXPECT_EQ(load_toml("include = [\"b.toml\"]").problems.size(), 1u);
  EXPECT_EQ(load_toml("[training\n").problems,
            Problems{"a state:1:10: not TOML: Error while parsing table header: expected ']', saw '\\n'"});
}

TEST(Load, KeepsDefaultsIfNothingIsGiven) {
  Result result = load_sample({});
  ASSERT_EQ(result.problems, Problems{});
  EXPECT_EQ(result.job.training, Training{});
  EXPECT_EQ(result.job.args().dim, 64);
}

TEST(Load, FailureLeavesTheJobUnchanged) {
  Job job;
  job.training.steps = 5;
  EXPECT_THROW(load(schema(), {{}, {"--training.steps", "6", "--training.seq_len", "0"}}, job), ConfigError);
  EXPECT_EQ(job.training.steps, 5);
}

TEST(Load, RefusesAnotherStruct) {
  Training not_a_job;
  EXPECT_THROW(load(schema(), {}, not_a_job), Error);
}

TEST(Load, JsonNullUnsetsWhatAnIncludeSet) {
  ConfigFolder folder;
  folder.write("base.toml", "[optimizer]\nseed = 3\n");
  folder.write("a.json", R"({"include": ["base.toml"], "optimizer": {"seed": null}})");
  Result result = load_sample({"a.json", {}});
  EXPECT_EQ(result.problems, Problems{});
  EXPECT_EQ(result.job.optimizer.seed, std::nullopt);
}

TEST(Load, Infinity) {
  EXPECT_TRUE(std::isinf(load_text("[training]\nmax_norm = inf\n").job.training.max_norm));
  EXPECT_TRUE(std::isinf(load_text(R"({"training": {"max_norm": "inf"}})", "a.json").job.training.max_norm));
  EXPECT_EQ(load_text("[training]\nmax_norm = nan\n").problems,
            Problems{"a.toml:2:1: training.max_norm = nan: must be a float, not nan"});
}

TEST(Load, ReportsEveryProblemInFileOrder) {
  Result result = load_text(R"([training]
steps = 0
seq_len = 1.5
dtype = "float16"
enable_cpu_offload = 1
dataset = ["a"]
dataset_path = 2020-01-01
max_norm = "big"
[optimizer]
groups = ["norm", 1]
stages = ["a"]
beta1 = 1.5
name = "adamw"
)",
                            "a.toml", {"--training.global_batch_size=0"});
  EXPECT_EQ(
      result.problems,
      (Problems{"a.toml:2:1: training.steps = 0: must be at least 1",
                "a.toml:3:1: training.seq_len = 1.5: must be an int, not a float",
                "a.toml:4:1: training.dtype = \"float16\": must be one of \"float32\", \"bfloat16\"; "
                "did you mean 'bfloat16'?",
                "a.toml:5:1: training.enable_cpu_offload = 1: must be a bool, not an int",
                "a.toml:6:1: training.dataset = [\"a\"]: must be a string, not a list",
                "a.toml:7:1: training.dataset_path = <a date or time>: must be a string, not a date or time",
                "a.toml:8:1: training.max_norm = \"big\": must be a float, not a string",
                "a.toml:10:1: optimizer.groups = [\"norm\", 1]: must be a list of strings",
                "a.toml:11:1: optimizer.stages = [\"a\"]: must be a list of lists of strings",
                "a.toml:12:1: optimizer.beta1 = 1.5: must be from 0 to 1",
                "a.toml:13:1: optimizer.name = \"adamw\": must be one of \"Adam\", \"AdamW\"; did you mean "
                "'AdamW'?",
                "--training.global_batch_size = 0: must be positive, or -1"}));
}

TEST(Load, JsonProblemsHaveLineAndColumn) {
  EXPECT_EQ(load_text("{\n  \"training\": {\"steps\": 0,\n    \"seq_len\": null}\n}", "a.json").problems,
            (Problems{"a.json:2:16: training.steps = 0: must be at least 1",
                      "a.json:3:5: training.seq_len = null: must be an int, not null"}));
}

TEST(Load, LongNamesAreCutInMessages) {
  const std::string name(1'000'000, 'k');
  const Result result = load_text("[" + name + "]\na = 1\n[training]\n" + name + " = 1\n");
  const std::string cut = name.substr(0, 100) + "...";
  EXPECT_EQ(result.problems,
            (Problems{"a.toml:1:2: [" + cut + "]: unknown table",
                      "a.toml:4:1: training." + name.substr(0, 91) + "... = 1: unknown key"}));
}

TEST(Load, UnknownKeysSuggestTheNearestName) {
  Result result = load_text(R"(steps = 5
[training]
step = 1
"seq-len" = 1
[model]
seq_len = 128
warmth = 3
[optimizer]
"a.b" = 1
)");
  EXPECT_EQ(
      result.problems,
      (Problems{"a.toml:1:1: steps = 5: unknown key; did you mean 'training.steps' or 'validation.steps'?",
                "a.toml:3:1: training.step = 1: unknown key; did you mean 'training.steps'?",
                "a.toml:4:1: training.seq-len = 1: unknown key; did you mean 'training.seq_len'?",
                "a.toml:6:1: model.seq_len = 128: unknown key; did you mean 'training.seq_len' or "
                "'validation.seq_len'?",
                "a.toml:7:1: model.warmth = 3: unknown key",
                "a.toml:9:1: optimizer.\"a.b\" = 1: unknown key"}));
}

TEST(Load, ReportsAnUnknownTableOnce) {
  Result result = load_text("[trainng]\nsteps = 5\nseq_len = 1\n[trainng.sub]\na = 1\n[float8]\n[zzz]\n");
  EXPECT_EQ(result.problems,
            (Problems{"a.toml:6:2: [float8]: unknown table; did you mean [quantize.linear.float8]?",
                      "a.toml:1:2: [trainng]: unknown table; did you mean [training]?",
                      "a.toml:7:2: [zzz]: unknown table"}));
}

TEST(Load, RefusesTablesForValuesAndValuesForTables) {
  EXPECT_EQ(load_text("training = 5\n").problems,
            Problems{"a.toml:1:1: training = 5: is a table of settings, not a value"});
  EXPECT_EQ(load_text("[training.steps]\nx = 1\n").problems,
            Problems{"a.toml:1:11: [training.steps]: is an int, not a table"});
  EXPECT_EQ(load_text("[[training]]\nsteps = 1\n").problems,
            Problems{"a.toml:1:3: training = [<a table>]: is a table of settings, not a value"});
}

TEST(Load, RefusedKeysAcceptOneValue) {
  EXPECT_EQ(load_text("[training]\ngc_debug = false\n").problems, Problems{});
  EXPECT_EQ(load_text("[training]\ngc_debug = true\n[optimizer]\nmethod = \"x\"\n").problems,
            (Problems{"a.toml:2:1: training.gc_debug = true: not supported: there is no garbage collector; "
                      "only false is accepted",
                      "a.toml:4:1: optimizer.method = \"x\": not supported: one method is enough; it must "
                      "stay unset"}));
}

TEST(Load, RefusalsCanDependOnAFeature) {
  EXPECT_EQ(load_text("[validation]\nwhole_set = false\nsubset = 3\n").problems, Problems{});
  EXPECT_EQ(load_text("[validation]\nwhole_set = 3\n").problems,
            Problems{"a.toml:2:1: validation.whole_set = 3: must be a bool, not an int"});
  std::string refused = "[validation]\nwhole_set = false\nsubset = 3\nenable = true\n";
  EXPECT_EQ(
      load_text(refused).problems,
      (Problems{
          "a.toml:2:1: validation.whole_set = false: not supported with enable: validation is by steps; "
          "only true is accepted",
          "a.toml:3:1: validation.subset = 3: not supported with enable: validation is by steps; "
          "it must stay unset"}));
  EXPECT_EQ(load_text(refused, "a.toml", {"--validation.no_enable"}).problems, Problems{});
  EXPECT_EQ(load_text(refused, "a.toml", {"--validation.whole_set", "--validation.subset", "none"}).problems,
            Problems{});
}

TEST(Load, ChecksOnlyTheEffectiveValue) {
  std::string file = "[training]\ngc_debug = true\nsteps = \"many\"\n";
  Result result =
      load_text(file, "a.toml", {"--training.no_gc_debug", "--training.steps=0", "--training.steps=3"});
  EXPECT_EQ(result.problems, Problems{});
  EXPECT_EQ(result.job.training.steps, 3);
}

TEST(Load, KeysWithoutEffectAcceptAnyValueOfTheirKind) {
  EXPECT_EQ(load_text("[optimizer]\nschedule = \"Interleaved1F1B\"\n").problems, Problems{});
  EXPECT_EQ(load_text("[optimizer]\nschedule = 1\n").problems,
            Problems{"a.toml:2:1: optimizer.schedule = 1: must be a string, not an int"});
}

TEST(Load, MappedKeysSetTheirTarget) {
  Result result = load_text("[optimizer]\nlearning_rate = 0.5\n");
  EXPECT_EQ(result.job.optimizer.lr, 0.5);
  EXPECT_EQ(result.origins.origin_of("optimizer.lr"), "a.toml:2:1");
  EXPECT_EQ(load_text("[optimizer]\nlearning_rate = -1\n").problems,
            Problems{"a.toml:2:1: optimizer.learning_rate = -1: must be at least 0"});
  EXPECT_EQ(load_text("[optimizer]\nlr = 1.0\nlearning_rate = 2.0\n").problems,
            Problems{"a.toml:3:1: optimizer.learning_rate = 2.0: this setting is also given under its "
                     "other name"});
}

TEST(Load, DynamicTablesFollowTheModel) {
  EXPECT_EQ(load_text("[model.args]\ndim = 8\n").job.args().dim, 8);
  EXPECT_EQ(load_text("[model.args]\nwidth = 8\ndim = 0\n").problems,
            (Problems{"a.toml:2:1: model.args.width = 8: unknown key",
                      "a.toml:3:1: model.args.dim = 0: must be at least 1"}));
  EXPECT_EQ(load_text("[model]\nname = \"huge\"\n[model.args]\nanything = 8\n").problems,
            Problems{"a.toml:2:1: model.name = \"huge\": unknown model"});
}

TEST(Load, SkipsDynamicTablesWhileTheModelIsInDoubt) {
  EXPECT_EQ(load_text("[model]\nnam = \"large\"\n[model.args]\nanything = 8\n").problems,
            Problems{"a.toml:2:1: model.nam = \"large\": unknown key; did you mean 'model.name'?"});
  EXPECT_EQ(load_text("[modle]\nname = \"large\"\n[model.args]\nanything = 8\n").problems,
            Problems{"a.toml:1:2: [modle]: unknown table; did you mean [model]?"});
}

TEST(Load, RefusesDuplicateKeys) {
  EXPECT_EQ(load_text("[training]\nsteps = 1\nsteps = 2\n").problems,
            Problems{"a.toml:3:9: not TOML: Error while parsing key-value pair: cannot redefine existing "
                     "integer 'steps'"});
  EXPECT_EQ(load_text("{\"training\": {\"steps\": 1, \"steps\": 2}}", "a.json").problems,
            Problems{"a.json:1:27: training.steps: given twice in the same table"});
}

TEST(Load, SyntaxErrorsHaveAPlace) {
  EXPECT_EQ(load_text("[training\n").problems,
            Problems{"a.toml:1:10: not TOML: Error while parsing table header: expected ']', saw '\\n'"});
  EXPECT_EQ(
      load_text("{\"training\": }", "a.json").problems,
      Problems{
          "a.json:1:14: not JSON: syntax error while parsing value - unexpected '}'; expected '[', '{', or a "
          "literal"});
  EXPECT_EQ(load_text("[]", "a.json").problems,
            Problems{"a.json:1:1: a config is an object: {\"section\": {\"key\": value}}"});
  EXPECT_EQ(load_text("{\"a\": 1e999}", "a.json").problems,
            Problems{"a.json:1:11: not JSON: number overflow parsing '1e999'"});
}

TEST(Load, LimitsDepth) {
  std::string nested;
  for (int i = 0; i < 100; ++i) nested += "{\"a\":";
  EXPECT_EQ(load_text(nested, "a.json").problems, Problems{"a.json:1:321: nested deeper than 64"});
  EXPECT_EQ(load_text("{\"a\":" + std::string(100000, '['), "a.json").problems,
            Problems{"a.json:1:69: nested deeper than 64"});
  EXPECT_EQ(load_text("x = " + std::string(100000, '[')).problems.size(), 1u);
  std::string dotted = "a";
  for (int i = 0; i < 100000; ++i) dotted += ".a";
  EXPECT_EQ(load_text(dotted + " = 1").problems, Problems{"a.toml:1:1: a line with more than 1000 dots"});
}

TEST(Load, LongValuesAreCutInMessages) {
  std::string problem = load_text("[training]\nsteps = \"" + std::string(5000, 'x') + "\"\n").problems.at(0);
  EXPECT_LT(problem.size(), 200u);
}

TEST(Load, OnlyTheFirstOfManyUnknownKeysGetSuggestions) {
  std::string text = "[training]\n";
  for (int i = 0; i < 1000; ++i) text += "seq_len" + std::to_string(i) + " = 1\n";
  const Problems problems = load_text(text).problems;
  ASSERT_EQ(problems.size(), 1000u);
  EXPECT_NE(problems.front().find("did you mean"), std::string::npos) << problems.front();
  EXPECT_EQ(problems.back().find("did you mean"), std::string::npos) << problems.back();
}

TEST(Load, ReportsMissingFilesAndWrongFileTypes) {
  EXPECT_EQ(load_sample({"none.toml", {}}).problems,
            Problems{"cannot read none.toml: No such file or directory (ENOENT)"});
  EXPECT_EQ(load_sample({"a.yaml", {}}).problems, Problems{"a.yaml: a config file ends in .toml or .json"});
}

TEST(Load, OriginsPointAtThePlace) {
  Origins origins = load_text("[training]\nseq_len = 100\n", "a.toml", {"--optimizer.lr=1e-3"}).origins;
  EXPECT_EQ(origins.origin_of("training.seq_len"), "a.toml:2:1");
  EXPECT_EQ(origins.origin_of("optimizer.lr"), "command line");
  EXPECT_EQ(origins.origin_of("training.steps"), "default");
  EXPECT_EQ(origins.problem("training.seq_len", "must divide"),
            "a.toml:2:1: training.seq_len = 100: must divide");
  EXPECT_EQ(origins.problem("optimizer.lr", "is low"), "--optimizer.lr = 1e-3: is low");
  EXPECT_EQ(origins.problem("training.steps", "is high"), "training.steps = 10000 (default): is high");
  EXPECT_EQ(Origins().problem("training.steps", "is high"), "training.steps: is high");
}

}  // namespace
}  // namespace titan::config::sample
