// One module of a sharded network makes a NaN, in its forward or only in its backward, with and without
// activation checkpointing: the search names that module. All ranks make it at once, so that none waits for
// another; tests/e2e/nan_run_test.cpp has the NaN on one rank.

#include <gmock/gmock.h>

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>

#include "distributed/toy_case.h"
#include "titan/guard/nan_search.h"
#include "titan/parallel/activation_checkpoint.h"

namespace titan::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using train::NanSearch;
using Options = NanSearch::Options;

std::unique_ptr<NanSearch> search_modules(const nn::AnyRef& model, int rank = 0) {
  return std::make_unique<NanSearch>(std::vector<nn::AnyRef>{model}, Options{.rank = rank});
}

std::unique_ptr<NanSearch> search_operations(const nn::AnyRef& model, int rank = 0) {
  return std::make_unique<NanSearch>(std::vector<nn::AnyRef>{model},
                                     Options{.rank = rank, .modules = false, .operations = true});
}

std::unique_ptr<NanSearch> note_findings(const nn::AnyRef& model) {
  return std::make_unique<NanSearch>(
      std::vector<nn::AnyRef>{model},
      Options{.rank = world().rank(), .on_finding = NanSearch::OnFinding::Note});
}

const double kNaN = std::numeric_limits<double>::quiet_NaN();

at::Tensor own_rows() { return my_rows(input_rows(8, 6, at::kFloat), world().rank(), world().size()); }

enum class Where { Nowhere, Forward, Backward };

/// Replaces one number of a module's output, or of its backward's gradient, by NaN.
class Spoiler : public nn::CallHook {
 public:
  explicit Spoiler(Where where) : where_(where) {}
  void pre_forward(nn::HookHost& /*host*/, const nn::TensorRefs& inputs) override {
    if (where_ != Where::Backward || !at::GradMode::is_enabled()) return;
    *inputs[0] = *inputs[0] * 1.0;
    inputs[0]->register_hook([](const at::Tensor& gradient) { return spoiled(gradient); });
  }
  void post_forward(nn::HookHost& /*host*/, const nn::TensorRefs& outputs) override {
    if (where_ == Where::Forward) *outputs[0] = spoiled(*outputs[0]);
  }

 private:
  static at::Tensor spoiled(const at::Tensor& tensor) {
    at::Tensor mask = at::zeros_like(tensor);
    mask.view(-1)[1].fill_(kNaN);
    return tensor + mask;
  }
  Where where_;
};

Toy make_toy(Where where, bool checkpoints) {
  const DataLayout layout{1, world().size()};
  Toy model(ToyOptions{}, at::kFloat);
  nn::name_modules(*model);
  model->blocks[1]->label_hook = std::make_shared<Spoiler>(where);
  if (checkpoints)
    for (auto& block : model->blocks) checkpoint_activations(block, FullRecompute{});
  for (auto& block : model->blocks) fully_shard(block, {.mesh = mesh_of(layout)});
  fully_shard(model, {.mesh = mesh_of(layout)});
  materialize(model, 0);
  return model;
}

/// Returns the error of one step of a toy model on this rank; "": none.
using MakeSearch = std::unique_ptr<NanSearch> (*)(const nn::AnyRef& model, int rank);
std::string failure_of_step(MakeSearch make_search, Where where, bool checkpoints) {
  Toy model = make_toy(where, checkpoints);
  const auto search = make_search(model, world().rank());
  search->set_step(7);
  try {
    loss_of(model(own_rows())).backward();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

std::string place() { return str("step 7, rank ", world().rank(), ": "); }

TEST(NanSearch, AcceptsFiniteNumbersAndChangesNone) {
  EXPECT_EQ(failure_of_step(search_modules, Where::Nowhere, true), "");
  Toy plain = make_toy(Where::Nowhere, false), traced = make_toy(Where::Nowhere, false);
  loss_of(plain(own_rows())).backward();
  const auto search = search_modules(traced, world().rank());
  loss_of(traced(own_rows())).backward();
  const auto expected = parameters(plain);
  const auto found = parameters(traced);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(at::equal(expected[i].data.local.grad(), found[i].data.local.grad())) << expected[i].name;
}

TEST(NanSearch, RemovesItsHooks) {
  Toy model = make_toy(Where::Nowhere, false);
  const auto before = model->blocks[1]->label_hook;
  {
    const auto search = search_modules(model);
    EXPECT_NE(model->blocks[1]->label_hook, before);
  }
  EXPECT_EQ(model->blocks[1]->label_hook, before);
  EXPECT_FALSE(model->label_hook);
}

TEST(NanSearch, RemovesItsHooksBeneathOthers) {
  Toy model = make_toy(Where::Nowhere, false);
  const auto before = model->blocks[1]->label_hook;
  auto inner = search_operations(model);
  const auto outer = search_modules(model);
  const auto both = model->blocks[1]->label_hook;
  inner.reset();
  EXPECT_EQ(model->blocks[1]->label_hook, both) << "the outer hook stays";
  loss_of(model(own_rows())).backward();
  auto gone = search_modules(model);
  gone.reset();
  EXPECT_EQ(model->blocks[1]->label_hook, both);
}

TEST(TensorNumbers, DescribeTheFiniteElements) {
  const at::Tensor tensor = at::tensor({1.0, 2.0, kNaN, 6.0, -1.0 / 0.0}, at::kFloat);
  EXPECT_EQ(train::describe_numbers(tensor), "Float [5]: min 1, max 6, mean 3, 1 NaN, 1 Inf");
  EXPECT_FALSE(train::is_finite(tensor));
  EXPECT_TRUE(train::is_finite(tensor.slice(0, 0, 2)));
  EXPECT_TRUE(train::is_finite(at::tensor({1, 2}, at::kLong)));
  EXPECT_EQ(train::describe_numbers({}), "none");
  const at::Tensor angles = at::complex(at::tensor({1.0, 2.0}), at::tensor({kNaN, 4.0}));
  EXPECT_FALSE(train::is_finite(angles));
  EXPECT_TRUE(train::is_finite(angles.slice(0, 1, 2)));
  EXPECT_THAT(train::describe_numbers(angles), HasSubstr("min 1, max 4"));
  EXPECT_THAT(train::describe_numbers(angles), HasSubstr("1 NaN, 0 Inf"));
}

// Forward and backward complete as without the search.
TEST(NanSearch, NotesTheFirstFindingInsteadOfThrowing) {
  int64_t before = 0;
  for (const Where where : {Where::Nowhere, Where::Forward, Where::Backward}) {
    Toy model = make_toy(where, false);
    const auto search = note_findings(model);
    loss_of(model(own_rows())).backward();
    EXPECT_TRUE(parameters(model).back().data.local.grad().defined());
    const auto first = search->first();
    ASSERT_EQ(first.has_value(), where != Where::Nowhere);
    if (!first) continue;
    EXPECT_TRUE(first->made_by_module);
    EXPECT_THAT(first->text, HasSubstr(where == Where::Forward ? "the output of module 'block1' is the first"
                                                               : "the backward of module 'block1' is"));
    EXPECT_GT(first->num_checked, before) << "checks of the backward come after all of the forward's";
    before = first->num_checked;
  }
}

TEST(NanSearch, NotesThatAModuleReceivedNaN) {
  Toy model = make_toy(Where::Nowhere, false);
  const auto search = note_findings(model);
  loss_of(model(own_rows() * kNaN));
  ASSERT_TRUE(search->first());
  EXPECT_FALSE(search->first()->made_by_module);
}

class NanFound : public ::testing::TestWithParam<bool> {};

TEST_P(NanFound, InTheForward) {
  const std::string failure = failure_of_step(search_modules, Where::Forward, GetParam());
  EXPECT_THAT(failure,
              AllOf(HasSubstr(place() + "the output of module 'block1' is the first that isn't "
                                        "finite, though its inputs are"),
                    HasSubstr("output 0: Float ["), HasSubstr("1 NaN, 0 Inf"), HasSubstr("input 0: Float ["),
                    HasSubstr("mean"), HasSubstr("up: Float [7, 6]")));
}

TEST_P(NanFound, OnlyInTheBackward) {
  const std::string failure = failure_of_step(search_modules, Where::Backward, GetParam());
  EXPECT_THAT(failure, AllOf(HasSubstr(place() + "the backward of module 'block1' is the first to produce a "
                                                 "gradient that isn't finite"),
                             HasSubstr("gradient of input 0: Float ["), HasSubstr("1 NaN, 0 Inf"),
                             HasSubstr("it received: gradient 0: Float ["), HasSubstr("0 NaN, 0 Inf"),
                             HasSubstr("its forward's input 0: Float ["), HasSubstr("up: Float [7, 6]")));
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, NanFound, ::testing::Bool());

/// y = x and a backward that divides by zero.
struct BadNode : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return {gradients[0] / 0.0};
  }
  std::string name() const override { return "BadBackward"; }
};

class BadHook : public nn::CallHook {
 public:
  void post_forward(nn::HookHost& /*host*/, const nn::TensorRefs& outputs) override {
    auto node = std::make_shared<BadNode>();
    node->set_next_edges({torch::autograd::impl::gradient_edge(*outputs[0])});
    at::Tensor result = outputs[0]->detach();
    torch::autograd::set_history(result, node);
    *outputs[0] = result;
  }
};

TEST(NanSearch, NamesTheOperationAndTheModuleThatRecordedIt) {
  Toy model = make_toy(Where::Nowhere, false);
  model->blocks[1]->label_hook = std::make_shared<BadHook>();
  std::string failure;
  ::testing::internal::CaptureStderr();
  {
    const auto search = search_operations(model, world().rank());
    search->set_step(7);
    try {
      loss_of(model(own_rows())).backward();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  const std::string printed = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(failure,
              HasSubstr(place() + "the backward of BadBackward, which the forward of module 'block1' "
                                  "recorded, produced a non-finite gradient from finite ones"));
  EXPECT_THAT(printed, AllOf(HasSubstr("Error detected in BadBackward"),
                             HasSubstr("titan::train::ModuleProbe::post_forward")))
      << "the forward's stack";
  EXPECT_FALSE(torch::autograd::AnomalyMode::is_enabled());
}

TEST(NanSearch, AcceptsFiniteGradients) {
  EXPECT_EQ(failure_of_step(search_operations, Where::Nowhere, true), "");
}

}  // namespace
}  // namespace titan::testing
