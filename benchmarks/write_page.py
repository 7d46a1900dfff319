"""Runs all benchmarks and writes docs/benchmarks.md, in ten minutes on an idle machine."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import targets
from measuring import PROGRAM, Line
from steps import DIM, HEADS, LENGTH

INTRODUCTION = """\
# Benchmarks

`make bench` runs these measurements and writes this page. Ratios carry over to other machines
better than milliseconds. In every comparison, the alternatives run in turn in one process, so that
changes in the clock frequency affect them equally. Run no other programs during the measurements.
Cases that appear in two tables were measured twice; the two results differ by up to 10%.

| command | what it measures |
|:--|:--|
| `make bench` | everything on this page, in about ten minutes |
| `.venv/bin/python benchmarks/targets.py --only decode` | selected rows of the first table |
| `.venv/bin/gnomon bench` | the tables by case; options select other shapes, threads and cases |
| `.venv/bin/gnomon bench --model dot/none,penumbral/hype` | training steps of the language model |

SDPA is `torch.nn.functional.scaled_dot_product_attention`. The GEMM peak is the speed of the
kernels' own matrix product with all operands in cache.
"""

TARGETS = f"""\
## Performance targets

Unless a row says otherwise, calls have B 1, H {HEADS}, L {LENGTH} and D {DIM}, use fp32, and
compute a forward pass with full attention. In a case "a / b", the ratio is the time of a divided by
the time of b, as the median over the rounds. "Our dot" is gnomon's own dot product of the same
shape. In rows that end in "/ ours", b is gnomon.
[profile.md](profile.md) shows how much time each step takes in rows that miss their target.
"""

CURVE = f"""\
## Cost against length

These calls are forward passes with full attention, 1 head and D {DIM}. The time grows as L² as long
as the last column stays at 1.
"""

CASES = """\
## By case

This is the output of `gnomon bench`. Ratios are ratios of medians: `/ sdpa` is relative to SDPA in
the same mode, and `/ dot` is relative to gnomon's dot product. `MiB` is the peak memory of a call,
excluding inputs, outputs, gradients and the scratch memory that a thread keeps between calls (at
most 32 MiB). Rows with "(operator)" exclude the token map.
"""

MODELS = """\
## Training steps

This is the output of `gnomon bench --model`. A step consists of the forward pass, loss, backward
pass and optimizer step of the language model at the default size of `gnomon train`.
"""

COMPARED = "dot/none,dot/rope,dot/hype,umbral/hype,penumbral/hype"


def conditions(record: dict[str, Any]) -> str:
    """Returns the machine, versions and rounds from the output of `gnomon bench --json`."""
    machine, versions = record["machine"], record["versions"]
    # AVX3 and its variants are Highway's names for AVX-512.
    instructions = re.sub(r"^AVX3.*", "AVX-512", machine["instruction_set"])
    parts = [
        f"{machine['cpu']}, {machine['threads']} threads, {instructions}",
        machine["system"],
        f"compiler {versions['compiler']}",
        f"gnomon {versions['gnomon']}",
        f"torch {versions['torch']}",
        f"Python {platform.python_version()}",
    ]
    if importlib.util.find_spec("torch_geometric"):
        parts.append(f"torch_geometric {version('torch_geometric')}")
    return f"Measured on {'; '.join(parts)}. Medians of {record['repeats']} rounds.\n"


def table_of(*arguments: object) -> str:
    command = [str(PROGRAM), "bench", *map(str, arguments)]
    print(" ".join(["gnomon", *command[1:]]), file=sys.stderr, flush=True)
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def page(
    measured_on: str,
    lines: Sequence[Line],
    curve: Sequence[tuple[int, float, float]],
    cases: str,
    models: str,
) -> str:
    parts = [
        *(INTRODUCTION, measured_on),
        *(TARGETS, targets.targets_table(lines) + "\n"),
        *(CURVE, targets.curve_table(curve) + "\n"),
        *(CASES, cases),
        *(MODELS, models),
    ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=pathlib.Path, help="the file to write")
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="number of rounds; results are medians over them (default 9)",
    )
    flags = parser.parse_args()
    measured_on = conditions(targets.operator_record("", flags.rounds))
    lines, curve = targets.measure_all("", flags.rounds)
    cases = table_of("--repeats", flags.rounds)
    models = table_of("--repeats", flags.rounds, "--model", COMPARED)
    flags.page.write_text(page(measured_on, lines, curve, cases, models), encoding="utf-8")


if __name__ == "__main__":
    main()
