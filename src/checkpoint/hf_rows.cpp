#include <algorithm>

#include <ATen/ops/empty.h>

#include "titan/checkpoint/hugging_face.h"
#include "titan/core/error.h"

namespace titan {
namespace {

void check_heads(int64_t num_rows, int64_t head_dim) {
  TITAN_CHECK(head_dim % 2 == 0 && num_rows % head_dim == 0, num_rows, " rows aren't heads of ", head_dim,
              " rotated in pairs");
}

// What a part of a head takes from the other order: `length` rows, `stride` apart.
struct Run {
  int64_t from = 0, from_stride = 1;
  int64_t to = 0, to_stride = 1;
  int64_t length = 0;
};

// The two runs of rows [begin, end) of a head, one of each half of the pairs.
Run run_of(int64_t half, int64_t head_dim, int64_t begin, int64_t end, RowOrder to) {
  const int64_t pairs = head_dim / 2;
  if (to == RowOrder::Ours) {
    const int64_t first = (begin - half + 1) / 2, last = (end - half + 1) / 2;
    return {
        .from = half * pairs + first, .to = 2 * first + half - begin, .to_stride = 2, .length = last - first};
  }
  const int64_t first = std::clamp<int64_t>(begin - half * pairs, 0, pairs);
  const int64_t last = std::clamp<int64_t>(end - half * pairs, 0, pairs);
  return {
      .from = 2 * first + half, .from_stride = 2, .to = half * pairs + first - begin, .length = last - first};
}

int64_t span(int64_t length, int64_t stride) { return (length - 1) * stride + 1; }

}  // namespace

at::Tensor reorder_rows(const at::Tensor& rows, int64_t rotary_head_dim, RowOrder to) {
  if (rotary_head_dim == 0) return rows;
  at::Tensor reordered = at::empty(rows.sizes(), rows.options());
  reorder_rows(rows, rotary_head_dim, to, reordered);
  return reordered;
}

void reorder_rows(const at::Tensor& rows, int64_t rotary_head_dim, RowOrder to, const at::Tensor& target) {
  TITAN_CHECK(target.is_contiguous() && target.sizes() == rows.sizes(), "rows ", rows.sizes(),
              " are put in order in a contiguous tensor of their shape, given ", target.sizes());
  if (rotary_head_dim == 0) {
    target.copy_(rows);
    return;
  }
  check_heads(rows.size(0), rotary_head_dim);
  const int64_t pairs = rotary_head_dim / 2;
  std::vector<int64_t> from = {rows.size(0) / rotary_head_dim, pairs, 2};
  if (to == RowOrder::Ours) std::swap(from[1], from[2]);
  const auto rest = rows.sizes().slice(1);
  from.insert(from.end(), rest.begin(), rest.end());
  const at::Tensor in_order = rows.reshape(from).transpose(1, 2);
  target.view(in_order.sizes()).copy_(in_order);
}

at::Tensor read_reordered(const SafetensorsFile& file, const std::string& name, const Box& box,
                          int64_t rotary_head_dim, RowOrder to) {
  if (rotary_head_dim == 0 || box.numel() == 0) return file.read_slice(name, box);
  check_heads(file.info(name).shape.at(0), rotary_head_dim);
  const int64_t first = box.offset[0], last = first + box.length[0];
  at::Tensor part = at::empty(box.length, at::dtype(file.info(name).dtype));
  for (int64_t head = first / rotary_head_dim * rotary_head_dim; head < last; head += rotary_head_dim) {
    const int64_t begin = std::max(first - head, int64_t{0});
    const int64_t end = std::min(last - head, rotary_head_dim);
    for (int64_t half = 0; half < 2; ++half) {
      const Run run = run_of(half, rotary_head_dim, begin, end, to);
      if (run.length <= 0) continue;
      Box source = box;
      source.offset[0] = head + run.from;
      source.length[0] = span(run.length, run.from_stride);
      const int64_t target = head + begin - first + run.to;
      part.slice(0, target, target + span(run.length, run.to_stride), run.to_stride)
          .copy_(file.read_slice(name, source).slice(0, 0, source.length[0], run.from_stride));
    }
  }
  return part;
}

}  // namespace titan
