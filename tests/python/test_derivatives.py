"""Forward mode and second derivatives compared with the formula; third derivatives are errors."""

import itertools
import math
import statistics

import pytest
import torch
from formulas import (
    ONE_PER_PAIR_FUNCTION,
    POSITIONS,
    SIMILARITIES,
    Case,
    Mask,
    assert_near,
    generator_of,
)
from operator_checks import peak_memory
from test_arguments import make_graph, make_tokens
from test_large_scores import FEW, LEAST, TIMES, plain_formula, tokens_of
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import gnomon
from gnomon import nn, position, similarity

on_cpu = pytest.mark.cpu("float64, threads or memory")


def directions(inputs, seed=2):
    generator = generator_of(seed)
    return {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        for name, x in inputs.items()
    }


def finite(attend):
    """attend, with lse set to 0 for rows without keys, where it has no derivative."""

    def of(inputs):
        o, lse = attend(inputs)
        return o, lse.masked_fill(lse == -math.inf, 0.0)

    return of


def loss_of(attend, inputs):
    """A nonlinear scalar function of o and lse with fixed random coefficients."""
    generator = generator_of(3)
    o, lse = attend(inputs)
    d_o = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)
    d_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse.dtype)
    return (d_o * o).sum() + (d_lse * lse).sum() + 0.1 * (o * o).sum()


def of_formula(attend, inputs):
    """The tangents of o and lse, and the product of the second derivatives with a direction."""
    u = directions(inputs)
    _, (o, lse) = jvp(attend, (inputs,), (u,))
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    first = torch.autograd.grad(loss_of(attend, leaves), list(leaves.values()), create_graph=True)
    inner = sum((g * u[name]).sum() for name, g in zip(leaves, first, strict=True))
    second = torch.autograd.grad(
        inner, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return {"o": o, "lse": lse} | dict(zip(leaves, second, strict=True))


def forward_over_reverse(attend, inputs):
    return jvp(grad(lambda inputs: loss_of(attend, inputs)), (inputs,), (directions(inputs),))[1]


def reverse_over_forward(attend, inputs):
    u = directions(inputs)
    return grad(lambda inputs: jvp(lambda x: loss_of(attend, x), (inputs,), (u,))[1])(inputs)


def check(ours, theirs, inputs, tolerance=1e-9):
    ours, theirs = finite(ours), finite(theirs)
    expected = of_formula(theirs, inputs)
    assert_near(of_formula(ours, inputs), expected, tolerance)
    second = {name: x for name, x in expected.items() if name in inputs}
    assert_near(forward_over_reverse(ours, inputs), second, tolerance)
    assert_near(reverse_over_forward(ours, inputs), second, tolerance)


def small(similarity="dot", position="none", **arguments):
    sizes = {"batch": 1, "heads": 2, "key_heads": 1, "queries": 6, "keys": 6, "dim": 6}
    return Case(similarity, position, **(sizes | {"value_dim": 3} | arguments))


# Pairs in which every similarity and every position occurs at least once.
TERMS = list(zip(SIMILARITIES, itertools.cycle(POSITIONS), strict=False))


@pytest.mark.parametrize(("similarity", "position"), TERMS)
@on_cpu
def test_derivatives_of_every_term(similarity, position):
    case = small(similarity, position, mask=Mask(causal=position == "t5 past"))
    check(case.ours, case.theirs, case.inputs())


MASKS = {
    "causal": Mask(causal=True),
    "window": Mask(window=(2, 1)),
    "lengths and an empty row": Mask(key_lengths=[3, 0]),
    "starts": Mask(causal=True, key_starts=[2, 0]),
    "offset": Mask(causal=True, query_offset=[1, -2]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("similarity", ["dot", "laplacian"])
@on_cpu
def test_derivatives_with_masks(mask, similarity):
    case = small(similarity, "alibi", batch=2, heads=4, key_heads=2, mask=MASKS[mask])
    check(case.ours, case.theirs, case.inputs())


LOW = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", ["dot", "gaussian", "penumbral"])
def test_derivatives_of_low_precision(name, dtype):
    case = small(name)
    tokens = {name: x.to(dtype) for name, x in case.inputs().items()}
    if dtype in (torch.bfloat16, torch.float16):
        tokens |= {name: x.float() for name, x in tokens.items() if name not in ("q", "k", "v")}
    expected = of_formula(case.ours, {name: x.double() for name, x in tokens.items()})
    actual = of_formula(case.ours, tokens)
    assert actual["o"].dtype == actual["q"].dtype == dtype
    assert_near({n: x.double() for n, x in actual.items()}, expected, LOW[dtype])


TABLE = torch.randn(2 * 6 - 1, 8, dtype=torch.float64, generator=generator_of(5))
VALUES = torch.randn(2 * 6 - 1, 8, dtype=torch.float64, generator=generator_of(6))
OTHER = torch.randn(2, 4, 6, 6, dtype=torch.float64, generator=generator_of(7))


# Calls with q, k, v and one additional tensor.
CALLS = {
    "relative": (lambda t: {"position": position.Relative(t, 5, values=VALUES)}, TABLE),
    "relative values": (lambda t: {"position": position.Relative(TABLE, 5, values=t)}, VALUES),
    "disentangled": (
        lambda t: {"position": position.Disentangled(t, TABLE[:10].clone())},
        TABLE[:10].clone(),
    ),
    "absolute keys": (lambda t: {"position": position.AbsoluteKeys(t)}, TABLE[:6].clone()),
    "relative on a grid": (
        lambda t: {"position": position.Relative2D(t, TABLE[:5].clone(), 2, 3)},
        TABLE[:3].clone(),
    ),
    "grid": (
        lambda t: {"position": position.Grid((2, 3), [position.ALiBi(t), position.HyPE(0.5, 0.1)])},
        torch.full((4,), 0.3, dtype=torch.float64),
    ),
    "pair bias": (lambda t: {"position": position.PairBias(t)}, OTHER),
    "shared pair bias": (lambda t: {"position": position.PairBias(t)}, OTHER[:1, :1]),
    "key bias": (lambda t: {"position": position.KeyBias(t)}, OTHER[:, :, 0]),
    "forget": (
        lambda t: {"position": position.Forget(-t.square()), "causal": True},
        OTHER[:, :, 0],
    ),
    "offset bias": (lambda t: {"position": position.OffsetBias(t)}, TABLE.T[:4].contiguous()),
    "transformer-xl": (
        lambda t: {
            "position": position.TransformerXL(t, t.flip(0), TABLE[:6].expand(4, 6, 8)),
            "causal": True,
        },
        TABLE[:4].clone(),
    ),
    "sink": (lambda t: {"sink": t}, OTHER[0, :, 0, 0].clone()),
    "temperature": (lambda t: {"temperature": t}, OTHER[:, :, 0].exp()),
    "temperature and soft cap": (
        lambda t: {"temperature": t, "score_softcap": 2.0},
        OTHER[:, :, 0].exp(),
    ),
    "dropout": (lambda t: {"dropout": 0.4, "seed": 7, "sink": t}, OTHER[0, :, 0, 0].clone()),
    "positions": (
        lambda t: {
            "positions": torch.tensor([0, 2, 3, 7, 8, 9]),
            "position": [position.HyPE(0.5, t), position.RoPE()],
        },
        torch.full((4,), 0.2, dtype=torch.float64),
    ),
    "per-batch positions": (
        lambda t: {
            "positions": torch.tensor([[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]]),
            "key_positions": torch.arange(6).expand(2, 6),
            "position": position.Kerple(0.5, t),
        },
        torch.full((4,), 0.6, dtype=torch.float64),
    ),
    "angles": (
        lambda t: {"position": position.RoPE(angles=t)},
        TABLE[:6, :4].clone()[None, None],
    ),
    "midpoint": (
        lambda t: {"aggregation": "einstein_midpoint", "temperature": t},
        OTHER[:, :, 0].exp(),
    ),
    "mask": (lambda t: {"mask": OTHER > 0, "sink": t}, OTHER[0, :, 0, 0].clone()),
    "segments": (
        lambda t: {
            "query_segments": torch.tensor([[0, 0, 1, 1, 2, 3]] * 2),
            "key_segments": torch.tensor([[0, 0, 1, 1, 2, 2]] * 2),
            "temperature": t,
        },
        OTHER[:, :, 0].exp(),
    ),
}


def of_call(name):
    arguments, extra = CALLS[name]

    def call(q, k, v, extra):
        if name == "midpoint":
            v = v / (1 + v.square().sum(-1, keepdim=True))
        o, lse = gnomon.attention(q, k, v, **arguments(extra), return_lse=True)
        return o, lse.masked_fill(lse == -math.inf, 0.0)

    tokens = [x.requires_grad_() for x in (*make_tokens(), extra.detach().clone())]
    return call, tokens


@pytest.mark.parametrize("name", CALLS)
@on_cpu
def test_derivatives_by_differences(name):
    call, inputs = of_call(name)
    assert torch.autograd.gradcheck(
        call, inputs, check_forward_ad=True, check_backward_ad=False, fast_mode=True, atol=1e-4
    )
    assert torch.autograd.gradgradcheck(
        call, inputs, check_fwd_over_rev=True, fast_mode=True, atol=1e-4
    )


GRAPHS = {
    "dot": {},
    "gaussian": {"similarity": similarity.Gaussian(0.5)},
    "penumbral": {"similarity": similarity.Penumbral(0.5)},
    "a sink": {"sink": torch.tensor([0.5, -0.5, 0.1, 0.2], dtype=torch.float64)},
    "dropout": {"dropout": 0.4, "seed": 3},
}


@pytest.mark.parametrize("name", GRAPHS)
@on_cpu
def test_derivatives_in_a_graph(name, on_reference):
    q, k, v, indptr, indices = make_graph()
    bias = torch.randn(len(indices), 4, dtype=torch.float64, generator=generator_of(8))

    def call(q, k, v, bias):
        return gnomon.graph_attention(
            q, k, v, indptr, indices, edge_bias=bias, return_lse=True, **GRAPHS[name]
        )

    inputs = [x.requires_grad_() for x in (q, k, v, bias)]
    assert torch.autograd.gradcheck(
        call, inputs, check_forward_ad=True, check_backward_ad=False, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True, fast_mode=True)
    named = {str(n): x.detach() for n, x in enumerate(inputs)}

    def attend(x):
        return call(*x.values())

    expected, actual = on_reference(of_formula, attend, named), of_formula(attend, named)
    assert_near(actual, expected, 1e-11)
    assert any(not torch.equal(actual[n], x) for n, x in expected.items())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["elu", "favor"])
@on_cpu
def test_derivatives_of_linear_attention(feature, causal):
    inputs = [x.requires_grad_() for x in make_tokens()]

    def call(q, k, v):
        return gnomon.linear_attention(q, k, v, feature, causal=causal)

    assert torch.autograd.gradcheck(
        call, inputs, check_forward_ad=True, check_backward_ad=False, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"position": "rope+hype"},
        {"similarity": "penumbral", "position": "alibi"},
        {"similarity": "umbral", "qk_norm": True, "gate": True, "sink": True},
    ],
)
@on_cpu
def test_derivatives_of_modules(arguments):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **arguments).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        module, x, check_forward_ad=True, check_backward_ad=False, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(module, x, check_fwd_over_rev=True, fast_mode=True)
    # The gradients of a gradient penalty with respect to the parameters.
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)
    assert module.q_proj.weight.grad.abs().sum() > 0


def loss(call):
    _, k, v = make_tokens()
    return lambda q: call(q, k[:1], v[:1]).square().sum()


@on_cpu
def test_transforms_agree():
    q = make_tokens()[0][:1, :, :3]
    f = loss(lambda q, k, v: gnomon.attention(q, k, v, query_offset=0, causal=True))
    full = hessian(f)(q)
    torch.testing.assert_close(jacrev(jacrev(f))(q), full)
    torch.testing.assert_close(jacfwd(grad(f))(q), full)
    u = torch.randn(q.shape, dtype=torch.float64, generator=generator_of(9))
    product = (full * u).sum((-1, -2, -3, -4))
    torch.testing.assert_close(jvp(grad(f), (q,), (u,))[1], product)
    torch.testing.assert_close(vjp(grad(f), q)[1](u)[0], product)
    torch.testing.assert_close(linearize(grad(f), q)[1](u), product)
    torch.testing.assert_close(vmap(grad(f))(torch.stack([q, q]))[1], grad(f)(q))
    each = vmap(lambda q: jvp(grad(f), (q,), (u,))[1])(torch.stack([q, 2 * q]))
    torch.testing.assert_close(each[0], product)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, u)
        tangent = forward_ad.unpack_dual(f(dual)).tangent
    torch.testing.assert_close(tangent, (grad(f)(q) * u).sum())


def test_the_layout_of_tangents_is_that_of_the_output():
    q = torch.randn(2, 6, 4, 8).transpose(1, 2)
    o, tangent = jvp(lambda q: gnomon.attention(q, q, q), (q,), (torch.randn_like(q),))
    assert o.stride() == tangent.stride()
    assert o.transpose(1, 2).is_contiguous()


def in_a_graph(case):
    """The call of a causal case, with an edge for each pair."""
    lengths = torch.arange(1, case.queries + 1)
    indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    indices = torch.cat([torch.arange(length) for length in lengths])

    def attend(x):
        o, lse = gnomon.graph_attention(
            *(x[n][0].transpose(0, 1) for n in "qkv"), indptr, indices,
            SIMILARITIES[case.similarity].ours(x), return_lse=True,
        )  # fmt: skip
        return o.transpose(0, 1)[None], lse.T[None]

    return attend


@pytest.mark.parametrize(
    ("similarity", "scale", "graph"),
    [
        (name, scale, graph)
        for name in ONE_PER_PAIR_FUNCTION
        for scale, graph in ((1, False), (3, False), (10, False), (3, True), (10, True))
        # At scale 10, points would be within rounding errors of the boundary of Ganea's ball.
        # For umbral cones at scale 10, both errors are of order 1 and depend on chance.
        if (name, scale) != ("entailment", 10) and (name, scale, graph) != ("umbral", 10, True)
    ],
)
def test_large_scores(similarity, scale, graph, on_reference):
    """Errors in float32 are at most a few times those of the plain formula, as for first
    derivatives."""
    case = Case(similarity, "none", 1, 2, 2, 48, 48, 16, 16, Mask(causal=True))
    attend = in_a_graph(case) if graph else case.ours
    errors = {}
    for seed in range(FEW):
        tokens = {name: x.float() for name, x in tokens_of(case, scale, seed).items()}
        wide = {name: x.double() for name, x in tokens.items()}
        truth = of_formula(case.theirs, wide)
        plain, actual = of_formula(plain_formula(case), tokens), of_formula(attend, tokens)
        # The fused kernel was used: the reference computes in float64, so its results would be
        # equal.
        if seed == 0:
            reference = on_reference(of_formula, attend, wide)
            assert not torch.equal(actual["q"], reference["q"].float())
        for name, expected in truth.items():
            size = max(0.1, float(expected.abs().max()))
            error = [float((x[name] - expected).abs().max()) / size for x in (actual, plain)]
            errors.setdefault(name, []).append(error)
    for name, pairs in errors.items():
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        # The unfused formula is not compared where it overflows.
        if math.isnan(theirs) or theirs > 1:
            continue
        assert ours <= max(LEAST, TIMES * theirs), name


@pytest.mark.parametrize("outputs", ["o", "o_tangent", "both"])
def test_gradients_of_part_of_a_jvp(outputs):
    """The loss uses the value of a jvp, its tangent, or both."""
    case = small("dot", "alibi", mask=Mask(causal=True))
    inputs = {name: x.float() for name, x in case.inputs().items()}

    def gradients(attend, inputs):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        u = {name: x.requires_grad_() for name, x in directions(inputs, seed=4).items()}
        (o, _), (o_tangent, _) = jvp(attend, (leaves,), (u,))
        parts = {"o": [o], "o_tangent": [o_tangent], "both": [o, o_tangent]}[outputs]
        loss = sum(part.square().sum() for part in parts)
        all_leaves = [*leaves.values(), *u.values()]
        return torch.autograd.grad(loss, all_leaves, allow_unused=True, materialize_grads=True)

    expected = gradients(case.theirs, {name: x.double() for name, x in inputs.items()})
    for ours, theirs in zip(gradients(case.ours, inputs), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("similarity", [None, "umbral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_cpu
def test_derivatives_are_the_same_for_any_number_of_threads(dtype, similarity):
    length = 300 if dtype == torch.float32 else 9  # several tasks per head
    q = torch.randn(1, 1, length, 8, generator=generator_of(5), dtype=dtype)
    threads = torch.get_num_threads()

    def results():
        def f(q):
            terms = similarity and gnomon.similarity.Umbral(1.0)
            return gnomon.attention(q, q, q, similarity=terms, causal=True).square().sum()

        return jvp(f, (q,), (q,))[1], jvp(grad(f), (q,), (q,))[1]

    try:
        torch.set_num_threads(1)
        one = results()
        for count in (2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(one, results(), strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dynamic", [False, True])
@on_cpu
def test_compiled(dynamic):
    q = make_tokens()[0][:1]
    f = loss(lambda q, k, v: gnomon.attention(q, k, v, causal=True))

    def twice(q):
        return jvp(f, (q,), (q,))[1] + grad(lambda q: grad(f)(q).square().sum())(q)

    compiled = torch.compile(twice, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(q), twice(q))


BEYOND = {
    "attention": (loss(lambda q, k, v: gnomon.attention(q, k, v)), r"gnomon\.attention"),
    "graph": (
        lambda x: (
            gnomon.graph_attention(*[x[0].transpose(0, 1)] * 3, torch.arange(0, 7), torch.arange(6))
            .pow(3)
            .sum()
        ),
        r"gnomon\.graph_attention",
    ),
}


@pytest.mark.parametrize("name", BEYOND)
@on_cpu
def test_third_derivatives_are_refused_by_name(name):
    f, who = BEYOND[name]
    q = make_tokens()[0][:1]
    message = who + r": third derivatives are not supported"
    for third in (
        grad(lambda q: grad(lambda q: grad(f)(q).square().sum())(q).square().sum()),
        grad(lambda q: jvp(grad(f), (q,), (q,))[1].sum()),
    ):
        with pytest.raises(NotImplementedError, match=message):
            third(q)
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=message):
        second.sum().backward()
    message = who + ": forward-mode derivatives of forward-mode or second derivatives are not"
    with pytest.raises(NotImplementedError, match=message):
        jvp(lambda q: jvp(f, (q,), (q,))[1], (q,), (q,))


@pytest.mark.slow
@pytest.mark.parametrize("similarity", ["dot", "gaussian"])
@on_cpu
def test_memory_is_linear_in_the_length(similarity):
    before = """
terms = gnomon.similarity.Gaussian(1.0) if sys.argv[1] == "gaussian" else None
loss = lambda q: gnomon.attention(q, q, q, similarity=terms, window=(8, 8)).square().sum()
def both(q):
    torch.func.jvp(loss, (q,), (q,))
    torch.func.jvp(torch.func.grad(loss), (q,), (q,))
both(torch.randn(1, 1, 8, 4))
q = torch.randn(1, 1, 4096, 4)
"""
    # One float per pair would take 64 MiB.
    assert peak_memory(before, "both(q)", similarity) < 50_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hidden_tokens_may_hold_nan(dtype):
    q = torch.randn(1, 2, 7, 4, generator=generator_of(6), dtype=dtype)
    spoilt = q.clone()
    spoilt[:, :, 5:] = math.nan

    def results(k):
        def attend(q):
            return gnomon.attention(q, k, k, key_lengths=[5])

        def loss(q):
            return attend(q).square().sum()

        return jvp(attend, (q,), (q,))[1], jvp(grad(loss), (q,), (q,))[1]

    for one, other in zip(results(q), results(spoilt), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
