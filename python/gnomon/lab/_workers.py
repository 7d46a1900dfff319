"""Executes the runs of ``gnomon compare --workers`` and ``--cluster``, several at once.

``gnomon compare`` writes ``run COMBINATION SEED`` and ``stop`` to this program's standard input,
and reads ``done COMBINATION SEED`` and ``failed COMBINATION SEED MESSAGE`` from its standard
output. Each run is a separate process, ``gnomon compare --resume FOLDER --only COMBINATION,SEED``,
which stores its checkpoints and its result in FOLDER. If a run's process or the Dask worker that
started it is killed, the run is resumed from its last checkpoint. If the Dask scheduler or this
process is killed, no checkpoints or results are lost.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import logging
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch

from gnomon.lab._program import library_path

#: The number of times that a run may lose its worker or its process before it counts as failed.
MOST_LOSSES = 20
INTERRUPTED = 130
#: While this file exists in the folder of unfinished runs, each run stops at its next step.
STOP = "stop"
POLL_S = 0.2


def run(
    folder: str, at: str, words: list[str], threads: int, gpu: str | None, only: str
) -> tuple[int, str]:
    """Executes a run and returns its exit code and the last line of its stderr.

    Args:
        folder: the comparison's folder.
        at: the working directory.
        words: options of ``gnomon compare``.
        threads: the number of threads, unless `words` contains --threads.
        gpu: the only GPU that the run sees; None leaves all of them visible.
        only: the run, as COMBINATION,SEED.
    """
    program = pathlib.Path(__file__).with_name("_program_alone.py")
    command = [sys.executable, "-I", str(program), str(library_path()), "compare"]
    command += ["--resume", folder, "--only", only, *words]
    if "--threads" not in words:
        command += ["--threads", str(threads)]
    libraries = [str(pathlib.Path(torch.__file__).parent / "lib")]
    if inherited := os.environ.get("LD_LIBRARY_PATH"):
        libraries.append(inherited)
    environment = os.environ | {
        "GNOMON_PARENT": str(os.getpid()),
        "GNOMON_PYTHON": os.environ.get("GNOMON_PYTHON", sys.executable),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
    }
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    stop = pathlib.Path(at, folder, "unfinished", STOP)
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(
            command, cwd=at, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=errors, start_new_session=True,
        )  # fmt: skip
        asked = False
        while child.poll() is None:
            if not asked and stop.exists():
                child.send_signal(signal.SIGINT)
                asked = True
            time.sleep(POLL_S)
        errors.seek(0)
        lines = [line for line in errors if line.strip()]
    # SIGINT may end the program before it has installed its Ctrl-C handler.
    code = INTERRUPTED if child.returncode == -signal.SIGINT and asked else child.returncode
    return code, lines[-1].strip() if lines else f"exit code {code}"


class _Here:
    """Executes runs on this machine, a fixed number at a time, which share its cores and GPUs."""

    def __init__(self, workers: int, words: list[str]) -> None:
        self.threads = max(1, torch.get_num_threads() // workers)
        self.gpus = _gpus() if "cuda" in words else []
        self.numbers = itertools.count()
        self.local = threading.local()
        self.pool = concurrent.futures.ThreadPoolExecutor(workers, initializer=self._begin)

    def _begin(self) -> None:
        self.local.number = next(self.numbers)

    def _run(self, folder: str, words: list[str], only: str) -> tuple[int, str]:
        gpu = self.gpus[self.local.number % len(self.gpus)] if self.gpus else None
        return run(folder, os.getcwd(), words, self.threads, gpu, only)

    def submit(self, folder: str, words: list[str], only: str) -> Any:
        return self.pool.submit(self._run, folder, words, only)

    def cancel_waiting(self, futures: Iterable[Any]) -> None:
        for future in futures:
            future.cancel()  # has no effect on runs that have started


def _gpus() -> list[str]:
    """The GPUs that runs take in turn, by CUDA_VISIBLE_DEVICES; empty if there is only one."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else [str(n) for n in range(count)])[
        : count * (count > 1)
    ]


def _run_on_cluster(folder: str, at: str, words: list[str], only: str) -> tuple[int, str]:
    from dask.system import CPU_COUNT
    from distributed import get_worker

    threads = max(1, CPU_COUNT // get_worker().state.nthreads)
    return run(folder, at, words, threads, None, only)


class _Cluster:
    """Executes runs on the workers of a Dask scheduler."""

    def __init__(self, address: str) -> None:
        from distributed import Client

        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        self.client = Client(address, timeout=30)

    def submit(self, folder: str, words: list[str], only: str) -> Any:
        return self.client.submit(
            _run_on_cluster, folder, os.getcwd(), words, only,
            pure=False, key=f"gnomon-{only}-{time.time_ns()}",
        )  # fmt: skip

    def cancel_waiting(self, futures: Iterable[Any]) -> None:
        started = set(self.client.call_stack(list(futures)) or ())
        started |= {key for keys in self.client.processing().values() for key in keys}
        for future in futures:
            if future.key not in started:
                future.cancel()


def _tell(*words: str) -> None:
    # If ``gnomon compare`` has ended, the end of standard input stops the runs.
    with contextlib.suppress(BrokenPipeError):
        print(*words, flush=True)


class _Pool:
    """The runs in progress."""

    def __init__(self, workers: _Here | _Cluster, folder: str, words: list[str]) -> None:
        self.workers = workers
        self.folder = folder
        self.words = words
        self.stop_file = pathlib.Path(folder, "unfinished", STOP)
        self.stopping = False
        self.losses: dict[str, int] = {}
        self.futures: dict[str, Any] = {}
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()

    def submit(self, only: str) -> None:
        future = self.workers.submit(self.folder, self.words, only)
        self.futures[only] = future
        future.add_done_callback(lambda future: self.events.put(("finished", (only, future))))

    def lost(self, only: str, message: str) -> None:
        """Resubmits a run whose worker or process was killed; it resumes from its checkpoint."""
        self.losses[only] = self.losses.get(only, 0) + 1
        if self.stopping:
            return
        if self.losses[only] > MOST_LOSSES:
            self.fail(only, f"killed {MOST_LOSSES} times, the last time by {message}")
        else:
            self.submit(only)

    def fail(self, only: str, message: str) -> None:
        _tell("failed", *only.split(","), *message.split())

    def finished(self, only: str, future: Any) -> None:
        if only not in self.futures or self.futures[only] is not future:
            return  # the future belongs to an earlier attempt
        self.futures.pop(only)
        if future.cancelled():
            if not self.stopping:
                self.fail(only, "the Dask scheduler dropped the run")
            return
        if (fault := future.exception()) is not None:
            # The others are Dask's errors for workers that were killed.
            is_local = isinstance(fault, OSError | ImportError)
            (self.fail if is_local else self.lost)(only, str(fault))
            return
        code, message = future.result()
        if code == 0:
            _tell("done", *only.split(","))
        elif code < 0:
            self.lost(only, f"signal {-code}")
        elif code != INTERRUPTED or not self.stopping:
            self.fail(only, message.removeprefix("gnomon: "))

    def stop(self) -> None:
        """Cancels runs that have not started, and makes the others write a checkpoint and stop."""
        if self.stopping:
            return
        self.stopping = True
        self.stop_file.parent.mkdir(parents=True, exist_ok=True)
        self.stop_file.touch()
        self.workers.cancel_waiting(list(self.futures.values()))

    def serve(self) -> None:
        """Processes standard input line by line; at its end, stops the runs and waits for them."""

        def read() -> None:
            for line in sys.stdin:
                self.events.put(("line", line.split()))
            self.events.put(("line", ["end"]))

        threading.Thread(target=read, daemon=True).start()
        is_open = True
        while is_open or self.futures:
            kind, event = self.events.get()
            if kind == "finished":
                self.finished(*event)
            elif event[0] == "run" and not self.stopping:
                self.submit(f"{event[1]},{event[2]}")
            elif event[0] in {"stop", "end"}:
                is_open = is_open and event[0] != "end"
                if self.futures:
                    self.stop()
            if self.stopping and not self.futures:
                return


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gnomon.lab._workers",
        description=__doc__,
        epilog="-- OPTIONS: options to pass to each run",
    )
    parser.add_argument("folder", nargs="?", default="", help="the comparison's folder")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cluster")
    parser.add_argument("--check", action="store_true", help="only check that Dask is installed")
    # Split off the options of the runs, which argparse would interpret as its own.
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    if options.check or options.cluster:
        try:
            import distributed  # noqa: F401
        except ImportError:
            print("requires Dask; run: pip install distributed", file=sys.stderr)
            return 2
        if options.check:
            return 0
    try:
        workers = _Cluster(options.cluster) if options.cluster else _Here(options.workers, words)
    except OSError as error:
        print(
            f"gnomon: cannot connect to a Dask scheduler at {options.cluster}: {error}",
            file=sys.stderr,
        )
        return 2
    pool = _Pool(workers, options.folder, words)
    pool.stop_file.unlink(missing_ok=True)
    try:
        pool.serve()
    finally:
        pool.stop_file.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
