#pragma once

#include "titan/data/packed_feed.h"

namespace titan::data {

/// A lane over packed documents: holds its current piece, nothing else.
class PackedLane : public Lane {
 public:
  PackedLane(std::shared_ptr<const PackedFeed> feed, const LaneState& state, int64_t num_lanes)
      : feed_(std::move(feed)), state_(state), num_lanes_(num_lanes) {}

  int64_t fill(Row row) override;
  LaneState state() const override { return state_; }

 private:
  bool is_dry() const { return !feed_->options().repeat && state_.epoch > 0; }
  void open_piece();
  void encode_block();
  void go_to_next_piece();
  // Takes up to `count` tokens of the stream; fewer only when it ends.
  void take(size_t count);

  std::shared_ptr<const PackedFeed> feed_;
  LaneState state_;
  int64_t num_lanes_;
  int64_t empty_pieces_ = 0;  // in a row

  // The current piece, once it is needed.
  bool is_open_ = false;
  Piece piece_{};
  std::string text_;
  size_t encoded_ = 0;          // bytes of the text that are tokens by now
  bool is_encoded_ = false;     // all of it
  std::vector<int32_t> block_;  // tokens of the last block
  size_t next_ = 0;             // of the block's tokens

  std::vector<int32_t> sample_;
};

}  // namespace titan::data
