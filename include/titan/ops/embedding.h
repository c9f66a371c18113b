#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "titan/ops/products.h"
#include "titan/ops/rank_parts.h"

namespace titan::ops {

/// Rows of weight [V, D] by tokens [...] (int64 in [0, V), others are an error on CPUs): [..., D]. The
/// weight's gradient is summed in fp32 (float64 of a float64 weight), in token order, and goes to
/// `weight_sink` if there is one. With `part`, weight holds these rows of a larger vocabulary, and tokens of
/// other parts give zeros: the sum over the parts is the embedding. First derivatives only.
at::Tensor embedding(const at::Tensor& weight_VD, const at::Tensor& tokens,
                     const std::shared_ptr<GradSink>& weight_sink = nullptr, const VocabularyPart& part = {});

}  // namespace titan::ops
