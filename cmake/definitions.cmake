# Kernels generated from definitions: one translation unit for each, so that they compile in
# parallel.

# The structs of a definition file, all but templates. Editing the file runs CMake again.
function(gnomon_definition_structs file result)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} text)
  string(REGEX REPLACE "template <[^\n]*\nstruct " "" text "\n${text}")
  string(REGEX MATCHALL "\nstruct [A-Za-z0-9]+" structs "${text}")
  if(NOT structs)
    message(FATAL_ERROR "${file}: no struct, so no definition")
  endif()
  list(TRANSFORM structs REPLACE "\nstruct " "")
  set(${result} ${structs} PARENT_SCOPE)
endfunction()

# Makes the definitions in `files`, which the library does not list, known to FindPairFunction of a
# program that `target` is linked into.
function(gnomon_register_definitions target)
  foreach(file IN LISTS ARGN)
    gnomon_definition_structs(${file} structs)
    foreach(GNOMON_DEFINITION_STRUCT IN LISTS structs)
      set(source ${PROJECT_BINARY_DIR}/generated/${target}/added_${GNOMON_DEFINITION_STRUCT}.cc)
      configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/added_definition.cc.in ${source} @ONLY)
      target_sources(${target} PRIVATE ${source})
    endforeach()
  endforeach()
endfunction()

# Compiles each definition in `files` on the kernel template, into `target`, and sets `entries` to
# their list, " X(PenumbralSquare, penumbral_square)", by which they are known.
function(gnomon_add_definitions target entries)
  set(list "")
  foreach(GNOMON_DEFINITION_FILE IN LISTS ARGN)
    gnomon_definition_structs(${GNOMON_DEFINITION_FILE} structs)
    foreach(GNOMON_DEFINITION_STRUCT IN LISTS structs)
      string(
        REGEX REPLACE "([a-z0-9])([A-Z])"
        "\\1_\\2"
        GNOMON_DEFINITION_NAME
        ${GNOMON_DEFINITION_STRUCT}
      )
      string(TOLOWER ${GNOMON_DEFINITION_NAME} GNOMON_DEFINITION_NAME)
      set(source ${PROJECT_BINARY_DIR}/generated/${target}/kernel_${GNOMON_DEFINITION_STRUCT}.cc)
      configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/definition_kernel.cc.in ${source} @ONLY)
      target_sources(${target} PRIVATE ${source})
      string(APPEND list " X(${GNOMON_DEFINITION_STRUCT}, ${GNOMON_DEFINITION_NAME})")
    endforeach()
  endforeach()
  set(${entries} "${list}" PARENT_SCOPE)
endfunction()
