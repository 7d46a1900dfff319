"""What all tests run under.

One thread, except where a test says otherwise: busy machines pay for waiting threads. Compiled
graphs are not kept between runs: those of another build call its operators by its arguments.
"""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
# Programs that tests start have more threads than one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

torch.set_num_threads(1)


@pytest.fixture(params=["cpu", "cuda"])
def device(request, monkeypatch) -> Iterator[torch.device]:
    """Tensors are made there. Modules whose tests should hold on every device use it for all.

    What there are no kernels for on a GPU is skipped with what the call says.
    """
    chosen = torch.device(request.param)
    if chosen.type == "cpu":
        yield chosen
        return
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    monkeypatch.setenv("GNOMON_CUDA", "1")
    with chosen:
        yield chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except NotImplementedError as error:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("device") != "cuda":
            raise
        pytest.skip(str(error))


@pytest.fixture
def program(tmp_path, capfd, monkeypatch) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """The program in this process and a folder of its own: exit code, output, errors."""
    from gnomon.__main__ import main

    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGPIPE)}

    def run(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([*map(str, words)])
        return code, *capfd.readouterr()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def gnomon(program) -> Callable[..., str]:
    """The output of the program, which must succeed."""

    def run(*words: object) -> str:
        code, output, errors = program(*words)
        assert code == 0, errors
        return output

    return run


@pytest.fixture
def refused(program) -> Callable[..., str]:
    """The one line that the program answers a wrong input with."""

    def run(*words: object) -> str:
        code, output, errors = program(*words)
        (line,) = errors.splitlines()
        assert (code, output) == (2, ""), line
        assert line.startswith("gnomon: ")
        return line

    return run
