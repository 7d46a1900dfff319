"""Predicts the speed of CUDA kernels without a GPU.

``python benchmarks/cuda_model.py [KERNEL...]`` compiles the kernels of plain causal calls in bf16
(``gnomon_write_cubins``), finds the common path through each main loop (``sass.py``), and lets the
warps that one multiprocessor holds run this path in a model:

- Each of four schedulers issues at most one instruction per cycle.
- The stall counts and scoreboards in the machine code decide when a warp may go on.
- Pipes have rates. Shared memory, which all schedulers share, moves 128 bytes per cycle. The L2
  cache delivers a fixed number of bytes per cycle.
- Barriers and taken branches cost a fixed time.
- A product by a group of four warps (``wgmma``) keeps the matrix pipes of its warps busy at their
  full rate, until the warps wait for it. Groups take turns at starting products. Only the warps
  that multiply are modelled, not those that copy: tiles are always there in time.
- Additions to global memory take part of the L2 cache's rate. The time that blocks wait for their
  turn to add, and the instructions of the one thread that passes the turn on, are missing;
  ``--turn`` delays the first warp of each block by a number of cycles per tile.

The time is that of one scheduler per pair of a query and a key. In the same model, the kernels of
FlashAttention 2 take the times in ``FLASH_ATTENTION``; the last column is the ratio to them. The
model ranks designs. It is not a measurement: power limits, cache misses and launches are missing.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import sass

PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "build/bin/gnomon_write_cubins"
SCHEDULERS = 4
#: Cycles per pair in this model for FlashAttention 2's kernels (sm_90), by pass and head dimension,
#: counted in its machine code, which is not part of this project.
FLASH_ATTENTION = {
    ("forward", 64): 0.678,
    ("forward", 128): 1.168,
    ("backward", 64): 1.879,
    ("backward", 128): 3.483,
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates and latencies, in cycles except where stated."""

    product: float  # a matrix product keeps its pipe busy for this long
    l2_bytes: float  # bytes per cycle
    single_precision: int  # cycles per fp32 instruction of a warp
    special: int = 8  # exponentials and roots
    special_latency: int = 22
    shared_latency: int = 26
    matrix_latency: int = 30
    shuffle_latency: int = 24
    l2_latency: int = 300
    constant_latency: int = 38
    branch: int = 8
    barrier: int = 20
    group_latency: int = 24  # of a group's product, after its pipe
    synchronization: int = 20  # mbarriers and fences
    turn: int = 0  # delay of a block's first warp at the first barrier of a tile


MACHINES = {80: Machine(8.0, 24.0, 2), 90: Machine(6.0, 21.0, 1)}

#: Pipes by the beginning of the opcode; the first that fits counts.
PIPES = (
    (("LDGDEPBAR",), ""),
    (("FFMA", "FMUL", "FADD", "HFMA2", "IMAD.MOV", "IMAD.IADD", "IMAD.SHL"), "fma"),
    (("IMAD",), "heavy"),
    (("HMMA",), "product"),
    (("HGMMA",), "group product"),
    (("SYNCS", "FENCE", "MEMBAR", "WARPGROUP"), ""),
    (("MUFU", "F2F.", "F2I", "I2F"), "special"),
    (("LDSM", "LDS", "STS", "SHFL"), "shared"),
    (("LDG", "STG", "LDL", "STL", "LD.", "ST.", "RED", "ATOM"), "global"),
    (("LDC",), "constant"),
    (("BRA", "BSSY", "BSYNC", "BAR", "EXIT", "WARPSYNC", "NOP", "DEPBAR", "BREAK", "CALL"), ""),
    (("U",), "uniform"),
)


def pipe_of(instruction: sass.Instruction) -> str:
    for prefixes, pipe in PIPES:
        if instruction.starts(*prefixes):
            return pipe
    return "integer"


@dataclasses.dataclass
class _Step:
    """An instruction of the path."""

    instruction: sass.Instruction
    pipe: str
    wavefronts: int
    copied: int  # bytes of a warp's asynchronous copy
    added: int  # bytes of a warp's additions to global memory
    waits: list[int]
    sets: tuple[int, ...]
    jumps: bool  # a branch that is taken
    # For a wait for copies: the number of groups that may be unfinished.
    unfinished: int | None
    columns: int  # of a group's product
    # For a wait for products: the number of groups that may be unfinished.
    unfinished_products: int | None


def _steps(path: list[sass.Instruction]) -> list[_Step]:
    steps = []
    for n, instruction in enumerate(path):
        following = path[(n + 1) % len(path)]
        wavefronts = sass.wavefronts([instruction])
        is_copy = instruction.starts(sass.COPY)
        is_copy_wait = instruction.starts("DEPBAR")
        is_product_wait = instruction.starts("WARPGROUP.DEPBAR")
        size = re.match(r"HGMMA\.64x(\d+)x16", instruction.opcode)
        steps.append(
            _Step(
                instruction,
                pipe_of(instruction),
                wavefronts,
                128 * wavefronts if is_copy else 0,
                sass.added_bytes(instruction),
                instruction.waits,
                instruction.sets,
                instruction.starts("BRA", "BSYNC", "WARPSYNC")
                and following.address != instruction.address + 16,
                int(instruction.operands.split("0x")[1], 16) if is_copy_wait else None,
                int(size[1]) if size else 0,
                int(instruction.operands.split("0x")[1], 16) if is_product_wait else None,
            )
        )
    return steps


class _Warp:
    def __init__(
        self, block: int, group: int, scheduler: int, ready: float, *, is_first: bool
    ) -> None:
        self.block = block
        self.group = group  # of four warps in its block
        self.turns = 0  # that it has taken
        self.products: list[float] = []  # the ends of groups of products in flight
        self.is_first = is_first  # in its block
        self.late = 0  # a delay when it leaves a barrier
        self.scheduler = scheduler
        self.ready = ready  # the first cycle in which it may issue
        self.at = 0  # index of the next step
        self.round = 0
        self.scoreboards = [collections.deque[float]() for _ in range(6)]  # release times
        self.copies_done = 0.0
        self.is_at_barrier = False
        self.begin = self.end = 0.0

    def pending(self, scoreboard: int, now: float) -> collections.deque[float]:
        times = self.scoreboards[scoreboard]
        while times and times[0] <= now:
            times.popleft()
        return times

    def release(self, scoreboard: int, when: float) -> None:
        times = self.scoreboards[scoreboard]
        times.append(max(when, times[-1]) if times else when)  # in order


@dataclasses.dataclass(frozen=True)
class Prediction:
    cycles: float  # of one scheduler, for one warp's passage through the loop
    busy: dict[str, float]  # the fraction of the time for which a resource is used


class _Multiprocessor:
    """Runs the path of a main loop with all resident warps."""

    def __init__(
        self, path: list[sass.Instruction], machine: Machine, blocks: int, warps: int, seed: int
    ) -> None:
        self.steps = _steps(path)
        self.first_barrier = next((n for n, i in enumerate(path) if i.starts("BAR")), -1)
        self.machine = machine
        self.warps_per_block = warps
        numbers = random.Random(seed)
        self.warps = []
        for block in range(blocks):
            offset = 400 * block + numbers.randrange(600)
            for warp in range(warps):
                scheduler = (warp + block * warps) % SCHEDULERS
                ready = offset + numbers.randrange(8)
                self.warps.append(_Warp(block, warp // 4, scheduler, ready, is_first=warp == 0))
        self.queues = [[w for w in self.warps if w.scheduler == s] for s in range(SCHEDULERS)]
        self.free: list[dict[str, float]] = [
            collections.defaultdict(float) for _ in range(SCHEDULERS)
        ]
        self.shared_free = 0.0
        self.l2_free = 0.0
        self.arrived: dict[int, list[_Warp]] = collections.defaultdict(list)
        # How many warps have passed the turn to a group of a block. The first group begins.
        self.has_turns = any(step.columns for step in self.steps)
        self.passed: dict[tuple[int, int], int] = collections.defaultdict(int)
        for block in range(blocks):
            self.passed[block, 0] = 4
        self.used: dict[str, float] = collections.defaultdict(float)

    def run(self, rounds: int, warm: int) -> Prediction:
        now = 0.0
        last: list[_Warp | None] = [None] * SCHEDULERS
        while any(w.round < warm + rounds for w in self.warps):
            following = math.inf
            for scheduler, queue in enumerate(self.queues):
                previous = last[scheduler]
                order = [previous, *(w for w in queue if w is not previous)] if previous else queue
                for warp in order:
                    if warp.round >= warm + rounds or warp.is_at_barrier:
                        continue
                    earliest = self.earliest(warp, now)
                    if earliest > now:
                        following = min(following, earliest)
                        continue
                    self.issue(warp, now, is_counted=warp.round >= warm)
                    self.advance(warp, now, warm, warm + rounds)
                    last[scheduler] = warp
                    following = min(following, now + 1)
                    break
            now = max(now + 1, following) if following < math.inf else now + 1
        per_round = sum((w.end - w.begin) / rounds for w in self.warps) / len(self.warps)
        total = per_round * rounds
        busy = {name: used / (total * SCHEDULERS) for name, used in self.used.items()}
        busy["shared"] = self.used["shared"] / total
        busy["l2"] = self.used["l2"] / self.machine.l2_bytes / total
        return Prediction(per_round * SCHEDULERS / len(self.warps), busy)

    def earliest(self, warp: _Warp, now: float) -> float:
        """The cycle in which the warp may issue; exact only if it is not later than `now`."""
        if warp.ready > now:
            return warp.ready
        step = self.steps[warp.at]
        for scoreboard in step.waits:
            if times := warp.pending(scoreboard, now):
                return times[-1]
        if step.unfinished is not None:
            times = warp.pending(0, now)
            if len(times) > step.unfinished:
                return times[-step.unfinished - 1]
        if step.unfinished_products is not None:
            warp.products = [end for end in warp.products if end > now]
            if len(warp.products) > step.unfinished_products:
                return warp.products[-step.unfinished_products - 1]
        if self.has_turns and step.instruction.starts("BAR.SYNC"):
            is_turn = self.passed[warp.block, warp.group] >= 4 * (warp.turns + 1)
            return now if is_turn else math.inf
        free = self.free[warp.scheduler]
        if step.pipe == "group product":
            return free["product"] - 160  # products queue up
        if step.pipe == "fma":
            return min(free["fma"], free["heavy"])
        if step.pipe in {"shared", "global"}:
            # Requests queue up in front of shared memory.
            return max(free["shared"], self.shared_free - 48)
        return free[step.pipe] if step.pipe else now

    def issue(self, warp: _Warp, now: float, *, is_counted: bool) -> None:
        machine = self.machine
        step = self.steps[warp.at]
        free = self.free[warp.scheduler]
        instruction = step.instruction
        written, read = now + 6, now + 12
        use: dict[str, float] = {"issued": 1}
        if step.pipe == "fma":
            if machine.single_precision == 1:
                pipe = "fma" if free["fma"] <= free["heavy"] else "heavy"
                free[pipe] = now + 2
            else:
                free["fma"] = free["heavy"] = now + 2
            use["fma"] = machine.single_precision
        elif step.pipe == "product":
            free["product"] = max(now - machine.product, free["product"]) + machine.product
            use["product"] = machine.product
        elif step.pipe == "group product":
            # 16 rows of a warp, by all columns: 512 multiply-adds per cycle.
            cycles = step.columns / 2
            free["product"] = max(now + 10, free["product"]) + cycles
            use["product"] = cycles
            if "gsb0" in instruction.operands:
                warp.products.append(free["product"] + machine.group_latency)
        elif step.pipe == "special":
            free["special"] = max(now, free["special"]) + machine.special
            written, read = now + machine.special_latency, now + 10
            use["special"] = machine.special
        elif step.pipe == "constant":
            free["constant"] = now + 4
            written = now + machine.constant_latency
        elif step.pipe == "shared":
            free["shared"] = now + 2
            begin = max(now + 4, self.shared_free)
            self.shared_free = begin + step.wavefronts
            latency = machine.shared_latency
            if instruction.starts("LDSM"):
                latency = machine.matrix_latency
            elif instruction.starts("SHFL"):
                latency = machine.shuffle_latency
            written, read = self.shared_free + latency - 4, begin + 8
            use["shared"] = step.wavefronts
        elif step.pipe == "global":
            free["shared"] = now + 2
            written, read = now + 35, now + 16
            if step.copied:
                begin = max(now, self.l2_free)
                self.l2_free = begin + step.copied / machine.l2_bytes
                self.shared_free = max(self.shared_free, now) + step.copied / 128
                warp.copies_done = max(warp.copies_done, self.l2_free + machine.l2_latency)
                read = now + 20
                use["shared"] = step.copied / 128
                use["l2"] = step.copied
            if step.added:
                # Additions and copies share the bandwidth of the L2 cache.
                self.l2_free = max(now, self.l2_free) + step.added / machine.l2_bytes
                use["l2"] = step.added
        elif step.pipe:
            free[step.pipe] = now + 2
            use[step.pipe] = 2
            written = now + (12 if step.pipe == "uniform" else 6)
        if instruction.starts("SYNCS", "FENCE", "MEMBAR"):
            written = read = now + machine.synchronization
        if instruction.starts("LDGDEPBAR"):
            written = max(warp.copies_done, now + 4)
        for scoreboard, when in zip(step.sets, (written, read), strict=True):
            if scoreboard >= 0:
                warp.release(scoreboard, when)
        if is_counted:
            for name, amount in use.items():
                self.used[name] += amount

    def advance(self, warp: _Warp, now: float, warm: int, end: int) -> None:
        step = self.steps[warp.at]
        warp.ready = now + max(1, step.instruction.stall)
        if step.jumps:
            warp.ready += self.machine.branch
        if self.has_turns and step.instruction.starts("BAR.SYNC"):
            warp.turns += 1
        elif self.has_turns and step.instruction.starts("BAR.ARV"):
            following = (warp.group + 1) % (self.warps_per_block // 4)
            self.passed[warp.block, following] += 1
        elif step.instruction.starts("BAR"):
            if warp.is_first and warp.at == self.first_barrier:
                warp.late = self.machine.turn
            arrived = self.arrived[warp.block]
            arrived.append(warp)
            warp.is_at_barrier = True
            if len(arrived) == self.warps_per_block:
                for other in arrived:
                    other.is_at_barrier = False
                    other.ready = max(other.ready, now + self.machine.barrier) + other.late
                    other.late = 0
                arrived.clear()
        warp.at = (warp.at + 1) % len(self.steps)
        if warp.at == 0:
            warp.round += 1
            if warp.round == warm:
                warp.begin = now
            if warp.round == end:
                warp.end = now


def predict(
    path: list[sass.Instruction], capability: int, blocks: int, warps: int, turn: int = 0
) -> Prediction:
    """Returns the prediction with the median time over three random starting times."""
    machine = dataclasses.replace(MACHINES[capability], turn=turn)
    found = [
        _Multiprocessor(path, machine, blocks, warps, seed).run(rounds=16, warm=3)
        for seed in range(3)
    ]
    return sorted(found, key=lambda prediction: prediction.cycles)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", nargs="*", help="such as forward-dot-64; default: all")
    parser.add_argument("--capability", type=int, choices=sorted(MACHINES), default=90)
    parser.add_argument("--turn", type=int, default=0, help="delay in one pass, in cycles")
    options = parser.parse_args()
    nvdisasm = sass.find_nvdisasm()
    if nvdisasm is None:
        print("cuda_model: nvdisasm not found; install triton, or set NVDISASM", file=sys.stderr)
        return 2
    if not PROGRAM.exists():
        print(f"cuda_model: no {PROGRAM}; build the target gnomon_write_cubins", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        command = [PROGRAM, folder, str(options.capability), *options.kernel]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stderr.strip(), file=sys.stderr)
            return 2
        kernels = [json.loads(line) for line in done.stdout.splitlines()]
        paths = {kernel["kernel"]: sass.common_path(kernel, nvdisasm) for kernel in kernels}
    print("| kernel | blocks | instructions | cycles per pair | busy | / FlashAttention 2 |")
    print("|:--|--:|--:|--:|:--|--:|")
    times: dict[str, list[float]] = collections.defaultdict(list)
    for kernel in kernels:
        path = paths[kernel["kernel"]]
        if path is None:
            print(f"| {kernel['kernel']} | | not predicted: products in an inner loop | | | |")
            continue
        blocks = sass.resident_blocks(kernel)
        kind, function, dim = kernel["kernel"].split("-")
        turn = options.turn if kind in {"backward", "backward_factor"} else 0
        warps = kernel["threads"] // 32 - kernel["producers"]
        found = predict(path, options.capability, blocks, warps, turn)
        cycles = found.cycles / (kernel["rows"] * kernel["step"])
        if kind in {"backward_queries", "backward_keys"}:
            times[f"{function}-{dim}"].append(cycles)
        busy = ", ".join(
            f"{name} {100 * found.busy.get(name, 0):.0f}%"
            for name in ("issued", "product", "special", "shared", "l2")
        )
        print(
            f"| {kernel['kernel']} | {blocks} | {len(path)} | {cycles:.3f} | {busy} | "
            f"{ratio(kind, int(dim), cycles, options.capability)} |"
        )
    for name, both in times.items():
        if len(both) == 2:
            shown = ratio("backward", int(name.rpartition("-")[2]), sum(both), options.capability)
            print(f"| backward-{name}, both passes | | | {sum(both):.3f} | | {shown} |")
    return 0


def ratio(kind: str, dim: int, cycles: float, capability: int) -> str:
    for variant in ("_factor", "_split", "_hopper"):
        kind = kind.removesuffix(variant)
    reference = FLASH_ATTENTION.get((kind, dim)) if capability == 90 else None
    return "" if reference is None else f"{cycles / reference:.2f}"


if __name__ == "__main__":
    sys.exit(main())
