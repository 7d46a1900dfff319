# Defines the imported target gnomon::torch_sdk for an interpreter's PyTorch. The build and the
# installed package use it.
#
# find_package(Torch) is not used because, with a CUDA wheel, it requires a CUDA toolkit, which
# gnomon does not need.

# Sets `release` to the PyTorch release that a build supports: 2.15 for 2.15.0, 2.15.1+cpu and so on,
# which have the same ABI. A pre-release version is its own release.
function(gnomon_torch_release version release)
  set(${release} ${version} PARENT_SCOPE)
  if(version MATCHES "^([0-9]+\\.[0-9]+)\\.[0-9]+(\\.post[0-9]+)?(\\+.*)?$")
    set(${release} ${CMAKE_MATCH_1} PARENT_SCOPE)
  endif()
endfunction()

# Creates the target, sets `version` to that PyTorch's version and `error` to "". If there is no
# suitable PyTorch, creates no target and sets `error` to a message.
function(gnomon_find_torch python version error)
  set(${error} "" PARENT_SCOPE)
  if(GNOMON_TORCH_PACKAGE)
    # The PyTorch wheel was only unpacked; it may not run on this machine.
    set(folder ${GNOMON_TORCH_PACKAGE})
    file(STRINGS ${folder}/version.py found REGEX "^__version__ = ")
    string(REGEX REPLACE "^__version__ = '(.*)'$" "\\1" found "${found}")
    set(cxx11_abi 1)
  else()
    # Remove the current folder from the path, because it may contain something else named torch.
    execute_process(
      COMMAND
        ${python} -c
        "import sys; sys.path[:] = filter(None, sys.path); import torch, os; print(os.path.dirname(torch.__file__), torch.__version__, int(torch.compiled_with_cxx11_abi()), sep='\\n')"
      OUTPUT_VARIABLE facts
      ERROR_VARIABLE errors
      RESULT_VARIABLE result
      OUTPUT_STRIP_TRAILING_WHITESPACE
    )
    if(NOT result EQUAL 0)
      string(STRIP "${errors}" errors)
      set(
        ${error}
        "GNOMON_PYTHON, ${python}, cannot import torch: ${result}\n${errors}"
        PARENT_SCOPE
      )
      return()
    endif()
    string(REPLACE "\n" ";" facts "${facts}")
    list(GET facts 0 folder)
    list(GET facts 1 found)
    list(GET facts 2 cxx11_abi)
  endif()
  set(${version} ${found} PARENT_SCOPE)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" release ${found})
  if(release VERSION_LESS 2.11)
    set(
      ${error}
      "PyTorch ${found} of ${python} is too old: gnomon needs 2.11 or newer"
      PARENT_SCOPE
    )
    return()
  endif()
  message(STATUS "PyTorch ${found} at ${folder}")
  set(GNOMON_TORCH_FOLDER ${folder}/lib PARENT_SCOPE)
  if(TARGET gnomon::torch_sdk)
    return()
  endif()

  add_library(gnomon::torch_sdk INTERFACE IMPORTED)
  target_include_directories(
    gnomon::torch_sdk
    SYSTEM
    INTERFACE ${folder}/include ${folder}/include/torch/csrc/api/include
  )
  target_compile_definitions(gnomon::torch_sdk INTERFACE _GLIBCXX_USE_CXX11_ABI=${cxx11_abi})
  # With -fPIC everywhere, libraries and executables can share one precompiled header.
  target_compile_options(gnomon::torch_sdk INTERFACE -fPIC)
  target_link_directories(gnomon::torch_sdk INTERFACE ${folder}/lib)
  # --no-as-needed is required, because libtorch's registrations are needed even if none of its
  # symbols is used. Apple's linker always keeps libraries.
  if(NOT APPLE)
    target_link_options(gnomon::torch_sdk INTERFACE LINKER:--no-as-needed)
  endif()
  # PyTorch's folder comes first in the run path, so that its libgomp is loaded. In a wheel, the path
  # is relative to the library.
  if(NOT GNOMON_WHEEL)
    target_link_options(gnomon::torch_sdk INTERFACE LINKER:-rpath,${folder}/lib)
  endif()
  target_link_libraries(gnomon::torch_sdk INTERFACE torch torch_cpu c10)
endfunction()
