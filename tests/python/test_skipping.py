"""tolerance: what attention leaves out weighs less than it, and nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import SIMILARITIES
from operator_checks import CHECKS

import gnomon
from gnomon.position import ALiBi, Forget, HyPE, Kerple, KeyBias, OffsetBias, PairBias, Relative

DEFAULT = 2.0**-24
H, LENGTH = 2, 600


def tokens(length=LENGTH, heads=H, key_heads=H, dim=8, dtype=torch.float32, value_dim=8, keys=None):
    torch.manual_seed(0)
    keys = length if keys is None else keys
    q = torch.randn(1, heads, length, dim)
    k, v = torch.randn(1, key_heads, keys, dim), torch.randn(1, key_heads, keys, value_dim)
    return [x.to(dtype) for x in (q, k, v)]


def slopes(heads=H, steepest=0.6):
    return steepest / torch.arange(1, heads + 1)


def table(length=LENGTH):
    """A learned one: noise on a slope, in both directions."""
    torch.manual_seed(1)
    offsets = torch.arange(1 - length, length)
    return torch.randn(H, 2 * length - 1) - slopes()[:, None] * offsets.abs()


POSITIONS = {
    "alibi": lambda: [ALiBi(slopes())],
    "hype": lambda: [HyPE(slopes() / 0.004, torch.full((H,), 0.004), mode="abs")],
    "hype odd": lambda: [HyPE(slopes() / 0.004, torch.full((H,), 0.004), mode="odd")],
    "hype cosh": lambda: [HyPE(slopes() / 0.01, torch.full((H,), 0.02), mode="cosh")],
    "kerple": lambda: [Kerple(slopes(), torch.full((H,), 1.0), kind="power")],
    "table": lambda: [OffsetBias(table())],
    "two": lambda: [ALiBi(slopes()), OffsetBias(table())],
    "forget": lambda: [Forget(-slopes()[None, :, None].expand(1, H, LENGTH).contiguous())],
    "key bias": lambda: [ALiBi(slopes()), KeyBias(torch.randn(1, H, LENGTH))],
    "relative": lambda: [ALiBi(slopes()), Relative(torch.randn(9, 8) / 8, max_offset=4)],
    "rope": lambda: ["rope", ALiBi(slopes())],
}


def weights_of(q, k, **arguments):
    """p, of values that are unit vectors. 0 is left out, or weighs nothing in float32."""
    eye = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return gnomon.attention(q, k, eye, **arguments)


def largest_left_out(q, k, tolerance, **arguments):
    """In float64, which leaves nothing out, and the share of the weights that are 0."""
    found = weights_of(q, k, tolerance=tolerance, **arguments)
    seen = weights_of(q, k, tolerance=0, **arguments) != 0
    left_out = (found == 0) & seen
    p = weights_of(q.double(), k.double(), **in_double(arguments))
    return float((p * left_out).sum(-1).max()), float(left_out.sum() / seen.sum())


def in_double(arguments):
    def to(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.double()
        return value

    arguments = {name: to(value) for name, value in arguments.items()}
    arguments["position"] = [
        term
        if isinstance(term, str)
        else type(term)(**{name: to(value) for name, value in vars(term).items()})
        for term in arguments.get("position", [])
    ]
    if isinstance(arguments.get("similarity"), gnomon.similarity.Similarity):
        term = arguments["similarity"]
        arguments["similarity"] = type(term)(**{n: to(x) for n, x in vars(term).items()})
    return arguments


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
def test_of_every_bias_less_than_the_tolerance_is_left_out(position, causal):
    if position == "forget" and not causal:
        pytest.skip("Forget is causal")
    q, k, _ = tokens()
    arguments = {"position": POSITIONS[position](), "causal": causal}
    for tolerance in (DEFAULT, 1e-3):
        weight, share = largest_left_out(q, k, tolerance, **arguments)
        assert weight < tolerance
        # A mode that rewards the future sees all of it in its first rows alone.
        assert share > 0 or tolerance == DEFAULT
    assert weight > 0


@pytest.mark.parametrize("name", SIMILARITIES)
def test_of_every_similarity_less_than_the_tolerance_is_left_out(name):
    similarity = SIMILARITIES[name]
    q, k, _ = tokens(dim=similarity.columns or 8)
    q, k = (similarity.prepare(x.double()).float() for x in (q, k))
    torch.manual_seed(2)
    parameters = {n: p.float() for n, p in similarity.parameters(H).items()}
    shares = []
    for tolerance in (DEFAULT, 1e-3):
        call = {"position": [ALiBi(slopes(steepest=2.0))], "causal": True}
        found = weights_of(
            q, k, similarity=similarity.ours(parameters), tolerance=tolerance, **call
        )
        everything = weights_of(q, k, similarity=similarity.ours(parameters), tolerance=0, **call)
        doubles = {n: p.double() for n, p in parameters.items()}
        call["position"] = [ALiBi(slopes(steepest=2.0).double())]
        p = weights_of(q.double(), k.double(), similarity=similarity.ours(doubles), **call)
        left_out = (found == 0) & (p > 0)
        assert float((p * left_out).sum(-1).max()) < tolerance
        torch.testing.assert_close(found, everything, atol=2 * tolerance, rtol=1e-3)
        shares.append(float((left_out & (everything != 0)).sum()))
    assert shares[1] > 0


def results_of(leaves, tolerance, return_lse=True, **arguments):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    q, k, v, *terms = leaves
    o, lse = gnomon.attention(
        q,
        k,
        v,
        position=[ALiBi(terms[0]), OffsetBias(terms[1])] if len(terms) == 2 else [ALiBi(terms[0])],
        tolerance=tolerance,
        return_lse=True,
        **arguments,
    )
    torch.manual_seed(3)
    seen = lse > -math.inf
    loss = (o.float() * torch.randn(o.shape)).sum()
    loss = loss + (torch.where(seen, lse, 0.0) * torch.randn(lse.shape)).sum()
    return [o, lse, *torch.autograd.grad(loss, leaves)]


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    "arguments",
    [
        {"causal": True},
        {},
        {"window": (400, 150)},
        {"causal": True, "key_lengths": [577], "key_starts": [40]},
        {"causal": True, "dropout": 0.2, "seed": 5},
        {"causal": True, "sink": 0.3, "temperature": 1.5},
        {
            "causal": True,
            "query_segments": torch.arange(LENGTH) // 290,
            "key_segments": torch.arange(LENGTH) // 290,
        },
        {"mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(30)},
        {"chunks": (200, 2, 0)},
    ],
    ids=lambda arguments: "+".join(arguments) or "full",
)
def test_outputs_and_gradients_are_those_of_all_pairs(arguments, dtype):
    leaves = [*tokens(dtype=dtype, key_heads=1), slopes(), table()]
    for ours, all_pairs in zip(
        results_of(leaves, DEFAULT, **arguments), results_of(leaves, 0, **arguments), strict=True
    ):
        largest = max(1.0, float(all_pairs[all_pairs.isfinite()].abs().max()))
        torch.testing.assert_close(ours, all_pairs, atol=ROUNDING[dtype] * largest, rtol=0)


def test_float64_leaves_nothing_out():
    leaves = [x.double() for x in (*tokens(length=300), slopes())]
    for ours, all_pairs in zip(
        results_of(leaves, 0.5, causal=True), results_of(leaves, 0, causal=True), strict=True
    ):
        assert torch.equal(ours, all_pairs)


def test_few_queries_on_a_cache_leave_out_less_than_the_tolerance():
    q, k, _ = tokens(length=3, keys=5000)
    arguments = {"position": [ALiBi(slopes(steepest=0.05))], "causal": True, "query_offset": 4997}
    weight, share = largest_left_out(q, k, DEFAULT, **arguments)
    assert weight < DEFAULT
    assert share > 0.1


def test_biases_of_pairs_are_computed_whole():
    q, k, _ = tokens(length=520)
    pairs = torch.zeros(1, 1, 520, 520)
    position = [ALiBi(slopes(steepest=2.0)), PairBias(pairs)]
    assert torch.equal(
        weights_of(q, k, position=position, causal=True, tolerance=0.1),
        weights_of(q, k, position=position, causal=True, tolerance=0),
    )


def test_attention_weights_are_all_there():
    q, k, _ = tokens()
    position = [ALiBi(slopes())]
    ours = gnomon.attention_weights(q, k, slice(None), position=position, causal=True)
    everything = weights_of(q, k, position=position, causal=True, tolerance=0)
    torch.testing.assert_close(ours, everything, atol=1e-6, rtol=1e-4)
    assert torch.equal(ours != 0, everything != 0)


def test_a_compiled_call_takes_it():
    q, k, v = tokens(length=300)

    def call(q, k, v):
        return gnomon.attention(q, k, v, position="alibi", causal=True, tolerance=1e-3)

    compiled = torch.compile(call, fullgraph=True)
    assert torch.equal(compiled(q, k, v), call(q, k, v))
    operator = torch.ops.gnomon.attention_forward
    factor = torch.full((H,), 0.3)
    bias = torch.randn(1, H, 599)
    none = [None] * 4
    torch.library.opcheck(
        operator,
        (q, k, v, None, None, None, factor, bias, None, None, None, None, None, None, None, None,
         *none, None, None, None, None, "dot", 0, None, 0, None, None, "", 1.0, 0.0, 1e-3, False),
        test_utils=CHECKS,
    )  # fmt: skip


def test_samples_of_vmap_leave_out_what_they_leave_out_alone():
    q, k, v = tokens(length=300)
    many = torch.stack([q, q * 2, q * 3])

    def call(q):
        return gnomon.attention(q, k, v, position="alibi", causal=True, tolerance=1e-3)

    mapped = torch.func.vmap(call)(many)
    torch.testing.assert_close(mapped, torch.stack([call(x) for x in many]), atol=1e-6, rtol=1e-5)


def test_modules_take_it():
    torch.manual_seed(0)
    position = ALiBi(slopes(steepest=2.0))
    module = gnomon.nn.MultiheadAttention(16, H, position=position)
    assert module.tolerance == DEFAULT
    whole = gnomon.nn.MultiheadAttention(16, H, position=position, tolerance=0)
    coarse = gnomon.nn.MultiheadAttention(16, H, position=position, tolerance=0.3)
    for other in (whole, coarse):
        other.load_state_dict(module.state_dict())
    x = torch.randn(1, LENGTH, 16)
    o, o_whole, o_coarse = (m(x, causal=True) for m in (module, whole, coarse))
    torch.testing.assert_close(o, o_whole, atol=1e-5, rtol=0)
    assert not torch.equal(o_coarse, o_whole)


@pytest.mark.parametrize(
    ("tolerance", "error"),
    [(-1e-9, ValueError), (1.0, ValueError), (math.nan, ValueError), ("x", TypeError)],
)
def test_mistakes(tolerance, error):
    q, k, v = tokens(length=4)
    with pytest.raises(error, match="tolerance"):
        gnomon.attention(q, k, v, tolerance=tolerance)
    with pytest.raises(error, match="tolerance"):
        gnomon.nn.MultiheadAttention(16, 2, tolerance=tolerance)
