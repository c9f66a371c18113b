// Refused keys: the key that a refusal depends on, and the values allowed while that is off.

#include <gtest/gtest.h>

#include "titan/config/load.h"

namespace titan::config {
namespace {

struct Checkpoint {
  bool enable = false;
};
struct Pipeline {
  int64_t degree = 1;
};
struct Rate {
  double lr = 0;
  double beta = 0;
};

void describe(Table<Checkpoint>& table) {
  table.field("enable", &Checkpoint::enable, "save");
  table.refused("mode", std::string("sync"), "one file is written", "enable", one_of({"sync", "async"}));
  table.refused("stage", int64_t{0}, "there is one stage", "pipeline.degree", at_least(0));
  table.refused("recipe", {}, "none exists", "enable", one_of({"rowwise"}));
}
void describe(Table<Pipeline>& table) { table.field("degree", &Pipeline::degree, "stages", at_least(1)); }
void describe(Table<Rate>& table) {
  table.field("lr", &Rate::lr, "rate", finite_at_least(0));
  table.field("beta", &Rate::beta, "decay", in_range_below(0, 1));
  table.without_effect("gc_freq", int64_t{50}, "there is no collector", at_least(1));
}

struct Job {
  Checkpoint checkpoint;
  Pipeline pipeline;
  Rate rate;
};

Schema schema() {
  auto schema = Schema::of<Job>();
  schema.add("checkpoint", &Job::checkpoint);
  schema.add("pipeline", &Job::pipeline);
  schema.add("rate", &Job::rate);
  return schema;
}

using Problems = std::vector<std::string>;

Problems problems_of(std::vector<std::string> words) {
  Job job;
  try {
    load(schema(), {"", std::move(words)}, job);
    return {};
  } catch (const ConfigError& error) {
    return error.problems();
  }
}

TEST(Refused, AppliesOnceItsKeyIsOn) {
  EXPECT_EQ(problems_of({"--checkpoint.mode", "async"}), Problems{});
  EXPECT_EQ(
      problems_of({"--checkpoint.mode", "async", "--checkpoint.enable"}),
      Problems{"--checkpoint.mode = async: not supported with enable: one file is written; only \"sync\" "
               "is accepted"});
  EXPECT_EQ(problems_of({"--checkpoint.mode", "sync", "--checkpoint.enable"}), Problems{});
}

TEST(Refused, CanDependOnAKeyOfAnotherTable) {
  EXPECT_EQ(problems_of({"--checkpoint.stage", "2", "--checkpoint.enable"}), Problems{});
  EXPECT_EQ(problems_of({"--checkpoint.stage", "2", "--pipeline.degree", "1"}), Problems{});
  EXPECT_EQ(
      problems_of({"--checkpoint.stage", "2", "--pipeline.degree", "4"}),
      Problems{"--checkpoint.stage = 2: not supported with pipeline.degree: there is one stage; only 0 is "
               "accepted"});
}

TEST(Refused, ChecksConstraintsOfUnusedKeys) {
  EXPECT_EQ(problems_of({"--checkpoint.mode", "asinc"}),
            Problems{"--checkpoint.mode = asinc: must be one of \"sync\", \"async\"; did you mean 'async'?"});
  EXPECT_EQ(problems_of({"--checkpoint.stage", "-1"}),
            Problems{"--checkpoint.stage = -1: must be at least 0"});
  EXPECT_EQ(problems_of({"--checkpoint.recipe", "rowwise"}), Problems{});
  EXPECT_EQ(problems_of({"--checkpoint.recipe", "none"}), Problems{});
  EXPECT_EQ(problems_of({"--checkpoint.recipe", "columns"}),
            Problems{"--checkpoint.recipe = columns: must be one of \"rowwise\""});
  EXPECT_EQ(problems_of({"--rate.gc_freq", "0"}), Problems{"--rate.gc_freq = 0: must be at least 1"});
}

TEST(Constraint, ChecksHalfOpenAndFiniteRanges) {
  EXPECT_EQ(problems_of({"--rate.beta", "0", "--rate.lr", "1e300"}), Problems{});
  EXPECT_EQ(problems_of({"--rate.beta", "1"}), Problems{"--rate.beta = 1: must be from 0 to below 1"});
  EXPECT_EQ(problems_of({"--rate.lr", "inf"}), Problems{"--rate.lr = inf: must be finite and at least 0"});
}

TEST(Refused, UnknownConditionIsAnInternalError) {
  auto wrong = Schema::of<Job>();
  wrong.add("checkpoint", &Job::checkpoint);  // without [pipeline]
  Job job;
  EXPECT_THROW(load(wrong, {"", {}}, job), InternalError);
}

}  // namespace
}  // namespace titan::config
