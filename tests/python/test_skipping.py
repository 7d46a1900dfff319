"""Skipped weights are below `tolerance`, and nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import SIMILARITIES

import gnomon
from gnomon.position import (
    ALiBi,
    Forget,
    HyPE,
    Kerple,
    KeyBias,
    OffsetBias,
    PairBias,
    Relative,
    Sandwich,
)

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
    """A learned bias: a slope with noise, in both directions."""
    torch.manual_seed(1)
    offsets = torch.arange(1 - length, length)
    return torch.randn(H, 2 * length - 1) - slopes()[:, None] * offsets.abs()


def some(*shape):
    torch.manual_seed(1)
    return torch.randn(shape)


def full(number):
    return torch.full((H,), number)


#: Positions, in the dtype to which `to` converts.
POSITIONS = {
    "alibi": lambda to: [ALiBi(to(slopes()))],
    "hype": lambda to: [HyPE(to(slopes() / 0.004), to(full(0.004)), mode="abs")],
    "hype odd": lambda to: [HyPE(to(slopes() / 0.004), to(full(0.004)), mode="odd")],
    "hype cosh": lambda to: [HyPE(to(slopes() * 4), to(full(0.02)), mode="cosh")],
    "kerple": lambda to: [Kerple(to(slopes()), to(full(1.0)), kind="power")],
    "sandwich": lambda to: [Sandwich(to(slopes()))],
    "table": lambda to: [OffsetBias(to(table()))],
    "two": lambda to: [ALiBi(to(slopes())), OffsetBias(to(table()))],
    "forget": lambda to: [Forget(to(-slopes()[None, :, None].repeat(1, 1, LENGTH)))],
    "key bias": lambda to: [ALiBi(to(slopes())), KeyBias(to(some(1, H, LENGTH)))],
    "relative": lambda to: [ALiBi(to(slopes())), Relative(to(some(9, 8) / 8), max_offset=4)],
    "rope": lambda to: ["rope", ALiBi(to(slopes()))],
}


def weights_of(q, k, **arguments):
    """The weights, read from the output for one-hot values; 0 means skipped, or negligible in
    float32."""
    eye = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return gnomon.attention(q, k, eye, **arguments)


def largest_left_out(q, k, position, tolerance, **arguments):
    """The largest sum of skipped weights in a row, in float64, and the fraction that is skipped."""
    found = weights_of(
        q, k, position=position(torch.Tensor.float), tolerance=tolerance, **arguments
    )
    all_there = weights_of(q, k, position=position(torch.Tensor.float), tolerance=0, **arguments)
    p = weights_of(q.double(), k.double(), position=position(torch.Tensor.double), **arguments)
    left_out = (found == 0) & (p > 0)
    share = (left_out & (all_there != 0)).sum() / (all_there != 0).sum()
    return float((p * left_out).sum(-1).max()), float(share)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
def test_of_every_bias_less_than_the_tolerance_is_left_out(position, causal):
    q, k, _ = tokens()
    shares = []
    for tolerance in (DEFAULT, 1e-3):
        weight, share = largest_left_out(q, k, POSITIONS[position], tolerance, causal=causal)
        assert weight < tolerance
        shares.append(share)
    assert shares[1] > 0


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
    arguments = {
        name: value.to(leaves[0].device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    for ours, all_pairs in zip(
        results_of(leaves, DEFAULT, **arguments), results_of(leaves, 0, **arguments), strict=True
    ):
        finite = all_pairs.detach()[all_pairs.isfinite()]
        largest = max(1.0, float(finite.abs().max()))
        torch.testing.assert_close(ours, all_pairs, atol=ROUNDING[dtype] * largest, rtol=0)


def test_float64_leaves_nothing_out():
    leaves = [x.double() for x in (*tokens(length=300), slopes())]
    for ours, all_pairs in zip(
        results_of(leaves, 0.5, causal=True), results_of(leaves, 0, causal=True), strict=True
    ):
        assert torch.equal(ours, all_pairs)


def test_few_queries_on_a_cache_leave_out_less_than_the_tolerance():
    q, k, _ = tokens(length=16, keys=5000)

    def position(to):
        return [ALiBi(to(slopes(steepest=0.05)))]

    weight, share = largest_left_out(q, k, position, DEFAULT, causal=True, query_offset=4984)
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


@pytest.mark.slow
@pytest.mark.real_device
def test_a_compiled_call_takes_it():
    q, k, v = tokens(length=300)

    def call(q, k, v):
        return gnomon.attention(q, k, v, position="alibi", causal=True, tolerance=1e-3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))


def test_vmap_samples_skip_the_same_as_separate_calls():
    q, k, v = tokens(length=300)
    many = torch.stack([q, q * 2, q * 3])

    def call(q):
        return gnomon.attention(q, k, v, position="alibi", causal=True, tolerance=1e-3)

    mapped = torch.func.vmap(call)(many)
    torch.testing.assert_close(mapped, torch.stack([call(x) for x in many]), atol=1e-6, rtol=1e-5)


def test_modules_take_it(device):
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
    # On a GPU, nothing is skipped.
    assert torch.equal(o_coarse, o_whole) == (device.type == "cuda")


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
