# Defines two components for `cmake --install`: core (headers, the static library, the sources
# needed to compile a definition) and torch. The lab defines the component program.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gnomon)
set(include_dir ${CMAKE_INSTALL_INCLUDEDIR})

# The excluded headers belong to the component torch.
install(
  DIRECTORY include/gnomon
  DESTINATION ${include_dir}
  COMPONENT core
  PATTERN torch EXCLUDE
  PATTERN catalogue.h EXCLUDE
  PATTERN specification.h EXCLUDE
)
# The sources that are needed to compile a definition. The engine is in the library.
set(
  kernel_files
  base/derived_gradient-inl.h
  base/near_share.h
  core/counting.h
  core/definition_source.h
  core/double_template.cc
  core/dual_tables.h
  core/engine.h
  core/kernel_template.cc
  core/pair_function_name.h
  cpu/definition-inl.h
  cpu/double.h
  cpu/dual_rows-inl.h
  cpu/dual_table.h
  cpu/few_targets.h
  cpu/pair_rows-inl.h
  cpu/pair_table.h
  cpu/real.h
  cpu/vocabulary-inl.h
  reference/dual.h
  reference/reference.h
  reference/vocabulary.h
)
# Installs files of src below `folder` with the same relative paths; passes additional arguments to
# install().
function(gnomon_install_sources folder files)
  foreach(file IN LISTS files)
    get_filename_component(subfolder ${file} DIRECTORY)
    install(FILES src/${file} DESTINATION ${folder}/${subfolder} ${ARGN})
  endforeach()
endfunction()
gnomon_install_sources(${GNOMON_KERNEL_DIR} "${kernel_files}" COMPONENT core)
install(FILES src/definitions/README.md DESTINATION ${GNOMON_KERNEL_DIR}/definitions COMPONENT core)
install(
  TARGETS gnomon_core gnomon_headers gnomon_kernel
  EXPORT gnomonCoreTargets
  DESTINATION ${CMAKE_INSTALL_LIBDIR}
  COMPONENT core
)
install(EXPORT gnomonCoreTargets NAMESPACE gnomon:: DESTINATION ${package_dir} COMPONENT core)

configure_package_config_file(
  cmake/gnomonConfig.cmake.in
  ${PROJECT_BINARY_DIR}/generated/gnomonConfig.cmake
  INSTALL_DESTINATION ${package_dir}
)
# Before 1.0, a minor version may break compatibility.
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/generated/gnomonConfigVersion.cmake
  COMPATIBILITY SameMinorVersion
)
install(
  FILES
    ${PROJECT_BINARY_DIR}/generated/gnomonConfig.cmake
    ${PROJECT_BINARY_DIR}/generated/gnomonConfigVersion.cmake
    cmake/added_definition.cc.in
    cmake/definition_double.cc.in
    cmake/definition_kernel.cc.in
    cmake/definition_source.cc.in
    cmake/definitions.cmake
    cmake/similarity.cmake
  DESTINATION ${package_dir}
  COMPONENT core
)

if(TARGET gnomon_torch)
  install(DIRECTORY include/gnomon/torch DESTINATION ${include_dir}/gnomon COMPONENT torch)
  install(
    FILES include/gnomon/catalogue.h include/gnomon/specification.h
    DESTINATION ${include_dir}/gnomon
    COMPONENT torch
  )
  install(
    TARGETS gnomon_torch
    EXPORT gnomonTorchTargets
    DESTINATION ${CMAKE_INSTALL_LIBDIR}
    COMPONENT torch
  )
  install(EXPORT gnomonTorchTargets NAMESPACE gnomon:: DESTINATION ${package_dir} COMPONENT torch)
  install(
    FILES cmake/definition_terms.cc.in cmake/terms.cmake cmake/terms_library.cc.in cmake/torch.cmake
    DESTINATION ${package_dir}
    COMPONENT torch
  )
  # The headers that term sources include, with the same paths as in the source tree.
  install(
    DIRECTORY src/ops
    DESTINATION ${GNOMON_KERNEL_DIR}
    COMPONENT torch
    FILES_MATCHING
    PATTERN "*.h"
  )
  gnomon_install_sources(
    ${GNOMON_KERNEL_DIR}
    "base/cone_map.h;cuda/attention.h;cuda/backend.h"
    COMPONENT torch
  )
endif()

# Adds a library's headers to a component of the wheels: all headers in the folder of `header`.
function(gnomon_bundle_headers component library header)
  get_target_property(include_folders ${library} INTERFACE_INCLUDE_DIRECTORIES)
  string(REGEX REPLACE "\\$<BUILD_INTERFACE:([^>]*)>" "\\1" include_folders "${include_folders}")
  find_path(bundled_root ${header} PATHS ${include_folders} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  get_filename_component(folder ${header} DIRECTORY)
  install(
    DIRECTORY ${bundled_root}/${folder}
    DESTINATION gnomon/include
    COMPONENT ${component}
    EXCLUDE_FROM_ALL
    FILES_MATCHING
    PATTERN "*.h"
    PATTERN "*.hpp"
    PATTERN contrib EXCLUDE
    PATTERN tests EXCLUDE
  )
endfunction()

# Adds sources to a component of the wheels, for gnomon.build.
function(gnomon_bundle_sources component folder)
  install(
    DIRECTORY ${folder}
    DESTINATION gnomon/source
    COMPONENT ${component}
    EXCLUDE_FROM_ALL
    FILES_MATCHING
    PATTERN "CMakeLists.txt"
    PATTERN "*.cc"
    PATTERN "*.cmake"
    PATTERN "*.cuh"
    PATTERN "*.h"
    PATTERN "*.in"
    PATTERN "*.md"
    PATTERN licenses EXCLUDE
    PATTERN studies EXCLUDE
  )
endfunction()

# The component python contains the files of the library's wheel. Other installations exclude it.
if(TARGET gnomon_torch)
  set(GNOMON_LIBRARY_FOLDER "lib/torch-{release}")
  set(GNOMON_HEADER_FOLDERS source/include source/src include)
  set(GNOMON_SOURCE_FOLDER "")
  if(GNOMON_CORE_LIBRARY)
    set(GNOMON_SOURCE_FOLDER source)
  endif()
  configure_file(cmake/_build.py.in ${PROJECT_BINARY_DIR}/generated/wheel/_build.py @ONLY)
  set(for_wheel COMPONENT python EXCLUDE_FROM_ALL)
  install(
    DIRECTORY python/gnomon
    DESTINATION .
    ${for_wheel}
    FILES_MATCHING
    PATTERN "*.py"
    PATTERN py.typed
    PATTERN _build.py EXCLUDE
    PATTERN lab EXCLUDE
    PATTERN __pycache__ EXCLUDE
  )
  install(FILES ${PROJECT_BINARY_DIR}/generated/wheel/_build.py DESTINATION gnomon ${for_wheel})
  # The sources that gnomon.build compiles; gnomon.similarity.define reads their headers.
  install(FILES CMakeLists.txt DESTINATION gnomon/source ${for_wheel})
  foreach(folder cmake include src)
    gnomon_bundle_sources(python ${folder})
  endforeach()
  gnomon_bundle_headers(python hwy::hwy hwy/highway.h)
  gnomon_bundle_headers(python nlohmann_json::nlohmann_json nlohmann/json.hpp)
  # The libraries of a PyTorch release must find each other, the core one folder up, and PyTorch in
  # the same site-packages.
  set(GNOMON_WHEEL_RPATH "${GNOMON_ORIGIN};${GNOMON_ORIGIN}/..;${GNOMON_ORIGIN}/../../../torch/lib")
  set_target_properties(gnomon_torch PROPERTIES INSTALL_RPATH "${GNOMON_WHEEL_RPATH}")
  install(
    TARGETS gnomon_torch
    LIBRARY DESTINATION gnomon/lib/torch-${GNOMON_TORCH_RELEASE}
    ${for_wheel}
  )
  if(GNOMON_CORE_LIBRARY)
    install(FILES ${GNOMON_CORE_LIBRARY} DESTINATION gnomon/lib ${for_wheel})
  endif()
  get_target_property(highway hwy::hwy TYPE)
  if(TARGET hwy)
    install(TARGETS hwy LIBRARY DESTINATION gnomon/lib ${for_wheel})
  elseif(highway STREQUAL SHARED_LIBRARY)
    install(IMPORTED_RUNTIME_ARTIFACTS hwy::hwy LIBRARY DESTINATION gnomon/lib ${for_wheel})
  endif()
endif()
