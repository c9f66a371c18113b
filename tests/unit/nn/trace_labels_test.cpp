#include "nn/trace_labels.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/nn/module.h"

namespace titan::nn {
namespace {

// The ranges of this thread as a profiler sees them: "(name" and ")".
class Ranges {
 public:
  Ranges() {
    seen().clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
              seen().push_back(std::string("(") + range.name());
              return nullptr;
            },
            [](const at::RecordFunction& /*range*/, at::ObserverContext* /*context*/) {
              seen().push_back(")");
            })
            .scopes({at::RecordScope::USER_SCOPE}));
  }
  ~Ranges() { at::removeCallback(handle_); }
  static std::vector<std::string>& seen() {
    static std::vector<std::string> list;
    return list;
  }

 private:
  at::CallbackHandle handle_;
};

using List = std::vector<std::string>;

class TracedLayerImpl : public Module {
 public:
  explicit TracedLayerImpl(int64_t size) : first(size, size), second(size, size) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (fails) throw std::runtime_error("requested failure");
    return second(first(x));
  }
  Linear first, second;
  bool fails = false;
};
TITAN_MODULE(TracedLayer);

class TracedModelImpl : public Module, public LayerSequence {
 public:
  TracedModelImpl() {
    register_module("layers", layers.ptr());
    for (int i = 0; i < 2; ++i) layers.push_back(TracedLayer(4));
    call_in_order({part("layers", layers)});
    name_modules(*this);
  }
  at::Tensor forward(at::Tensor x) {
    for (TracedLayer& layer : layers) x = layer(x);
    return x;
  }
  ModuleList<TracedLayer> layers;
};
TITAN_MODULE(TracedModel);

TEST(TraceLabels, NameCallsAfterModules) {
  TracedModel model;
  const Ranges ranges;
  {
    const TraceLabels labels(model);
    model(at::ones({1, 4}));
  }
  EXPECT_EQ(Ranges::seen(), (List{"(model", "(layers.0", "(layers.0.first", ")", "(layers.0.second", ")", ")",
                                  "(layers.1", "(layers.1.first", ")", "(layers.1.second", ")", ")", ")"}));
}

TEST(TraceLabels, LeaveNothingAfterDestruction) {
  TracedModel model;
  const Ranges ranges;
  { const TraceLabels labels(model); }
  model(at::ones({1, 4}));
  EXPECT_EQ(Ranges::seen(), List{});
  EXPECT_EQ(model->label_hook, nullptr);
}

TEST(TraceLabels, NameTheBackwardOfLayers) {
  TracedModel model;
  const TraceLabels labels(model);
  const at::Tensor loss = model(at::ones({1, 4}).requires_grad_()).sum();
  const Ranges ranges;
  loss.backward();
  EXPECT_EQ(Ranges::seen(), (List{"(layers.1 backward", ")", "(layers.0 backward", ")"}));
}

TEST(TraceLabels, ChangeNoGradient) {
  TracedModel model;
  const auto gradient = [&] {
    const at::Tensor x = at::ones({1, 4}).requires_grad_();
    model->zero_grad();
    model(x).sum().backward();
    return x.grad();
  };
  const at::Tensor plain = gradient();
  const TraceLabels labels(model);
  EXPECT_TRUE(gradient().equal(plain));
}

struct CallCounter : CallHook {
  void pre_forward(HookHost& /*host*/, const TensorRefs& /*inputs*/) override { ++calls; }
  int calls = 0;
};

TEST(TraceLabels, KeepTheSlotsOwnHook) {
  TracedModel model;
  const auto own = std::make_shared<CallCounter>();
  model->layers[0]->label_hook = own;
  {
    const TraceLabels labels(model);
    model(at::ones({1, 4}));
  }
  EXPECT_EQ(own->calls, 1);
  EXPECT_EQ(model->layers[0]->label_hook, own);
}

TEST(TraceLabels, ScopeClosesRangesAfterAnException) {
  TracedModel model;
  model->layers[1]->fails = true;
  const TraceLabels labels(model);
  const Ranges ranges;
  {
    const TraceLabelScope scope;
    EXPECT_THROW(model(at::ones({1, 4})), std::runtime_error);
  }
  const auto& seen = Ranges::seen();
  EXPECT_EQ(std::count(seen.begin(), seen.end(), ")") * 2, static_cast<int64_t>(seen.size()));
  EXPECT_EQ(seen.back(), ")");
}

TEST(TraceLabels, KeepJointProductsJoint) {
  Linear first(4, 4, LinearOptions{.bias = false}), second(4, 4, LinearOptions{.bias = false});
  first->set_fqn("layers.0.w1");
  second->set_fqn("layers.0.w3");
  const TraceLabels of_first(first), of_second(second);
  const Ranges ranges;
  linears(at::ones({1, 4}), {&first, &second});
  EXPECT_EQ(Ranges::seen(), (List{"(layers.0.w1+w3", ")"}));
}

}  // namespace
}  // namespace titan::nn
