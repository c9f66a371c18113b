#include "titan/data/packed_feed.h"

#include <algorithm>
#include <limits>

#include "fingerprint.h"
#include "packed_lane.h"
#include "titan/core/error.h"
#include "titan/data/permutation.h"
#include "utf8.h"

namespace titan::data {
namespace {

// Another value gives other tokens wherever no line ends near a block's end.
constexpr size_t kBlockBytes = 16 << 10;

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// The last place in the second half of a block where a line begins without a space; else the first
// character's after the block.
size_t end_of_block(std::string_view text, size_t begin) {
  if (text.size() - begin <= kBlockBytes) return text.size();
  for (size_t end = begin + kBlockBytes; end > begin + kBlockBytes / 2; --end)
    if (text[end - 1] == '\n' && !is_space(text[end])) return end;
  size_t end = begin + kBlockBytes;
  while (end < text.size() && !starts_character(text[end])) ++end;
  return end;
}

// Counted through all epochs, pieces have room to go on.
void check_place(const LaneState& state, int64_t num_pieces) {
  const int64_t most_epochs = std::numeric_limits<int64_t>::max() / 4 / num_pieces;
  TITAN_CHECK(state.epoch >= 0 && state.epoch <= most_epochs && state.position >= 0 &&
                  state.position < num_pieces && state.token_offset >= 0,
              "lane ", state.lane, " has no such place: epoch ", state.epoch, ", position ", state.position,
              " of ", num_pieces, ", token ", state.token_offset);
}

}  // namespace

PackedFeed::PackedFeed(std::shared_ptr<const Source> source, std::shared_ptr<const Tokenizer> tokenizer,
                       const PackingOptions& options)
    : pieces_(std::move(source), options.piece_bytes), tokenizer_(std::move(tokenizer)), options_(options) {}

void PackedFeed::check_shape(int64_t num_lanes, int64_t seq_len) const {
  if (num_lanes < 1)
    throw ConfigError(str("the global batch size is ", num_lanes, "; it has to be at least 1"));
  if (seq_len < 1) throw ConfigError(str("training.seq_len is ", seq_len, "; it has to be at least 1"));
}

LaneState PackedFeed::start(int64_t lane, int64_t) const {
  return {.lane = lane, .epoch = lane / num_pieces(), .position = lane % num_pieces()};
}

std::unique_ptr<Lane> PackedFeed::open(const LaneState& state, int64_t num_lanes) const {
  check_place(state, num_pieces());
  auto self = std::static_pointer_cast<const PackedFeed>(shared_from_this());
  return std::make_unique<PackedLane>(std::move(self), state, num_lanes);
}

std::vector<LaneState> PackedFeed::redeal(const std::vector<LaneState>& lanes, int64_t num_lanes) const {
  int64_t next = 0;  // counted through all epochs: no old lane has begun this piece or one behind it
  for (const auto& lane : lanes) {
    check_place(lane, num_pieces());
    int64_t begun = lane.token_offset > 0 ? static_cast<int64_t>(lanes.size()) : 0;
    next = std::max(next, lane.epoch * num_pieces() + lane.position + begun);
  }
  std::vector<LaneState> dealt;
  for (int64_t lane = 0; lane < num_lanes; ++lane) {
    int64_t piece = next + lane;
    dealt.push_back({.lane = lane, .epoch = piece / num_pieces(), .position = piece % num_pieces()});
  }
  return dealt;
}

Piece PackedFeed::piece_at(int64_t epoch, int64_t position) const {
  if (!options_.shuffle) return pieces_.at(position);
  return pieces_.at(Permutation(num_pieces(), options_.seed, static_cast<uint64_t>(epoch))(position));
}

size_t PackedFeed::encode_block(const Piece& piece, std::string_view text, size_t begin,
                                std::vector<int32_t>& tokens) const {
  size_t end = end_of_block(text, begin);
  if (auto bos = tokenizer_->bos_id(); bos && begin == 0) tokens.push_back(*bos);
  tokenizer_->encode_into(text.substr(begin, end - begin), tokens);
  if (auto eos = tokenizer_->eos_id(); eos && piece.is_last && end == text.size()) tokens.push_back(*eos);
  return end;
}

std::string PackedFeed::fingerprint() const {
  return join_fingerprint({{"source", pieces_.source().fingerprint()},
                           {"tokenizer", tokenizer_->fingerprint()},
                           {"pieces", str(options_.piece_bytes, " bytes")},
                           {"order", options_.shuffle ? str("shuffled by ", options_.seed) : "as it is"}});
}

}  // namespace titan::data
