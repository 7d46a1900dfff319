"""Mutation-tests the CUDA kernels: applies the mutants in errors.txt, one at a time.

The tests in the emulator must detect each mutant. This needs a build of gnomon_cuda_tests (--build)
and a few seconds per mutant.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))
from plant import Planted, PlantError, read_errors, select  # noqa: E402

# The pair functions that occur in test filters, and their structs.
STRUCTS = {
    "dot": "Dot",
    "gaussian": "Gaussian",
    "laplacian": "Laplacian",
    "penumbral": "Penumbral",
    "softcap": "Softcap",
    "umbral": "Umbral",
}
HERE = Path(__file__).resolve().parent


def included(text: str) -> set[str]:
    """The files of src/cuda that a source includes, directly or indirectly."""
    files: set[str] = set()
    names = re.findall(r'#include "cuda/(\w+\.cuh)"', text)
    while names:
        if (name := names.pop()) not in files:
            files.add(name)
            source = (ROOT / "src" / "cuda" / name).read_text()
            names += re.findall(r'#include "cuda/(\w+\.cuh)"', source)
    return files


class Builder:
    """Compiles the kernels that contain a mutant, and links them with the objects of the tests."""

    def __init__(self, build: Path, compiler: str, flags: list[str]) -> None:
        self.compiler = compiler
        self.flags = flags
        self.generated = build / "generated" / "gnomon_cuda_tests"
        folder = build / "tests" / "CMakeFiles"
        self.emulation = folder / "gnomon_cuda_emulation.dir" / "cuda"
        self.core = build / "lib" / "libgnomon_core.a"
        if not (build / "bin" / "gnomon_cuda_tests").exists() or not self.core.exists():
            raise SystemExit(f"{build}: gnomon_cuda_tests has not been built")
        commands = json.loads((build / "compile_commands.json").read_text())
        self.objects = [
            *(
                build / entry["output"]
                for entry in commands
                if re.search(r"gnomon_cuda_(tests|compiler)\.dir", entry["output"])
            ),
            *self.emulation.glob("emulation.cc.o"),
            *self.emulation.glob("emulated_wgmma.cc.o"),
            *self.emulation.glob("primitives_program.cc.o"),
        ]

    def compile(self, folder: Path, source: Path) -> Path:
        """Compiles a source with the kernels in folder/src and returns the object file."""
        target = folder / f"{source.stem}.o"
        includes = [folder / "src", ROOT / "src", ROOT / "include", HERE]
        command = [self.compiler, "-std=c++20", "-O1", "-ffp-contract=off", "-w", *self.flags]
        command += [f"-I{path}" for path in includes]
        subprocess.run([*command, "-c", source, "-o", target], check=True)
        return target

    def build(self, folder: Path, changed: str, structs: list[str]) -> Path:
        """Builds the test program with the kernels in folder/src, in which the file `changed` is
        modified."""
        sources = [self.generated / f"emulated_{struct}.cc" for struct in structs]
        objects = [self.compile(folder, source) for source in sources]
        for source in (HERE / "emulated_rows.cc", HERE / "emulated_primitives.cc"):
            text = source.read_text()
            if "primitive_calls.cuh" in text:
                text += (HERE / "primitive_calls.cuh").read_text()
                text += (HERE / "wgmma_calls.cuh").read_text()
            if changed in included(text):
                objects.append(self.compile(folder, source))
            else:
                objects.append(self.emulation / f"{source.name}.o")
        program = folder / "tests"
        libraries = ["-lhwy", "-lgtest", "-lgtest_main", "-lpthread"]
        command = [self.compiler, *self.flags, *objects, *self.objects, self.core, *libraries]
        subprocess.run([*command, "-o", program], check=True)
        return program


def failed_test(program: Path, tests: str) -> str | None:
    """The first failing test, the exit code of a crashed program, or None if all tests pass."""
    command = [program, f"--gtest_filter={tests}", "--gtest_fail_fast"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if "[ RUN " not in run.stdout:
        raise SystemExit(f"no test matches {tests}")
    if run.returncode == 0:
        return None
    failed = re.search(r"\[  FAILED  \] (\S+?),? ", run.stdout)
    return failed[1] if failed else f"return code {run.returncode}"


def structs_of(error: Planted) -> list[str]:
    names = re.findall("[a-z]+", error.tests)
    return [struct for name, struct in STRUCTS.items() if name in names]


def filter_of(tests: str) -> str:
    """Removes the pair functions from the names of tests that do not have them as parameters."""
    return re.sub(r"((?:WideHeads|KeyBias|Shift|HopperShift)Test\.\*|Near\*)[a-z+]+", r"\1", tests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("pattern", nargs="*", help="names of the mutants to apply; may contain *")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--compiler", default=os.environ.get("CXX", "c++"))
    parser.add_argument(
        "--flags", default="", help="additional flags for the compiler and the linker"
    )
    parser.add_argument("--list", action="store_true", help="only list the names of the mutants")
    arguments = parser.parse_args()
    errors = select(read_errors(HERE / "errors.txt"), arguments.pattern)
    planted = {error.name: error.plant((ROOT / error.file).read_text()) for error in errors}
    if arguments.list:
        print("\n".join(planted))
        return 0
    builder = Builder(arguments.build, arguments.compiler, arguments.flags.split())
    passing: set[str] = set()  # tests that pass without a mutant

    def judge(error: Planted, text: str) -> str | None:
        """Returns the test that fails with this text of the mutant's file; None if all pass."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shutil.copytree(ROOT / "src" / "cuda", folder / "src" / "cuda")
            (folder / error.file).write_text(text)
            program = builder.build(folder, Path(error.file).name, structs_of(error))
            return failed_test(program, filter_of(error.tests))

    unseen = 0
    for error in errors:
        if error.tests not in passing:
            if failed := judge(error, (ROOT / error.file).read_text()):
                raise SystemExit(f"{failed} fails without a mutant ({error.tests})")
            passing.add(error.tests)
        seen = judge(error, planted[error.name])
        print(f"{error.name}: {seen or 'NOT DETECTED'}", flush=True)
        unseen += seen is None
    print(f"{len(errors) - unseen} of {len(errors)} mutants detected")
    return 1 if unseen else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PlantError as problem:
        sys.exit(f"planted_errors.py: {problem}")
