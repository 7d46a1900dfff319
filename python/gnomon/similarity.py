"""Similarities: the number s_ij that a query and a key give to the softmax.

gamma is any real number, or a tensor (H,) with one for each query head, which may require grad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gnomon._terms import LaterTerm, Term

__all__ = [
    "Additive",
    "Dot",
    "Entailment",
    "Gaussian",
    "Hyperbolic",
    "Laplacian",
    "Penumbral",
    "Similarity",
    "Umbral",
]


class Similarity(Term):
    """The base of all similarities."""


@dataclass(frozen=True, eq=False)
class Dot(Similarity):
    """scale * q.k, by default with 1/sqrt(D) (Vaswani et al. 2017, eq. 1)."""

    _name: ClassVar[str] = "dot"


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
    """-gamma h, h the height of the lowest common ancestor under umbral cones of balls of radius r.

    Needs D >= 2: the last coordinate z is the height's. map "psi": height e^z, X = x e^z; "none":
    (X, height) = (x, z) (Tseng et al. 2023).
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
    """-gamma h ("height") or -gamma h^2 ("height2"), h the height of the lowest common ancestor.

    Of penumbral cones below the horosphere of height r. Needs D >= 2: the last coordinate z is the
    height's. map "xi": height r sigmoid(z), X = x r sigmoid(z); "none": (X, height) = (x, z), z
    clamped to [0, r] (Tseng et al. 2023).
    """

    gamma: float | Tensor
    r: float = 1.0
    map: str = "xi"
    score: str = "height"

    _name: ClassVar[str] = "penumbral"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)
    _options: ClassVar[tuple[str, ...]] = ("r", "map", "score")


class Hyperbolic(LaterTerm, Similarity):
    """-beta times the hyperbolic distance; not in this version."""


class Entailment(LaterTerm, Similarity):
    """Ganea's entailment cones; not in this version."""


class Additive(LaterTerm, Similarity):
    """The additive scores of graph attention; not in this version."""
