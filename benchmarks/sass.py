"""Reads the machine code (SASS) of a CUDA kernel and finds the common path through its main loop.

A cubin is disassembled by nvdisasm, which is part of Triton's wheel and of the CUDA toolkit.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterable
from typing import Any


def find_nvdisasm() -> str | None:
    """Returns the path of nvdisasm (``$NVDISASM``, Triton's or the toolkit's), or None."""
    if chosen := os.environ.get("NVDISASM"):
        return chosen
    spec = importlib.util.find_spec("triton")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = pathlib.Path(folder) / "backends/nvidia/bin/nvdisasm"
        if path.is_file():
            return str(path)
    return shutil.which("nvdisasm")


@dataclasses.dataclass
class Instruction:
    address: int
    predicate: str  # "@!P0", or empty
    opcode: str  # "LDSM.16.M88.4"
    operands: str
    control: int  # the scheduling bits
    target: int | None = None  # for a branch: the index of the instruction that it leads to

    @property
    def stall(self) -> int:
        """Cycles before the warp's next instruction may be issued."""
        return self.control & 15

    @property
    def sets(self) -> tuple[int, ...]:
        """The scoreboards released by writing the result and reading the operands; -1: none."""
        numbers = self.control >> 5 & 7, self.control >> 8 & 7
        return tuple(-1 if number == 7 else number for number in numbers)

    @property
    def waits(self) -> list[int]:
        """The scoreboards that must be released before this instruction is issued."""
        return [n for n in range(6) if self.control >> 11 + n & 1]

    def starts(self, *prefixes: str) -> bool:
        return self.opcode.startswith(prefixes)


LABEL = re.compile(r"(\.L_\S+):")
# An address, a predicate, an opcode, operands, and the lower half of the instruction's bits.
LINE = re.compile(
    r"\s*/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?(\S+?)(?:\s+(.*?))?\s*;\s*/\* 0x[0-9a-f]{16} \*/"
)
UPPER_HALF = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")


def read(cubin: str | os.PathLike[str], nvdisasm: str) -> list[Instruction]:
    """Returns the instructions of the kernel in a cubin."""
    listing = subprocess.run(
        [nvdisasm, "-c", "-hex", os.fspath(cubin)], check=True, capture_output=True, text=True
    ).stdout
    code: list[Instruction] = []
    places: dict[str, int] = {}
    for line in listing.splitlines():
        if match := LABEL.match(line):
            places[match[1]] = len(code)
        elif match := LINE.match(line):
            address, predicate, opcode, operands = match.groups(default="")
            code.append(Instruction(int(address, 16), predicate, opcode, operands, 0))
        elif code and (match := UPPER_HALF.match(line)):
            code[-1].control = int(match[1], 16) >> 41
    for instruction in code:
        if match := re.search(r"`\((\.L_[^)]+)\)", instruction.operands):
            instruction.target = places.get(match[1])
    return code


def count(path: Iterable[Instruction], *prefixes: str) -> int:
    return sum(instruction.starts(*prefixes) for instruction in path)


PRODUCT = "HMMA"
#: A product by four warps (wgmma).
GROUP_PRODUCT = "HGMMA"
EXPONENTIAL = "MUFU.EX2"
COPY = "LDGSTS"


@dataclasses.dataclass(frozen=True)
class _Block:
    """Instructions without a branch or label between them."""

    begin: int
    end: int
    successors: tuple[int, ...]  # indices of blocks


def _blocks(code: list[Instruction]) -> list[_Block]:
    starts = {0}
    for n, instruction in enumerate(code):
        if instruction.starts("BRA", "EXIT", "RET", "CALL", "BSYNC", "BREAK", "WARPSYNC.COLL"):
            starts.add(n + 1)
        if instruction.target is not None:
            starts.add(instruction.target)
    order = sorted(start for start in starts if start < len(code))
    index = {start: n for n, start in enumerate(order)}
    blocks = []
    for n, begin in enumerate(order):
        end = order[n + 1] if n + 1 < len(order) else len(code)
        last = code[end - 1]
        falls = [n + 1] if n + 1 < len(order) else []
        successors = falls
        if last.starts("BRA.DIV"):
            pass  # taken only if the warp has diverged
        elif last.starts("BRA"):
            # A branch is conditional if it has a predicate, also as an operand.
            is_conditional = last.predicate or re.match(r"!?U?P\d", last.operands)
            successors = falls if is_conditional else []
            if last.target is not None:
                successors = [index[last.target], *successors]
        elif last.starts("EXIT", "RET") and not last.predicate:
            successors = []
        blocks.append(_Block(begin, end, tuple(successors)))
    return blocks


#: Numbers of matrix products, exponentials and copies of 16 bytes.
_Counts = tuple[int, int, int]


def main_loop(code: list[Instruction], most: _Counts) -> list[Instruction]:
    """Returns the instructions of the common path once around the main loop.

    Of the paths around all loops, this is the one with the most matrix products; then with the
    most exponentials; then with the most copies of 16 bytes; then the shortest: all pairs are
    visible, and no exceptional case occurs. Only as many of each count as ``most`` has, which are
    those of one tile. Inner loops are passed once.
    """
    blocks = _blocks(code)
    best: tuple[tuple[int, int, int, int], list[int]] | None = None
    headers = {s for n, block in enumerate(blocks) for s in block.successors if s <= n}
    for header in sorted(headers):
        found = _around(code, blocks, header, most)
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    if best is None:
        raise ValueError("the kernel has no loop")
    return [code[i] for n in best[1] for i in range(blocks[n].begin, blocks[n].end)]


#: The length and the blocks of a path, by its products, exponentials and copies.
_Paths = dict[_Counts, tuple[int, list[int]]]


def _around(
    code: list[Instruction], blocks: list[_Block], header: int, most: _Counts
) -> tuple[tuple[int, int, int, int], list[int]] | None:
    """Returns the preferred path around one loop: its rank and its blocks."""

    def ranks(block: _Block) -> tuple[int, int, int]:
        part = code[block.begin : block.end]
        wide = sum(i.starts(COPY) and "128" in i.opcode.split(".") for i in part)
        return count(part, PRODUCT, GROUP_PRODUCT), count(part, EXPONENTIAL), wide

    paths: dict[int, _Paths] = {}  # for each block: the shortest paths back to the header
    open_blocks: set[int] = set()

    def visit(n: int) -> _Paths:
        if n in paths:
            return paths[n]
        open_blocks.add(n)
        products, exponentials, wide = ranks(blocks[n])
        size = blocks[n].end - blocks[n].begin
        found: _Paths = {}
        for successor in blocks[n].successors:
            if successor == header:
                tails: _Paths = {(0, 0, 0): (0, [])}
            elif successor in open_blocks:
                continue
            else:
                tails = visit(successor)
            for rank, (length, tail) in tails.items():
                key = (
                    min(products + rank[0], most[0]),
                    min(exponentials + rank[1], most[1]),
                    min(wide + rank[2], most[2]),
                )
                if key not in found or size + length < found[key][0]:
                    found[key] = (size + length, [n, *tail])
        open_blocks.remove(n)
        paths[n] = found
        return found

    found = visit(header)
    if not found:
        return None
    rank = max(found)
    length, chosen = found[rank]
    return (*rank, -length), chosen


def wavefronts(path: Iterable[Instruction]) -> int:
    """Returns how many times a warp's path accesses shared memory, without bank conflicts."""
    total = 0
    for instruction in path:
        parts = instruction.opcode.split(".")
        if instruction.starts("LDSM"):
            total += int(parts[-1]) if parts[-1] in {"2", "4"} else 1
        elif instruction.starts("LDS", "STS"):
            total += 4 if "128" in parts else 2 if "64" in parts else 1
        elif instruction.starts("SHFL"):
            total += 1
        elif instruction.starts(COPY):
            total += 4 if "128" in parts else 1
    return total


def added_bytes(instruction: Instruction) -> int:
    """Returns how many bytes a warp adds to global memory by an instruction."""
    if not instruction.starts("RED"):
        return 0
    return 32 * 4 * (4 if "F32x4" in instruction.opcode.split(".") else 1)


#: The resources of a multiprocessor; shared memory in bytes, by compute capability.
REGISTERS = 65536
SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}
MOST_BLOCKS = 32


def resident_blocks(kernel: dict[str, Any]) -> int:
    """Returns how many blocks of a kernel a multiprocessor holds at once.

    ``kernel`` is its description by ``gnomon_write_cubins``.
    """
    # Registers are allocated in units of 8 per thread; each block uses 1 KiB of shared memory.
    registers = kernel["threads"] * -(-kernel["registers"] // 8) * 8
    by_memory = SHARED_BYTES[kernel["capability"]] // (kernel["shared_bytes"] + 1024)
    return min(REGISTERS // registers, by_memory, MOST_BLOCKS)


def pairs_of(kernel: dict[str, Any]) -> int:
    """Returns the number of a thread's pairs in a tile."""
    return kernel["rows"] * kernel["step"] // 32


def copies_of(kernel: dict[str, Any]) -> int:
    """Returns the number of a thread's 16-byte copies per tile, of two 16-bit tensors."""
    if kernel["producers"] > 0:
        return 0  # other warps copy
    dim = int(kernel["kernel"].rpartition("-")[2])
    return 2 * kernel["step"] * dim * 2 // 16 // kernel["threads"]


#: The number of matrix products of two tiles, by the kernel's pass.
TILE_PRODUCTS = {
    "forward": 2,
    "forward_split": 3,
    "backward_queries": 3,
    "backward_keys": 4,
    "backward": 5,
    "backward_factor": 5,
}


def common_path(kernel: dict[str, Any], nvdisasm: str) -> list[Instruction] | None:
    """Returns the common path through a kernel's main loop.

    Returns None if some of its products are in an inner loop, which the path would not repeat.
    """
    kind, function, dim = kernel["kernel"].split("-")
    if kernel["producers"] > 0:
        # One instruction multiplies 16 columns of all rows, or 16 rows by all columns.
        outputs = 2 if kind.endswith("_split") else 1
        products = (outputs * kernel["step"] + int(dim)) // 16
    else:
        # One instruction multiplies 16 rows by 16 columns, for 8 rows of the other tile.
        parts = kernel["rows"] // 16 * (kernel["step"] // 16)
        products = TILE_PRODUCTS[kind] * 2 * parts * (int(dim) // 16)
        if kind in {"backward", "backward_factor"} and function != "dot":
            # One pass sums the weights of distances by products with ones, for keys and for
            # queries. Each warp has a quarter of the queries' products.
            products += 2 * parts
    path = main_loop(
        read(kernel["path"], nvdisasm), (products, pairs_of(kernel), copies_of(kernel))
    )
    return path if count(path, PRODUCT, GROUP_PRODUCT) == products else None
