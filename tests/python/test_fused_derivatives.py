"""Forward-mode and second derivatives for the terms of the fused kernels."""

import math

import pytest
import torch
from formulas import deberta_rows, generator_of, in_turn, pairwise
from operator_checks import peak_memory
from test_derivatives import directions, finite, of_formula
from test_large_scores import LEAST, TIMES
from torch.func import jvp

import gnomon
from gnomon import position, similarity

pytestmark = pytest.mark.cpu("forward mode and second derivatives run only on the CPU")

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, DIM = 2, 4, 2, 37, 53, 5


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=generator_of(seed))


MASK = random(BATCH, HEADS, QUERIES, KEYS, seed=10) > 0
MASK[0, 1, 5] = False  # a row without keys
QUERY_SEGMENTS = torch.arange(QUERIES).div(9, rounding_mode="floor").expand(BATCH, QUERIES)
KEY_SEGMENTS = torch.arange(KEYS).div(17, rounding_mode="floor").expand(BATCH, KEYS)
POSITIONS = 3 * torch.randperm(QUERIES, generator=generator_of(11)).expand(BATCH, QUERIES)
KEY_POSITIONS = 2 * torch.randperm(KEYS, generator=generator_of(12)).expand(BATCH, KEYS)
DIFFERENCES = (POSITIONS[0, :, None] - KEY_POSITIONS[0]).abs()
COLUMNS = torch.arange(KEYS)
ROWS = torch.arange(QUERIES)
RELATIVE = random(13, DIM, seed=13) / 2
GRID_BIAS = torch.full((HEADS,), 0.3, dtype=torch.float64)


SCALE = 1 / math.sqrt(DIM)
BUCKETS = random(16, DIM, seed=16) / 2
PLACED_BUCKETS = deberta_rows(POSITIONS[0, :, None] - KEY_POSITIONS[0], 8, 30)


def buckets(offset, span):
    """The rows of disentangled tables for each pair, for queries starting at position `offset`."""
    return deberta_rows(ROWS[:, None] + offset - COLUMNS, span, 0)


def tempered(temperature, **arguments):
    return {"temperature": temperature.exp(), **arguments}


def grid_distance():
    """The Manhattan distances between the cells of a 5 x 11 grid."""
    rows, keys = ROWS[:, None], COLUMNS
    return (rows // 11 - keys // 11).abs() + (rows % 11 - keys % 11).abs()


def offsets(clip=True):
    """The row of RELATIVE for each pair, for queries starting at position 9; 13 means no row."""
    rows = COLUMNS - ROWS[:, None] - 9 + 6
    return rows.clamp(0, 12) if clip else torch.where((rows < 0) | (rows > 12), 13, rows)


# For each term: the arguments of gnomon.attention and those of plain(), as functions of an extra
# tensor, and that tensor.
TERMS = {
    "temperature": (
        lambda t: tempered(t, position="alibi", query_offset=9, causal=True),
        lambda t: tempered(t, alibi=True, visible=ROWS[:, None] + 9 >= COLUMNS),
        random(BATCH, HEADS, QUERIES, seed=1),
    ),
    "soft cap": (
        lambda t: {"score_softcap": 2.0, "position": position.KeyBias(t)},
        lambda t: {"softcap": 2.0, "bias": t[:, :, None]},
        random(BATCH, HEADS, KEYS, seed=2),
    ),
    "temperature, soft cap and mask": (
        lambda t: tempered(t, score_softcap=3.0, mask=MASK),
        lambda t: tempered(t, softcap=3.0, visible=MASK),
        random(BATCH, HEADS, QUERIES, seed=1),
    ),
    "dropout": (
        lambda t: {"dropout": 0.4, "seed": 7, "position": position.KeyBias(t)},
        lambda t: {"dropout": 0.4, "seed": 7, "bias": t[:, :, None]},
        random(BATCH, HEADS, KEYS, seed=2),
    ),
    "segments": (
        lambda t: tempered(t, query_segments=QUERY_SEGMENTS, key_segments=KEY_SEGMENTS),
        lambda t: tempered(t, visible=(QUERY_SEGMENTS[0, :, None] == KEY_SEGMENTS[0])),
        random(BATCH, HEADS, QUERIES, seed=1),
    ),
    "positions": (
        lambda t: {
            "positions": POSITIONS,
            "key_positions": KEY_POSITIONS,
            "position": position.ALiBi(t.exp()),
            "causal": True,
        },
        lambda t: {
            "bias": -t.exp()[:, None, None] * DIFFERENCES,
            "visible": POSITIONS[0, :, None] >= KEY_POSITIONS[0],
        },
        random(HEADS, seed=3),
    ),
    "mask": (
        lambda t: {"mask": MASK, "position": position.KeyBias(t)},
        lambda t: {"visible": MASK, "bias": t[:, :, None]},
        random(BATCH, HEADS, KEYS, seed=2),
    ),
    "pair bias": (
        lambda t: {"position": position.PairBias(t)},
        lambda t: {"bias": t},
        random(BATCH, HEADS, QUERIES, KEYS, seed=4),
    ),
    "shared pair bias": (
        lambda t: {"position": position.PairBias(t), "key_lengths": [KEYS, 0]},
        lambda t: {"bias": t, "visible": (torch.tensor([KEYS, 0])[:, None, None, None] > COLUMNS)},
        random(1, HEADS, QUERIES, KEYS, seed=5),
    ),
    "pair bias shared by heads": (
        lambda t: {"position": position.PairBias(t)},
        lambda t: {"bias": t},
        random(1, 1, QUERIES, KEYS, seed=6),
    ),
    "relative keys": (
        lambda t: {"position": position.Relative(t, 6), "query_offset": 9, "causal": True},
        lambda t: {"relative": t[offsets()], "visible": ROWS[:, None] + 9 >= COLUMNS},
        random(13, DIM, seed=7) / 2,
    ),
    "per-head relative keys with a maximum distance": (
        lambda t: {
            "position": position.Relative(t, 6, far="zero"),
            "query_offset": 9,
            "key_lengths": [KEYS, 0],
        },
        lambda t: {
            "relative": torch.nn.functional.pad(t, (0, 0, 0, 1))[:, offsets(clip=False)],
            "visible": torch.tensor([KEYS, 0])[:, None, None, None] > COLUMNS,
        },
        random(HEADS, 13, DIM, seed=8) / 2,
    ),
    "relative keys and values, dropout": (
        lambda t: {
            "position": position.Relative(RELATIVE.to(t.dtype), 6, values=t),
            "query_offset": 9,
            "dropout": 0.4,
            "seed": 7,
        },
        lambda t: {
            "relative": RELATIVE.to(t.dtype)[offsets()],
            "values": t[offsets()],
            "dropout": 0.4,
            "seed": 7,
        },
        random(13, 3, seed=9),
    ),
    "relative keys at positions": (
        lambda t: {
            "position": position.Relative(t, 6),
            "positions": POSITIONS,
            "key_positions": KEY_POSITIONS,
        },
        lambda t: {
            "relative": t[(KEY_POSITIONS[0] - POSITIONS[0, :, None]).clamp(-6, 6) + 6],
        },
        random(13, DIM, seed=7) / 2,
    ),
    "relative queries": (
        lambda t: {
            "position": position.Disentangled(t[0], t[1], scale=SCALE),
            "query_offset": 9,
            "causal": True,
        },
        lambda t: {
            "relative": t[0][buckets(9, 6)],
            "content": t[1][buckets(9, 6)],
            "visible": ROWS[:, None] + 9 >= COLUMNS,
        },
        random(2, 12, DIM, seed=14) / 2,
    ),
    "per-head relative queries at positions, soft cap and dropout": (
        lambda t: {
            "position": position.Disentangled(BUCKETS.to(t.dtype), t, max_distance=30, scale=SCALE),
            "positions": POSITIONS,
            "key_positions": KEY_POSITIONS,
            "score_softcap": 3.0,
            "dropout": 0.4,
            "seed": 7,
        },
        lambda t: {
            "relative": BUCKETS.to(t.dtype)[PLACED_BUCKETS],
            "content": t[:, PLACED_BUCKETS],
            "softcap": 3.0,
            "dropout": 0.4,
            "seed": 7,
        },
        random(HEADS, 16, DIM, seed=15) / 2,
    ),
    "grid": (
        lambda t: {
            "position": position.Grid((5, 11), [position.ALiBi(t), position.ALiBi(t)]),
            "query_offset": 0,
        },
        lambda t: {"bias": -t[:, None, None] * grid_distance()},
        GRID_BIAS,
    ),
}
# The inlined dot product and two pair functions that are called through their tables.
# test_derivatives.py tests all similarities.
SIMILARITIES = {None: 1.0, "gaussian": 0.3, "laplacian": 0.7}


def kept(dropout, seed):
    """The dropout factors of all pairs, read from the weights of equal scores."""
    zeros = torch.zeros(BATCH, HEADS, QUERIES, 4, dtype=torch.float64)
    keys = torch.zeros(BATCH, HEADS, KEYS, 4, dtype=torch.float64)
    values = torch.eye(KEYS, dtype=torch.float64).expand(BATCH, HEADS, KEYS, KEYS)
    return KEYS * gnomon.attention(zeros, keys, values, dropout=dropout, seed=seed)


def plain(q, k, v, name, temperature=None, softcap=0.0, bias=None, alibi=False, visible=None,
          dropout=0.0, seed=0, relative=None, content=None, values=None):  # fmt: skip
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    if name is None:
        scores = q @ k.mT / math.sqrt(DIM)
    else:
        distances = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
        scores = -SIMILARITIES[name] * (distances if name == "gaussian" else distances.sqrt())
    if alibi:
        slopes = 2.0 ** (-8 * torch.arange(1, HEADS + 1) / HEADS)
        bias = -slopes[:, None, None] * (ROWS[:, None] + 9 - COLUMNS).abs()
    if bias is not None:
        scores = scores + bias
    if relative is not None:
        scores = scores + (q[..., None, :] * relative).sum(-1) / math.sqrt(DIM)
    if content is not None:
        scores = scores + (k[..., None, :, :] * content).sum(-1) / math.sqrt(DIM)
    if temperature is not None:
        scores = scores * temperature[..., None]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.zeros_like(scores, dtype=torch.bool) if visible is None else ~visible
    empty = hidden.expand_as(scores).all(-1)
    scores = scores.masked_fill(hidden & ~empty[..., None], -math.inf)
    weights = scores.softmax(-1).masked_fill(empty[..., None], 0.0)
    if dropout:
        weights = weights * kept(dropout, seed).to(weights.dtype)
    o = weights @ v
    if values is not None:
        o = o + (weights[..., None] * values).sum(-2)
    return o, scores.logsumexp(-1).masked_fill(empty, -math.inf)


def inputs_of(name, scale):
    shapes = {
        "q": (BATCH, HEADS, QUERIES, DIM),
        "k": (BATCH, KEY_HEADS, KEYS, DIM),
        "v": (BATCH, KEY_HEADS, KEYS, 3),
    }
    inputs = {n: random(*shape, seed=20 + i) for i, (n, shape) in enumerate(shapes.items())}
    root = math.sqrt(scale)
    inputs |= {"q": inputs["q"] * root, "k": inputs["k"] * root, "extra": TERMS[name][2]}
    return {n: x.float() for n, x in inputs.items()}


def calls(term, name):
    arguments, of_plain, _ = TERMS[term]
    terms = {
        None: None,
        "gaussian": similarity.Gaussian(SIMILARITIES["gaussian"]),
        "laplacian": similarity.Laplacian(SIMILARITIES["laplacian"]),
    }

    def ours(x):
        return gnomon.attention(
            x["q"], x["k"], x["v"], similarity=terms[name], return_lse=True, **arguments(x["extra"])
        )

    def theirs(x):
        return plain(x["q"], x["k"], x["v"], name, **of_plain(x["extra"]))

    return finite(ours), finite(theirs)


@pairwise(term=TERMS, name=SIMILARITIES, scale=[1, 3, 10])
def test_terms_of_the_fused_kernel(term, name, scale, on_reference):
    """Errors in float32 are at most TIMES the errors of the formula in float32."""
    ours, theirs = calls(term, name)
    inputs = inputs_of(term, scale)
    wide = {n: x.double() for n, x in inputs.items()}
    truth = of_formula(theirs, wide)
    reference, double = on_reference(of_formula, ours, wide), of_formula(ours, wide)
    actual, other = of_formula(ours, inputs), of_formula(theirs, inputs)
    rounded = 0
    for n, expected in truth.items():
        size = max(0.1, float(expected.abs().max()))
        assert float((reference[n] - expected).abs().max()) < 1e-8 * size, n
        assert float((double[n] - reference[n]).abs().max()) < 1e-9 * size, n
        own, of_plain = (float((x[n] - expected).abs().max()) / size for x in (actual, other))
        assert own <= max(LEAST, TIMES * of_plain), n
        rounded += not torch.equal(actual[n], reference[n].float())
    # The fused kernels were used: the reference computes in float64, so its results would be equal.
    assert rounded > 2
    assert not torch.equal(double["o"], reference["o"])


@in_turn(term=TERMS, dtype=[torch.float32, torch.float64])
def test_terms_are_the_same_for_any_number_of_threads(term, dtype):
    ours, _ = calls(term, "gaussian")
    inputs = {n: x.to(dtype) for n, x in inputs_of(term, 1).items()}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = of_formula(ours, inputs)
        for count in (2, 3):
            torch.set_num_threads(count)
            other = of_formula(ours, inputs)
            assert all(torch.equal(x, other[n]) for n, x in one.items())
    finally:
        torch.set_num_threads(threads)


def check_any_number_of_threads(call, inputs):
    """Returns the results, which must be close to float64 and equal for any number of threads."""
    expected = of_formula(call, {n: x.double() for n, x in inputs.items()})
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(of_formula(call, inputs))
    finally:
        torch.set_num_threads(threads)
    for n, x in expected.items():
        assert all(torch.equal(results[0][n], other[n]) for other in results[1:]), n
        torch.testing.assert_close(results[0][n].double(), x, rtol=1e-4, atol=1e-4)
    return results[0], expected


@pytest.mark.parametrize("heads", [1, HEADS])
def test_shared_pair_bias_of_several_blocks_of_rows(heads):
    """The sequence is longer than a block, and there are more tasks than workers."""
    q, k, v = (random(2, HEADS, 300, 4, seed=n).float() for n in range(3))
    bias = random(1, heads, 300, 300, seed=3).float()
    inputs = {"q": q, "k": k, "v": v, "bias": bias}

    def call(x):
        return gnomon.attention(
            x["q"], x["k"], x["v"], position=position.PairBias(x["bias"]), return_lse=True
        )

    check_any_number_of_threads(call, inputs)


@pytest.mark.parametrize("heads", [(), (HEADS,)])
@pytest.mark.parametrize("other", ["values", "queries"])
def test_relative_tables_of_several_blocks_of_rows(other, heads):
    """The sequence is longer than a block, and there are more tasks than workers."""
    has_values = other == "values"
    shapes = {
        "q": (2, HEADS, 300, 4),
        "k": (2, KEY_HEADS, 300, 4),
        "v": (2, KEY_HEADS, 300, 3),
        "keys": (*heads, 201 if has_values else 200, 4),
        other: (*heads, 201, 3) if has_values else (*heads, 200, 4),
    }
    inputs = {n: random(*shape, seed=i).float() / 2 for i, (n, shape) in enumerate(shapes.items())}

    def call(x):
        return gnomon.attention(
            *(x[n] for n in "qkv"),
            position=position.Relative(x["keys"], 100, values=x["values"])
            if has_values
            else position.Disentangled(x["keys"], x["queries"]),
            window=(120, 40),
            return_lse=True,
        )

    results, expected = check_any_number_of_threads(call, inputs)
    # The fused kernel was used: the reference computes in float64, so its results would be equal.
    assert not torch.equal(results["keys"], expected["keys"].float())


def test_packed_documents_cost_their_own_pairs():
    """Each query reads only the keys of its own packed document."""
    length = 4096
    q = random(1, 1, length, 4).float()
    segments = torch.arange(length).div(64, rounding_mode="floor")[None]

    def attend(q):
        return gnomon.attention(q, q, q, query_segments=segments, key_segments=segments)

    tangent = directions({"q": q})["q"]
    o, o_tangent = jvp(attend, (q,), (tangent,))
    for begin in range(0, length, 1024):
        own = slice(begin, begin + 64)
        expected = jvp(
            lambda q: gnomon.attention(q, q, q),
            (q[:, :, own].double(),),
            (tangent[:, :, own].double(),),
        )
        torch.testing.assert_close(o[:, :, own].double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(o_tangent[:, :, own].double(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "temperature=t, score_softcap=3.0, window=(8, 8)",
        "dropout=0.1, seed=3, window=(8, 8)",
        "query_segments=s, key_segments=s, temperature=t",
        "position=gnomon.position.Relative(q[0, 0, :5], 2, values=q[0, 0, :5]), temperature=t",
        "position=gnomon.position.Disentangled(q[0, 0, :6], q[0, 0, :6]), temperature=t",
    ],
)
def test_memory_of_terms_is_linear_in_the_length(arguments):
    before = f"""
def both(length):
    q, t = torch.randn(1, 1, length, 4), torch.rand(1, 1, length)
    s = torch.arange(length).div(16, rounding_mode="floor")[None]
    def loss(q, t):
        return gnomon.attention(q, q, q, {arguments}).square().sum()
    torch.func.jvp(torch.func.grad(loss, (0, 1)), (q, t), (q, t))
both(8)
"""
    # One float per pair would take 64 MiB.
    assert peak_memory(before, "both(4096)") < 50_000
