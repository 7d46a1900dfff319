"""Positions: what the places p_i of a query and p_j of a key do to the scores.

``RoPE() + ALiBi(slopes)`` is their sum, as is a list of them: at most one RoPE, one content term
(Relative, TransformerXL, Relative2D, AbsoluteKeys), which reads q as it was passed, and any number
of biases. Each is learned iff its tensor requires grad. What is (H,), one for each query head, may
also be a number, or a tensor () without axes, for all heads.

Whatever takes a position takes a specification in its place, too, "rope+alibi", and so does a sum:
``"rope" + ALiBi(slopes)``. What it does not mention is as a module has it at its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gnomon._catalogue import components_of, entry_of, names_of
from gnomon._checks import check_integer, wrong_type
from gnomon._terms import Term, check_shape, to_spec

__all__ = [
    "T5",
    "ALiBi",
    "AbsoluteKeys",
    "Grid",
    "GridBias",
    "HyPE",
    "Kerple",
    "OffsetBias",
    "Position",
    "Relative",
    "Relative2D",
    "RoPE",
    "Specified",
    "Sum",
    "TransformerXL",
]


class Position(Term):
    """The base of all positions."""

    def _is_bias(self) -> bool:
        """Whether it is one bias by offset, which may lie along an axis of a grid."""
        if hasattr(self, "_name"):
            entry = entry_of(self._name)
            return entry is not None and entry["role"] == "bias"
        components = components_of(self._lower()[0])
        return [c.entry.get("role") for c in components] == ["bias"] and not any(
            c.lies_on_a_grid for c in components
        )

    def __add__(self, other: Position | str) -> Sum:
        """The sum of both."""
        if not isinstance(other, (Position, str)):
            return NotImplemented
        return Sum((self, other))

    def __radd__(self, other: str) -> Sum:
        """The sum of both."""
        if not isinstance(other, str):
            return NotImplemented
        return Sum((other, self))


@dataclass(frozen=True, eq=False)
class Specified(Position):
    """One that is given by a specification, which may be a sum, "rope+alibi:slopes=tensor".

    tensors are those of its parameters that are "name=tensor" there, in their order.
    """

    spec: str
    tensors: tuple[Tensor, ...] = ()

    def _lower(self) -> tuple[str, list[Tensor]]:
        return self.spec, list(self.tensors)

    def _own_tensors(self) -> list[Tensor]:
        return list(self.tensors)


@dataclass(frozen=True, eq=False)
class Sum(Position):
    """The sum of several positions, which may be sums and specifications; ``a + b`` makes one."""

    terms: Sequence[Position | str]

    def __post_init__(self) -> None:
        if isinstance(self.terms, (str, Position)) or not isinstance(self.terms, Sequence):
            raise wrong_type("position.Sum", "terms", self.terms, "a sequence of positions")
        # A list may change later.
        self._set("terms", tuple(to_positions("position.Sum", self.terms, "terms")))

    def _lower(self) -> tuple[str, list[Tensor]]:
        spec, tensors = "", []
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
    """The positions whose sum an argument is: a position, a specification, a list of them, None."""
    if position is None:
        return []
    if isinstance(position, Sum):
        return [term for term in position.terms if isinstance(term, Position)]
    if isinstance(position, Position):
        return [position]
    if isinstance(position, str):
        return [Specified(position)]
    expected = "one of gnomon.position, a specification, or a list of them"
    if not isinstance(position, Sequence):
        raise wrong_type(operator, argument, position, expected)
    terms: list[Position] = []
    for term in position:
        if not isinstance(term, (Position, str)):
            raise wrong_type(operator, argument, term, expected)
        terms += to_positions(operator, term, argument)
    return terms


def to_components(positions: Sequence[Position]) -> list[Specified]:
    """Each term of these by itself, with its own tensors."""
    parts = []
    for position in positions:
        spec, tensors = position._lower()
        for component in components_of(spec):
            count = len(component.tensors)
            parts.append(Specified(component.spec, tuple(tensors[:count])))
            del tensors[:count]
    return parts


@dataclass(frozen=True, eq=False)
class RoPE(Position):
    """Rotates the first `dims` coordinates of q and k by p base^(-2 i / dims), before the map.

    layout "interleaved": pairs (2 i, 2 i + 1); "half": pairs (i, i + dims / 2). By default dims is
    D, or the largest even number <= D - 1 where the last coordinate is a height (Su et al. 2021).

    With a shape, tokens lie on a grid in row-major order, after `prefix` tokens that are not
    rotated. The rotated coordinates are split evenly over its axes, each of which rotates its part
    by its own coordinate, with dims / axes for dims; dims is by default the largest multiple of
    2 * axes.

    scaling changes the frequencies for sequences longer than those of the training, by the names
    and numbers that transformers has: "linear:factor=4", "ntk:factor=4",
    "dynamic:factor=4:original_max_position_embeddings=2048", "yarn:..." (Peng et al. 2023),
    "longrope:...:short_factor=1x1.5:long_factor=2x3" with a number for each pair (Ding et al.
    2024), "llama3:...", "proportional:partial_rotary_factor=0.25"; see docs/catalogue.md for all.
    dynamic and longrope go by the length of the call, one past its farthest position. With xpos,
    products of pairs decay with the distance, for dot alone and lengths up to 65536 (Sun et al.
    2023, A Length-Extrapolatable Transformer).
    """

    base: float = 10000.0
    layout: str = "interleaved"
    dims: int | None = None
    shape: Sequence[int] | None = None
    prefix: int = 0
    scaling: str | None = None
    xpos: bool = False

    _name: ClassVar[str] = "rope"
    _options: ClassVar[tuple[str, ...]] = ("base", "layout", "dims", "shape", "prefix", "xpos")

    def _to_spec(self) -> str:
        spec = super()._to_spec()
        if self.scaling is None:
            return spec
        # Its own numbers come with it.
        self._check("scaling", self.scaling, "str", "a string")
        return f"{spec}:scaling={self.scaling}"

    def __post_init__(self) -> None:
        if self.shape is not None:
            # A list that is changed later would leave the specification, which is kept, behind.
            self._set("shape", tuple(check_shape("gnomon.position.RoPE: shape", self.shape)))
        super().__post_init__()


@dataclass(frozen=True, eq=False)
class ALiBi(Position):
    """-slopes_h |p_i - p_j|; slopes (H,), see gnomon.alibi_slopes (Press et al. 2022)."""

    slopes: float | Tensor

    _name: ClassVar[str] = "alibi"
    _tensors: ClassVar[tuple[str, ...]] = ("slopes",)


@dataclass(frozen=True, eq=False)
class HyPE(Position):
    """-tau_h sinh(mu_h |p_i - p_j|); tau and mu numbers or (H,) (Angelotti 2023).

    mode "abs" is that; "odd" takes p_i - p_j, as the paper does; "cosh" is
    tau_h (1 - cosh(mu_h (p_i - p_j))). With causal "abs" and "odd" are the same; without it "odd"
    favours later keys, and the last one most of all. The argument is clamped to +-80; beyond it mu
    has gradient zero.
    """

    tau: float | Tensor
    mu: float | Tensor
    mode: str = "abs"

    _name: ClassVar[str] = "hype"
    _tensors: ClassVar[tuple[str, ...]] = ("tau", "mu")
    _options: ClassVar[tuple[str, ...]] = ("mode",)


class _TableTerm(Position):
    """A position with tables, which have no number in their place."""

    def __post_init__(self) -> None:
        for field in self._tensors:
            value = getattr(self, field)
            if not isinstance(value, Tensor):
                raise wrong_type(f"position.{type(self).__name__}", field, value, "a tensor")
        super().__post_init__()


@dataclass(frozen=True, eq=False)
class T5(_TableTerm):
    """table[bucket(p_j - p_i), h], the table (buckets, H) (Raffel et al. 2020); see t5_bucket."""

    table: Tensor
    bidirectional: bool
    max_distance: int = 128

    _name: ClassVar[str] = "t5"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)
    _options: ClassVar[tuple[str, ...]] = ("bidirectional", "max_distance")


@dataclass(frozen=True, eq=False)
class Kerple(Position):
    """-r1_h log(1 + r2_h |p_i - p_j|) ("log") or -r1_h |p_i - p_j|^r2_h ("power").

    r1 and r2 (H,) (Chi et al. 2022).
    """

    r1: float | Tensor
    r2: float | Tensor
    kind: str = "log"

    _name: ClassVar[str] = "kerple"
    _tensors: ClassVar[tuple[str, ...]] = ("r1", "r2")
    _options: ClassVar[tuple[str, ...]] = ("kind",)


@dataclass(frozen=True, eq=False)
class OffsetBias(_TableTerm):
    """table (H, Lq + Lk - 1): entry n belongs to column - row = n - (Lq - 1).

    Whatever query_offset is; -inf masks. In a module the table is (H, 2 n - 1), of positions: entry
    m belongs to p_j - p_i = m - (n - 1), and calls of up to n tokens, cached ones counted, read
    what they need of it.
    """

    table: Tensor

    _name: ClassVar[str] = "offset_bias"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)


@dataclass(frozen=True, eq=False)
class Relative(_TableTerm):
    """scale q_i.table[p_j - p_i + max_offset], past first.

    table (2 max_offset + 1, D), or max_offset + 1 rows for the past alone, which needs causal.
    Beyond max_offset far "clip" takes the nearest row (Shaw et al. 2018), "zero" none (Huang et al.
    2019). With values, (n, Dv) of as many rows, their row is added to v_j. Both tables may have one
    more axis in front, (H, n, D), for a table of each head.
    """

    table: Tensor
    max_offset: int
    far: str = "clip"
    values: Tensor | None = None

    _name: ClassVar[str] = "relative"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)
    _options: ClassVar[tuple[str, ...]] = ("max_offset", "far")

    @classmethod
    def from_future_first(
        cls, table: Tensor, max_offset: int, far: str = "clip", values: Tensor | None = None
    ) -> Relative:
        """Of tables whose row n is for the offset p_j - p_i = max_offset - n."""

        def reversed_rows(name: str, rows: Tensor) -> Tensor:
            if not isinstance(rows, Tensor):
                raise wrong_type("position.Relative", name, rows, "a tensor")
            if rows.dim() < 2:
                raise ValueError(
                    f"gnomon.position.Relative: {name} has shape {list(rows.shape)}; expected "
                    "(n, D) or (H, n, D)"
                )
            return rows.flip(-2)

        table = reversed_rows("table", table)
        return cls(
            table, max_offset, far, values if values is None else reversed_rows("values", values)
        )

    def _to_spec(self) -> str:
        if self.values is None:
            return super()._to_spec()
        if not isinstance(self.values, Tensor):
            raise wrong_type("position.Relative", "values", self.values, "a tensor, or None")
        return to_spec(super()._to_spec(), values="tensor")

    def _tensor_fields(self) -> list[str]:
        return ["table"] if self.values is None else ["table", "values"]


@dataclass(frozen=True, eq=False)
class TransformerXL(_TableTerm):
    """scale (u_h.k_j + (q_i + v_h).r_h[p_i - p_j]), with Dot and causal alone (Dai et al. 2019).

    u and v (H, D); r (H, n, D), row n the distance p_i - p_j = n, at least Lq + query_offset rows.
    """

    u: Tensor
    v: Tensor
    r: Tensor

    _name: ClassVar[str] = "transformer_xl"
    _tensors: ClassVar[tuple[str, ...]] = ("u", "v", "r")


@dataclass(frozen=True, eq=False)
class Relative2D(_TableTerm):
    """scale q_i.(rows[y_j - y_i + height - 1] + columns[x_j - x_i + width - 1]).

    rows (2 height - 1, D) and columns (2 width - 1, D), or (H, n, D); tokens as in Grid
    (Ramachandran et al. 2019; Srinivas et al. 2021).
    """

    rows: Tensor
    columns: Tensor
    height: int
    width: int
    prefix: int = 0

    _name: ClassVar[str] = "relative2d"
    _tensors: ClassVar[tuple[str, ...]] = ("rows", "columns")

    def _to_spec(self) -> str:
        for field in ("height", "width", "prefix"):
            self._check(field, getattr(self, field), "int")
        shape = (self.height, self.width)
        return to_spec(super()._to_spec(), shape=shape, prefix=self.prefix)


@dataclass(frozen=True, eq=False)
class AbsoluteKeys(_TableTerm):
    """scale q_i.table[j], the table (Lk, D) or (H, Lk, D): learned absolute positions of keys."""

    table: Tensor

    _name: ClassVar[str] = "absolute_keys"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)


@dataclass(frozen=True, eq=False)
class Grid(Position):
    """One bias for each axis of a grid, summed.

    Each of axes (ALiBi, HyPE, T5, Kerple or OffsetBias) reads the coordinates along its axis
    instead of p_i and p_j; shape is (height, width), or of any number of axes. Tokens are in
    row-major order, after `prefix` tokens (a class token) that have no bias, neither as queries nor
    as keys. Self-attention of all tokens only: Lq = Lk = prefix + the product of the shape,
    query_offset None or 0.
    """

    shape: Sequence[int]
    axes: Sequence[Position]
    prefix: int = 0

    _name: ClassVar[str] = "grid"

    def __post_init__(self) -> None:
        shape = check_shape("gnomon.position.Grid: shape", self.shape)
        if not isinstance(self.axes, Sequence):
            raise wrong_type("position.Grid", "axes", self.axes, "a sequence of biases")
        # Lists may change later.
        self._set("shape", tuple(shape))
        self._set("axes", tuple(self.axes))
        self._set("prefix", check_integer("position.Grid", "prefix", self.prefix))
        if len(shape) != len(self.axes):
            raise ValueError(
                f"gnomon.position.Grid: shape has {len(shape)} axes and axes "
                f"{len(self.axes)} biases; expected one bias for each axis"
            )
        for bias in self.axes:
            if not isinstance(bias, Position):
                raise TypeError(
                    f"gnomon.position.Grid: axes have a {type(bias).__name__}; expected biases of "
                    "one offset"
                )
            if not bias._is_bias():
                what = bias.spec if isinstance(bias, Specified) else f"a {type(bias).__name__}"
                raise ValueError(
                    f"gnomon.position.Grid: axes have {what}; expected biases of one offset: "
                    f"{', '.join(names_of('bias'))}"
                )
        super().__post_init__()

    def _to_spec(self) -> str:
        spec = ""
        for axis, bias in enumerate(self.axes):
            plus = "+" if axis > 0 else ""
            its_spec, _ = bias._lower()
            spec += plus + to_spec(its_spec, shape=self.shape, axis=axis, prefix=self.prefix)
        return spec

    def _own_tensors(self) -> list[Tensor]:
        return [tensor for bias in self.axes for tensor in bias._own_tensors()]


@dataclass(frozen=True, eq=False)
class GridBias(_TableTerm):
    """table[h, dy + height - 1, dx + width - 1], dy = y_j - y_i and dx = x_j - x_i.

    table (H, 2 height - 1, 2 width - 1), or of any number of axes; tokens as in Grid. Swin's tables
    (Liu et al. 2021) are indexed by the opposite differences: flip them along both axes.
    """

    table: Tensor
    prefix: int = 0

    _name: ClassVar[str] = "grid_bias"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)
    _options: ClassVar[tuple[str, ...]] = ("prefix",)
