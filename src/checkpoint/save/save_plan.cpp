#include "checkpoint/save/save_plan.h"

#include <map>
#include <memory>

#include <c10/core/ScalarType.h>

#include "checkpoint/save/rank_tree.h"
#include "tensor/memory.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

constexpr dist::Label kPlanLabel{.phase = "checkpoint::plan"};

// Thousands of tensors have a few layouts.
class Layouts {
 public:
  std::shared_ptr<const TensorLayout> shared(TensorLayout layout) {
    auto& known = known_[layout];
    if (!known) known = std::make_shared<const TensorLayout>(std::move(layout));
    return known;
  }

 private:
  std::map<TensorLayout, std::shared_ptr<const TensorLayout>> known_;
};

template <class Wire>
void tensor_fields(Wire& wire, auto& tensor) {
  wire(tensor.name, tensor.dtype, tensor.shape);
}

template <class Wire>
void axis_fields(Wire& wire, auto& axis) {
  wire(axis.name, axis.size, axis.stride, axis.dim, axis.only);
}

void write_tensor(WireWriter& out, const StateTensor& tensor) {
  tensor_fields(out, tensor);
  out(tensor.layout->axes.size());
  for (const LayoutAxis& axis : tensor.layout->axes) axis_fields(out, axis);
}

StateTensor read_tensor(WireReader& in, Layouts& layouts) {
  StateTensor tensor;
  tensor_fields(in, tensor);
  TensorLayout layout;
  for (auto left = in.get<size_t>(); left > 0; --left) axis_fields(in, layout.axes.emplace_back());
  tensor.layout = layouts.shared(std::move(layout));
  return tensor;
}

std::vector<StateTensor> own_tensors(const std::vector<NamedTensor>& tensors, const DeviceMesh& pipeline) {
  std::vector<StateTensor> own;
  Layouts layouts;
  for (const NamedTensor& tensor : tensors)
    if (!tensor.duplicate)
      own.push_back({.name = tensor.name,
                     .dtype = tensor.data.local.scalar_type(),
                     .shape = tensor.data.global_shape,
                     .layout = layouts.shared(layout_of(tensor.data, pipeline))});
  return own;
}

std::vector<StateTensor> all_tensors(const std::vector<NamedTensor>& tensors, const DeviceMesh& pipeline) {
  std::vector<StateTensor> own;
  std::string text;
  // The other stages wait for this one's text, whatever is wrong with it.
  const std::string problem = problem_of([&] {
    own = own_tensors(tensors, pipeline);
    text = encode_stage(own);
  });
  std::vector<std::string> texts;
  if (pipeline.size() > 1) texts = pipeline.group()->all_gather_text(text, kPlanLabel);
  TITAN_CHECK(problem.empty(), problem);
  return pipeline.size() > 1 ? decode_stages(texts) : own;
}

}  // namespace

std::string encode_stage(const std::vector<StateTensor>& tensors) {
  WireWriter out;
  for (const StateTensor& tensor : tensors) write_tensor(out, tensor);
  return out.take();
}

std::vector<StateTensor> decode_stages(const std::vector<std::string>& texts) {
  std::vector<StateTensor> tensors;
  Layouts layouts;
  for (const std::string& text : texts)
    for (WireReader in(text); !in.done();) tensors.push_back(read_tensor(in, layouts));
  return tensors;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += titan::str(text.empty() ? "" : ", ", size);
  return "[" + text + "]";
}

std::vector<NamedTensor> tensors_of(const std::vector<KeyedState>& states) {
  std::vector<NamedTensor> tensors;
  for (const auto& [key, state] : states) {
    for (const ObjectTensor& tensor : state.tensors) {
      const std::string name = key + "." + tensor.name;
      const at::Tensor& local = tensor.data.local;
      TITAN_CHECK(local.defined() && !is_deferred(local), "checkpoint: tensor '", name,
                  "' has no memory (yet)");
      TITAN_CHECK(local.sizes() == at::IntArrayRef(tensor.data.box.length), "checkpoint: tensor '", name,
                  "' has a local part of shape ", shape_text(local.sizes().vec()), ", its box says ",
                  shape_text(tensor.data.box.length));
      tensors.push_back({name, tensor.data, tensor.duplicate});
    }
  }
  return tensors;
}

SavePlan::SavePlan(const std::vector<NamedTensor>& tensors, const dist::World& world,
                   const DeviceMesh& pipeline)
    : table_(all_tensors(tensors, pipeline), world.size()) {
  for (const NamedTensor& tensor : tensors) {
    TITAN_CHECK(!tensor.duplicate || table_.find(tensor.name), "checkpoint: tensor '", tensor.name,
                "' is a duplicate that another pipeline stage has to save, but no stage has it");
    known_.push_back({tensor.name, tensor.data.local.scalar_type(), tensor.data.global_shape, tensor.data.box,
                      tensor.duplicate});
  }
  plan_pieces(tensors, world.rank());
}

void SavePlan::plan_pieces(const std::vector<NamedTensor>& tensors, int64_t rank) {
  std::map<std::string_view, size_t> positions;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (!tensors[i].duplicate) positions.emplace(tensors[i].name, i);
  for (const Piece& piece : table_.pieces_of(rank)) {
    const StateTensor& tensor = table_.tensors()[piece.tensor];
    const auto position = positions.find(tensor.name);
    TITAN_CHECK(position != positions.end(), "checkpoint: by the layout of '", tensor.name, "' rank ", rank,
                " holds a part of it, but no object there has such a tensor");
    PlannedPiece planned{.name = tensor.name, .box = piece.box, .source = position->second, .start = {}};
    const Box& part = tensors[planned.source].data.box;
    planned.is_whole_rows = true;
    for (size_t dim = 0; dim < part.length.size(); ++dim) {
      planned.start.push_back(piece.box.offset[dim] - part.offset[dim]);
      if (dim > 0 && piece.box.length[dim] != part.length[dim]) planned.is_whole_rows = false;
    }
    planned.num_bytes = piece.box.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    pieces_.push_back(std::move(planned));
  }
}

std::string SavePlan::digest() const { return digest_of(encode_stage(table_.tensors())); }

void SavePlan::check_same(const std::vector<NamedTensor>& tensors) const {
  TITAN_CHECK(tensors.size() == known_.size(), "checkpoint: the objects have ", tensors.size(),
              " tensors, at the first save they had ", known_.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const NamedTensor& now = tensors[i];
    const Known& before = known_[i];
    const bool same = now.name == before.name && now.data.local.scalar_type() == before.dtype &&
                      now.data.global_shape == before.global_shape && now.data.box == before.box &&
                      now.duplicate == before.duplicate;
    TITAN_CHECK(same, "checkpoint: tensor ", i, " is '", now.name, "' (", now.data.local.scalar_type(), " ",
                shape_text(now.data.global_shape), "), at the first save it was '", before.name, "' (",
                before.dtype, " ", shape_text(before.global_shape),
                "): names, dtypes, shapes and layouts must not change");
  }
}

at::Tensor part_of(const at::Tensor& local, const PlannedPiece& piece) {
  at::Tensor part = local.detach();
  for (size_t dim = 0; dim < piece.start.size(); ++dim)
    part = part.narrow(static_cast<int64_t>(dim), piece.start[dim], piece.box.length[dim]);
  return part;
}

}  // namespace titan::checkpoint::detail
