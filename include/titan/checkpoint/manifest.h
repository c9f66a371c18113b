#pragma once

// Where every rank's part of a tensor lies, as a rule: known to all without asking anyone, and small enough
// to stand in a manifest.

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

/// An axis of the world's grid by the ranks' numbers: rank r stands at (r / stride) % size on it. Either it
/// cuts the tensor along `dim`, or only the ranks at position `only` have the tensor (a pipeline's stage).
struct LayoutAxis {
  std::string name;  ///< "tp": for people
  int64_t size = 1;
  int64_t stride = 1;
  int64_t dim = -1;
  int64_t only = -1;
  friend auto operator<=>(const LayoutAxis&, const LayoutAxis&) = default;
};

/// In the order in which they cut what is left (chunk_of). Ranks that differ on no listed axis have copies of
/// the same part.
struct TensorLayout {
  std::vector<LayoutAxis> axes;
  friend auto operator<=>(const TensorLayout&, const TensorLayout&) = default;
};

/// The layout of a tensor that the ranks at this rank's position in `pipeline` (one axis, or empty) have.
/// Axes of size 1 and those that the tensor is whole on have no entry. Throws Error for a Partial tensor, and
/// where `tensor.box` isn't what the rule says of this rank.
TensorLayout layout_of(const DTensor& tensor, const DeviceMesh& pipeline = {});

/// Throws Error, saying what, unless the axes are independent digits of the numbers of `world_size` ranks,
/// the dims are the shape's, and the shape has at most 2^56 elements (counting sizes of 0 as 1) and 64
/// dimensions. Then the parts of the ranks, each counted once, tile the tensor: chunk_of tiles a dimension,
/// and every combination of positions is some rank's.
void check_layout(const TensorLayout& layout, const std::vector<int64_t>& shape, int64_t world_size);

// Of a layout that was checked:

bool holds(const TensorLayout& layout, int64_t rank);
/// The part of a rank that holds the tensor; may be empty.
Box box_of(const TensorLayout& layout, const std::vector<int64_t>& shape, int64_t rank);
/// How many ranks have the same part.
int64_t num_replicas(const TensorLayout& layout, int64_t world_size);
/// Which of these a rank is: 0 ... num_replicas - 1, ascending with the rank.
int64_t replica_of(const TensorLayout& layout, int64_t world_size, int64_t rank);

// All tensors of a checkpoint, and which rank's file has which piece of them. Planning needs no
// communication: every rank computes the same from the same table.
//
//   part    what a rank holds of a tensor (layout.h); several ranks may have copies of it
//   piece   what a rank writes of its part: copies of a part share it out by rows, so that each element is
//           written once and all ranks write about as much

struct StateTensor {
  /// "model.layers.0.attention.wq.weight": UTF-8 of at most 1,000 bytes without '/', ".." and control
  /// characters
  std::string name;
  at::ScalarType dtype = at::kFloat;  ///< one that safetensors has
  std::vector<int64_t> shape;
  std::shared_ptr<const TensorLayout> layout;  ///< shared: of thousands of tensors there are a few
};

/// What a rank's file has of a tensor.
struct Piece {
  size_t tensor = 0;  ///< position in StateTable::tensors
  Box box;
};

/// A piece that has elements of what is looked for: the whole piece.
struct Source {
  int64_t rank = 0;
  Box box;
};

class StateTable {
 public:
  StateTable() = default;
  /// Throws Error that names the tensor for two of one name, for one whose name, dtype or layout isn't
  /// allowed (check_layout).
  StateTable(std::vector<StateTensor> tensors, int64_t world_size);

  int64_t world_size() const { return world_size_; }
  /// In the order of safetensors files: element size downwards, then by name.
  const std::vector<StateTensor>& tensors() const { return tensors_; }
  /// The position of a tensor.
  std::optional<size_t> find(std::string_view name) const;

  /// What `rank` writes, in the table's order, without empty pieces.
  std::vector<Piece> pieces_of(int64_t rank) const;
  /// The pieces that intersect `wanted`, by rank. The time it takes depends on their number, not on the
  /// world's.
  std::vector<Source> sources_of(size_t tensor, const Box& wanted) const;

 private:
  // How the copies of a tensor's parts share it out: piece j is written by copy (first_writer + j) mod
  // copies.
  struct Split {
    int64_t num_pieces = 1;
    int64_t first_writer = 0;
  };

  void deal_pieces();

  std::vector<StateTensor> tensors_;
  std::vector<Split> splits_;
  int64_t world_size_ = 1;
};

// manifest.json: what makes a folder of files a checkpoint. Its first bytes are a digest of the rest, so that
// no damaged one is believed; docs/checkpoint.md describes every key.

constexpr int kFormatVersion = 1;
constexpr const char* kManifestName = "manifest.json";
constexpr int64_t kMaxManifestBytes = 100'000'000;

/// XXH3, 128 bits, as 32 hexadecimal digits: finds damage, not forgery.
std::string digest_of(std::string_view bytes);

/// A rank's file as the manifest knows it.
struct FileRecord {
  int64_t num_bytes = 0;
  std::string header_digest;  ///< of the 8 length bytes and the JSON text
  friend bool operator==(const FileRecord&, const FileRecord&) = default;
};

struct Manifest {
  std::string run_id;  ///< of the run that wrote it: 32 hexadecimal digits
  int64_t step = 0;
  std::string library;      ///< "titan 0.1.0, torch 2.11.0"
  int64_t num_threads = 0;  ///< of an operation, on each rank: the same number is needed for the same bits
  bool finite = true;       ///< all elements of all floating tensors are
  std::string config;       ///< resolved, as TOML; may be empty
  /// What isn't tensors, by the object's key: "dataloader", "train_state".
  std::map<std::string, std::string> texts;
  StateTable table;
  std::vector<FileRecord> files;  ///< one per rank
};

/// "rank_00003.safetensors"
std::string file_name(int64_t rank);

/// In `config`, `library` and the texts, bytes that aren't UTF-8 become U+FFFD, so that saving goes on.
/// Throws Error for what parse_manifest would refuse.
std::string to_text(const Manifest& manifest);
/// Throws Error that names `path` and what is wrong: a digest that doesn't fit, a newer format, a key that is
/// missing, unknown, there twice or out of its limits, any nesting but the format's, a layout that isn't
/// sound.
Manifest parse_manifest(std::string_view text, const std::filesystem::path& path);
/// Of a checkpoint's folder. Throws Error as parse_manifest does, and where the file can't be read.
Manifest read_manifest(const std::filesystem::path& folder);

}  // namespace titan::checkpoint
