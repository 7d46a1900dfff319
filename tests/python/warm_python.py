"""A Python interpreter for tests that starts in a tenth of the time.

Importing PyTorch takes seconds. `install` writes a program that can be used like `python`: it asks
a server to run its arguments, and the server, which has imported gnomon, forks. The first use
starts the server, which exits when the test session ends. The real interpreter runs what a forked
process cannot imitate: options other than -m and -c, closed standard streams, limits that differ
from the session's, and environment variables that take effect while libraries load.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import importlib
import json
import os
import pathlib
import resource
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import traceback

#: Prefixes of the environment variables that are read while libraries load.
EARLY = ("CUDA_", "GNOMON_LOG", "GNOMON_TARGET", "KMP_", "LD_", "MKL_", "MPL", "OMP_", "PYTHON")
#: This variable takes effect by a call.
THREADS = "OMP_NUM_THREADS"
#: Signals that are passed on to the forked process.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def install(folder: str) -> str:
    """Writes the program into a folder and returns its path. Linux only; elsewhere, returns the
    real interpreter."""
    if sys.platform != "linux":
        return sys.executable
    state = {"settings": settings(), "session": os.getpid(), "python": sys.executable}
    pathlib.Path(folder, "state.json").write_text(json.dumps(state))
    program = pathlib.Path(folder, "python")
    program.write_text(
        # A path with spaces, or a long one, cannot follow #!.
        f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", __file__, "run", folder])} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def run_together(processes: int, *words: object, seconds: float = 300) -> None:
    """Runs `python WORDS RANK` for each rank; fails unless all processes succeed."""
    command = [os.environ["GNOMON_PYTHON"], *map(str, words)]
    started = [subprocess.Popen([*command, str(rank)]) for rank in range(processes)]
    try:
        assert [process.wait(seconds) for process in started] == [0] * processes
    finally:
        for process in started:
            process.kill()


def settings() -> list:
    """The settings that a forked process inherits from the server instead of its caller."""
    early = {k: v for k, v in os.environ.items() if k.startswith(EARLY) and k != THREADS}
    kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [list(resource.getrlimit(kind)) for kind in kinds]
    mask = os.umask(0)
    os.umask(mask)
    return [early, limits, mask, sorted(os.sched_getaffinity(0)), os.geteuid()]


def main(folder: str, words: list[str]) -> None:
    """Runs `python WORDS`, and exits as it does."""
    state = json.loads(pathlib.Path(folder, "state.json").read_text())
    try:
        streams = [os.dup(n) for n in range(3)]
        here = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        streams = []
    runs = words[:1] in (["-m"], ["-c"]) or (words and not words[0].startswith("-"))
    if not runs or not streams or settings() != state["settings"]:
        os.execv(state["python"], [state["python"], *words])
    server = connect(folder, state["python"])
    descriptors = array.array("i", [*streams, here])
    request = json.dumps([words, dict(os.environ)]).encode()
    server.sendmsg(
        [len(request).to_bytes(8, "little")],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)],
    )
    server.sendall(request)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    answer = server.recv(4)
    if len(answer) < 4:
        os._exit(255)
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:
        die(-code)
    os._exit(code)


def die(number: int) -> None:
    """Ends this process by a signal."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def connect(folder: str, python: str) -> socket.socket:
    address = f"{folder}/socket"
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        while True:
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(address)
                return server
            except OSError:
                server.close()
            ready = subprocess.run(
                [python, __file__, "serve", folder],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            if ready.returncode != 0:
                sys.exit(f"{python} {__file__} serve {folder} failed")


def serve(folder: str) -> None:
    """Imports gnomon and forks for each connection, until the test session ends."""
    sys.path.pop(0)
    importlib.import_module("gnomon")
    for name in ("report", "inspect", "data"):
        with contextlib.suppress(ImportError):  # the lab or matplotlib is not installed
            importlib.import_module(f"gnomon.lab.{name}")
    session = json.loads(pathlib.Path(folder, "state.json").read_text())["session"]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen(64)
    if os.fork():
        os._exit(0)  # The caller waits until connections are possible.
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.settimeout(2)
    while os.path.exists(folder) and os.path.exists(f"/proc/{session}"):
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                connection.settimeout(None)
                supervise(connection)
            connection.close()


def supervise(connection: socket.socket) -> None:
    """Runs a request in a process of its own, which ends when the caller does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, control, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4 * 4))
    descriptors = array.array("i")
    descriptors.frombytes(control[0][2])
    size = int.from_bytes(header, "little")
    request = b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    child = os.fork()
    if child == 0:
        connection.close()
        run(*json.loads(request), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    end = os.pidfd_open(child)
    with selectors.DefaultSelector() as events:
        events.register(end, selectors.EVENT_READ)
        events.register(connection, selectors.EVENT_READ)
        while end not in {key.fd for key, _ in events.select()}:
            for number in connection.recv(64) or bytes([signal.SIGKILL]):
                os.kill(child, number)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        code = os.waitstatus_to_exitcode(status)
        connection.sendall(code.to_bytes(4, "little", signed=True))
    os._exit(0)


def run(words: list[str], environment: dict[str, str], descriptors: array.array) -> None:
    """Runs `python WORDS` in this process with the caller's streams, folder and environment."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.fchdir(descriptors[3])
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if THREADS in environment:
        sys.modules["torch"].set_num_threads(int(environment[THREADS]))
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )
    sys.orig_argv = [sys.executable, *words]
    code = 0
    try:
        if words[0] == "-c":
            sys.argv, sys.path[:] = ["-c", *words[2:]], ["", *sys.path]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv, sys.path[:] = words[1:], [os.getcwd(), *sys.path]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:] = words, [os.path.dirname(os.path.abspath(words[0])), *sys.path]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = -signal.SIGINT
        traceback.print_exc()
    except BaseException:
        code = 1
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as Python does
    if code < 0:
        die(-code)
    os._exit(code & 255)


if __name__ == "__main__":
    command, folder, *words = sys.argv[1:]
    if command == "serve":
        serve(folder)
    else:
        main(folder, words)
