#include "titan/checkpoint/safetensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tensor/memory.h"
#include "titan/core/error.h"
#include "unit/checkpoint/temp_folder.h"

namespace titan {
namespace {

using testing::TempFolder;

Parameter make_parameter(const std::string& name, const at::Tensor& values) {
  Parameter parameter;
  parameter.name = name;
  parameter.data = distribute(values, DeviceMesh(), {});
  parameter.data.local = values.clone().requires_grad_(true);
  parameter.compute = parameter.data.local;
  return parameter;
}

TEST(ModelFile, RoundTripsTheParameters) {
  TempFolder folder;
  std::vector<Parameter> saved = {make_parameter("a.weight", at::randn({3, 4})),
                                  make_parameter("b", at::randn({5}, at::kBFloat16))};
  save_safetensors(folder / "model.safetensors",
                   {{"a.weight", saved[0].data.local}, {"b", saved[1].data.local}});
  std::vector<Parameter> loaded = {make_parameter("b", at::zeros({5}, at::kBFloat16)),
                                   make_parameter("a.weight", at::zeros({3, 4}))};
  load_model(loaded, folder / "model.safetensors");
  EXPECT_TRUE(at::equal(loaded[1].data.local, saved[0].data.local));
  EXPECT_TRUE(at::equal(loaded[0].data.local, saved[1].data.local));
}

TEST(ModelFile, IsCastToTheParametersDtype) {
  TempFolder folder;
  const at::Tensor values = at::randn({3, 4}).to(at::kBFloat16);
  save_safetensors(folder / "model.safetensors", {{"w", values}});
  std::vector<Parameter> loaded = {make_parameter("w", at::zeros({3, 4}))};
  load_model(loaded, folder / "model.safetensors");
  EXPECT_TRUE(at::equal(loaded[0].data.local, values.to(at::kFloat)));
}

TEST(ModelFile, ListsAllDifferences) {
  TempFolder folder;
  save_safetensors(folder / "m.safetensors",
                   {{"a", at::zeros({2})}, {"b", at::zeros({2, 3})}, {"extra", at::zeros({1})}});
  std::vector<Parameter> model = {make_parameter("a", at::ones({2})), make_parameter("b", at::ones({3, 2})),
                                  make_parameter("missing", at::ones({1}))};
  try {
    load_model(model, folder / "m.safetensors");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.problems().size(), 3u) << error.what();
  }
  EXPECT_TRUE(at::equal(model[0].data.local.detach(), at::ones({2})));
}

TEST(ModelFile, RefusesDeferredParameters) {
  TempFolder folder;
  save_safetensors(folder / "m.safetensors", {{"w", at::zeros({2})}});
  std::vector<Parameter> model = {make_parameter("w", at::ones({2}))};
  model[0].data.local = deferred_tensor({2}, at::dtype(at::kFloat));
  EXPECT_THROW(load_model(model, folder / "m.safetensors"), Error);
}

}  // namespace
}  // namespace titan
