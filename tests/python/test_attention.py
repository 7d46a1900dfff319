"""gnomon.attention compared with the formulas: values, lse and every gradient."""

import dataclasses
import functools
import itertools
import math

import formulas
import pytest
import torch
from formulas import (
    ONE_PER_PAIR_FUNCTION,
    POSITIONS,
    SIMILARITIES,
    TOLERANCE,
    Case,
    Mask,
    assert_near,
    in_turn,
    pairwise,
    values_and_gradients,
)
from operator_checks import peak_memory

import gnomon
from gnomon.position import OffsetBias, QKNorm, RoPE, RoPEMixed


def check(case, dtype=torch.float64):
    formulas.check(case.ours, case.theirs, case.inputs(), dtype)


# Rotations depend on whether tokens have heights, and biases do not depend on the similarity.
@in_turn(
    terms=[
        (similarity, position)
        for similarity, position in itertools.product(SIMILARITIES, POSITIONS)
        if similarity in ("dot", "penumbral", "hyperboloid")
        or position in ("none", "rope half partial", "rope + hype + t5")
    ],
    dtype=TOLERANCE,
)
def test_every_similarity_and_every_position(terms, dtype):
    similarity, position = terms
    check(Case(similarity, position, mask=Mask(causal=position == "t5 past")), dtype)


@pairwise(
    similarity=ONE_PER_PAIR_FUNCTION,
    dims=[(3, 1), (17, 64), (64, 3), (80, 129), (129, 80)],
    dtype=TOLERANCE,
)
def test_head_dims(similarity, dims, dtype):
    dim, value_dim = dims
    check(Case(similarity, "alibi", 1, 2, 1, 21, 21, dim, value_dim), dtype)


# Any number of columns is accepted. Random tokens with many columns are far apart, where a float32
# Gaussian has few accurate digits, so these tokens are closer together.
@pairwise(similarity=ONE_PER_PAIR_FUNCTION, dims=[(513, 1025), (1030, 3)], dtype=TOLERANCE)
def test_head_dim_has_no_limit(similarity, dims, dtype):
    dim, value_dim = dims
    case = Case(similarity, "alibi", 1, 2, 1, 21, 21, dim, value_dim)
    inputs = case.inputs()
    if similarity == "gaussian":
        inputs |= {name: inputs[name] * math.sqrt(16 / dim) for name in ("q", "k")}
    formulas.check(case.ours, case.theirs, inputs, dtype)


# Random tokens with one column nearly coincide; cancellation must not destroy their distance.
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "similarity", ["dot", "laplacian", "gaussian", "ball", "ball none", "klein", "hyperboloid exp"]
)
def test_one_column(similarity, dtype):
    check(Case(similarity, "alibi", 1, 2, 1, 21, 21, 1, 17), dtype)


@pairwise(
    lengths=[(0, 0), (0, 5), (5, 0), (1, 1), (1, 257), (47, 49), (257, 47), (49, 257)],
    similarity=["dot", "penumbral"],
    dtype=TOLERANCE,
)
def test_lengths(lengths, similarity, dtype):
    queries, keys = lengths
    mask = Mask(causal=True, query_offset=keys - queries)
    check(Case(similarity, "alibi", 2, 2, 2, queries, keys, 6, 5, mask), dtype)


def test_empty_batch():
    check(Case("umbral", "alibi", batch=0))


@pairwise(similarity=ONE_PER_PAIR_FUNCTION, key_heads=[1, 2], dtype=TOLERANCE)
def test_query_heads_share_keys_with_gammas_of_their_own(similarity, key_heads, dtype):
    check(Case(similarity, "hype abs", key_heads=key_heads, queries=50, keys=50), dtype)


MASKS = {
    "causal": Mask(causal=True),
    "causal, offset": Mask(causal=True, query_offset=7),
    "negative offset": Mask(causal=True, query_offset=-5),
    "window": Mask(window=(4, 3)),
    "window of one key": Mask(window=(0, 0)),
    "window unlimited on the left": Mask(window=(None, 2), query_offset=3),
    "causal window": Mask(causal=True, window=(6, 9), query_offset=10),
    "window beyond the end": Mask(window=(3, 3), query_offset=200),
    "key starts and lengths": Mask(key_starts=[3, 0], key_lengths=[11, 9]),
    "all masks combined": Mask(True, (9, None), [2, 30], [30, 40], 4),
    "documents": Mask(
        causal=True,
        query_segments=[0] * 9 + [1] * 20 + [2] * 8,
        key_segments=[0] * 9 + [1] * 20 + [2] * 12,
    ),
    "mixed segments": Mask(
        query_segments=[n % 3 for n in range(37)], key_segments=[n // 2 % 4 for n in range(41)]
    ),
    "per-batch offsets": Mask(True, (20, None), query_offset=[4, -3]),
    "no visible keys": Mask(key_starts=[5, 0], key_lengths=[5, 0]),
}


@pairwise(mask=MASKS, similarity=["dot", "umbral", "penumbral height2"], dtype=TOLERANCE)
def test_masks(mask, similarity, dtype):
    check(Case(similarity, "rope + hype + t5", 2, 4, 2, 37, 41, 8, 5, with_offset(mask)), dtype)


def with_offset(name):
    mask = MASKS[name]
    offset = 0 if mask.query_offset is None else mask.query_offset
    return dataclasses.replace(mask, query_offset=offset)


@in_turn(similarity=SIMILARITIES, dtype=TOLERANCE)
def test_hidden_columns_may_hold_nan(similarity, dtype):
    case = Case(similarity, "rope", mask=Mask(key_starts=[2, 0], key_lengths=[9, 13]))
    inputs = {name: x.to(dtype) for name, x in case.inputs().items()}
    expected = values_and_gradients(case.ours, inputs)
    for name in ("k", "v"):
        inputs[name][0, :, :2] = math.nan
        inputs[name][0, :, 9:] = math.nan
    ours = values_and_gradients(case.ours, inputs)
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "term",
    [
        lambda draw: QKNorm(draw(8), draw(8)),
        lambda draw: RoPEMixed(draw(4, 1, 4)),
        lambda draw: RoPE(angles=draw(1, 4, 13, 4)),
    ],
    ids=["qk_norm", "rope_mixed", "angles"],
)
def test_hidden_columns_do_not_reach_parameters(term, dtype):
    parameters = []

    def draw(*shape):
        parameters.append(torch.randn(shape, dtype=dtype, requires_grad=True))
        return parameters[-1]

    case = Case(mask=Mask(key_starts=[2, 0], key_lengths=[9, 13]))
    inputs = {name: x.to(dtype) for name, x in case.inputs().items()}
    position = term(draw)

    def gradients():
        leaves = [inputs["q"], inputs["k"].clone().requires_grad_(), inputs["v"]]
        o = gnomon.attention(*leaves, position=position, **case.arguments())
        return torch.autograd.grad(o.float().square().sum(), [leaves[1], *parameters])

    expected = gradients()
    for name in ("k", "v"):
        inputs[name][0, :, :2] = math.nan
        inputs[name][0, :, 9:] = math.nan
    for ours, finite in zip(gradients(), expected, strict=True):
        assert torch.equal(ours, finite)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_offset_bias_masks_with_minus_infinity(dtype):
    queries, keys, heads = 9, 12, 3
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 4, dtype=dtype) for n in (queries, keys, keys))
    table = torch.randn(heads, queries + keys - 1, dtype=dtype)
    table[:, ::3] = -math.inf
    table[0] = -math.inf
    columns, rows = torch.arange(keys), torch.arange(queries)
    entries = columns[None, :] - rows[:, None] + queries - 1

    def ours(x):
        return gnomon.attention(
            x["q"],
            x["k"],
            x["v"],
            position=OffsetBias(x["table"]),
            query_offset=5,
            return_lse=True,
        )

    def theirs(x):
        scores = x["q"] @ x["k"].transpose(2, 3) / 2 + x["table"][:, entries]
        sees = (scores > -math.inf).any(-1, keepdim=True)
        weights = torch.where(sees, scores, 0.0).softmax(-1) * sees
        lse = torch.where(sees, scores, 0.0).logsumexp(-1)
        return weights @ x["v"], lse.masked_fill(~sees[..., 0], -math.inf)

    inputs = {"q": q, "k": k, "v": v, "table": table}
    expected = values_and_gradients(theirs, {name: x.double() for name, x in inputs.items()})
    assert_near(values_and_gradients(ours, inputs), expected, TOLERANCE[dtype])
    assert expected["lse"][:, 0].eq(-math.inf).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["length first", "columns apart", "shared"])
def test_strides(layout, dtype):
    torch.manual_seed(0)

    def strided(x):
        if layout == "length first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "columns apart":
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        return x[:1, :1].expand_as(x)

    q, k, v = (strided(torch.randn(2, 3, 17, 6, dtype=dtype)) for _ in range(3))
    case = Case("penumbral", "alibi", heads=3, key_heads=3, queries=17, keys=17, dim=6, value_dim=6)
    parameters = {name: case.inputs()[name].to(dtype) for name in ("gamma", "slopes")}

    def attend(x):
        return case.ours(x | {"q": strided(x["q"]), "k": strided(x["k"]), "v": strided(x["v"])})

    packed = {"q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous()} | parameters
    expected = values_and_gradients(case.theirs, {name: x.double() for name, x in packed.items()})
    with torch.no_grad():
        assert_near(
            dict(zip(("o", "lse"), case.ours({"q": q, "k": k, "v": v} | parameters), strict=True)),
            {name: expected[name] for name in ("o", "lse")},
            TOLERANCE[dtype],
        )
    if layout != "shared":  # the gradient of an expanded leaf is a sum
        assert_near(values_and_gradients(attend, packed), expected, TOLERANCE[dtype])


def test_scale_is_an_argument_of_dot():
    case = Case()
    x = case.inputs()
    ours = gnomon.attention(x["q"], x["k"], x["v"], scale=0.1)
    expected = (0.1 * x["q"] @ x["k"].transpose(2, 3)).softmax(-1) @ x["v"]
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    "similarity", [n for n in SIMILARITIES if Case(n).inputs().keys() & {"gamma", "beta"}]
)
def test_gamma_may_be_a_number_negative_or_zero(similarity):
    case = Case(similarity)
    x = case.inputs()
    ours = SIMILARITIES[similarity].ours(x)
    (name,) = x.keys() - {"q", "k", "v"}
    for gamma in (0.7, 1, 0.0, -0.3):
        term = dataclasses.replace(ours, **{name: gamma})
        got = gnomon.attention(x["q"], x["k"], x["v"], similarity=term)
        heads = torch.full((4,), float(gamma), dtype=torch.float64)
        expected, _ = case.theirs(x | {name: heads})
        torch.testing.assert_close(got, expected)


def test_gradients_of_lse_only():
    case = Case("gaussian", "alibi")
    inputs = case.inputs()

    def only_lse(attend):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        gradients = torch.autograd.grad(
            attend(leaves)[1].sum(), list(leaves.values()), allow_unused=True
        )
        return dict(zip(leaves, gradients, strict=True))

    ours, theirs = only_lse(case.ours), only_lse(case.theirs)
    for name, expected in theirs.items():
        unused = torch.zeros_like(inputs[name])
        torch.testing.assert_close(ours[name], unused if expected is None else expected)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_gradcheck(similarity):
    case = Case(similarity, "rope + hype + t5", 1, 2, 1, 4, 5, 6, 2, Mask(query_offset=1))
    names, leaves = zip(*case.inputs().items(), strict=True)
    leaves = [x.requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(
        lambda *x: case.ours(dict(zip(names, x, strict=True))), leaves, nondet_tol=0.0
    )


@pytest.mark.parametrize("height", [0.0, 1.0, 1.5, -0.5])
def test_penumbral_heights_at_the_clamp_have_finite_gradients(height):
    x = torch.randn(1, 2, 5, 4)
    x[..., -1] = height
    x.requires_grad_()
    penumbral = gnomon.similarity.Penumbral(0.5, map="none")
    gnomon.attention(x, x, x, similarity=penumbral).square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("map_and_similarity", ["penumbral", "umbral"])
def test_far_tokens_have_finite_gradients(map_and_similarity):
    x = torch.randn(1, 2, 5, 4)
    x[..., -1] = torch.tensor([-200.0, -30.0, 0.0, 20.0, 80.0])
    x[..., -1] *= 1.0 if map_and_similarity == "penumbral" else 0.2
    x.requires_grad_()
    similarity = {
        "penumbral": gnomon.similarity.Penumbral(0.5),
        "umbral": gnomon.similarity.Umbral(1e-6),
    }[map_and_similarity]
    gnomon.attention(x, x, x, similarity=similarity).square().sum().backward()
    assert x.grad.isfinite().all()


def test_gradients_of_a_table_by_offsets_of_batches_are_bitwise_the_same():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 8, 1100, 4).unbind()
    start = torch.randn(32, 8)

    def gradient():
        table = start.clone().requires_grad_()
        t5 = gnomon.position.T5(table, bidirectional=True)
        o = gnomon.attention(q, k, v, position=t5, query_offset=torch.tensor([0, 3]))
        return torch.autograd.grad(o.square().sum(), table)[0]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first = gradient()
        for _ in range(5):
            assert torch.equal(gradient(), first)
    finally:
        torch.set_num_threads(threads)


@in_turn(similarity=SIMILARITIES, position=["rope + hype + t5", "kerple power", "alibi"])
def test_bitwise_the_same_for_any_number_of_threads(similarity, position):
    case = Case(similarity, position, 2, 4, 2, 97, 97, 24, 17, Mask(causal=True))
    inputs = {name: x.float() for name, x in case.inputs().items()}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = values_and_gradients(case.ours, inputs)
        torch.set_num_threads(2)
        for _ in range(3):
            ours = values_and_gradients(case.ours, inputs)
            for name, value in expected.items():
                assert torch.equal(ours[name], value), name
    finally:
        torch.set_num_threads(threads)


@pairwise(similarity=ONE_PER_PAIR_FUNCTION, dtype=TOLERANCE)
def test_causal_rows_do_not_see_the_future(similarity, dtype):
    case = Case(similarity, "rope + hype + t5", queries=60, keys=60, mask=Mask(causal=True))
    inputs = {name: x.to(dtype) for name, x in case.inputs().items()}
    before, _ = case.ours(inputs)
    token = 31
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].clone()
        inputs[name][:, :, token] *= 0.5
    after, _ = case.ours(inputs)
    assert torch.equal(after[:, :, :token], before[:, :, :token])
    assert not torch.equal(after[:, :, token:], before[:, :, token:])


def test_umbral_at_equal_heights_is_laplacian():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 20, 7, dtype=torch.float64) for _ in range(3))
    q[..., -1] = k[..., -1] = 0.4
    gamma, r = 0.8, 0.3
    umbral = gnomon.similarity.Umbral(gamma, r=r, map="none")
    laplacian = gnomon.similarity.Laplacian(gamma / (2 * math.sinh(r)))
    torch.testing.assert_close(
        gnomon.attention(q, k, v, similarity=umbral),
        gnomon.attention(q, k, v, similarity=laplacian),
    )


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    before = """
from gnomon.position import ALiBi
from gnomon.similarity import Penumbral

def step(length):
    q, k, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
    slopes = torch.ones(1, requires_grad=True)
    o = gnomon.attention(q, k, v, similarity=Penumbral(1.0), position=ALiBi(slopes), causal=True)
    o.sum().backward()

step(512)
"""
    # One array of L x L bytes would take 256 MiB.
    assert peak_memory(before, "step(16384)") < 50 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("similarity", ["dot", "penumbral"])
@pytest.mark.parametrize("position", ["none", "rope+alibi"])
def test_the_output_has_the_layout_of_q(similarity, position, dtype):
    """If the queries are transposed, the transposed output is contiguous, and gradients agree."""
    torch.compiler.reset()
    torch.manual_seed(0)
    tokens = torch.randn(2, 13, 6, 8, dtype=dtype)
    keys = torch.randn(2, 13, 2, 2, 8, dtype=dtype)
    arguments = {"similarity": similarity, "position": position, "causal": True, "sink": 0.3}

    def rows_first(tokens, keys):
        k, v = keys.unbind(2)
        o = gnomon.attention(*(x.transpose(1, 2) for x in (tokens, k, v)), **arguments)
        return o.transpose(1, 2).view(2, 13, -1)  # raises an error if it has to copy

    def heads_first(tokens, keys):
        q = tokens.transpose(1, 2).contiguous()
        k, v = (x.transpose(1, 2).contiguous() for x in keys.unbind(2))
        o = gnomon.attention(q, k, v, **arguments)
        assert o.is_contiguous()
        return o.transpose(1, 2).flatten(2)

    results = []
    ways = [rows_first, heads_first]
    if dtype == torch.float32:
        ways.append(torch.compile(rows_first, backend="aot_eager", fullgraph=True))
    for attend in ways:
        leaves = [x.clone().requires_grad_() for x in (tokens, keys)]
        o = attend(*leaves)
        results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
    for result in results[1:]:
        for one, first in zip(result, results[0], strict=True):
            torch.testing.assert_close(one, first)
    # Inputs with a single row or head, or without rows, have an ambiguous memory layout.
    for shape in ((2, 1, 6, 8), (2, 13, 1, 8), (2, 0, 6, 8)):
        q = torch.randn(shape, dtype=dtype).transpose(1, 2)
        attend = functools.partial(gnomon.attention, similarity=similarity, causal=True)
        torch.testing.assert_close(attend(q, q, q), attend(*(q.contiguous() for _ in "qkv")))
