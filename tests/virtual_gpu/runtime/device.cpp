// Properties of the devices. The figures of each profile are those that cudaGetDeviceProperties reports on the
// real one, or NVIDIA's data sheets' where no report is at hand.

#include "runtime/device.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/faults.h"
#include "runtime/memory.h"
#include "runtime/races.h"
#include "runtime/stream.h"

namespace virtual_gpu {
namespace {

struct Profile {
  const char* name;
  const char* device_name;
  int major;
  int minor;
  size_t memory_bytes;
  int num_multiprocessors;
  size_t l2_bytes;
  int bus_bits;
  size_t shared_bytes_per_multiprocessor;
};

constexpr std::array<Profile, 5> profiles = {{
    {"a100", "Virtual A100 80GB", 8, 0, 85'094'825'984, 108, 41'943'040, 5120, 167'936},
    {"h100", "Virtual H100 80GB", 9, 0, 85'017'755'648, 132, 52'428'800, 5120, 233'472},
    {"h100_96gb", "Virtual H100 96GB", 9, 0, 101'993'545'728, 132, 52'428'800, 5120, 233'472},
    {"h200", "Virtual H200", 9, 0, 150'109'487'104, 132, 62'914'560, 6144, 233'472},
    {"b200", "Virtual B200", 10, 0, 191'514'017'792, 148, 132'644'864, 8192, 233'472},
}};

// A context, its code and its stacks take about this much of the device's memory.
constexpr size_t context_bytes = size_t{600} << 20;

const Profile& profile() {
  static const Profile* chosen = [] {
    const std::string& wanted = state().settings.profile;
    for (const Profile& p : profiles)
      if (wanted == p.name) return &p;
    std::string names;
    for (const Profile& p : profiles) names += std::string(names.empty() ? "" : ", ") + p.name;
    not_supported("the profile '" + wanted + "' in VIRTUAL_GPU_PROFILE", "Profiles are: " + names + ".");
  }();
  return *chosen;
}

thread_local int device = 0;

bool exists(int d) { return d >= 0 && d < state().settings.num_devices; }

std::string uuid_of(int number) {
  char text[48];
  std::snprintf(text, sizeof text, "GPU-76000000-0000-0000-0000-%012x", number);
  return text;
}

/// The number of the device that an entry of CUDA_VISIBLE_DEVICES names, by its number or the beginning of its
/// UUID; -1: none.
int device_named(const std::string& entry, int num_devices) {
  if (!entry.starts_with("GPU-")) {
    char* end = nullptr;
    const long number = std::strtol(entry.c_str(), &end, 10);
    return end != entry.c_str() && number >= 0 && number < num_devices ? static_cast<int>(number) : -1;
  }
  for (int number = 0; number < num_devices; ++number)
    if (uuid_of(number).starts_with(entry)) return number;
  return -1;
}

// As CUDA does: in the order of the entries, up to the first one that names no device; none at all if one is
// named twice.
std::vector<int> devices_in(const char* visible, int num_devices) {
  std::vector<int> devices;
  std::istringstream entries(visible);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const int number = device_named(entry, num_devices);
    if (number < 0) break;
    if (std::count(devices.begin(), devices.end(), number) > 0) return {};
    devices.push_back(number);
  }
  return devices;
}

/// The machine's numbers of this process's devices.
std::vector<int>& machine_numbers() {
  static std::vector<int> numbers;
  return numbers;
}

}  // namespace

int num_visible_devices(size_t num_devices) {
  std::vector<int>& numbers = machine_numbers();
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    numbers = devices_in(visible, static_cast<int>(num_devices));
  } else {
    numbers.resize(num_devices);
    std::iota(numbers.begin(), numbers.end(), 0);
  }
  return static_cast<int>(numbers.size());
}

// A bit for each device on which this process has a context.
static std::atomic<uint64_t> contexts = 0;

int current_device() { return device; }
bool has_context(int d) { return (contexts >> d & 1) != 0; }

static void end_at_context(const std::string& call, int d) {
  char thread[32] = {};
  pthread_getname_np(pthread_self(), thread, sizeof thread);
  report_fault(
      "virtual GPU: %s on thread %d ('%s') makes a context on device %d, hundreds of MB of its memory; this "
      "process has one on device %d\n  A new thread's device is 0: it chooses the process's own with "
      "cudaSetDevice first. (VIRTUAL_GPU_DEVICES_PER_PROCESS is the number that a process may choose.)\n",
      call.c_str(), static_cast<int>(gettid()), thread, d, std::countr_zero(contexts.load()));
  print_calls_here();
  std::abort();
}

// False if there are `most` on other devices.
static bool make_context(int d, int most) {
  uint64_t before = contexts;
  do {
    if ((before >> d & 1) != 0) return true;
    if (std::popcount(before) >= most) return false;
  } while (!contexts.compare_exchange_weak(before, before | uint64_t{1} << d));
  return true;
}
void need_context(const char* call) {
  if (!make_context(device, 1)) end_at_context(call, device);
}
size_t total_bytes() { return profile().memory_bytes; }
size_t usable_bytes() { return profile().memory_bytes - context_bytes; }
int compute_capability() { return profile().major * 10 + profile().minor; }

}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  if (const char* error = std::getenv("VIRTUAL_GPU_ERROR"))
    return fail(static_cast<cudaError_t>(std::atoi(error)));
  *count = state().settings.num_devices;
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* d) {
  load_kernels();
  *d = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
  if (!exists(d)) return fail(cudaErrorInvalidDevice);
  device = d;
  if (!make_context(d, state().settings.devices_per_process))
    end_at_context("cudaSetDevice(" + std::to_string(d) + ")", d);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (!exists(d)) return fail(cudaErrorInvalidDevice);
  const Profile& of = profile();
  *p = {};
  std::snprintf(p->name, sizeof p->name, "%s", of.device_name);
  const int number = machine_numbers()[static_cast<size_t>(d)];
  p->uuid.bytes[0] = 'v';
  p->uuid.bytes[15] = static_cast<char>(number);
  p->major = of.major;
  p->minor = of.minor;
  p->totalGlobalMem = of.memory_bytes;
  p->multiProcessorCount = of.num_multiprocessors;
  p->l2CacheSize = static_cast<int>(of.l2_bytes);
  p->memoryBusWidth = of.bus_bits;
  p->sharedMemPerMultiprocessor = of.shared_bytes_per_multiprocessor;
  p->sharedMemPerBlock = 49'152;
  p->sharedMemPerBlockOptin = of.shared_bytes_per_multiprocessor - 1024;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = 65'536;
  p->regsPerMultiprocessor = 65'536;
  p->warpSize = 32;
  p->memPitch = 2'147'483'647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2'147'483'647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65'535;
  p->totalConstMem = 65'536;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->canMapHostMemory = 1;
  p->concurrentKernels = 1;
  p->pciBusID = number + 1;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->managedMemory = 1;
  p->cooperativeLaunch = 1;
  p->memoryPoolsSupported = 1;
  p->clusterLaunch = of.major >= 9;
  p->ipcEventSupported = 1;
  p->computePreemptionSupported = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int d) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, d)) return error;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(p.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = p.maxGridSize[0];
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = p.maxGridSize[1];
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *value = p.regsPerBlock;
      break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = p.regsPerMultiprocessor;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    default:
      *value = 0;  // features that no caller here needs, multicast for one
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int d) {
  if (!exists(d)) return fail(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0",
                machine_numbers()[static_cast<size_t>(d)] + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* d, const char* text) {
  int bus = 0;
  const std::vector<int>& numbers = machine_numbers();
  const bool is_bus = std::sscanf(text, "%*x:%x", &bus) == 1;
  const auto found = std::find(numbers.begin(), numbers.end(), bus - 1);
  if (!is_bus || found == numbers.end()) return fail(cudaErrorInvalidDevice);
  *d = static_cast<int>(found - numbers.begin());
  return cudaSuccess;
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int, int) {
  *value = attribute == cudaDevP2PAttrPerformanceRank ? 0 : 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorIllegalState:
      return "cudaErrorIllegalState";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureMerge:
      return "cudaErrorStreamCaptureMerge";
    case cudaErrorStreamCaptureUnmatched:
      return "cudaErrorStreamCaptureUnmatched";
    case cudaErrorStreamCaptureUnjoined:
      return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation:
      return "cudaErrorStreamCaptureIsolation";
    case cudaErrorCapturedEvent:
      return "cudaErrorCapturedEvent";
    default:
      return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorSystemNotReady:
      return "system not yet initialized";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge:
      return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    default:
      return cudaGetErrorName(error);
  }
}

}  // extern "C"
