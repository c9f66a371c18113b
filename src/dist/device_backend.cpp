// Opens the CUDA plugin. The kernel, not a CUDA library, says whether there is a GPU, so that a machine
// without one doesn't pay for loading CUDA.

#include "dist/device_backend.h"

#include <dlfcn.h>
#include <unistd.h>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <utility>

#include <ATen/detail/CUDAHooksInterface.h>

#include "dist/planned_devices.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

DeviceBackend* opened_backend =
    nullptr;                  // set once, by open_cuda_plugin or use_planned_devices, and never closed
std::string failure_of_cuda;  // set by open_cuda_plugin

// LibTorch's allocator belongs to the process, and so do those who keep its memory.
struct IdleOwners {
  std::mutex mutex;
  std::vector<const IdleMemory::Take*> list;

  static IdleOwners& get() {
    static IdleOwners owners;
    return owners;
  }
};

bool has_entries(const char* folder) {
  std::error_code error;
  const std::filesystem::directory_iterator first(folder, error);
  return !error && first != std::filesystem::directory_iterator();
}

DeviceBackend* load(const std::filesystem::path& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  TITAN_CHECK(library, "a GPU is visible, but the CUDA plugin doesn't load: ", dlerror(),
              " (set CUDA_VISIBLE_DEVICES= to run on the CPU)");
  // LibTorch asks for CUDA's hooks once and keeps the answer. If it asked before the plugin registered
  // them, the answer stays "no CUDA".
  TITAN_CHECK(
      at::detail::getCUDAHooks().hasCUDART(),
      "the CUDA plugin was opened too late: LibTorch had already looked for CUDA. Call dist::init() (or "
      "dist::open_cuda_plugin()) before the first tensor is made");
  using Entry = DeviceBackend* (*)();
  auto entry = reinterpret_cast<Entry>(dlsym(library, "titan_cuda_plugin"));
  TITAN_CHECK(entry, path.string(), " has no titan_cuda_plugin(): it belongs to another version");
  return entry();
}

}  // namespace

std::filesystem::path cuda_plugin_path() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&gpu_visible), &info);
  return std::filesystem::path(info.dli_fname ? info.dli_fname : "").parent_path() / "libtitan_cuda.so";
}

bool gpu_visible() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible && (!*visible || *visible == '-'))
    return false;
  // Some containers have only one of the two.
  return has_entries("/proc/driver/nvidia/gpus") || access("/dev/nvidia0", F_OK) == 0;
}

namespace {
std::atomic<int64_t> num_replaced = 0;
}
void note_replaced_memory() { ++num_replaced; }
int64_t num_replaced_memories() { return num_replaced; }

DeviceBackend* open_cuda_plugin() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (opened_backend) return opened_backend;
  const auto path = cuda_plugin_path();
  if (!gpu_visible() || access(path.c_str(), F_OK) != 0) return nullptr;
  DeviceBackend* backend = load(path);
  // The driver may show a device that CUDA can't use (a restricted container): then this counts as a machine
  // without a GPU.
  if (backend->num_devices() > 0)
    opened_backend = backend;
  else
    failure_of_cuda = backend->failure();
  return opened_backend;
}

std::string cuda_failure() { return failure_of_cuda; }

DeviceBackend* device_backend() { return opened_backend; }

void use_planned_devices(PlannedDevices& devices) {
  TITAN_CHECK(!opened_backend || opened_backend == &devices,
              "planned devices can't be used beside those of the CUDA plugin, which is open");
  opened_backend = &devices;
}

bool is_planned(c10::Device device) {
  return device.is_cuda() && dynamic_cast<const PlannedDevices*>(opened_backend);
}

IdleMemory::IdleMemory(Take take) : take_(std::move(take)) {
  const std::lock_guard lock(IdleOwners::get().mutex);
  IdleOwners::get().list.push_back(&take_);
}

IdleMemory::~IdleMemory() {
  const std::lock_guard lock(IdleOwners::get().mutex);
  std::erase(IdleOwners::get().list, &take_);
}

// Tensors are freed when the lock is released, because freeing takes the allocator's.
int64_t IdleMemory::give_back() {
  std::vector<at::Tensor> idle;
  {
    const std::lock_guard lock(IdleOwners::get().mutex);
    for (const Take* take : IdleOwners::get().list)
      for (at::Tensor& tensor : (*take)()) idle.push_back(std::move(tensor));
  }
  int64_t bytes = 0;
  for (const at::Tensor& tensor : idle) bytes += static_cast<int64_t>(tensor.storage().nbytes());
  return bytes;
}

std::string unused_gpu_warning(const std::string& wanted, bool gpu_visible,
                               const std::filesystem::path& plugin, const std::string& failure) {
  if (wanted == "cpu" || !gpu_visible) return "";
  if (!failure.empty())
    return str("a GPU is visible, but this job runs on the CPU, because CUDA can't use it: ", failure);
  std::error_code ignored;
  if (std::filesystem::exists(plugin, ignored)) return "";
  return str("a GPU is visible, but this job runs on the CPU: ", plugin.string(),
             " wasn't built. Install nvcc and a LibTorch with CUDA, configure and build again (target "
             "titan_cuda), or set training.device = \"cpu\"");
}

}  // namespace titan::dist
