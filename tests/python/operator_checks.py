"""Checks of operators that do not compare their results."""

import os
import subprocess
import sys

# The checks of torch.library.opcheck that the tests run.
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)

PEAK = """
import re, sys, torch, gnomon

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
    command = [sys.executable, "-c", script, *map(str, arguments)]
    # By default, glibc changes this threshold while a program runs, and retains freed blocks below
    # it. The peak of the same step would then vary by up to a third.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=240)
    return int(done.stdout)
