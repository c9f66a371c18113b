// docs/examples/custom_model: a user's model, as a shared object and as a binary.

#include <fstream>
#include <iterator>

#include "e2e/training.h"

namespace titan::testing {
namespace {

Words ngram_config(const std::string& steps) {
  return {source_file("docs/examples/custom_model/ngram.toml"), "--training.steps", steps,
          "--metrics.log_freq", "1"};
}

Words by_import() {
  return {"--experimental.custom_import", std::string(TITAN_BINARY_DIR) + "/lib/libngram.so"};
}

TEST(CustomModel, TrainsFromASharedObject) {
  auto steps = train(fresh_folder("run"), ngram_config("20") + by_import());
  ASSERT_EQ(steps.size(), 20u);
  EXPECT_LT(steps.back().loss, steps.front().loss - 1.5);
}

TEST(CustomModel, TrainsFromItsOwnBinary) {
  auto folder = fresh_folder("run");
  CommandResult result = run(Words{built("ngram_titan"), "train"} + ngram_config("3") +
                                 Words{"--nproc", "2", "--job.dump_folder", folder.string()} + device_words(),
                             {{"OMP_NUM_THREADS", "1"}});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(read_metrics(folder).size(), 3u);
}

TEST(CustomModel, IsUnknownWithoutTheImport) {
  CommandResult result = try_train(ngram_config("3"));
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("unknown model 'ngram'"));
}

TEST(CustomModel, NamesAMissingSharedObject) {
  CommandResult result = try_train(ngram_config("3") + Words{"--experimental.custom_import", "no_such.so"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("no_such.so"));
  EXPECT_THAT(result.err, HasSubstr("custom_import"));
}

// A stamp in the file names the build that it was compiled against.
TEST(CustomModel, RefusesASharedObjectOfAnotherBuild) {
  std::ifstream library(std::string(TITAN_BINARY_DIR) + "/lib/libngram.so", std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(library), {});
  const std::string stamp = "titan build stamp: LibTitan ";
  const size_t at = bytes.find(stamp);
  ASSERT_NE(at, std::string::npos);
  // Named by its path, and by its name alone, which the loader's folders give a path.
  const auto refusal_of = [&](const char* name) {
    const auto folder = fresh_folder(name);
    std::ofstream(folder / "libngram.so", std::ios::binary) << bytes;
    std::string errors;
    for (const std::string& import : {(folder / "libngram.so").string(), std::string("libngram.so")}) {
      const CommandResult result =
          run(train_words(ngram_config("3") + Words{"--experimental.custom_import", import}),
              {{"LD_LIBRARY_PATH", folder.string()}});
      EXPECT_EQ(result.status, 2);
      EXPECT_THAT(result.err, HasSubstr("experimental.custom_import"));
      errors += result.err;
    }
    return errors;
  };
  const auto with = [&](const std::string& text, size_t position) {
    const std::string before = bytes.substr(position, text.size());
    bytes.replace(position, text.size(), text);
    return before;
  };
  const std::string version = with("9.9.9", at + stamp.size());
  EXPECT_THAT(refusal_of("version"), AllOf(HasSubstr("was compiled against LibTitan 9.9.9 (build "),
                                           HasSubstr("but this program is LibTitan ")));
  with(version, at + stamp.size());
  const size_t build = bytes.find("(build ", at) + 7;
  const std::string digit = with("x", build);
  EXPECT_THAT(refusal_of("build"), ContainsRegex("was compiled against LibTitan " + version + " .build x"));
  with(digit, build);
  for (size_t next = bytes.find(stamp); next != std::string::npos; next = bytes.find(stamp, next))
    bytes.replace(next, 5, "TITAN");
  EXPECT_THAT(refusal_of("none"), HasSubstr("doesn't say which build of LibTitan it was compiled against"));
}

TEST(CustomModel, IsFoundByItsNameInTheLoadersFolders) {
  const CommandResult result =
      run(train_words(ngram_config("3") + Words{"--experimental.custom_import", "libngram.so",
                                                "--job.dump_folder", fresh_folder("run").string()}),
          {{"LD_LIBRARY_PATH", std::string(TITAN_BINARY_DIR) + "/lib"}});
  EXPECT_EQ(result.status, 0) << result.err;
}

TEST(CustomModel, HasTheSameLossesOnAnyNumberOfRanks) {
  Words words = ngram_config("8") + by_import() + Words{"--training.global_batch_size", "8"};
  auto one = train(fresh_folder("one"), words);
  for (const char* ranks : {"2", "3"}) {
    auto many = train(fresh_folder(ranks), words + Words{"--nproc", ranks});
    ASSERT_EQ(many.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i)
      EXPECT_NEAR(many[i].loss, one[i].loss, 5e-6) << ranks << " ranks, step " << i + 1;
  }
}

TEST(CustomModel, HasTheSameLossesInPipelines) {
  const Words words = ngram_config("8") + by_import();
  const auto one = train(fresh_folder("one"), words);
  const Words two = words + Words{"--nproc", "2", "--parallelism.pipeline_parallel_degree", "2"};
  const Words three = words + Words{"--nproc",
                                    "3",
                                    "--parallelism.pipeline_parallel_degree",
                                    "3",
                                    "--parallelism.module_fqns_per_model_part",
                                    "embedding;mix;head"};
  for (const Words& layout : {two, three}) {
    const auto many = train(fresh_folder("many"), layout);
    ASSERT_EQ(many.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(many[i].loss, one[i].loss, 5e-6) << "step " << i + 1;
  }
}

TEST(CustomModel, ANamedPlanReplacesTheModelsOwn) {
  Words words = ngram_config("6") + by_import() + Words{"--nproc", "2"};
  auto folder = fresh_folder("plan");
  CommandResult result =
      try_train(words + Words{"--parallelism.plan", "keep_gathered", "--job.dump_folder", folder.string()});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("plan keep_gathered"));
  EXPECT_EQ(losses(read_metrics(folder)), losses(train(fresh_folder("own"), words)));
}

TEST(CustomModel, NamesAnUnknownPlan) {
  CommandResult result =
      try_train(ngram_config("3") + by_import() + Words{"--parallelism.plan", "keep_gatherd"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("parallelism.plan"));
  EXPECT_THAT(result.err, HasSubstr("did you mean 'keep_gathered'"));
}

TEST(CustomModel, TwoRunsAreBitEqual) {
  Words words = ngram_config("6") + by_import() + Words{"--nproc", "2"};
  EXPECT_EQ(losses(train(fresh_folder("a"), words)), losses(train(fresh_folder("b"), words)));
}

TEST(CustomModel, HelpShowsItsArguments) {
  for (const Words& words : {ngram_config("3") + by_import(),
                             by_import() + Words{"--model.name", "ngram", "--model.flavor", "small"}}) {
    const CommandResult result = try_train(words + Words{"--help"});
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_THAT(result.out, AllOf(HasSubstr("--model.args.context int"), HasSubstr("--training.seq_len int"),
                                  Not(HasSubstr("--model.args.n_layers"))));
  }
  const CommandResult without = try_train(ngram_config("3") + Words{"--help"});
  EXPECT_EQ(without.status, 0) << without.err;
  EXPECT_THAT(without.out, AllOf(HasSubstr("--model.args.n_layers"), HasSubstr("unknown model 'ngram'")));
}

}  // namespace
}  // namespace titan::testing
