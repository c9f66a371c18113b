# cmake -DHEADERS=DIR -DTORCH=VERSION -DTITAN=VERSION -DOUTPUT=FILE -P build_stamp.cmake
# Writes titan/core/build_stamp.h. This header stamps every program and shared object that registers something with the build of LibTitan's
# headers that it was compiled with. The file is rewritten only if its contents change.
file(GLOB_RECURSE headers ${HEADERS}/titan/*.h)
list(SORT headers)
set(all "")
foreach(header IN LISTS headers)
  file(SHA256 ${header} hash)
  string(APPEND all ${hash})
endforeach()
string(SHA256 hash "${all}")
string(SUBSTRING ${hash} 0 12 build)
set(text "#pragma once

// Generated. The build of LibTitan that this file was compiled with: experimental.custom_import refuses any other.
#define TITAN_BUILD \"LibTitan ${TITAN} (build ${build}) with LibTorch ${TORCH}\"

namespace titan::detail {
[[gnu::used]] static const char kBuildStamp[] = \"titan build stamp: \" TITAN_BUILD \";\";
}  // namespace titan::detail
")
set(before "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} before)
endif()
if(NOT before STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
