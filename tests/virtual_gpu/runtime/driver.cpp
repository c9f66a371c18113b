// The driver's functions that LibTorch asks for by name: memory that other processes can map, and a few queries. They are
// entry points here and symbols of libcuda.so.1, which calls these.

#include "runtime/driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>

#include "runtime/counters.h"
#include "runtime/memory.h"
#include "runtime/races.h"

namespace virtual_gpu {
namespace {

char context;

CUresult not_there() { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult init(unsigned) { return CUDA_SUCCESS; }
CUresult driver_version(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult device_count(int* count) { return static_cast<CUresult>(cudaGetDeviceCount(count)); }
CUresult device_get(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
      attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) {
    *value = 1;
    return CUDA_SUCCESS;
  }
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}
CUresult context_current(CUcontext* current) {
  *current = reinterpret_cast<CUcontext>(&context);
  return CUDA_SUCCESS;
}
CUresult context_set(CUcontext) { return CUDA_SUCCESS; }
// LibTorch's pinned memory is made in a context that there is already.
CUresult primary_context_state(CUdevice device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = has_context(device) ? 1 : 0;
  return CUDA_SUCCESS;
}
CUresult primary_context_retain(CUcontext* current, CUdevice) { return context_current(current); }
CUresult error_text(CUresult, const char** text) {
  *text = "error of the virtual GPU's driver";
  return CUDA_SUCCESS;
}
CUresult pointer_attribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  Lock lock(state().mutex);
  const Block* block = find_block(reinterpret_cast<const void*>(pointer));
  const bool is_device = block && !block->is_pinned_host;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL && is_device) {
    *static_cast<int*>(value) = block->device;
    return CUDA_SUCCESS;
  }
  if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) {
    *static_cast<void**>(value) = is_device ? &context : nullptr;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

// Memory of a device, which lives as long as its handle or a mapping.
struct Physical {
  Physical(int device, size_t bytes) : device(device), bytes(bytes) {}
  ~Physical() { return_memory(device, bytes); }
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;
  int device;
  size_t bytes;
};
struct Physicals {
  std::unordered_map<int, std::shared_ptr<Physical>> by_handle;
  std::unordered_map<CUdeviceptr, std::shared_ptr<Physical>> by_mapping;
};
Physicals& physicals() {
  static auto* p = new Physicals;
  return *p;
}

// Memory that other processes can map, and LibTorch's expandable segments: a handle is a file descriptor of an
// unnamed file.
CUresult memory_create(CUmemGenericAllocationHandle* handle, size_t bytes,
                       const CUmemAllocationProp* properties, unsigned long long) {
  begin_allocating();
  const int file = memfd_create("virtual_gpu", MFD_CLOEXEC);
  if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  Lock lock(state().mutex);
  if (!take_memory("cuMemCreate", properties->location.id, bytes)) {
    close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  auto physical = std::make_shared<Physical>(properties->location.id, bytes);
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  physicals().by_handle[file] = std::move(physical);
  *handle = static_cast<CUmemGenericAllocationHandle>(file);
  return CUDA_SUCCESS;
}
CUresult memory_release(CUmemGenericAllocationHandle handle) {
  Lock lock(state().mutex);
  physicals().by_handle.erase(static_cast<int>(handle));
  close(static_cast<int>(handle));
  return CUDA_SUCCESS;
}
CUresult memory_export(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                       unsigned long long) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  *static_cast<int*>(out) = dup(static_cast<int>(handle));
  return CUDA_SUCCESS;
}
CUresult memory_import(CUmemGenericAllocationHandle* handle, void* file, CUmemAllocationHandleType) {
  *handle =
      static_cast<CUmemGenericAllocationHandle>(dup(static_cast<int>(reinterpret_cast<uintptr_t>(file))));
  return CUDA_SUCCESS;
}
CUresult memory_granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = size_t{2} << 20;
  return CUDA_SUCCESS;
}
CUresult address_reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(reserved);
  return CUDA_SUCCESS;
}
CUresult address_free(CUdeviceptr address, size_t bytes) {
  munmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}
CUresult memory_map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long) {
  void* wanted = reinterpret_cast<void*>(address);
  if (mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, static_cast<int>(handle),
           static_cast<off_t>(offset)) == MAP_FAILED)
    return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().mutex);
  if (const auto own = physicals().by_handle.find(static_cast<int>(handle));
      own != physicals().by_handle.end())
    physicals().by_mapping[address] = own->second;
  add_block(wanted, {.bytes = bytes, .device = current_device(), .is_mapped = true});
  return CUDA_SUCCESS;
}
CUresult memory_unmap(CUdeviceptr address, size_t bytes) {
  Lock lock(state().mutex);
  void* wanted = reinterpret_cast<void*>(address);
  count_host_wait("cuMemUnmap");
  wait_for_device(lock, current_device());
  forget_range(wanted, bytes);
  remove_block(wanted);
  physicals().by_mapping.erase(address);
  mmap(wanted, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}
CUresult memory_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult memset_32(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  auto* words = reinterpret_cast<unsigned*>(address);
  return static_cast<CUresult>(
      submit(stream, computation("cuMemsetD32Async", {{words, count * sizeof(unsigned), true}},
                                 [=] { std::fill_n(words, count, value); })));
}

}  // namespace

void* driver_function(const char* name) {
  static const auto* functions = new std::unordered_map<std::string, void*>{
      {"cuInit", reinterpret_cast<void*>(init)},
      {"cuDriverGetVersion", reinterpret_cast<void*>(driver_version)},
      {"cuDeviceGetCount", reinterpret_cast<void*>(device_count)},
      {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(device_attribute)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(context_current)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(context_set)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(primary_context_state)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(primary_context_retain)},
      {"cuGetErrorString", reinterpret_cast<void*>(error_text)},
      {"cuPointerGetAttribute", reinterpret_cast<void*>(pointer_attribute)},
      {"cuMemCreate", reinterpret_cast<void*>(memory_create)},
      {"cuMemRelease", reinterpret_cast<void*>(memory_release)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(memory_export)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(memory_import)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(memory_granularity)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(address_reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(address_free)},
      {"cuMemMap", reinterpret_cast<void*>(memory_map)},
      {"cuMemUnmap", reinterpret_cast<void*>(memory_unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(memory_access)},
      {"cuMemsetD32Async", reinterpret_cast<void*>(memset_32)},
  };
  const auto found = functions->find(name);
  return found == functions->end() ? reinterpret_cast<void*>(not_there) : found->second;
}

}  // namespace virtual_gpu

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {
  *function = virtual_gpu::driver_function(name);
  if (virtual_gpu::state().settings.traces) std::fprintf(stderr, "virtual GPU: driver function %s\n", name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
