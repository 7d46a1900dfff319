"""Descriptions of the library's similarities and positions (include/gnomon/catalogue.h)."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from gnomon import _library
from gnomon._checks import wrong_type
from gnomon._library import ops, query


def catalogue() -> dict[str, list[dict[str, Any]]]:
    """Describes all similarities and positions, in the order of ``gnomon list``.

    Returns:
        A dictionary with the lists "similarities" and "positions". Each entry is a dictionary that
        describes one term: its name, title, formula (as text and in LaTeX, with a note), details,
        source, cost, Python class, parameters and, if load_terms added the term, its library.
        The entry's role is "similarity" or the kind of position ("rotation", "bias", "content",
        ...). Other fields tell whether the term needs a grid, a causal mask or the dot product. A
        parameter has a name, kind, meaning, default, choices and range. include/gnomon/catalogue.h
        documents all fields.

    Example:
        >>> [entry["name"] for entry in gnomon.catalogue()["similarities"]][:3]
        ['dot', 'additive', 'cosine']
    """
    found: dict[str, list[dict[str, Any]]] = query("catalogue")
    return found


def _entries_by_name() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entries in catalogue().values() for entry in entries}


#: Built at import because torch.compile cannot trace the lookup.
_ENTRIES = _entries_by_name()


def load_terms(path: str | os.PathLike[str]) -> list[str]:
    """Loads an external library of similarities, positions and encodings into this process.

    Afterwards, their names are valid in every specification, and catalogue() lists them. To pass
    tensors, use ``similarity.Specified("student_t:gamma=tensor", (gamma,))`` or
    ``position.Specified``. The ``gnomon`` command loads such libraries with --terms.

    Args:
        path: the shared library, built with gnomon_add_terms() from gnomon's CMake package
            (examples/terms). Loading it again has no effect, even if the file has changed; to load
            the new file, start a new process.

    Returns:
        The names of the terms in the library.

    Raises:
        TypeError: path is neither a string nor an os.PathLike object.
        ValueError: the file does not exist, was built for a different gnomon or PyTorch, or
            contains no terms; or a term's name is already in use. In each case, no term is added.

    Example:
        >>> names = gnomon.load_terms("build/libmy_terms.so")  # doctest: +SKIP
    """
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type("load_terms", "path", path, "a path")
    names: list[str] = ops.load_terms(os.fspath(path))
    _library.loads += 1
    _ENTRIES.update(_entries_by_name())
    return names


def entry_of(name: str) -> dict[str, Any] | None:
    """Returns the catalogue entry with this name, or None."""
    return _ENTRIES.get(name)


def reads_axes(entry: dict[str, Any]) -> bool:
    """Returns whether the entry is an offset bias that can act along a grid axis."""
    parameters = entry.get("parameters", [])
    return entry.get("role") == "bias" and any(p["name"] == "axis" for p in parameters)


def biases_of_axes() -> list[str]:
    """Returns the names of the offset biases that can act along a grid axis."""
    return [name for name, entry in _ENTRIES.items() if reads_axes(entry)]


class Component(NamedTuple):
    """One term of a specification."""

    name: str
    options: dict[str, str]
    spec: str
    #: The grid's prefix, then its axis lengths; () for terms without a shape.
    grid: tuple[int, ...]

    @property
    def entry(self) -> dict[str, Any]:
        """The catalogue entry, or an empty dictionary if the name is unknown."""
        return entry_of(self.name) or {}

    @property
    def lies_on_a_grid(self) -> bool:
        return bool(self.grid) or self.entry.get("needs_grid", False)

    def tables(self, *indices: str) -> list[str]:
        """Returns the names of the table parameters with one of these index kinds."""
        return [
            parameter["name"]
            for parameter in self.entry.get("parameters", [])
            if parameter["index"] in indices
        ]

    @property
    def tensors(self) -> list[str]:
        """The names of the parameters that are passed as tensors, in catalogue order."""
        order = [parameter["name"] for parameter in self.entry.get("parameters", [])]
        given = [key for key, value in self.options.items() if value == "tensor"]
        return sorted(given, key=lambda key: order.index(key) if key in order else len(order))


def components_of(spec: str) -> list[Component]:
    """Splits a sum into its terms. Unknown names are accepted."""
    return [
        Component(name, dict(options), text, tuple(grid))
        for name, options, text, grid in query("components", spec)
    ]


class ModuleTensor(NamedTuple):
    """A similarity or position tensor of gnomon.nn.MultiheadAttention."""

    name: str
    component: Component
    #: The component's parameter.
    parameter: str
    #: The tensor's role: "value"; "start" or "theta" of a per-head parameter; "weight" or "bias" of
    #: a token projection.
    part: str
    #: A table's index kind in the catalogue; "" for other tensors.
    indexed_by: str


def module_tensors(similarity: str, position: str) -> list[ModuleTensor]:
    """Lists the tensors of a module with these specifications, in the module's order."""
    components = components_of(position) + components_of(similarity)  # the similarity has index -1
    return [
        ModuleTensor(name, components[place], *its)
        for name, place, *its in query("module_tensor_origins", similarity, position)
    ]
