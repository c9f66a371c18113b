// Parses config.json of a Hugging Face folder, as text and as the sizes of a Llama 3.

#include "checkpoint/hugging_face/hf_json.h"
#include "fuzz.h"
#include "titan/models/llama3.h"

namespace titan::fuzz {
namespace {

constexpr const char* kFile = "strange/config.json";
constexpr int64_t kFewLayers = 64;  // the list of a model's tensors is as long as the file says

}  // namespace

void fuzz_input(std::string_view text) {
  HfConfig config;
  if (!accepted(kFile, [&] { config = detail::parse_hf_config(text, kFile); })) return;
  for (const auto& [key, value] : config) to_text(value);
  models::Llama3Args args;
  // Its messages name keys only, because it isn't given the file's name.
  if (!accepted("", [&] { args = models::args_of_hugging_face(config); })) return;
  if (args.n_layers > kFewLayers) return;
  const HfModel model = models::hugging_face_model(args);
  require(models::args_of_hugging_face(model.config).dim == args.dim, "a model's own config is accepted");
}

}  // namespace titan::fuzz
