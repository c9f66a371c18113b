# libtitan_cuda: NCCL groups, device set-up and memory figures. The library opens this plugin when a GPU is visible.
if(TITAN_CUDA STREQUAL "OFF")
  return()
endif()
file(GLOB_RECURSE titan_cuda_sources CONFIGURE_DEPENDS src/cuda_plugin/*.cpp)
find_program(TITAN_NVCC nvcc HINTS /usr/local/cuda/bin)
if(NOT TITAN_NVCC OR NOT TITAN_TORCH_HAS_CUDA)
  if(TITAN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TITAN_CUDA=ON needs nvcc (found: '${TITAN_NVCC}') and a LibTorch with CUDA (${TITAN_TORCH_DIR}: ${TITAN_TORCH_HAS_CUDA})")
  endif()
  message(STATUS "The CUDA plugin isn't built: nvcc '${TITAN_NVCC}', LibTorch with CUDA: ${TITAN_TORCH_HAS_CUDA}")
  return()
endif()
if(NOT titan_cuda_sources)
  return()
endif()

get_filename_component(cuda_root "${TITAN_NVCC}" DIRECTORY)
get_filename_component(cuda_root "${cuda_root}" DIRECTORY)
# Device code: kernels that don't use LibTorch, compiled by nvcc directly. (Enabling CUDA as a language of the project would add seconds
# to each configuration, and CMake 3.25 doesn't know the flags of nvcc 13.)
set(TITAN_CUDA_ARCHITECTURES 80 89 90 100 CACHE STRING "Compute capabilities that kernels are compiled for")
set(titan_cuda_objects)
file(GLOB_RECURSE titan_cuda_kernels CONFIGURE_DEPENDS src/cuda_plugin/*.cu)
set(titan_nvcc_targets)
foreach(architecture IN LISTS TITAN_CUDA_ARCHITECTURES)
  list(APPEND titan_nvcc_targets -gencode arch=compute_${architecture},code=sm_${architecture})
endforeach()
# For other devices the driver compiles the kernels at the first launch: from the code for 8.0, the oldest that the kernels run on
# (Float8 is emulated below 8.9), or from the code for the newest architecture above, for later devices.
list(SORT TITAN_CUDA_ARCHITECTURES COMPARE NATURAL)
list(GET TITAN_CUDA_ARCHITECTURES -1 titan_newest_architecture)
foreach(architecture IN ITEMS 80 ${titan_newest_architecture})
  list(APPEND titan_nvcc_targets -gencode arch=compute_${architecture},code=compute_${architecture})
endforeach()
foreach(source IN LISTS titan_cuda_kernels)
  get_filename_component(stem ${source} NAME_WE)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/cuda/${stem}.o)
  # ptxas's report of each kernel's registers and memory goes to a file, and PTX stays in a folder, for tests/style/check_kernel_resources.py; warnings
  # are shown.
  set(report "'${object}.ptxas'")
  set(run_and_report "(\"$@\" 2>${report} || (cat ${report} >&2 && false)) && (grep -v -e '^ptxas info' -e '^    ' ${report} >&2 || true)")
  set(byproducts ${object}.ptxas)
  if(90 IN_LIST TITAN_CUDA_ARCHITECTURES)
    list(APPEND byproducts ${CMAKE_CURRENT_BINARY_DIR}/cuda/${stem}/${stem}.compute_90.ptx)
  endif()
  add_custom_command(
    OUTPUT ${object}
    BYPRODUCTS ${byproducts}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/cuda/${stem}
    COMMAND sh -c ${run_and_report} sh
      ${TITAN_NVCC} -std=c++20 -O3 ${titan_nvcc_targets} -Xptxas=-v,-warn-spills -I${CMAKE_CURRENT_SOURCE_DIR}/src -Xcompiler=-fPIC,-Wall -keep -keep-dir ${CMAKE_CURRENT_BINARY_DIR}/cuda/${stem}
      -MD -MF ${object}.d -c ${source} -o ${object}
    DEPENDS ${source} DEPFILE ${object}.d
    COMMENT "Compiling ${source}" VERBATIM)
  list(APPEND titan_cuda_objects ${object})
endforeach()

titan_import_torch(c10_cuda)
titan_import_torch(torch_cuda)
file(GLOB nvidia_includes "${TITAN_TORCH_DIR}/../nvidia/*/include")
add_library(titan_cuda SHARED ${titan_cuda_sources} ${titan_cuda_objects})
set_source_files_properties(${titan_cuda_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
target_include_directories(titan_cuda PRIVATE src)
target_include_directories(titan_cuda SYSTEM PRIVATE "${cuda_root}/include" ${nvidia_includes})
target_compile_definitions(titan_cuda PRIVATE USE_C10D_NCCL)
target_link_libraries(titan_cuda PRIVATE libtitan_train Titan::torch_cuda Titan::c10_cuda)
target_link_options(titan_cuda PRIVATE -Wl,--no-as-needed -Wl,--allow-shlib-undefined)
set_target_properties(titan_cuda PROPERTIES UNITY_BUILD ${TITAN_UNITY} UNITY_BUILD_BATCH_SIZE ${TITAN_UNITY_BATCH_SIZE} INSTALL_RPATH "$ORIGIN;${TITAN_TORCH_LIB_DIR}")
target_compile_options(titan_cuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra $<$<BOOL:${TITAN_WERROR}>:-Werror>>)
