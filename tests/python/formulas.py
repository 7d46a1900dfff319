"""A second implementation of attention, in plain PyTorch, after the papers; needs O(L^2) memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gnomon

Parameters = dict[str, Tensor]


def no_parameters(_heads: int) -> Parameters:
    return {}


@dataclass
class Similarity:
    """ours builds gnomon's term; scores returns (B, H, Lq, Lk) for q and k (B, H, L, D)."""

    ours: Callable[[Parameters], gnomon.similarity.Similarity | None]
    scores: Callable[[Parameters, Tensor, Tensor], Tensor]
    parameters: Callable[[int], Parameters] = no_parameters
    has_height: bool = False
    # Whether the first coordinate is the height or the time.
    height_is_first: bool = False
    # Turns N(0, 1) numbers into q and k if the map is "none", or if the points would be far apart.
    prepare: Callable[[Tensor], Tensor] = lambda x: x
    # The number of columns of q and k if only one number is supported; otherwise 0.
    columns: int = 0


@dataclass
class Position:
    """ours builds gnomon's term; bias returns (H, Lq, Lk) for positions (Lq, 1) and (1, Lk)."""

    ours: Callable[[Parameters], list[gnomon.position.Position]]
    bias: Callable[[Parameters, Tensor, Tensor], Tensor | float]
    parameters: Callable[[int], Parameters] = no_parameters
    # The arguments of rotate().
    rotation: dict[str, object] | None = None


def random_gamma(heads: int) -> Parameters:
    return {"gamma": torch.rand(heads, dtype=torch.float64) + 0.3}


def per_head(gamma: Tensor) -> Tensor:
    return gamma[:, None, None]


def squared_distance(x: Tensor, y: Tensor) -> Tensor:
    return (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)


def distance(x: Tensor, y: Tensor) -> Tensor:
    return squared_distance(x, y).sqrt()


def psi(x: Tensor) -> tuple[Tensor, Tensor]:
    height = x[..., -1].exp()
    return x[..., :-1] * height[..., None], height


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., :-1], x[..., -1]


def umbral_height(q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor], r: float) -> Tensor:
    (x, u), (y, v) = q, k
    u, v = u[..., :, None], v[..., None, :]
    return (u + v + torch.maximum((u - v).abs(), distance(x, y) / math.sinh(r))) / 2


def penumbral_square(q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor], r: float) -> Tensor:
    """The squared height of the lowest common ancestor."""
    (x, u), (y, v) = q, k
    u, v = u[..., :, None], v[..., None, :]
    s = squared_distance(x, y)
    alpha, beta = r - (r * r - u * u).sqrt(), r - (r * r - v * v).sqrt()
    a = (alpha + beta + torch.maximum((alpha - beta).abs(), s.sqrt())) / 2
    outside = (s + 2 * (u * u + v * v) + (u * u - v * v).square() / s) / 4
    return torch.where(a <= r, a * (2 * r - a), outside)


def xi(r: float) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def map_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
        height = r * x[..., -1].sigmoid()
        return x[..., :-1] * height[..., None], height

    return map_tokens


def half_space_exp(v: Tensor) -> tuple[Tensor, Tensor]:
    """The exponential map at (0, ..., 0, 1) in its textbook form."""
    n = v.norm(dim=-1)
    w, last = split(v)
    height = 1 / (n.cosh() - last * n.sinh() / n)
    return w * (n.sinh() / n * height)[..., None], height


def heights_in(low: float, high: float) -> Callable[[Tensor], Tensor]:
    """Tokens whose last coordinate is a height, close enough to share cones."""

    def prepare(x: Tensor) -> Tensor:
        height = low + (high - low) * x[..., -1:].sigmoid()
        return torch.cat([x[..., :-1] * 0.2 * high, height], -1)

    return prepare


def moderate(x: Tensor) -> Tensor:
    """Tokens with a norm of about 2 for any number of columns."""
    return 2 * x / math.sqrt(x.shape[-1])


def in_unit_ball(x: Tensor) -> Tensor:
    n = x.norm(dim=-1, keepdim=True)
    return 0.95 * x / (1 + n)


def ball_exp(v: Tensor) -> Tensor:
    n = v.norm(dim=-1, keepdim=True)
    return (n / 2).tanh() * v / n


def klein_exp(v: Tensor) -> Tensor:
    n = v.norm(dim=-1, keepdim=True)
    return n.tanh() * v / n


def pseudopolar(x: Tensor) -> Tensor:
    """The spatial coordinates of pseudopolar coordinates on the hyperboloid."""
    x, z = split(x)
    return x / x.norm(dim=-1, keepdim=True) * z.sinh()[..., None]


def arcosh1p(t: Tensor) -> Tensor:
    """arcosh(1 + t)."""
    return 2 * (t / 2).sqrt().asinh()


def minkowski_distance(x: Tensor, y: Tensor) -> Tensor:
    """The distance between points on the hyperboloid, given by their spatial coordinates."""
    c, d = ((1 + p.square().sum(-1)).sqrt() for p in (x, y))
    t = (squared_distance(x, y) - (c[..., :, None] - d[..., None, :]).square()) / 2
    return arcosh1p(t.clamp_min(1e-12))


def time(x: Tensor, c: Tensor) -> Tensor:
    """The time coordinate on the hyperboloid <x, x> = -c, given the spatial coordinates."""
    return (c[:, None] + x.square().sum(-1)).sqrt()


def lorentz_exp(x: Tensor, c: Tensor) -> Tensor:
    """The spatial coordinates of the exponential map at (sqrt(c), 0)."""
    n, root = x.norm(dim=-1, keepdim=True), per_head(c).sqrt()
    return root * (n / root).sinh() * x / n


def minkowski(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
    """2 c + 2 <x, y> for points given by their spatial coordinates."""
    product = x @ y.transpose(-1, -2) - time(x, c)[..., :, None] * time(y, c)[..., None, :]
    return 2 * per_head(c) + 2 * product


def lorentz(
    map_name: str,
    places: Callable[[Tensor, Tensor], Tensor],
    prepare: Callable[[Tensor], Tensor] = moderate,
    is_point: bool = False,
) -> Similarity:
    return Similarity(
        lambda p: gnomon.similarity.Lorentz(p["scale"], p["c"], p["bias"], map_name),
        lambda p, q, k: (
            per_head(p["scale"]) * minkowski(places(q, p["c"]), places(k, p["c"]), p["c"])
            + per_head(p["bias"])
        ),
        lambda heads: {
            "scale": torch.rand(heads, dtype=torch.float64) + 0.3,
            "c": torch.rand(heads, dtype=torch.float64) + 0.5,
            "bias": torch.randn(heads, dtype=torch.float64),
        },
        has_height=is_point,
        height_is_first=is_point,
        prepare=prepare,
    )


def half_space_distance(q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor]) -> Tensor:
    (x, u), (y, v) = q, k
    u, v = u[..., :, None], v[..., None, :]
    return arcosh1p((squared_distance(x, y) + (u - v).square()) / (2 * u * v))


def ball_distance(x: Tensor, y: Tensor) -> Tensor:
    a, b = (1 - p.square().sum(-1) for p in (x, y))
    return arcosh1p(2 * squared_distance(x, y) / (a[..., :, None] * b[..., None, :]))


def klein_distance(x: Tensor, y: Tensor) -> Tensor:
    return minkowski_distance(*(p / (1 - p.square().sum(-1, keepdim=True)).sqrt() for p in (x, y)))


def entailment(x: Tensor, y: Tensor, k: float) -> Tensor:
    """Ganea et al. 2018, eqs. 26 and 28, verbatim."""
    x, y = x[..., :, None, :], y[..., None, :, :]
    xx, yy, xy = x.square().sum(-1), y.square().sum(-1), (x * y).sum(-1)
    below = xx.sqrt() * (x - y).norm(dim=-1) * (1 + xx * yy - 2 * xy).sqrt()
    limit = 1 - 4 * torch.finfo(x.dtype).eps
    angle = ((xy * (1 + xx) - xx * (1 + yy)) / below).clamp(-limit, limit).acos()
    sine = k * (1 - xx) / xx.sqrt()
    aperture = torch.where(sine < 1, sine.clamp_max(limit).asin(), math.pi / 2)
    return (angle - aperture).clamp_min(0)


def hyperbolic(
    model: str,
    map_name: str | None,
    distances: Callable[[Tensor, Tensor], Tensor],
    prepare: Callable[[Tensor], Tensor] = moderate,
    has_height: bool = False,
) -> Similarity:
    return Similarity(
        lambda p: gnomon.similarity.Hyperbolic(p["beta"], model, map_name),
        lambda p, q, k: -per_head(p["beta"]) * distances(q, k),
        lambda heads: {"beta": torch.rand(heads, dtype=torch.float64) + 0.3},
        has_height,
        prepare=prepare,
    )


SIMILARITIES = {
    "dot": Similarity(
        lambda p: None, lambda p, q, k: q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    ),
    "dot softcap": Similarity(
        lambda p: gnomon.similarity.Dot(softcap=1.5),
        lambda p, q, k: 1.5 * (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) / 1.5).tanh(),
    ),
    "cosine": Similarity(
        lambda p: gnomon.similarity.Cosine(p["scale"]),
        lambda p, q, k: (
            per_head(p["scale"])
            * (q @ k.transpose(-1, -2))
            / (q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).unsqueeze(-2))
        ),
        lambda heads: {"scale": 5 * torch.rand(heads, dtype=torch.float64) + 1},
    ),
    "laplacian": Similarity(
        lambda p: gnomon.similarity.Laplacian(p["gamma"]),
        lambda p, q, k: -per_head(p["gamma"]) * distance(q, k),
        random_gamma,
    ),
    "gaussian": Similarity(
        lambda p: gnomon.similarity.Gaussian(p["gamma"]),
        lambda p, q, k: -per_head(p["gamma"]) * squared_distance(q, k),
        random_gamma,
    ),
    "umbral": Similarity(
        lambda p: gnomon.similarity.Umbral(p["gamma"], r=0.7),
        lambda p, q, k: -per_head(p["gamma"]) * umbral_height(psi(q), psi(k), 0.7),
        random_gamma,
        has_height=True,
    ),
    "umbral none": Similarity(
        lambda p: gnomon.similarity.Umbral(p["gamma"], map="none"),
        lambda p, q, k: -per_head(p["gamma"]) * umbral_height(split(q), split(k), 0.1),
        random_gamma,
        has_height=True,
        prepare=lambda x: torch.cat([x[..., :-1] * 0.1, x[..., -1:].exp()], -1),
    ),
    "penumbral": Similarity(
        lambda p: gnomon.similarity.Penumbral(p["gamma"]),
        lambda p, q, k: (
            -per_head(p["gamma"]) * penumbral_square(xi(1.0)(q), xi(1.0)(k), 1.0).sqrt()
        ),
        random_gamma,
        has_height=True,
    ),
    "penumbral none": Similarity(
        lambda p: gnomon.similarity.Penumbral(p["gamma"], r=2.5, map="none"),
        lambda p, q, k: -per_head(p["gamma"]) * penumbral_square(split(q), split(k), 2.5).sqrt(),
        random_gamma,
        has_height=True,
        prepare=heights_in(0.1, 2.4),
    ),
    "penumbral height2": Similarity(
        lambda p: gnomon.similarity.Penumbral(p["gamma"], r=1.5, score="height2"),
        lambda p, q, k: -per_head(p["gamma"]) * penumbral_square(xi(1.5)(q), xi(1.5)(k), 1.5),
        random_gamma,
        has_height=True,
    ),
    "umbral log": Similarity(
        lambda p: gnomon.similarity.Umbral(p["gamma"], r=0.3, score="log"),
        lambda p, q, k: -per_head(p["gamma"]) * umbral_height(psi(q), psi(k), 0.3).log(),
        random_gamma,
        has_height=True,
    ),
    "umbral exp": Similarity(
        lambda p: gnomon.similarity.Umbral(p["gamma"], r=0.7, map="exp"),
        lambda p, q, k: (
            -per_head(p["gamma"]) * umbral_height(half_space_exp(q), half_space_exp(k), 0.7)
        ),
        random_gamma,
        has_height=True,
        prepare=moderate,
    ),
    "penumbral log": Similarity(
        lambda p: gnomon.similarity.Penumbral(p["gamma"], r=1.5, score="log"),
        lambda p, q, k: (
            per_head(p["gamma"])
            * (1.5 / penumbral_square(xi(1.5)(q), xi(1.5)(k), 1.5).sqrt()).log()
        ),
        random_gamma,
        has_height=True,
    ),
    "penumbral exp log": Similarity(
        lambda p: gnomon.similarity.Penumbral(p["gamma"], r=20.0, map="exp", score="log"),
        lambda p, q, k: (
            per_head(p["gamma"])
            * (20 / penumbral_square(half_space_exp(q), half_space_exp(k), 20.0).sqrt()).log()
        ),
        random_gamma,
        has_height=True,
        prepare=moderate,
    ),
    "penumbral exp": Similarity(
        lambda p: gnomon.similarity.Penumbral(p["gamma"], r=20.0, map="exp"),
        lambda p, q, k: (
            -per_head(p["gamma"])
            * penumbral_square(half_space_exp(q), half_space_exp(k), 20.0).sqrt()
        ),
        random_gamma,
        has_height=True,
        prepare=moderate,
    ),
    "hyperboloid": hyperbolic(
        "hyperboloid",
        None,
        lambda q, k: minkowski_distance(pseudopolar(q), pseudopolar(k)),
        lambda x: x,
        has_height=True,
    ),
    "hyperboloid exp": hyperbolic(
        "hyperboloid",
        "exp",
        lambda q, k: minkowski_distance(
            *(
                x.norm(dim=-1, keepdim=True).sinh() / x.norm(dim=-1, keepdim=True) * x
                for x in (q, k)
            )
        ),
    ),
    "hyperboloid none": hyperbolic(
        "hyperboloid",
        "none",
        lambda q, k: minkowski_distance(q[..., :-1], k[..., :-1]),
        lambda x: torch.cat(
            [x[..., :-1], (1 + x[..., :-1].square().sum(-1, keepdim=True)).sqrt()], -1
        ),
        has_height=True,
    ),
    "half_space": hyperbolic(
        "half_space",
        None,
        lambda q, k: half_space_distance(psi(q), psi(k)),
        lambda x: x,
        has_height=True,
    ),
    "half_space xi": hyperbolic(
        "half_space",
        "xi",
        lambda q, k: half_space_distance(xi(1.0)(q), xi(1.0)(k)),
        lambda x: x,
        has_height=True,
    ),
    "half_space exp": hyperbolic(
        "half_space",
        "exp",
        lambda q, k: half_space_distance(half_space_exp(q), half_space_exp(k)),
        has_height=True,
    ),
    "half_space none": hyperbolic(
        "half_space",
        "none",
        lambda q, k: half_space_distance(split(q), split(k)),
        heights_in(0.1, 2.4),
        has_height=True,
    ),
    "ball": hyperbolic("ball", None, lambda q, k: ball_distance(ball_exp(q), ball_exp(k))),
    "ball none": hyperbolic("ball", "none", ball_distance, in_unit_ball),
    "klein": hyperbolic("klein", None, lambda q, k: klein_distance(klein_exp(q), klein_exp(k))),
    "klein none": hyperbolic("klein", "none", klein_distance, in_unit_ball),
    "lorentz": lorentz("space", lambda x, c: x),
    "lorentz exp": lorentz("exp", lorentz_exp),
    "lorentz none": lorentz("none", lambda x, c: x[..., 1:], is_point=True),
    "entailment": Similarity(
        lambda p: gnomon.similarity.Entailment(p["gamma"]),
        lambda p, q, k: -per_head(p["gamma"]) * entailment(ball_exp(q), ball_exp(k), 0.1),
        random_gamma,
        prepare=moderate,
    ),
    "entailment none": Similarity(
        lambda p: gnomon.similarity.Entailment(p["gamma"], K=0.3, map="none"),
        lambda p, q, k: -per_head(p["gamma"]) * entailment(q, k, 0.3),
        random_gamma,
        prepare=in_unit_ball,
    ),
    "additive": Similarity(
        lambda p: gnomon.similarity.Additive(),
        # LeakyReLU. At 0, which is frequent in low precision, its slope is the mean of both sides.
        lambda p, q, k: 0.6 * (q + k.transpose(-1, -2)) + 0.4 * (q + k.transpose(-1, -2)).abs(),
        columns=1,
    ),
}


def hype_bias(mode: str) -> Callable[[Parameters, Tensor, Tensor], Tensor]:
    def bias(p: Parameters, i: Tensor, j: Tensor) -> Tensor:
        tau, angle = per_head(p["tau"]), per_head(p["mu"]) * (i - j)
        return {
            "odd": -tau * angle.sinh(),
            "abs": -tau * angle.abs().sinh(),
            "cosh": tau * (1 - angle.cosh()),
        }[mode]

    return bias


def t5_bucket(n: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """The bucket of a single n = p_j - p_i (Raffel et al. 2020)."""
    base = 0
    if bidirectional:
        buckets //= 2
        base = buckets if n > 0 else 0
        n = abs(n)
    else:
        n = max(-n, 0)
    exact = buckets // 2
    if n < exact:
        return base + n
    far = math.log(n / exact) / math.log(max_distance / exact) * (buckets - exact)
    return base + min(buckets - 1, exact + int(far))


def deberta_row(distance: int, span: int, max_distance: int) -> int:
    """The table row (one of 2 * span) for a distance p_i - p_j, with optional logarithmic buckets
    (He et al.)."""
    bucket = distance
    exact = span // 2
    if max_distance and abs(distance) > exact:
        share = math.log(abs(distance) / exact) / math.log((max_distance - 1) / exact)
        bucket = math.ceil(share * (exact - 1)) + exact
        bucket = math.copysign(bucket, distance)
    return min(max(int(bucket) + span, 0), 2 * span - 1)


def deberta_rows(distances: Tensor, span: int, max_distance: int) -> Tensor:
    rows = [deberta_row(distance, span, max_distance) for distance in distances.flatten().tolist()]
    return torch.tensor(rows, dtype=torch.long).view_as(distances)


def t5_bias(bidirectional: bool) -> Callable[[Parameters, Tensor, Tensor], Tensor]:
    def bias(p: Parameters, i: Tensor, j: Tensor) -> Tensor:
        table = p["table"]
        buckets = [
            [t5_bucket(int(n), bidirectional, len(table), 30) for n in row] for row in (j - i)
        ]
        index = torch.tensor(buckets, dtype=torch.int64).reshape(len(i), j.shape[1])
        return table[index].permute(2, 0, 1)

    return bias


def sandwich_bias(dims: int, base: float) -> Callable[[Parameters, Tensor, Tensor], Tensor]:
    """Products of the sinusoids of two tokens, minus the product of a token with itself."""

    def sinusoids(position: Tensor) -> Tensor:
        angles = position.double()[..., None] * base ** (
            -torch.arange(2, dims + 1, 2).double() / dims
        )
        return torch.cat((angles.sin(), angles.cos()), -1)

    def bias(p: Parameters, i: Tensor, j: Tensor) -> Tensor:
        products = (sinusoids(i) * sinusoids(j)).sum(-1)
        return per_head(p["factor"]) * (products - dims / 2)

    return bias


def rates(*names: str, low: float = 0.05, high: float = 0.5) -> Callable[[int], Parameters]:
    def parameters(heads: int) -> Parameters:
        return {n: low + (high - low) * torch.rand(heads, dtype=torch.float64) for n in names}

    return parameters


def hype_parameters(heads: int) -> Parameters:
    return rates("tau")(heads) | rates("mu", low=0.001, high=0.02)(heads)


def alibi(p: Parameters, i: Tensor, j: Tensor) -> Tensor:
    return -per_head(p["slopes"]) * (i - j).abs()


def rope(**arguments: object) -> Position:
    return Position(
        lambda p: [gnomon.position.RoPE(**arguments)], lambda p, i, j: 0.0, rotation=arguments
    )


POSITIONS = {
    "none": Position(lambda p: [], lambda p, i, j: 0.0),
    "alibi": Position(lambda p: [gnomon.position.ALiBi(p["slopes"])], alibi, rates("slopes")),
    **{
        f"hype {mode}": Position(
            lambda p, mode=mode: [gnomon.position.HyPE(p["tau"], p["mu"], mode=mode)],
            hype_bias(mode),
            hype_parameters,
        )
        for mode in ("odd", "abs", "cosh")
    },
    **{
        f"t5 {'both' if both else 'past'}": Position(
            lambda p, both=both: [gnomon.position.T5(p["table"], both, max_distance=30)],
            t5_bias(both),
            lambda heads: {"table": torch.randn(12, heads, dtype=torch.float64)},
        )
        for both in (True, False)
    },
    "sandwich": Position(
        lambda p: [gnomon.position.Sandwich(p["factor"], 24, 300.0)],
        sandwich_bias(24, 300.0),
        rates("factor"),
    ),
    "kerple log": Position(
        lambda p: [gnomon.position.Kerple(p["r1"], p["r2"])],
        lambda p, i, j: -per_head(p["r1"]) * torch.log(1 + per_head(p["r2"]) * (i - j).abs()),
        rates("r1", "r2", high=1.0),
    ),
    "kerple power": Position(
        lambda p: [gnomon.position.Kerple(p["r1"], p["r2"], kind="power")],
        lambda p, i, j: (
            -per_head(p["r1"])
            * torch.where(i == j, 0.0, torch.where(i == j, 1.0, (i - j).abs()) ** per_head(p["r2"]))
        ),
        rates("r1", "r2", high=1.0),
    ),
    "rope": rope(),
    "rope half": rope(base=100.0, layout="half"),
    "rope partial": rope(dims=4),
    "rope half partial": rope(layout="half", dims=4),
    "rope + hype + t5": Position(
        lambda p: [
            gnomon.position.HyPE(p["tau"], p["mu"]),
            gnomon.position.RoPE(),
            gnomon.position.T5(p["table"], True, max_distance=30),
        ],
        lambda p, i, j: hype_bias("abs")(p, i, j) + t5_bias(True)(p, i, j),
        lambda heads: (
            hype_parameters(heads) | {"table": torch.randn(12, heads, dtype=torch.float64)}
        ),
        rotation={},
    ),
}


def rotate(
    x: Tensor,
    positions: Tensor,
    has_height: bool,
    base: float = 10000.0,
    layout: str = "interleaved",
    dims: int | None = None,
) -> Tensor:
    """RoPE by complex multiplication (Su et al. 2021)."""
    if dims is None:
        dims = 2 * ((x.shape[-1] - has_height) // 2)
    turned, rest = x[..., :dims], x[..., dims:]
    angle = positions[..., None] * base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    # The factors must have the precision of the tokens; otherwise the scores would be float64.
    turn = torch.polar(torch.ones_like(angle), angle).to(x.dtype.to_complex())
    if layout == "half":
        pairs = torch.complex(turned[..., : dims // 2], turned[..., dims // 2 :]) * turn
        turned = torch.cat([pairs.real, pairs.imag], -1)
    else:
        pairs = torch.complex(turned[..., 0::2], turned[..., 1::2]) * turn
        turned = torch.view_as_real(pairs).flatten(-2)
    return torch.cat([turned, rest], -1)


def rotate_on_grid(
    x: Tensor,
    shape: Sequence[int],
    prefix: int = 0,
    base: float = 10000.0,
    layout: str = "interleaved",
) -> Tensor:
    """Axial RoPE: each axis rotates an equal number of columns by the token's coordinate on it."""
    coordinates = [(0,) * len(shape)] * prefix + list(itertools.product(*map(range, shape)))
    part = 2 * (x.shape[-1] // (2 * len(shape)))
    turned = [
        rotate(
            x[..., a * part : (a + 1) * part],
            torch.tensor([float(c[a]) for c in coordinates], dtype=torch.float64),
            has_height=False,
            base=base,
            layout=layout,
        )
        for a in range(len(shape))
    ]
    return torch.cat([*turned, x[..., part * len(shape) :]], -1)


@dataclass
class Mask:
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    key_starts: Sequence[int] | None = None
    key_lengths: Sequence[int] | None = None
    query_offset: int | Sequence[int] | None = None
    #: Segment numbers of one row; batch element b rolls them by b.
    query_segments: Sequence[int] | None = None
    key_segments: Sequence[int] | None = None

    def segments(self, batch: int) -> tuple[Tensor, Tensor] | None:
        if self.query_segments is None or self.key_segments is None:
            return None
        rows = torch.tensor(self.query_segments), torch.tensor(self.key_segments)
        queries, keys = (torch.stack([x.roll(b) for b in range(batch)]) for x in rows)
        return queries, keys

    def first(self, batch: int) -> Tensor:
        """(B, 1, 1, 1): the position of the first query of each batch element."""
        offset = self.query_offset
        values = [offset or 0] * batch if isinstance(offset, int | None) else list(offset)
        return torch.tensor(values, dtype=torch.float64)[:, None, None, None]

    def arguments(self, batch: int) -> dict[str, object]:
        """The keyword arguments of gnomon.attention."""

        def integers(values: Sequence[int] | None) -> Tensor | None:
            return None if values is None else torch.tensor(values)

        segments = self.segments(batch)
        return {
            "causal": self.causal,
            "window": self.window,
            "key_starts": integers(self.key_starts),
            "key_lengths": integers(self.key_lengths),
            "query_offset": self.query_offset
            if isinstance(self.query_offset, int | None)
            else integers(self.query_offset),
            "query_segments": None if segments is None else segments[0],
            "key_segments": None if segments is None else segments[1],
        }

    def visible(self, i: Tensor, j: Tensor, batch: int) -> Tensor:
        """Visible pairs (B, 1, Lq, Lk) for query positions (Lq, 1) or (B, 1, Lq, 1), and key
        positions (1, Lk)."""
        visible = torch.ones(batch, 1, i.shape[-2], j.shape[1], dtype=torch.bool)
        left, right = self.window or (None, None)
        if self.causal:
            visible &= j <= i
        if left is not None:
            visible &= j >= i - left
        if right is not None:
            visible &= j <= i + right
        if self.key_starts is not None:
            visible &= j >= torch.tensor(self.key_starts)[:, None, None, None]
        if self.key_lengths is not None:
            visible &= j < torch.tensor(self.key_lengths)[:, None, None, None]
        segments = self.segments(batch)
        if segments is not None:
            visible &= (segments[0][:, :, None] == segments[1][:, None, :])[:, None]
        return visible


@dataclass
class Case:
    similarity: str = "dot"
    position: str = "none"
    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    queries: int = 13
    keys: int = 13
    dim: int = 8
    value_dim: int = 5
    mask: Mask = field(default_factory=Mask)

    def __post_init__(self) -> None:
        self.dim = SIMILARITIES[self.similarity].columns or self.dim

    def rotation(self) -> dict[str, object] | None:
        """Arguments of rotate(); None for a single column, which has nothing to rotate."""
        return POSITIONS[self.position].rotation if self.dim > 1 else None

    def positions(self, inputs: Parameters) -> list[gnomon.position.Position]:
        return [
            term
            for term in POSITIONS[self.position].ours(inputs)
            if self.dim > 1 or not isinstance(term, gnomon.position.RoPE)
        ]

    def inputs(self) -> Parameters:
        """q, k, v and the parameters, by name, in float64."""
        torch.manual_seed(0)
        prepare = SIMILARITIES[self.similarity].prepare
        shapes = {
            "q": (self.batch, self.heads, self.queries, self.dim),
            "k": (self.batch, self.key_heads, self.keys, self.dim),
            "v": (self.batch, self.key_heads, self.keys, self.value_dim),
        }
        tokens = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
        return (
            {"q": prepare(tokens["q"]), "k": prepare(tokens["k"]), "v": tokens["v"]}
            | SIMILARITIES[self.similarity].parameters(self.heads)
            | POSITIONS[self.position].parameters(self.heads)
        )

    def arguments(self) -> dict[str, object]:
        """The keyword arguments of gnomon.attention, except the similarity and the position."""
        return self.mask.arguments(self.batch)

    def ours(self, inputs: Parameters) -> tuple[Tensor, Tensor]:
        return gnomon.attention(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            similarity=SIMILARITIES[self.similarity].ours(inputs),
            position=self.positions(inputs),
            return_lse=True,
            **self.arguments(),
        )

    def rotated(self, inputs: Parameters, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """q (B, H, Lq, D) and k (B, H, Lk, D), rotated to positions i and j if the case has a
        rotation."""
        q = inputs["q"]
        k = inputs["k"].repeat_interleave(self.heads // self.key_heads, 1)
        rotation = self.rotation()
        if rotation is None:
            return q, k
        similarity = SIMILARITIES[self.similarity]
        first = int(similarity.height_is_first)
        q, k = (
            rotate(x.roll(-first, -1), p, similarity.has_height, **rotation).roll(first, -1)
            for x, p in ((q, i), (k, j))
        )
        return q, k

    def scores(self, inputs: Parameters) -> Tensor:
        """The scores (B, H, Lq, Lk), -inf for hidden keys."""
        similarity, position = SIMILARITIES[self.similarity], POSITIONS[self.position]
        i = torch.arange(self.queries, dtype=torch.float64)[:, None] + self.mask.first(self.batch)
        j = torch.arange(self.keys, dtype=torch.float64)
        q, k = self.rotated(inputs, i[:, :, :, 0], j)
        shape = self.heads, self.queries, self.keys
        bias = [
            torch.as_tensor(position.bias(inputs, row[0], j[None, :])).expand(shape)
            for row in (i if self.batch else i.new_zeros(1, 1, self.queries, 1))
        ]
        scores = similarity.scores(inputs, q, k) + torch.stack(bias)
        visible = self.mask.visible(i, j[None, :], self.batch)
        return scores.masked_fill(~visible, -math.inf)

    def theirs(self, inputs: Parameters) -> tuple[Tensor, Tensor]:
        scores = self.scores(inputs)
        v = inputs["v"].repeat_interleave(self.heads // self.key_heads, 1)
        sees = (scores > -math.inf).any(-1, keepdim=True)
        weights = torch.where(sees, scores, 0.0).softmax(-1) * sees
        lse = torch.where(sees, scores, 0.0).logsumexp(-1)
        return weights @ v, lse.masked_fill(~sees[..., 0], -math.inf)


class PairFunctions(TorchDispatchMode):
    """Records the names of the pair functions that calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.gnomon.attention_forward.default:
            arguments = [argument.name for argument in function._schema.arguments]
            self.names.append(args[arguments.index("function")])
        return function(*args, **(kwargs or {}))


def one_per_pair_function() -> list[str]:
    """The first similarity of each pair function."""
    found: dict[str, str] = {}
    for similarity in SIMILARITIES:
        case = Case(similarity, queries=1, keys=1)
        with PairFunctions() as calls:
            case.ours(case.inputs())
        found.setdefault(calls.names[-1], similarity)
    return list(found.values())


#: Similarities for tests of the kernels. The others differ from these only in the token map.
ONE_PER_PAIR_FUNCTION = one_per_pair_function()


def values_and_gradients(
    attend: Callable[[Parameters], tuple[Tensor, Tensor]], inputs: Parameters
) -> Parameters:
    """o, lse and the gradients of all inputs, by name, for fixed random gradients of o and lse."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    o, lse = attend(leaves)
    generator = generator_of(1)
    d_o = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)
    d_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse.dtype)
    d_lse = d_lse.masked_fill(lse == -math.inf, 0.0)
    gradients = torch.autograd.grad([o, lse], list(leaves.values()), [d_o, d_lse])
    return {"o": o.detach(), "lse": lse.detach()} | {
        f"d{name}": g for name, g in zip(leaves, gradients, strict=True)
    }


def generator_of(seed: int) -> torch.Generator:
    """A generator on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5}


def check(
    ours: Callable[[Parameters], tuple[Tensor, Tensor]],
    theirs: Callable[[Parameters], tuple[Tensor, Tensor]],
    inputs: Parameters,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Compares o, lse and all gradients: ours in the given dtype, theirs in float64."""
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    expected = values_and_gradients(theirs, {name: x.double() for name, x in inputs.items()})
    actual = values_and_gradients(ours, inputs)
    assert all(x.dtype == dtype for x in actual.values())
    assert_near(actual, expected, TOLERANCE[dtype])


def assert_near(ours: Parameters, theirs: Parameters, tolerance: float) -> None:
    """Checks that errors are at most tolerance times the largest value of theirs (at least 1)."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        got = ours[name]
        assert got.shape == expected.shape, name
        infinite = expected == -math.inf
        assert torch.equal(got == -math.inf, infinite), f"{name}: -inf elsewhere"
        difference = (got.double() - expected).masked_fill(infinite, 0.0).abs()
        if difference.numel() == 0:
            continue
        scale = max(1.0, float(expected.masked_fill(infinite, 0.0).abs().max()))
        error = float(difference.max()) / scale
        assert error <= tolerance, f"{name}: off by {error:.2e} of {scale:.3g}"  # NaN also fails


def pairwise(**axes) -> pytest.MarkDecorator:
    """Parametrizes a test by every pair of values of two axes instead of their full product.

    This finds errors that two values cause together, but may miss errors that require three values.
    """
    return parametrized(axes, map(tuple, AllPairs([list(values) for values in axes.values()])))


def in_turn(**axes) -> pytest.MarkDecorator:
    """Parametrizes a test by the values of the first axis; the values of the others take turns."""
    first, *others = axes.values()
    return parametrized(axes, zip(first, *map(itertools.cycle, others), strict=False))


def parametrized(names: Iterable[str], rows: Iterable[tuple]) -> pytest.MarkDecorator:
    # The ids are equal in all processes, unlike a function's repr.
    cases = [
        pytest.param(*row, id="-".join(str(getattr(x, "__name__", x)) for x in row)) for row in rows
    ]
    return pytest.mark.parametrize(tuple(names), cases)


def mostly_long(cases: Iterable, ordinary: int = 1) -> list:
    """Marks every case except the first `ordinary` as long; `make test` omits those."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=[pytest.mark.long] * (i >= ordinary))
        for i, case in enumerate(cases)
    ]
