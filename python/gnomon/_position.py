"""Base class, specifications and sums of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gnomon._catalogue import components_of, entry_of, reads_axes
from gnomon._checks import wrong_type
from gnomon._terms import SpecifiedTerm, Term


class Position(Term):
    """Base class of all positions."""

    _module = "position"

    def _is_bias(self) -> bool:
        """Returns whether this is a single offset bias that can act along a grid axis."""
        if hasattr(self, "_name"):
            entry = entry_of(self._name)
            return entry is not None and reads_axes(entry)
        components = components_of(self._lower()[0])
        return len(components) == 1 and (
            reads_axes(components[0].entry) and not components[0].lies_on_a_grid
        )

    def __add__(self, other: Position | str) -> Sum:
        """Returns the sum of this position and another."""
        if not isinstance(other, (Position, str)):
            return NotImplemented
        return Sum((self, other))

    def __radd__(self, other: str) -> Sum:
        """Returns the sum of a specification and this position."""
        if not isinstance(other, str):
            return NotImplemented
        return Sum((other, self))


class Specified(SpecifiedTerm, Position):
    """A position given by a specification, or a sum such as "rope+alibi:slopes=tensor".

    tensors contains the values of the parameters written as "name=tensor": term by term, and in
    catalogue order within each term.

    Example:
        >>> slopes = gnomon.alibi_slopes(8)
        >>> term = gnomon.position.Specified("rope+alibi:slopes=tensor", (slopes,))
        >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind()  # (B, H, L, D)
        >>> o = gnomon.attention(q, k, v, position=term)
    """


@dataclass(frozen=True, eq=False)
class Sum(Position):
    """Sum of several positions, sums or specifications; ``a + b`` creates one.

    Example:
        >>> term = "rope" + gnomon.position.ALiBi(gnomon.alibi_slopes(8))
        >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind()  # (B, H, L, D)
        >>> o = gnomon.attention(q, k, v, position=term)
    """

    terms: Sequence[Position | str]

    def __post_init__(self) -> None:
        if isinstance(self.terms, (str, Position)) or not isinstance(self.terms, Sequence):
            raise wrong_type("position.Sum", "terms", self.terms, "a sequence of positions")
        # Make a copy, because the caller may modify a list later.
        self._set("terms", tuple(to_positions("position.Sum", self.terms, "terms")))

    def _lower(self) -> tuple[str, Sequence[Tensor]]:
        spec = ""
        tensors: list[Tensor] = []
        for term in to_positions("position.Sum", self.terms):
            its_spec, its_tensors = term._lower()
            spec += ("+" if spec else "") + its_spec
            tensors += its_tensors
        return spec or "none", tensors

    def __repr__(self) -> str:
        return " + ".join(
            repr(term.spec) if isinstance(term, Specified) and not term.tensors else repr(term)
            for term in self.terms
        )


def to_positions(operator: str, position: object, argument: str = "position") -> list[Position]:
    """Converts a position, a specification, a list of them or None to a list of summands."""
    if position is None:
        return []
    if isinstance(position, Sum):
        return [term for term in position.terms if isinstance(term, Position)]
    if isinstance(position, Position):
        return [position]
    if isinstance(position, str):
        return [Specified(position)]
    expected = "a gnomon.position object, a string such as 'rope', or a list of these"
    if not isinstance(position, Sequence):
        raise wrong_type(operator, argument, position, expected)
    terms: list[Position] = []
    for term in position:
        if not isinstance(term, (Position, str)):
            raise wrong_type(operator, argument, term, expected)
        terms += to_positions(operator, term, argument)
    return terms


def to_components(positions: Sequence[Position]) -> list[Specified]:
    """Splits positions into single terms, each with its own tensors."""
    parts = []
    for position in positions:
        spec, tensors = position._lower()
        first = 0
        for component in components_of(spec):
            end = first + len(component.tensors)
            parts.append(Specified(component.spec, tuple(tensors[first:end])))
            first = end
    return parts


def flipped_grid(operator: str, name: str, table: object) -> Tensor:
    """Returns a table (H, 2 height - 1, ...) with its entries reversed along all axes."""
    if not isinstance(table, Tensor):
        raise wrong_type(operator, name, table, "a tensor")
    return table.flip(list(range(1, table.dim())))


def reversed_rows(operator: str, name: str, rows: object) -> Tensor:
    """Returns a table (n, D) or (H, n, D) with its rows reversed."""
    if not isinstance(rows, Tensor):
        raise wrong_type(operator, name, rows, "a tensor")
    if rows.dim() < 2:
        raise ValueError(
            f"gnomon.{operator}: {name} has shape {list(rows.shape)}; expected (n, D) or (H, n, D)"
        )
    return rows.flip(-2)


# Error messages and pickles should name the public module.
for _term in (Position, Specified, Sum):
    _term.__module__ = "gnomon.position"
