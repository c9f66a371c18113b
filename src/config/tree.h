#pragma once

// Every setting of a job with its value, grouped by table: what the writers walk.

#include <string>
#include <vector>

#include "titan/config/schema.h"

namespace titan::config {

struct Node {
  std::string key;                   ///< one component, no dots
  const FieldInfo* field = nullptr;  ///< nullptr for a table
  Value value;
  std::vector<Node> children;  ///< of a table, in the schema's order
};

/// The root table. `fields` must outlive it: they are the schema's and the job's own.
Node tree_of(const Schema& schema, const void* job);

}  // namespace titan::config
