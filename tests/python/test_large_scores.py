"""Float32 gradients with large scores compared with the unfused reference in float32.

The errors of both are measured against float64. Rounding errors of large scores can make training
diverge. In float32, a score of a million has a rounding error of a sixteenth. If all passes use the
same rounded score, this is harmless; otherwise, it causes an error of 6% in every weight.
"""

import math
import statistics

import pytest
import torch
from formulas import (
    ONE_PER_PAIR_FUNCTION,
    SIMILARITIES,
    Case,
    Mask,
    Similarity,
    generator_of,
    heights_in,
    pairwise,
    penumbral_square,
    per_head,
    psi,
    random_gamma,
    split,
    umbral_height,
)

import gnomon

# An error may be at most TIMES the error of the unfused reference, or LEAST times the largest
# number.
TIMES = 4
LEAST = 1e-5
# The largest error may differ by a factor of two between draws. Clear cases pass with the median of
# a few draws; other cases need many draws.
FEW, MANY = 5, 41


def gradients(attend, inputs, dtype, with_lse):
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    o, lse = attend(leaves)
    generator = generator_of(1)
    d_o, d_lse = (
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype) for x in (o, lse)
    )
    outputs = {o: d_o, lse: d_lse.masked_fill(lse == -math.inf, 0.0)} if with_lse else {o: d_o}
    # A term that shifts all scores of a row equally affects only lse, so o may not depend on it.
    found = torch.autograd.grad(
        list(outputs), list(leaves.values()), list(outputs.values()), materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def errors(ours, theirs, inputs, with_lse):
    """For each input, the errors of gnomon's and the unfused reference's gradients, relative to
    the largest entry."""
    inputs = {name: x.float().double() for name, x in inputs.items()}
    truth = gradients(theirs, inputs, torch.float64, with_lse)
    plain = gradients(theirs, inputs, torch.float32, with_lse)
    actual = gradients(ours, inputs, torch.float32, with_lse)
    found = {}
    for name, expected in truth.items():
        assert actual[name].isfinite().all(), name
        # Skip gradients that overflow in the reference.
        if not (expected.isfinite().all() and plain[name].isfinite().all()):
            continue
        # Values and output gradients are N(0, 1), so much smaller results are rounding errors.
        size = max(0.1, float(expected.abs().max()))
        found[name] = [float((x[name] - expected).abs().max()) / size for x in (actual, plain)]
    return found


def too_large(draws, least):
    """For each input whose error is too large, that error and the allowed error."""
    found = {}
    for name in draws[0]:
        pairs = [draw[name] for draw in draws if name in draw]
        error, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
        # Skip gradients without a correct digit in the reference, as with tokens of height e^30.
        if plain > 1:
            continue
        allowed = max(least, TIMES * plain)
        if error > allowed:
            found[name] = error, allowed
    return found


def assert_as_good_as_plain(
    case, scale, ours=None, with_lse=False, sees=None, tokens=None, least=LEAST
):
    def draw(seed):
        plain = plain_formula(case, sees)
        drawn = (tokens or tokens_of)(case, scale, seed)
        return errors(ours or case.ours, plain, drawn, with_lse)

    draws = [draw(seed) for seed in range(FEW)]
    if too_large(draws, least):
        draws += [draw(seed) for seed in range(FEW, MANY)]
    for name, (error, allowed) in too_large(draws, least).items():
        pytest.fail(f"d {name} off by {error:.1e}, allowed {allowed:.1e}: {case}")


def plain_formula(case, sees=None):
    """The unfused reference, with positions and biases in float64, and weights in the tokens'
    dtype. `sees` (Lq, Lk) is an additional mask."""

    def attend(x):
        scores = case.scores(x).to(x["q"].dtype)
        if sees is not None:
            scores = scores.masked_fill(~sees, -math.inf)
        v = x["v"].repeat_interleave(case.heads // case.key_heads, 1)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    return attend


def tokens_of(case, scale, seed=0):
    """Tokens drawn from N(0, 1), with q and k times `scale`. For some similarities, the last
    coordinate is the log of a height, which gnomon clamps to [-30, 30]."""
    inputs = case.inputs()
    similarity = SIMILARITIES[case.similarity]
    generator = generator_of(seed)
    for name in ("q", "k", "v"):
        x = torch.randn(inputs[name].shape, generator=generator, dtype=torch.float64)
        if name != "v":
            x = x * scale
            x[..., -1].clamp_(-29, 29)
            x = similarity.prepare(x)
        inputs[name] = x
    return inputs


# With large scores, the gradient of lse is far larger than that of o, so they are tested
# separately. In rows with few keys, rounding errors do not average out.
MASKS = {
    "all keys": (Mask(), False),
    "causal": (Mask(causal=True), False),
    "causal, lse": (Mask(causal=True), True),
    "two keys": (Mask(window=(1, 0)), False),
}


@pairwise(similarity=SIMILARITIES, mask=MASKS, dim=[16, 64, 512], scale=[10, 3, 1])
def test_every_similarity_at_every_scale(similarity, dim, mask, scale):
    # Tokens at scale 10 would be within rounding error of the boundary of Ganea's ball, where
    # gradients vanish. They would also exceed the maximum tangent length of the Lorentz model's
    # exponential map.
    if similarity.startswith("entailment") or similarity == "lorentz exp":
        scale = min(scale, 3)
    seen, with_lse = MASKS[mask]
    # The unfused distance formulas store the differences of all pairs, so wide tokens need a short
    # sequence.
    length = 24 if dim == 512 else 48
    case = Case(
        similarity, batch=1, heads=2, key_heads=2, queries=length, keys=length,
        dim=dim, value_dim=dim, mask=seen,
    )  # fmt: skip
    assert_as_good_as_plain(case, scale, with_lse=with_lse)


@pairwise(
    similarity=["gaussian", "laplacian", "umbral", "penumbral"],
    dim=[3, 16, 64],
    shift=["mean", "outlier"],
    mask=["causal", "two keys"],
)
def test_distances_far_from_the_origin(similarity, shift, dim, mask):
    """A large offset in one column or in all columns, shared by all tokens, makes norms useless
    for computing distances."""

    def tokens(case, scale, seed):
        inputs = tokens_of(case, scale, seed)
        for name in "qk":
            if shift == "mean":
                inputs[name][..., :-1] += 10 * scale
            else:
                inputs[name][..., 0] += 80
        return inputs

    for scale in (1, 3):
        case = Case(
            similarity, batch=1, heads=2, key_heads=2, queries=48, keys=48, dim=dim,
            value_dim=dim, mask=MASKS[mask][0],
        )  # fmt: skip
        assert_as_good_as_plain(case, scale, tokens=tokens)


def clusters(case, seed, mean, spread):
    """Inputs with q and k around four centres; gamma makes scores within a cluster about 1."""
    inputs = tokens_of(case, 1, seed)
    generator = generator_of(seed + 1)
    columns = case.dim - 1  # the last column may be a height
    centres = mean * torch.randn(4, columns, generator=generator, dtype=torch.float64)
    for name in "qk":
        x = inputs[name]
        of = torch.randint(4, x.shape[:-1], generator=generator)
        x[..., :columns] = centres[of] + spread * x[..., :columns]
        x[..., -1] *= min(1, spread)
    if "gamma" in inputs:
        power = 2 if case.similarity == "gaussian" else 1
        inputs["gamma"] = torch.full_like(inputs["gamma"], spread**-power)
    return inputs


@pytest.mark.parametrize("similarity", ["gaussian", "laplacian", "umbral", "penumbral"])
@pairwise(
    mean=[1, 10, 100],
    spread=[1, 0.1, 1e-3],
    dim=[3, 16, 64],
    mask=["all keys", "causal, lse", "two keys"],
)
def test_tokens_close_together(similarity, mean, spread, dim, mask):
    """Gradients depend on differences between tokens, which are much smaller than the tokens."""
    seen, with_lse = MASKS[mask]
    case = Case(
        similarity, batch=1, heads=2, key_heads=1, queries=50, keys=50, dim=dim, value_dim=16,
        mask=seen,
    )  # fmt: skip

    def tokens(case, scale, seed):
        return clusters(case, seed, mean, spread)

    assert_as_good_as_plain(case, 1, with_lse=with_lse, tokens=tokens)


@pairwise(
    similarity=["gaussian", "laplacian", "half_space"],
    scale=[0.1, 1, 10],
    spread=[0.5, 0.2, 0.05, 0.02],
)
def test_tokens_around_one_centre(similarity, scale, spread):
    """Scores are moderate, and their gradients depend on the distances between the tokens."""
    case = Case(
        similarity, batch=1, heads=2, key_heads=2, queries=48, keys=48, dim=64, value_dim=8
    )  # fmt: skip

    def tokens(case, _scale, seed):
        inputs = tokens_of(case, 1, seed)
        centre = torch.randn(64, generator=generator_of(seed), dtype=torch.float64)
        for x in "qk":
            inputs[x] = scale * (centre + spread * inputs[x]) / 8
        if "gamma" in inputs:
            power = 2 if similarity == "gaussian" else 1
            inputs["gamma"] = torch.full_like(inputs["gamma"], scale**-power)
        return inputs

    # The gradient of gamma is much smaller than its terms, so rounding in distant pairs matters.
    assert_as_good_as_plain(case, 1, tokens=tokens, least=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("similarity", ["gaussian:gamma=2", "laplacian:gamma=2"])
def test_tokens_that_are_the_same_pull_nowhere(similarity, dtype):
    generator = generator_of(0)
    kinds = 100 * torch.randn(3, 40, generator=generator)
    which = torch.randint(3, (1, 2, 70), generator=generator)
    q = kinds[which].to(dtype).requires_grad_()
    k = kinds[which.flip(2)].to(dtype).requires_grad_()
    v = torch.randn(1, 2, 70, 8, generator=generator, dtype=torch.float32).to(dtype)
    o = gnomon.attention(q, k, v, similarity=similarity)
    o.backward(torch.randn(o.shape, generator=generator).to(dtype))
    assert q.grad.abs().max() == 0
    assert k.grad.abs().max() == 0


@pytest.mark.parametrize("scale", [1, 0.1, 0.01, 1e-4])
@pytest.mark.parametrize("similarity", ["laplacian", "gaussian"])
def test_scores_that_are_large_by_their_factor(similarity, scale):
    """Tokens are small and close together, and only a large gamma makes their scores differ."""

    def tokens(case, scale, seed):
        inputs = tokens_of(case, 1, seed)
        centre = torch.randn(case.dim, generator=generator_of(seed), dtype=torch.float64)
        for name in "qk":
            inputs[name] = scale * (centre + inputs[name] / 20)
        power = 1 if similarity == "laplacian" else 2
        inputs["gamma"] = torch.full_like(inputs["gamma"], 0.4 * scale**-power)
        return inputs

    case = Case(
        similarity, batch=1, heads=2, key_heads=2, queries=48, keys=48, dim=64, value_dim=16,
        mask=Mask(causal=True),
    )  # fmt: skip
    assert_as_good_as_plain(case, scale, tokens=tokens, least=3e-5)


@pytest.mark.parametrize("score", ["height", "height2", "log"])
@pytest.mark.parametrize("r", [1, 20, 300])
def test_penumbral_heights_that_are_small_beside_the_light(r, score, monkeypatch):
    heights = {
        "height": lambda square: -square.sqrt(),
        "height2": lambda square: -square,
        "log": lambda square: (r / square.sqrt()).log(),
    }
    similarity = Similarity(
        lambda p: gnomon.similarity.Penumbral(p["gamma"], r, "none", score),
        lambda p, q, k: (
            per_head(p["gamma"]) * heights[score](penumbral_square(split(q), split(k), r))
        ),
        random_gamma,
        has_height=True,
        prepare=heights_in(0.3, 0.9),
    )
    monkeypatch.setitem(SIMILARITIES, "penumbral r", similarity)
    for dim in (3, 64):
        case = Case("penumbral r", batch=1, heads=2, key_heads=1, queries=50, keys=50, dim=dim)
        assert_as_good_as_plain(case, 1)


@pytest.mark.parametrize("scale", [1, 3, 10])
@pytest.mark.parametrize("r", [0.1, 1, 5, 20])
def test_umbral_radii(r, scale, monkeypatch):
    """With large balls, most pairs are ancestor and descendant, and only the ancestor matters."""
    similarity = Similarity(
        lambda p: gnomon.similarity.Umbral(p["gamma"], r),
        lambda p, q, k: -per_head(p["gamma"]) * umbral_height(psi(q), psi(k), r),
        random_gamma,
        has_height=True,
    )
    monkeypatch.setitem(SIMILARITIES, "umbral r", similarity)
    for dim in (2, 16, 64):
        case = Case("umbral r", batch=1, heads=2, key_heads=2, queries=60, keys=60, dim=dim)
        assert_as_good_as_plain(case, scale)


@pytest.mark.parametrize("cones", ["umbral", "penumbral"])
def test_token_maps_of_cones_round_little(cones):
    """An error in a token's height affects all of its scores, so exponentials must be accurate to
    a few units in the last place."""
    z = torch.linspace(-29, 29, 20001)
    tokens = torch.stack([torch.ones_like(z), z], -1)[None, None]
    found = {}
    for dtype in (torch.float32, torch.float64):
        q = tokens.to(dtype)
        map_name = "psi" if cones == "umbral" else "xi"
        x, scalars, _, _ = torch.ops.gnomon.cone_map(q, q, cones, map_name, 0.1)
        found[dtype] = [x[..., 0], *scalars]
    height = z.double().exp() if cones == "umbral" else z.double().sigmoid()
    factor = 1 / math.sinh(0.1) if cones == "umbral" else 1
    assert found[torch.float64][0].flatten() == pytest.approx(height * factor, rel=1e-14)
    # Limits in units of 2^-24, for an exponential, and for products and a quotient that contain it.
    units = [2.5, 1.4] if cones == "umbral" else [3.25, 7, 6.5]
    for actual, expected, most in zip(*found.values(), units, strict=True):
        assert float((actual / expected - 1).abs().max()) <= most * 2**-24


@pytest.mark.parametrize("score", ["height", "log"])
def test_descendants_do_not_move_an_ancestor_nor_it_them(score):
    """u + v + |u - v| is twice the larger height, regardless of the smaller one."""
    z = torch.linspace(20, 24, 200)
    q, k = (torch.zeros(200, 1, n, 3) for n in (1, 2))
    q[..., 0, 2] = z[:, None]
    k[..., 2] = torch.tensor([20.0, 19.0])
    k[0, 0, 0, 2] = 19.5  # no ties
    v = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1).expand(200, 1, 2, 1)
    q.requires_grad_(), k.requires_grad_()
    similarity = gnomon.similarity.Umbral(1.0, 1.0, score=score)
    gnomon.attention(q, k, v, similarity=similarity).sum().backward()
    assert k.grad.abs().max() == 0
    # The logarithm multiplies score gradients, which sum to 0, by a factor that all keys share.
    assert q.grad.abs().max() <= (0 if score == "height" else 1e-6)


@pytest.mark.parametrize("scale", [30, 300, 3000, 10000])
@pytest.mark.parametrize("position", ["none", "alibi", "rope + hype + t5"])
def test_dot_products_of_a_hundred_million(position, scale):
    case = Case("dot", position, dim=64, queries=50, keys=50, mask=Mask(causal=True))
    assert_as_good_as_plain(case, scale)


@pytest.mark.parametrize(
    ("similarity", "queries"),
    [
        *(
            (s, n)
            for s in ("dot", "umbral", "laplacian", "penumbral", "hyperboloid")
            for n in (1, 3)
        ),
        ("dot", 16),
    ],
)
def test_few_queries_and_many_keys(similarity, queries):
    """Keys are processed in parts whose results are merged."""
    for scale in (1, 10, 100 if similarity == "dot" else 3):
        case = Case(
            similarity, heads=4, key_heads=2, queries=queries, keys=1500, dim=32, value_dim=16,
            mask=Mask(causal=True, query_offset=1400),
        )  # fmt: skip
        assert_as_good_as_plain(case, scale)


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("scale", [1, 3, 10])
def test_sinks_of_little_weight(scale, dim):
    """The gradient of the sink is accurate even if it is small compared with those of the keys."""

    def d_sink(attend, x, dtype):
        sink, *tokens = (x[name].to(dtype) for name in ("sink", "q", "k", "v"))
        sink.requires_grad_()
        return torch.autograd.grad(attend(sink, *tokens), sink, x["d_o"].to(dtype))[0].double()

    def plain(sink, q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(dim)
        column = sink.view(1, -1, 1, 1).expand(1, 2, 64, 1)
        return torch.cat([column, scores], -1).softmax(-1)[..., 1:] @ v

    def ours(sink, q, k, v):
        return gnomon.attention(q, k, v, sink=sink)

    found = []
    for seed in range(FEW):
        generator = generator_of(seed)
        x = {
            name: torch.randn(1, 2, 64, dim, generator=generator).double()
            for name in ("q", "k", "v", "d_o")
        }
        x = {name: value * (scale if name in "qk" else 1) for name, value in x.items()}
        x["sink"] = torch.tensor([0.0, 1.5], dtype=torch.float64)
        truth = d_sink(plain, x, torch.float64)
        size = truth.abs().max()
        errors_of = [(d_sink(f, x, torch.float32) - truth).abs().max() for f in (ours, plain)]
        found.append([float(error / size) for error in errors_of])
    error, allowed = (statistics.median(column) for column in zip(*found, strict=True))
    assert error <= max(LEAST, TIMES * allowed)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_row_that_sees_one_key_has_no_gradient(similarity):
    for scale in (1, 10):
        for dtype in (torch.float32, torch.float64):
            case = Case(similarity, dim=16, mask=Mask(window=(0, 0)))
            inputs = tokens_of(case, scale)
            found = gradients(case.ours, inputs, dtype, with_lse=False)
            for name in inputs.keys() - {"v"}:
                assert not found[name].any(), name


@pairwise(
    similarity=ONE_PER_PAIR_FUNCTION,
    sizes=[(40, 40, 40), (200, 40, 2), (200, 40, 5), (30, 300, 300)],
    scale=[3, 1],
)
def test_graphs(similarity, sizes, scale):
    """Compared with the dense formula: each query attends to the next `edges` keys in a ring. A row
    lies within one chunk of edges or spans several chunks."""
    queries, keys, edges = sizes
    indptr = torch.arange(queries + 1) * edges
    neighbours = (torch.arange(queries)[:, None] + torch.arange(edges)) % keys
    sees = torch.zeros(queries, keys, dtype=torch.bool).scatter_(1, neighbours, True)

    def ours(x):
        q, k, v = (x[name][0].transpose(0, 1) for name in "qkv")
        similarity_of_x = SIMILARITIES[similarity].ours(x)
        o, lse = gnomon.graph_attention(
            q, k, v, indptr, neighbours.flatten(), similarity_of_x, return_lse=True
        )
        return o.transpose(0, 1)[None], lse.t()[None]

    case = Case(
        similarity, batch=1, heads=2, key_heads=2, queries=queries, keys=keys, dim=32,
        mask=Mask(query_offset=0),
    )  # fmt: skip
    assert_as_good_as_plain(case, scale, ours, sees=sees)


def test_graph_rows_of_one_edge_have_no_gradient():
    q, k, v = (100 * torch.randn(30, 2, 8) for _ in range(3))
    q.requires_grad_(), k.requires_grad_()
    indptr, indices = torch.arange(31), torch.randint(30, (30,))
    gnomon.graph_attention(q, k, v, indptr, indices).square().sum().backward()
    assert not q.grad.any()
    assert not k.grad.any()


@pytest.mark.parametrize("similarity", ["dot", "laplacian", "umbral"])
def test_bfloat16(similarity):
    """With native bfloat16 products, scores are rounded differently than in float32."""
    for scale in (1, 10, 100):
        case = Case(similarity, dim=64, queries=60, keys=60, mask=Mask(causal=True))
        inputs = {name: x.bfloat16() for name, x in tokens_of(case, scale).items()}
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        o, _ = case.ours(leaves)
        # The weights of each row sum to 1.
        (d_v,) = torch.autograd.grad(o.float().sum(), [leaves["v"]])
        total = d_v.float().sum((0, 2))
        assert (total / (case.batch * case.queries) - 1).abs().max() < 5e-3
