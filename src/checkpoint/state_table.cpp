#include "titan/checkpoint/state_table.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "checkpoint/rank_digits.h"
#include "checkpoint/safetensors_dtype.h"
#include "checkpoint/source_search.h"
#include "checkpoint/state_name.h"
#include "titan/core/error.h"

// [Note: who writes what]
// A part that several ranks have is cut into about as many pieces as it has MiB, at most one for each of them
// and for each row. The copies of a layout's parts are dealt these pieces in turn, the largest first: then no
// copy has more to write than another by more than one piece. The parts of a tensor are all dealt as the
// first one is, the largest.

namespace titan::checkpoint {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;
// Whoever sums up what a file says can't overflow.
constexpr int64_t kMaxBytes = int64_t{1} << 62;

int64_t element_size(const StateTensor& tensor) {
  return static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

bool in_file_order(const StateTensor& a, const StateTensor& b) {
  const int64_t size_a = element_size(a), size_b = element_size(b);
  return size_a != size_b ? size_a > size_b : a.name < b.name;
}

void check_names(const std::vector<StateTensor>& tensors) {
  std::vector<std::string_view> names;
  for (const StateTensor& tensor : tensors) {
    const std::string problem = detail::name_problem(tensor.name);
    TITAN_CHECK(problem.empty(), "a tensor's name ", problem);
    names.push_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  TITAN_CHECK(twice == names.end(), "two tensors are named '", *twice, "'");
}

void check_axis_names(const TensorLayout& layout) {
  for (const LayoutAxis& axis : layout.axes) {
    const std::string problem = detail::name_problem(axis.name);
    TITAN_CHECK(problem.empty(), "an axis' name ", problem);
  }
}

// Equal layouts become one object.
class SharedLayouts {
 public:
  void share(std::shared_ptr<const TensorLayout>& layout) {
    const auto [known, is_new] = known_.try_emplace(*layout, layout);
    if (is_new) check_axis_names(*layout);
    layout = known->second;
  }

 private:
  std::map<TensorLayout, std::shared_ptr<const TensorLayout>> known_;
};

void check_tensor(const StateTensor& tensor, int64_t world_size) {
  try {
    TITAN_CHECK(tensor.layout, "it has no layout");
    titan::detail::safetensors_name_of(tensor.dtype);
    check_layout(*tensor.layout, tensor.shape, world_size);
  } catch (const Error& error) {
    throw Error(str("tensor '", tensor.name, "': ", error.what()));
  }
}

// A tensor's own are far below what an int64_t holds (check_layout).
void check_total_size(const std::vector<StateTensor>& tensors) {
  int64_t total = 0;
  for (const StateTensor& tensor : tensors) {
    int64_t num_bytes = element_size(tensor);
    for (const int64_t size : tensor.shape) num_bytes *= size;
    const bool overflows = __builtin_add_overflow(total, num_bytes, &total);
    TITAN_CHECK(!overflows && total <= kMaxBytes, "tensors of more than ", kMaxBytes,
                " bytes together, up to '", tensor.name, "'");
  }
}

// How many pieces each part has. Where rows don't come out even, fewer pieces may have as many rows.
int64_t num_pieces_of(const Box& largest_part, int64_t num_bytes, int64_t num_replicas) {
  if (largest_part.length.empty() || num_bytes == 0) return 1;
  const int64_t rows = largest_part.length[0];
  const int64_t pieces = std::clamp<int64_t>(num_bytes / kPieceBytes, 1, std::min(num_replicas, rows));
  const int64_t rows_each = padded_chunk_length(rows, pieces);
  return (rows + rows_each - 1) / rows_each;
}

// Position 0 on every axis that cuts has the largest part.
Box largest_part_of(const StateTensor& tensor) { return box_of(*tensor.layout, tensor.shape, 0); }

}  // namespace

StateTable::StateTable(std::vector<StateTensor> tensors, int64_t world_size)
    : tensors_(std::move(tensors)), splits_(tensors_.size()), world_size_(world_size) {
  check_names(tensors_);
  SharedLayouts layouts;
  for (StateTensor& tensor : tensors_) {
    check_tensor(tensor, world_size_);
    layouts.share(tensor.layout);
  }
  check_total_size(tensors_);
  std::sort(tensors_.begin(), tensors_.end(), in_file_order);
  deal_pieces();
}

void StateTable::deal_pieces() {
  std::vector<int64_t> piece_bytes;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Box part = largest_part_of(tensors_[i]);
    const int64_t num_bytes = part.numel() * element_size(tensors_[i]);
    splits_[i].num_pieces = num_pieces_of(part, num_bytes, num_replicas(*tensors_[i].layout, world_size_));
    piece_bytes.push_back(num_bytes / splits_[i].num_pieces);
  }
  std::vector<size_t> largest_first(tensors_.size());
  std::iota(largest_first.begin(), largest_first.end(), size_t{0});
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [&](size_t a, size_t b) { return piece_bytes[a] > piece_bytes[b]; });
  std::map<const TensorLayout*, int64_t> dealt;
  for (size_t i : largest_first) {
    const TensorLayout& layout = *tensors_[i].layout;
    int64_t& pieces = dealt[&layout];
    splits_[i].first_writer = pieces % num_replicas(layout, world_size_);
    pieces += splits_[i].num_pieces;
  }
}

std::optional<size_t> StateTable::find(std::string_view name) const {
  // Sorted by name within each element size.
  for (auto begin = tensors_.begin(); begin != tensors_.end();) {
    const auto end = std::partition_point(begin, tensors_.end(), [&](const StateTensor& tensor) {
      return element_size(tensor) == element_size(*begin);
    });
    const auto found = std::lower_bound(
        begin, end, name,
        [](const StateTensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
    if (found != end && found->name == name) return static_cast<size_t>(found - tensors_.begin());
    begin = end;
  }
  return std::nullopt;
}

std::vector<Piece> StateTable::pieces_of(int64_t rank) const {
  TITAN_CHECK(rank >= 0 && rank < world_size_, "no rank ", rank, " of ", world_size_);
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const TensorLayout& layout = *tensors_[i].layout;
    if (!holds(layout, rank)) continue;
    const int64_t copies = num_replicas(layout, world_size_);
    const int64_t copy = replica_of(layout, world_size_, rank);
    const int64_t piece = (copy - splits_[i].first_writer + copies) % copies;
    if (piece >= splits_[i].num_pieces) continue;
    Box box = detail::piece_of(box_of(layout, tensors_[i].shape, rank), splits_[i].num_pieces, piece);
    if (box.numel() > 0) pieces.push_back({i, std::move(box)});
  }
  return pieces;
}

std::vector<Source> StateTable::sources_of(size_t tensor, const Box& wanted) const {
  TITAN_CHECK(tensor < tensors_.size(), "no tensor ", tensor, " of ", tensors_.size());
  const Split& split = splits_[tensor];
  return detail::search_sources(tensors_[tensor], wanted, world_size_, split.num_pieces, split.first_writer);
}

}  // namespace titan::checkpoint
