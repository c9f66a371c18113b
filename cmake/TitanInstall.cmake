# cmake --install installs the libraries, the program, the headers, and the package files for find_package(Titan CONFIG).
include(CMakePackageConfigHelpers)

set(titan_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/Titan")
set_target_properties(libtitan_train PROPERTIES EXPORT_NAME train)
set_target_properties(libtitan PROPERTIES EXPORT_NAME titan)
install(TARGETS libtitan_train libtitan EXPORT TitanTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS titan RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(TARGET titan_cuda)
  install(TARGETS titan_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY include/titan DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
# Where titan plan looks for devices.
install(DIRECTORY configs/devices DESTINATION ${CMAKE_INSTALL_DATADIR}/titan)
install(FILES ${titan_stamp} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/titan/core)
install(EXPORT TitanTargets NAMESPACE Titan:: DESTINATION ${titan_package_dir})
configure_package_config_file(cmake/TitanConfig.cmake.in "${CMAKE_BINARY_DIR}/TitanConfig.cmake" INSTALL_DESTINATION ${titan_package_dir})
write_basic_package_version_file("${CMAKE_BINARY_DIR}/TitanConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/TitanConfig.cmake" "${CMAKE_BINARY_DIR}/TitanConfigVersion.cmake" cmake/TitanTorch.cmake
        DESTINATION ${titan_package_dir})
