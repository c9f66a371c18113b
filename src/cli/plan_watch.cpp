#include "cli/plan_watch.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <set>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "cli/text.h"
#include "core/file.h"
#include "core/process.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "job/build.h"
#include "plan/device_file.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/collectives.h"
#include "titan/train/trainer.h"

namespace titan::cli {

namespace {

constexpr int64_t kStepsBeforeComparing = 3;  // memory grows until the third one begins, or is recorded
constexpr double kMostDifference = 0.05;      // a difference in memory
// The ranks come first, but a plan of a second doesn't take minutes on a machine where all cores are busy.
constexpr int kNice = 10;

/// A file in memory that a child writes to.
class Capture {
 public:
  Capture() : file_(::memfd_create("titan plan", MFD_CLOEXEC)) {
    TITAN_CHECK(file_ >= 0, "no file in memory for the output of titan plan: ", errno_text(errno));
  }
  ~Capture() { ::close(file_); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  int file() const { return file_; }
  std::string text() const {
    std::string text;
    char part[1 << 16];
    ssize_t size = 0;
    while ((size = ::pread(file_, part, sizeof part, static_cast<off_t>(text.size()))) > 0)
      text.append(part, static_cast<size_t>(size));
    return text;
  }

 private:
  int file_;
};

// The status that waitpid gives; nullopt: the child was ended because of `stop`.
std::optional<int> wait_for(pid_t child, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  int status = 0;
  while (true) {
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) return status;
    TITAN_CHECK(ended == 0, "waiting for titan plan: ", errno_text(errno));
    stopped.wait_for(lock, stop, std::chrono::milliseconds(50), [] { return false; });
    if (!stop.stop_requested()) continue;
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
    return std::nullopt;
  }
}

// The last line of a failed child: "titan: REASON".
std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of(" \n");
  if (end == std::string::npos) return "";
  const size_t before = text.find_last_of('\n', end);
  std::string line = text.substr(before + 1, end - before);  // npos + 1 is 0
  line.erase(0, line.find_first_not_of(' '));
  constexpr std::string_view name = "titan: ";
  return line.starts_with(name) ? line.substr(name.size()) : line;
}

std::string reason(int status, const std::string& errors) {
  const std::string line = last_line(errors);
  if (WIFSIGNALED(status))
    return str("titan plan was ended by signal ", WTERMSIG(status), line.empty() ? "" : ": ", line);
  return line.empty() ? str("titan plan ended with exit code ", WEXITSTATUS(status)) : line;
}

// Parameters that share a storage count once.
LastingMemory lasting_memory(const train::TrainerParts& parts) {
  std::set<const c10::StorageImpl*> counted;
  const auto add = [&](double& gib, const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage() &&
        counted.insert(tensor.storage().unsafeGetStorageImpl()).second)
      gib += static_cast<double>(tensor.storage().nbytes()) / kGiB;
  };
  LastingMemory memory;
  for (const Parameter& parameter : parts.parameters) {
    add(memory.parameters, parameter.data.local);
    add(memory.gradients, parameter.data.local.grad());
  }
  for (const at::Tensor& state : parts.optimizer.allocated_state()) add(memory.optimizer, state);
  return memory;
}

std::vector<double> peaks_of_ranks(const dist::World& world, double mine_gib) {
  if (world.backend() == "fake") return {mine_gib};  // there are no others
  const at::Tensor mine = at::full({1}, mine_gib, at::kDouble), all = at::empty({world.size()}, at::kDouble);
  world.everyone()->all_gather(all, mine, {"plan::peaks"}).wait();
  const auto* peaks = all.const_data_ptr<double>();
  return {peaks, peaks + world.size()};
}

// The device of `titan plan --device`; "": none.
std::string device_for(const train::JobConfig& config, const dist::World& world) {
  const std::string& chosen = config.metrics.plan_device;
  if (chosen == "none") return "";
  if (chosen != "auto") return chosen;
  if (!world.device().is_cuda()) return "";
  const std::string name = dist::device_backend()->device_name(world.device().index());
  if (const auto known = plan::device_called(name)) return *known;
  log::info(str("this run has no plan: no file of configs/devices has the device ", name,
                "; metrics.plan_device names one, as --device does for titan plan"));
  return "";
}

}  // namespace

void check_plan_device(const train::JobConfig& config, const config::Origins& origins) {
  const std::string& device = config.metrics.plan_device;
  if (device == "auto" || device == "none") return;
  try {
    plan::load_device(device);
  } catch (const ConfigError& error) {
    throw ConfigError(origins.problem("metrics.plan_device", error.problems().front()));
  }
}

std::optional<UnplannedPeak> find_unplanned_peak(const std::vector<PlannedPeak>& planned,
                                                 const std::vector<double>& peaks_gib) {
  std::optional<UnplannedPeak> worst;
  int num_found = 0;
  for (int rank = 0; rank < static_cast<int>(peaks_gib.size()); ++rank) {
    const auto next = std::ranges::upper_bound(planned, rank, {}, &PlannedPeak::rank);
    TITAN_CHECK(next != planned.begin(), "a plan begins with rank 0");
    const PlannedPeak& role = *std::prev(next);
    const double gib = peaks_gib[static_cast<size_t>(rank)], difference = gib / role.reserved_gib - 1;
    // The first rank of a pipeline rank has the most, because shards are cut from the front: others may have less.
    const bool may_have_less = rank != role.rank && planned.size() > 1;
    if (may_have_less ? difference <= kMostDifference : std::abs(difference) <= kMostDifference) continue;
    ++num_found;
    if (!worst || std::abs(difference) > std::abs(worst->difference))
      worst = UnplannedPeak{.rank = rank, .gib = gib, .planned = role, .difference = difference};
  }
  if (worst) worst->num_others = num_found - 1;
  return worst;
}

void PlanWatch::begin_after(int64_t step) {
  if (first_step_) return;  // a rewind
  first_step_ = step + 1;
  if (options_.file.empty()) return;
  std::error_code ignored;
  std::filesystem::remove(options_.file, ignored);
  std::filesystem::remove(options_.file.parent_path() / kMemoryFile, ignored);
  if (options_.command.empty()) return;
  thread_ = std::jthread([this](const std::stop_token& stop) {
    try {
      make_plan(stop);
    } catch (const std::exception& error) {
      log::warning(str("this run has no plan: ", error.what()));
    }
  });
}

void PlanWatch::make_plan(const std::stop_token& stop) {
  // On Linux a priority is a thread's, and a child has that of the thread that starts it.
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), std::max(kNice, ::getpriority(PRIO_PROCESS, 0)));
  const Capture output, errors;
  const auto status = wait_for(start_program(options_.command, output.file(), errors.file()), stop);
  if (!status) return log::info("this run has no plan: it ended before titan plan did");
  if (*status != 0) return log::info("this run has no plan: " + reason(*status, errors.text()));
  const std::string text = output.text();
  const RunPlan plan = read_plan(text);
  write_file_atomic(options_.file, text);
  log::info(str("the plan for ", plan.device, ": a step in ", duration(plan.step_s), ", ",
                short_number(std::round(plan.tps)), " tokens/s per device, ",
                number("%.2f", plan.reserved_gib), " GiB from the device; written to ",
                options_.file.string()));
  for (const std::string& note : plan.notes) log::info("the plan: " + note);
  const std::lock_guard lock(mutex_);
  plan_ = plan;
}

void PlanWatch::logged(const train::StepMetrics& metrics) {
  peak_gib_ = std::max(peak_gib_, metrics.memory_gib);
  const bool is_due = first_step_ && metrics.step >= *first_step_ + kStepsBeforeComparing - 1;
  // In the same step on all ranks, of which only one knows whether there is a plan.
  if (is_due && options_.gather_peaks && peaks_gib_.empty()) {
    peaks_gib_ = options_.gather_peaks(peak_gib_);
    gathered_step_ = metrics.step;
  }
  const std::lock_guard lock(mutex_);
  if (!plan_) return;
  if (!std::exchange(is_followed_, true)) window_.set_planned_tps(plan_->tps);
  if (!is_due || std::exchange(compared_, true)) return;
  compare_memory();
  if (options_.measure_lasting) write_lasting(metrics.step);
}

void PlanWatch::compare_memory() const {
  const auto peak = find_unplanned_peak(plan_->peaks, peaks_gib_);
  if (!peak) return;
  log::warning_rank0(str(
      "step ", gathered_step_, ": the allocator of rank ", peak->rank, " has taken up to ",
      number("%.2f", peak->gib), " GiB from the device, ", number("%.1f", 100 * std::abs(peak->difference)),
      " % ", peak->difference > 0 ? "more" : "less", " than the ", number("%.2f", peak->planned.reserved_gib),
      " GiB of the plan (", peak->planned.role, ")",
      peak->num_others > 0
          ? str("; ", peak->num_others, peak->num_others == 1 ? " other rank is" : " other ranks are",
                " more than ", 100 * kMostDifference, " % off, too")
          : "",
      "; docs/plan.md says what a plan can't see"));
}

void PlanWatch::write_lasting(int64_t step) try {
  write_file_atomic(options_.file.parent_path() / kMemoryFile, to_json(options_.measure_lasting(), step));
} catch (const Error& error) {
  log::warning(str("memory by category isn't in the report: ", error.what()));
}

std::unique_ptr<PlanWatch> build_plan_watch(const train::JobConfig& config, const dist::World& world,
                                            train::TrainerParts& parts) {
  // The same on all ranks, which may have different GPUs.
  std::function<std::vector<double>(double)> gather_peaks;
  if (world.device().is_cuda() && config.metrics.plan_device != "none")
    gather_peaks = [world](double mine) { return peaks_of_ranks(world, mine); };
  if (world.rank() != 0) {
    if (!gather_peaks) return nullptr;
    return std::make_unique<PlanWatch>(
        PlanWatch::Options{.command = {}, .gather_peaks = std::move(gather_peaks)}, parts.window);
  }
  std::string device;
  try {
    device = device_for(config, world);
  } catch (const ConfigError& error) {  // a file that somebody else has put beside the known ones
    log::info(str("this run has no plan: ", error.problems().front()));
  }
  const std::filesystem::path folder = train::record_folder(config);
  PlanWatch::Options options{.command = {},
                             .file = folder / kPlanFile,
                             .gather_peaks = std::move(gather_peaks),
                             .measure_lasting = [&parts] { return lasting_memory(parts); }};
  // A plan is for a GPU, also that of a run on a CPU.
  if (!device.empty())
    options.command = {"/proc/self/exe",
                       "plan",
                       (folder / "config.toml").string(),
                       "--world",
                       std::to_string(world.size()),
                       "--device",
                       device,
                       "--json",
                       "--for-run",
                       std::to_string(::getpid()),
                       "--training.device=auto"};
  return std::make_unique<PlanWatch>(std::move(options), parts.window);
}

}  // namespace titan::cli
