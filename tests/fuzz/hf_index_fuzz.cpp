// Parses model.safetensors.index.json of a Hugging Face folder: names of files that will be opened.

#include "checkpoint/hugging_face/hf_json.h"
#include "fuzz.h"

namespace titan::fuzz {
namespace {

constexpr const char* kFile = "strange/model.safetensors.index.json";

}  // namespace

void fuzz_input(std::string_view text) {
  std::map<std::string, std::string> index;
  if (!accepted(kFile, [&] { index = detail::parse_hf_index(text, kFile); })) return;
  require(!index.empty(), "an index names tensors");
  for (const auto& [tensor, file] : index) {
    require(file.find('/') == file.npos && file != "." && file != "..", "a shard is in the folder itself");
    require(file.ends_with(".safetensors"), "a shard is a safetensors file");
    require(file.find('\0') == file.npos, "a file's name has no zero byte");
  }
}

}  // namespace titan::fuzz
