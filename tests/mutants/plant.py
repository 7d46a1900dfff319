#!/usr/bin/env python3
"""Mutation-tests the core: applies mutants to a copy of the tree, one at a time, and runs the
tests.

Prints the core test that detects each mutant in errors.txt (in this folder). Exits with 0 if at
least 90% of the mutants are detected, and with 1 if fewer are detected or an entry does not match
the code.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAST_SHARE = 0.9
# Flags for fast compilation: little optimisation, and only this machine's instruction set.
FLAGS = "-Og -march=native -DHWY_COMPILE_ONLY_STATIC -w"
TARGET = "gnomon_core_tests"
# Most of the time is spent compiling. A mutant is first compiled into some of the objects that it
# affects: of those per definition, a definition without tokens (whose object comes first, so that
# functions shared by objects are linked from it), one with products and one with distances; of the
# others, that of the engine for floats if a kernel's header is changed.
KERNELS = {"kernel_Additive.cc.o", "kernel_Dot.cc.o", "kernel_Umbral.cc.o"}
ENGINE = "engine.cc.o"
# A mutant may make tests run or wait forever. Tests are stopped if they need more CPU time than a
# multiple of the time without a mutant (at least LIMIT_S), or if they are almost idle for too long.
# CPU time does not depend on how busy the machine is.
LIMIT_S = 300
PATIENCE = 3
IDLE_S = 60


class PlantError(Exception):
    """The reason why a mutant cannot be applied or judged, in one line."""


class NoEffectError(Exception):
    """The mutant changes no object file, such as code for another instruction set."""


@dataclass
class Planted:
    """A mutant: lines of one file, and their replacement."""

    name: str
    file: str
    tests: str  # a GoogleTest filter: the tests to run first
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def plant(self, text: str) -> str:
        """Applies the mutant to the text of the file."""
        # Only entire lines match, anywhere in the file.
        lines = f"\n{text}"
        old, new = ("".join(f"\n{line}" for line in part) for part in (self.old, self.new))
        count = len(re.findall(re.escape(old) + r"(?=\n)", lines)) if self.old else 0
        if count != 1 or old == new:
            found = "changes nothing" if old == new else f"occurs {count} times; expected once"
            raise PlantError(f"{self.name}: its text {found} in {self.file}")
        return re.sub(re.escape(old) + r"(?=\n)", lambda _: new, lines)[1:]


def read_errors(path: Path) -> list[Planted]:
    """Reads the mutants from a file whose first lines describe the format."""
    errors: list[Planted] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := re.fullmatch(r"\[([a-z0-9-]+)\] (\S+) (\S+)", line):
            errors.append(Planted(match[1], match[2], match[3]))
        elif errors and line[:1] in (" ", "-", "+"):
            if line[0] != "+":
                errors[-1].old.append(line[1:])
            if line[0] != "-":
                errors[-1].new.append(line[1:])
        elif line and not line.startswith("#"):
            raise PlantError(
                f"{path.name}:{number}: neither the first line of a mutant nor part of its text"
            )
    names = [error.name for error in errors]
    for name in names:
        if names.count(name) > 1:
            raise PlantError(f"{path.name}: {name} is defined {names.count(name)} times")
    return errors


def select(errors: list[Planted], patterns: list[str]) -> list[Planted]:
    """The mutants whose names match one of the patterns; all if there are none."""
    for pattern in patterns:
        if not any(fnmatch.fnmatch(error.name, pattern) for error in errors):
            raise PlantError(f"no mutant is named {pattern}; --list lists all names")
    return [e for e in errors if not patterns or any(fnmatch.fnmatch(e.name, p) for p in patterns)]


def copy_tree(to: Path) -> None:
    """Copies the tree to a folder; unchanged files keep their modification times."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for path in list(to.rglob("*")):
        if path.is_file() and str(path.relative_to(to)) not in files:
            path.unlink()
    for name in files:
        data = (ROOT / name).read_bytes()
        copy = to / name
        if copy.is_file() and copy.read_bytes() == data:
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)


def processor_s(pid: int) -> float:
    """The CPU time of a process in seconds; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Workshop:
    """A copy of the tree and its build."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.tree = folder / "tree"
        self.build_folder = folder / "build"
        self.jobs = jobs
        self.limit_s = float("inf")  # until the tests have run without a mutant
        self.tests_s = 0.0  # CPU time of the last test run
        copy_tree(self.tree)
        # Use the project's own tools if this program runs in their environment.
        tools = Path(sys.executable).parent
        cmake, ninja = (str(tools / t) if (tools / t).exists() else t for t in ("cmake", "ninja"))
        self.cmake, self.ninja = cmake, ninja
        command = [cmake, "-S", str(self.tree), "-B", str(self.build_folder), "-G", "Ninja"]
        command += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
        command += ["-DCMAKE_BUILD_TYPE=None", "-DGNOMON_TORCH=OFF"]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
            raise PlantError("the copy of the tree cannot be configured")

    def build(self) -> bool:
        command = [self.cmake, "--build", str(self.build_folder), "--target", TARGET]
        command += ["--parallel", str(self.jobs)]
        with (self.build_folder / "build.log").open("w") as log:
            return subprocess.run(command, stdout=log, stderr=log).returncode == 0

    def failed_test(self, tests: str) -> str | None:
        """The first failing test, or None."""
        command = [str(self.build_folder / "bin" / TARGET), f"--gtest_filter={tests}"]
        command += ["--gtest_fail_fast", "--gtest_color=no"]
        code, output = self.run_tests(command)
        end = " (crash)" if code is not None else " (hangs)"
        if "[==========] Running 0 tests" in output:
            raise PlantError(f"no test matches {tests}")
        if code == 0:
            return None
        if failed := re.findall(r"^\[  FAILED  \] (\w\S*?),? ", output, re.MULTILINE):
            return failed[0]
        begun = re.findall(r"^\[ RUN      \] (\S+)", output, re.MULTILINE)
        return (begun[-1] if begun else "the program's start") + end

    def run_tests(self, command: list[str]) -> tuple[int | None, str]:
        """Runs a test program and returns its exit status and output; the status is None if it hung
        and was stopped."""
        with tempfile.TemporaryFile("w+") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log)
            self.tests_s, checked, checked_s = 0.0, time.monotonic(), 0.0
            while run.poll() is None:
                time.sleep(0.1)
                self.tests_s = max(self.tests_s, processor_s(run.pid))
                idle = False
                if time.monotonic() - checked > IDLE_S:
                    # Threads that wait for each other wake up occasionally, so their CPU time is
                    # not zero.
                    idle = self.tests_s - checked_s < IDLE_S / 20
                    checked, checked_s = time.monotonic(), self.tests_s
                if self.tests_s > self.limit_s or idle:
                    run.kill()
                    run.wait()
                    break
            log.seek(0)
            output = log.read()
        hangs = run.returncode == -signal.SIGKILL
        return (None if hangs else run.returncode), output

    def including(self, file: Path) -> list[Path]:
        """Returns the objects of all sources that include a file."""
        command = [self.ninja, "-C", str(self.build_folder), "-t", "deps"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        objects = []
        for block in listed.split("\n\n"):
            name, *files = block.splitlines() or [""]
            if str(file) in (os.path.normpath(self.build_folder / f.strip()) for f in files):
                objects.append(self.build_folder / name.split(": #deps")[0])
        return objects

    def contents(self, file: Path) -> dict[Path, bytes]:
        """Returns digests of the objects of all sources that include a file."""
        return {path: hashlib.sha256(path.read_bytes()).digest() for path in self.including(file)}

    def objects(self, file: Path) -> list[Path]:
        """Returns the objects to rebuild first if a file changes: all that include it, or a few."""
        objects = self.including(file)
        names = {path.name for path in objects}
        kernel = names & KERNELS
        engine = names & {ENGINE} if file.parent.name == "cpu" else set()

        def is_rebuilt(path: Path) -> bool:
            # Objects that the previous mutant affected are missing until the next build.
            if not path.exists():
                return True
            representing = kernel if path.name.startswith("kernel_") else engine
            return not representing or path.name in representing

        return [path for path in objects if is_rebuilt(path)]

    def judge(self, error: Planted) -> str | None:
        """Applies a mutant and reverts it; returns the test that detects it, or None."""
        path = self.tree / error.file
        text = path.read_text()
        before = path.stat()
        objects = self.objects(path)

        def write(content: str) -> None:
            # Ninja compares modification times and builds missing files, so it rebuilds only these
            # objects.
            path.write_text(content)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            for built in objects:
                built.unlink(missing_ok=True)

        try:
            write(error.plant(text))
            if failed := self.failed_after_build(error.tests):
                return failed
            os.utime(path)  # rebuild all objects, and run all tests
            failed = self.failed_after_build("*")
            planted = self.contents(path)
        finally:
            if path.stat().st_mtime_ns == before.st_mtime_ns:
                write(text)
            else:
                path.write_text(text)
                if not self.build():
                    raise PlantError(f"the tree itself does not compile; see {self.build_folder}")
        if failed is None and planted and self.contents(path) == planted:
            raise NoEffectError
        if failed and self.failed_test(failed.split()[0]):
            raise PlantError(f"{failed} also fails without the mutant")
        return failed

    def failed_after_build(self, tests: str) -> str | None:
        if not self.build():
            raise PlantError(f"does not compile; see {self.build_folder}/build.log")
        return self.failed_test(tests)


def check(errors: list[Planted]) -> list[str]:
    """Finds mutants that do not match the code, before any is applied, and returns their errors."""
    wrong = []
    for error in errors:
        path = ROOT / error.file
        try:
            if not path.is_file():
                raise PlantError(f"{error.name}: no file {error.file}")
            error.plant(path.read_text())
        except PlantError as problem:
            wrong.append(str(problem))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("pattern", nargs="*", help="names of the mutants to apply; may contain *")
    parser.add_argument("--list", action="store_true", help="only list the names of the mutants")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="parallel compiler processes"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build-mutants", help="folder for the copy"
    )
    args = parser.parse_args()

    errors = select(read_errors(Path(__file__).with_name("errors.txt")), args.pattern)
    if wrong := check(errors):
        raise PlantError("\n".join(wrong))
    width = max(len(error.name) for error in errors)
    if args.list:
        for error in errors:
            print(f"{error.name:{width}}  {error.file}")
        return 0

    workshop = Workshop(args.folder.resolve(), args.jobs)
    if not workshop.build():
        raise PlantError(f"the tree itself does not compile; see {workshop.build_folder}/build.log")
    if failed := workshop.failed_test(":".join({error.tests for error in errors})):
        raise PlantError(f"the tree itself fails {failed}")
    workshop.limit_s = max(LIMIT_S, PATIENCE * workshop.tests_s)
    seen = 0
    broken = 0
    judged = len(errors)
    for error in errors:
        start = time.monotonic()
        try:
            test = workshop.judge(error)
            seen += test is not None
            verdict = f"detected by {test}" if test else "NOT DETECTED"
        except NoEffectError:
            judged -= 1
            verdict = "changes no object file on this machine; not counted"
        except PlantError as problem:
            broken += 1
            verdict = str(problem)
        print(f"{error.name:{width}}  {time.monotonic() - start:4.0f} s  {verdict}", flush=True)
    print(f"{seen} of {judged} mutants detected ({seen / max(judged, 1):.0%})")
    return 0 if judged > 0 and seen >= LEAST_SHARE * judged and broken == 0 else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PlantError as problem:
        sys.exit(f"plant.py: {problem}")
