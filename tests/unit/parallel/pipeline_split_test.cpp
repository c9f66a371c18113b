#include "titan/parallel/pipeline_split.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::pipeline {
namespace {

using Names = std::vector<std::string>;

ModuleSequence llama(int num_layers) {
  ModuleSequence sequence{{"tok_embeddings"}, {}, {"norm", "output"}};
  for (int i = 0; i < num_layers; ++i) sequence.layers.push_back(str("layers.", i));
  return sequence;
}

Names short_lists(const StageModules& stages) {
  Names lists;
  for (const Names& modules : stages) lists.push_back(short_list(modules));
  return lists;
}

std::vector<int> layers_in(const StageModules& stages) {
  std::vector<int> counts;
  for (const Names& modules : stages)
    counts.push_back(
        static_cast<int>(std::count_if(modules.begin(), modules.end(),
                                       [](const std::string& name) { return name.starts_with("layers."); })));
  return counts;
}

template <class Call>
Names problems_of(const Call& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.problems();
  }
  return {};
}

TEST(PipelineSplit, IsTorchTitans) {
  EXPECT_EQ(short_lists(split_evenly(llama(32), 4)), (Names{"tok_embeddings, layers.0..7", "layers.8..16",
                                                            "layers.17..24", "layers.25..31, norm, output"}));
  EXPECT_EQ(layers_in(split_evenly(llama(32), 8)), (std::vector{4, 5, 4, 4, 4, 4, 4, 3}));
  EXPECT_EQ(short_lists(split_evenly(llama(6), 2)),
            (Names{"tok_embeddings, layers.0..2", "layers.3..5, norm, output"}));
  EXPECT_EQ(layers_in(split_evenly(llama(80), 8)), (std::vector{10, 11, 10, 10, 10, 10, 10, 9}));
  EXPECT_EQ(layers_in(split_evenly(llama(126), 16)),
            (std::vector{7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7}));
}

TEST(PipelineSplit, StagesWithoutLayersAreLegal) {
  EXPECT_EQ(short_lists(split_evenly(llama(6), 8)),
            (Names{"tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5",
                   "norm, output"}));
}

TEST(PipelineSplit, OneStageTakesEverything) {
  EXPECT_EQ(split_evenly(llama(3), 1), StageModules{llama(3).names()});
  EXPECT_EQ(split_evenly(llama(3), 1, {9, 9}), StageModules{llama(3).names()});
}

TEST(PipelineSplit, EndsWeighWhatTheyAreSaidTo) {
  EXPECT_EQ(layers_in(split_evenly(llama(8), 4, {0, 0})), (std::vector{2, 2, 2, 2}));
  EXPECT_EQ(layers_in(split_evenly(llama(8), 4, {0, 2})), (std::vector{3, 3, 2, 0}));
  EXPECT_EQ(layers_in(split_evenly(llama(8), 4, {3, 1})), (std::vector{0, 3, 3, 2}));
}

// Whatever the sizes, a split is the sequence in order.
TEST(PipelineSplit, TakesEveryModuleOnce) {
  for (int layers = 1; layers <= 20; ++layers)
    for (int stages = 1; stages <= layers + 2; ++stages) {
      Names all;
      for (const Names& modules : split_evenly(llama(layers), stages))
        all.insert(all.end(), modules.begin(), modules.end());
      EXPECT_EQ(all, llama(layers).names()) << layers << " layers, " << stages << " stages";
    }
}

TEST(PipelineSplit, RefusesWhatCantBeDealt) {
  EXPECT_EQ(problems_of([] { split_evenly(llama(6), 0); }), Names{"a model can't be cut into 0 stages"});
  EXPECT_EQ(problems_of([] { split_evenly(llama(6), 9); }),
            Names{"9 stages are more than the 6 layers and the embedding and head, which count for 1 and 1"});
  EXPECT_EQ(
      problems_of([] {
        split_evenly(llama(6), 4, {3, 1});
      }),
      Names{"the first stage's ends count for 3 layers (pipeline_parallel_first_stage_less_layers), but a "
            "stage has 2"});
  EXPECT_EQ(
      problems_of([] {
        split_evenly(llama(6), 4, {0, 3});
      }),
      Names{"the last stage's ends count for 3 layers (pipeline_parallel_last_stage_less_layers), but a "
            "stage has 2"});
  // Nothing stands before the layers, and all of the first stage's share is taken off.
  const ModuleSequence headless{{}, {"layers.0", "layers.1"}, {}};
  EXPECT_EQ(problems_of([&] {
              split_evenly(headless, 3, {1, 0});
            }),
            Names{"stage 0 of 3 is left without modules"});
}

TEST(PipelineSplit, CountsStagesByTheirLayers) {
  EXPECT_EQ(count_stages(32, {}, 9), 4);
  EXPECT_EQ(count_stages(32, {}, 17), 2);
  EXPECT_EQ(count_stages(126, {}, 8), 16);
  EXPECT_EQ(count_stages(126, {0, 0}, 1), 126);
}

TEST(PipelineSplit, ByListsTakesThemAsTheyAre) {
  const StageModules lists = {{"tok_embeddings"}, {"layers.0", "layers.1", "norm"}, {"output"}};
  EXPECT_EQ(split_by_lists(llama(2), lists), lists);
}

TEST(PipelineSplit, ByListsTellsAllThatIsWrong) {
  const auto problems = [](const StageModules& lists) {
    return problems_of([&] { split_by_lists(llama(3), lists); });
  };
  EXPECT_EQ(problems({}),
            (Names{"there is no stage", "no stage has tok_embeddings, layers.0..2, norm, output"}));
  EXPECT_EQ(
      problems({{"tok_embeddings", "layers.0", "layers.1"}, {}, {"layers.1", "layer.2", "norm", "output"}}),
      (Names{"stage 1 has no modules", "stages 0 and 2 both have 'layers.1'",
             "stage 2: the model has no module 'layer.2' that it calls in a row; did you mean 'layers.2'?",
             "no stage has layers.2"}));
  EXPECT_EQ(problems({{"tok_embeddings", "layers.1"}, {"layers.0", "layers.2", "norm", "output"}}),
            Names{"stage 1: 'layers.0' stands behind 'layers.1', but the model calls it before"});
}

TEST(PipelineSplit, ListsAreShortened) {
  EXPECT_EQ(short_list({}), "");
  EXPECT_EQ(short_list({"a.0", "a.1", "a.3", "b.4", "c"}), "a.0..1, a.3, b.4, c");
  EXPECT_EQ(short_list({"layers.9", "layers.10", "layers.11"}), "layers.9..11");
}

}  // namespace
}  // namespace titan::pipeline
