# The interface target gnomon::torch for the PyTorch of GNOMON_PYTHON.
#
# find_package(Torch) is not used: on a CUDA wheel it asks for a CUDA toolkit, which nothing here
# needs.

execute_process(
  COMMAND
    ${GNOMON_PYTHON} -c
    "import torch, os; print(os.path.dirname(torch.__file__), torch.__version__, int(torch.compiled_with_cxx11_abi()), sep='\\n')"
  OUTPUT_VARIABLE torch_facts
  ERROR_VARIABLE torch_errors
  RESULT_VARIABLE torch_result
  OUTPUT_STRIP_TRAILING_WHITESPACE
)
if(NOT torch_result EQUAL 0)
  message(
    FATAL_ERROR
    "${GNOMON_PYTHON} cannot import torch. Run scripts/setup, set GNOMON_PYTHON to an "
    "interpreter with PyTorch 2.11 or newer, or configure with -DGNOMON_TORCH=OFF.\n${torch_errors}"
  )
endif()
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 GNOMON_TORCH_DIR)
list(GET torch_facts 1 GNOMON_TORCH_VERSION)
list(GET torch_facts 2 torch_cxx11_abi)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" torch_release ${GNOMON_TORCH_VERSION})
if(torch_release VERSION_LESS 2.11)
  message(
    FATAL_ERROR
    "PyTorch ${GNOMON_TORCH_VERSION} of ${GNOMON_PYTHON} is too old: gnomon needs 2.11 or newer"
  )
endif()
message(STATUS "PyTorch ${GNOMON_TORCH_VERSION} at ${GNOMON_TORCH_DIR}")

add_library(gnomon_torch_sdk INTERFACE)
add_library(gnomon::torch ALIAS gnomon_torch_sdk)
target_include_directories(
  gnomon_torch_sdk
  SYSTEM
  INTERFACE ${GNOMON_TORCH_DIR}/include ${GNOMON_TORCH_DIR}/include/torch/csrc/api/include
)
target_compile_definitions(gnomon_torch_sdk INTERFACE _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
# at::parallel_for is silently serial in a file compiled without OpenMP. -fPIC everywhere, so that
# libraries and executables can share one precompiled header.
target_compile_options(gnomon_torch_sdk INTERFACE -fopenmp -fPIC)
target_link_directories(gnomon_torch_sdk INTERFACE ${GNOMON_TORCH_DIR}/lib)
# Torch's folder comes first in the run path, so that its libgomp is the one that is loaded.
# --no-as-needed: the registrations of libtorch count, even where no symbol of it is used.
target_link_options(
  gnomon_torch_sdk
  INTERFACE LINKER:--no-as-needed -fopenmp LINKER:-rpath,${GNOMON_TORCH_DIR}/lib
)
target_link_libraries(gnomon_torch_sdk INTERFACE torch torch_cpu c10)
