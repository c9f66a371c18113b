#include "observe/profiling.h"

#include <unistd.h>
#include <chrono>
#include <set>
#include <utility>

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <nlohmann/json.hpp>

#include "core/durable.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "observe/stream_rows.h"
#include "tensor/memory_history.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"

// Of kineto_shim.h, which includes a header of Kineto's that LibTorch doesn't ship.
namespace torch::autograd::profiler {
TORCH_API void addMetadataJson(const std::string& key, const std::string& value);
}

namespace titan::train {

namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

ProfilerConfig profiler_config() {
  return ProfilerConfig(ProfilerState::KINETO, /*report_input_shapes=*/true);
}

std::set<ActivityType> activities(c10::Device device) {
  std::set<ActivityType> kinds = {ActivityType::CPU};
  if (device.is_cuda()) kinds.insert(ActivityType::CUDA);
  return kinds;
}

// Tools that read traces know a step by this name.
std::string range_name(Phase phase, int64_t step) {
  return phase == Phase::Step ? str("ProfilerStep#", step) : name_of(phase);
}

/// What Kineto writes, until it is compressed.
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

}  // namespace

StepProfiler::StepProfiler(Options options) : options_(std::move(options)) {}

StepProfiler::~StepProfiler() { discard(); }

void StepProfiler::begin(Phase phase, int64_t step) {
  if (phase == Phase::Step) begin_step(step);
  if (!recording_) return;
  phases_.push_back(std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE));
  phases_.back()->before(std::string_view(range_name(phase, step)));
}

// Training ends inside a window: what there is of it is written.
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
  if (recording_ && !records) discard();  // the run went back to an earlier step
  if (action == ProfileAction::None || recording_) return;
  if (!prepared_) prepare();
  if (records) start();
}

void StepProfiler::prepare() {
  profiler::prepareProfiler(profiler_config(), activities(options_.device));
  prepared_ = true;
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

// Called as a phase ends, where nothing may be thrown: an error of the device that shows here shows again at
// the next step's first operation, which peers and flight record then hear of. The device may still be at
// work on what the window's steps have queued.
void StepProfiler::stop(int64_t step) {
  const StructuredSpan span(options_.log, "profiler_save", "titan::train::StepProfiler");
  if (watchdog_) watchdog_->begin(Phase::Save, step);
  try {
    if (options_.device.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(options_.device.index());
    save(step);
  } catch (const std::exception& error) {
    log::error(str("profiling: the trace of step ", step, " isn't written: ", error.what()));
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
  write_gzip_atomic(path, with_stream_names(trace.text()).pieces);
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
    log::error(str("profiling: the profiler can't be stopped: ", error.what()));
  }
}

namespace {

constexpr int64_t kMaxEvents = 100000;  // TorchTitan's

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
    write_file_atomic(path, snapshot(options_.device));
    log::info_rank0(str("profiling: wrote ", path.string()));
  } catch (const std::exception& error) {
    log::error(str("profiling: ", path.string(), " isn't written: ", error.what()));
  }
}

}  // namespace titan::train
