# Toolchain of `make check-macos`: cross-compiles for Macs with Apple silicon, with the compiler and
# the macOS headers that `scripts/setup macos` puts next to the build.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(place ${CMAKE_CURRENT_LIST_DIR}/../build-macos)
foreach(language C CXX)
  set(CMAKE_${language}_COMPILER_TARGET aarch64-macos.14.0)
endforeach()
set(CMAKE_C_COMPILER ${place}/site/ziglang/zig cc)
set(CMAKE_CXX_COMPILER ${place}/site/ziglang/zig c++)
# CMake requires this tool, but only an installation would run it.
set(CMAKE_INSTALL_NAME_TOOL true)
set(hwy_DIR ${place}/packages)
set(nlohmann_json_DIR ${place}/packages)
