#pragma once

// The manifest's part that is the table of tensors.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/strict_json.h"
#include "titan/checkpoint/state_table.h"

namespace titan::checkpoint::detail {

/// Two keys and their values: "layouts", each once, and "tensors", which refer to them by position.
std::string table_fields(const std::vector<StateTensor>& tensors);

/// Reads these two.
class TableReader {
 public:
  TableReader();
  TableReader(const TableReader&) = delete;
  JsonScope& layouts() { return layouts_scope_; }
  JsonScope& tensors() { return tensors_scope_; }
  /// What was read, once. Throws Error for a tensor whose layout isn't there.
  std::vector<StateTensor> take();

 private:
  std::string add_layout();
  std::string add_tensor();

  std::vector<std::shared_ptr<const TensorLayout>> layouts_;
  std::vector<StateTensor> tensors_;
  std::vector<int64_t> layout_positions_;  // of each tensor

  // What is being read.
  TensorLayout layout_;
  LayoutAxis axis_;
  std::string name_, dtype_;
  std::vector<int64_t> shape_;
  int64_t layout_position_ = 0;

  JsonRecord axis_scope_;
  JsonList layout_scope_, layouts_scope_;
  JsonNumbers shape_scope_;
  JsonRecord tensor_scope_;
  JsonList tensors_scope_;
};

}  // namespace titan::checkpoint::detail
