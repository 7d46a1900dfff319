# gnomon_require(package name apt brew conda [find_package arguments] [GIT repository commit]):
# find_package; without the package, its sources are downloaded and become part of this build, unless
# GNOMON_DOWNLOAD is OFF or no repository is given: then an error names the packages to install.
#
# name: of the library; apt, brew and conda: the packages that have it; commit: a full hash, so that
# the sources are always the same.
include(FetchContent)

macro(
  gnomon_require
  package
  name
  apt
  brew
  conda
)
  cmake_parse_arguments(required "CONFIG" "" "GIT" ${ARGN})
  if(required_CONFIG)
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
      "or set CMAKE_PREFIX_PATH to the folder that it is installed in."
    )
  endif()
endmacro()

# Highway as its own package provides it, hwy::hwy; its headers are in the folder `headers`.
macro(gnomon_require_highway headers)
  # A shared library, as packages have it: libraries of terms find its symbols there.
  set(gnomon_shared_before ${BUILD_SHARED_LIBS})
  set(BUILD_SHARED_LIBS ON)
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW) # the variable counts, not only a cache entry
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
