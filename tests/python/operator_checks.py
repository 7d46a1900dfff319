"""Checks of operators that do not compare their results."""

import os
import subprocess

import torch

# The checks of torch.library.opcheck that the tests run.
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def opcheck_forward_and_backward(forward, backward, tensors: list, rest: tuple) -> None:
    """Checks a forward operator and its backward operator; absent tensors are None."""
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    torch.library.opcheck(forward, (*leaves, *rest), test_utils=CHECKS)
    detached = [None if t is None else t.detach() for t in tensors]
    o, lse, statistics = forward(*detached, *rest)
    saved = (torch.randn_like(o), torch.randn_like(lse), o, lse, statistics)
    for needed in ([t is not None for t in tensors], [True] + [False] * (len(tensors) - 1)):
        torch.library.opcheck(backward, (*saved, *detached, *rest, needed), test_utils=CHECKS)


def opcheck_derivatives(jvp, backward_jvp, tensors: list, rest: tuple) -> None:
    """Checks an operator in forward mode and the backward operator of its second derivatives."""
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    tangents = [None if t is None else torch.randn_like(t) for t in tensors]
    torch.library.opcheck(jvp, (*leaves, *rest, tangents), test_utils=CHECKS)
    detached = [None if t is None else t.detach() for t in tensors]
    o, lse, *_ = jvp(*detached, *rest, tangents)
    saved = (torch.randn_like(o), torch.randn_like(lse), torch.randn_like(o), None)
    given = [t is not None for t in tensors]
    for needed in ([*given, *given, True], [True] + [False] * (2 * len(tensors))):
        torch.library.opcheck(
            backward_jvp, (*saved, *detached, *rest, tangents, needed), test_utils=CHECKS
        )


PEAK = """
import ctypes, re, sys, torch, gnomon

# By default, glibc changes this threshold while a program runs, and retains freed blocks below it.
# The peak of the same step would then vary by up to a third.
M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

torch.set_num_threads(1)
{before}
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak from here on
start = peak()
{step}
print(peak() - start)
"""


def peak_memory(before: str, step: str, *arguments: object) -> int:
    """The peak memory in KiB that `step` adds after `before`, in a separate process."""
    script = PEAK.format(before=before, step=step)
    command = [os.environ["GNOMON_PYTHON"], "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=240)
    return int(done.stdout)
