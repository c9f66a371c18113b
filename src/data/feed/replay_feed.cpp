// Reads tokens from .npy files in their order, for runs that are compared with another program's.

#include "data/feed/feeds.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/hash.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

std::string shape_text(const std::array<int64_t, 3>& shape) {
  return str("[", shape[0], ", ", shape[1], ", ", shape[2], "]");
}

// ---- the feed

constexpr int64_t kMostSteps = std::numeric_limits<int64_t>::max() / 2;

class ReplayLane : public Lane {
 public:
  ReplayLane(std::shared_ptr<const ReplayFeed> feed, const LaneState& state)
      : feed_(std::move(feed)), state_(state) {}

  int64_t fill(Row row) override { return feed_->read(state_.position++, state_.lane, row); }
  LaneState state() const override { return state_; }

 private:
  std::shared_ptr<const ReplayFeed> feed_;
  LaneState state_;
};

std::filesystem::path file_in(const std::filesystem::path& folder, const char* name) {
  auto path = folder / name;
  if (!std::filesystem::exists(path))
    throw ConfigError(str("data set 'tokens': no ", path.string(),
                          "; training.dataset_path must be a folder with input.npy and labels.npy"));
  return path;
}

}  // namespace

NpyArray::NpyArray(const std::filesystem::path& path)
    : path_(path), file_(path), header_(parse_npy_header(file_.text(), path.string())) {}

void NpyArray::read_row(int64_t i, int64_t j, std::span<int64_t> row) const {
  size_t first = static_cast<size_t>(i * shape()[1] + j) * shape()[2];
  const char* at = file_.text().data() + header_.data_start + first * sizeof(int32_t);
  for (int64_t& value : row) {
    int32_t element;  // elements may be unaligned
    std::memcpy(&element, at, sizeof element);
    value = element;
    at += sizeof element;
  }
}

bool ReplayFeed::is_recording(const std::filesystem::path& path) {
  if (path.empty()) return false;
  return std::filesystem::exists(path / "input.npy") || std::filesystem::exists(path / "labels.npy");
}

ReplayFeed::ReplayFeed(const std::filesystem::path& folder, int64_t vocab_size, bool finite)
    : input_(file_in(folder, "input.npy")),
      labels_(file_in(folder, "labels.npy")),
      vocab_size_(vocab_size),
      finite_(finite) {
  if (input_.shape() != labels_.shape())
    throw ConfigError(str(input_.path().string(), " has shape ", shape_text(input_.shape()),
                          " but labels.npy ", shape_text(labels_.shape())));
  fingerprint_ = str("tokens:", shape_text(input_.shape()), ":",
                     hex(hash_bytes(labels_.bytes(), hash_bytes(input_.bytes()))));
}

void ReplayFeed::check_shape(int64_t num_lanes, int64_t seq_len) const {
  if (num_lanes == input_.shape()[1] && seq_len == input_.shape()[2]) return;
  throw ConfigError(str("the recorded batches in ", input_.path().parent_path().string(),
                        " are [steps, global batch, sequence] = ", shape_text(input_.shape()),
                        ", but the config asks for a global batch of ", num_lanes, " sequences of ", seq_len,
                        " tokens: set training.global_batch_size and training.seq_len to the recording's"));
}

LaneState ReplayFeed::start(int64_t lane, int64_t) const { return {.lane = lane}; }

std::unique_ptr<Lane> ReplayFeed::open(const LaneState& state, int64_t) const {
  // A lane may be past the last step.
  TITAN_CHECK(state.lane >= 0 && state.lane < input_.shape()[1] && state.position >= 0 &&
                  state.position < kMostSteps && state.epoch == 0 && state.token_offset == 0,
              "the recorded batches in ", input_.path().parent_path().string(),
              " have no such position: row ", state.lane + 1, " of ", input_.shape()[1], ", epoch ",
              state.epoch, ", step ", state.position + 1, ", token ", state.token_offset);
  return std::make_unique<ReplayLane>(std::static_pointer_cast<const ReplayFeed>(shared_from_this()), state);
}

std::vector<LaneState> ReplayFeed::redeal(const std::vector<LaneState>& lanes, int64_t num_lanes) const {
  throw ConfigError(
      str("recorded batches of ", lanes.size(), " rows cannot be dealt as batches of ", num_lanes));
}

std::optional<int64_t> ReplayFeed::num_steps() const {
  return finite_ ? std::optional(input_.shape()[0]) : std::nullopt;
}

FeedSize ReplayFeed::measure() const {
  const auto& [steps, batch, length] = input_.shape();
  return {.tokens = steps * batch * length, .is_exact = true};
}

int64_t ReplayFeed::read(int64_t step, int64_t lane, Row row) const {
  if (step >= input_.shape()[0]) {
    TITAN_CHECK(finite_, "the recorded batches in ", input_.path().parent_path().string(), " end after ",
                input_.shape()[0], " steps; set training.steps to at most that");
    std::fill(row.input.begin(), row.input.end(), 0);
    std::fill(row.labels.begin(), row.labels.end(), kIgnoredLabel);
    return 0;
  }
  input_.read_row(step, lane, row.input);
  labels_.read_row(step, lane, row.labels);
  auto check = [&](int64_t id, const NpyArray& array) {
    TITAN_CHECK(id >= 0 && id < vocab_size_, array.path().string(), " has the id ", id, " at step ", step + 1,
                ", row ", lane + 1, ", outside the model's vocabulary of ", vocab_size_);
  };
  for (int64_t id : row.input) check(id, input_);
  for (int64_t id : row.labels)
    if (id != kIgnoredLabel) check(id, labels_);
  return static_cast<int64_t>(row.labels.size()) -
         std::count(row.labels.begin(), row.labels.end(), kIgnoredLabel);
}

}  // namespace titan::data
