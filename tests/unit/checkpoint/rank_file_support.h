#pragma once

// Pieces to write, and files to damage.

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "checkpoint/format/rank_file.h"
#include "core/file.h"
#include "titan/core/error.h"
#include "unit/checkpoint/temp_folder.h"

namespace titan::checkpoint::testing {

inline const std::vector<at::ScalarType> kAllDtypes = {
    at::kDouble, at::kLong,          at::kFloat,       at::kInt,  at::kHalf, at::kBFloat16,
    at::kShort,  at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kChar, at::kByte, at::kBool};

inline const FileIdentity kIdentity = {"0123456789abcdef0123456789abcdef", 500, 3, 8};

inline at::Tensor sample(at::ScalarType dtype, at::IntArrayRef shape) {
  const at::Tensor values = at::randn(shape) * 10;
  return dtype == at::kBool ? values > 0 : values.to(dtype);
}

inline Box box_at(std::vector<int64_t> offset, std::vector<int64_t> length) {
  return {std::move(offset), std::move(length)};
}

/// A piece that begins at 0.
inline PieceToWrite piece(const std::string& name, const at::Tensor& data) {
  return {name, {std::vector<int64_t>(static_cast<size_t>(data.dim()), 0), data.sizes().vec()}, data};
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

inline at::Tensor read_whole(const RankFile& file, const std::string& name) {
  const RankFile::Entry& entry = file.entry(name);
  at::Tensor tensor = at::empty(entry.box.length, at::dtype(entry.dtype));
  file.read(name, entry.box, tensor);
  return tensor;
}

inline std::string read_raw(const std::filesystem::path& path) { return read_file(path); }

inline void write_raw(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

/// The message of the Error that `call` throws; "" when it throws none.
template <class Call>
std::string complaint(const Call& call) {
  try {
    call();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

/// The number of bytes before the tensors.
inline size_t header_size(const std::string& file) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  return sizeof length + length;
}

}  // namespace titan::checkpoint::testing
