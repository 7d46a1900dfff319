"""GPU operators on CPU tensors, using the emulation of tests/cuda.

Calls execute every step of a GPU call: checks, plan, kernel source, cache and driver interface.
Only the launch itself is emulated, and tensors do not report a GPU device.
"""

from collections import Counter

import torch
from test_cli import ROOT
from torch.utils._python_dispatch import TorchDispatchMode

LIBRARY = ROOT / "build" / "lib" / "libgnomon_emulated_gpu.so"
ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
TOKENS = {"x", "y", "v", "relative_query", "relative_key", "key_pages", "value_pages"}
# The emulation processes a few million pair values per minute.
MOST_NUMBERS = 3e6


def environment(cache: object) -> dict[str, str]:
    """Variables to set before the first kernel call, because the driver is looked up only once."""
    return {
        "GNOMON_CUDA_DRIVER": str(LIBRARY),
        "GNOMON_NVRTC": str(LIBRARY),
        "GNOMON_CACHE": str(cache),
    }


def compile_nothing(*_args: object, **_options: object) -> None:
    """Replaces torch.compile, which does not support this mode."""
    raise NotImplementedError("torch.compile does not support the emulation")


class OnCuda(TorchDispatchMode):
    """Runs the GPU kernels of gnomon's operators, with tokens of the given dtype.

    With None, tokens have the dtype of the values, and float64 uses the CPU kernels.
    """

    def __init__(self, dtype: torch.dtype | None = torch.float32):
        super().__init__()
        self.dtype = dtype
        #: Whether gradients are converted to float32, because the tokens were converted.
        self.rounds = dtype not in (None, torch.float64)
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name
        if not name.startswith("gnomon::"):
            return function(*args, **kwargs)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            return function(*args, **kwargs)
        names = [argument.name for argument in function._schema.arguments]
        dtype = self.dtype
        if dtype is None:
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            if any(type(t) is not torch.Tensor or t.dtype == torch.float64 for t in tensors):
                return function(*args, **kwargs)
            dtype = args[names.index("v")].dtype if "v" in names else torch.float32
            if "attention" in name:
                x, v = args[names.index("x")], args[names.index("v")]
                if v.numel() * x.size(2) > MOST_NUMBERS:
                    raise NotImplementedError("too many pairs for the emulation")
        self.calls[name.partition("::")[2]] += 1
        if "attention" not in name:
            return function.redispatch(ON_CUDA, *args, **kwargs)
        args = [
            value.to(dtype) if of in TOKENS and value is not None else value
            for of, value in zip(names, args, strict=False)
        ]
        results = function.redispatch(ON_CUDA, *args, **kwargs)
        if name.endswith("backward_jvp") and self.rounds:
            return [result.float() for result in results]
        if not name.endswith("backward"):
            return results
        # The gradients have the order of the arguments, starting with x.
        own = names[names.index("x") :]
        for of, gradient in zip(own, results, strict=False):
            assert gradient.numel() == 0 or of not in TOKENS or gradient.dtype == dtype, of
        return [gradient.float() for gradient in results] if self.rounds else results
