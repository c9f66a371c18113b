# Imports LibTorch by path. find_package(Torch) of a CUDA wheel requires nvcc, probes for a GPU and links everything;
# the library needs only c10 and torch_cpu, and the CUDA plugin two more.
#
# TITAN_TORCH_DIR: a `torch` folder of a Python environment or an unpacked libtorch archive (has lib/ and include/).

if(NOT TITAN_TORCH_DIR)
  if(DEFINED ENV{TITAN_TORCH_DIR})
    set(TITAN_TORCH_DIR "$ENV{TITAN_TORCH_DIR}")
  else()
    file(GLOB _titan_venv_torch "${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch")
    if(_titan_venv_torch)
      list(GET _titan_venv_torch 0 TITAN_TORCH_DIR)
    endif()
  endif()
endif()
if(NOT EXISTS "${TITAN_TORCH_DIR}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "No LibTorch at '${TITAN_TORCH_DIR}' (lib/libtorch_cpu.so is missing). Run scripts/bootstrap.sh, or set "
                      "TITAN_TORCH_DIR to a `torch` folder of a Python environment or an unpacked libtorch archive.")
endif()
get_filename_component(TITAN_TORCH_DIR "${TITAN_TORCH_DIR}" ABSOLUTE)
set(TITAN_TORCH_DIR "${TITAN_TORCH_DIR}" CACHE PATH "LibTorch: a folder with lib/ and include/" FORCE)
set(TITAN_TORCH_LIB_DIR "${TITAN_TORCH_DIR}/lib")

# Debian's libraries use GCC's new std::string. An archive from before LibTorch 2.7 may use the old one, and wouldn't link.
set(TITAN_TORCH_CXX11_ABI 1)
if(EXISTS "${TITAN_TORCH_DIR}/share/cmake/Torch/TorchConfig.cmake")
  file(STRINGS "${TITAN_TORCH_DIR}/share/cmake/Torch/TorchConfig.cmake" _titan_abi REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
  if(_titan_abi MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
    set(TITAN_TORCH_CXX11_ABI ${CMAKE_MATCH_1})
  endif()
endif()
if(NOT TITAN_TORCH_CXX11_ABI)
  message(FATAL_ERROR "${TITAN_TORCH_DIR} was built with _GLIBCXX_USE_CXX11_ABI=0; use the cxx11-abi archive")
endif()

# One imported target per shared library of LibTorch.
function(titan_import_torch name)
  if(TARGET Titan::${name})
    return()
  endif()
  add_library(Titan::${name} SHARED IMPORTED GLOBAL)
  set_target_properties(Titan::${name} PROPERTIES IMPORTED_LOCATION "${TITAN_TORCH_LIB_DIR}/lib${name}.so" IMPORTED_NO_SONAME FALSE)
  target_include_directories(Titan::${name} SYSTEM INTERFACE "${TITAN_TORCH_DIR}/include" "${TITAN_TORCH_DIR}/include/torch/csrc/api/include")
  target_compile_definitions(Titan::${name} INTERFACE _GLIBCXX_USE_CXX11_ABI=${TITAN_TORCH_CXX11_ABI})
endfunction()

titan_import_torch(c10)
titan_import_torch(torch_cpu)
# The definitions that the wheel was built with: without them c10d's headers hide these parts.
target_compile_definitions(Titan::torch_cpu INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
target_link_libraries(Titan::torch_cpu INTERFACE Titan::c10)
# at::parallel_for uses OpenMP in headers. It must use the runtime that LibTorch brings (libgomp.so.1 in a wheel, libgomp-<hash>.so.1 in an
# archive): a second runtime would make a second pool of threads.
target_compile_options(Titan::torch_cpu INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
file(GLOB _titan_openmp "${TITAN_TORCH_LIB_DIR}/libgomp*.so*")
if(_titan_openmp)
  list(GET _titan_openmp 0 _titan_openmp)
  target_link_libraries(Titan::torch_cpu INTERFACE "${_titan_openmp}")
else()
  target_link_options(Titan::torch_cpu INTERFACE -fopenmp)
endif()

set(TITAN_TORCH_HAS_CUDA OFF)
if(EXISTS "${TITAN_TORCH_LIB_DIR}/libtorch_cuda.so")
  set(TITAN_TORCH_HAS_CUDA ON)
endif()
