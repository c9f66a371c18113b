// Parses a checkpoint's manifest.json and the loader's state among its texts, and makes the plan of which
// rank's file has which part of a tensor.

#include "titan/checkpoint/manifest.h"

#include <algorithm>

#include "fuzz.h"
#include "titan/data/loader.h"

namespace titan::fuzz {
namespace {

using checkpoint::Manifest;
using checkpoint::StateTable;

constexpr const char* kFile = "strange/manifest.json";
constexpr int64_t kFewPlans = 20'000;

// Adds a matching digest: otherwise every mutation would be refused at once, and nothing else would be
// tested.
std::string with_digest(std::string_view text) {
  text.remove_prefix(std::min(text.find('\n') + 1, text.size()));
  return str(R"({"titan_checkpoint":)", checkpoint::kFormatVersion, R"(,"digest":")",
             checkpoint::digest_of(text), "\",\n", text);
}

Box whole(const std::vector<int64_t>& shape) { return {std::vector<int64_t>(shape.size(), 0), shape}; }

// Each element is in exactly one piece, counted by rank and found by box.
void require_tiled(const StateTable& table) {
  const size_t num_tensors = table.tensors().size();
  if (static_cast<int64_t>(num_tensors) * table.world_size() > kFewPlans) return;
  std::vector<int64_t> left;
  for (const auto& tensor : table.tensors()) left.push_back(whole(tensor.shape).numel());
  for (int64_t rank = 0; rank < table.world_size(); ++rank)
    for (const checkpoint::Piece& piece : table.pieces_of(rank)) left[piece.tensor] -= piece.box.numel();
  for (size_t i = 0; i < num_tensors; ++i) {
    require(left[i] == 0, "the ranks' pieces make up the tensor");
    int64_t missing = whole(table.tensors()[i].shape).numel();
    for (const checkpoint::Source& source : table.sources_of(i, whole(table.tensors()[i].shape))) {
      require(source.rank >= 0 && source.rank < table.world_size(), "a piece is in a rank's file");
      missing -= source.box.numel();
    }
    require(missing == 0, "the pieces found by box make up the tensor");
  }
}

void require_reads_back(const std::string& text) {
  const data::LoaderState state = data::loader_state_from_json(text);
  require(data::loader_state_from_json(data::to_json(state)) == state, "a loader's state reads back");
}

}  // namespace

void fuzz_input(std::string_view text) {
  Manifest manifest;
  accepted(kFile, [&] { manifest = checkpoint::parse_manifest(text, kFile); });
  const std::string valid = with_digest(text);
  if (!accepted(kFile, [&] { manifest = checkpoint::parse_manifest(valid, kFile); })) return;
  require_tiled(manifest.table);
  for (const auto& text : manifest.texts) accepted("data loader", [&] { require_reads_back(text.second); });
  const std::string written = checkpoint::to_text(manifest);
  require(checkpoint::to_text(checkpoint::parse_manifest(written, kFile)) == written,
          "a manifest reads back");
}

}  // namespace titan::fuzz
