"""Executes the runs of ``gnomon compare --workers`` and ``--cluster`` on Dask workers.

``gnomon compare`` writes ``run COMBINATION SEED`` and ``stop`` to this program's standard input,
and reads ``done COMBINATION SEED`` and ``failed COMBINATION SEED MESSAGE`` from its standard
output. Each run is a separate process, ``gnomon compare --resume FOLDER --only COMBINATION,SEED``,
which stores its checkpoints and its result in FOLDER. If a worker is killed, another one resumes
its run from the last checkpoint. If the scheduler or this process is killed, no checkpoints or
results are lost.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any

#: The number of times that a run may lose its worker or its process before it counts as failed.
MOST_LOSSES = 20
INTERRUPTED = 130
#: While this file exists in the folder of unfinished runs, each run stops at its next step.
STOP = "stop"
POLL_S = 0.2


def _threads_of(words: list[str], processes: int | None) -> list[str]:
    """Returns --threads with a run's share of the cores, or nothing if `words` contains it."""
    if "--threads" in words:
        return []
    from dask.system import CPU_COUNT
    from distributed import get_worker

    share = processes if processes is not None else get_worker().state.nthreads
    return ["--threads", str(max(1, CPU_COUNT // share))]


def _environment(words: list[str]) -> dict[str, str]:
    """Returns a run's environment; if several GPUs are visible, each local worker gets one."""
    environment = dict(os.environ, GNOMON_PARENT=str(os.getpid()))
    if "cuda" in words:
        import torch
        from distributed import get_worker

        name, count = get_worker().name, torch.cuda.device_count()
        if isinstance(name, int) and count > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = visible.split(",") if visible else [str(n) for n in range(count)]
            environment["CUDA_VISIBLE_DEVICES"] = devices[name % count]
    return environment


def run(
    folder: str, at: str, words: list[str], only: str, processes: int | None
) -> tuple[int, str]:
    """Executes a run on a worker and returns its exit code and the last line of its stderr."""
    command = [sys.executable, "-m", "gnomon", "compare", "--resume", folder, "--only", only]
    command += [*words, *_threads_of(words, processes)]
    stop = pathlib.Path(at, folder, "unfinished", STOP)
    with subprocess.Popen(
        command, cwd=at, env=_environment(words), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as child:  # fmt: skip
        lines: list[str] = []

        def read() -> None:
            assert child.stderr is not None
            lines.extend(line for line in child.stderr if line.strip())

        reader = threading.Thread(target=read)
        reader.start()
        asked = False
        while child.poll() is None:
            if not asked and stop.exists():
                child.send_signal(signal.SIGINT)
                asked = True
            time.sleep(POLL_S)
        reader.join()
    # SIGINT may end the program before it has installed its Ctrl-C handler.
    code = INTERRUPTED if child.returncode == -signal.SIGINT and asked else child.returncode
    return code, lines[-1].strip() if lines else ""


class _Pool:
    """The runs in progress on the workers of a Dask client."""

    def __init__(self, client: Any, folder: str, words: list[str], processes: int | None) -> None:
        self.client = client
        self.folder = folder
        self.words = words
        self.processes = processes
        self.stop_file = pathlib.Path(folder, "unfinished", STOP)
        self.stopping = False
        self.losses: dict[str, int] = {}
        self.futures: dict[str, Any] = {}
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()

    def submit(self, only: str) -> None:
        future = self.client.submit(
            run, self.folder, os.getcwd(), self.words, only, self.processes,
            pure=False, key=f"gnomon-{only}-{self.losses.get(only, 0)}-{time.time_ns()}",
        )  # fmt: skip
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
        print("failed", *only.split(","), " ".join(message.split()), flush=True)

    def finished(self, only: str, future: Any) -> None:
        if only not in self.futures or self.futures[only] is not future:
            return  # the future belongs to an earlier attempt
        self.futures.pop(only)
        if future.status == "cancelled":
            if not self.stopping:
                self.fail(only, "the Dask scheduler dropped the run")
            return
        if future.status == "error":
            self.lost(only, str(future.exception()))
            return
        code, message = future.result()
        if code == 0:
            print("done", *only.split(","), flush=True)
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
        running = set(self.client.call_stack(list(self.futures.values())) or ())
        processing = {key for keys in self.client.processing().values() for key in keys}
        for future in self.futures.values():
            if future.key not in processing and future.key not in running:
                future.cancel()

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


@contextlib.contextmanager
def _client(workers: int | None, address: str | None) -> Any:
    import dask
    from distributed import Client, LocalCluster

    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    if address is not None:
        with Client(address, timeout=30) as client:
            yield client
        return
    # Runs set their own number of threads, and killed workers are replaced without limit.
    settings = {
        "distributed.nanny.pre-spawn-environ": {},
        "distributed.scheduler.allowed-failures": MOST_LOSSES,
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
            memory_limit=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


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
    try:
        import distributed  # noqa: F401
    except ImportError:
        print("requires Dask; run: pip install 'gnomon[workers]'", file=sys.stderr)
        return 2
    if options.check:
        return 0
    try:
        with _client(options.workers, options.cluster) as client:
            pool = _Pool(client, options.folder, words, options.workers)
            pool.stop_file.unlink(missing_ok=True)
            try:
                pool.serve()
            finally:
                pool.stop_file.unlink(missing_ok=True)
    except OSError as error:
        place = f" at {options.cluster}" if options.cluster else ""
        print(f"gnomon: cannot connect to a Dask scheduler{place}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
