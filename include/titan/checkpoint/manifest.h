#pragma once

// The contents of a checkpoint: its tensors, how they are spread over the ranks' files, and everything else
// that manifest.json records. docs/checkpoint_format.md describes every key.
//
//   const Manifest manifest = read_manifest("outputs/checkpoint/step-500");
//   for (const StateTensor& tensor : manifest.table.tensors()) std::puts(tensor.name.c_str());
//
//   layout  where each rank's part of a tensor lies, as a rule over rank numbers
//   part    what one rank holds of a tensor; several ranks may hold copies of the same part
//   piece   what one rank writes of its part: the copies of a part share the writing by rows, so that every
//           element is written once and all ranks write about the same amount

#include <compare>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

#include "titan/dist/device_mesh.h"
#include "titan/tensor/dtensor.h"
#include "titan/tensor/placement.h"

namespace titan::checkpoint {

// ---- layouts

/// One axis of the grid of ranks: rank r is at position (r / stride) % size. The axis either splits the
/// tensor along `dim`, or only the ranks at position `only` hold the tensor (a pipeline stage).
struct LayoutAxis {
  std::string name;  ///< "tp": for people
  int64_t size = 1;
  int64_t stride = 1;
  int64_t dim = -1;
  int64_t only = -1;
  friend auto operator<=>(const LayoutAxis&, const LayoutAxis&) = default;
};

/// The axes, in the order in which they split: each splits the chunks that those before it made (chunk_of).
/// Ranks that differ on no listed axis hold copies of the same part.
struct TensorLayout {
  std::vector<LayoutAxis> axes;
  friend auto operator<=>(const TensorLayout&, const TensorLayout&) = default;
};

/// The layout of a tensor held by the ranks at this rank's position in `pipeline` (one axis, or empty). Axes
/// of size 1 and axes that don't split the tensor have no entry. Throws Error for a Partial tensor, and where
/// `tensor.box` differs from this rank's box in the layout.
TensorLayout layout_of(const DTensor& tensor, const DeviceMesh& pipeline = {});

/// Throws Error unless the axes are independent digits of the rank numbers 0 ... world_size - 1, each dim is
/// one of the shape's, and the shape has at most 2^56 elements (counting sizes of 0 as 1) and 64 dimensions.
/// Then the distinct parts tile the tensor: chunk_of tiles a dimension, and every combination of positions
/// belongs to some rank.
void check_layout(const TensorLayout& layout, const std::vector<int64_t>& shape, int64_t world_size);

// The functions below expect a layout that passed check_layout.

/// Whether a rank has a part of the tensor.
bool holds(const TensorLayout& layout, int64_t rank);
/// The part of a rank for which holds() is true; may be empty.
Box box_of(const TensorLayout& layout, const std::vector<int64_t>& shape, int64_t rank);
/// How many ranks hold the same part.
int64_t num_replicas(const TensorLayout& layout, int64_t world_size);
/// A rank's number among these replicas: 0 ... num_replicas - 1, ascending with the rank.
int64_t replica_of(const TensorLayout& layout, int64_t world_size, int64_t rank);
/// The inverse of replica_of, for the rank at position 0 on every axis.
int64_t rank_of_replica(const TensorLayout& layout, int64_t world_size, int64_t replica);

// ---- the table of tensors

struct StateTensor {
  /// "model.layers.0.attention.wq.weight": UTF-8, at most 1,000 bytes, without '/', '\', ".." and control
  /// characters.
  std::string name;
  at::ScalarType dtype = at::kFloat;  ///< one that safetensors can hold
  std::vector<int64_t> shape;
  std::shared_ptr<const TensorLayout> layout;  ///< shared: thousands of tensors have a few layouts
};

/// The part of a tensor in a rank's file.
struct Piece {
  size_t tensor = 0;  ///< position in StateTable::tensors
  Box box;
};

/// A piece that intersects the box that a reader wants.
struct Source {
  int64_t rank = 0;
  Box box;
};

/// All tensors of a checkpoint, and which rank's file has which piece. Planning needs no communication: every
/// rank computes the same from the same table.
class StateTable {
 public:
  StateTable() = default;
  /// Throws Error that names the tensor for a duplicate name and for a name, dtype or layout that isn't
  /// allowed.
  StateTable(std::vector<StateTensor> tensors, int64_t world_size);

  int64_t world_size() const { return world_size_; }
  /// In the order of safetensors files: by element size, largest first, then by name.
  const std::vector<StateTensor>& tensors() const { return tensors_; }
  /// The position of a tensor.
  std::optional<size_t> find(std::string_view name) const;

  /// The pieces that `rank` writes, in the table's order, without empty pieces.
  std::vector<Piece> pieces_of(int64_t rank) const;
  /// The pieces that intersect `wanted`, by rank. Takes time proportional to their number, not to the world
  /// size.
  std::vector<Source> sources_of(size_t tensor, const Box& wanted) const;

 private:
  // How the copies of a tensor's parts share the writing: copy (first_writer + j) % copies writes piece j.
  struct Split {
    int64_t num_pieces = 1;
    int64_t first_writer = 0;
  };

  void deal_pieces();

  std::vector<StateTensor> tensors_;
  std::vector<Split> splits_;
  int64_t world_size_ = 1;
};

// ---- manifest.json

constexpr int kFormatVersion = 1;
constexpr const char* kManifestName = "manifest.json";
constexpr int64_t kMaxManifestBytes = 100'000'000;

/// XXH3, 128 bits, as 32 hexadecimal digits: finds damage, not forgery.
std::string digest_of(std::string_view bytes);

/// The manifest's record of a rank's file.
struct FileRecord {
  int64_t num_bytes = 0;
  std::string header_digest;  ///< covers the 8 length bytes and the JSON text
  friend bool operator==(const FileRecord&, const FileRecord&) = default;
};

struct Manifest {
  std::string run_id;  ///< the run that wrote it: 32 hexadecimal digits
  int64_t step = 0;
  std::string library;      ///< "titan 0.1.0, torch 2.11.0"
  int64_t num_threads = 0;  ///< per operation on each rank: bit-equal results need the same number
  bool finite = true;       ///< every element of every floating tensor is finite
  std::string config;       ///< resolved, as TOML; may be empty
  /// Everything that isn't tensors, by the object's key: "dataloader", "train_state".
  std::map<std::string, std::string> texts;
  StateTable table;
  std::vector<FileRecord> files;  ///< one per rank
};

/// "rank_00003.safetensors"
std::string file_name(int64_t rank);

/// In `config`, `library` and the texts, bytes that aren't UTF-8 become U+FFFD, so that saving doesn't
/// fail. Throws Error for a manifest that parse_manifest would refuse.
std::string to_text(const Manifest& manifest);
/// Throws Error that names `path` and the problem: a wrong digest, a newer format, a key that is missing,
/// unknown, duplicate or out of its limits, nesting other than the format's, an unsound layout.
Manifest parse_manifest(std::string_view text, const std::filesystem::path& path);
/// Reads a step folder's manifest. Throws Error as parse_manifest does, and where the file can't be read.
Manifest read_manifest(const std::filesystem::path& folder);

}  // namespace titan::checkpoint
