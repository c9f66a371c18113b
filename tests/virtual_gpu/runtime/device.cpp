// Properties of the devices. The figures of each profile are those that cudaGetDeviceProperties reports on the
// real one, or NVIDIA's data sheets' where no report is at hand.

#include "runtime/device.h"

#include <array>
#include <cstdio>
#include <cstring>

#include "runtime/memory.h"
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

}  // namespace

int current_device() { return device; }
size_t total_bytes() { return profile().memory_bytes; }
size_t usable_bytes() { return profile().memory_bytes - context_bytes; }
int compute_capability() { return profile().major * 10 + profile().minor; }

}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = state().settings.num_devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* d) {
  load_kernels();
  *d = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
  if (!exists(d)) return fail(cudaErrorInvalidDevice);
  device = d;
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
  p->uuid.bytes[0] = 'v';
  p->uuid.bytes[15] = static_cast<char>(d);
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
  p->pciBusID = d + 1;
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
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    default:
      *value = 0;  // features that no caller here needs, multicast for one
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int d) {
  std::snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0", d + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* d, const char* text) {
  int bus = 0;
  if (std::sscanf(text, "%*x:%x", &bus) != 1 || !exists(bus - 1)) return fail(cudaErrorInvalidDevice);
  *d = bus - 1;
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
