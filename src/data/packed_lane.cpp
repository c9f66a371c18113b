#include "packed_lane.h"

#include <algorithm>

#include "titan/core/error.h"

namespace titan::data {

int64_t PackedLane::fill(Row row) {
  size_t length = row.input.size();
  take(length + 1);
  size_t valid = sample_.empty() ? 0 : sample_.size() - 1;
  std::copy_n(sample_.begin(), valid, row.input.begin());
  std::copy_n(sample_.begin() + (valid > 0), valid, row.labels.begin());
  std::fill(row.input.begin() + valid, row.input.end(), 0);
  std::fill(row.labels.begin() + valid, row.labels.end(), kIgnoredLabel);
  return static_cast<int64_t>(valid);
}

void PackedLane::take(size_t count) {
  sample_.clear();
  while (sample_.size() < count && !is_dry()) {
    if (!is_open_) open_piece();
    size_t taken = std::min(count - sample_.size(), block_.size() - next_);
    sample_.insert(sample_.end(), block_.begin() + next_, block_.begin() + next_ + taken);
    next_ += taken;
    state_.token_offset += static_cast<int64_t>(taken);
    if (next_ < block_.size()) continue;
    if (!is_encoded_)
      encode_block();
    else if (sample_.size() < count)
      go_to_next_piece();
  }
}

void PackedLane::open_piece() {
  piece_ = feed_->piece_at(state_.epoch, state_.position);
  feed_->read(piece_, text_);
  is_open_ = true;
  is_encoded_ = false;
  encoded_ = 0;
  encode_block();
  // A lane that goes on from a saved state makes the tokens up to there again.
  int64_t used = state_.token_offset;
  while (used > static_cast<int64_t>(block_.size()) && !is_encoded_) {
    used -= static_cast<int64_t>(block_.size());
    encode_block();
  }
  TITAN_CHECK(used <= static_cast<int64_t>(block_.size()), "lane ", state_.lane, " stands at token ",
              state_.token_offset, " of a piece that has fewer: its state is of other data");
  next_ = static_cast<size_t>(used);
}

void PackedLane::encode_block() {
  block_.clear();
  next_ = 0;
  encoded_ = feed_->encode_block(piece_, text_, encoded_, block_);
  is_encoded_ = encoded_ == text_.size();
}

void PackedLane::go_to_next_piece() {
  empty_pieces_ = state_.token_offset > 0 ? 0 : empty_pieces_ + 1;
  TITAN_CHECK(empty_pieces_ <= feed_->num_pieces(),
              "the data set holds no tokens: all its documents are empty");
  state_.position += num_lanes_;
  // More lanes than pieces: a lane may pass over whole epochs.
  state_.epoch += state_.position / feed_->num_pieces();
  state_.position %= feed_->num_pieces();
  state_.token_offset = 0;
  is_open_ = false;
}

}  // namespace titan::data
