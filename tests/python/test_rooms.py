"""Includes point one way (CONTRIBUTING.md, Rooms)."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each room, longest path first, and the rooms that it may include besides itself. Public headers of
# the core declare what base, cpu and core define, so every room reads them.
HEADERS = {"include/gnomon"}
KERNELS = HEADERS | {"src/base"}
CORE = KERNELS | {"src/core", "src/cpu", "src/cuda", "src/definitions", "src/reference"}
OPS = CORE | {"include/gnomon/torch", "src/ops"}
ROOMS = {
    "include/gnomon/torch": HEADERS,
    "include/gnomon": set(),
    "src/definitions": set(),
    "src/base": HEADERS,
    "src/reference": KERNELS,
    "src/cpu": KERNELS,
    "src/cuda": KERNELS,
    "src/core": CORE,
    "src/ops": OPS,
    "training": OPS,
    "text": OPS | {"training"},
    "models": OPS | {"training", "text"},
    "tasks": OPS | {"training", "text", "models"},
    "cli": OPS | {"training", "text", "models", "tasks"},
}
# Headers of PyTorch, and the rooms that may read them.
TORCH = re.compile(r"(ATen|c10|torch)/")
ON_TORCH = {
    "include/gnomon/torch",
    "src/ops",
    "training",
    "text",
    "models",
    "tasks",
    "cli",
}
INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', re.MULTILINE)


def room_of(path: str) -> str | None:
    return next((room for room in ROOMS if path.startswith(room + "/")), None)


def wrong_includes(root: Path, files: list[str]) -> list[str]:
    """The includes, as "file: header", that point the other way."""
    wrong = []
    for file in files:
        room = room_of(file)
        if room is None or not file.endswith((".cc", ".h")):
            continue
        for header in INCLUDE.findall((root / file).read_text()):
            where = [f"{folder}{header}" for folder in ("", "src/", "include/")]
            target = next((room_of(path) for path in where if (root / path).is_file()), None)
            allowed = target is None or target == room or target in ROOMS[room]
            if TORCH.match(header) and room not in ON_TORCH:
                allowed = False
            if not allowed:
                wrong.append(f"{file}: {header}")
    return wrong


def test_includes_point_one_way():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a checkout: which files are the project's is not known")
    files = [file for file in listed.stdout.splitlines() if (ROOT / file).is_file()]
    assert {room_of(file) for file in files} >= set(ROOMS)
    assert wrong_includes(ROOT, files) == []


@pytest.mark.parametrize(
    ("file", "header"),
    [
        ("src/base/a.h", "cpu/b.h"),
        ("src/base/a.h", "core/b.h"),
        ("src/cpu/a-inl.h", "core/b.h"),
        ("src/cpu/a-inl.h", "reference/b.h"),
        ("src/reference/a-inl.h", "cpu/b.h"),
        ("src/definitions/a-inl.h", "base/b.h"),
        ("src/definitions/a-inl.h", "gnomon/b.h"),
        ("src/core/a.cc", "ops/b.h"),
        ("src/core/a.cc", "gnomon/torch/b.h"),
        ("src/core/a.cc", "ATen/ATen.h"),
        ("include/gnomon/a.h", "torch/torch.h"),
        ("include/gnomon/a.h", "base/b.h"),
        ("include/gnomon/torch/a.h", "ops/b.h"),
        ("src/ops/attention/a.cc", "models/b.h"),
        ("training/a.cc", "text/b.h"),
        ("training/a.cc", "tasks/b.h"),
        ("text/a.cc", "models/b.h"),
        ("models/a.cc", "tasks/b.h"),
        ("tasks/a.cc", "cli/b.h"),
    ],
)
def test_a_planted_include_is_seen(tmp_path, file, header):
    for room in ROOMS:
        (tmp_path / room).mkdir(parents=True, exist_ok=True)
        (tmp_path / room / "b.h").write_text("")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(f'#include <vector>\n#include "{header}"\n')
    assert wrong_includes(tmp_path, [file]) == [f"{file}: {header}"]


def test_includes_of_lower_rooms_are_fine(tmp_path):
    for room in ROOMS:
        (tmp_path / room).mkdir(parents=True, exist_ok=True)
        (tmp_path / room / "b.h").write_text("")
    file = "cli/a.cc"
    headers = [
        "torch/torch.h",
        "tasks/b.h",
        "models/b.h",
        "ops/b.h",
        "core/b.h",
        "gnomon/torch/b.h",
        "cli/b.h",
    ]
    (tmp_path / file).write_text("".join(f'#include "{header}"\n' for header in headers))
    assert wrong_includes(tmp_path, [file]) == []
