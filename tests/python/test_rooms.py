"""Checks the direction of includes and imports (CONTRIBUTING.md, Folders)."""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from gnomon import _lab

pytestmark = pytest.mark.cpu("files alone")

ROOT = Path(__file__).resolve().parents[2]

# Each folder (longest path first), and the folders that it may include in addition to itself. All
# folders may include the public headers of the core, which declare functions of base, cpu and core.
HEADERS = {"include/gnomon"}
KERNELS = HEADERS | {"src/base"}
CORE = KERNELS | {"src/core", "src/cpu", "src/cuda", "src/definitions", "src/reference"}
# The folders within src/ops, and the folders that each may include.
WITHIN_OPS = {
    "operators": set(),
    "grammar": set(),
    "coordinates": {"operators", "grammar"},
    "catalogue": {"operators", "grammar", "coordinates"},
    "geometry": {"operators", "grammar", "coordinates", "catalogue"},
    "similarities": {"operators", "grammar", "coordinates", "catalogue", "geometry"},
    "positions": {"operators", "grammar", "coordinates", "catalogue"},
    "encodings": {"operators", "grammar", "coordinates", "catalogue"},
    "attention": {"operators", "grammar", "coordinates", "catalogue", "geometry"},
    "graph": {"operators", "attention"},
    "linear": {"operators", "catalogue", "attention"},
    "nn": {"operators", "grammar", "coordinates", "catalogue", "attention"},
}
PUBLIC = HEADERS | {"include/gnomon/torch"}
BELOW_OPS = CORE | PUBLIC
OPS = BELOW_OPS | {"src/ops"} | {f"src/ops/{room}" for room in WITHIN_OPS}
ROOMS = {
    **{
        f"src/ops/{room}": BELOW_OPS | {f"src/ops/{other}" for other in others}
        for room, others in WITHIN_OPS.items()
    },
    "include/gnomon/torch": HEADERS,
    "include/gnomon": set(),
    "src/definitions": set(),
    "src/base": HEADERS,
    "src/reference": KERNELS,
    "src/cpu": KERNELS,
    "src/cuda": KERNELS,
    "src/core": CORE,
    "src/ops": OPS,
    # The lab is an application of the library, so it may include only public headers.
    "lab/training": PUBLIC,
    "lab/text": PUBLIC | {"lab/training"},
    "lab/models": PUBLIC | {"lab/training", "lab/text"},
    "lab/tasks": PUBLIC | {"lab/training", "lab/text", "lab/models"},
    "lab/cli": PUBLIC | {"lab/training", "lab/text", "lab/models", "lab/tasks"},
}
# PyTorch headers, and the folders that may include them.
TORCH = re.compile(r"(ATen|c10|torch)/")
ON_TORCH = ("include/gnomon/torch", "src/ops", "lab")
INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', re.MULTILINE)


def room_of(path: str) -> str | None:
    return next((room for room in ROOMS if path.startswith(room + "/")), None)


def wrong_includes(root: Path, files: list[str]) -> list[str]:
    """All violations, as "file: header"."""
    wrong = []
    for file in files:
        room = room_of(file)
        if room is None or not file.endswith((".cc", ".h", ".cuh")):
            continue
        for header in INCLUDE.findall((root / file).read_text()):
            where = [f"{folder}{header}" for folder in ("", "src/", "include/", "lab/")]
            target = next((room_of(path) for path in where if (root / path).is_file()), None)
            allowed = target is None or target == room or target in ROOMS[room]
            if TORCH.match(header) and not room.startswith(ON_TORCH):
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
        pytest.skip("not a git checkout, so the project's files are unknown")
    files = [file for file in listed.stdout.splitlines() if (ROOT / file).is_file()]
    assert {room_of(file) for file in files} >= set(ROOMS)
    assert wrong_includes(ROOT, files) == []


def test_the_compiler_of_the_lab_sees_no_private_header():
    build = ROOT / "build"
    commands = json.loads((build / "compile_commands.json").read_text())
    of_lab = [
        entry for entry in commands if (build / entry["output"]).is_relative_to(build / "lab")
    ]
    targets = {re.findall(r"(\w+)\.dir/", entry["output"])[0] for entry in of_lab}
    assert targets >= {"gnomon_text", "gnomon_models", "gnomon_tasks", "gnomon_cli", "gnomon"}
    for entry in of_lab:
        folders = re.findall(r"-(?:I|isystem) ?(\S+)", entry["command"])
        assert not {str(ROOT / "src"), str(build / "generated")} & set(folders), entry["output"]


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
        ("src/ops/attention/a.cc", "ops/nn/b.h"),
        ("src/ops/catalogue/a.h", "ops/attention/b.h"),
        ("src/ops/catalogue/a.h", "ops/similarities/b.h"),
        ("src/ops/coordinates/a.h", "ops/catalogue/b.h"),
        ("src/ops/geometry/a.cc", "ops/attention/b.h"),
        ("src/ops/operators/a.cc", "ops/graph/b.h"),
        ("src/ops/positions/a.cc", "ops/attention/b.h"),
        ("src/ops/nn/a.cc", "ops/positions/b.h"),
        ("lab/training/a.cc", "text/b.h"),
        ("lab/training/a.cc", "tasks/b.h"),
        ("lab/training/a.cc", "base/b.h"),
        ("lab/text/a.cc", "models/b.h"),
        ("lab/models/a.cc", "tasks/b.h"),
        ("lab/models/a.cc", "ops/nn/b.h"),
        ("lab/tasks/a.cc", "cli/b.h"),
        ("lab/cli/a.cc", "core/b.h"),
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
    file = "lab/cli/a.cc"
    headers = [
        "torch/torch.h",
        "tasks/b.h",
        "models/b.h",
        "gnomon/b.h",
        "gnomon/torch/b.h",
        "cli/b.h",
    ]
    (tmp_path / file).write_text("".join(f'#include "{header}"\n' for header in headers))
    assert wrong_includes(tmp_path, [file]) == []


# Files that register terms or tasks define the same file-local names, and unity builds join them.
REGISTERS = re.compile(r"^const Register(?:Task|Position|Similarity)\b", re.MULTILINE)


def lacks_namespace(name: str, text: str) -> bool:
    """Whether a file registers something outside a namespace with the file's name."""
    return REGISTERS.search(text) is not None and f"\nnamespace {name} {{\n" not in text


def test_terms_and_tasks_have_their_own_namespaces():
    files = [
        *(ROOT / "src/ops").rglob("*.cc"),
        *(ROOT / "lab/tasks").glob("*.cc"),
        *(ROOT / "examples/terms").glob("*.cc"),
    ]
    texts = [(file.name, file.read_text()) for file in files]
    page = (ROOT / "CONTRIBUTING.md").read_text()
    texts += re.findall(r"<!-- example: (\w+\.cc) -->\n```cpp\n([^`]*)```", page)
    registering = {name for name, text in texts if REGISTERS.search(text)}
    assert registering >= {"alibi.cc", "penumbral.cc", "text.cc", "root.cc", "recall.cc"}
    assert [name for name, text in texts if lacks_namespace(name.removesuffix(".cc"), text)] == []
    assert lacks_namespace("a", "namespace {\nconst RegisterTask<A> registered;\n}\n")


# The subpackages of gnomon, and the subpackages that each may import. All may import the modules
# directly in gnomon, which contain operators and terms.
BESIDE = "gnomon"
PACKAGES = {
    "gnomon.nn": set(),
    "gnomon.integrations": {"gnomon.nn"},
    "gnomon.distributed": set(),
    # The lab, which no other folder imports.
    "gnomon.lab.models": {"gnomon.nn", "gnomon.lab"},
    "gnomon.lab._plots": set(),
    "gnomon.lab.inspect": {"gnomon.nn", "gnomon.lab.models", "gnomon.lab._plots"},
    "gnomon.lab.data": {"gnomon.lab"},
    "gnomon.lab.report": {"gnomon.lab._plots"},
    "gnomon.lab": set(),
}
# These modules may import all subpackages.
ENTRIES = {"gnomon.__init__", *(f"gnomon.{name}" for name in _lab.NAMES)}
# Libraries that only some folders may import, so that the others work without them.
OPTIONAL = {
    "matplotlib": {"gnomon.lab.inspect", "gnomon.lab.report", "gnomon.lab._plots"},
    "transformers": {"gnomon.integrations"},
}


def package_of(module: str) -> str:
    return next((room for room in PACKAGES if f"{module}.".startswith(f"{room}.")), BESIDE)


def wrong_imports(root: Path) -> list[str]:
    """All violations in a folder that contains the package, as "module: name"."""
    wrong = []
    for file in sorted((root / "gnomon").rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        if module in ENTRIES:
            continue
        room = package_of(module)
        names = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                origin = node.module
                if node.level > 0:  # relative to the module's package
                    package = file.relative_to(root).parent.parts
                    parts = [*package[: len(package) + 1 - node.level], node.module]
                    origin = ".".join(filter(None, parts))
                names |= {f"{origin}.{alias.name}" for alias in node.names}
        for name in sorted(names):
            target = package_of(name)
            rooms = OPTIONAL.get(name.split(".")[0])
            if target not in {BESIDE, room, *PACKAGES.get(room, ())} or (
                rooms is not None and room not in rooms
            ):
                wrong.append(f"{module}: {name}")
    return wrong


def test_imports_point_one_way():
    assert wrong_imports(ROOT / "python") == []
    folders = {path.parent.name for path in (ROOT / "python/gnomon").glob("*/__init__.py")}
    assert {f"gnomon.{name}" for name in folders} <= set(PACKAGES)


@pytest.mark.parametrize(
    ("file", "line", "name"),
    [
        (
            "_attention.py",
            "from gnomon.nn import MultiheadAttention",
            "gnomon.nn.MultiheadAttention",
        ),
        ("position.py", "from gnomon import nn", "gnomon.nn"),
        ("distributed.py", "import gnomon.lab.models", "gnomon.lab.models"),
        ("_attention.py", "from gnomon.lab import demo", "gnomon.lab.demo"),
        ("nn/_caches.py", "from gnomon.lab.models import Tokenizer", "gnomon.lab.models.Tokenizer"),
        ("nn/_caches.py", "from ..lab.models import Tokenizer", "gnomon.lab.models.Tokenizer"),
        ("nn/__init__.py", "from .. import lab", "gnomon.lab"),
        (
            "lab/models/__init__.py",
            "from gnomon.lab.inspect import rank",
            "gnomon.lab.inspect.rank",
        ),
        ("nn/_caches.py", "import matplotlib.pyplot", "matplotlib.pyplot"),
        ("lab/models/__init__.py", "def f():\n    import transformers", "transformers"),
    ],
)
def test_a_planted_import_is_seen(tmp_path, file, line, name):
    path = tmp_path / "gnomon" / file
    path.parent.mkdir(parents=True)
    path.write_text(f"from gnomon._library import ops\n{line}\n")
    module = ".".join(("gnomon", *Path(file).with_suffix("").parts))
    assert wrong_imports(tmp_path) == [f"{module}: {name}"]
