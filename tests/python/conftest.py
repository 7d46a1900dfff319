"""Fixtures and settings for all tests.

Tests use one thread unless stated otherwise: waiting threads are slow on busy machines. Compiled
graphs are not cached between runs, because a different build may have different operator
signatures.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
# Programs started by tests use several threads, which should not spin while they wait.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Without this setting, about one in thirty runs of MKL's multithreaded products gives different
# bits.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import torch
import warm_python

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        help="device to run the tests on: cpu, cuda, other (a stand-in for a GPU) or emulated (the "
        "CPU, with the GPU operators emulated); default: cpu, and cuda if a GPU is present",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "cpu(reason): applies only to the CPU; skipped on other devices"
    )
    config.addinivalue_line(
        "markers",
        "slow: starts programs, compiles code or trains models; skipped by `make test-fast`",
    )
    config.addinivalue_line("markers", "long: skipped by `make test`; `make test-long` runs it")
    config.addinivalue_line(
        "markers",
        "real_device: needs one of PyTorch's own devices; skipped on `other` and `emulated`",
    )
    if config.getoption("--device") == "other":
        import other_device

        other_device.install()
    elif config.getoption("--device") == "emulated":
        import emulated_gpu

        cache = tempfile.mkdtemp()
        config.add_cleanup(lambda: shutil.rmtree(cache))
        os.environ.update(emulated_gpu.environment(cache))
    if "GNOMON_PYTHON" not in os.environ:  # parallel workers inherit it
        folder = tempfile.mkdtemp()
        config.add_cleanup(lambda: shutil.rmtree(folder))
        os.environ["GNOMON_PYTHON"] = warm_python.install(folder)


#: The files whose tests start programs, compile code or train models; all of them are marked slow.
#: In other files, single tests have this marker.
SLOW = {
    *("adaptive", "careless", "cli", "compare", "cuda", "cuda_operators", "data_media"),
    *("data_sets", "define", "devices", "distributed", "distributed_training", "examples"),
    *("info", "inspect", "lab", "looking_inside", "model_options", "models", "module_sweep"),
    *("pages", "published", "report", "scripts", "studies", "sweep", "task_diffusion"),
    *("task_generated", "task_graphs", "task_hierarchy", "task_images", "task_music"),
    *("task_speech", "task_translation", "terms", "transformers", "transforms", "tuning"),
    *("vocabulary", "wheel"),
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker("slow")


def devices_of(config) -> list[str]:
    chosen = config.getoption("--device")
    if chosen:
        return [chosen]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_report_header(config) -> str:
    return f"devices: {', '.join(devices_of(config))}" + (
        "" if torch.cuda.is_available() else " (torch.cuda.is_available() is False)"
    )


def pytest_generate_tests(metafunc):
    """Parametrizes every test by device, with a reason for each skip."""
    marker = metafunc.definition.get_closest_marker("cpu")
    is_real = metafunc.definition.get_closest_marker("real_device") is not None
    devices = []
    for name in devices_of(metafunc.config):
        marks = []
        if name != "cpu" and marker is not None:
            marks.append(pytest.mark.skip(reason=f"CPU only: {marker.args[0]}"))
        elif name in ("other", "emulated") and is_real:
            marks.append(pytest.mark.skip(reason="needs one of PyTorch's own devices"))
        elif name == "cuda" and not torch.cuda.is_available():
            marks.append(pytest.mark.skip(reason="no GPU: torch.cuda.is_available() is False"))
        devices.append(pytest.param(name, marks=marks))
    metafunc.parametrize("device", devices, indirect=True)


@pytest.fixture(autouse=True)
def device(request, monkeypatch) -> Iterator[torch.device]:
    """The default device of new tensors."""
    if request.param == "emulated":
        import emulated_gpu

        monkeypatch.setattr(torch, "compile", emulated_gpu.compile_nothing)
        with emulated_gpu.OnCuda(None):
            yield torch.device("cpu")
        return
    chosen = torch.device(request.param)
    if chosen.type == "cpu":
        yield chosen
        return
    with chosen:
        yield chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips tests of operators that have no GPU kernel; the error message is the reason."""
    try:
        return (yield)
    except NotImplementedError as error:
        if item.callspec.params["device"] not in ("cuda", "emulated"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def program(tmp_path, capfd, monkeypatch) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs the program in this process, in a temporary folder; returns (code, output, errors)."""
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
    """Runs the program, which must succeed, and returns its output."""

    def run(*words: object) -> str:
        code, output, errors = program(*words)
        assert code == 0, errors
        return output

    return run


@pytest.fixture
def refused(program) -> Callable[..., str]:
    """Runs the program with invalid input and returns its one-line error."""

    def run(*words: object) -> str:
        code, output, errors = program(*words)
        (line,) = errors.splitlines()
        assert (code, output) == (2, ""), line
        assert line.startswith("gnomon: ")
        return line

    return run


@pytest.fixture
def on_reference(monkeypatch) -> Callable[..., Any]:
    """Calls a function with the float64 reference instead of the fused kernels."""

    def call(function, *arguments):
        with monkeypatch.context() as context:
            context.setenv("GNOMON_FLOAT64", "reference")
            return function(*arguments)

    return call
