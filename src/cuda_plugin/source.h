#pragma once

namespace titan::cuda {

/// The dtype of a kernel's inputs.
enum class Source { Float, BFloat16 };

}  // namespace titan::cuda
