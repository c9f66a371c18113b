#pragma once

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
#include "checkpoint/save/shared_folder.h"
#include "checkpoint/save/staging.h"
#include "titan/checkpoint/checkpointer.h"

namespace titan::checkpoint::detail {

/// A thread that does one job at a time.
class Background {
 public:
  Background();
  /// A job that is still under way is left to itself.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Only when there is no other. `job` owns what it uses, and doesn't throw.
  void start(std::function<void()> job);
  bool busy() const;
  /// Returns true when there is no job; false when `give_up` says so, which is asked now and then.
  bool wait(const std::function<bool()>& give_up) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace titan::checkpoint::detail

namespace titan::checkpoint {

// What a Checkpointer holds. Made in checkpointer.cpp; saves in checkpointer_save.cpp, loads in
// checkpointer_load.cpp.

namespace detail {

/// What the background thread tells the one that trains.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t step = -1;  // of the last save that began
  bool staged = true;
  bool ended = true;    // but for the pruning
  SaveOutcome outcome;  // of the last save that ended; a failure that stops stays
  SaveCounts counts;
  bool told = false;  // the failure was thrown
};

/// Throws Error when there is something to say.
void throw_if(const Verdict& verdict);

}  // namespace detail

struct Checkpointer::Impl {
  Impl(const dist::World& world, const DeviceMesh& pipeline, SaveOptions options);
  ~Impl();

  SaveSize plan();
  bool save(int64_t step);
  void wait_for_staging();
  /// What stops the run: the failure of an earlier save; empty where there is none. Told is told.
  std::string failure();
  /// Whether there is one; `only_lost`: of lost ranks.
  bool stops(bool only_lost = false) const;
  /// Whether or not it stops the run.
  std::string last_failure() const;
  SaveCounts counts() const;
  /// Waits for the save under way; says what is wrong with it.
  std::string wait_for_last();
  /// The same, but not for the pruning behind it, which may take longer than the other ranks' next
  /// collective waits.
  std::string wait_for_verdict();
  Loaded load(const std::filesystem::path& step_folder, const LoadOptions& options);

  std::vector<detail::KeyedState> states(const std::set<std::string>& keys) const;
  std::vector<detail::KeyedState> states() const;

  dist::World world;
  DeviceMesh pipeline;
  SaveOptions options;
  std::map<std::string, Stateful*> objects;
  bool used = false;  // saved or loaded
  double blocked_seconds = 0;

 private:
  /// Of a wait since `start`: this rank's own part of the save takes too long.
  bool takes_too_long(std::chrono::steady_clock::time_point start) const;
  std::string late_text() const;
  std::string why_skipped() const;
  bool skips(int64_t step);
  /// Collective: runs `part` where there is no `problem` yet; what any rank has against it all ranks throw.
  void attempt(int64_t step, std::string& problem, const std::function<void()>& part);
  /// Collective, once.
  void make_plan(int64_t step, std::string& problem, std::vector<detail::KeyedState>& states,
                 std::vector<detail::NamedTensor>& tensors);
  /// Collective.
  void check_equal_plans(const std::vector<detail::KeyedState>& states);
  /// Collective: every rank has its copies laid out, or all throw.
  void lay_out(int64_t step, std::string problem, std::vector<detail::KeyedState>& states,
               detail::SaveJob& job);
  void told_phase(SavePhase phase) const {
    if (options.on_phase) options.on_phase(phase);
  }
  /// Of a save that failed on all ranks alike before anything was written.
  void note_failed(const std::string& failure);
  void start(detail::SaveJob job);
  std::set<std::string> names_of_all_stages(const std::vector<detail::NamedTensor>& tensors) const;
  /// Collective: the tensors to load, or all ranks throw all that is wrong.
  std::vector<detail::NamedTensor> tensors_to_load(const std::filesystem::path& folder,
                                                   const LoadOptions& load_options, const Manifest& manifest,
                                                   std::set<std::string>& keys);
  /// Collective. Throws ConfigError of all ranks' problems.
  void check_problems(const std::filesystem::path& folder, const std::vector<std::string>& problems);

  // Those of the trees: the control tree's is used by the thread that trains, the other by the background's.
  std::shared_ptr<dist::Group> control_group_, save_group_;
  detail::OpenedFolder folder_;
  std::optional<detail::RankTree> control_;
  std::shared_ptr<detail::SaveWriter> writer_;
  std::shared_ptr<detail::StagingBuffer> buffer_ = std::make_shared<detail::StagingBuffer>();
  std::shared_ptr<detail::Progress> progress_ = std::make_shared<detail::Progress>();
  std::optional<detail::SavePlan> plan_;
  std::shared_ptr<detail::Staging> staging_;  // of the last save
  std::optional<detail::Background> background_;
  std::string told_reason_;  // of the last skipped save that was warned of
};

}  // namespace titan::checkpoint
