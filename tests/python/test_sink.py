"""Sinks: one more score in each row's softmax, for a key without a value."""

from __future__ import annotations

import math

import formulas
import pytest
import torch
from formulas import ONE_PER_PAIR_FUNCTION, SIMILARITIES, Case, Mask, pairwise

import gnomon


def with_column(scores: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> tuple:
    """The formula with the sink as an additional column of scores, whose value is 0."""
    rows = sink[:, None] if sink.dim() == 1 else sink
    all_scores = torch.cat([scores, rows.expand(scores.shape[:3]).unsqueeze(3)], 3)
    weights = all_scores.softmax(3)[..., :-1]
    groups = scores.shape[1] // v.shape[1]
    return weights @ v.repeat_interleave(groups, 1), all_scores.logsumexp(3)


@pairwise(
    similarity=ONE_PER_PAIR_FUNCTION,
    shape=["one", "heads", "rows"],
    dtype=[torch.float32, torch.float64],
)
def test_a_sink_is_a_column_without_a_value(similarity, shape, dtype):
    case = Case(
        similarity, "alibi", heads=4, key_heads=2, queries=13, keys=13, mask=Mask(causal=True)
    )
    inputs = case.inputs()
    batch, heads, queries = inputs["q"].shape[:3]
    sizes = {"one": (), "heads": (heads,), "rows": (batch, heads, queries)}[shape]
    inputs["sink"] = 2 * torch.randn(sizes, dtype=torch.float64)
    inputs = {name: x.to(dtype) for name, x in inputs.items()}

    def ours(p):
        return gnomon.attention(
            p["q"], p["k"], p["v"], similarity=SIMILARITIES[similarity].ours(p),
            position=case.positions(p), causal=True, sink=p["sink"], return_lse=True,
        )  # fmt: skip

    def theirs(p):
        return with_column(case.scores(p), p["v"], p["sink"])

    formulas.check(ours, theirs, inputs, dtype)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_sinks_of_any_size(size):
    """Results match those in float64 even for large scores and sinks."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    q = q * size
    sink = (q @ k.mT / math.sqrt(8)).amax((2, 3)).mean(0)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, sink)]
        o = gnomon.attention(*leaves[:3], sink=leaves[3])
        results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
    plain = [x.float().requires_grad_() for x in (q, k, v, sink)]
    scores = plain[0] @ plain[1].mT / math.sqrt(8)
    o = with_column(scores, plain[2], plain[3])[0]
    results.append([o, *torch.autograd.grad(o.square().sum(), plain)])
    for ours, exact, formula in zip(*results, strict=True):
        largest = exact.abs().max().clamp_min(1e-30)
        error, allowed = ((x - exact).abs().max() / largest for x in (ours, formula))
        assert error <= max(4 * allowed, 1e-5)


def test_rows_without_keys_and_sinks_without_effect():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sink = torch.tensor([-math.inf, 0.5], dtype=torch.float64, requires_grad=True)
    lengths = [0, 3]
    o, lse = gnomon.attention(q, k, v, key_lengths=lengths, sink=sink, return_lse=True)
    assert (o[0] == 0).all()
    assert (lse[0, 0] == -math.inf).all()
    assert (lse[0, 1] == 0.5).all()
    without, its_lse = gnomon.attention(q, k, v, key_lengths=lengths, return_lse=True)
    assert torch.equal(o[1, 0], without[1, 0])
    assert torch.equal(lse[1, 0], its_lse[1, 0])
    finite = torch.where(lse.isfinite(), lse, 0.0)
    gradients = torch.autograd.grad(o.square().sum() + finite.sum(), (q, k, v, sink))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all((gradient[0] == 0).all() for gradient in gradients[:3])
    # If a row attends to no key, lse is the sink. Here, this applies to five rows of one head.
    (d_sink,) = torch.autograd.grad(
        gnomon.attention(q, k, v, key_lengths=lengths, sink=sink, return_lse=True)[1][0, 1].sum(),
        sink,
    )
    assert d_sink.tolist() == [0, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    torch.manual_seed(0)
    tokens = [torch.randn(2, 4, 33, 16, dtype=dtype) for _ in range(3)]
    sink = torch.randn(4)
    ours = gnomon.attention(*tokens, sink=sink)
    exact, formula = (
        with_column(q @ k.mT / 4, v, sink.to(q.dtype))[0]
        for q, k, v in ([x.double() for x in tokens], tokens)
    )
    assert ours.dtype == dtype
    assert (ours - exact).abs().max() <= 2 * (formula - exact).abs().max()
    gnomon.attention(*tokens, sink=sink.to(dtype))


def test_weights_and_a_number_for_all():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    o = gnomon.attention(q, k, v, causal=True, sink=0.25)
    weights = gnomon.attention_weights(q, k, slice(None), causal=True, sink=0.25)
    torch.testing.assert_close(weights @ v, o)
    assert (weights.sum(3) < 1).all()
    rows = torch.randn(2, 2, 7, dtype=torch.float64)
    all_of_them = gnomon.attention_weights(q, k, slice(None), causal=True, sink=rows)
    some = gnomon.attention_weights(q, k, [5, 6, 2], causal=True, sink=rows)
    torch.testing.assert_close(some, all_of_them[:, :, [5, 6, 2]])


def test_compiled_mapped_and_repeatable():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(3, 2, dtype=torch.float64)

    def call(q, k, v, sink):
        return gnomon.attention(q, k, v, position="alibi", causal=True, sink=sink)

    expected = torch.stack([call(*one) for one in zip(q, k, v, sinks, strict=True)])
    torch.testing.assert_close(torch.func.vmap(call)(q, k, v, sinks), expected)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = [x[0].clone().requires_grad_() for x in (q, k, v, sinks)]
    both = [torch.autograd.grad(f(*leaves).sum(), leaves) for f in (call, compiled, call)]
    assert all(torch.equal(a, b) for a, b in zip(both[0], both[2], strict=True))
    torch.testing.assert_close(both[1], both[0])


@pytest.mark.parametrize(
    ("sink", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"sink has shape \[3\]; expected \(\), \(H,\) = \(2,\)"),
        (torch.zeros(2, 2), ValueError, "sink has shape"),
        (torch.zeros(2, dtype=torch.float64), TypeError, "sink has dtype"),
        (torch.zeros(2, dtype=torch.int64), TypeError, "sink has dtype"),
        ("0", TypeError, "sink is a str"),
    ],
)
def test_wrong_sinks(sink, error, message):
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(error, match=message):
        gnomon.attention(q, q, q, sink=sink)


def test_weights_beside_a_sink_of_rows():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 7, 4), torch.randn(2, 2, 9, 4)
    sink = torch.randn(2, 2, 7)
    for rows in ([-1], [5, 2], slice(None)):
        torch.testing.assert_close(
            gnomon.attention_weights(q, k, rows, position=gnomon.position.Sink(sink)),
            gnomon.attention_weights(q, k, rows, sink=sink),
        )
