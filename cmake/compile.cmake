# Flags and functions for the project's own code: the library, its tests, and the lab.

add_library(gnomon_flags INTERFACE)
target_compile_options(
  gnomon_flags
  INTERFACE
    -Wall
    -Wextra
    -Wpedantic
    -Wshadow
    -Wnon-virtual-dtor
    -Woverloaded-virtual
    # GCC rejects designators that are out of order.
    $<$<CXX_COMPILER_ID:Clang,AppleClang>:-Werror=reorder-init-list>
    $<$<BOOL:${GNOMON_WERROR}>:-Werror>
)

# Without optimization, code that includes PyTorch compiles in a third of the time. The kernels do
# not include it.
add_library(gnomon_torch_flags INTERFACE)
target_compile_options(gnomon_torch_flags INTERFACE $<$<BOOL:${GNOMON_QUICK}>:-O0>)

# Tests call the library so often that a little optimization saves more time than it costs. Clang
# would refuse the precompiled header, which defines no __OPTIMIZE__; GCC would ignore it.
set(clang_quick $<AND:$<BOOL:${GNOMON_QUICK}>,$<CXX_COMPILER_ID:Clang>>)
add_library(gnomon_quick_library_flags INTERFACE)
target_compile_options(
  gnomon_quick_library_flags
  INTERFACE $<${clang_quick}:-O1> "$<${clang_quick}:SHELL:-Xclang -fno-validate-pch>"
)

# Compiles `target` with a precompiled torch/torch.h, which all such targets share.
function(gnomon_stands_on_torch target)
  if(NOT TARGET gnomon_torch_pch)
    set(source ${PROJECT_BINARY_DIR}/generated/torch_pch.cc)
    file(CONFIGURE OUTPUT ${source} CONTENT "")
    add_library(gnomon_torch_pch OBJECT ${source})
    target_link_libraries(
      gnomon_torch_pch
      PRIVATE gnomon::torch_sdk gnomon_flags gnomon_torch_flags gnomon::headers
    )
    target_precompile_headers(gnomon_torch_pch PRIVATE <torch/torch.h>)
    # Compiling a file that includes torch/torch.h takes up to 1.5 GB of memory.
    cmake_host_system_information(RESULT memory_mb QUERY TOTAL_PHYSICAL_MEMORY)
    math(EXPR torch_jobs "${memory_mb} / 2500")
    if(torch_jobs LESS 1)
      set(torch_jobs 1)
    endif()
    set_property(GLOBAL APPEND PROPERTY JOB_POOLS torch=${torch_jobs})
  endif()
  target_link_libraries(${target} PRIVATE gnomon_flags gnomon_torch_flags)
  target_precompile_headers(${target} REUSE_FROM gnomon_torch_pch)
  set_target_properties(${target} PROPERTIES JOB_POOL_COMPILE torch)
endfunction()

# Compiling the headers of PyTorch, GoogleTest or JSON takes longer than compiling most files, so
# batches of files share this cost. Files that define the same names (terms, tasks) have separate
# namespaces.
function(gnomon_compiles_together target)
  # Code that includes PyTorch is not optimized with GNOMON_QUICK, so batches are larger, at most two
  # per target: GCC needs 11 s for the headers' templates alone.
  get_target_property(precompiled ${target} PRECOMPILE_HEADERS_REUSE_FROM)
  set(batch 16)
  if(GNOMON_QUICK AND precompiled)
    get_target_property(files ${target} SOURCES)
    list(LENGTH files count)
    math(EXPR batch "(${count} + 1) / 2")
    if(batch LESS 48)
      set(batch 48)
    endif()
  endif()
  # Relative paths in unity files allow a compiler cache to match them in another clone.
  set_target_properties(
    ${target}
    PROPERTIES
      UNITY_BUILD ${GNOMON_UNITY}
      UNITY_BUILD_BATCH_SIZE ${batch}
      UNITY_BUILD_RELOCATABLE ON
  )
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
