"""Terms of the scores other than similarities and offset positions.

Masks and biases as user arrays, key biases, forget gates, temperatures.
"""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap

import formulas
import pytest
import torch
from formulas import SIMILARITIES, TOLERANCE, Case, Mask
from operator_checks import peak_memory

import gnomon
from gnomon.position import (
    Forget,
    Gate,
    KeyBias,
    LogTemperature,
    OffsetBias,
    PairBias,
    QKNorm,
    Relative,
    ScalableSoftmax,
)

B, H, HKV, LQ, LK = 2, 4, 2, 13, 37

#: The shapes of pair arrays.
PAIRS = {
    "own": (B, H, LQ, LK),
    "heads": (B, 1, LQ, LK),
    "batch": (1, H, LQ, LK),
    "all": (1, 1, LQ, LK),
    "two axes": (LQ, LK),
    "rows": (B, 1, 1, LK),
    "per-head rows": (1, H, 1, LK),
    "rows alone": (LK,),
    "columns": (H, LQ, 1),
    "per-batch columns": (B, 1, LQ, 1),
    "heads alone": (H, 1, 1),
    "one": (),
}
#: The shapes of temperatures.
ROWS = {"own": (B, H, LQ), "heads": (B, 1, LQ), "batch": (1, H, LQ), "rows": (LQ,), "one": ()}


def case_of(similarity: str = "dot") -> Case:
    """A case with the last queries of a causal call, in which every row attends to a key."""
    return Case(
        similarity, "alibi", batch=B, heads=H, key_heads=HKV, queries=LQ, keys=LK,
        mask=Mask(causal=True, query_offset=LK - LQ),
    )  # fmt: skip


def random_mask(shape: tuple[int, ...]) -> torch.Tensor:
    mask = torch.rand(shape) < 0.6
    # One row attends to no key.
    if mask.dim() == 4 and shape[2] > 2:
        mask[0, 0, 2] = False
    return mask


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def softmax(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; for a row that attends to no key, they are 0 and -inf."""
    sees = (scores > -math.inf).any(-1, keepdim=True)
    scores = torch.where(sees, scores, 0.0)
    values = v.repeat_interleave(scores.shape[1] // v.shape[1], 1)
    lse = scores.logsumexp(-1).masked_fill(~sees[..., 0], -math.inf)
    return (scores.softmax(-1) * sees) @ values, lse


def check(
    case: Case, inputs: dict, terms, arguments, add, dtype, mask=None, ours_masks=True
) -> None:
    """terms(p) and arguments(p) are passed to gnomon; add(p) is added to the formula's scores.

    ours_masks: whether gnomon receives the mask; otherwise, the terms hide the same pairs.
    """
    inputs = case.inputs() | inputs

    def ours(p):
        return gnomon.attention(
            p["q"], p["k"], p["v"], similarity=SIMILARITIES[case.similarity].ours(p),
            position=[*case.positions(p), *terms(p)], return_lse=True,
            mask=mask if ours_masks else None, **(case.arguments() | arguments(p)),
        )  # fmt: skip

    def theirs(p):
        scores = case.scores(p)
        visible = scores > -math.inf
        if mask is not None:
            visible = visible & mask
        scores = (torch.where(visible, scores, 0.0) + add(p)) * temperature_of(p)
        return softmax(scores.masked_fill(~visible, -math.inf), p["v"])

    formulas.check(ours, theirs, inputs, dtype)


def temperature_of(p: dict) -> torch.Tensor | float:
    return p["temperature"].unsqueeze(-1) if "temperature" in p else 1.0


def nothing(_p: dict) -> dict:
    return {}


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@formulas.pairwise(similarity=formulas.ONE_PER_PAIR_FUNCTION, dtype=TOLERANCE)
def test_all_at_once(similarity, dtype):
    torch.manual_seed(0)
    inputs = {
        "pairs": normal(B, 1, LQ, LK),
        "keys": normal(B, H, LK),
        "log_forget": torch.rand(B, H, LK, dtype=torch.float64).log(),
        "temperature": torch.rand(B, H, LQ, dtype=torch.float64) + 0.5,
    }
    check(
        case_of(similarity),
        inputs,
        lambda p: [PairBias(p["pairs"]), KeyBias(p["keys"]), Forget(p["log_forget"])],
        lambda p: {"temperature": p["temperature"]},
        lambda p: p["pairs"] + (p["keys"] - p["log_forget"].cumsum(2)).unsqueeze(2),
        dtype,
        random_mask((1, H, LQ, LK)),
    )


#: For these similarities, gnomon does not compute the score terms that are constant along a row.
WITH_A_ROW_CONSTANT = [n for n in SIMILARITIES if n.startswith(("lorentz", "umbral")) or "log" in n]
#: Numbers of rows and keys for one tile, for several tiles with a partial one, and for few rows.
CAPPED = {"a tile": (13, 37), "tiles": (150, 331), "few rows": (2, 700)}


@formulas.pairwise(
    similarity=[n for n in SIMILARITIES if n not in WITH_A_ROW_CONSTANT],
    shape=list(CAPPED),
    more=["alone", "biases", "all"],
    dtype=TOLERANCE,
)
def test_a_soft_cap_of_whole_scores(similarity, shape, more, dtype):
    """The cap applies to scores after biases and temperatures, but before masks and the sink."""
    torch.manual_seed(0)
    rows, keys = CAPPED[shape]
    cap = 1.7
    mask = Mask(causal=True, query_offset=keys - rows)
    case = Case(
        similarity, "none" if more == "alone" else "alibi", batch=B, heads=H, key_heads=HKV,
        queries=rows, keys=keys, mask=mask,
    )  # fmt: skip
    inputs = case.inputs()
    hidden = None
    if more == "all":
        inputs |= {
            "pairs": 2 * normal(B, 1, rows, keys),
            "keys": normal(B, H, keys),
            "temperature": torch.rand(B, H, rows, dtype=torch.float64) + 0.5,
            "sink": normal(H),
        }
        hidden = random_mask((1, H, rows, keys))

    def ours(p):
        terms = [PairBias(p["pairs"]), KeyBias(p["keys"])] if more == "all" else []
        arguments = {name: p[name] for name in ("temperature", "sink") if name in p}
        return gnomon.attention(
            p["q"], p["k"], p["v"], similarity=SIMILARITIES[similarity].ours(p),
            position=[*case.positions(p), *terms], return_lse=True, mask=hidden,
            score_softcap=cap, **(case.arguments() | arguments),
        )  # fmt: skip

    def theirs(p):
        scores = case.scores(p)
        visible = scores > -math.inf
        if hidden is not None:
            visible = visible & hidden
        scores = torch.where(visible, scores, 0.0)
        if more == "all":
            scores = (scores + p["pairs"] + p["keys"].unsqueeze(2)) * temperature_of(p)
        scores = (cap * torch.tanh(scores / cap)).masked_fill(~visible, -math.inf)
        if more != "all":
            return softmax(scores, p["v"])
        sink = p["sink"][:, None, None].expand(B, H, rows, 1)
        nothing = torch.zeros_like(p["v"][:, :, :1])
        return softmax(torch.cat([scores, sink], -1), torch.cat([p["v"], nothing], 2))

    formulas.check(ours, theirs, inputs, dtype)


def test_a_soft_cap_without_biases_is_that_of_the_product():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 40, 8).unbind()
    expected = gnomon.attention(q, k, v, similarity=gnomon.similarity.Dot(softcap=0.3))
    torch.testing.assert_close(gnomon.attention(q, k, v, score_softcap=0.3), expected)
    weights = gnomon.attention_weights(q, k, list(range(40)), score_softcap=0.3)
    torch.testing.assert_close(weights @ v, expected)
    module = gnomon.nn.Attention(4, 8, position="alibi")
    biased = gnomon.attention(q, k, v, position="alibi", score_softcap=0.3)
    torch.testing.assert_close(module(q, k, v, score_softcap=0.3), biased)
    assert not torch.allclose(biased, expected, atol=1e-3)
    compiled = torch.compile(gnomon.attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, position="alibi", score_softcap=0.3), biased)
    mapped = torch.func.vmap(lambda x: gnomon.attention(x, k, v, score_softcap=0.3))(q[None])
    torch.testing.assert_close(mapped[0], expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"score_softcap": 0.0}, ValueError, "score_softcap is 0; expected a positive number"),
        ({"score_softcap": -1}, ValueError, "score_softcap is -1"),
        ({"score_softcap": "2"}, TypeError, "score_softcap is a str"),
        ({"softcap": 2.0}, TypeError, "or score_softcap=, which caps scores after"),
        (
            {"score_softcap": 2.0, "position": Forget(torch.zeros(1, 2, 5))},
            NotImplementedError,
            "score_softcap is not supported with a position that sums over keys",
        ),
        (
            {"score_softcap": 2.0, "similarity": gnomon.similarity.Lorentz(1.0, bias=1.0)},
            NotImplementedError,
            "score_softcap is not supported with lorentz",
        ),
        (
            {"score_softcap": 2.0, "similarity": gnomon.similarity.Umbral(1.0)},
            NotImplementedError,
            "score_softcap is not supported with umbral",
        ),
        (
            {"score_softcap": 2.0, "aggregation": "einstein_midpoint"},
            NotImplementedError,
            "score_softcap is not supported with aggregation = einstein_midpoint",
        ),
    ],
)
def test_wrong_soft_caps(arguments, error, message):
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(error, match=message):
        gnomon.attention(x, x, x, causal=True, return_lse=True, **arguments)


@DTYPES
@pytest.mark.parametrize("shape", list(PAIRS))
def test_biases_of_pairs(shape, dtype):
    torch.manual_seed(0)
    inputs = {"pairs": normal(*PAIRS[shape])}
    check(case_of(), inputs, lambda p: [PairBias(p["pairs"])], nothing, lambda p: p["pairs"], dtype)


@DTYPES
def test_biases_that_rows_or_keys_share_hide_by_infinity(dtype):
    """The call has a sink and temperatures, one of which is 0."""
    torch.manual_seed(0)
    of_keys, of_rows = normal(B, 1, 1, LK), normal(1, H, LQ, 1)
    of_keys[0, :, :, ::3] = -math.inf
    of_rows[:, 1, 2:5] = -math.inf
    finite = of_keys.isfinite() & of_rows.isfinite()
    inputs = {"temperature": torch.rand(B, H, LQ, dtype=torch.float64) + 0.5}
    inputs["temperature"][0, 1, 2] = 0
    check(
        case_of(),
        inputs,
        lambda p: [PairBias(x.to(p["q"].dtype)) for x in (of_keys, of_rows)],
        lambda p: {"temperature": p["temperature"]},
        lambda p: torch.where(finite, of_keys + of_rows, 0.0).to(p["q"].dtype),
        dtype,
        finite,
        ours_masks=False,
    )
    q, k, v = (torch.randn(B, H, n, 8, dtype=dtype) for n in (LQ, LK, LK))
    arguments = {"sink": torch.randn(H, dtype=dtype), "return_lse": True}
    pairs = of_rows.to(dtype)
    whole = PairBias(pairs.expand(B, H, LQ, LK).clone())
    torch.testing.assert_close(
        gnomon.attention(q, k, v, position=PairBias(pairs), **arguments),
        gnomon.attention(q, k, v, position=whole, **arguments),
    )
    spoiled = PairBias(of_rows.clone().fill_(math.nan).to(dtype))
    sees = torch.rand(B, 1, LQ, LK) < 0.5
    sees[:, :, 3] = False
    o, lse = gnomon.attention(q, k, v, position=spoiled, mask=sees, return_lse=True)
    assert (o[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == -math.inf).all()
    assert o[:, :, :3].isnan().all()
    assert lse[:, :, 4:].isnan().all()


@pytest.mark.slow
def test_biases_that_rows_or_keys_share_take_no_memory_for_pairs():
    before = """
        shape = [int(n) for n in sys.argv[1].split("x")]
        bias = torch.randn(shape, requires_grad=True)
        q, k, v = (torch.randn(1, 2, 16384, 8, requires_grad=True) for _ in range(3))
    """
    step = """
        position = gnomon.position.PairBias(bias)
        gnomon.attention(q, k, v, position=position, causal=True, window=256).sum().backward()
    """
    for shape in ("1x2x1x16384", "1x2x16384x1"):
        used = peak_memory(textwrap.dedent(before), textwrap.dedent(step), shape)
        assert used < 100 * 2**10, (shape, used)  # in KiB; a bias of all pairs takes 2 GiB


#: Terms, and the shapes of biases that have one value for all pairs.
SAME = {
    "pairs": (PairBias, (1, 2, 40, 24)),
    "pair bias per key": (PairBias, (24,)),
    "keys": (KeyBias, (1, 2, 24)),
    "offsets": (OffsetBias, (2, 40 + 24 - 1)),
}


@DTYPES
@pytest.mark.parametrize("kind", list(SAME))
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_finite_biases(kind, sign, dtype):
    """If all keys of a row have the highest or the lowest finite bias, they have equal weights."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, n, 8, dtype=dtype, requires_grad=True) for n in (40, 24, 24)]
    term, shape = SAME[kind]
    position = term(torch.full(shape, sign * torch.finfo(dtype).max, dtype=dtype))
    o = gnomon.attention(*leaves, position=position, query_offset=0)
    torch.testing.assert_close(o, leaves[2].mean(2, keepdim=True).expand_as(o))
    gradients = torch.autograd.grad(o.square().sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2, 40, 24), (24,)])
def test_the_least_number_hides_as_infinity_does(shape, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, dtype=dtype) for n in (40, 24, 24))
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    zeros = torch.zeros(shape, dtype=dtype)
    least, infinite = (
        gnomon.attention(q, k, v, position=PairBias(zeros.masked_fill(hidden, number)))
        for number in (torch.finfo(dtype).min, -math.inf)
    )
    assert torch.equal(least, infinite)


@DTYPES
@pytest.mark.parametrize("shape", list(PAIRS))
def test_masks(shape, dtype):
    torch.manual_seed(0)
    mask = random_mask(PAIRS[shape])
    check(case_of(), {}, lambda p: [], nothing, lambda p: 0.0, dtype, mask)


@DTYPES
@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("batch", [1, B])
def test_biases_of_keys(batch, heads, dtype):
    torch.manual_seed(0)
    inputs = {"keys": normal(batch, heads, LK), "more": normal(B, H, LK)}
    inputs["log_forget"] = -torch.rand(B, heads, LK, dtype=torch.float64) / 4
    check(
        case_of(), inputs,
        lambda p: [KeyBias(p["keys"]), KeyBias(p["more"]), Forget(p["log_forget"])], nothing,
        lambda p: (p["keys"] + p["more"] - p["log_forget"].cumsum(2)).unsqueeze(2), dtype,
    )  # fmt: skip
    # A key bias may be the only term, in which case no other tensor has an axis of rows.
    q, k, v = (
        x.to(dtype) for x in (normal(B, H, LQ, 4), normal(B, HKV, LK, 4), normal(B, HKV, LK, 3))
    )
    bias = inputs["keys"].to(dtype)
    torch.testing.assert_close(
        gnomon.attention(q, k, v, position=KeyBias(bias)),
        gnomon.attention(q, k, v, position=KeyBias(bias.expand(B, H, LK))),
    )


@DTYPES
@pytest.mark.parametrize("similarity", ["dot", "penumbral"])
def test_midpoints_at_a_temperature(similarity, dtype):
    """A temperature multiplies the scores, but not the Lorentz factors of the values."""
    torch.manual_seed(0)
    case = Case(similarity, "alibi", key_heads=2, mask=Mask(key_lengths=(13, 0), causal=True))
    inputs = case.inputs() | {"temperature": normal(2, 4, 13), "sink": normal(4)}
    v = inputs["v"]
    inputs["v"] = v / v.norm(dim=-1, keepdim=True) * torch.rand(*v.shape[:-1], 1).double() * 0.9
    inputs = {name: x.to(dtype) for name, x in inputs.items()}

    def ours(p):
        return gnomon.attention(
            p["q"], p["k"], p["v"], similarity=SIMILARITIES[similarity].ours(p),
            position=case.positions(p), aggregation="einstein_midpoint", return_lse=True,
            temperature=p["temperature"], sink=p["sink"], **case.mask.arguments(case.batch),
        )  # fmt: skip

    def theirs(p):
        values = p["v"].repeat_interleave(2, 1)
        factor = 1 / (1 - values.square().sum(-1)).sqrt()
        hidden = ~case.mask.visible(
            torch.arange(13.0)[:, None], torch.arange(13.0)[None], case.batch
        )
        scores = case.scores(p).masked_fill(hidden, 0.0) * p["temperature"].unsqueeze(3)
        weights = scores.masked_fill(hidden, -math.inf).exp() * factor[:, :, None]
        sink = p["sink"][:, None, None].exp()
        total = weights.sum(-1, keepdim=True) + sink
        return weights @ values / total, total.log().squeeze(3)

    formulas.check(ours, theirs, inputs, dtype)


@DTYPES
@pytest.mark.parametrize("shape", list(ROWS))
def test_temperatures(shape, dtype):
    torch.manual_seed(0)
    # Temperatures may be negative, but masked pairs remain masked.
    inputs = {"temperature": normal(*ROWS[shape])}
    check(
        case_of("penumbral"), inputs, lambda p: [], lambda p: {"temperature": p["temperature"]},
        lambda p: 0.0, dtype, random_mask((B, H, LQ, LK)),
    )  # fmt: skip


def test_a_temperature_of_zero_and_a_number():
    torch.manual_seed(0)
    q, k, v = (normal(1, 2, 9, 4).requires_grad_() for _ in range(3))
    o, lse = gnomon.attention(q, k, v, causal=True, temperature=0.0, return_lse=True)
    counts = torch.arange(1, 10, dtype=torch.float64)
    torch.testing.assert_close(o, v.cumsum(2) / counts[:, None])
    torch.testing.assert_close(lse, counts.log().expand(1, 2, 9))
    gradients = torch.autograd.grad(o.square().sum(), (q, k, v))
    assert (gradients[0] == 0).all()
    assert (gradients[1] == 0).all()
    two = gnomon.attention(q, k, v, causal=True, temperature=2.0)
    torch.testing.assert_close(two, gnomon.attention(q, k, v, causal=True, scale=2.0 / 2.0))


def test_scalable_softmax():
    """The temperature is s log(n) in a row that attends to n keys (Nakanishi 2025)."""
    torch.manual_seed(0)
    q, k, v = (normal(2, 4, 21, 8) for _ in range(3))
    s = torch.tensor([0.3, 0.43, 0.6, 1.0], dtype=torch.float64)
    logs = torch.arange(1, 22, dtype=torch.float64).log()
    ours = gnomon.attention(q, k, v, causal=True, temperature=s[:, None] * logs)
    scores = (q @ k.mT / math.sqrt(8)) * (s[:, None] * logs).unsqueeze(2)
    hidden = torch.ones(21, 21, dtype=torch.bool).triu(1)
    torch.testing.assert_close(ours, scores.masked_fill(hidden, -math.inf).softmax(-1) @ v)


#: Terms that depend on the keys before a row's own position; gates has shape (1, H, Lk).
COUNTING = {
    "forget": lambda gates: Forget(gates),
    "scalable softmax": lambda gates: ScalableSoftmax(gates.new_tensor([0.2, 0.3, 0.4, 0.5])),
    "smooth temperature": lambda gates: LogTemperature(0.3, 2, kind="smooth"),
}


@DTYPES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("term", COUNTING)
def test_packed_documents_match_separate_calls(term, causal, dtype):
    """Documents are packed consecutively or interleaved, or padded on the left; each has its own
    positions."""
    torch.manual_seed(0)
    q, k, v = (normal(1, H, 11, 8).to(dtype) for _ in range(3))
    gates = (torch.rand(1, H, 11, dtype=torch.float64).log() / 4).to(dtype)
    close = {"atol": 2e-6, "rtol": 2e-5} if dtype == torch.float32 else {}
    places = torch.arange(11)

    def alone(tokens):
        position = COUNTING[term](gates[:, :, tokens])
        return gnomon.attention(
            q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], position=position, causal=causal
        )

    for ids in ([0] * 4 + [1] * 7, [3, 1, 3, 3, 1, -2, 1, 3, -2, -2, 1]):
        segments = torch.tensor([ids])
        for positions in (None, places):
            o = gnomon.attention(
                q, k, v, position=COUNTING[term](gates), causal=causal, positions=positions,
                query_segments=segments, key_segments=segments,
            )  # fmt: skip
            for document in set(ids):
                tokens = (segments[0] == document).nonzero().flatten()
                torch.testing.assert_close(o[:, :, tokens], alone(tokens), **close)
    for positions in (None, places):
        o = gnomon.attention(
            q, k, v, position=COUNTING[term](gates), causal=causal, positions=positions,
            key_starts=[3], key_lengths=[9],
        )  # fmt: skip
        torch.testing.assert_close(o[:, :, 3:9], alone(torch.arange(3, 9)), **close)


@pytest.mark.parametrize(
    ("similarity", "scale"),
    [
        *itertools.product(["dot", "laplacian", "penumbral", "hyperboloid"], [1.0, 3.0, 10.0]),
        ("dot", 1e3),  # beyond the range of the maps of other similarities
    ],
)
def test_gradients_at_large_scores(similarity, scale):
    """Errors are at most four times those of the unfused reference in float32."""
    torch.manual_seed(0)
    case = Case(
        similarity, "alibi", heads=2, key_heads=2, queries=48, keys=48, dim=16, value_dim=16
    )
    inputs = case.inputs() | {
        "temperature": torch.rand(2, 2, 48, dtype=torch.float64) + 0.5,
        "pairs": scale * normal(1, 2, 48, 48),
        "log_forget": torch.rand(2, 2, 48, dtype=torch.float64).log(),
    }
    for name in ("q", "k"):
        inputs[name] = inputs[name] * scale
    inputs = {name: x.float() for name, x in inputs.items()}

    def ours(p):
        return gnomon.attention(
            p["q"], p["k"], p["v"], similarity=SIMILARITIES[similarity].ours(p),
            position=[*case.positions(p), PairBias(p["pairs"]), Forget(p["log_forget"])],
            temperature=p["temperature"], return_lse=True,
        )  # fmt: skip

    def theirs(p):
        forgotten = -p["log_forget"].cumsum(2).unsqueeze(2)
        # The formula computes positions in float64.
        scores = case.scores(p).to(p["v"].dtype) + p["pairs"] + forgotten
        return softmax(scores * p["temperature"].unsqueeze(3), p["v"])

    def run(attend, dtype):
        return formulas.values_and_gradients(attend, {n: x.to(dtype) for n, x in inputs.items()})

    exact, found = run(theirs, torch.float64), run(ours, torch.float32)
    plain = run(theirs, torch.float32)
    for name, expected in exact.items():
        size = expected.abs().max().clamp_min(1e-30)
        error, allowed = (float((x[name] - expected).abs().max() / size) for x in (found, plain))
        # The formula may return NaN where gnomon is accurate.
        limit = 1e-5 if math.isnan(allowed) else max(4 * allowed, 1e-5)
        assert error <= limit, (name, error, allowed)


@pytest.mark.parametrize("r", [0.1, 1.0])
def test_gradients_of_queries_whose_slopes_are_alike(r):
    """Heights grow as e^z, so for some seeds, the rounding of scores decides some rows."""
    length, dim, seeds = 48, 16, 20
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    within, ratios = 0, []
    for seed in range(seeds):
        random = formulas.generator_of(seed)
        q, k, v, d_o = torch.randn(4, 1, 2, length, dim, generator=random)

        def plain(dtype, q=q, k=k, v=v, d_o=d_o):
            leaf = (10 * q).to(dtype).requires_grad_()
            points = formulas.psi(leaf), formulas.psi(10 * k.to(dtype))
            scores = -formulas.umbral_height(*points, r)
            o = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v.to(dtype)
            return torch.autograd.grad(o, leaf, d_o.to(dtype))[0]

        leaf = (10 * q).requires_grad_()
        o = gnomon.attention(leaf, 10 * k, v, similarity=f"umbral:gamma=1:r={r}", causal=True)
        found = torch.autograd.grad(o, leaf, d_o)[0]
        exact = plain(torch.float64)
        size = exact.abs().max()
        error, allowed = (
            float((x - exact).abs().max() / size) for x in (found, plain(torch.float32))
        )
        within += error <= max(4 * allowed, 1e-5)
        ratios.append(error / max(allowed, 1e-30))
    assert within >= 0.75 * seeds
    assert statistics.median(ratios) <= 0.5


def test_forget_gates_over_long_sequences():
    """Differences between sums over 64k gates are as accurate as those over a few gates."""
    torch.manual_seed(0)
    length, queries = 65536, 64
    q = torch.randn(1, 1, queries, 16)
    k, v = (torch.randn(1, 1, length, 16) for _ in range(2))
    log_forget = -torch.rand(1, 1, length)  # sums to -32768
    d_o = torch.randn(1, 1, queries, 16)

    def formula(dtype):
        leaf = log_forget.to(dtype).requires_grad_()
        scores = q.to(dtype) @ k.to(dtype).mT / 4 - leaf.cumsum(2).unsqueeze(2)
        hidden = torch.ones(queries, length, dtype=torch.bool).triu(length - queries + 1)
        o = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.to(dtype)
        return o.detach(), torch.autograd.grad(o, leaf, d_o.to(dtype))[0]

    leaf = log_forget.clone().requires_grad_()
    o = gnomon.attention(q, k, v, position=Forget(leaf), causal=True, query_offset=length - queries)
    found = o.detach(), torch.autograd.grad(o, leaf, d_o)[0]
    exact, plain = formula(torch.float64), formula(torch.float32)
    for ours, expected, rounded in zip(found, exact, plain, strict=True):
        assert (ours - expected).abs().max() <= 3e-6 * expected.abs().max()
        # The unfused formula (`rounded`) is less accurate.
        assert (rounded - expected).abs().max() > 1e-4 * expected.abs().max()


def test_forget_gates_with_padding_and_offsets_of_batches():
    torch.manual_seed(0)
    q, k, v = normal(2, 2, 5, 8), normal(2, 2, 11, 8), normal(2, 2, 11, 8)
    log_forget = torch.rand(2, 2, 11, dtype=torch.float64).log()
    spoiled = log_forget.clone()
    spoiled[0, :, :3] = math.nan
    ours = gnomon.attention(
        q, k, v, position=Forget(spoiled), causal=True, key_starts=[3, 0], query_offset=[6, 2]
    )
    offset, start = (
        torch.tensor([6, 2])[:, None, None, None],
        torch.tensor([3, 0])[:, None, None, None],
    )
    j, i = torch.arange(11), torch.arange(5)[:, None]
    sums = log_forget.masked_fill(j < start[:, 0], 0.0).cumsum(2)
    scores = q @ k.mT / math.sqrt(8) - sums.unsqueeze(2)
    seen = (j <= i + offset) & (j >= start)
    torch.testing.assert_close(ours, softmax(scores.masked_fill(~seen, -math.inf), v)[0])


@pytest.mark.parametrize("places", ["none", "restart", "shuffled"])
def test_forget_gates_of_a_document_do_not_see_another(places):
    """lse and sinks also depend on terms that cancel in the softmax of a row."""
    torch.manual_seed(0)
    batch, heads, lengths = 2, 3, (7, 11, 4)
    length = sum(lengths)
    segments = torch.arange(3).repeat_interleave(torch.tensor(lengths)).expand(batch, -1)
    q, k, v = (normal(batch, heads, length, 8) for _ in range(3))
    log_forget = 3 * torch.rand(batch, heads, length, dtype=torch.float64).log()
    sink, d_lse = normal(heads), normal(batch, heads, length)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(batch, -1)
    order = torch.arange(length)
    if places == "shuffled":
        order = torch.randperm(length)

    def run(q, k, v, gates, **where):
        o, lse = gnomon.attention(
            q, k, v, position=Forget(gates), sink=sink, causal=True, return_lse=True, **where
        )
        return o, lse

    where = {} if places == "none" else {"positions": positions[:, order]}
    if where:
        where["key_positions"] = where["positions"]
    leaves = [x[:, :, order].clone().requires_grad_() for x in (q, k, v)]
    gates = log_forget[:, :, order].clone().requires_grad_()
    o, lse = run(
        *leaves, gates, query_segments=segments[:, order], key_segments=segments[:, order], **where
    )
    (o.sum() + (lse * d_lse[:, :, order]).sum()).backward()
    first = 0
    for n in lengths:
        part = slice(first, first + n)
        alone = [x[:, :, part].clone().requires_grad_() for x in (q, k, v, log_forget)]
        its_o, its_lse = run(*alone)
        (its_o.sum() + (its_lse * d_lse[:, :, part]).sum()).backward()
        at = [int((order == row).nonzero()) for row in range(first, first + n)]
        torch.testing.assert_close(o[:, :, at], its_o)
        torch.testing.assert_close(lse[:, :, at], its_lse)
        for ours, theirs in zip([*leaves, gates], alone, strict=True):
            torch.testing.assert_close(ours.grad[:, :, at], theirs.grad)
        first += n


@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("kind", ["keys", "pair bias per key", "pairs"])
def test_forget_gates_beside_keys_that_a_number_hides(kind, number):
    """The row of a hidden key subtracts only its sum of gates, not the bias that hides the key."""
    torch.manual_seed(0)
    q, k, v, gates = normal(2, 2, 40, 8), normal(2, 2, 40, 8), normal(2, 2, 40, 8), normal(2, 2, 40)
    hidden = torch.zeros(2, 1, 40, dtype=torch.bool)
    hidden[0, :, 25:] = hidden[1, :, 3:9] = True

    def attend(q, k, v, gates, number):
        keys = torch.zeros(2, 1, 40, dtype=q.dtype).masked_fill(hidden, number)
        bias = {
            "keys": lambda: KeyBias(keys),
            "pair bias per key": lambda: PairBias(keys.unsqueeze(2)),
            "pairs": lambda: PairBias(keys.unsqueeze(2).repeat(1, 1, 40, 1)),
        }[kind]()
        forget = Forget(-gates.square())
        return gnomon.attention(q, k, v, position=[forget, bias], causal=True, return_lse=True)

    inputs = {"q": q, "k": k, "v": v, "gates": gates}
    ours = formulas.values_and_gradients(
        lambda p: attend(*p.values(), number), {n: x.float() for n, x in inputs.items()}
    )
    exact = formulas.values_and_gradients(lambda p: attend(*p.values(), -math.inf), inputs)
    for name, expected in exact.items():
        torch.testing.assert_close(ours[name].double(), expected, rtol=0, atol=2e-5, msg=name)


@DTYPES
@pytest.mark.parametrize("ordered", [True, False])
def test_closed_gates(ordered, dtype):
    """log_forget = -inf is the limit of gates near 0; other gates keep their precision."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 40, 8, dtype=dtype) for _ in range(3))
    gates = -torch.rand(2, 2, 40, dtype=dtype)
    gates[:, :, 11] = gates[1, 0, 30] = -math.inf
    closed = (gates == -math.inf).to(torch.int64).cumsum(2)
    places = torch.arange(40) if ordered else torch.arange(40).flip(0)
    if not ordered:
        closed = closed.flip(2)
        gates = gates.flip(2)
    # A pair is visible if there is no closed gate between key and query.
    mask = closed[:, :, :, None] == closed[:, :, None, :]
    found = gnomon.attention(q, k, v, position=Forget(gates), positions=places, causal=True)
    expected = gnomon.attention(
        q, k, v, position=Forget(gates.clamp_min(-1.0)), positions=places, causal=True, mask=mask
    )
    torch.testing.assert_close(found, expected)
    leaf = gates.clone().requires_grad_()
    gnomon.attention(q, k, v, position=Forget(leaf), causal=True).sum().backward()
    assert leaf.grad.isfinite().all()
    # A nearly closed gate gives the same result.
    for number in (-1e12, torch.finfo(dtype).min):
        almost = Forget(gates.masked_fill(gates == -math.inf, number))
        o = gnomon.attention(q, k, v, position=almost, positions=places, causal=True)
        assert torch.equal(o, found)


def test_forget_gates_and_midpoints():
    torch.manual_seed(0)
    q, k = normal(1, 2, 400, 8), normal(1, 2, 400, 8)
    v, gates = normal(1, 2, 400, 4) / 5, -torch.rand(1, 2, 400, dtype=torch.float64)
    gates[:, :, ::97] = -4e4
    inputs = {"q": q, "k": k, "v": v, "gates": gates}

    def attend(p):
        return gnomon.attention(
            p["q"], p["k"], p["v"], position=Forget(p["gates"]), causal=True,
            aggregation="einstein_midpoint", return_lse=True,
        )  # fmt: skip

    exact = formulas.values_and_gradients(attend, inputs)
    ours = formulas.values_and_gradients(attend, {n: x.float() for n, x in inputs.items()})
    for name in ("o", "dv", "dq", "dk", "dgates"):
        error = (ours[name].double() - exact[name]).abs().max() / exact[name].abs().max()
        assert error <= 5e-6, (name, error)


def test_rows_and_batches_that_see_nothing():
    """If a row attends to no key, its output is 0, and all gradients are finite."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 40, 8) for _ in range(3))
    gates = -torch.rand(2, 2, 40)
    o = gnomon.attention(q, k, v, position=Forget(gates), key_starts=[30, 0], key_lengths=[5, 40])
    assert (o[0] == 0).all()
    expected = gnomon.attention(q[1:], k[1:], v[1:], position=Forget(gates[1:]))
    torch.testing.assert_close(o[1:], expected)
    # The temperature of a row that attends to n keys is log(n), so that of the first row is -inf.
    mask = torch.ones(40, 40, dtype=torch.bool).tril(-1)
    temperature = mask.sum(1).float().log()
    leaves = [x.clone().requires_grad_() for x in (q, k, v, temperature)]
    o = gnomon.attention(*leaves[:3], mask=mask, temperature=leaves[3], position="alibi")
    gradients = torch.autograd.grad(o.square().sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[3][0] == 0


@DTYPES
def test_hidden_keys_and_forget_gates(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 30, 8, dtype=dtype) for _ in range(3))
    hidden = torch.rand(1, 2, 30, dtype=dtype) < 0.3
    hidden[..., 0] = False
    keys = torch.zeros(1, 2, 30, dtype=dtype).masked_fill(hidden, -math.inf)
    gates = Forget(-torch.rand(1, 2, 30, dtype=dtype))
    o, lse = gnomon.attention(
        q, k, v, position=[gates, KeyBias(keys)], causal=True, return_lse=True
    )
    expected = gnomon.attention(
        q, k, v, position=gates, mask=~hidden.unsqueeze(2), causal=True, return_lse=True
    )
    torch.testing.assert_close((o, lse), expected)


def test_nan_stays_behind_a_mask():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    mask = torch.rand(70, 70) < 0.5
    mask[:, 20] = False
    mask[3, 20] = True
    bias = torch.zeros(1, 1, 70, 70).masked_fill(~mask, -math.inf)
    rows = torch.arange(70) != 3
    for arguments in ({"mask": mask}, {"position": PairBias(bias)}):
        clean = gnomon.attention(q, k, v, **arguments)
        spoiled = [x.clone() for x in (k, v)]
        for x in spoiled:
            x[:, :, 20] = math.nan
        found = gnomon.attention(q, *spoiled, **arguments)
        assert torch.equal(found[:, :, rows], clean[:, :, rows])
        assert found[:, :, 3].isnan().all()


def test_prefixes():
    """All tokens attend to the prefix; otherwise attention is causal."""
    torch.manual_seed(0)
    q, k, v = (normal(1, 2, 300, 8) for _ in range(3))
    place = torch.arange(300)
    mask = (place <= place[:, None]) | (place < 100)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(gnomon.attention(q, k, v, mask=mask), scores.softmax(-1) @ v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 33, 16, dtype=dtype) for _ in range(3))
    bias = torch.randn(2, 1, 33, 33, dtype=dtype)
    keys, temperature = torch.randn(1, 4, 33), torch.rand(2, 4, 33) + 0.5
    mask = torch.rand(33, 33) < 0.7
    ours = gnomon.attention(
        q, k, v, position=[PairBias(bias), KeyBias(keys)], mask=mask, temperature=temperature
    )

    def formula(to):
        scores = q.to(to) @ k.to(to).mT / 4 + bias.to(to) + keys.to(to).unsqueeze(2)
        scores = (scores * temperature.to(to).unsqueeze(3)).masked_fill(~mask, -math.inf)
        return softmax(scores, v.to(to))[0]

    exact = formula(torch.float64)
    assert ours.dtype == dtype
    assert (ours - exact).abs().max() <= 2 * (formula(dtype) - exact).abs().max()


def test_weights_of_rows():
    torch.manual_seed(0)
    q, k = normal(B, H, LQ, 8), normal(B, HKV, LK, 8)
    arguments = {
        "position": [
            PairBias(normal(1, H, LQ, LK)),
            Forget(-torch.rand(B, H, LK).double()),
            "alibi",
        ],
        "mask": torch.rand(B, 1, LQ, LK) < 0.7,
        "temperature": torch.rand(B, H, LQ, dtype=torch.float64),
        "query_offset": LK - LQ,
    }
    v = normal(B, HKV, LK, 5)
    weights = gnomon.attention_weights(q, k, slice(None), **arguments)
    values = v.repeat_interleave(H // HKV, 1)
    torch.testing.assert_close(weights @ values, gnomon.attention(q, k, v, **arguments))
    some = gnomon.attention_weights(q, k, [4, 5, 1], **arguments)
    torch.testing.assert_close(some, weights[:, :, [4, 5, 1]])
    for name, wrong in {
        "temperature": {"temperature": torch.ones(3).double()},
        "mask": {"mask": torch.ones(3, LK, dtype=torch.bool)},
        "bias": {"position": PairBias(torch.ones(3, LK).double())},
        "query_segments": {
            "query_segments": torch.zeros(1, dtype=torch.int64),
            "key_segments": torch.zeros(LK, dtype=torch.int64),
        },
    }.items():
        expected = rf"{name} has shape .*, with [13] rows; expected Lq = 13"
        with pytest.raises(ValueError, match=expected):
            gnomon.attention_weights(q, k, [0, 1, 2], **(arguments | wrong))


def rows_of_calls():
    """All call arguments with an axis of rows or keys, in several forms."""
    yield "sink", {"sink": normal(B, H, LQ)}
    yield "per-head sink", {"sink": normal(H)}
    yield "per-row mask", {"mask": torch.rand(LQ, 1) < 0.7}
    yield "per-key mask", {"mask": torch.rand(LK) < 0.7}
    yield "per-row temperature", {"temperature": normal(LQ)}
    yield "per-head temperature", {"temperature": normal(H, 1)}
    yield (
        "segments",
        {
            "query_segments": torch.randint(3, (B, LQ)),
            "key_segments": torch.randint(3, (LK,)),
        },
    )
    yield (
        "positions",
        {
            "positions": torch.randint(30, (LQ,)),
            "key_positions": torch.randint(30, (B, LK)),
            "position": "alibi",
            "causal": True,
        },
    )
    yield (
        "coordinates",
        {
            "positions": torch.randint(30, (1, LQ, 2)),
            "key_positions": torch.randint(30, (B, LK, 2)),
            "position": "rope",
        },
    )
    yield "offsets", {"query_offset": torch.tensor([3, 9]), "causal": True}


@pytest.mark.parametrize("name", [name for name, _ in rows_of_calls()])
def test_rows_are_cut_from_every_argument(name):
    torch.manual_seed(0)
    arguments = dict(rows_of_calls())[name]
    q, k, v = normal(B, H, LQ, 8), normal(B, HKV, LK, 8), normal(B, HKV, LK, 5)
    values = v.repeat_interleave(H // HKV, 1)
    rows = [4, 5, 0, -1]
    weights = gnomon.attention_weights(q, k, rows, **arguments)
    o = gnomon.attention(q, k, v, **arguments)
    torch.testing.assert_close(weights @ values, o[:, :, rows])


def test_compiled_mapped_and_repeatable():
    torch.manual_seed(0)
    q, k, v = (normal(3, 2, 4, 7, 8) for _ in range(3))
    tensors = (
        normal(3, 1, 1, 7, 7),
        normal(3, 2, 4, 7),
        -torch.rand(3, 2, 4, 7, dtype=torch.float64),
        torch.rand(3, 2, 4, 7, dtype=torch.float64),
    )
    mask = torch.rand(3, 1, 4, 7, 7) < 0.8

    def call(q, k, v, pairs, keys, log_forget, temperature, mask):
        position = PairBias(pairs) + KeyBias(keys) + Forget(log_forget)
        return gnomon.attention(
            q, k, v, position=position, causal=True, temperature=temperature, mask=mask
        )

    def loss(*arguments):
        return call(*arguments).square().sum()

    every = (q, k, v, *tensors, mask)
    expected = torch.stack([call(*one) for one in zip(*every, strict=True)])
    torch.testing.assert_close(torch.func.vmap(call)(*every), expected)
    places = tuple(range(7))
    mapped = torch.func.vmap(torch.func.grad(loss, places))(*every)
    one_by_one = [torch.func.grad(loss, places)(*one) for one in zip(*every, strict=True)]
    torch.testing.assert_close(
        mapped, tuple(torch.stack(each) for each in zip(*one_by_one, strict=True))
    )
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = [x[0].clone().requires_grad_() for x in every[:7]]
    both = [torch.autograd.grad(f(*leaves, mask[0]).sum(), leaves) for f in (call, compiled, call)]
    assert all(torch.equal(a, b) for a, b in zip(both[0], both[2], strict=True))
    torch.testing.assert_close(both[1], both[0])


@pytest.mark.cpu("errors are the same on all devices")
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"mask": torch.ones(5, 4)}, TypeError, "mask has dtype Float; expected bool"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, ValueError, r"mask has shape \[4, 4\]"),
        ({"mask": torch.ones(3, 1, 5, 5) > 0}, ValueError, r"mask has shape .*expected \(B, H, Lq"),
        ({"mask": [[True]]}, TypeError, "mask is a list; expected a Tensor of booleans"),
        ({"position": PairBias(torch.zeros(1, 3, 5, 5))}, ValueError, "of pair_bias has shape"),
        ({"position": PairBias(torch.zeros(5, 5).double())}, TypeError, "has dtype Double"),
        ({"position": KeyBias(torch.zeros(2, 5))}, ValueError, "tensor of key_bias has shape"),
        ({"position": Forget(torch.zeros(2, 2, 4))}, ValueError, "tensor of forget has shape"),
        ({"position": "pair_bias"}, ValueError, "pair_bias"),
        (
            {"position": [Gate(torch.ones(2, 2, 5, 4))] * 2},
            ValueError,
            "position contains two gates",
        ),
        (
            {"position": [QKNorm(torch.ones(4), torch.ones(4))] * 2},
            ValueError,
            "position contains two QK-norms",
        ),
        ({"temperature": torch.zeros(2, 3, 5)}, ValueError, "temperature has shape"),
        ({"temperature": torch.zeros(5).double()}, TypeError, "temperature has dtype"),
        ({"temperature": "1"}, TypeError, "temperature is a str"),
        (
            {"temperature": 1.0, "aggregation": "einstein_midpoint", "dropout": 0.5},
            NotImplementedError,
            "dropout is not supported together with temperature and aggregation",
        ),
        (
            {
                "temperature": 1.0,
                "aggregation": "einstein_midpoint",
                "position": Relative(torch.zeros(3, 4), 1, values=torch.zeros(3, 4)),
            },
            NotImplementedError,
            "relative values are not supported together with temperature and aggregation",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments(wrong, error, message):
    q = torch.zeros(2, 2, 5, 4)
    with pytest.raises(error, match=message):
        gnomon.attention(q, q, q, **wrong)


def test_modules():
    """Modules accept masks and their own biases; terms that need a call's tensors are rejected."""
    torch.manual_seed(0)
    bias = normal(1, 4, 9, 9)
    module = gnomon.nn.MultiheadAttention(
        16, 4, position=PairBias(torch.nn.Parameter(bias))
    ).double()
    x = normal(2, 9, 16)
    mask = torch.rand(2, 1, 9, 9) < 0.7
    q, k, v = (
        getattr(module, f"{name}_proj")(x).unflatten(2, (4, 4)).transpose(1, 2) for name in "qkv"
    )
    o = gnomon.attention(q, k, v, mask=mask, position=PairBias(bias))
    expected = module.out_proj(o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, mask=mask), expected)
    (d_bias,) = torch.autograd.grad(
        module(x).sum(), [p for n, p in module.named_parameters() if "bias" in n and p.dim() == 4]
    )
    assert d_bias.shape == bias.shape
    with pytest.raises(
        ValueError, match=r"position key_bias needs bias, a tensor .*position.KeyBias"
    ):
        gnomon.nn.MultiheadAttention(16, 4, position="key_bias")
