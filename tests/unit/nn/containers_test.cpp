#include "titan/nn/containers.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/nn/linear.h"

namespace titan::nn {
namespace {

struct CountingHook : CallHook {
  void pre_forward(HookHost& /*host*/, const TensorRefs& /*inputs*/) override { ++count; }
  int count = 0;
};

TEST(ModuleList, NamesAndIteratesItsChildren) {
  ModuleList<Linear> list;
  for (int64_t i = 0; i < 3; ++i) list.push_back(Linear(i + 1, 2));
  int64_t i = 0;
  for (const Linear& linear : list) EXPECT_EQ(linear->weight.size(1), ++i);
  EXPECT_EQ(list.size(), 3u);
  EXPECT_EQ(list->named_parameters().keys(), (std::vector<std::string>{"0.weight", "1.weight", "2.weight"}));
}

TEST(ModuleList, KeepsNamesThatAreGiven) {
  ModuleList<Linear> list;
  list.insert("7", Linear(1, 1));
  list.insert("8", Linear(1, 1));
  EXPECT_EQ(list->named_parameters().keys(), (std::vector<std::string>{"7.weight", "8.weight"}));
}

TEST(Sequential, CallsItsChildrenThroughTheirHolders) {
  Linear first(2, 3), second(3, 4);
  const auto hook = std::make_shared<CountingHook>();
  second->fsdp_hook = hook;
  Sequential both(first, second);
  const at::Tensor x = at::randn({5, 2});
  EXPECT_TRUE(both(x).equal(second(first(x))));
  EXPECT_EQ(hook->count, 2);
  EXPECT_EQ(both->parameters().size(), 2u);
}

}  // namespace
}  // namespace titan::nn
