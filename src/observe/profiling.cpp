#include "observe/profiling.h"

#include <unistd.h>

#include <map>
#include <set>

#include <ATen/core/grad_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <nlohmann/json.hpp>

#include "core/durable.h"
#include "core/file.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "dist/stream.h"
#include "dist/trace_range.h"
#include "tensor/memory_history.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

// From kineto_shim.h, which includes a header of Kineto's that LibTorch doesn't ship.
namespace torch::autograd::profiler {
TORCH_API void addMetadataJson(const std::string& key, const std::string& value);
}

namespace titan::train {

void describe(config::Table<ProfilingSettings>& table) {
  table.field("enable_profiling", &ProfilingSettings::enable_profiling,
              "write traces of each rank's steps, for Perfetto and chrome://tracing");
  table.field("save_traces_folder", &ProfilingSettings::save_traces_folder,
              "folder of the traces under dump_folder: iteration_{step}/rank{r}_trace.json.gz");
  table.field("profile_freq", &ProfilingSettings::profile_freq,
              "steps between traces, and between memory snapshots", config::at_least(1));
  table.field("profiler_active", &ProfilingSettings::profiler_active,
              "steps in a trace: the last ones of every profile_freq", config::at_least(1));
  table.field("profiler_warmup", &ProfilingSettings::profiler_warmup,
              "warm-up steps before them, so that the profiler's start isn't in the trace",
              config::at_least(0));
  table.field(
      "enable_memory_snapshot", &ProfilingSettings::enable_memory_snapshot,
      "record each allocation with its call stack, and write snapshots for PyTorch's memory viewer; on a "
      "CPU, only blocks of 1 MiB and more");
  table.field("save_memory_snapshot_folder", &ProfilingSettings::save_memory_snapshot_folder,
              "folder of the snapshots under dump_folder: iteration_{step}/rank{r}_memory_snapshot.pickle");
}

namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

void keep_earlier_runs(const std::filesystem::path& path) {
  if (const auto kept = keep_earlier_file(path))
    log::info_rank0(str("profiling: an earlier file of this step is kept: ", kept->string()));
}

ProfilerConfig profiler_config() {
  return ProfilerConfig(ProfilerState::KINETO, /*report_input_shapes=*/true);
}

std::set<ActivityType> activities(c10::Device device) {
  std::set<ActivityType> kinds = {ActivityType::CPU};
  if (device.is_cuda()) kinds.insert(ActivityType::CUDA);
  return kinds;
}

// Trace viewers recognize a step by this name.
std::string range_name(Phase phase, int64_t step) {
  return phase == Phase::Step ? str("ProfilerStep#", step) : name_of(phase);
}

/// The uncompressed trace, removed at the end.
class PlainFile {
 public:
  explicit PlainFile(std::filesystem::path path) : path_(std::move(path)) {}
  ~PlainFile() { ::unlink(path_.c_str()); }
  PlainFile(const PlainFile&) = delete;
  PlainFile& operator=(const PlainFile&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Kineto numbers streams as the driver does, and nothing maps those numbers to names. So at the start of a
// trace, each named stream gets a tiny kernel under a range with its name, and the trace shows the range
// beside the stream's number.
constexpr std::string_view kMark = "stream: ";
constexpr std::string_view kMarkedRange = R"("cat": "gpu_user_annotation", "name": "stream: )";
constexpr std::string_view kThread = R"("tid": )";
constexpr std::string_view kRow = R"("stream )";

void mark_stream(const dist::NamedStream& named, c10::Device device) {
  const at::NoGradGuard no_grad;
  const dist::StreamGuard on_stream(named.stream);
  const dist::TraceRange range([&] { return std::string(kMark) + named.name; });
  at::zeros({1}, at::TensorOptions(device));
}

std::string_view digits_at(std::string_view text, size_t at) {
  const size_t end = std::min(text.find_first_not_of("0123456789", at), text.size());
  return text.substr(at, end - at);
}

// Returns stream numbers with their names.
std::map<std::string_view, std::string_view> marked_streams(std::string_view trace) {
  std::map<std::string_view, std::string_view> names;
  for (size_t at = trace.find(kMarkedRange); at != trace.npos; at = trace.find(kMarkedRange, at + 1)) {
    const size_t name = at + kMarkedRange.size(), end = trace.find('"', name);
    const size_t thread = trace.find(kThread, end);
    if (end == trace.npos || thread == trace.npos) break;
    names[digits_at(trace, thread + kThread.size())] = trace.substr(name, end - name);
  }
  return names;
}

void mark_streams(c10::Device device) {
  if (device.is_cpu()) return;
  mark_stream({"compute", dist::Stream::current(device)}, device);
  for (const dist::NamedStream& named : dist::named_streams()) mark_stream(named, device);
}

}  // namespace

ProfileAction profile_action(const ProfilingSettings& settings, int64_t step) {
  const int64_t left = settings.profile_freq - 1 - (step - 1) % settings.profile_freq;  // to the window's end
  if (left == 0) return ProfileAction::RecordAndSave;
  if (left < settings.profiler_active) return ProfileAction::Record;
  if (left < settings.profiler_active + settings.profiler_warmup) return ProfileAction::WarmUp;
  return ProfileAction::None;
}

std::vector<std::string_view> with_stream_names(std::string_view trace) {
  std::vector<std::string_view> pieces;
  const auto names = marked_streams(trace);
  size_t done = 0;
  for (size_t at = trace.find(kRow); !names.empty() && at != trace.npos; at = trace.find(kRow, at + 1)) {
    const std::string_view number = digits_at(trace, at + kRow.size());
    const auto named = names.find(number);
    if (named == names.end()) continue;
    const size_t end = at + kRow.size() + number.size();
    pieces.insert(pieces.end(), {trace.substr(done, end - done), " ", named->second});
    done = end;
  }
  pieces.push_back(trace.substr(done));
  return pieces;
}

StepProfiler::StepProfiler(Options options) : options_(std::move(options)) {}

StepProfiler::~StepProfiler() { discard(); }

void StepProfiler::begin(Phase phase, int64_t step) {
  if (phase == Phase::Step) begin_step(step);
  if (!recording_) return;
  phases_.push_back(std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE));
  phases_.back()->before(std::string_view(range_name(phase, step)));
}

// When training ends inside a window, what has been recorded is written.
void StepProfiler::end(Phase phase, int64_t step, bool failed) {
  if (!phases_.empty()) phases_.pop_back();
  if (failed) return discard();
  if (!recording_ || (phase != Phase::Step && phase != Phase::Finish)) return;
  const bool window_ends = profile_action(options_.settings, step) == ProfileAction::RecordAndSave;
  if (phase == Phase::Finish || window_ends) stop(step);
}

void StepProfiler::begin_step(int64_t step) {
  const ProfileAction action = profile_action(options_.settings, step);
  const bool records = action == ProfileAction::Record || action == ProfileAction::RecordAndSave;
  if (recording_ && !records) discard();  // the run was rewound to an earlier step
  if (action == ProfileAction::None || recording_) return;
  if (!prepared_) profiler::prepareProfiler(profiler_config(), activities(options_.device));
  prepared_ = true;
  if (records) start();
}

void StepProfiler::start() {
  for (const nn::AnyRef& model : options_.models) labels_.emplace_back(model);
  profiler::enableProfiler(profiler_config(), activities(options_.device));
  recording_ = true;
  const nlohmann::json job = {
      {"backend", options_.backend}, {"rank", options_.rank}, {"world_size", options_.world_size}};
  profiler::addMetadataJson("distributedInfo", job.dump());
  mark_streams(options_.device);
}

// Runs at the end of a phase, where nothing may be thrown. A device error that appears here appears again in
// the next step's first operation, which reports it to peers and the flight record. The device may still be
// busy with the window's steps.
void StepProfiler::stop(int64_t step) {
  const StructuredSpan span(options_.log, "profiler_save", "titan::train::StepProfiler");
  if (watchdog_) watchdog_->begin(Phase::Save, step);
  try {
    if (options_.device.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(options_.device.index());
    save(step);
  } catch (const std::exception& error) {
    log::error(str("profiling: cannot write the trace of step ", step, ": ", error.what()));
  }
  discard();
  if (watchdog_) watchdog_->end(Phase::Save, step, /*failed=*/false);
}

void StepProfiler::save(int64_t step) {
  const auto start = std::chrono::steady_clock::now();
  const auto folder = options_.folder / str("iteration_", step);
  make_folder(folder);
  const PlainFile plain(folder / str(".rank", options_.rank, "_trace.json.", ::getpid()));
  labels_.clear();  // ranges end before the profiler does
  recording_ = prepared_ = false;
  profiler::disableProfiler()->save(plain.path());
  const MappedFile trace(plain.path());
  const auto path = folder / str("rank", options_.rank, "_trace.json.gz");
  keep_earlier_runs(path);
  write_gzip_atomic(path, with_stream_names(trace.text()));
  log::info_rank0(str("profiling: wrote ", path.string(), " in ", seconds_since(start), " s"));
}

void StepProfiler::discard() noexcept {
  phases_.clear();
  labels_.clear();
  prepared_ = false;
  if (!std::exchange(recording_, false)) return;
  try {
    profiler::disableProfiler();
  } catch (const std::exception& error) {
    log::error(str("profiling: cannot stop the profiler: ", error.what()));
  }
}

namespace {

constexpr int64_t kMaxEvents = 100000;  // as in TorchTitan

dist::DeviceBackend* backend_of(c10::Device device) {
  return device.is_cpu() ? nullptr : dist::device_backend();
}

std::string snapshot(c10::Device device) {
  if (auto* backend = backend_of(device)) return backend->memory_snapshot();
  return memory_history()->snapshot();
}

int64_t num_out_of_memory(c10::Device device) {
  if (auto* backend = backend_of(device)) return backend->memory(device.index()).num_out_of_memory;
  return memory_history()->num_out_of_memory();
}

}  // namespace

void record_memory_history(c10::Device device) {
  if (auto* backend = backend_of(device)) return backend->record_memory_history(kMaxEvents);
  titan::record_memory_history(kMaxEvents);
}

MemorySnapshots::MemorySnapshots(Options options)
    : options_(std::move(options)), num_out_of_memory_(num_out_of_memory(options_.device)) {}

void MemorySnapshots::end(Phase phase, int64_t step, bool failed) {
  if (phase != Phase::Step) return;
  if (failed && num_out_of_memory(options_.device) > num_out_of_memory_)
    return write(str("iteration_", step - 1, "_exit"));
  if (!failed && step % options_.freq == 0) write(str("iteration_", step));
}

void MemorySnapshots::write(const std::filesystem::path& iteration) const {
  const auto path = options_.folder / iteration / str("rank", options_.rank, "_memory_snapshot.pickle");
  try {
    make_folder(path.parent_path());
    keep_earlier_runs(path);
    write_file_atomic(path, snapshot(options_.device));
    log::info_rank0(str("profiling: wrote ", path.string()));
  } catch (const std::exception& error) {
    log::error(str("profiling: cannot write ", path.string(), ": ", error.what()));
  }
}

}  // namespace titan::train
