#pragma once

// The parts of a Checkpointer. checkpointer.cpp saves, load/checkpointer_load.cpp loads.

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/save/rank_tree.h"
#include "checkpoint/save/save_plan.h"
#include "checkpoint/save/save_writer.h"
#include "titan/checkpoint/checkpointer.h"

namespace titan::checkpoint {
namespace detail {

/// Runs one job at a time on its own thread.
class Background {
 public:
  Background() = default;
  /// Abandons a job in progress.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Call it only while no job is in progress. `job` owns everything it uses, and doesn't throw.
  void start(std::function<void()> job);
  bool busy() const;
  /// Returns true when no job is in progress; false when `give_up`, which is polled, returns true.
  bool wait(const std::function<bool()>& give_up) const;

 private:
  // Shared with the thread, which may outlive the object.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool busy = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

/// The background thread's messages to the training thread.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t step = -1;  // the last save that began
  bool staged = true;
  bool ended = true;    // apart from pruning
  SaveOutcome outcome;  // the last ended save's; a failure that stops the run stays
  SaveCounts counts;
  bool thrown = false;  // failure() returned the failure
};

/// Throws Error unless the text is empty.
void throw_if(const Verdict& verdict);

/// Why `tensor` can't be loaded from the checkpoint, or "".
std::string difference_of(const NamedTensor& tensor, const LoadOptions& options, const Manifest& manifest);

}  // namespace detail

struct Checkpointer::Impl {
  Impl(const dist::World& world, const DeviceMesh& pipeline, SaveOptions options);
  ~Impl();

  bool save(int64_t step);
  /// The failure of an earlier save that stops the run; empty if there is none. Marks it as thrown.
  std::string failure();
  /// Whether there is such a failure; `only_lost`: one because of lost ranks.
  bool stops(bool only_lost = false) const;
  /// Waits for the save in progress; returns failure(), or why the wait ended early.
  std::string wait_for_last();
  /// The same without waiting for the pruning, which may take longer than the time limit of the other ranks'
  /// next collective.
  std::string wait_for_verdict();
  Loaded load(const std::filesystem::path& step_folder, const LoadOptions& options);

  /// The states of the objects with these keys; null: all objects.
  std::vector<detail::KeyedState> states(const std::set<std::string>* keys = nullptr) const;

  /// Whether this rank's own part of the save takes too long, in a wait that began at `start`.
  bool takes_too_long(std::chrono::steady_clock::time_point start) const;
  std::string late_text() const;
  /// Why this rank skips a save; empty: it doesn't.
  std::string skip_reason() const;
  bool skips(int64_t step);
  /// Collective: runs `part` where there is no `problem` yet; any rank's problem is thrown on all ranks.
  void attempt(int64_t step, std::string& problem, const std::function<void()>& part);
  /// Collective, once.
  void make_plan(int64_t step, std::string& problem, std::vector<detail::KeyedState>& states,
                 std::vector<detail::NamedTensor>& tensors);
  /// Collective: lays out this rank's copies; all ranks throw if one can't.
  void lay_out(int64_t step, std::string problem, std::vector<detail::KeyedState>& states,
               detail::SaveJob& job);
  /// Records a save that all ranks abandoned before anything was written.
  void note_failed(const std::string& failure);
  void start(detail::SaveJob job);

  /// Collective: returns the tensors to load; all ranks throw an error with all ranks' problems.
  std::vector<detail::NamedTensor> tensors_to_load(const std::filesystem::path& folder,
                                                   const LoadOptions& load_options, const Manifest& manifest,
                                                   std::set<std::string>& keys);
  /// Collective. Throws ConfigError with all ranks' problems.
  void check_problems(const std::filesystem::path& folder, const std::vector<std::string>& problems);

  dist::World world;
  DeviceMesh pipeline;
  SaveOptions options;
  std::map<std::string, Stateful*> objects;
  bool used = false;  // plan(), save() or load() was called
  double blocked_seconds = 0;

  // The control tree's group is used by the training thread, the other by the background thread.
  std::shared_ptr<dist::Group> control_group_, save_group_;
  detail::OpenedFolder folder_;
  std::optional<detail::RankTree> control_;
  std::shared_ptr<detail::SaveWriter> writer_;
  std::shared_ptr<detail::StagingBuffer> buffer_ = std::make_shared<detail::StagingBuffer>();
  std::shared_ptr<detail::Progress> progress_ = std::make_shared<detail::Progress>();
  std::optional<detail::SavePlan> plan_;
  std::shared_ptr<detail::Staging> staging_;  // the last save's
  detail::Background background_;
  std::string logged_reason_;  // why a save was last skipped, as logged
};

}  // namespace titan::checkpoint
