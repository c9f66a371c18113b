// libcuda.so.1: the driver's functions that LibTorch links, from the runtime's table.

#include "runtime/driver.h"

#undef cuGetErrorString

#define FORWARD(name, parameters, arguments)                                                               \
  extern "C" CUresult name parameters {                                                                    \
    static auto* function = reinterpret_cast<CUresult(*) parameters>(virtual_gpu::driver_function(#name)); \
    return function arguments;                                                                             \
  }

FORWARD(cuInit, (unsigned flags), (flags))
FORWARD(cuDriverGetVersion, (int* version), (version))
FORWARD(cuDeviceGetCount, (int* count), (count))
FORWARD(cuDeviceGet, (CUdevice * device, int index), (device, index))
FORWARD(cuDeviceGetAttribute, (int* value, CUdevice_attribute attribute, CUdevice device),
        (value, attribute, device))
FORWARD(cuCtxGetCurrent, (CUcontext * context), (context))
FORWARD(cuCtxSetCurrent, (CUcontext context), (context))
FORWARD(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned* flags, int* is_active),
        (device, flags, is_active))
FORWARD(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device), (context, device))
FORWARD(cuGetErrorString, (CUresult error, const char** text), (error, text))
FORWARD(cuPointerGetAttribute, (void* value, CUpointer_attribute attribute, CUdeviceptr pointer),
        (value, attribute, pointer))
