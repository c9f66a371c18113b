// hf_logits FOLDER WEIGHTS OUTPUT: our logits, for transformers_test.py, for the model in FOLDER's
// config.json with the weights in the single file WEIGHTS. The tokens are [2, 64], (7919 b + 10473 s + 1)
// modulo the vocabulary at row b, position s.

#include <ATen/ATen.h>

#include <cstdio>
#include <exception>

#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/models/llama3.h"

namespace titan {
namespace {

void write_logits(const std::filesystem::path& folder, const std::filesystem::path& weights,
                  const std::filesystem::path& output) {
  at::NoGradGuard no_grad;
  models::Llama3Args args = models::args_of_hugging_face(read_hf_config(folder));
  args.max_seq_len = 64;
  const models::Llama3 model(args, deferred(at::kCPU, at::kFloat));
  materialize(model, 0);
  load_model(parameters(model), weights);
  const at::Tensor tokens_BS = (7919 * at::arange(2).unsqueeze(1) + 10473 * at::arange(64).unsqueeze(0) + 1)
                                   .remainder(args.vocab_size);
  save_safetensors(output, {{"logits", model(tokens_BS)}});
}

}  // namespace
}  // namespace titan

int main(int argc, char** argv) {
  try {
    if (argc != 4) {
      std::fputs("usage: hf_logits FOLDER WEIGHTS OUTPUT\n", stderr);
      return 2;
    }
    titan::write_logits(argv[1], argv[2], argv[3]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hf_logits: %s\n", error.what());
    return 1;
  }
}
