# Flags that compile the kernels only for this machine's instruction set, which takes a third of the
# time of a build for all. The results are bitwise identical.

function(gnomon_native_flags result)
  set(program ${PROJECT_BINARY_DIR}/generated/native_target.cc)
  file(
    CONFIGURE
    OUTPUT ${program}
    CONTENT
      [[
#include <cstdint>
#include <cstdio>

#include "hwy/targets.h"

int main() {
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  std::printf("%s", hwy::TargetName(targets & -targets));
}
]]
    @ONLY
  )
  set(highway LINK_LIBRARIES hwy::hwy)
  if(DEFINED hwy_SOURCE_DIR)
    # Highway's sources were downloaded, and are not built yet.
    set(folder ${hwy_SOURCE_DIR})
    list(APPEND program ${folder}/hwy/targets.cc ${folder}/hwy/abort.cc)
    set(highway CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${folder} COMPILE_DEFINITIONS -DHWY_STATIC_DEFINE)
  endif()
  try_run(
    GNOMON_NATIVE_RUN
    GNOMON_NATIVE_COMPILED
    SOURCES ${program} ${highway}
    RUN_OUTPUT_VARIABLE target
    COMPILE_OUTPUT_VARIABLE log
  )
  if(NOT GNOMON_NATIVE_COMPILED OR NOT GNOMON_NATIVE_RUN EQUAL 0)
    message(
      FATAL_ERROR
      "GNOMON_NATIVE: cannot determine Highway's targets for this machine:\n${log}"
    )
  endif()
  # Highway's x86 targets include the AES instructions; its NEON target needs no flag.
  set(flags -march=native)
  if(target MATCHES "^AVX3")
    set(flags -march=x86-64-v4 -maes -mpclmul)
  elseif(target STREQUAL AVX2)
    set(flags -march=x86-64-v3 -maes -mpclmul)
  elseif(target STREQUAL SSE4)
    set(flags -march=x86-64-v2 -maes -mpclmul)
  endif()
  message(STATUS "Compiling kernels only for ${target} (GNOMON_NATIVE)")
  set(${result} ${flags} PARENT_SCOPE)
endfunction()
