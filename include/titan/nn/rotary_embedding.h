#pragma once

#include <cstdint>

#include "titan/nn/attention_core.h"
#include "titan/nn/module.h"
#include "titan/nn/ref.h"

namespace titan::nn {

/// Llama 3.1's stretching of the slow rotations (Grattafiori et al., "The Llama 3 herd of models", 2024, and
/// Meta's model.py). A frequency f of wavelength l = 2 pi / f, in tokens, becomes: f where l <
/// original_length / high_freq_factor, f / factor where l > original_length / low_freq_factor, and a linear
/// blend in 1/l between.
struct RotaryScaling {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_length = 8192;
};

struct RotaryOptions {
  int64_t head_dim = 0;  ///< even
  int64_t max_positions = 0;
  double theta = 10000;
  std::optional<RotaryScaling> scaling = std::nullopt;
  Construct construct = {};
};

/// f_i = theta^(-2i/head_dim) for i < head_dim/2, scaled. In fp32 with PyTorch's own kernels and roundings,
/// so that positions turn by the same angles as in TorchTitan.
at::Tensor rotary_frequencies(int64_t head_dim, double theta, const std::optional<RotaryScaling>& scaling,
                              at::ScalarType dtype = at::kFloat);

/// Rotates queries or keys by position, interleaved pairs. No parameters; a table (cos, sin) in fp32, not
/// saved with the model, that deferred construction leaves empty until reset_buffers(). One module serves all
/// layers.
class RotaryEmbeddingImpl : public Module, public PositionUser {
 public:
  explicit RotaryEmbeddingImpl(const RotaryOptions& options);
  /// x: [B, S, H, head_dim]; positions: int64 [S] or [B, S]; undefined: those of the tokens that this rank
  /// holds, which are 0..S-1 where no set_token_positions() says otherwise.
  at::Tensor forward(const at::Tensor& x_BSHD, const at::Tensor& positions = {});

  void reset_buffers(const at::Device& device) override;
  void set_token_positions(std::shared_ptr<TokenPositions> positions) override {
    token_positions_ = std::move(positions);
  }
  const at::Tensor& table() const { return table_; }

 private:
  RotaryOptions options_;
  std::shared_ptr<TokenPositions> token_positions_;  // null: 0..S-1
  at::Tensor
      table_;  // [max_positions, head_dim]: cos, sin, cos, sin, ...; fp32, or float64 in a float64 model
};
TITAN_MODULE(RotaryEmbedding);

}  // namespace titan::nn
