#pragma once

// Placements: how a tensor is spread over one axis of a mesh, and which part each rank has.
//
//   Placement::shard(0); chunk_of(/*size=*/7, /*parts=*/4, /*index=*/3);  // rows [6, 7)

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace titan {

/// Shard(dim): chunked along dim. Replicate: whole on every rank. Partial: each rank has a summand.
struct Placement {
  enum class Kind { Shard, Replicate, Partial };
  Kind kind = Kind::Replicate;
  int64_t dim = -1;  ///< for Shard, >= 0

  static Placement shard(int64_t dim) { return {Kind::Shard, dim}; }
  static Placement replicate() { return {Kind::Replicate, -1}; }
  static Placement partial() { return {Kind::Partial, -1}; }
  bool is_shard() const { return kind == Kind::Shard; }
  bool is_replicate() const { return kind == Kind::Replicate; }
  bool is_partial() const { return kind == Kind::Partial; }
  friend bool operator==(const Placement&, const Placement&) = default;
};

std::ostream& operator<<(std::ostream& out, const Placement& placement);

/// A part of one dimension.
struct Chunk {
  int64_t offset = 0;
  int64_t length = 0;
  friend bool operator==(const Chunk&, const Chunk&) = default;
};

/// torch.chunk's rule: every chunk has ceil(size/parts) elements, the last ones fewer or none.
Chunk chunk_of(int64_t size, int64_t parts, int64_t index);
/// The length of the longest chunk: ceil(size/parts).
int64_t padded_chunk_length(int64_t size, int64_t parts);

/// An axis-aligned part of a tensor: offset and length per dimension.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> length;
  int64_t numel() const;
  friend bool operator==(const Box&, const Box&) = default;
};

}  // namespace titan
