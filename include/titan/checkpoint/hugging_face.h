#pragma once

// A model under the names and in the layout of Hugging Face's transformers. A family fills an HfModel in;
// hf_folder.h and hf_model.h read and write folders by it.
//
// [Note: rows of rotary pairs]
// We rotate neighbouring rows of a head, (2i, 2i + 1); transformers rotates rows half a head apart,
// (i, i + head_dim / 2). So of every head of wq and wk (head_dim rows h * head_dim + ...)
//
//   theirs[j * head_dim / 2 + i] = ours[2 i + j]        j = 0, 1; i = 0 ... head_dim / 2 - 1
//
// which is `permute` in transformers' models/llama/convert_llama_weights_to_hf.py, and TorchTitan's
// models/llama3/model/state_dict_adapter.py: w.view(heads, head_dim / 2, 2, dim).transpose(1, 2).

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/safetensors.h"

namespace titan {

/// A value of config.json; monostate is null.
using HfValue = std::variant<std::monostate, bool, int64_t, double, std::string>;
/// config.json by dotted path; an array's elements by position: "rope_scaling.factor", "architectures.0".
using HfConfig = std::map<std::string, HfValue>;

struct HfTensor {
  std::string name;     ///< ours
  std::string hf_name;  ///< theirs
  std::vector<int64_t> shape;
  int64_t rotary_head_dim = 0;  ///< heads of so many rows in the order above; 0: the same rows
};

/// A model of given sizes.
struct HfModel {
  HfConfig config;                ///< what config.json says of it
  std::vector<HfTensor> tensors;  ///< of the whole model, each once (a tied matrix under its first name)
  /// Tensors that a folder may hold besides: tables that older versions saved.
  std::vector<std::string> ignored = {};
};

enum class RowOrder { Ours, HuggingFace };

/// The whole tensor in the order `to`, from the other one: one new tensor, or `rows` itself where
/// rotary_head_dim is 0.
at::Tensor reorder_rows(const at::Tensor& rows, int64_t rotary_head_dim, RowOrder to);
/// As above, into `target`: contiguous, of the shape of `rows` and other memory, of any dtype.
void reorder_rows(const at::Tensor& rows, int64_t rotary_head_dim, RowOrder to, const at::Tensor& target);

/// The part `box`, counted in the order `to`, of a tensor that lies in `file` under `name` in the other
/// order; reads the rows of that part, and of what lies between them at most as much again.
at::Tensor read_reordered(const SafetensorsFile& file, const std::string& name, const Box& box,
                          int64_t rotary_head_dim, RowOrder to);

/// As in config.json: "llama", 64, 1e-05, null.
std::string to_text(const HfValue& value);

}  // namespace titan
