# gnomon_require(package name): find_package with an error that names the packages to install.
#
# name: of the library; apt, brew and conda: the packages that have it.
macro(
  gnomon_require
  package
  name
  apt
  brew
  conda
)
  find_package(${package} QUIET ${ARGN})
  if(NOT ${package}_FOUND)
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
