#include "titan/data/loader.h"

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include <ATen/Context.h>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "data/feed/prefetcher.h"
#include "data/fingerprint.h"
#include "titan/core/error.h"

namespace titan::data {

LoaderState merge(const std::vector<LoaderState>& parts) {
  TITAN_CHECK(!parts.empty(), "no loader states to merge");
  LoaderState whole = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    const LoaderState& part = parts[i];
    TITAN_CHECK(part.steps == whole.steps && part.num_lanes == whole.num_lanes,
                "loader states of different runs: step ", part.steps, " of ", part.num_lanes,
                " lanes beside step ", whole.steps, " of ", whole.num_lanes);
    TITAN_CHECK(part.feed_fingerprint == whole.feed_fingerprint, "loader states of different data: '",
                part.feed_fingerprint, "' beside '", whole.feed_fingerprint, "'");
    whole.lanes.insert(whole.lanes.end(), part.lanes.begin(), part.lanes.end());
  }
  std::sort(whole.lanes.begin(), whole.lanes.end(),
            [](const auto& a, const auto& b) { return a.lane < b.lane; });
  for (int64_t lane = 0; lane < whole.num_lanes; ++lane)
    TITAN_CHECK(lane < static_cast<int64_t>(whole.lanes.size()) && whole.lanes[lane].lane == lane,
                "the loader states of all ranks lack lane ", lane, " of ", whole.num_lanes,
                ", or have one twice");
  TITAN_CHECK(static_cast<int64_t>(whole.lanes.size()) == whole.num_lanes, "more loader states than lanes");
  return whole;
}

std::string to_json(const LoaderState& state) {
  nlohmann::json tree;
  tree["steps"] = state.steps;
  tree["num_lanes"] = state.num_lanes;
  tree["feed"] = state.feed_fingerprint;
  auto& lanes = tree["lanes"] = nlohmann::json::array();
  for (const auto& lane : state.lanes)
    lanes.push_back(std::array{lane.lane, lane.epoch, lane.position, lane.token_offset});
  return tree.dump();
}

LoaderState loader_state_from_json(std::string_view text) {
  const auto check = [](bool holds, const auto&... what) {
    if (!holds) throw Error(str("not a loader's state: ", what...));
  };
  const auto tree = parse_shallow_json(text);
  check(tree.is_object(), "no JSON object, or one nested deeper than ", kMaxJsonDepth);
  const auto steps = json_count(tree, "steps"), num_lanes = json_count(tree, "num_lanes");
  check(steps && num_lanes, "'steps' and 'num_lanes' have to be whole numbers");
  check(tree.contains("feed") && tree["feed"].is_string(), "'feed' has to be a text");
  check(tree.contains("lanes") && tree["lanes"].is_array(), "'lanes' has to be a list");
  LoaderState state{.steps = *steps, .num_lanes = *num_lanes, .feed_fingerprint = tree["feed"], .lanes = {}};
  for (const auto& row : tree["lanes"]) {
    std::array<int64_t, 4> numbers = {};
    check(row.is_array() && row.size() == numbers.size(), "a lane has ", numbers.size(), " numbers");
    for (size_t i = 0; i < numbers.size(); ++i) {
      const auto number = json_count(row[i]);
      check(number.has_value(), "a lane's numbers have to be whole ones of 0 to ", kMaxJsonCount);
      numbers[i] = *number;
    }
    state.lanes.push_back({numbers[0], numbers[1], numbers[2], numbers[3]});
  }
  return state;
}

class DataLoader::Impl {
 public:
  Impl(std::shared_ptr<const Feed> feed, const LoaderOptions& options)
      : feed_(std::move(feed)), options_(options) {
    TITAN_CHECK(options.dp_size >= 1 && options.dp_rank >= 0 && options.dp_rank < options.dp_size,
                "data-parallel rank ", options.dp_rank, " of ", options.dp_size);
    if (options.local_batch_size < 1)
      throw ConfigError(
          str("the local batch size is ", options.local_batch_size, "; it has to be at least 1"));
    if (options.settings.pin_memory && !at::globalContext().hasCUDA())
      throw ConfigError(
          "dataloader.pin_memory needs a CUDA GPU: only copies to one gain from page-locked memory");
    if (options_.global_batch_size < 0)
      options_.global_batch_size = options.local_batch_size * options.dp_size;
    feed_->check_shape(num_lanes(), options.seq_len);
    end_ = feed_->num_steps();
    restart();
  }

  int64_t num_lanes() const { return options_.global_batch_size; }
  int64_t num_rows() const { return static_cast<int64_t>(lanes_.size()); }
  std::optional<int64_t> num_steps() const { return end_; }

  // As many as the rank with the most lanes needs.
  int64_t num_micro_batches() const {
    int64_t most_lanes = (num_lanes() + options_.dp_size - 1) / options_.dp_size;
    return (most_lanes + options_.local_batch_size - 1) / options_.local_batch_size;
  }

  std::optional<std::vector<Batch>> next_step() {
    TITAN_CHECK(next_micro_batch_ == 0, "next_step() between the micro-batches of a step");
    return make_step();
  }

  std::optional<Batch> next() {
    if (next_micro_batch_ == 0) {
      auto step = make_step();
      if (!step) return std::nullopt;
      current_ = std::move(*step);
    }
    Batch batch = std::move(current_[next_micro_batch_]);
    next_micro_batch_ = (next_micro_batch_ + 1) % current_.size();
    return batch;
  }

  bool wait(std::chrono::milliseconds longest) {
    if (next_micro_batch_ != 0 || is_at_end()) return true;
    return prefetcher().wait(longest);
  }

  void take_back_step() {
    TITAN_CHECK(next_micro_batch_ == 0 && lanes_before_, "a loader takes back one step, and a whole one");
    abandon_reading();
    lanes_ = std::move(*lanes_before_);
    lanes_before_.reset();
    --steps_;
  }

  // What waits for the threads is a thread itself, which nobody waits for.
  void abandon_reading() {
    if (prefetcher_) std::thread([reading = std::move(prefetcher_)] {}).detach();
  }

  LoaderState state() const {
    TITAN_CHECK(next_micro_batch_ == 0, "a loader has a state between steps only; ",
                current_.size() - next_micro_batch_, " micro-batches of step ", steps_, " are left");
    return {
        .steps = steps_, .num_lanes = num_lanes(), .feed_fingerprint = feed_->fingerprint(), .lanes = lanes_};
  }

  void load_state(const LoaderState& state) {
    TITAN_CHECK(state.feed_fingerprint == feed_->fingerprint(),
                "the data have changed since the state was saved: ",
                fingerprint_difference(state.feed_fingerprint, feed_->fingerprint()),
                ". Resume with the same data, or start the data anew");
    const LoaderState whole = merge({state});
    begin_at(whole.steps,
             whole.num_lanes == num_lanes() ? whole.lanes : feed_->redeal(whole.lanes, num_lanes()));
  }

  void restart() {
    std::vector<LaneState> all;
    for (int64_t lane = 0; lane < num_lanes(); ++lane) all.push_back(feed_->start(lane, num_lanes()));
    begin_at(0, all);
  }

 private:
  bool is_at_end() const { return end_ && steps_ >= *end_; }

  // Forgets what was made ahead. The threads start again with the next step.
  void begin_at(int64_t steps, const std::vector<LaneState>& all) {
    prefetcher_.reset();
    current_.clear();
    next_micro_batch_ = 0;
    steps_ = steps;
    lanes_before_.reset();
    lanes_.clear();
    for (int64_t lane = options_.dp_rank; lane < num_lanes(); lane += options_.dp_size)
      lanes_.push_back(all[lane]);
  }

  Prefetcher& prefetcher() {
    if (prefetcher_) return *prefetcher_;
    std::vector<std::unique_ptr<Lane>> lanes;
    for (const auto& state : lanes_) lanes.push_back(feed_->open(state, num_lanes()));
    PrefetchOptions options{.num_rows = num_micro_batches() * options_.local_batch_size,
                            .seq_len = options_.seq_len,
                            .num_workers = options_.settings.num_workers,
                            .num_ahead = options_.settings.prefetch_factor.value_or(2),
                            .pin_memory = options_.settings.pin_memory};
    prefetcher_ = std::make_unique<Prefetcher>(std::move(lanes), options);
    return *prefetcher_;
  }

  std::optional<std::vector<Batch>> make_step() {
    if (is_at_end()) return std::nullopt;
    PreparedStep step = prefetcher().take();
    lanes_before_ = std::exchange(lanes_, step.states);
    ++steps_;
    return cut(step);
  }

  std::vector<Batch> cut(const PreparedStep& step) const {
    std::vector<Batch> batches;
    int64_t rows = options_.local_batch_size;
    for (int64_t first = 0; first < step.input.size(0); first += rows) {
      int64_t valid = 0;
      for (int64_t row = first; row < std::min<int64_t>(first + rows, step.valid.size()); ++row)
        valid += step.valid[row];
      batches.push_back({step.input.narrow(0, first, rows), step.labels.narrow(0, first, rows), valid});
    }
    return batches;
  }

  std::shared_ptr<const Feed> feed_;
  LoaderOptions options_;
  int64_t steps_ = 0;
  std::optional<int64_t> end_;                          // steps of the feed, where it knows them
  std::vector<LaneState> lanes_;                        // of this rank, after the last step given
  std::optional<std::vector<LaneState>> lanes_before_;  // and before it
  std::vector<Batch> current_;  // of next(): the step whose micro-batches are being given
  size_t next_micro_batch_ = 0;
  std::unique_ptr<Prefetcher> prefetcher_;
};

DataLoader::DataLoader(std::shared_ptr<const Feed> feed, const LoaderOptions& options)
    : impl_(std::make_unique<Impl>(std::move(feed), options)) {}
DataLoader::~DataLoader() = default;
DataLoader::DataLoader(DataLoader&&) noexcept = default;

std::optional<std::vector<Batch>> DataLoader::next_step() { return impl_->next_step(); }
std::optional<Batch> DataLoader::next() { return impl_->next(); }
bool DataLoader::wait(std::chrono::milliseconds longest) { return impl_->wait(longest); }
void DataLoader::take_back_step() { impl_->take_back_step(); }
void DataLoader::abandon_reading() { impl_->abandon_reading(); }
int64_t DataLoader::num_micro_batches() const { return impl_->num_micro_batches(); }
int64_t DataLoader::num_lanes() const { return impl_->num_lanes(); }
int64_t DataLoader::num_rows() const { return impl_->num_rows(); }
std::optional<int64_t> DataLoader::num_steps() const { return impl_->num_steps(); }
LoaderState DataLoader::state() const { return impl_->state(); }
void DataLoader::load_state(const LoaderState& state) { impl_->load_state(state); }
void DataLoader::restart() { impl_->restart(); }

}  // namespace titan::data
