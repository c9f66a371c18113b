#pragma once

// The safetensors format (https://huggingface.co/docs/safetensors): an 8-byte little-endian length, a JSON
// header, then the tensors' bytes, little-endian and row-major. The reader accepts files from anyone: a file
// that breaks a rule of the format is refused with an Error that names the file, the tensor and the rule,
// before any memory of the claimed size is allocated.
//
//   const titan::SafetensorsFile file("model.safetensors");
//   at::Tensor norm = file.tensor("norm.weight");                 // a view of the mapped file
//   titan::load_model(titan::parameters(model), "model.safetensors");   // each rank reads its own parts

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/parallel/parameters.h"
#include "titan/tensor/placement.h"

namespace titan {

// ---- reading

/// The header's entry of one tensor. Dtypes: F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U8 BOOL.
struct SafetensorsInfo {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  int64_t offset = 0;     ///< first byte, counted from the start of the file
  int64_t num_bytes = 0;  ///< product(shape) * element size
};

using SafetensorsMetadata = std::map<std::string, std::string>;

/// An open file, memory-mapped: opening reads the header, and data is read from disk when it is touched. If
/// LibTitan wrote it, the header has a checksum of each MiB of each tensor. It is compared before a number of
/// it is used for the first time; ConfigError names the damaged tensor. A handle (cheap to copy); the map
/// lives as long as a copy or a tensor that views it.
class SafetensorsFile {
 public:
  /// Throws Error when the file can't be read or isn't well-formed.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const;
  /// In the order of their bytes in the file.
  const std::vector<std::string>& names() const;
  bool contains(std::string_view name) const;
  /// Throws Error, with the nearest names, when the file has no such tensor.
  const SafetensorsInfo& info(std::string_view name) const;
  const SafetensorsMetadata& metadata() const;

  /// The whole tensor on the CPU (all its checksums are compared now): a view of the read-only map (writing
  /// to it faults; clone() first) where the file aligns it to its element size, as all known writers do,
  /// otherwise a copy.
  at::Tensor tensor(std::string_view name) const;
  /// The part `box` as a new contiguous tensor; touches only the pages that hold it.
  at::Tensor read_slice(std::string_view name, const Box& box) const;
  /// The same into `target`: contiguous, on the CPU, of the box's shape and the file's dtype.
  void read_slice(std::string_view name, const Box& box, const at::Tensor& target) const;
  /// Releases this process's memory for the pages read so far; touching them reads them again. With it, a
  /// large file can be read with little memory.
  void drop_pages() const;

 private:
  void check_blocks(std::string_view name, const Box& box) const;

  struct Contents;
  std::shared_ptr<const Contents> contents_;
};

// ---- writing

/// A tensor to be written, before its data exists.
struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
};

int64_t num_bytes(const SafetensorsEntry& entry);

/// The order in which tensors are written: by element size, largest first, so that each is aligned, then by
/// name.
void sort_for_file(std::vector<SafetensorsEntry>& entries);

/// Returns the data of entries[index]: dtype and shape as announced, on any device. Called once for each, in
/// order.
using ProduceTensor = std::function<at::Tensor(size_t index)>;

/// Writes a file with checksums tensor by tensor, so that one is in memory at a time. `entries` are in the
/// order of sort_for_file. The file appears under its name complete or not at all; throws Error.
void write_safetensors(const std::filesystem::path& path, const std::vector<SafetensorsEntry>& entries,
                       const SafetensorsMetadata& metadata, const ProduceTensor& produce);

/// Takes the next rows of a tensor, on any device, in its dtype.
using AppendTensor = std::function<void(const at::Tensor& rows)>;
/// Appends the data of entries[index], in any number of parts. Called once for each, in order.
using ProduceParts = std::function<void(size_t index, const AppendTensor& append)>;

/// As write_safetensors, for tensors that are too large to be whole in memory.
void write_safetensors_in_parts(const std::filesystem::path& path,
                                const std::vector<SafetensorsEntry>& entries,
                                const SafetensorsMetadata& metadata, const ProduceParts& produce);

/// As write_safetensors, for existing tensors; sorts them itself.
void save_safetensors(const std::filesystem::path& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const SafetensorsMetadata& metadata = {});

// ---- a model's weights with TorchTitan's names: checkpoint.initial_load_path reads them; save_model in
// hugging_face.h writes them

/// Copies this rank's part of every parameter out of one file, or the files of a folder that save_model wrote
/// (each rank reads only its own boxes), converted to the parameter's dtype. The files and the parameters
/// must have the same names. With `pipeline`, the parameters of all its ranks count, and the call is
/// collective over it. Throws ConfigError that lists all missing and unexpected names and wrong shapes before
/// any parameter has changed. Parameters must be materialized.
void load_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                const DeviceMesh& pipeline = {});
/// The problems that load_model() would report for `parameters`, those of the whole model. Reads the file's
/// header.
std::vector<std::string> model_file_differences(const std::vector<Parameter>& parameters,
                                                const std::filesystem::path& path);

}  // namespace titan
