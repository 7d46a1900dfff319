"""Similarities: the score s_ij of a query and a key before the softmax.

gamma and beta are real numbers, or tensors, which may require grad: (H,), one for each query head,
or (), one for all.

A specification may be given wherever a similarity is expected: "penumbral:score=height2". Where it
leaves out gamma or beta, they are those that a module starts with, which give the scores of N(0, 1)
tokens a standard deviation of 1. One that is not here can be made of its formula by define().
"""

# Written by `make facades` from the catalogue, that is the files of the terms.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from gnomon._define import DefinedSimilarity, define
from gnomon._similarity import Similarity, Specified

__all__ = [
    "Additive",
    "Cosine",
    "DefinedSimilarity",
    "Dot",
    "Entailment",
    "Gaussian",
    "Hyperbolic",
    "Laplacian",
    "Lorentz",
    "Penumbral",
    "Similarity",
    "Specified",
    "Umbral",
    "define",
]


@dataclass(frozen=True, eq=False)
class Dot(Similarity):
    """q.k / sqrt(D), or c tanh(q.k / (c sqrt(D))) under a soft cap c.

    The argument scale of attention() takes the place of 1/sqrt(D).

    Vaswani et al. 2017, Attention Is All You Need; the soft cap: Riviere et al. 2024, Gemma 2.

    Args:
        softcap: c: scores lie between -c and c; masks and biases come after it.
    """

    softcap: float | None = None

    _name: ClassVar[str] = "dot"
    _options: ClassVar[tuple[str, ...]] = ("softcap",)


@dataclass(frozen=True, eq=False)
class Additive(Similarity):
    """LeakyReLU(q + k), of one column.

    q and k (B, H, L, 1) are the two scores of graph attention (eq. 3).

    Velickovic et al. 2018, Graph Attention Networks.

    Args:
        slope: slope of the LeakyReLU below 0.
    """

    slope: float = 0.2

    _name: ClassVar[str] = "additive"
    _options: ClassVar[tuple[str, ...]] = ("slope",)


@dataclass(frozen=True, eq=False)
class Cosine(Similarity):
    """scale q.k / (|q| |k|).

    Scores lie between -scale and scale, however large tokens grow. Tokens nearer to 0 than 1e-6
    have no direction: they are divided by 1e-6 instead of their norms.

    Liu et al. 2022, Swin Transformer V2: Scaling Up Capacity and Resolution, section 3.3.

    Args:
        scale: factor of each head, 1 / tau of the paper.
    """

    scale: float | Tensor

    _name: ClassVar[str] = "cosine"
    _tensors: ClassVar[tuple[str, ...]] = ("scale",)


@dataclass(frozen=True, eq=False)
class Entailment(Similarity):
    """-gamma max(0, Xi - psi), Xi the angle of k off the axis of the cone of q in the Poincare
    ball, psi = arcsin(K (1 - |q|^2) / |q|) the cone's aperture.

    How far k is outside the entailment cone of q (eqs. 26 and 28). The aperture is pi / 2 where
    it is not defined.

    Ganea et al. 2018, Hyperbolic Entailment Cones.

    Args:
        gamma: factor of each head.
        K: the constant of the aperture.
        map: "ball": tokens x become tanh(|x| / 2) x / |x|; "none": they are points of the unit
            ball, points outside being pulled to its edge.
    """

    gamma: float | Tensor
    K: float = 0.1
    map: Literal["ball", "none"] = "ball"

    _name: ClassVar[str] = "entailment"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)
    _options: ClassVar[tuple[str, ...]] = ("K", "map")


@dataclass(frozen=True, eq=False)
class Gaussian(Similarity):
    """-gamma |q - k|^2.

    Chen et al. 2021, Skyformer.

    Args:
        gamma: factor of each head.
    """

    gamma: float | Tensor

    _name: ClassVar[str] = "gaussian"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)


@dataclass(frozen=True, eq=False)
class Hyperbolic(Similarity):
    """-beta d, d the distance in hyperbolic space.

    The model decides which maps there are, the first being the default, and what the map "none"
    expects:

    - "hyperboloid": "pseudopolar", the point at distance z, the last coordinate, from the origin
      in the direction of x, the others; "exp", the exponential map at the origin, applied to
      D-dimensional tangents; "none", points (x, t), whose time t is taken to be sqrt(1 + |x|^2)
    - "half_space": "psi" and "exp" as for umbral cones; "xi", height sigmoid(z), X = x
      sigmoid(z); "none", (X, height), heights clamped to e^-30 .. e^30
    - "ball" (Poincare's) and "klein": "exp"; "none", points of the unit ball, points outside
      being pulled to its edge

    Needs D >= 2, except for the two balls and for "exp" on the hyperboloid. Maps reach no
    farther than 30 from the origin.

    Gulcehre et al. 2019, Hyperbolic Attention Networks.

    Args:
        beta: factor of each head.
        model: the model of hyperbolic space.
        map: how a token becomes a point of the model.
    """

    beta: float | Tensor
    model: Literal["hyperboloid", "half_space", "ball", "klein"] = "hyperboloid"
    map: Literal["pseudopolar", "psi", "xi", "exp", "none"] | None = None

    _name: ClassVar[str] = "hyperbolic"
    _tensors: ClassVar[tuple[str, ...]] = ("beta",)
    _options: ClassVar[tuple[str, ...]] = ("model", "map")


@dataclass(frozen=True, eq=False)
class Laplacian(Similarity):
    """-gamma |q - k|.

    Tseng et al. 2023, Coneheads: Hierarchy Aware Attention.

    Args:
        gamma: factor of each head.
    """

    gamma: float | Tensor

    _name: ClassVar[str] = "laplacian"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)


@dataclass(frozen=True, eq=False)
class Lorentz(Similarity):
    """scale (2 c + 2 (q.k)_L) + bias, (x.y)_L = -x_0 y_0 + x_1 y_1 + ..., of points of the
    hyperboloid (x.x)_L = -c.

    Minus the squared Lorentzian distance: the scores of hyperbolic language models (HELM,
    Hypformer). RoPE turns only the spatial coordinates. Points lie no farther than sqrt(c)
    sinh(30) from the axis. Values on the hyperboloid are summed up by aggregation =
    "lorentz_centroid", which takes c from here. Where c is a tensor and several heads of q share
    a key head, the keys are repeated.

    Law et al. 2019, Lorentzian Distance Learning for Hyperbolic Representations; Chen et al.
    2022, Fully Hyperbolic Neural Networks.

    Args:
        scale: factor of each head.
        c: the curvature of each head's space is -1 / c; positive.
        bias: added to all scores of a head, which only lse and sinks see: without them it has no
            gradient, and modules take a number, which they do not learn.
        map: "space": the point (sqrt(c + |x|^2), x) above a token x; "exp": the exponential map at
            (sqrt(c), 0), tangents no longer than 30 sqrt(c), whose scores grow as e^(|q| + |k|);
            "none": tokens are points (t, x), the time first, which is taken to be sqrt(c + |x|^2).
    """

    scale: float | Tensor
    c: float | Tensor = 1.0
    bias: float | Tensor = 0.0
    map: Literal["space", "exp", "none"] = "space"

    _name: ClassVar[str] = "lorentz"
    _tensors: ClassVar[tuple[str, ...]] = ("scale", "c", "bias")
    _options: ClassVar[tuple[str, ...]] = ("map",)


@dataclass(frozen=True, eq=False)
class Penumbral(Similarity):
    """-gamma h, -gamma h^2 or gamma log(r / h), h the height of the lowest common ancestor of
    penumbral cones below the horosphere of height r.

    Needs D >= 2: the last coordinate z of a token gives its height, the others are x.

    Tseng et al. 2023, Coneheads: Hierarchy Aware Attention.

    Args:
        gamma: factor of each head.
        r: height of the horosphere.
        map: "xi": height r sigmoid(z), X = x r sigmoid(z); "exp": the exponential map of the
            half-space at (0, ..., 0, 1), heights clamped to r; "none": (X, height) = (x, z), z
            clamped to [0, r].
        score: "height": -gamma h; "height2": -gamma h^2; "log": gamma log(r / h).
    """

    gamma: float | Tensor
    r: float = 1.0
    map: Literal["xi", "exp", "none"] = "xi"
    score: Literal["height", "height2", "log"] = "height"

    _name: ClassVar[str] = "penumbral"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)
    _options: ClassVar[tuple[str, ...]] = ("r", "map", "score")


@dataclass(frozen=True, eq=False)
class Umbral(Similarity):
    """-gamma h or -gamma log h, h the height of the lowest common ancestor of umbral cones of
    radius r.

    Needs D >= 2: the last coordinate z of a token gives its height, the others are x. The cones
    are cast by balls of radius r.

    Tseng et al. 2023, Coneheads: Hierarchy Aware Attention.

    Args:
        gamma: factor of each head.
        r: radius of the balls.
        map: "psi": height e^z, X = x e^z, z clamped to +-30; "exp": the exponential map of the
            half-space at (0, ..., 0, 1), tangents no longer than 30; "none": (X, height) = (x, z).
        score: "height": -gamma h; "log": -gamma log h.
    """

    gamma: float | Tensor
    r: float = 0.1
    map: Literal["psi", "exp", "none"] = "psi"
    score: Literal["height", "log"] = "height"

    _name: ClassVar[str] = "umbral"
    _tensors: ClassVar[tuple[str, ...]] = ("gamma",)
    _options: ClassVar[tuple[str, ...]] = ("r", "map", "score")
