#pragma once

// Weight gradients that a backward put off, with the groups that will take them.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "titan/ops/products.h"

namespace titan::fsdp {

class ParamGroup;

class DelayedQueue {
 public:
  void add(std::shared_ptr<ParamGroup> group, size_t slot, ops::WeightGrad grad);
  void add(std::shared_ptr<ParamGroup> group, size_t slot, ops::DueGradient gradient);
  void compute();
  size_t size() const { return entries_.size(); }
  int64_t bytes() const;

 private:
  struct Entry {
    std::shared_ptr<ParamGroup> group;
    size_t slot;
    ops::WeightGrad product;  // without products: `other` is it
    ops::DueGradient other = {};
  };
  std::vector<Entry> entries_;
};

}  // namespace titan::fsdp
