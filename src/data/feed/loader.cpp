#include "titan/data/loader.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include "data/feed/feeds.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

// The caller holds one step, and briefly the one before it. Their slots aren't written meanwhile, so that
// their memory is free by the time it is needed.
constexpr size_t kSlotsInUse = 2;

// Whether nobody else holds the memory. A count of one can't grow again, because there is no other holder to
// copy from.
bool is_ours_alone(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.use_count() > 1 || tensor.storage().use_count() > 1) return false;
  // Reading the count doesn't synchronize with the last holder's reads; dropping a handle does.
  { [[maybe_unused]] c10::Storage handle = tensor.storage(); }
  return true;
}

std::string difference_of(std::string_view name, std::string_view before, std::string_view now) {
  return str(name, " was '", before, "', is now '", now, "'");
}

/// Takes the first "name = value; " off the text.
std::pair<std::string_view, std::string_view> take_part(std::string_view& text) {
  const std::string_view part = text.substr(0, text.find("; "));
  text.remove_prefix(std::min(text.size(), part.size() + 2));
  const size_t name = std::min(part.size(), part.find(" = "));
  return {part.substr(0, name), part.substr(std::min(part.size(), name + 3))};
}

}  // namespace

std::string fingerprint_difference(std::string_view before, std::string_view now) {
  std::string difference;
  for (std::string_view old_parts = before, new_parts = now; !old_parts.empty() || !new_parts.empty();) {
    const auto [old_name, old_value] = take_part(old_parts);
    const auto [name, value] = take_part(new_parts);
    if (name != old_name) return difference_of("the fingerprint", before, now);
    if (value != old_value)
      difference += (difference.empty() ? "" : "; ") + difference_of(name, old_value, value);
  }
  return difference;
}

void describe(config::Table<DataloaderSettings>& table) {
  table.field("num_workers", &DataloaderSettings::num_workers, "threads that tokenize and pack ahead; 0: one",
              config::in_range(0, 256));
  table.without_effect("persistent_workers", false,
                       "keeps Python's worker processes; threads live as long as their loader");
  table.field("pin_memory", &DataloaderSettings::pin_memory,
              "page-locked batches, which copy to a GPU asynchronously; training on a GPU always uses them");
  table.field("prefetch_factor", &DataloaderSettings::prefetch_factor, "steps prepared ahead; unset: 2",
              config::in_range(1, 1024));
}

/// A step's rows. `valid` and `states` have one entry per lane.
struct PreparedStep {
  at::Tensor input;   ///< int64 [num_rows, seq_len], with padding after the lanes
  at::Tensor labels;  ///< as input
  std::vector<int64_t> valid;
  std::vector<LaneState> states;  ///< after this step
};

/// Prepares the steps of one rank in threads. Each slot of a ring holds the rows of one step. Worker w of W
/// fills rows w, w + W, ... of one step after another, and waits when it is `prefetch_factor` steps ahead of
/// the last step taken. Each lane belongs to one worker, so its order of samples doesn't depend on timing.
class Prefetcher {
 public:
  /// Starts the threads at once.
  Prefetcher(std::vector<std::unique_ptr<Lane>> lanes, int64_t num_rows, const LoaderOptions& options)
      : lanes_(std::move(lanes)),
        num_lanes_(static_cast<int64_t>(lanes_.size())),
        num_rows_(num_rows),
        seq_len_(options.seq_len),
        num_workers_(std::clamp<int64_t>(options.settings.num_workers, 1, std::max<int64_t>(1, num_lanes_))),
        num_ahead_(options.settings.prefetch_factor.value_or(2)),
        pin_memory_(options.settings.pin_memory),
        padding_(options.document_end == 0 ? 1 : 0),
        slots_(num_ahead_ + kSlotsInUse) {
    TITAN_INTERNAL_ASSERT(num_lanes_ <= num_rows_ && num_ahead_ >= 1);
    for (int64_t worker = 0; worker < num_workers_; ++worker)
      workers_.emplace_back([this, worker](std::stop_token stop) { work(stop, worker); });
  }
  ~Prefetcher() {
    for (auto& worker : workers_) worker.request_stop();
  }

  /// Waits for the next step. If preparing it failed, throws that error, also at every later call.
  PreparedStep take() {
    std::unique_lock lock(mutex_);
    Slot& slot = slot_of(num_taken_);
    changed_.wait(lock, [&] { return is_ready(); });
    if (slot.error) std::rethrow_exception(slot.error);
    PreparedStep step = slot.step;  // shares the tensors; prepare() checks whether they can be reused
    ++num_taken_;
    changed_.notify_all();
    return step;
  }

  /// Waits up to `longest`; returns whether take() would return at once.
  bool wait(std::chrono::milliseconds longest) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, longest, [&] { return is_ready(); });
  }

 private:
  struct Slot {
    PreparedStep step;
    int64_t prepared_for = -1;  // the step whose buffers these are
    int64_t num_done = 0;       // workers that have filled their rows
    std::exception_ptr error;
  };

  Slot& slot_of(int64_t step) { return slots_[step % slots_.size()]; }

  // Whether the slot that take() reads is filled or has failed.
  bool is_ready() {
    const Slot& slot = slot_of(num_taken_);
    return slot.error || (slot.prepared_for == num_taken_ && slot.num_done == num_workers_);
  }

  void work(std::stop_token stop, int64_t worker) {
    for (int64_t step = 0;; ++step) {
      Slot& slot = slot_of(step);
      std::exception_ptr error;
      try {
        if (!wait_for_slot(slot, step, stop)) return;
        fill_rows(slot.step, worker);
      } catch (...) {
        error = std::current_exception();
      }
      std::lock_guard lock(mutex_);
      ++slot.num_done;
      if (error && !slot.error) slot.error = error;
      changed_.notify_all();
      if (error) return;
    }
  }

  // Returns whether the slot is ready to be written for `step`; false when stopped.
  bool wait_for_slot(Slot& slot, int64_t step, std::stop_token stop) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait(lock, stop, [&] { return step < num_taken_ + num_ahead_; }) || stop.stop_requested())
      return false;
    if (slot.prepared_for != step) prepare(slot, step);
    return true;
  }

  void prepare(Slot& slot, int64_t step) {
    slot.num_done = 0;
    slot.step.valid.assign(lanes_.size(), 0);
    slot.step.states.resize(lanes_.size());
    for (at::Tensor* tensor : {&slot.step.input, &slot.step.labels}) {
      // A copy to the device may still read pinned memory that nobody holds; only LibTorch's allocator knows.
      if (!pin_memory_ && is_ours_alone(*tensor)) continue;
      *tensor = at::empty({num_rows_, seq_len_}, at::TensorOptions(at::kLong).pinned_memory(pin_memory_));
    }
    slot.step.input.narrow(0, num_lanes_, num_rows_ - num_lanes_).fill_(padding_);
    slot.step.labels.narrow(0, num_lanes_, num_rows_ - num_lanes_).fill_(kIgnoredLabel);
    slot.prepared_for = step;
  }

  void fill_rows(PreparedStep& step, int64_t worker) {
    auto length = static_cast<size_t>(seq_len_);
    auto* input = step.input.mutable_data_ptr<int64_t>();
    auto* labels = step.labels.mutable_data_ptr<int64_t>();
    for (size_t row = worker; row < lanes_.size(); row += num_workers_) {
      step.valid[row] = lanes_[row]->fill(
          {.input = {input + row * length, length}, .labels = {labels + row * length, length}});
      step.states[row] = lanes_[row]->state();
    }
  }

  std::vector<std::unique_ptr<Lane>> lanes_;
  const int64_t num_lanes_, num_rows_, seq_len_, num_workers_, num_ahead_;
  const bool pin_memory_;
  int64_t
      padding_;  // a token of rows without data that ends no document: each document takes memory on a GPU
  std::vector<Slot> slots_;
  int64_t num_taken_ = 0;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<std::jthread> workers_;  // last: stopped and joined before the members above are destroyed
};

// ---- the loader

DataLoader::DataLoader(std::shared_ptr<const Feed> feed, const LoaderOptions& options)
    : feed_(std::move(feed)), options_(options) {
  TITAN_CHECK(options.dp_size >= 1 && options.dp_rank >= 0 && options.dp_rank < options.dp_size,
              "expected a data-parallel rank below the degree, got rank ", options.dp_rank, " of ",
              options.dp_size);
  if (options.local_batch_size < 1)
    throw ConfigError(str("the local batch size is ", options.local_batch_size, "; it must be at least 1"));
  if (options.settings.pin_memory && !at::globalContext().hasCUDA())
    throw ConfigError(
        "dataloader.pin_memory needs a CUDA GPU: only copies to a GPU gain from page-locked memory");
  if (options_.global_batch_size < 0) options_.global_batch_size = options.local_batch_size * options.dp_size;
  feed_->check_shape(num_lanes(), options.seq_len);
  num_steps_ = feed_->num_steps();
  restart();
}

DataLoader::~DataLoader() = default;
DataLoader::DataLoader(DataLoader&&) noexcept = default;

// As many as the rank with the most lanes needs.
int64_t DataLoader::num_micro_batches() const {
  int64_t most_lanes = (num_lanes() + options_.dp_size - 1) / options_.dp_size;
  return (most_lanes + options_.local_batch_size - 1) / options_.local_batch_size;
}

std::optional<std::vector<Batch>> DataLoader::next_step() {
  TITAN_CHECK(next_micro_batch_ == 0, "next_step() was called between the micro-batches of a step");
  return make_step();
}

std::optional<Batch> DataLoader::next() {
  if (next_micro_batch_ == 0) {
    auto step = make_step();
    if (!step) return std::nullopt;
    current_ = std::move(*step);
  }
  Batch batch = std::move(current_[next_micro_batch_]);
  next_micro_batch_ = (next_micro_batch_ + 1) % current_.size();
  return batch;
}

bool DataLoader::wait(std::chrono::milliseconds longest) {
  return next_micro_batch_ != 0 || is_at_end() || prefetcher().wait(longest);
}

std::optional<std::vector<Batch>> DataLoader::make_step() {
  if (is_at_end()) return std::nullopt;
  PreparedStep step = prefetcher().take();
  lanes_before_ = std::exchange(lanes_, step.states);
  ++steps_;
  std::vector<Batch> batches;
  const int64_t rows = options_.local_batch_size;
  for (int64_t first = 0; first < step.input.size(0); first += rows) {
    int64_t valid = 0;
    for (int64_t row = first; row < std::min<int64_t>(first + rows, step.valid.size()); ++row)
      valid += step.valid[row];
    batches.push_back({step.input.narrow(0, first, rows), step.labels.narrow(0, first, rows), valid,
                       options_.document_end});
  }
  return batches;
}

Prefetcher& DataLoader::prefetcher() {
  if (prefetcher_) return *prefetcher_;
  std::vector<std::unique_ptr<Lane>> lanes;
  for (const auto& state : lanes_) lanes.push_back(feed_->open(state, num_lanes()));
  prefetcher_ = std::make_unique<Prefetcher>(std::move(lanes),
                                             num_micro_batches() * options_.local_batch_size, options_);
  return *prefetcher_;
}

void DataLoader::take_back_step() {
  TITAN_CHECK(next_micro_batch_ == 0 && lanes_before_, "a loader takes back one whole step, and only once");
  abandon_reading();
  lanes_ = std::move(*lanes_before_);
  lanes_before_.reset();
  --steps_;
}

// A detached thread waits for the workers.
void DataLoader::abandon_reading() {
  if (prefetcher_) std::thread([reading = std::move(prefetcher_)] {}).detach();
}

LoaderState DataLoader::state() const {
  TITAN_CHECK(next_micro_batch_ == 0, "a loader has a state only between steps; ",
              current_.size() - next_micro_batch_, " micro-batches of step ", steps_, " are left");
  return {
      .steps = steps_, .num_lanes = num_lanes(), .feed_fingerprint = feed_->fingerprint(), .lanes = lanes_};
}

void DataLoader::load_state(const LoaderState& state) { begin_at(state.steps, lanes_after(state)); }

// All lanes that continue from `state`.
std::vector<LaneState> DataLoader::lanes_after(const LoaderState& state) const {
  TITAN_CHECK(state.feed_fingerprint == feed_->fingerprint(),
              "the data have changed since the state was saved: ",
              fingerprint_difference(state.feed_fingerprint, feed_->fingerprint()),
              ". Resume with the same data, or start the data anew");
  const LoaderState whole = merge({state});
  auto lanes = whole.num_lanes == num_lanes() ? whole.lanes : feed_->redeal(whole.lanes, num_lanes());
  // Opening a lane checks its place, and reads nothing.
  for (const LaneState& lane : lanes) feed_->open(lane, num_lanes());
  return lanes;
}

void DataLoader::restart() {
  std::vector<LaneState> all;
  for (int64_t lane = 0; lane < num_lanes(); ++lane) all.push_back(feed_->start(lane, num_lanes()));
  begin_at(0, all);
}

// Drops the prefetched steps. The threads start again with the next step.
void DataLoader::begin_at(int64_t steps, const std::vector<LaneState>& all) {
  prefetcher_.reset();
  current_.clear();
  next_micro_batch_ = 0;
  steps_ = steps;
  lanes_before_.reset();
  lanes_.clear();
  for (int64_t lane = options_.dp_rank; lane < num_lanes(); lane += options_.dp_size)
    lanes_.push_back(all[lane]);
}

}  // namespace titan::data
