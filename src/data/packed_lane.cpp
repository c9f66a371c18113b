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
  int64_t empty_pieces = 0;
  while (sample_.size() < count && !is_dry()) {
    if (!loaded_) load();
    auto left = piece_.begin() + state_.token_offset;
    auto taken = std::min(count - sample_.size(), static_cast<size_t>(piece_.end() - left));
    sample_.insert(sample_.end(), left, left + taken);
    state_.token_offset += static_cast<int64_t>(taken);
    empty_pieces = taken > 0 ? 0 : empty_pieces + 1;
    TITAN_CHECK(empty_pieces <= feed_->num_pieces() + 1,
                "the data set holds no tokens: all its documents are empty");
    if (sample_.size() < count) go_to_next_piece();
  }
}

void PackedLane::load() {
  feed_->tokens_at(state_.epoch, state_.position, text_, piece_);
  TITAN_CHECK(state_.token_offset <= static_cast<int64_t>(piece_.size()), "lane ", state_.lane,
              " stands at token ", state_.token_offset, " of a piece that has ", piece_.size(),
              ": its state is of other data");
  loaded_ = true;
}

void PackedLane::go_to_next_piece() {
  state_.position += num_lanes_;
  // More lanes than pieces: a lane may pass over whole epochs.
  state_.epoch += state_.position / feed_->num_pieces();
  state_.position %= feed_->num_pieces();
  state_.token_offset = 0;
  loaded_ = false;
}

}  // namespace titan::data
