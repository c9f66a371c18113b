// As plugin_operations.cpp, for Float8.

#include <algorithm>
#include <cstring>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "float8/cast.h"

#pragma GCC visibility push(hidden)
#include "cuda_plugin/float8.cpp"
#pragma GCC visibility pop
