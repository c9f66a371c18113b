// libnvidia-ml.so.1: no other process uses the GPUs, and there is no fabric between hosts.

#include <cstdint>
#include <cstdio>
#include <cstring>

extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  unsigned bus = 0;
  std::sscanf(bus_id, "%*x:%x", &bus);
  *device = reinterpret_cast<void*>(uintptr_t{bus});
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}
// The structure begins with its version, which the caller sets.
int nvmlDeviceGetGpuFabricInfoV(void*, void* info) {
  std::memset(static_cast<char*>(info) + 4, 0, 24);
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int* type) {
  *type = 1;  // a switch
  return 0;
}
constexpr int not_supported = 3;
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return not_supported; }
int nvmlSystemGetCudaDriverVersion_v2() { return not_supported; }
}
