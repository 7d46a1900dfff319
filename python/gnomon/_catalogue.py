"""The library's similarities and positions as data (include/gnomon/catalogue.h)."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from gnomon._checks import wrong_type
from gnomon._library import ops


def catalogue() -> dict[str, list[dict[str, Any]]]:
    """The similarities and positions that there are, in the order of ``gnomon list``.

    Returns:
        A dictionary with the lists "similarities" and "positions". Each entry has its name and
        title, formula (as text and in LaTeX, with a note), details, source, role ("similarity", or
        what a position does: "rotation", "bias", "content", ...), cost, whether it needs a grid,
        causal or the dot product, the name of its class here, the library of load_terms that it
        comes from, and parameters: name, kind, meaning, default, choices, range, whether it may be
        a tensor, what a table is indexed by, and whether it is an argument of the class. The fields
        and the roles are those of include/gnomon/catalogue.h.
    """
    found: dict[str, list[dict[str, Any]]] = json.loads(ops.catalogue())
    return found


def _entries_by_name() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entries in catalogue().values() for entry in entries}


#: Read in advance: torch.compile cannot read it while it traces.
_ENTRIES = _entries_by_name()


def load_terms(path: str | os.PathLike[str]) -> list[str]:
    """Loads a library of similarities, positions and encodings from outside, for this process.

    From then on their names work wherever a specification does: attention(), modules, grids,
    catalogue(). As terms with tensors they are ``similarity.Specified("student_t:gamma=tensor",
    (gamma,))`` and ``position.Specified``. The programs take such libraries by --terms.

    Args:
        path: of the shared library, which gnomon_add_terms() of gnomon's CMake package makes
            (examples/terms). To load it again changes nothing, even if the file is another one by
            now: that takes a new process.

    Returns:
        The names of its terms.

    Raises:
        TypeError: path is no path.
        ValueError: there is no such file, it was built for another gnomon or another PyTorch, it
            has no terms, or one of a name that is taken. Nothing is added then.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type("load_terms", "path", path, "a path")
    names: list[str] = ops.load_terms(os.fspath(path))
    _ENTRIES.update(_entries_by_name())
    return names


def entry_of(name: str) -> dict[str, Any] | None:
    """The entry of that name, or None."""
    return _ENTRIES.get(name)


def reads_axes(entry: dict[str, Any]) -> bool:
    """Whether it is a bias by offset that may lie along an axis of a grid."""
    parameters = entry.get("parameters", [])
    return entry.get("role") == "bias" and any(p["name"] == "axis" for p in parameters)


def biases_of_axes() -> list[str]:
    """Their names."""
    return [name for name, entry in _ENTRIES.items() if reads_axes(entry)]


class Component(NamedTuple):
    """One of the terms of a specification."""

    name: str
    options: dict[str, str]
    spec: str
    #: The prefix and the lengths of the grid that it has a shape of; () otherwise.
    grid: tuple[int, ...]

    @property
    def entry(self) -> dict[str, Any]:
        """Of the catalogue; empty where there is none of that name."""
        return entry_of(self.name) or {}

    @property
    def lies_on_a_grid(self) -> bool:
        return bool(self.grid) or self.entry.get("needs_grid", False)

    def tables(self, *indices: str) -> list[str]:
        """The parameters that are tables indexed by one of these."""
        return [
            parameter["name"]
            for parameter in self.entry.get("parameters", [])
            if parameter["index"] in indices
        ]

    @property
    def tensors(self) -> list[str]:
        """The parameters whose tensors come with the specification, in their order."""
        order = [parameter["name"] for parameter in self.entry.get("parameters", [])]
        given = [key for key, value in self.options.items() if value == "tensor"]
        return sorted(given, key=lambda key: order.index(key) if key in order else len(order))


def components_of(spec: str) -> list[Component]:
    """The terms of a sum; their names need not be known."""
    return [
        Component(name, dict(option.split("=", 1) for option in options), text, tuple(grid))
        for name, options, text, grid in zip(*ops.components(spec), strict=True)
    ]


class ModuleTensor(NamedTuple):
    """A tensor that gnomon.nn.MultiheadAttention has for its similarity or its position."""

    name: str
    component: Component
    #: The parameter of the component.
    parameter: str
    #: What it is to the parameter: its "value"; of one value per head the "start" and "theta"; of a
    #: projection of tokens the "weight" and the "bias".
    part: str
    #: Of a table, what it is indexed by, as the catalogue says; otherwise "".
    indexed_by: str


def module_tensors(similarity: str, position: str) -> list[ModuleTensor]:
    """The tensors of a module of these specifications, in its order."""
    names, places, *rest = ops.module_tensor_origins(similarity, position)
    components = components_of(position) + components_of(similarity)  # at place -1
    return [
        ModuleTensor(name, components[place], *its)
        for name, place, *its in zip(names, places, *rest, strict=True)
    ]
