"""Registers the stand-in device of tests/other_device.cc in this process.

The device uses the CPU's memory and kernels. Like a GPU, it rejects operators with tensors on two
devices. PyTorch supports one such device per process.
"""

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from test_cli import ROOT
from torch import Tensor

NAME = "other"
LIBRARY = ROOT / "build" / "lib" / "libgnomon_other_device.so"


def install() -> torch.device:
    """Registers the device with PyTorch."""
    torch.ops.load_library(str(LIBRARY))
    module = types.ModuleType(f"torch.{NAME}")
    members = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    vars(module).update(members)
    torch._register_device_module(NAME, module)
    return torch.device(NAME, 0)


def leave() -> None:
    """Ends a successful process without crashing Python.

    PyTorch's device thread may still be releasing objects of a backward pass. Python before 3.14
    terminates a thread that requests the GIL at that point, from within C++ code that must not be
    unwound: "terminate called without an active exception".
    """
    sys.stdout.flush()
    os._exit(0)


class _Work(dist.Work):
    """Work of the CPU group; wait() calls `then` after the work is done."""

    def __init__(self, work: dist.Work, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.work, self.then = work, then

    def wait(self, *arguments: Any) -> bool:
        self.work.wait(*arguments)
        self.then()
        return True


class Group(dist.ProcessGroup):
    """A process group for tensors of the device, with gloo on CPU copies."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def all_gather_single(self, to: Tensor, tensor: Tensor, options: Any = None) -> dist.Work:
        parts = [torch.empty_like(tensor, device="cpu") for _ in range(self.gloo.size())]
        work = self.gloo.allgather([parts], [tensor.cpu()])
        return _Work(work, lambda: to.copy_(torch.cat(parts)))

    _allgather_base = all_gather_single  # its name before PyTorch 2.15

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        sums = [tensor.cpu() for tensor in tensors]
        return _Work(self.gloo.allreduce(sums), lambda: tensors[0].copy_(sums[0]))

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        return _Work(self.gloo.send([tensor.cpu() for tensor in tensors], rank, tag))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        received = [tensor.cpu() for tensor in tensors]
        work = self.gloo.recv(received, rank, tag)
        return _Work(work, lambda: tensors[0].copy_(received[0]))

    def _get_backend(self, device: torch.device) -> dist.ProcessGroup:
        return self


def install_groups() -> None:
    """After install(): makes init_process_group(NAME) create groups for the device."""
    dist.Backend.register_backend(NAME, Group, devices=[NAME])
