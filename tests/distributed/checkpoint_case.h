#pragma once

// A state for the checkpoint tests: tensors of several dtypes and sizes whose every value is a function of
// the tensor's name and the step, split for any mesh of (pp, dp, tp).

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>

#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"
#include "titan/tensor/dtensor.h"

namespace titan::testing {

struct StateLayout {
  int pp = 1, dp = 1, tp = 1;
  int size() const { return pp * dp * tp; }
  std::string name() const { return titan::str("pp", pp, "_dp", dp, "_tp", tp); }
};

/// All layouts that the tests use for that many ranks.
inline std::vector<StateLayout> layouts_of(int num_ranks) {
  const std::vector<StateLayout> all = {{1, 1, 1}, {1, 2, 1}, {1, 1, 2}, {2, 1, 1}, {1, 3, 1}, {3, 1, 1},
                                        {1, 4, 1}, {1, 2, 2}, {2, 1, 2}, {2, 2, 1}, {1, 1, 4}};
  std::vector<StateLayout> found;
  for (const StateLayout& layout : all)
    if (layout.size() == num_ranks) found.push_back(layout);
  return found;
}

/// The whole tensor.
inline at::Tensor values_of(const std::string& name, at::IntArrayRef shape, at::ScalarType dtype,
                            int64_t step) {
  constexpr int64_t kPeriod = 4093;
  int64_t numel = 1, hash = 7;
  for (const int64_t size : shape) numel *= size;
  for (const char letter : name) hash = (hash * 31 + letter) % 10007;
  const at::Tensor numbers =
      at::arange(std::min(numel, kPeriod), at::kLong).mul(13).add(hash + 1009 * step).remainder(kPeriod);
  // Exact in float32, and rounded alike everywhere in shorter dtypes.
  const at::Tensor values = numbers.to(at::kFloat).div(64).sub(30);
  return values.repeat({(numel + kPeriod - 1) / kPeriod}).narrow(0, 0, numel).to(dtype).view(shape);
}

struct TensorCase {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype;
  int64_t dp_dim = -1, tp_dim = -1;  // -1: replicated
  int stage = 0;                     // modulo the number of pipeline stages
  int also_on = -1;                  // a later stage that has the tensor too
};

/// Tensors whose sizes don't divide evenly, with empty parts, with both axes on one dimension, and scalars.
inline std::vector<TensorCase> toy_tensors() {
  std::vector<TensorCase> tensors = {{"embedding", {9, 4}, at::kFloat, 0, 1, 0, 1},
                                     {"steps", {}, at::kLong, -1, -1, 0, -1}};
  for (int layer = 0; layer < 2; ++layer) {
    const auto add = [&](const char* name, std::vector<int64_t> shape, at::ScalarType dtype, int64_t dp_dim,
                         int64_t tp_dim) {
      tensors.push_back(
          {titan::str("layers.", layer, ".", name), std::move(shape), dtype, dp_dim, tp_dim, layer, -1});
    };
    add("wq", {7, 6}, at::kFloat, 0, 0);
    add("wo", {5, 7}, at::kBFloat16, 0, 1);
    add("norm", {7}, at::kFloat, 0, -1);
    add("scale", {3, 2}, at::kFloat, -1, -1);
    add("table", {16, 3}, at::kLong, 1, 0);
    add("eight_bits", {7, 4}, at::kFloat8_e4m3fn, 0, -1);
    add("one_row", {1, 5}, at::kHalf, 0, -1);
    add("none", {0, 3}, at::kFloat, 0, -1);
  }
  return tensors;
}

/// 300 MB in the two objects of a ToyJob: a rank's file has hundreds of blocks, and takes a while to write.
inline std::vector<TensorCase> large_tensors() {
  std::vector<TensorCase> tensors;
  for (int layer = 0; layer < 12; ++layer)
    tensors.push_back({titan::str("layers.", layer, ".weight"), {3125, 1000}, at::kFloat, 0, -1, 0, -1});
  return tensors;
}

/// An object of such tensors, on the world's device.
class ToyState : public checkpoint::Stateful {
 public:
  /// The tensors of this rank's stage. `key`: the object's, a part of the values' names.
  ToyState(std::string key, const DeviceMesh& mesh, const std::vector<TensorCase>& cases)
      : key_(std::move(key)) {
    const int stages = mesh.size("pp"), mine = mesh.coordinate("pp");
    const DeviceMesh cut = mesh({"dp", "tp"});
    const auto placement = [](int64_t dim) {
      return dim < 0 ? Placement::replicate() : Placement::shard(dim);
    };
    for (const TensorCase& each : cases) {
      const bool first = each.stage % stages == mine;
      const bool later = each.also_on >= 0 && each.also_on % stages == mine;
      if (!first && !later) continue;
      const at::Tensor whole = values_of(key_ + "." + each.name, each.shape, each.dtype, 0);
      tensors_.push_back(
          {each.name, distribute(whole, cut, {placement(each.dp_dim), placement(each.tp_dim)}), !first});
    }
    const at::Device device = mesh.world().device();
    for (auto& tensor : tensors_) tensor.data.local = tensor.data.local.to(device).clone();
    text_ = "fresh";
  }

  void fill(int64_t step) {
    for (auto& tensor : tensors_) tensor.data.local.copy_(expected(tensor, step));
    text_ = titan::str(key_, " at ", step);
  }
  /// The names of tensors that differ from fill(step).
  std::vector<std::string> wrong(int64_t step) const {
    std::vector<std::string> names;
    for (const auto& tensor : tensors_)
      if (!same_bits(tensor.data.local, expected(tensor, step))) names.push_back(tensor.name);
    if (text_ != titan::str(key_, " at ", step)) names.push_back("the text: " + text_);
    return names;
  }

  checkpoint::ObjectState state() override { return {tensors_, text_}; }
  void loaded(const std::string& text) override { text_ = text; }

  std::vector<checkpoint::ObjectTensor>& tensors() { return tensors_; }
  const std::string& text() const { return text_; }

  static bool same_bits(const at::Tensor& a, const at::Tensor& b) {
    if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
    const auto bytes = [](const at::Tensor& of) { return of.cpu().contiguous().view(-1).view(at::kByte); };
    return a.numel() == 0 || bytes(a).equal(bytes(b));
  }

 private:
  at::Tensor expected(const checkpoint::ObjectTensor& tensor, int64_t step) const {
    at::Tensor part =
        values_of(key_ + "." + tensor.name, tensor.data.global_shape, tensor.data.local.scalar_type(), step);
    for (size_t dim = 0; dim < tensor.data.box.length.size(); ++dim)
      part = part.narrow(static_cast<int64_t>(dim), tensor.data.box.offset[dim], tensor.data.box.length[dim]);
    return part;
  }

  std::string key_, text_;
  std::vector<checkpoint::ObjectTensor> tensors_;
};

/// "model", "optimizer" and the mesh that splits them.
struct ToyJob {
  explicit ToyJob(const dist::World& world, const StateLayout& layout,
                  const std::vector<TensorCase>& cases = toy_tensors())
      : mesh(DeviceMesh::create(world, {{"pp", layout.pp}, {"dp", layout.dp}, {"tp", layout.tp}})),
        model("model", mesh, cases),
        optimizer("optimizer", mesh, cases) {}

  /// All ranks along dp.
  explicit ToyJob(const dist::World& world, const std::vector<TensorCase>& cases = toy_tensors())
      : ToyJob(world, {1, world.size(), 1}, cases) {}

  void add_to(checkpoint::Checkpointer& checkpointer) {
    checkpointer.add("model", model);
    checkpointer.add("optimizer", optimizer);
  }
  void fill(int64_t step) {
    model.fill(step);
    optimizer.fill(step);
  }
  /// Throws Error that names tensors which differ from fill(step).
  void check(int64_t step) const {
    std::string wrong;
    for (const auto& [key, state] : {std::pair("model.", &model), std::pair("optimizer.", &optimizer)})
      for (const std::string& name : state->wrong(step)) wrong += titan::str(" ", key, name);
    TITAN_CHECK(wrong.empty(), "differ from step ", step, ":", wrong);
  }

  DeviceMesh mesh;
  ToyState model, optimizer;
};

/// Throws Error unless the checkpoint holds, bit for bit, what fill(step) makes of both objects.
inline void check_saved(const std::filesystem::path& step_folder, int64_t step,
                        const std::vector<TensorCase>& cases = toy_tensors()) {
  const checkpoint::SavedState saved(step_folder);
  TITAN_CHECK(saved.manifest().step == step, step_folder.string(), " holds step ", saved.manifest().step);
  TITAN_CHECK(saved.table().tensors().size() == 2 * cases.size(), step_folder.string(), " has ",
              saved.table().tensors().size(), " tensors");
  for (const char* key : {"model", "optimizer"}) {
    TITAN_CHECK(saved.manifest().texts.at(key) == titan::str(key, " at ", step), step_folder.string(), ": ",
                key, " has another text");
    for (const TensorCase& each : cases) {
      const std::string name = titan::str(key, ".", each.name);
      const at::Tensor expected = values_of(name, each.shape, each.dtype, step);
      TITAN_CHECK(ToyState::same_bits(saved.read(name), expected), step_folder.string(), ": '", name,
                  "' isn't what was saved");
    }
  }
}

/// Joins a job's world, on the CPU or with TITAN_TEST_DEVICE=cuda on GPUs over NCCL, runs `act(world)` and ends the process, with exit code 3 if it throws.
template <class Act>
[[noreturn]] void run_rank(std::chrono::seconds timeout, const Act& act) {
  int code = 0;
  try {
    const char* device = std::getenv("TITAN_TEST_DEVICE");
    const bool on_gpu = device && std::string_view(device) == "cuda";
    const dist::World world = dist::init(
        {.backend = on_gpu ? "nccl" : "gloo", .device = on_gpu ? "cuda" : "cpu", .timeout = timeout});
    act(world);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = 3;
  }
  std::fflush(nullptr);
  _exit(code);
}

}  // namespace titan::testing
