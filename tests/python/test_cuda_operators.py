"""The GPU operators in the emulator, compared with the CPU operators."""

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from emulated_gpu import LIBRARY, ON_CUDA, OnCuda, environment
from formulas import SIMILARITIES, assert_near, pairwise, values_and_gradients
from test_cli import ROOT
from test_graph_attention import GRAPHS, csr, graph_inputs, loop, random_rows
from test_graph_attention import ours as over_edges
from test_operators import cone_map_formula
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import gnomon
from gnomon.position import (
    T5,
    AbsoluteKeys,
    ALiBi,
    Disentangled,
    Forget,
    GridBias,
    HyPE,
    KeyBias,
    OffsetBias,
    PairBias,
    Relative,
    Relative2D,
    RoPE,
    Sink,
    TransformerXL,
)
from gnomon.similarity import Dot, Entailment, Laplacian, Penumbral, Umbral

pytestmark = pytest.mark.cpu("tests GPU code without a GPU")

ops = torch.ops.gnomon


@pytest.fixture(scope="module", autouse=True)
def emulated(tmp_path_factory):
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY.name} is not built")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(tmp_path_factory.mktemp("cache")).items():
            patch.setenv(name, value)
        yield


@dataclass
class Case:
    options: Callable[[dict[str, Tensor]], dict] = lambda p: {}
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # B, H, Hkv, Lq, Lk, D, Dv.
    shape: tuple[int, ...] = (2, 4, 2, 21, 37, 20, 12)


def ids(batch: int, length: int, size: int) -> Tensor:
    return (torch.arange(length) // size).expand(batch, length)


def places(step: int, key_step: int, first: int = 0, modulus: int = 1 << 40) -> dict[str, Tensor]:
    """Positions of 21 queries, which start at 0 and `first` in the batch elements, and 37 keys."""
    starts = torch.tensor([[0], [first]])
    return {
        "positions": starts + torch.arange(21) * step % modulus,
        "key_positions": (torch.arange(37) * key_step % modulus).expand(2, 37),
    }


CASES = {
    "dot": Case(lambda p: {}),
    "causal": Case(lambda p: {"causal": True, "query_offset": 16}),
    "window": Case(lambda p: {"window": (9, 4), "query_offset": torch.tensor([3, 11])}),
    "lengths": Case(
        lambda p: {"key_starts": torch.tensor([0, 5]), "key_lengths": torch.tensor([37, 20])}
    ),
    "segments": Case(lambda p: {"query_segments": ids(2, 21, 8), "key_segments": ids(2, 37, 13)}),
    "mask": Case(lambda p: {"mask": torch.rand(2, 1, 21, 37) < 0.6}),
    "dropout": Case(lambda p: {"dropout": 0.3, "seed": 11}),
    "temperature": Case(lambda p: {"temperature": p["t"].exp()}, {"t": (2, 4, 21)}),
    "soft cap": Case(
        lambda p: {
            "temperature": p["t"].exp(),
            "position": KeyBias(p["keys"]),
            "score_softcap": 2.0,
        },
        {"t": (2, 4, 21), "keys": (2, 4, 37)},
    ),
    "disentangled": Case(
        lambda p: {"position": Disentangled(p["rows"], p["columns"]), "query_offset": 5},
        {"rows": (12, 20), "columns": (12, 20)},
    ),
    "one query": Case(
        lambda p: {"causal": True, "query_offset": 299, "position": ALiBi(p["slopes"])},
        {"slopes": (4,)},
        (1, 4, 2, 1, 300, 16, 16),
    ),
    "rope and alibi": Case(
        lambda p: {"position": [RoPE(), ALiBi(p["slopes"])], "causal": True},
        {"slopes": (4,)},
        (2, 4, 4, 30, 30, 16, 24),
    ),
    "hype": Case(
        lambda p: {"position": HyPE(p["tau"], 0.1 * p["mu"]), "query_offset": 5},
        {"tau": (4,), "mu": (4,)},
    ),
    "t5": Case(
        lambda p: {"position": T5(p["table"], bidirectional=True), "query_offset": 5},
        {"table": (8, 4)},
    ),
    "offset bias": Case(
        lambda p: {"position": OffsetBias(p["table"]), "query_offset": 0}, {"table": (4, 57)}
    ),
    "pair bias": Case(
        lambda p: {"position": PairBias(p["pairs"]), "window": (30, 9), "query_offset": 5},
        {"pairs": (2, 1, 21, 37)},
    ),
    "forget": Case(
        lambda p: {"position": Forget(p["gates"]), "causal": True},
        {"gates": (2, 4, 33)},
        (2, 4, 2, 33, 33, 16, 16),
    ),
    "sink": Case(lambda p: {"position": Sink(p["sink"])}, {"sink": (4,)}),
    "relative": Case(
        lambda p: (
            {"position": Relative(p["keys"], max_offset=6, values=p["values"])}
            | {"query_offset": 8}
        ),
        {"keys": (13, 20), "values": (13, 12)},
    ),
    "relative past": Case(
        lambda p: {"position": Relative(p["keys"], max_offset=6, far="zero"), "causal": True},
        {"keys": (4, 7, 16)},
        (2, 4, 4, 33, 33, 16, 24),
    ),
    "transformer-xl": Case(
        lambda p: (
            {"position": TransformerXL(p["u"], p["v"], p["r"]), "causal": True}
            | {"query_offset": 4}
        ),
        {"u": (4, 16), "v": (4, 16), "r": (4, 40, 16)},
        (1, 4, 2, 25, 29, 16, 16),
    ),
    "relative 2-d": Case(
        lambda p: {"position": Relative2D(p["rows"], p["columns"], height=4, width=6)},
        {"rows": (7, 16), "columns": (11, 16)},
        (2, 2, 2, 24, 24, 16, 8),
    ),
    "absolute keys": Case(
        lambda p: {"position": AbsoluteKeys(p["table"]), "query_offset": 0},
        {"table": (37, 20)},
    ),
    "grid bias": Case(
        lambda p: {"position": GridBias(p["table"])},
        {"table": (2, 7, 11)},
        (2, 2, 2, 24, 24, 16, 8),
    ),
    # Gaps, and queries that see no key.
    "positions": Case(
        lambda p: places(3, 2) | {"position": ALiBi(p["slopes"]), "causal": True}, {"slopes": (4,)}
    ),
    # Distances in columns plus an offset, which replaces positions.
    "consecutive positions": Case(
        lambda p: (
            places(1, 1, 16) | {"position": T5(p["table"], bidirectional=False), "causal": True}
        ),
        {"table": (8, 4)},
    ),
    # In no order, with equal positions.
    "scattered positions": Case(
        lambda p: (
            {"similarity": Laplacian(p["g"].exp()), "window": (9, 4)}
            | places(17, 11, modulus=23)
            | {"position": HyPE(p["tau"], 0.1 * p["mu"])}
        ),
        {"g": (4,), "tau": (4,), "mu": (4,)},
    ),
    "positions of segments": Case(
        lambda p: (
            {"query_segments": ids(2, 21, 8), "key_segments": ids(2, 37, 13)}
            | places(1, 1, modulus=8)
            | {"position": [Relative(p["keys"], max_offset=6, values=p["values"]), RoPE()]}
        ),
        {"keys": (13, 20), "values": (13, 12)},
    ),
    "positions of keys": Case(
        lambda p: {"position": AbsoluteKeys(p["table"]), "chunks": (9, 1, 0)} | places(2, 3),
        {"table": (109, 20)},
    ),
    "laplacian": Case(lambda p: {"similarity": Laplacian(p["g"].exp())}, {"g": (4,)}),
    "umbral": Case(
        lambda p: {"similarity": Umbral(p["g"].exp()), "position": RoPE(), "query_offset": 2},
        {"g": (4,)},
    ),
    "penumbral": Case(
        lambda p: (
            {"similarity": Penumbral(p["g"].exp(), score="log"), "causal": True}
            | {"position": RoPE(layout="half", dims=6)}
        ),
        {"g": (4,)},
        (1, 4, 1, 40, 40, 9, 16),
    ),
    "points of cones": Case(
        lambda p: (
            {"similarity": Umbral(p["g"].exp(), map="exp")}
            | {"position": RoPE(layout="half", shape=(3, 7)), "key_lengths": torch.tensor([21, 17])}
        ),
        {"g": (4,)},
        (2, 4, 2, 21, 21, 20, 12),
    ),
    "learned angles": Case(
        lambda p: {"position": RoPE(angles=p["angles"])},
        {"angles": (1, 2, 21, 4)},
        (2, 4, 2, 21, 21, 16, 12),
    ),
    "entailment": Case(lambda p: {"similarity": Entailment(p["g"].exp())}, {"g": (4,)}),
}


def results(case: Case, mode=None) -> dict[str, Tensor]:
    """Outputs and gradients; q, k and v are transposed, as most projections produce them."""
    torch.manual_seed(0)
    b, h, g, n, m, d, e = case.shape

    def tokens(heads: int, length: int, columns: int) -> Tensor:
        # Numbers that are exact in all token dtypes.
        x = torch.randn(b, length, heads, columns).bfloat16().float() * 0.5
        return x.transpose(1, 2).detach().requires_grad_()

    inputs = {"q": tokens(h, n, d), "k": tokens(g, m, d), "v": tokens(g, m, e)}
    parameters = {
        name: (0.3 * torch.randn(size)).requires_grad_() for name, size in case.parameters.items()
    }
    options = case.options(parameters)
    d_o, d_lse = torch.randn(b, h, n, e).bfloat16().float(), torch.randn(b, h, n)

    def run():
        o, lse = gnomon.attention(*inputs.values(), **options, return_lse=True)
        every = inputs | parameters
        gradients = torch.autograd.grad([o, lse], [*every.values()], [d_o, d_lse])
        return {"o": o, "lse": lse} | {
            f"d_{name}": gradient for name, gradient in zip(every, gradients, strict=True)
        }

    if mode is None:
        return run()
    with mode:
        return run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_on_the_cpu(name, dtype):
    case = CASES[name]
    mode = OnCuda(dtype)
    ours, expected = results(case, mode), results(case)
    assert mode.calls["attention_forward"] == mode.calls["attention_backward"] == 1
    # Token maps and rotations may round tokens again; weights and outputs are also rounded.
    tolerance = {torch.float32: 3e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}[dtype]
    for what, value in expected.items():
        scale = value[value.isfinite()].abs().max().clamp(min=0.1).item()
        torch.testing.assert_close(
            ours[what] / scale, value / scale, rtol=0, atol=tolerance, msg=f"{what} of {name}"
        )


@pytest.mark.parametrize(
    ("name", "order"), list(zip(CASES, itertools.cycle(["reverse", "forward"]), strict=False))
)
def test_derivatives_as_on_the_cpu(name, order):
    """Forward mode, and products of second derivatives with a direction: reverse over reverse or
    reverse over forward."""
    case = CASES[name]
    torch.manual_seed(0)
    b, h, g, n, m, d, e = case.shape
    tokens = {"q": (b, h, n, d), "k": (b, g, m, d), "v": (b, g, m, e)}
    shapes = tokens | {f"parameter {key}": shape for key, shape in case.parameters.items()}
    inputs = {key: 0.5 * torch.randn(shape) for key, shape in shapes.items()}
    u = {key: torch.randn(shape) for key, shape in shapes.items()}
    d_o, d_lse = torch.randn(b, h, n, e), torch.randn(b, h, n)

    def attend(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)  # for random masks
        options = case.options({key: x[f"parameter {key}"] for key in case.parameters})
        return gnomon.attention(x["q"], x["k"], x["v"], **options, return_lse=True)

    def loss(x: dict[str, Tensor]) -> Tensor:
        o, lse = attend(x)
        return (d_o * o).sum() + (d_lse * lse).sum() + 0.1 * o.square().sum()

    def run() -> dict[str, Tensor]:
        _, (o, lse) = jvp(attend, (inputs,), (u,))
        first = {"o": o, "lse": lse}
        if order == "forward":
            return first | grad(lambda x: jvp(loss, (x,), (u,))[1])(inputs)
        leaves = {key: x.clone().requires_grad_() for key, x in inputs.items()}
        gradients = torch.autograd.grad(loss(leaves), [*leaves.values()], create_graph=True)
        product = sum((x * u[key]).sum() for key, x in zip(leaves, gradients, strict=True))
        second = torch.autograd.grad(product, [*leaves.values()])
        return first | dict(zip(leaves, second, strict=True))

    expected = run()
    with OnCuda() as mode:
        ours = run()
    assert mode.calls["attention_jvp"] == (2 if order == "forward" else 1)
    assert mode.calls["attention_backward_jvp"] == 1
    for what, value in expected.items():
        scale = value.abs().max().clamp(min=1).item()
        torch.testing.assert_close(
            ours[what] / scale, value / scale, rtol=0, atol=1e-4, msg=f"{what} of {name}"
        )


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rotated(x: Tensor, cosine: Tensor, sine: Tensor, layout: str) -> Tensor:
    """Rotates pairs of the first columns."""
    columns = 2 * cosine.shape[-1]
    pairs, axis = ((2, -1), -2) if layout == "half" else ((-1, 2), -1)
    a, b = x[..., :columns].unflatten(-1, pairs).unbind(axis)
    both = torch.stack([a * cosine - b * sine, b * cosine + a * sine], axis).flatten(-2)
    return torch.cat([both, x[..., columns:]], -1)


@dataclass
class TokenMaps:
    """The map of a cone, if there is one, after a rotation of q and k."""

    cone: tuple[str, str] | None
    layout: str
    back: bool

    def inputs(self, dtype: torch.dtype, scale: float) -> list[Tensor]:
        """Tokens and turns. The turns are shared by heads."""
        torch.manual_seed(0)
        tokens = []
        for heads, length in ((3, 9), (2, 35)):
            x = scale * torch.randn(2, length, heads, 12).transpose(1, 2)
            if self.cone is not None:
                x[..., -1] = torch.randn(2, heads, length).sigmoid() * 0.6
            tokens.append(x.to(dtype))
        return [*tokens, *(torch.randn(2, 1, x.shape[2], 3) for x in tokens for _ in range(2))]

    def leaves(self, inputs: list[Tensor]) -> list[Tensor]:
        """The inputs that have gradients: without a cone, also the turns."""
        return inputs if self.cone is None else inputs[:2]

    def ours(self, x: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        block = 6 if self.layout == "half" else 0
        if self.cone is None:
            return list(ops.rotate_tokens(*x, block, self.back, dtype))
        turns = [None] * 4 if self.layout == "none" else x[2:]
        return list(ops.cone_map(*x[:2], *self.cone, 0.7, *turns, block, dtype))

    def exact(self, x: list[Tensor]) -> list[Tensor]:
        results = []
        for n, token in enumerate(x[:2]):
            cosine, sine = x[2 * n + 2 : 2 * n + 4]
            turned = token
            if self.layout != "none" or self.cone is None:
                sign = -1 if self.back and self.cone is None else 1
                turned = rotated(token, cosine, sign * sine, self.layout)
            results += [turned] if self.cone is None else cone_map_formula(turned, *self.cone, 0.7)
        return results


CONES = [("umbral", "psi"), ("umbral", "none"), ("penumbral", "xi"), ("penumbral", "none"), None]


@pairwise(
    cone=CONES,
    layout=["interleaved", "half", "none"],
    of_tokens=DTYPES,
    of_mapped=DTYPES,
    scale=[1e-4, 1, 100],
    back=[False, True],
)
def test_token_maps(cone, layout, of_tokens, of_mapped, scale, back):
    """One kernel each way computes what float64 formulas and their gradients do."""
    maps = TokenMaps(cone, layout, back)
    inputs = maps.inputs(of_tokens, scale)
    if cone is not None:
        # Penumbral heights below and above their limits.
        for x in inputs[:2]:
            x[..., 0, -1], x[..., 1, -1] = -1, 2
    leaves = maps.leaves(inputs)
    for leaf in leaves:
        leaf.requires_grad_()
    with OnCuda() as mode:
        outputs = maps.ours(inputs, of_mapped)
        weights = [torch.randn(output.shape).to(output.dtype) for output in outputs]
        gradients = torch.autograd.grad(outputs, leaves, weights)
    assert sum(mode.calls.values()) == 2
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = maps.exact(exact)
    columns = [result.shape[-1] for result in truth]
    exact_weights = [w[..., :n].double() for w, n in zip(weights, columns, strict=True)]
    truth += torch.autograd.grad(truth, maps.leaves(exact), exact_weights)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    for result, of in zip([*outputs, *gradients], truth, strict=True):
        assert not result[..., of.shape[-1] :].any()
        close = rounding[result.dtype] + 1e-5
        least = close * float(of.detach().abs().max()) / 50
        if result.dtype == torch.float16:
            least += 2.0**-25  # half the smallest number
        torch.testing.assert_close(
            result[..., : of.shape[-1]].double(), of.detach(), rtol=close, atol=least
        )


@pairwise(cone=CONES, layout=["interleaved", "half"], back=[False, True])
def test_derivatives_of_token_maps(cone, layout, back):
    """Forward mode without torch.func, second derivatives and batched gradients."""
    maps = TokenMaps(cone, layout, back)
    inputs = maps.inputs(torch.float32, 1)
    exact = [x.double() for x in inputs]
    count = len(maps.leaves(inputs))
    u = [torch.randn(x.shape) for x in inputs[:count]]

    def tangents() -> list[Tensor]:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, d) for x, d in zip(inputs, u, strict=False)]
            return [forward_ad.unpack_dual(y).tangent for y in maps.ours(duals + inputs[count:])]

    def mapped(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(maps.exact([*leaves, *exact[count:]]))

    _, truth = jvp(mapped, tuple(exact[:count]), tuple(d.double() for d in u))
    weights = [torch.randn(3, *y.shape) for y in truth]

    def seconds(compute, x: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = maps.leaves([t.detach().requires_grad_() for t in x])
        outputs = [
            y[..., : w.shape[-1]]
            for y, w in zip(compute([*leaves, *x[count:]]), weights, strict=True)
        ]
        given = [w.to(dtype).requires_grad_() for w in weights]
        one = [w[0] for w in given]
        first = torch.autograd.grad(outputs, leaves, one, create_graph=True)
        second = torch.autograd.grad(
            *(first, [*leaves, *given], [d.to(dtype) for d in u]),
            retain_graph=True,
            materialize_grads=True,
        )
        batched = torch.autograd.grad(
            outputs, leaves, [w.detach() for w in given], is_grads_batched=True
        )
        return [*second, *batched]

    with OnCuda() as mode:
        ours = [y[..., : of.shape[-1]] for y, of in zip(tangents(), truth, strict=True)]
        ours += seconds(maps.ours, inputs, torch.float32)
    assert mode.calls["rotate_tokens" if cone is None else "cone_map"] > 0
    truth = [*truth, *seconds(maps.exact, exact, torch.float64)]
    for result, of in zip(ours, truth, strict=True):
        least = 1e-5 * float(of.abs().max())
        torch.testing.assert_close(result.double(), of, rtol=1e-5, atol=least)


class Counted(OnCuda):
    """Counts all operators that compute something, not only gnomon's."""

    def __init__(self):
        super().__init__(None)
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.seen[function._schema.name] += 1
        return super().__torch_dispatch__(function, types, args, kwargs)

    def ours(self) -> dict[str, int]:
        return {
            name.removeprefix("gnomon::"): count
            for name, count in self.seen.items()
            if name.startswith("gnomon::")
        }


# Most operators of a forward and a backward pass. If PyTorch's operators composed the rotations,
# calls with RoPE would need 46 and 33. The emulation converts o and up to three gradients, which a
# GPU does not.
OPERATORS = {
    ("dot", "none"): (3, 2),
    ("umbral", "none"): (4, 5),
    ("penumbral", "none"): (4, 5),
    ("dot", "rope"): (14, 5),
    ("umbral", "rope"): (15, 5),
    ("penumbral", "rope"): (15, 5),
}


@pytest.mark.parametrize("cone", [None, ("umbral", "psi")], ids=["rotation", "cone"])
def test_vmap_of_token_maps(cone):
    """Each sample has its own tokens, and they share turns that differ along the batch."""
    maps = TokenMaps(cone, "half", back=False)
    q, k, *turns = maps.inputs(torch.float32, 1)
    samples = torch.randn(3, *q.shape)
    got = vmap(lambda q: tuple(maps.ours([q, k, *turns])))(samples)
    expected = [maps.ours([q, k, *turns]) for q in samples]
    for result, of in zip(got, zip(*expected, strict=True), strict=True):
        assert torch.equal(result, torch.stack(of))


@pytest.mark.parametrize(("similarity", "position"), OPERATORS)
def test_a_call_is_few_operators(similarity, position):
    """A kernel for the tokens of both sides each way, besides those of the attention. Most of the
    others compute the cosines and sines of RoPE, which a GPU caches."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 16).bfloat16().unbind()
    factor = {"gamma": torch.rand(4)} if similarity != "dot" else {}
    terms = {
        "similarity": {"umbral": Umbral, "penumbral": Penumbral, "dot": Dot}[similarity](**factor)
    }
    if position == "rope":
        terms["position"] = RoPE()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    d_o = torch.randn_like(v)
    with Counted() as forward:
        o = gnomon.attention(*leaves, **terms)
    with Counted() as backward:
        torch.autograd.grad(o, leaves, d_o)
    maps = [] if position == "none" else ["rotate_tokens"]
    back = maps
    if similarity != "dot":
        maps, back = ["cone_map"], ["cone_map_backward"]
    assert forward.ours() == dict.fromkeys([*maps, "attention_forward"], 1)
    assert backward.ours() == dict.fromkeys([*back, "attention_backward"], 1)
    most = OPERATORS[similarity, position]
    assert forward.seen.total() <= most[0]
    assert backward.seen.total() <= most[1]


def test_dropout_is_that_of_the_cpu():
    """Values are unit vectors, one per key, so o is zero where a weight has been dropped."""
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 40, 8)
    v = torch.eye(40).expand(1, 2, 40, 40)
    expected = gnomon.attention(q, k, v, dropout=0.4, seed=3)
    with OnCuda():
        ours = gnomon.attention(q, k, v, dropout=0.4, seed=3)
    assert 0.3 < (expected == 0).float().mean() < 0.5
    assert torch.equal(ours == 0, expected == 0)


@pytest.mark.parametrize("similarity", ["dot", "penumbral"])
def test_modules(similarity):
    torch.manual_seed(0)
    attention = gnomon.nn.MultiheadAttention(
        24, 4, kv_heads=2, similarity=similarity, position="rope+alibi:slopes=learned"
    )
    x = torch.randn(2, 19, 24)

    def run():
        attention.zero_grad()
        o = attention(x, causal=True)
        o.square().sum().backward()
        return {"o": o} | {name: p.grad for name, p in attention.named_parameters()}

    expected = run()
    with OnCuda() as mode:
        ours = run()
    assert mode.calls["attention_forward"] == mode.calls["attention_backward"] == 1
    for what, value in expected.items():
        torch.testing.assert_close(ours[what], value, rtol=1e-4, atol=1e-4, msg=what)


def test_linear_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 70, 8) for _ in range(3))
    for options in ({"causal": True}, {"feature": "relu"}, {"feature": "favor", "causal": True}):
        expected = gnomon.linear_attention(q, k, v, **options)
        with OnCuda():
            ours = gnomon.linear_attention(q, k, v, **options)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        *((name, "few") for name in list(SIMILARITIES)[::3]),
        *((name, graph) for name in ("dot", "umbral", "additive") for graph in (*GRAPHS, "tiles")),
    ],
)
def test_graphs(name, graph):
    """Tests empty rows, duplicate edges, several tiles and grouped heads against an exact loop."""
    rows = GRAPHS.get(graph) or random_rows(150, 90, seed=3)
    keys = max((j for row in rows for j in row), default=1) + 2
    inputs = graph_inputs(name, rows, keys, heads=4, key_heads=2)
    floats = {key: x.float() for key, x in inputs.items()}
    exact = {key: x.double() for key, x in floats.items()}
    with OnCuda() as mode:
        ours, again = (
            values_and_gradients(lambda x: over_edges(name, rows, x), floats) for _ in range(2)
        )
    assert mode.calls["graph_forward"] == mode.calls["graph_backward"] == 2
    assert all(torch.equal(again[key], value) for key, value in ours.items())
    assert_near(ours, values_and_gradients(lambda x: loop(name, rows, x), exact), 1e-4)


@pytest.mark.parametrize("graph", ["few", "skewed", "no edges", "tiles"])
def test_edge_biases_and_dropout(graph):
    """As on the CPU, an edge bias acts as a key bias, and dropout drops the same edges."""
    rows = GRAPHS.get(graph) or random_rows(150, 90, seed=3)
    keys = max((j for row in rows for j in row), default=1) + 2
    inputs = graph_inputs("laplacian", rows, keys, heads=4, key_heads=2)
    indptr, indices = csr(rows)
    inputs["edge_bias"] = torch.randn(len(indices), 4)
    inputs["edge_bias"][::7] = -math.inf
    floats = {key: x.float() for key, x in inputs.items()}

    def attend(x):
        return gnomon.graph_attention(
            x["q"], x["k"], x["v"], indptr, indices, SIMILARITIES["laplacian"].ours(x),
            edge_bias=x["edge_bias"], dropout=0.4, seed=5, return_lse=True,
        )  # fmt: skip

    expected = values_and_gradients(attend, floats)
    with OnCuda() as mode:
        ours = values_and_gradients(attend, floats)
    assert mode.calls["graph_forward"] == mode.calls["graph_backward"] == 1
    assert_near(ours, expected, 1e-4)


def test_emulator_findings_are_errors():
    """A failed launch raises an error."""
    code = """
    import torch, gnomon
    from emulated_gpu import OnCuda
    q = torch.randn(1, 2, 9, 8)
    with OnCuda():
        try:
            gnomon.attention(q, q, q)
        except RuntimeError as error:
            print(error)
    """.replace("\n    ", "\n")
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "GNOMON_EMULATION_FAILS": "1",
            "PYTHONPATH": str(ROOT / "tests" / "python"),
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "gnomon.attention: CUDA: launching prepare_intervals" in result.stdout


def test_wide_heads_of_graphs_are_rejected_by_name():
    x, factor = torch.randn(3, 2, 264), torch.ones(2)
    indptr, indices = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2])
    arguments = (x, x, x, None, None, None, factor, None, indptr, indices, None, "dot", 0.0)
    with pytest.raises(
        NotImplementedError, match="graph_attention: head_dim is 264; expected at most 256"
    ):
        ops.graph_forward.default.redispatch(ON_CUDA, *arguments)


def test_float64_runs_on_the_cpu():
    torch.manual_seed(0)
    x = {name: torch.randn(1, 2, 9, 4, dtype=torch.float64) for name in "qkv"}
    nodes = {name: value[0].transpose(0, 1) for name, value in x.items()}
    indptr, indices = torch.arange(10) * 2, torch.randint(9, (18,))

    def attend(x):
        return gnomon.attention(
            *x.values(), similarity="laplacian", position="alibi", return_lse=True
        )

    def of_graph(x):
        return gnomon.graph_attention(
            *x.values(), indptr, indices, similarity="laplacian", return_lse=True
        )

    for name, call, inputs in (("attention", attend, x), ("graph", of_graph, nodes)):
        expected = values_and_gradients(call, inputs)
        with OnCuda(torch.float64) as mode:
            ours = values_and_gradients(call, inputs)
        assert mode.calls[f"{name}_forward"] == mode.calls[f"{name}_backward"] == 1
        assert all(torch.equal(ours[key], value) for key, value in expected.items())


def test_derivatives_of_graphs_run_on_the_cpu():
    torch.manual_seed(0)
    x, tangent = torch.randn(2, 9, 2, 4)
    indptr, indices = torch.arange(10) * 2, torch.randint(9, (18,))

    def attend(x):
        return gnomon.graph_attention(x, x, x, indptr, indices, "laplacian")

    def second(x):
        return torch.func.jvp(torch.func.grad(lambda x: attend(x).square().sum()), (x,), (tangent,))

    for derivative in (lambda x: torch.func.jvp(attend, (x,), (tangent,)), second):
        expected = derivative(x)
        with OnCuda() as mode:
            ours = derivative(x)
        assert any("jvp" in name for name in mode.calls)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def gradients(x: list[Tensor], d_o: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The gradients of q, k and v from kernels in this dtype or, if None, from the CPU in the dtype
    of the tokens."""
    leaves = [t.clone().requires_grad_() for t in x]
    if dtype is None:
        return list(torch.autograd.grad(gnomon.attention(*leaves), leaves, d_o))
    with OnCuda(dtype):
        return list(torch.autograd.grad(gnomon.attention(*leaves), leaves, d_o))


@pytest.mark.parametrize(
    ("names", "keys", "of_keys", "of_values", "of_gradients"),
    [("q", 2000, 30.0, 1.0, 0.002), ("qkv", 5, 1e-3, 30.0, 1e4)],
    ids=["small weights", "large weights"],
)
def test_float16_has_weights_of_any_size(names, keys, of_keys, of_values, of_gradients):
    """Kernels scale rows by powers of two. Otherwise, small gradients would lose all digits, and
    large gradients would be infinite."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16) for n in (64, keys, keys))
    x = [t.half().float() for t in (0.01 * q, of_keys * k, of_values * v)]
    d_o = (of_gradients * torch.randn(1, 1, 64, 16)).half().float()
    truth = gradients([t.double() for t in x], d_o.double())
    found = gradients(x, d_o, torch.float16)
    for name in names:  # whose gradients are in float16's range
        ours, expected = found["qkv".index(name)], truth["qkv".index(name)]
        error = (ours.double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-3, (name, float(error))


def test_sums_over_many_keys_are_rounded():
    """Tensor cores truncate sums; the errors would accumulate here, as all terms are positive."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16) for n in (16, 3000, 3000))
    x = [q, k, v.abs()]
    truth = gnomon.attention(*(t.double() for t in x))
    with OnCuda(torch.float32):
        found = gnomon.attention(*x)
    assert ((found.double() - truth).abs().max() / truth.abs().max()) < 1e-6
