#pragma once

#include "titan/data/packed_feed.h"

namespace titan::data {

/// A lane over packed documents: holds the tokens of its current piece, nothing else.
class PackedLane : public Lane {
 public:
  PackedLane(std::shared_ptr<const PackedFeed> feed, const LaneState& state, int64_t num_lanes)
      : feed_(std::move(feed)), state_(state), num_lanes_(num_lanes) {}

  int64_t fill(Row row) override;
  LaneState state() const override { return state_; }

 private:
  bool is_dry() const { return !feed_->options().repeat && state_.epoch > 0; }
  void load();
  void go_to_next_piece();
  // Takes up to `count` tokens of the stream; fewer only when it ends.
  void take(size_t count);

  std::shared_ptr<const PackedFeed> feed_;
  LaneState state_;
  int64_t num_lanes_;
  bool loaded_ = false;
  std::string text_;
  std::vector<int32_t> piece_;
  std::vector<int32_t> sample_;
};

}  // namespace titan::data
