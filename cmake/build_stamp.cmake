# cmake -DHEADERS=DIR -DTORCH=VERSION -DTITAN=VERSION -DOUTPUT=FILE -P build_stamp.cmake
# Writes titan/core/build_stamp.h, which puts into every program and shared object that registers something which build of LibTitan's
# headers it was compiled against. The file changes only with its contents.
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

// Generated. Which build of LibTitan this was compiled against: experimental.custom_import refuses another one.
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
