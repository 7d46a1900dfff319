# Builds similarities, positions and encodings outside the library's source tree.

# gnomon_add_terms(target files...) builds a term library for gnomon.load_terms() and
# `gnomon compare --terms`. Each file is written like those in the library's own folders: either a
# definition, NAME-inl.h, or the source of a term, NAME.cc, which registers itself. The files are
# added to `target`. If there is no such target, it is created as a module with the file name
# libTARGET.so. The component torch is required. Instruction sets are chosen at run time: do not use
# -march.
function(gnomon_add_terms target)
  if(NOT TARGET gnomon::torch)
    message(FATAL_ERROR "gnomon_add_terms needs find_package(gnomon COMPONENTS torch)")
  endif()
  if(NOT TARGET ${target})
    add_library(${target} MODULE)
  endif()
  set(definitions "")
  foreach(file IN LISTS ARGN)
    get_filename_component(path ${file} ABSOLUTE)
    if(file MATCHES "-inl\\.h$")
      list(APPEND definitions ${path})
    else()
      target_sources(${target} PRIVATE ${path})
    endif()
  endforeach()
  target_link_libraries(${target} PRIVATE gnomon::torch)
  target_include_directories(
    ${target}
    PRIVATE $<TARGET_PROPERTY:gnomon::kernel,INTERFACE_INCLUDE_DIRECTORIES>
  )
  if(definitions)
    # Kernels have separate flags and are compiled without PyTorch.
    set(objects ${target}_definitions)
    add_library(${objects} OBJECT)
    set_target_properties(${objects} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    target_link_libraries(${objects} PRIVATE gnomon::kernel)
    gnomon_add_definitions(${objects} entries DOUBLES ${definitions})
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
    gnomon_register_similarities(${target} PAIR_FUNCTIONS ${definitions})
  endif()
  set(source ${PROJECT_BINARY_DIR}/generated/${target}/terms_library.cc)
  configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/terms_library.cc.in ${source} @ONLY)
  target_sources(${target} PRIVATE ${source})
endfunction()
