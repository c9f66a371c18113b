#include "cli/launch/launch_train.h"

#include <algorithm>

#include "titan/core/error.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/run_end.h"

namespace titan::cli {

namespace {

/// Why the job can't run on `num_ranks` ranks; "": it can.
std::string misfit(const train::JobConfig& config, const config::Origins& origins, int num_ranks) {
  try {
    train::check_job(config, origins, num_ranks, train::JobFiles::Ignore);
    return "";
  } catch (const ConfigError& error) {
    return error.problems().front();
  }
}

// A step, perhaps the first one, a save in progress, and the last save.
std::chrono::seconds longest_stop(const train::JobConfig& config) {
  const int64_t step_s = std::max(config.comm.init_timeout_seconds, config.comm.train_timeout_seconds);
  return std::chrono::seconds(step_s +
                              (config.checkpoint.enable ? 2 * config.checkpoint.timeout_seconds : 0));
}

// The validation batch keeps its full size, too, so that losses before and after the loss of a rank are
// comparable.
void keep_validation(const TrainArguments& arguments, const train::JobConfig& config,
                     std::vector<std::string>& command) {
  const train::ValidationSettings& validation = config.validation;
  if (!validation.enable || validation.global_batch_size != -1) return;
  std::vector<std::string> problems;
  const train::ParallelDims dims =
      train::resolve_parallel_dims(config.parallelism, arguments.num_ranks, problems);
  command.push_back("--validation.global_batch_size");
  command.push_back(std::to_string(validation.local_batch_size * dims.batch_degree()));
}

/// Collects the settings that keep restarted ranks from resuming where the last ones were.
class RestartProblems {
 public:
  RestartProblems(const train::JobConfig& config, const config::Origins& origins)
      : config_(config), origins_(origins) {}

  void require(bool holds, const char* key, const char* what) {
    if (!holds) problems_.push_back(origins_.problem(key, str("with --max-restarts ", what)));
  }
  void find_without_saves() {
    require(config_.checkpoint.enable, "checkpoint.enable",
            "must be true: restarted ranks resume from a checkpoint");
    require(!config_.checkpoint.load_only, "checkpoint.load_only",
            "must be false: otherwise there is no checkpoint to resume from");
  }
  void find_same_start() {
    require(config_.checkpoint.load_step == -1, "checkpoint.load_step",
            "must be -1, the newest: otherwise each restart goes back to this step");
    require(config_.checkpoint.exclude_from_loading.empty(), "checkpoint.exclude_from_loading",
            "must be empty: otherwise each restart leaves these out again");
  }
  void throw_if_any() const {
    if (!problems_.empty()) throw ConfigError(problems_);
  }

 private:
  const train::JobConfig& config_;
  const config::Origins& origins_;
  std::vector<std::string> problems_;
};

}  // namespace

void check_train_restarts(const TrainArguments& arguments, const train::JobConfig& config,
                          const config::Origins& origins) {
  if (arguments.restarts.max_restarts == 0) return arguments.restarts.check_unused("titan train");
  if (arguments.num_ranks == 0) throw ConfigError("titan train: --max-restarts needs --nproc");
  RestartProblems problems(config, origins);
  problems.find_without_saves();
  problems.find_same_start();
  const bool may_shrink =
      arguments.restarts.min_ranks > 0 && arguments.restarts.min_ranks < arguments.num_ranks;
  problems.require(
      !may_shrink || config.training.global_batch_size != -1, "training.global_batch_size",
      "and --min-ranks must be a number: with -1 it depends on the number of ranks, so fewer ranks would "
      "train a different run");
  problems.throw_if_any();
}

void check_launched_restarts(const dist::Launch& launch, const train::JobConfig& config,
                             const config::Origins& origins) {
  if (launch.max_restarts == 0) return;
  RestartProblems problems(config, origins);
  if (launch.by == "titan") problems.find_without_saves();
  problems.find_same_start();
  problems.throw_if_any();
}

void set_train_restarts(const TrainArguments& arguments, const train::JobConfig& config,
                        const config::Origins& origins, LaunchOptions& options) {
  arguments.restarts.apply(options);
  RestartOptions& restarts = options.restarts;
  restarts.fits = [&](int num_ranks) { return misfit(config, origins, num_ranks).empty(); };
  // The ranks' own watchdogs end hangs.
  if (!arguments.restarts.stop_grace) options.stop_grace = longest_stop(config);
  const int most = options.num_ranks - 1, least = restarts.min_ranks;
  if (least == 0 || least > most) return;
  keep_validation(arguments, config, options.command);
  for (int size = most; size >= least; --size)
    if (restarts.fits(size)) return;
  throw ConfigError(str("--min-ranks ", least, ": the job runs on no number of ranks from ", least, " to ",
                        most, ". On ", most, ": ", misfit(config, origins, most)));
}

}  // namespace titan::cli
