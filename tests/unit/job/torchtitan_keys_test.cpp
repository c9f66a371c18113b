// Every key of TorchTitan is known. docs/torchtitan_keys.md, which `titan docs torchtitan-keys` writes, says
// what happens to each.

#include <gtest/gtest.h>
#include <set>

#include "job/job_config.h"

namespace titan::train {
namespace {

TEST(TorchTitanKeys, EachIsKnown) {
  for (const auto& key : torchtitan_keys())
    EXPECT_NE(job_schema().find(key.name), nullptr)
        << key.name << " is in no table: accept, map or refuse it";
}

TEST(TorchTitanKeys, NoneIsListedTwice) {
  std::set<std::string> names;
  for (const auto& key : torchtitan_keys()) EXPECT_TRUE(names.insert(key.name).second) << key.name;
  EXPECT_GT(names.size(), 140u);
}

TEST(TorchTitanKeys, DefaultsEqualTorchTitansExceptThese) {
  // Data and tokenizer that ship with LibTitan, and settings that trade memory for time.
  std::set<std::string> differing{"model.hf_assets_path", "training.dataset", "validation.dataset",
                                  "activation_checkpoint.mode", "activation_checkpoint.early_stop"};
  for (const auto& key : torchtitan_keys()) {
    const config::FieldInfo* field = job_schema().find(key.name);
    if (field == nullptr || differing.count(key.name) != 0) continue;
    EXPECT_EQ(config::to_text(field->default_value), key.default_text) << key.name;
  }
}

}  // namespace
}  // namespace titan::train
