# Similarities, positions and encodings outside the library's tree.

# gnomon_add_terms(target files...): a library of terms, which gnomon.load_terms() and
# `gnomon compare --terms` load. Each file is one that could lie in the library's own folders: a
# definition, NAME-inl.h, or the source of a term, NAME.cc, which registers itself. Adds them to
# `target`, and makes it, a module with the file name libTARGET.so, where there is none. It needs
# the component torch. Instruction sets are chosen at run time: no -march.
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
    # Kernels have flags of their own, and see nothing of PyTorch.
    set(objects ${target}_definitions)
    add_library(${objects} OBJECT)
    set_target_properties(${objects} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    target_link_libraries(${objects} PRIVATE gnomon::kernel)
    gnomon_add_definitions(${objects} entries ${definitions})
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
    gnomon_register_similarities(${target} PAIR_FUNCTIONS ${definitions})
  endif()
  set(source ${PROJECT_BINARY_DIR}/generated/${target}/terms_library.cc)
  configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/terms_library.cc.in ${source} @ONLY)
  target_sources(${target} PRIVATE ${source})
endfunction()
