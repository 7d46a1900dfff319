# `make help` lists the targets. Each target performs the setup that it needs; nothing is done twice.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

BIN := .venv/bin
CMAKE := $(BIN)/cmake
NINJA := $(CURDIR)/$(BIN)/ninja
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
# PYTHON=/path/to/python: the interpreter for .venv; its PyTorch is used if it has one.
PYTHON ?=
export PYTHON
# The mutants that `make mutants` or `make mutants-cuda` runs: names, which may contain *; default: all.
ONLY ?=
# For `make demo`: the text to train on; default: the source of Python's standard library.
# For `make study`: the folder with the study's data.
DATA ?=
# The study that `make study` runs.
NAME ?=
# The model types that `make sweep` compares again: older, all, or a class of results.
AGAIN ?= older
# The installation prefix of `make install`.
PREFIX ?= /usr/local
# ON compiles the kernels only for this machine's instruction set. OFF compiles them for all, which a
# build for other machines needs.
NATIVE ?= ON
# ON compiles the kernels with less optimization, and the operators and the lab with little or none: the
# build ends sooner, and short calls are slower. Default: OFF, or for `make demo` ON unless there is a
# build.
QUICK ?= $(if $(filter demo,$(MAKECMDGOALS)),$(or $(call cached,QUICK),ON),OFF)

# ON configures the C++ tests. Default: ON, or for `make demo` OFF unless there is a build.
TESTS ?= $(if $(filter demo,$(MAKECMDGOALS)),$(or $(call cached,TESTS),OFF),ON)

configure = $(CMAKE) -S . -G Ninja -DCMAKE_MAKE_PROGRAM="$(NINJA)"
ctest = $(BIN)/ctest --output-on-failure --no-tests=error --parallel $(JOBS)
pytest = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile tests/python

cc_files = $(shell git ls-files --cached --others --exclude-standard '*.c' '*.cc' '*.h' '*.cuh')
cmake_files = $(shell git ls-files --cached --others --exclude-standard '*.cmake' '*CMakeLists.txt')
core_files = $(filter-out %_template.cc,$(filter src/base/% src/core/% src/cpu/%, \
	$(filter %.cc,$(cc_files))))

# A PYTHON that differs from the interpreter of .venv triggers the setup again.
ifneq ($(PYTHON),)
ifneq ($(shell command -v "$(PYTHON)"),$(shell cat .venv/.python 2>/dev/null))
.venv/.setup .venv/.setup-demo: FORCE
endif
endif

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  PYTHON=/path/to/python uses the PyTorch (2.11 or newer) of that interpreter'

.PHONY: setup
setup: .venv/.setup ## install missing system packages, create .venv, install PyTorch

.venv/.setup: scripts/setup requirements.txt
	@scripts/setup base
	@touch $@

.venv/.setup-demo: scripts/setup requirements.txt
	@scripts/setup demo
	@touch $@

.venv/.setup-test: .venv/.setup requirements-test.txt
	@scripts/setup test
	@touch $@

.venv/.setup-dev: .venv/.setup-test requirements-dev.txt
	@scripts/setup dev
	@touch $@

# A change of NATIVE, QUICK or TESTS triggers the configuration again.
cached = $(shell sed -n 's/^GNOMON_$(1):BOOL=//p' build/CMakeCache.txt 2>/dev/null)
options := NATIVE QUICK TESTS
ifneq ($(foreach name,$(options),$($(name))),$(foreach name,$(options),$(call cached,$(name))))
build/build.ninja: FORCE
endif

build/build.ninja: .venv/.setup$(if $(filter OFF,$(TESTS)),-demo)
	$(configure) -B build $(foreach name,$(options),-DGNOMON_$(name)=$($(name)))
	@touch $@

.PHONY: build
build: build/build.ninja ## build the library, the Python package and the command line
	$(CMAKE) --build build --target library_and_lab
	@ln -sfn ../../build/bin/gnomon $(BIN)/gnomon

# NAME: a file in lab/studies/. DATA: the folder with its data.
.PHONY: study
study: build ## run or resume a study and write its page (NAME=length DATA=folder)
	@$(BIN)/python lab/studies/study.py "$(NAME)" "$(DATA)"

.PHONY: install
install: build ## install for C and C++: headers, libraries, program (PREFIX=/usr/local NATIVE=OFF)
	$(CMAKE) --install build --prefix "$(PREFIX)"

# RELEASES="2.14 2.15": the PyTorch releases that the wheels support; default: all.
.PHONY: wheel
wheel: .venv/.setup-dev ## build the wheels in dist/ for several PyTorch releases (an hour)
	@JOBS=$(JOBS) scripts/wheel $(RELEASES)

.PHONY: wheel-arm
wheel-arm: .venv/.setup-dev build-arm/.setup ## build the wheels for 64-bit Arm with a cross compiler
	@JOBS=$(JOBS) scripts/wheel --arm $(RELEASES)

.PHONY: demo
demo: build ## compare positions and similarities on text (DATA=file or folder); writes to runs/
	@$(BIN)/python -m gnomon.demo $${DATA:+"$$DATA"}

.PHONY: test
test: .venv/.setup-test build ## build and run the tests for this machine's instruction set
	$(CMAKE) --build build
	$(ctest) --test-dir build
	$(pytest) -m 'not long'

.PHONY: test-long
test-long: .venv/.setup-test build ## run the long tests that `make test` omits (two hours)
	$(CMAKE) --build build --target gnomon_cuda_tests
	GNOMON_CUDA_FORMS=all $(ctest) --test-dir build --tests-regex cuda_tests
	$(pytest) -m long

# The lab as a separate project, which compiles with the public headers of the installed library.
.PHONY: test-lab
test-lab: build ## build the lab with the installed library, in build-lab
	rm -rf build-lab/prefix
	$(CMAKE) --install build --prefix build-lab/prefix
	$(CMAKE) -S lab -B build-lab/tree -G Ninja -DCMAKE_MAKE_PROGRAM="$(NINJA)" \
		-DCMAKE_PREFIX_PATH="$(CURDIR)/build-lab/prefix" -DGNOMON_PYTHON="$(CURDIR)/$(BIN)/python"
	$(CMAKE) --build build-lab/tree
	build-lab/tree/bin/gnomon list >/dev/null

.PHONY: test-fast
test-fast: .venv/.setup-test build ## run the tests, except tests that compile, start programs or train
	$(CMAKE) --build build --target gnomon_core_tests gnomon_text_tests gnomon_torch_tests \
		gnomon_lab_tests
	$(ctest) --test-dir build --tests-regex '_tests'  --exclude-regex cuda
	$(pytest) -m 'not slow and not long'

.PHONY: test-core
test-core: .venv/.setup ## build and test only the core, for all instruction sets; needs no PyTorch
	@test -e build-core/build.ninja || $(configure) -B build-core -DGNOMON_TORCH=OFF
	$(CMAKE) --build build-core
	$(ctest) --test-dir build-core

# This uses a separate clone, whose .venv has the oldest supported PyTorch.
.PHONY: test-oldest
test-oldest: ## clone the last commit and run `make test` with the oldest supported PyTorch
	@scripts/setup oldest
	$(MAKE) -C build-oldest/tree PYTHON="$(CURDIR)/build-oldest/python/bin/python" test

build-arm/.setup: scripts/setup
	@scripts/setup arm
	@touch $@

# Excluded tests restart their own process, which qemu does not support.
.PHONY: test-arm
test-arm: .venv/.setup build-arm/.setup ## build the core for 64-bit Arm and run its tests under qemu
	@test -e build-arm/tree/build.ninja || $(configure) -B build-arm/tree -DGNOMON_TORCH=OFF \
		-DCMAKE_TOOLCHAIN_FILE="$(CURDIR)/cmake/aarch64.cmake"
	$(CMAKE) --build build-arm/tree --target gnomon_core_tests gnomon_core_recipe
	GTEST_FILTER=-FirstChoiceTest.* $(ctest) --test-dir build-arm/tree --label-regex core

build-arm/.setup-python: build-arm/.setup
	@scripts/setup arm-python
	@touch $@

# Tests the contents of the wheels that `make wheel-arm` builds. qemu cannot run the tests that start
# processes or compile code (slow). The other tests take hours, so FILES selects some of them.
FILES ?= attention operators positions
.PHONY: test-arm-python
test-arm-python: .venv/.setup build-arm/.setup-python ## build for 64-bit Arm and run Python tests under qemu (FILES="attention operators")
	@JOBS=$(JOBS) scripts/wheel --stage --arm "$$(sed -nE 's/^__version__ = .([0-9]+\.[0-9]+).*/\1/p' build-arm/site/torch/version.py)"
	rm -rf build-arm/installed && mkdir build-arm/installed
	cp -r build-wheel-arm/stage/. build-wheel-arm/stage-lab/. build-arm/installed
	scripts/arm-python -m pytest -p no:cacheprovider -m 'not slow and not long' $(FILES:%=tests/python/test_%.py)

build-macos/.setup: scripts/setup
	@scripts/setup macos
	@touch $@

.PHONY: check-macos
check-macos: .venv/.setup build-macos/.setup ## compile the library for macOS (arm64) and link it with PyTorch's Mac wheel
	@test -e build-macos/tree/build.ninja || $(configure) -B build-macos/tree -DGNOMON_WHEEL=ON \
		-DGNOMON_TESTS=OFF -DCMAKE_TOOLCHAIN_FILE="$(CURDIR)/cmake/macos.cmake" \
		-DGNOMON_TORCH_PACKAGE="$(CURDIR)/build-macos/site/torch"
	$(CMAKE) --build build-macos/tree --target gnomon_torch

.PHONY: mutants
mutants: .venv/.setup ## mutation-test a copy of the core; tests must detect 90% (ONLY='graph-*')
	$(BIN)/python tests/mutants/plant.py --jobs $(JOBS) $(ONLY)

.PHONY: mutants-cuda
mutants-cuda: build/build.ninja ## mutation-test the CUDA kernels; their emulation must detect all (ONLY='tile-*')
	$(CMAKE) --build build --target gnomon_cuda_tests
	$(BIN)/python tests/cuda/planted_errors.py $(ONLY)

.PHONY: nightly
nightly: AGAIN = all
nightly: check test-long test-core test-lab sanitize sanitize-cuda test-arm check-macos test-oldest mutants mutants-cuda sweep wheel ## run the tests that take long (many hours)

# Compares only model types without current results, so an interrupted sweep can be resumed. AGAIN=all
# compares every type.
.PHONY: sweep
sweep: .venv/.setup-test build ## compare all model types of transformers, oldest and newest release; writes docs/transformers.md (an hour)
	@scripts/setup sweep
	@status=0; for release in oldest newest; do \
		build-sweep/$$release/bin/python tests/sweep/sweep.py tests/sweep/outcomes.jsonl --again $(AGAIN) \
			--jobs $(JOBS) --table docs/transformers.md || status=1; \
	done; exit $$status

.PHONY: bench
bench: .venv/.setup-test build ## run all benchmarks and rewrite docs/benchmarks.md
	$(BIN)/python benchmarks/write_page.py docs/benchmarks.md

.PHONY: thread-scaling
thread-scaling: .venv/.setup build ## bound the speed on 16, 64 and 128 threads by a simulation (10 minutes)
	build/bin/gnomon_thread_scaling

.PHONY: docs
docs: .venv/.setup-dev build ## render the documentation: build/docs/index.html
	$(BIN)/python -m sphinx --jobs $(JOBS) --fresh-env --fail-on-warning --keep-going --quiet docs build/docs

.PHONY: facades
facades: build .venv/.setup-test ## regenerate the files derived from the catalogue: classes, functions, pages
	$(BIN)/python scripts/write_facades.py

.PHONY: format
format: .venv/.setup-dev ## format all files
	$(BIN)/clang-format -i $(cc_files)
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/gersemi --quiet --in-place $(cmake_files)

.PHONY: check-format
check-format: .venv/.setup-dev ## fail if a file is not formatted
	$(BIN)/clang-format --dry-run -Werror $(cc_files)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/gersemi --check $(cmake_files)

.PHONY: check-types
check-types: .venv/.setup-dev build/build.ninja ## type-check the Python code
	$(BIN)/mypy

.PHONY: check-metadata
check-metadata: .venv/.setup-dev ## validate pyproject.toml, CITATION.cff, workflows, issue forms and the Read the Docs file
	$(BIN)/validate-pyproject pyproject.toml lab/pyproject.toml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.readthedocs .readthedocs.yaml

# clang-tidy needs most of a minute for a file that includes torch/torch.h, so it checks only the
# core, for one instruction set. One kernel represents all instances of the template.
.PHONY: check
check: check-format check-types build/build.ninja ## check formatting and types, run clang-tidy on the core
	@printf '%s\n' $(core_files) build/generated/gnomon_core_objects/kernel_Penumbral.cc | xargs -r -n 1 -P $(JOBS) \
		$(BIN)/clang-tidy -p build --quiet --extra-arg=-DHWY_COMPILE_ONLY_STATIC

# Both targets exclude PyTorch, because the sanitizers would report errors in PyTorch itself.
.PHONY: sanitize
sanitize: sanitize-address sanitize-thread ## run the core tests under the sanitizers

.PHONY: sanitize-address
sanitize-address: .venv/.setup ## run the core tests under AddressSanitizer and UBSan
	@test -e build-asan/build.ninja || $(configure) -B build-asan -DGNOMON_TORCH=OFF \
		-DGNOMON_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS='-O1 -g1'
	$(CMAKE) --build build-asan
	$(ctest) --test-dir build-asan

# Only the GPU kernels are instrumented; the core is not.
.PHONY: sanitize-cuda
sanitize-cuda: build/build.ninja ## run the emulated CUDA kernels under AddressSanitizer and UBSan
	$(CMAKE) --build build --target gnomon_cuda_sanitized
	@seq 0 $$(($(JOBS) - 1)) | xargs -P $(JOBS) -I{} env GTEST_TOTAL_SHARDS=$(JOBS) \
		GTEST_SHARD_INDEX={} build/bin/gnomon_cuda_sanitized --gtest_brief=1

.PHONY: sanitize-thread
sanitize-thread: .venv/.setup ## run the multithreaded core tests under ThreadSanitizer
	@test -e build-tsan/build.ninja || $(configure) -B build-tsan -DGNOMON_TORCH=OFF \
		-DGNOMON_SANITIZE=thread -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS='-O1 -g1'
	$(CMAKE) --build build-tsan
	GTEST_FILTER='*Thread*:*Workers*' $(ctest) --test-dir build-tsan --label-regex core

.PHONY: clean
clean: ## remove all build outputs; keep .venv
	rm -rf build build-* python/gnomon/_build.py

.PHONY: distclean
distclean: clean ## remove all build outputs and .venv
	rm -rf .venv

.PHONY: FORCE
FORCE:
