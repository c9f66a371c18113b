// Parallelisms in the registry: their settings, their axes, and when they are applied.
#include "titan/parallel/parallelism.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "titan/dist/world.h"
#include "titan/nn/layers.h"

namespace titan {
namespace registered {

using ::testing::HasSubstr;

struct HalvesSettings {
  int64_t degree = 1;
  std::string order = "forward";
};

void describe(config::Table<HalvesSettings>& table) {
  table.field("degree", &HalvesSettings::degree, "ranks", config::at_least(1));
  table.field("order", &HalvesSettings::order, "which half is first");
}

using Kind = ParallelismKind<HalvesSettings>;

// Counts its calls in `num_calls`.
Kind halves(int* num_calls) {
  return {
      .axis = "halves",
      .apply = [num_calls](const nn::AnyRef&, const DeviceMesh&, const HalvesSettings&) { ++*num_calls; },
      .is_applied = [num_calls](const nn::AnyRef&) { return *num_calls > 0; },
      .parts_per_rank = [](const HalvesSettings& settings) { return settings.order == "forward" ? 1 : 2; },
      .find_problems = [](const HalvesSettings& settings) -> std::vector<SettingProblem> {
        if (settings.order == "forward" || settings.degree == 2) return {};
        return {{"args.halves.order", "needs two ranks"}};
      }};
}

using Spec = detail::ParallelismOf<HalvesSettings>;

TEST(Parallelisms, ReadTheirSettings) {
  int num_calls = 0;
  const Spec spec("halves", halves(&num_calls));
  EXPECT_TRUE(spec.has_args_table());
  EXPECT_EQ(spec.fields().size(), 2u);
  const HalvesSettings settings{.degree = 4, .order = "backward"};
  const RowAxis axis = spec.choose(&settings).axis;
  EXPECT_EQ(axis.name, "halves");
  EXPECT_EQ(axis.kind, "halves");
  EXPECT_EQ(axis.degree, 4);
  EXPECT_EQ(axis.parts_per_rank, 2);
  EXPECT_EQ(axis.degree_key, "args.halves.degree");
  ASSERT_EQ(spec.find_problems(&settings).size(), 1u);
  EXPECT_EQ(spec.find_problems(&settings)[0].key, "args.halves.order");
  EXPECT_TRUE(spec.find_problems(nullptr).empty());
}

TEST(Parallelisms, UseDefaultsWithoutSettings) {
  int num_calls = 0;
  const RowAxis axis = Spec("halves", halves(&num_calls)).choose(nullptr).axis;
  EXPECT_EQ(axis.degree, 1);
  EXPECT_EQ(axis.parts_per_rank, 1);
}

TEST(Parallelisms, CopiesOfSettingsAreIndependent) {
  int num_calls = 0;
  const Spec spec("halves", halves(&num_calls));
  const HalvesSettings settings{.degree = 2, .order = "backward"};
  const auto copy = spec.copy_settings(&settings);
  spec.set_degree(copy.get(), 8);
  EXPECT_EQ(settings.degree, 2);
  EXPECT_EQ(spec.choose(copy.get()).axis.degree, 8);
  EXPECT_EQ(spec.choose(copy.get()).axis.parts_per_rank, 2);
}

TEST(Parallelisms, AreAppliedToAxesOfSeveralRanks) {
  int num_calls = 0;
  const std::vector<Parallelism> chosen = {Spec("halves", halves(&num_calls)).choose(nullptr)};
  const dist::World world = dist::init({.backend = "fake", .fake_rank = 0, .fake_world_size = 2});
  nn::Linear layer(4, 4);
  apply_parallelisms(layer, chosen, DeviceMesh::create(world, {{"dp_shard", 2}}));
  apply_parallelisms(layer, chosen, DeviceMesh::create(world, {{"dp_shard", 2}, {"halves", 1}}));
  EXPECT_FALSE(chosen[0].is_applied(layer));
  apply_parallelisms(layer, chosen, DeviceMesh::create(world, {{"dp_shard", 1}, {"halves", 2}}));
  EXPECT_TRUE(chosen[0].is_applied(layer));
  EXPECT_EQ(num_calls, 1);
}

TEST(Parallelisms, OnlyContextParallelismIsInEveryMesh) {
  const std::vector<RowAxis> axes = row_axes(default_parallelisms());
  ASSERT_EQ(axes.size(), 1u);
  EXPECT_EQ(axes[0].name, "cp");
  EXPECT_EQ(axes[0].kind, "context");
  EXPECT_EQ(axes[0].degree, 1);
  EXPECT_FALSE(parallelisms().get("context")->has_args_table());
}

TEST(Parallelisms, RefuseIncompleteKindsAndTakenNames) {
  int num_calls = 0;
  const auto error_of = [](const std::string& name, Kind kind) -> std::string {
    try {
      register_parallelism<HalvesSettings>(name, std::move(kind));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  Kind incomplete = halves(&num_calls), on_tp = halves(&num_calls);
  incomplete.apply = nullptr;
  on_tp.axis = "tp";
  EXPECT_THAT(error_of("halves", incomplete), HasSubstr("expected axis, apply and is_applied to be set"));
  EXPECT_THAT(error_of("halves", on_tp), HasSubstr("the mesh uses the name 'tp' for another axis"));
  EXPECT_THAT(error_of("context", halves(&num_calls)), HasSubstr("'context' is registered twice"));
}

}  // namespace registered
}  // namespace titan
