# Kernels generated from definitions: one translation unit each, so that they compile in parallel.

set(GNOMON_CMAKE_DIR ${CMAKE_CURRENT_LIST_DIR})

# penumbral_square -> PenumbralSquare
function(gnomon_camel_case name result)
  string(REPLACE "_" ";" words ${name})
  set(camel "")
  foreach(word IN LISTS words)
    string(SUBSTRING ${word} 0 1 head)
    string(SUBSTRING ${word} 1 -1 tail)
    string(TOUPPER ${head} head)
    string(APPEND camel ${head}${tail})
  endforeach()
  set(${result} ${camel} PARENT_SCOPE)
endfunction()

# Compiles the definition `struct` from `file` (relative to the calling CMakeLists.txt, or to an
# include folder) on the kernel template, into `target`.
function(gnomon_add_definition_kernel target struct file)
  set(GNOMON_DEFINITION_STRUCT ${struct})
  set(GNOMON_DEFINITION_FILE ${file})
  get_filename_component(GNOMON_DEFINITION_NAME ${file} NAME)
  string(REGEX REPLACE "-inl\\.h$" "" GNOMON_DEFINITION_NAME ${GNOMON_DEFINITION_NAME})
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${file})
    set(GNOMON_DEFINITION_FILE ${CMAKE_CURRENT_SOURCE_DIR}/${file})
  endif()
  set(source ${PROJECT_BINARY_DIR}/generated/${target}/kernel_${struct}.cc)
  configure_file(${GNOMON_CMAKE_DIR}/definition_kernel.cc.in ${source} @ONLY)
  target_sources(${target} PRIVATE ${source})
endfunction()

# Writes definition_list.h and adds the kernels of all `names` to `target`.
function(gnomon_add_definitions target)
  set(GNOMON_DEFINITION_ENTRIES "")
  foreach(name IN LISTS ARGN)
    gnomon_camel_case(${name} struct)
    gnomon_add_definition_kernel(${target} ${struct} definitions/${name}-inl.h)
    string(APPEND GNOMON_DEFINITION_ENTRIES " X(${struct}, ${name})")
  endforeach()
  configure_file(
    ${GNOMON_CMAKE_DIR}/definition_list.h.in
    ${PROJECT_BINARY_DIR}/generated/definition_list.h
    @ONLY
  )
endfunction()
