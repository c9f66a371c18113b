#include "train/memory_snapshots.h"

#include "tensor/memory_history.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"
#include "titan/dist/device_backend.h"

namespace titan::train {

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
