// Registration and launch of kernels. A program's kernels register under the addresses of their host stubs; a launch looks for
// a host version by the kernel's name.

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <unordered_map>

#include "runtime/counters.h"
#include "runtime/stream.h"

namespace virtual_gpu {
namespace {

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;  // by the host stub's address; mangled
  std::vector<std::pair<std::string, HostKernel>> host_versions;
  std::deque<HostKernel> without_work;  // with VIRTUAL_GPU_LIBTORCH; they stay where they are
  std::unordered_map<const void*, const HostKernel*> found;
};
Kernels& kernels() {
  static auto* k = new Kernels;
  return *k;
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                    std::free);
  return text ? text.get() : name;
}

// "void titan::(anonymous namespace)::rms_norm_kernel<float>(...)": "rms_norm_kernel", as simt/simt.cpp names it.
std::string bare_name(std::string text) {
  constexpr std::string_view unnamed = "(anonymous namespace)";
  for (size_t at; (at = text.find(unnamed)) != std::string::npos;) text.erase(at, unnamed.size());
  text.resize(text.find_first_of("<("));
  return text.substr(text.find_last_of(": ") + 1);
}

const HostKernel* host_version(const void* function) {
  Kernels& k = kernels();
  const std::lock_guard lock(k.mutex);
  if (const auto known = k.found.find(function); known != k.found.end()) return known->second;
  const auto name = k.names.find(function);
  const std::string text = name == k.names.end() ? "a kernel that didn't register" : demangled(name->second);
  for (const auto& [part, version] : k.host_versions)
    if (text.find(part) != std::string::npos) return k.found[function] = &version;
  if (state().settings.runs_libtorch && name != k.names.end()) {
    const std::string counted = text.find("titan::") == std::string::npos ? text : bare_name(text);
    k.without_work.emplace_back(
        [counted](const Launch& launch) { submit(launch.stream, computation(counted, {}, [] {})); });
    return k.found[function] = &k.without_work.back();
  }
  // In memory-only mode, LibTorch's may be left out: memory is allocated by the host.
  if (state().settings.memory_only && name != k.names.end() && text.find("titan::") == std::string::npos) {
    std::fprintf(stderr, "virtual GPU: leaves out the kernel %s\n", text.substr(0, 600).c_str());
    return k.found[function] = nullptr;
  }
  not_supported("the kernel " + text.substr(0, 600),
                "Give it a host version with virtual_gpu::register_kernel.");
}

cudaError_t launch(const void* function, const Launch& launch) {
  const OwnWork own;
  if (const cudaError_t error = check_launch(launch.grid, launch.block)) return error;
  {
    const Lock lock(state().mutex);
    if (const cudaError_t error = check_capture(stream_of(launch.stream))) return error;
  }
  if (const HostKernel* kernel = host_version(function)) (*kernel)(launch);
  return cudaSuccess;
}

thread_local std::vector<Launch> pushed;  // between <<<...>>> and the stub's call

}  // namespace

// https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Technical Specifications per Compute Capability": the same for all.
cudaError_t check_launch(dim3 grid, dim3 block) {
  const auto fits = [](dim3 size, dim3 most) {
    return size.x - 1 < most.x && size.y - 1 < most.y && size.z - 1 < most.z;  // 0 - 1 is a large number
  };
  const bool is_possible = fits(grid, {(1u << 31) - 1, 65'535, 65'535}) && fits(block, {1024, 1024, 64}) &&
                           size_t{block.x} * block.y * block.z <= 1024;
  return is_possible ? cudaSuccess : fail(cudaErrorInvalidConfiguration);
}

void register_kernel(std::string name, HostKernel kernel) {
  const std::lock_guard lock(kernels().mutex);
  kernels().host_versions.emplace_back(std::move(name), std::move(kernel));
}

}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  const std::lock_guard lock(kernels().mutex);
  kernels().names[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream) {
  pushed.push_back({grid, block, shared_bytes, nullptr, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  const Launch call = pushed.back();
  pushed.pop_back();
  *grid = call.grid;
  *block = call.block;
  *shared_bytes = call.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = call.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream) {
  return launch(kernel, {grid, block, shared_bytes, arguments, stream});
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared_bytes, cudaStream_t stream) {
  return launch(function, {grid, block, shared_bytes, arguments, stream});
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
  return launch(function, {grid, block, shared_bytes, arguments, stream});
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return launch(function,
                {config->gridDim, config->blockDim, config->dynamicSmemBytes, arguments, config->stream});
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = compute_capability();
  attributes->maxDynamicSharedSizeBytes = 232'448;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                   unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = const_cast<void*>(symbol);
  return cudaSuccess;
}

}  // extern "C"
