"""Second derivatives: correct where supported, otherwise rejected by name, never lost."""

import functools
import pathlib

import pytest
import torch
from test_arguments import POSITIONS, SIMILARITIES, make_graph, make_tokens
from torch.func import grad, hessian, jacrev, vmap
from torch.nn import Parameter

import gnomon
from gnomon import nn, position, similarity

pytestmark = pytest.mark.cpu("takes tensors that are made when the file is read")

ATTENTION, GRAPH = r"gnomon\.attention", r"gnomon\.graph_attention"
MESSAGE = r": second derivatives \(.*create_graph=True\) are not supported"
CONES = (similarity.Umbral, similarity.Penumbral)


def of_tokens(**arguments):
    _, k, v = make_tokens()
    return lambda q: gnomon.attention(q, k, v, **arguments)


def of_nodes(*arguments):
    _, k, v, indptr, indices = make_graph()
    return lambda q: gnomon.graph_attention(q, k, v, indptr, indices, *arguments)


def of_module(**arguments):
    module = nn.MultiheadAttention(8, 2, **arguments).double()
    return lambda q: module(q[:, 0])


def of_positions():
    def make(value):
        return Parameter(torch.tensor(value, dtype=torch.float64))

    return {
        name: of_tokens(position=make_one(make(value)))
        for name, (make_one, value) in POSITIONS.items()
    }


def refused():
    """Names and functions of q, and which operator rejects them."""
    table = torch.randn(2 * 6 - 1, 8, dtype=torch.float64)
    yield "dot", of_tokens(causal=True), ATTENTION
    yield "dot in a graph", of_nodes(), GRAPH
    for name, (make, number) in SIMILARITIES.items():
        who = rf"{ATTENTION}.*with cones" if isinstance(make(number), CONES) else ATTENTION
        yield name, of_tokens(similarity=make(number)), who
        who = who if "cones" in who else GRAPH
        yield f"{name} in a graph", of_nodes(make(number)), who
    for name, call in of_positions().items():
        yield name, call, ATTENTION
    yield "rope", of_tokens(position=position.RoPE()), ATTENTION
    yield "relative", of_tokens(position=position.Relative(table, 5)), ATTENTION
    disentangled = position.Disentangled(table[:10], table[:10])
    yield "disentangled", of_tokens(position=disentangled), ATTENTION
    yield "midpoint", of_tokens(aggregation="einstein_midpoint"), ATTENTION
    yield "lse", lambda q: of_tokens(return_lse=True)(q)[1], ATTENTION
    yield "dropout", of_tokens(dropout=0.5, seed=1), ATTENTION
    yield "a module", of_module(position="rope+hype"), ATTENTION
    yield "a module of cones", of_module(similarity="penumbral"), rf"{ATTENTION}.*with cones"


REFUSED = {name: (call, who) for name, call, who in refused()}


def first_tokens(name):
    return (make_graph() if "in a graph" in name else make_tokens())[0]


def penalty(call):
    """The gradient of a loss's gradient."""

    def of(q):
        (gradient,) = torch.autograd.grad(call(q).square().sum(), q, create_graph=True)
        return gradient

    return of


@pytest.mark.parametrize("name", REFUSED)
def test_second_derivatives_are_refused_by_name(name):
    call, who = REFUSED[name]
    q = first_tokens(name).requires_grad_()
    gradient = penalty(call)(q)
    # The first derivative is as without create_graph, and usable.
    (expected,) = torch.autograd.grad(call(q).square().sum(), q)
    assert torch.equal(gradient, expected)
    gradient.detach().square().sum()
    for again in (gradient.square().sum(), gradient.sum() + q.sum()):
        with pytest.raises(NotImplementedError, match=who + MESSAGE):
            torch.autograd.grad(again, q, retain_graph=True)
        with pytest.raises(NotImplementedError, match=who + MESSAGE):
            again.backward(retain_graph=True)


@pytest.mark.parametrize("name", REFUSED)
def test_second_derivatives_are_refused_by_name_in_transforms(name):
    call, who = REFUSED[name]
    q = first_tokens(name)

    def loss(q):
        return call(q).square().sum()

    for transform in (
        grad(lambda q: grad(loss)(q).square().sum()),
        jacrev(grad(loss)),
        grad(lambda q: torch.func.vjp(loss, q)[1](q.sum())[0].square().sum()),
    ):
        with pytest.raises(NotImplementedError, match=who + MESSAGE):
            transform(q)
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        hessian(loss)(q)


@pytest.mark.parametrize("name", ["dot", "gaussian", "umbral", "dot in a graph"])
def test_second_derivatives_are_refused_by_name_of_each_sample(name):
    call, who = REFUSED[name]
    q = first_tokens(name)
    each = vmap(grad(lambda q: grad(lambda q: call(q).square().sum())(q).square().sum()))
    with pytest.raises(NotImplementedError, match=who + MESSAGE):
        each(torch.stack([q, q]))


@pytest.mark.parametrize("name", ["dot", "gaussian", "umbral", "dot in a graph"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_second_derivatives_are_refused_by_name_where_they_are_compiled(name, dynamic):
    call, who = REFUSED[name]
    q = first_tokens(name)
    twice = grad(lambda q: grad(lambda q: call(q).square().sum())(q).square().sum())
    compiled = torch.compile(twice, backend="aot_eager", dynamic=dynamic)
    with pytest.raises(Exception, match=who + MESSAGE):
        compiled(q)


def test_gradients_of_parameters_are_refused_too():
    """Through the first derivatives by q, gamma, slopes and a table."""
    q, k, v = make_tokens()
    q.requires_grad_()
    gamma, slopes = (Parameter(torch.tensor(x, dtype=torch.float64)) for x in (0.5, 0.1))
    o = gnomon.attention(
        q, k, v, similarity=similarity.Gaussian(gamma), position=position.ALiBi(slopes)
    )
    inputs = (q, gamma, slopes)
    gradients = torch.autograd.grad(o.square().sum(), inputs, create_graph=True)
    for gradient in gradients:
        for x in inputs:
            with pytest.raises(NotImplementedError, match=ATTENTION + MESSAGE):
                torch.autograd.grad(gradient.square().sum(), x, retain_graph=True)


def test_forward_mode_of_a_gradient_is_refused():
    """Including the derivative by its factor, the output gradient."""
    q, k, v = (x.requires_grad_() for x in make_tokens())
    for o in (
        gnomon.attention(q, k, v),
        gnomon.attention(q, k, v, similarity=similarity.Umbral(1.0)),
    ):
        with torch.autograd.forward_ad.dual_level():
            d_o = torch.autograd.forward_ad.make_dual(torch.ones_like(o), torch.ones_like(o))
            with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
                torch.autograd.grad(o, q, d_o)


def augmented(q, k, v):
    """The inner products of hype_augment."""
    tau, mu = q.mean(), k.std() * 0.05
    q, k = gnomon.hype_augment(q, k, tau, mu)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    )


def encoded(spec, **arguments):
    torch.manual_seed(2)
    encoding = nn.TokenEncoding(spec, 4, **arguments).double()
    return lambda q, k, v: encoding(q[:, 0]) * encoding(k[:, 0]) + v[:, 0]


ROPE = position.RoPE()
TWICE = {
    **{
        f"linear attention, {name}": functools.partial(gnomon.linear_attention, **arguments)
        for name, arguments in {
            "elu": {},
            "elu, causal": {"causal": True},
            "relu": {"feature": "relu"},
            "relu, causal": {"feature": "relu", "causal": True},
            "favor": {"feature": "favor"},
            "favor, causal": {"feature": "favor", "causal": True},
            "rope": {"rope": ROPE},
            "rope, causal": {"rope": ROPE, "causal": True},
            "lengths": {"key_lengths": [2, 3]},
            "lengths, causal": {"key_lengths": [2, 3], "causal": True},
        }.items()
    },
    "hype_augment": augmented,
    "conv": encoded("conv:kernel=3:groups=2"),
    "causal conv": encoded("conv:kernel=3:groups=2", causal=True),
    "sinusoidal": encoded("sinusoidal"),
}


def small_tokens():
    torch.manual_seed(4)
    shapes = (2, 2, 3, 4), (2, 1, 3, 4), (2, 1, 3, 4)
    # Away from relu's kink.
    return [(x + x.sign() * 0.1).double().requires_grad_() for x in map(torch.randn, shapes)]


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_that_are_there(name):
    assert torch.autograd.gradgradcheck(TWICE[name], small_tokens())


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_that_are_there_in_transforms(name):
    q, k, v = (x.detach() for x in small_tokens())

    def loss(q):
        return TWICE[name](q, k, v).square().sum()

    leaf = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (expected,) = torch.autograd.grad(gradient.square().sum(), leaf, allow_unused=True)
    ours = grad(lambda q: grad(loss)(q).square().sum())(q)
    torch.testing.assert_close(ours, expected)


def test_second_derivatives_over_processes(tmp_path: pathlib.Path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        tokens = [x.requires_grad_() for x in make_tokens()]
        o = gnomon.distributed.context_parallel_attention(*tokens, causal=True)
        # d_o, all ones, needs no gradient; tensors saved by the pass do.
        gradient, *_ = torch.autograd.grad(o.sum(), tokens, create_graph=True)
        (expected,) = torch.autograd.grad(gnomon.attention(*tokens, causal=True).sum(), tokens[:1])
        torch.testing.assert_close(gradient, expected)
        with pytest.raises(
            NotImplementedError,
            match=r"gnomon\.distributed\.context_parallel_attention" + MESSAGE,
        ):
            gradient.sum().backward()
    finally:
        torch.distributed.destroy_process_group()
