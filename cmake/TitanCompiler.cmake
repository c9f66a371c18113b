# ccache where it is (it must not be needed), and the fastest linker at hand: linking is most of what one touched file costs.
find_program(TITAN_CCACHE ccache)
if(TITAN_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers hide their own macros and times from ccache.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${TITAN_CCACHE})
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
endif()
find_program(TITAN_MOLD mold)
find_program(TITAN_LLD ld.lld)
if(TITAN_MOLD)
  add_link_options(-fuse-ld=mold)
elseif(TITAN_LLD)
  add_link_options(-fuse-ld=lld)
endif()
# Symbols that nobody needs at run time cost start-up; undefined ones are found at link time.
add_link_options(-Wl,--as-needed)
