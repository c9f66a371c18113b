#include "titan/checkpoint/checkpointer.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <numeric>
#include <utility>

#include "checkpoint/peer/peer_writer.h"
#include "checkpoint/save/checkpointer_impl.h"
#include "core/threads.h"
#include "dist/flight_record.h"
#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/world.h"

namespace titan::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<int> all_ranks(const dist::World& world) {
  std::vector<int> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Numbers the checkpointers of a job: each has groups of its own, so that the messages of their saves don't
// mix. The same on all ranks, whatever each of them made before.
int64_t next_number(const dist::World& world) {
  static std::atomic<int64_t> made = 0;
  const auto number = static_cast<int64_t>(
      world.everyone()->max(static_cast<double>(made), {.phase = "checkpoint::connect"}));
  made = number + 1;
  return number;
}

SaveOptions checked(SaveOptions options) {
  std::vector<std::string> problems;
  if (options.peers) {
    options.folder = options.peers->path();
    options.skip_when_busy = true;
  }
  if (options.folder.empty()) problems.push_back("checkpoint: no folder is given");
  if (options.keep_latest < 0)
    problems.push_back(titan::str("checkpoint: ", options.keep_latest,
                                  " checkpoints can't be kept; allowed: 0 (all) and above"));
  if (options.num_threads < 1)
    problems.push_back(
        titan::str("checkpoint: ", options.num_threads, " threads can't write; allowed: 1 and above"));
  if (options.timeout < std::chrono::seconds(1))
    problems.push_back(
        titan::str("checkpoint: a timeout of ", options.timeout.count(), " s; allowed: 1 and above"));
  if (!problems.empty()) throw ConfigError(problems);
  options.folder = normalized(options.folder);
  return options;
}

// Adds the duration of its scope.
class Timer {
 public:
  explicit Timer(double& sum) : sum_(sum) {}
  ~Timer() { sum_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& sum_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace

const char* to_string(SavePhase phase) {
  static constexpr std::array names = {"Agree",      "Plan",     "Stage",    "MakeFolder",    "WriteFile",
                                       "WriteChunk", "SyncFile", "Gather",   "WriteManifest", "Commit",
                                       "Verdict",    "Prune",    "CopyPiece"};
  return names[static_cast<size_t>(phase)];
}

void detail::throw_if(const Verdict& verdict) {
  if (!verdict.text.empty()) throw Error(verdict.text);
}

// ---- the background thread

// Shared with the thread, which may outlive the object.
struct detail::Background::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> job;
  bool busy = false;
  bool ending = false;

  void run() {
    const dist::BackgroundCalls background;
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return job || ending; });
      if (!job) return;
      lock.unlock();
      job();
      job = nullptr;  // releases what it held before anybody is told that it is done
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }
};

detail::Background::Background() : state_(std::make_shared<State>()) {
  SignalsBlocked blocked;
  thread_ = std::thread([state = state_] { state->run(); });
  pthread_setname_np(thread_.native_handle(), "checkpoint");
}

detail::Background::~Background() {
  bool busy = false;
  {
    std::lock_guard lock(state_->mutex);
    state_->ending = true;
    busy = state_->busy;
  }
  state_->changed.notify_all();
  busy ? thread_.detach() : thread_.join();
}

void detail::Background::start(std::function<void()> job) {
  std::lock_guard lock(state_->mutex);
  TITAN_INTERNAL_ASSERT(!state_->busy, "a second job while one is in progress");
  state_->job = std::move(job);
  state_->busy = true;
  state_->changed.notify_all();
}

bool detail::Background::busy() const {
  std::lock_guard lock(state_->mutex);
  return state_->busy;
}

bool detail::Background::wait(const std::function<bool()>& give_up) const {
  constexpr std::chrono::milliseconds between(100);
  std::unique_lock lock(state_->mutex);
  while (!state_->changed.wait_for(lock, between, [this] { return !state_->busy; }))
    if (give_up()) return false;
  return true;
}

// ---- the checkpointer

Checkpointer::Impl::Impl(const dist::World& given, const DeviceMesh& stages, SaveOptions save)
    : world(given), pipeline(stages), options(checked(std::move(save))) {
  TITAN_CHECK(world.backend() != "fake" || world.size() == 1,
              "checkpoint: a world of the fake backend has no other ranks to save with");
  const int64_t number = next_number(world);
  const auto group_for = [&](const std::string& name) {
    return world.group(all_ranks(world), name, titan::str(dist::kOwnTimeout, name, ".", number));
  };
  control_group_ = group_for("checkpoint.control");
  save_group_ = group_for("checkpoint");
  const bool copies = options.peers && options.peers->num_places() > 1;
  const auto copy_group = copies ? group_for("checkpoint.copies") : nullptr;
  for (const auto& group : {control_group_, save_group_, copy_group}) {
    if (!group) continue;
    group->set_timeout(options.timeout);
    // Beside NCCL, the group for host memory is made at its first collective, which all ranks have to join.
    static_cast<void>(group->sum(int64_t{1}, {.phase = "checkpoint::connect"}));
  }
  if (copies) copy_group->set_timeout(detail::kNoLimit);
  // A PeerFolder is open already.
  folder_ = options.read_only || options.peers
                ? detail::open_to_read(*control_group_)
                : detail::open_shared_folder(*control_group_, options.folder, options.timeout);
  const auto tree = [&](const std::shared_ptr<dist::Group>& group) {
    return detail::RankTree(world, group,
                            {.name = group->name(),
                             .run_id = folder_.run_id,
                             .hosts = folder_.hosts,
                             .timeout = options.timeout});
  };
  control_.emplace(tree(control_group_));
  if (options.peers)
    writer_ = std::make_shared<detail::PeerWriter>(options, folder_.run_id, tree(save_group_), copy_group);
  else
    writer_ = std::make_shared<detail::StepWriter>(options, folder_.run_id, tree(save_group_));
  background_.emplace();
}

Checkpointer::Impl::~Impl() {
  if (!background_) return;
  try {
    const bool told = progress_->told;
    const std::string problem = wait_for_last();
    if (!problem.empty() && !told) log::error(problem);
  } catch (const std::exception& error) {
    log::error(error.what());
  }
}

Checkpointer::Checkpointer(const dist::World& world, const DeviceMesh& pipeline, SaveOptions options)
    : impl_(std::make_unique<Impl>(world, pipeline, std::move(options))) {}
Checkpointer::~Checkpointer() = default;
Checkpointer::Checkpointer(Checkpointer&&) noexcept = default;

void Checkpointer::add(const std::string& key, Stateful& object) {
  const bool valid = !key.empty() && std::all_of(key.begin(), key.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_';
  });
  TITAN_CHECK(valid, "checkpoint: key '", key, "'; allowed: letters, digits, underscores");
  TITAN_CHECK(!impl_->used, "checkpoint: '", key, "' is added after the first save or load");
  TITAN_CHECK(impl_->objects.emplace(key, &object).second, "checkpoint: two objects have the key '", key,
              "'");
}

SaveSize Checkpointer::plan() {
  impl_->used = true;
  return impl_->plan();
}

bool Checkpointer::save(int64_t step) {
  TITAN_CHECK(step >= 0, "checkpoint: step ", step, "; allowed: 0 and above");
  TITAN_CHECK(!impl_->options.read_only, "checkpoint: ", impl_->options.folder.string(), " is read-only");
  const Timer timer(impl_->blocked_seconds);
  impl_->used = true;
  return impl_->save(step);
}

void Checkpointer::wait_for_staging() {
  const Timer timer(impl_->blocked_seconds);
  impl_->wait_for_staging();
}

void Checkpointer::check() {
  if (const std::string failure = impl_->failure(); !failure.empty()) throw Error(failure);
}

void Checkpointer::finish() {
  if (const std::string problem = impl_->wait_for_last(); !problem.empty()) throw Error(problem);
}

bool Checkpointer::failed() const { return impl_->stops(); }
bool Checkpointer::lost_ranks() const { return impl_->stops(/*only_lost=*/true); }
std::string Checkpointer::last_failure() const { return impl_->last_failure(); }
SaveCounts Checkpointer::counts() const { return impl_->counts(); }

Loaded Checkpointer::load(const std::filesystem::path& step_folder, const LoadOptions& options) {
  impl_->used = true;
  return impl_->load(step_folder, options);
}

double Checkpointer::take_blocked_seconds() { return std::exchange(impl_->blocked_seconds, 0); }

}  // namespace titan::checkpoint
