"""Similarities: the number s_ij that a query and a key give to the softmax.

gamma and beta are any real number, or a tensor, which may require grad: (H,) with one for each
query head, or () with one for all.

Whatever takes a similarity takes a specification in its place, too: "penumbral:score=height2". Of
what it does not mention, gamma and beta are those that a module starts with, which make the spread
of the scores of N(0, 1) tokens 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gnomon._checks import wrong_type
from gnomon._terms import Term

__all__ = [
    "Additive",
    "Dot",
    "Entailment",
    "Gaussian",
    "Hyperbolic",
    "Laplacian",
    "Penumbral",
    "Similarity",
    "Specified",
    "Umbral",
]


class Similarity(Term):
    """The base of all similarities."""


@dataclass(frozen=True, eq=False)
class Specified(Similarity):
    """One that is given by a specification, "penumbral:gamma=tensor:score=height2".

    tensors are those of its parameters that are "name=tensor" there.
    """

    spec: str
    tensors: tuple[Tensor, ...] = ()

    def _lower(self) -> tuple[str, list[Tensor]]:
        return self.spec, list(self.tensors)

    def _own_tensors(self) -> list[Tensor]:
        return list(self.tensors)


def to_similarity(operator: str, similarity: object) -> Similarity:
    """What an argument that is a similarity, a specification or None stands for."""
    if isinstance(similarity, Similarity):
        return similarity
    if similarity is None:
        return _DOT
    if isinstance(similarity, str):
        return Specified(similarity)
    raise wrong_type(
        operator, "similarity", similarity, "one of gnomon.similarity, or a specification"
    )


@dataclass(frozen=True, eq=False)
class Dot(Similarity):
    """scale * q.k, by default with 1/sqrt(D) (Vaswani et al. 2017, eq. 1).

    Under a soft cap c it is c tanh(scale * q.k / c), between -c and c (Riviere et al. 2024, Gemma
    2); masks and biases come after it.
    """

    softcap: float | None = None

    _name: ClassVar[str] = "dot"
    _options: ClassVar[tuple[str, ...]] = ("softcap",)


@dataclass(frozen=True, eq=False)
class Laplacian(Similarity):
    """-gamma |q - k|."""

    gamma: float | Tensor

    _name: ClassVar[str] = "laplacian"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)


@dataclass(frozen=True, eq=False)
class Gaussian(Similarity):
    """-gamma |q - k|^2."""

    gamma: float | Tensor

    _name: ClassVar[str] = "gaussian"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)


@dataclass(frozen=True, eq=False)
class Umbral(Similarity):
    """-gamma h ("height") or -gamma log h ("log"), h the height of the lowest common ancestor.

    Of umbral cones of balls of radius r. Needs D >= 2: the last coordinate z is the height's. map
    "psi": height e^z, X = x e^z, z clamped to +-30; "exp": the exponential map of the half-space at
    (0, ..., 0, 1), tangents no longer than 30; "none": (X, height) = (x, z) (Tseng et al. 2023).
    """

    gamma: float | Tensor
    r: float = 0.1
    map: str = "psi"
    score: str = "height"

    _name: ClassVar[str] = "umbral"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)
    _options: ClassVar[tuple[str, ...]] = ("r", "map", "score")


@dataclass(frozen=True, eq=False)
class Penumbral(Similarity):
    """-gamma h ("height"), -gamma h^2 ("height2") or gamma log(r / h) ("log").

    h is the height of the lowest common ancestor of penumbral cones below the horosphere of height
    r. Needs D >= 2: the last coordinate z is the height's. map "xi": height r sigmoid(z),
    X = x r sigmoid(z); "exp": the exponential map of the half-space at (0, ..., 0, 1), heights
    clamped to r; "none": (X, height) = (x, z), z clamped to [0, r] (Tseng et al. 2023).
    """

    gamma: float | Tensor
    r: float = 1.0
    map: str = "xi"
    score: str = "height"

    _name: ClassVar[str] = "penumbral"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)
    _options: ClassVar[tuple[str, ...]] = ("r", "map", "score")


@dataclass(frozen=True, eq=False)
class Hyperbolic(Similarity):
    """-beta d, d the distance in hyperbolic space (Gulcehre et al. 2019).

    The model says what the map "none" takes, and which maps there are, the first by default:

    - "hyperboloid": "pseudopolar", the point at distance z, the last coordinate, from the origin in
      the direction of the others, x; "exp", the exponential map at the origin, of D-dimensional
      tangents; "none", points (x, t), whose time t is taken to be sqrt(1 + |x|^2);
    - "half_space": "psi" and "exp" as for Umbral; "xi", height sigmoid(z), X = x sigmoid(z);
      "none", (X, height), heights clamped to e^-30 .. e^30;
    - "ball" (Poincare's) and "klein": "exp"; "none", points of the unit ball, where those outside
      are pulled to its edge.

    Needs D >= 2, but for the two balls and "exp". Maps reach no farther than 30 from the origin.
    """

    beta: float | Tensor
    model: str = "hyperboloid"
    map: str | None = None

    _name: ClassVar[str] = "hyperbolic"
    _tensors: ClassVar[tuple[str, ...]] = ("beta",)
    _options: ClassVar[tuple[str, ...]] = ("model", "map")


@dataclass(frozen=True, eq=False)
class Entailment(Similarity):
    """-gamma max(0, Xi - psi): how far k is outside the entailment cone of q in the Poincare ball.

    Xi is the angle at q between the cone's axis and k, psi = arcsin(K (1 - |q|^2) / |q|) the
    aperture, pi / 2 where that has none (Ganea et al. 2018, eqs. 26 and 28). map "ball":
    tanh(|x| / 2) x / |x|; "none": points of the unit ball, where those outside are pulled to its
    edge.
    """

    gamma: float | Tensor
    K: float = 0.1
    map: str = "ball"

    _name: ClassVar[str] = "entailment"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)
    _options: ClassVar[tuple[str, ...]] = ("K", "map")


@dataclass(frozen=True, eq=False)
class Additive(Similarity):
    """LeakyReLU(q + k) with that slope below 0.

    q and k (B, H, L, 1) are the two scores of graph attention (Velickovic et al. 2018, eq. 3).
    """

    slope: float = 0.2

    _name: ClassVar[str] = "additive"
    _options: ClassVar[tuple[str, ...]] = ("slope",)


_DOT = Dot()
