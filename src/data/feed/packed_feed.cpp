// Documents in a shuffled order, packed into samples of one length; build_feed() chooses between feeds.

#include "data/feed/feeds.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <iterator>
#include <limits>

#include "core/hash.h"
#include "core/utf8.h"
#include "data/sources/stored_tokens.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

// A step begins with the first tokens of many pieces: whole pieces would take long.
constexpr size_t kBlockBytes = 16 << 10;

constexpr int64_t kLongestTail = 3;  // continuation bytes of a character
constexpr int64_t kMostRoom = 1024;  // bytes in which a place to cut is searched
constexpr int64_t kContext = 64;     // bytes before and after a cut that decide whether it changes tokens
constexpr int kMostTries = 32;       // limits the time where no place of one kind is accepted

// The beginning of the first character at or after `at`. In damaged text there may be none nearby; then `at`
// moves by kLongestTail bytes.
int64_t move_to_character(std::string_view text, int64_t at) {
  int64_t moved = 0;
  while (moved < kLongestTail && at + moved < std::ssize(text) && !starts_character(text[at + moved]))
    ++moved;
  return at + moved;
}

bool is_space(char c) { return c == ' ' || c == '\n'; }

// Letters beyond ASCII, and their punctuation, are one kind.
int kind_of(char c) {
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return 0;
  if (c >= '0' && c <= '9') return 1;
  return static_cast<unsigned char>(c) >= 0x80 ? 2 : is_space(c) ? 3 : 4;
}

// Whether a cut at `at` leaves the tokens around it as they are. A view may begin within a word or a group of
// digits: what is found must not depend on where.
bool keeps_tokens(const Tokenizer& tokenizer, std::string_view text, int64_t at) {
  const int64_t end = std::min(std::ssize(text), at + kContext);
  const std::string_view after = text.substr(at, end - at);
  int64_t begin = std::max<int64_t>(0, at - kContext);
  for (int view = 0; view < 3; ++view, ++begin) {
    begin = move_to_character(text, begin);
    if (begin >= at) break;
    std::vector<int32_t> cut = tokenizer.encode(text.substr(begin, at - begin));
    tokenizer.encode_into(after, cut);
    if (cut != tokenizer.encode(text.substr(begin, end - begin))) return false;
  }
  return true;
}

// The cut at or after `at`, within `room` bytes, for the pieces on both of its sides, which see the same bytes
// around it. A place that keeps the tokens is searched at single spaces, then where letters, digits and signs
// meet, then between any characters. Without one, the cut is at the next character.
int64_t find_cut(const Tokenizer& tokenizer, std::string_view text, int64_t at, int64_t room) {
  const int64_t end = std::min(std::ssize(text) - 1, at + room);
  const auto is_single_space = [&](int64_t i) {
    return is_space(text[i]) && !is_space(text[i - 1]) && !is_space(text[i + 1]);
  };
  const auto is_change = [&](int64_t i) { return kind_of(text[i]) != kind_of(text[i - 1]); };
  const auto is_any = [](int64_t) { return true; };
  const auto search = [&](const auto& is_place) -> int64_t {
    for (int64_t i = at, tries = 0; i < end && tries < kMostTries; ++i) {
      if (!starts_character(text[i]) || !is_place(i)) continue;
      if (keeps_tokens(tokenizer, text, i)) return i;
      ++tries;
    }
    return -1;
  };
  int64_t cut = search(is_single_space);
  if (cut < 0) cut = search(is_change);
  if (cut < 0) cut = search(is_any);
  return cut < 0 ? move_to_character(text, at) : cut;
}

/// A lane over packed documents, which holds only its current piece.
class PackedLane : public Lane {
 public:
  PackedLane(std::shared_ptr<const PackedFeed> feed, const LaneState& state, int64_t num_lanes)
      : feed_(std::move(feed)), state_(state), num_lanes_(num_lanes) {}

  int64_t fill(Row row) override {
    size_t length = row.input.size();
    take(length + 1);
    size_t valid = sample_.empty() ? 0 : sample_.size() - 1;
    std::copy_n(sample_.begin(), valid, row.input.begin());
    std::copy_n(sample_.begin() + (valid > 0), valid, row.labels.begin());
    std::fill(row.input.begin() + valid, row.input.end(), 0);
    std::fill(row.labels.begin() + valid, row.labels.end(), kIgnoredLabel);
    return static_cast<int64_t>(valid);
  }

  LaneState state() const override { return state_; }

 private:
  bool is_dry() const { return !feed_->options().repeat && state_.epoch > 0; }
  void open_piece() {
    piece_ = feed_->piece_at(state_.epoch, state_.position);
    feed_->read(piece_, text_);
    encoder_ = feed_->tokenizer().open(text_);
    is_encoded_ = false;
    encode_block(/*is_first=*/true);
    // A lane that resumes from a saved state encodes the tokens before that position again.
    int64_t used = state_.token_offset;
    while (used > static_cast<int64_t>(block_.size()) && !is_encoded_) {
      used -= static_cast<int64_t>(block_.size());
      encode_block(/*is_first=*/false);
    }
    TITAN_CHECK(used <= static_cast<int64_t>(block_.size()), "lane ", state_.lane, " is at token ",
                state_.token_offset, " of a piece with fewer tokens: its state belongs to other data");
    next_ = static_cast<size_t>(used);
  }

  // BOS comes before each piece, EOS after the last one of a document.
  void encode_block(bool is_first) {
    block_.clear();
    next_ = 0;
    const Tokenizer& tokenizer = feed_->tokenizer();
    if (auto bos = tokenizer.bos_id(); bos && is_first) block_.push_back(*bos);
    is_encoded_ = encoder_->encode_block(kBlockBytes, block_);
    if (auto eos = tokenizer.eos_id(); eos && is_encoded_ && piece_.is_last) block_.push_back(*eos);
  }

  void go_to_next_piece() {
    empty_pieces_ = state_.token_offset > 0 ? 0 : empty_pieces_ + 1;
    TITAN_CHECK(empty_pieces_ <= feed_->num_pieces(),
                "the data set holds no tokens: all its documents are empty");
    state_.position += num_lanes_;
    // With more lanes than pieces, a lane may skip whole epochs.
    state_.epoch += state_.position / feed_->num_pieces();
    state_.position %= feed_->num_pieces();
    state_.token_offset = 0;
    encoder_.reset();
  }

  // Takes up to `count` tokens of the stream, fewer only at its end.
  void take(size_t count) {
    sample_.clear();
    while (sample_.size() < count && !is_dry()) {
      if (!encoder_) open_piece();
      size_t taken = std::min(count - sample_.size(), block_.size() - next_);
      sample_.insert(sample_.end(), block_.begin() + next_, block_.begin() + next_ + taken);
      next_ += taken;
      state_.token_offset += static_cast<int64_t>(taken);
      if (next_ < block_.size()) continue;
      if (!is_encoded_)
        encode_block(/*is_first=*/false);
      else if (sample_.size() < count)
        go_to_next_piece();
    }
  }

  std::shared_ptr<const PackedFeed> feed_;
  LaneState state_;
  int64_t num_lanes_;
  int64_t empty_pieces_ = 0;  // consecutive ones

  // The current piece, opened when needed.
  Piece piece_{};
  std::string text_;
  std::unique_ptr<TextEncoder> encoder_;  // null: not open
  bool is_encoded_ = false;               // all of it is encoded
  std::vector<int32_t> block_;            // tokens of the last block
  size_t next_ = 0;                       // next token in the block

  std::vector<int32_t> sample_;
};

// The bytes that aren't part of a valid character.
int64_t count_invalid(std::string_view text) {
  int64_t count = 0;
  for (size_t at = valid_utf8_prefix(text); at < text.size(); ++count) {
    text.remove_prefix(at + 1);
    at = valid_utf8_prefix(text);
  }
  return count;
}

// Throws Error for a position that doesn't exist, or leaves no room to count pieces through further epochs.
void check_place(const LaneState& state, int64_t num_pieces) {
  const int64_t most_epochs = std::numeric_limits<int64_t>::max() / 4 / num_pieces;
  TITAN_CHECK(state.epoch >= 0 && state.epoch <= most_epochs && state.position >= 0 &&
                  state.position < num_pieces && state.token_offset >= 0,
              "lane ", state.lane, " has no such position: epoch ", state.epoch, ", position ",
              state.position, " of ", num_pieces, ", token ", state.token_offset);
}

constexpr std::string_view kSourcePart = "source = ";

std::string packed_fingerprint(const std::string& source, const Tokenizer& tokenizer,
                               const PackingOptions& options) {
  return str(kSourcePart, source, "; tokenizer = ", tokenizer.fingerprint(),
             "; pieces = ", options.piece_bytes, " bytes", options.is_text ? " cut between tokens" : "",
             "; order = ", options.shuffle ? str("shuffled by ", options.seed) : "as it is");
}

PackingOptions packing_of(const FeedRequest& request) {
  const DataSettings& settings = request.source.settings;
  return {.piece_bytes = settings.piece_bytes,
          .shuffle = settings.shuffle && request.repeat,
          .seed = settings.seed_or_default(),
          .repeat = request.repeat,
          .is_text = request.dataset != "tokens"};
}

}  // namespace

Permutation::Permutation(int64_t n, uint64_t seed, uint64_t stream) : n_(static_cast<uint64_t>(n)) {
  TITAN_CHECK(n >= 1, "a permutation needs at least 1 element, got ", n);
  // At least two bits, one for each half of the network.
  int bits = std::max(2, static_cast<int>(std::bit_width(n_ - 1)));
  low_bits_ = bits / 2;
  low_mask_ = (uint64_t{1} << low_bits_) - 1;
  high_mask_ = (uint64_t{1} << (bits - low_bits_)) - 1;
  uint64_t key = mix(mix(seed) ^ stream);
  for (uint64_t& round_key : keys_) round_key = key = mix(key);
}

// The halves may differ in width by one bit, so they alternate in place instead of being swapped.
uint64_t Permutation::network(uint64_t x) const {
  uint64_t high = x >> low_bits_, low = x & low_mask_;
  for (int round = 0; round < kRounds; round += 2) {
    high ^= mix(low ^ keys_[round]) & high_mask_;
    low ^= mix(high ^ keys_[round + 1]) & low_mask_;
  }
  return high << low_bits_ | low;
}

int64_t Permutation::operator()(int64_t k) const {
  auto x = static_cast<uint64_t>(k);
  TITAN_INTERNAL_ASSERT(x < n_, k, " of ", n_);
  do x = network(x);
  while (x >= n_);
  return static_cast<int64_t>(x);
}

PieceTable::PieceTable(std::shared_ptr<const Source> source, int64_t piece_bytes,
                       std::shared_ptr<const Tokenizer> tokenizer)
    : source_(std::move(source)), piece_bytes_(piece_bytes), tokenizer_(std::move(tokenizer)) {
  TITAN_CHECK(piece_bytes > kLongestTail, "data.piece_bytes is ", piece_bytes, "; it must exceed ",
              kLongestTail);
  if (tokenizer_) room_ = std::clamp(piece_bytes_ / 8, kLongestTail, kMostRoom);
  int64_t num_documents = source_->size();
  for (int64_t i = 0; i < num_documents; ++i) {
    const int64_t length = source_->length(i);
    // After every cut, at least its room is left.
    int64_t pieces = std::max<int64_t>(1, (length - room_ + piece_bytes_ - 1) / piece_bytes_);
    num_bytes_ += length;
    if (pieces > 1) long_documents_.push_back({i, size_, pieces});
    size_ += pieces;
  }
}

Piece PieceTable::at(int64_t index) const {
  auto after = std::upper_bound(long_documents_.begin(), long_documents_.end(), index,
                                [](int64_t i, const LongDocument& d) { return i < d.first_piece; });
  if (after == long_documents_.begin()) return {index, 0, true};
  const LongDocument& before = *(after - 1);
  int64_t within = index - before.first_piece;
  if (within < before.num_pieces) return {before.document, within, within + 1 == before.num_pieces};
  // Between long documents every document is one piece.
  return {before.document + 1 + within - before.num_pieces, 0, true};
}

void PieceTable::read(const Piece& piece, std::string& text) const {
  const int64_t begin = piece.index * piece_bytes_, length = source_->length(piece.document);
  const int64_t end = piece.is_last ? length : begin + piece_bytes_;
  const int64_t context = tokenizer_ ? kContext : 0;
  const int64_t from = std::max<int64_t>(0, begin - context);
  source_->read(piece.document, from, std::min(length, end + room_ + context) - from, text);
  if (!tokenizer_) return;
  const int64_t first = piece.index > 0 ? find_cut(*tokenizer_, text, begin - from, room_) : 0;
  if (!piece.is_last) text.resize(find_cut(*tokenizer_, text, end - from, room_));
  text.erase(0, first);
}

void PieceTable::read_sample(const Piece& piece, int64_t count, std::string& text) const {
  const int64_t begin = piece.index * piece_bytes_, left = source_->length(piece.document) - begin;
  source_->read(piece.document, begin, std::min(left, count + kLongestTail), text);
  if (left > count) text.resize(move_to_character(text, std::min<int64_t>(count, std::ssize(text))));
  if (begin > 0) text.erase(0, move_to_character(text, 0));
}

PackedFeed::PackedFeed(std::shared_ptr<const Source> source, std::shared_ptr<const Tokenizer> tokenizer,
                       const PackingOptions& options)
    : pieces_(std::move(source), options.piece_bytes, options.is_text ? tokenizer : nullptr),
      tokenizer_(std::move(tokenizer)),
      options_(options) {}

void PackedFeed::check_shape(int64_t num_lanes, int64_t seq_len) const {
  if (num_lanes < 1)
    throw ConfigError(str("the global batch size is ", num_lanes, "; it must be at least 1"));
  if (seq_len < 1) throw ConfigError(str("training.seq_len is ", seq_len, "; it must be at least 1"));
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
  int64_t next = 0;  // counted through all epochs: no old lane has begun this piece or a later one
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

FeedSize PackedFeed::measure() const {
  constexpr int64_t kSamples = 32, kSampleBytes = 4096;
  const Source& source = pieces_.source();
  FeedSize size{.documents = source.size(), .bytes = pieces_.num_bytes()};
  if (!options_.is_text)
    return {.documents = size.documents, .tokens = size.bytes / kStoredIdBytes, .is_exact = true};
  if (!source.reads_fast()) return size;
  int64_t num_bytes = 0, num_invalid = 0;
  std::vector<int32_t> tokens;
  std::string sample;
  const int64_t num_samples = std::min(kSamples, num_pieces());
  for (int64_t i = 0; i < num_samples; ++i) {
    pieces_.read_sample(pieces_.at(i * num_pieces() / num_samples), kSampleBytes, sample);
    tokenizer_->encode_into(sample, tokens);
    num_bytes += std::ssize(sample);
    num_invalid += count_invalid(sample);
  }
  if (num_bytes == 0) return size;
  const double share = static_cast<double>(size.bytes) / static_cast<double>(num_bytes);
  size.tokens = std::llround(static_cast<double>(tokens.size()) * share);
  if (tokenizer_->bos_id()) size.tokens += num_pieces();
  if (tokenizer_->eos_id()) size.tokens += size.documents;
  size.invalid = static_cast<double>(num_invalid) / static_cast<double>(num_bytes);
  return size;
}

Piece PackedFeed::piece_at(int64_t epoch, int64_t position) const {
  if (!options_.shuffle) return pieces_.at(position);
  return pieces_.at(Permutation(num_pieces(), options_.seed, static_cast<uint64_t>(epoch))(position));
}

std::string PackedFeed::fingerprint() const {
  return packed_fingerprint(pieces_.source().fingerprint(), *tokenizer_, options_);
}

std::string quick_difference(const FeedRequest& request, const std::string& before) {
  if (request.dataset == "tokens") return fingerprint_difference(before, build_feed(request)->fingerprint());
  TITAN_CHECK(request.tokenizer, "data set '", request.dataset, "' needs a tokenizer");
  std::string kind = request.dataset;
  std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return std::tolower(c); });
  const std::string_view part = std::string_view(before).substr(0, before.find("; tokenizer = "));
  const std::string_view source =
      part.starts_with(kSourcePart) ? part.substr(kSourcePart.size()) : std::string_view();
  return fingerprint_difference(before, packed_fingerprint(quick_fingerprint(kind, request.source, source),
                                                           *request.tokenizer, packing_of(request)));
}

std::shared_ptr<const Feed> build_feed(const FeedRequest& request) {
  const bool is_tokens = request.dataset == "tokens";
  if (is_tokens && ReplayFeed::is_recording(request.source.path))
    return std::make_shared<ReplayFeed>(request.source.path, request.model_vocab_size, !request.repeat);
  PackingOptions packing = packing_of(request);
  if (is_tokens) {
    packing.piece_bytes -= packing.piece_bytes % kStoredIdBytes;
    return std::make_shared<PackedFeed>(
        std::make_shared<StoredTokens>(request.source, request.model_vocab_size),
        std::make_shared<StoredIds>(request.model_vocab_size), packing);
  }
  TITAN_CHECK(request.tokenizer, "data set '", request.dataset, "' needs a tokenizer");
  check_vocabulary(*request.tokenizer, request.model_vocab_size);
  return std::make_shared<PackedFeed>(build_source(request.dataset, request.source), request.tokenizer,
                                      packing);
}

}  // namespace titan::data
