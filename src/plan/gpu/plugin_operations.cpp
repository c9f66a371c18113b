// The plugin's operations, the branches that a GPU runs, for planned devices: headers of cuda_shim stand in for CUDA's, and
// plugin_kernels.cpp counts what is launched. The plugin has functions of these names, so they are hidden from other libraries; what they
// call isn't, and is declared before.

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "ops/adam_formula.h"
#include "ops/operators.h"
#include "titan/ops/loss.h"

#pragma GCC visibility push(hidden)
#include "cuda_plugin/ops.cpp"
#pragma GCC visibility pop
