// The products of a Llama layer as one of N tensor-parallel ranks computes them, without communication.
// Compares products computed part by part, as in asynchronous tensor parallelism, with whole products; and,
// for layers that share an input, one product with joined weights with a product per layer.
//
//   overlap_bench [--model small|134M|8B|70B] [--tp N] [--tokens S] [--dtype fp32|bf16] [--device cpu|cuda]
//                 [--repetitions R] [--threads T]
//
// `tokens` is the length of the whole sequence, batch 1. Prints one JSON object with an object for each group
// of products and pass: milliseconds, medians over alternating runs. "apart_ms": a product for each layer,
// over all tokens. "chunked_ms": the same part by part, including copies of the parts and the sum of the
// summands; "chunked_ratio" is chunked_ms / apart_ms. "joined_ms": one product, whose outputs are then copied
// apart (in the backward the gradients are joined first).

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "dist/stream.h"
#include "ops/operators.h"
#include "parallel/tensor/exchanges.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"
#include "titan/ops/linear.h"

namespace {

using namespace titan;
using Tensors = std::vector<at::Tensor>;

struct Sizes {
  int64_t width, heads, kv_heads, head_size, hidden;
};
const std::map<std::string, Sizes> kModels = {{"small", {64, 4, 2, 16, 192}},
                                              {"134M", {768, 12, 12, 64, 2048}},
                                              {"8B", {4096, 32, 8, 128, 14336}},
                                              {"70B", {8192, 64, 8, 128, 28672}}};

struct Options {
  std::string model = "134M";
  int64_t tp = 2, tokens = 2048;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  int repetitions = 9;

  const Sizes& sizes() const { return kModels.at(model); }
  at::TensorOptions tensors() const { return at::TensorOptions().dtype(dtype).device(device); }
};

constexpr const char* kUsage =
    "usage: overlap_bench [--model small|134M|8B|70B] [--tp N, which divides the key heads and the tokens] "
    "[--tokens S] [--dtype fp32|bf16] [--device cpu|cuda] [--repetitions R] [--threads T]";

Options parse(const std::vector<std::string>& args) {
  Options options;
  TITAN_CHECK(args.size() % 2 == 0, kUsage);
  for (size_t i = 0; i < args.size(); i += 2) {
    const std::string &key = args[i], &value = args[i + 1];
    if (key == "--model" && kModels.contains(value)) {
      options.model = value;
    } else if (key == "--tp") {
      options.tp = std::stoll(value);
    } else if (key == "--tokens") {
      options.tokens = std::stoll(value);
    } else if (key == "--dtype" && (value == "fp32" || value == "bf16")) {
      options.dtype = value == "fp32" ? at::kFloat : at::kBFloat16;
    } else if (key == "--device") {
      options.device = at::Device(value);
    } else if (key == "--repetitions") {
      options.repetitions = std::stoi(value);
    } else if (key == "--threads") {
      at::set_num_threads(std::stoi(value));
    } else {
      throw Error(kUsage);
    }
  }
  TITAN_CHECK(options.tp > 0 && options.repetitions > 0 && options.sizes().kv_heads % options.tp == 0 &&
                  options.tokens % options.tp == 0,
              kUsage);
  return options;
}

// ---- an exchange that moves nothing

class PartsThatAreThere final : public ops::SequenceExchange::Gather {
 public:
  explicit PartsThatAreThere(at::Tensor parts) : parts_(std::move(parts)) {}
  int next() override { return next_ < parts_.size(0) ? next_++ : -1; }
  at::Tensor part(int rank) const override { return parts_[rank]; }
  at::Tensor whole() const override {
    return parts_.transpose(0, 1).reshape({parts_.size(1), -1, parts_.size(3)});
  }

 private:
  at::Tensor parts_;  // [N, B, S/N, F]
  int next_ = 0;
};

class SummandsThatStay final : public ops::SequenceExchange::Scatter {
 public:
  explicit SummandsThatStay(int count) : count_(count) {}
  int next() override {
    const auto given = static_cast<int>(summands_.size());
    return given == count_ ? -1 : (given + 1) % count_;
  }
  void give(const at::Tensor& summand) override { summands_.push_back(summand); }
  at::Tensor finish() override {
    static const auto op = ops::find_operator<decltype(ops::composite::sum_of_parts)>("titan::sum_of_parts");
    return op.call(summands_);
  }

 private:
  int count_;
  Tensors summands_;
};

// The exchange of rank 0 of N.
class NoWire final : public ops::SequenceExchange {
 public:
  explicit NoWire(int64_t count) : count_(static_cast<int>(count)) {}
  int count() const override { return count_; }
  std::unique_ptr<Gather> gather(const at::Tensor& part) const override {
    at::Tensor& parts = parts_[part.sizes().vec()];
    if (!parts.defined()) parts = at::stack(Tensors(static_cast<size_t>(count_), part));
    return std::make_unique<PartsThatAreThere>(parts);
  }
  std::unique_ptr<Scatter> scatter() const override { return std::make_unique<SummandsThatStay>(count_); }

 private:
  int count_;
  mutable std::map<std::vector<int64_t>, at::Tensor> parts_;  // by a part's sizes
};

// ---- what is measured

struct Variant {
  std::string name;
  std::function<Tensors()> forward;
  std::vector<double> forward_ms, backward_ms;
};

struct Group {
  std::string name;
  Tensors inputs;
  std::vector<Variant> variants;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Timer {
 public:
  explicit Timer(at::Device device) : device_(device) { dist::Stream::current(device_).synchronize(); }
  double ms() const {
    dist::Stream::current(device_).synchronize();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  at::Device device_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void run(const Group& group, Variant& variant, at::Device device, bool counts) {
  for (const at::Tensor& input : group.inputs) input.mutable_grad().reset();  // otherwise gradients add up
  const Timer forward(device);
  const Tensors outputs = variant.forward();
  const double forward_ms = forward.ms();
  Tensors gradients;
  for (const at::Tensor& output : outputs) gradients.push_back(at::ones_like(output));
  const Timer backward(device);
  torch::autograd::backward(outputs, gradients);
  if (!counts) return;
  variant.forward_ms.push_back(forward_ms);
  variant.backward_ms.push_back(backward.ms());
}

at::Tensor leaf(const at::Tensor& values) { return values.detach().clone().requires_grad_(); }

// A gradient sink that computes each gradient and drops it: adding gradients up isn't part of the products.
class Dropped final : public ops::GradSink {
 public:
  void accept(ops::WeightGrad gradient) override { gradient.compute(); }
  void accept(const at::Tensor& /*gradient*/, const at::Tensor& /*scale*/) override {}
};

std::vector<ops::SinkedWeight> sinked(const Tensors& weights) {
  std::vector<ops::SinkedWeight> result;
  for (const at::Tensor& weight : weights) result.push_back({weight, std::make_shared<Dropped>(), nullptr});
  return result;
}

// Layers that share an input; `features` are the sizes of their outputs.
Group layers_of_one_input(const Options& options, const std::string& name,
                          const std::vector<int64_t>& features) {
  const int64_t width = options.sizes().width;
  const std::vector products(features.size(), ops::default_products());
  const at::Tensor x = leaf(at::randn({1, options.tokens, width}, options.tensors())),
                   part = leaf(x.narrow(1, 0, options.tokens / options.tp));
  Tensors weights;
  for (const int64_t out : features) weights.push_back(leaf(at::randn({out, width}, options.tensors())));
  const at::Tensor joined = leaf(at::cat(weights));
  const auto apart = sinked(weights), together = sinked({joined});
  Group group{name, {x}, {}};
  group.variants.push_back({"apart", [=] { return ops::joint_linears(x, apart, products); }, {}, {}});
  if (options.tp > 1) {
    const auto exchange = std::make_shared<const NoWire>(options.tp);
    group.inputs.push_back(part);
    group.variants.push_back(
        {"chunked", [=] { return ops::gathered_linears(part, apart, products, exchange); }, {}, {}});
  }
  group.variants.push_back({"joined",
                            [=] {
                              const at::Tensor y = ops::linear(x, together[0], {}, products[0]);
                              Tensors outputs = y.split_with_sizes(features, -1);
                              for (at::Tensor& output : outputs) output = output.contiguous();
                              return outputs;
                            },
                            {},
                            {}});
  return group;
}

// A layer whose output is a summand.
Group summed_layer(const Options& options, const std::string& name, int64_t in) {
  const auto products = ops::default_products();
  const at::Tensor x = leaf(at::randn({1, options.tokens, in}, options.tensors()));
  const auto weight = sinked({leaf(at::randn({options.sizes().width, in}, options.tensors()))});
  Group group{name, {x}, {}};
  group.variants.push_back(
      {"apart", [=] { return Tensors{ops::linear(x, weight[0], {}, products)}; }, {}, {}});
  if (options.tp > 1) {
    const auto exchange = std::make_shared<const NoWire>(options.tp);
    group.variants.push_back(
        {"chunked",
         [=] { return Tensors{ops::scattered_linear(x, weight[0], products, exchange)}; },
         {},
         {}});
  }
  return group;
}

void print(const Group& group, const char* pass, std::vector<double> Variant::*times, bool is_first) {
  std::cout << (is_first ? "" : ",\n") << "  \"" << group.name << " " << pass << "\": {";
  const double apart = median(group.variants[0].*times);
  for (const Variant& variant : group.variants) {
    const double ms = median(variant.*times);
    std::cout << (&variant == &group.variants[0] ? "" : ", ") << "\"" << variant.name << "_ms\": " << ms;
    if (variant.name == "chunked") std::cout << ", \"chunked_ratio\": " << ms / apart;
  }
  std::cout << "}";
}

void measure(const Options& options) {
  const Sizes& of = options.sizes();
  const int64_t queries = of.heads * of.head_size / options.tp,
                keys = of.kv_heads * of.head_size / options.tp, hidden = of.hidden / options.tp;
  const std::vector<std::function<Group()>> groups = {
      [&] {
        return layers_of_one_input(options, "wqkv", {queries, keys, keys});
      },
      [&] { return summed_layer(options, "wo", queries); },
      [&] {
        return layers_of_one_input(options, "w13", {hidden, hidden});
      },
      [&] { return summed_layer(options, "w2", hidden); }};
  std::cout << "{\n";
  for (size_t i = 0; i < groups.size(); ++i) {
    Group group = groups[i]();  // one at a time, because a group may take much memory
    for (int repetition = 0; repetition <= options.repetitions; ++repetition)
      for (Variant& variant : group.variants) run(group, variant, options.device, repetition > 0);
    print(group, "forward", &Variant::forward_ms, i == 0);
    print(group, "backward", &Variant::backward_ms, false);
  }
  std::cout << "\n}" << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse({argv + 1, argv + argc});
    if (options.device.is_cuda())
      dist::init({.device = "cuda"});  // opens the plugin, before the first tensor
    measure(options);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
