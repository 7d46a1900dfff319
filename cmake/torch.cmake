# The imported target gnomon::torch_sdk for the PyTorch of an interpreter. Used by the build, and by
# the package that is installed.
#
# find_package(Torch) is not used: on a CUDA wheel it asks for a CUDA toolkit, which nothing here
# needs.

# Sets `release` to the releases of PyTorch that one build serves: 2.15 for 2.15.0, 2.15.1+cpu and so
# on, which have the same ABI. A version before its release stands for itself.
function(gnomon_torch_release version release)
  set(${release} ${version} PARENT_SCOPE)
  if(version MATCHES "^([0-9]+\\.[0-9]+)\\.[0-9]+(\\+.*)?$")
    set(${release} ${CMAKE_MATCH_1} PARENT_SCOPE)
  endif()
endfunction()

# Makes the target and sets `version` to that PyTorch's version. Where there is none that will do,
# makes no target and sets `error` to a sentence; else to "".
function(gnomon_find_torch python version error)
  set(${error} "" PARENT_SCOPE)
  if(GNOMON_TORCH_PACKAGE)
    # A wheel of PyTorch that was only unpacked, which may be unable to run here.
    set(folder ${GNOMON_TORCH_PACKAGE})
    file(STRINGS ${folder}/version.py found REGEX "^__version__ = ")
    string(REGEX REPLACE "^__version__ = '(.*)'$" "\\1" found "${found}")
    set(cxx11_abi 1)
  else()
    # Without the current folder, where something else may be called torch.
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
  # -fPIC everywhere, so that libraries and executables can share one precompiled header.
  target_compile_options(gnomon::torch_sdk INTERFACE -fPIC)
  target_link_directories(gnomon::torch_sdk INTERFACE ${folder}/lib)
  # --no-as-needed: the registrations of libtorch count, even where no symbol of it is used.
  target_link_options(gnomon::torch_sdk INTERFACE LINKER:--no-as-needed)
  # Torch's folder comes first in the run path, so that its libgomp is the one that is loaded. A
  # wheel finds it from where it lies itself.
  if(NOT GNOMON_WHEEL)
    target_link_options(gnomon::torch_sdk INTERFACE LINKER:-rpath,${folder}/lib)
  endif()
  target_link_libraries(gnomon::torch_sdk INTERFACE torch torch_cpu c10)
endfunction()
