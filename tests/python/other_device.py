"""tests/other_device.cc: a device beside the CPU, for the process that calls install().

PyTorch knows one such device for a process. Its memory and its kernels are the CPU's, and it
refuses what a GPU refuses, an operator with tensors on two devices.
"""

import types

import torch
from test_cli import ROOT

NAME = "other"
LIBRARY = ROOT / "build" / "lib" / "libgnomon_other_device.so"


def install() -> torch.device:
    """Makes PyTorch know the device."""
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
