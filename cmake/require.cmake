# gnomon_require(package name apt brew conda [find_package arguments] [GIT repository commit]):
# calls find_package. If the package is missing, downloads its sources and builds them with this
# project. If GNOMON_DOWNLOAD is OFF or no repository is given, an error names the packages to
# install.
#
# name: the library's name; apt, brew and conda: the packages that contain it; commit: a full hash, so
# that the sources are always the same.
include(FetchContent)

# A wheel contains the headers (python -m gnomon.build). Highway's library is loaded with the
# kernels.
if(GNOMON_BUNDLED)
  foreach(target hwy::hwy nlohmann_json::nlohmann_json CLI11::CLI11)
    add_library(${target} INTERFACE IMPORTED)
    target_include_directories(${target} SYSTEM INTERFACE ${GNOMON_BUNDLED})
  endforeach()
endif()

macro(
  gnomon_require
  package
  name
  apt
  brew
  conda
)
  cmake_parse_arguments(required "CONFIG" "" "GIT" ${ARGN})
  if(TARGET ${package}::${package})
    set(${package}_FOUND TRUE) # in GNOMON_BUNDLED
  elseif(required_CONFIG)
    find_package(${package} QUIET CONFIG)
  else()
    find_package(${package} QUIET)
  endif()
  if(NOT ${package}_FOUND AND required_GIT AND GNOMON_DOWNLOAD)
    list(GET required_GIT 0 repository)
    list(GET required_GIT 1 commit)
    message(STATUS "${name} was not found: using ${repository} at ${commit}")
    FetchContent_Declare(
      ${package}
      GIT_REPOSITORY ${repository}
      GIT_TAG ${commit}
      GIT_PROGRESS ON
      SYSTEM
    )
    FetchContent_MakeAvailable(${package})
  elseif(NOT ${package}_FOUND)
    message(
      FATAL_ERROR
      "${name} was not found. Install it with one of:\n"
      "  apt-get install ${apt}\n"
      "  brew install ${brew}\n"
      "  conda install -c conda-forge ${conda}\n"
      "or set CMAKE_PREFIX_PATH to its installation folder."
    )
  endif()
endmacro()

# Provides the target hwy::hwy, like Highway's own package; sets `headers` to the include folder.
macro(gnomon_require_highway headers)
  # Highway is built as a shared library, as in the packages, so that term libraries find its
  # symbols.
  set(gnomon_shared_before ${BUILD_SHARED_LIBS})
  set(BUILD_SHARED_LIBS ON)
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW) # respect the variable, not only a cache entry
  set(HWY_ENABLE_CONTRIB OFF CACHE BOOL "")
  set(HWY_ENABLE_EXAMPLES OFF CACHE BOOL "")
  set(HWY_ENABLE_TESTS OFF CACHE BOOL "")
  gnomon_require(
    hwy
    Highway
    libhwy-dev
    highway
    libhwy
    CONFIG
    GIT
      https://github.com/google/highway
      2607d3b5b0113992fe84d3848859eae13b3b52c1 # 1.4.0
  )
  set(BUILD_SHARED_LIBS ${gnomon_shared_before})
  if(NOT TARGET hwy::hwy)
    add_library(hwy::hwy ALIAS hwy)
  endif()
  if(DEFINED hwy_SOURCE_DIR)
    set(${headers} ${hwy_SOURCE_DIR})
  else()
    get_target_property(${headers} hwy::hwy INTERFACE_INCLUDE_DIRECTORIES)
  endif()
endmacro()
