"""Second derivatives of compositions of operators; test_derivatives.py tests the operators."""

import functools
import math
import pathlib

import pytest
import torch
from torch.func import grad, hessian, jacfwd

import gnomon
from gnomon import nn, position

pytestmark = pytest.mark.cpu("its parameters are created on the CPU at import")


def augmented(q, k, v):
    """Attention with the tokens of hype_augment."""
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
    # Keep the tokens away from the kink of relu.
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


def test_transforms_over_processes(tmp_path: pathlib.Path):
    """In a group of one process; test_distributed.py tests larger groups."""
    q, k, v = small_tokens()

    def loss(attend):
        return lambda k: attend(q.detach(), k, v.detach(), causal=True).sin().sum()

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        ours = loss(gnomon.distributed.context_parallel_attention)
        theirs = loss(gnomon.attention)
        for transform in (grad, hessian, lambda f: jacfwd(grad(f))):
            torch.testing.assert_close(transform(ours)(k.detach()), transform(theirs)(k.detach()))
        # The gradient of a linear loss is constant, but it depends on the tokens.
        o = gnomon.distributed.context_parallel_attention(q, k, v)
        (gradient,) = torch.autograd.grad(o.sum(), k, create_graph=True)
        (expected,) = torch.autograd.grad(gnomon.attention(q, k, v).sum(), k, create_graph=True)
        torch.testing.assert_close(
            torch.autograd.grad(gradient.square().sum(), (q, k, v)),
            torch.autograd.grad(expected.square().sum(), (q, k, v)),
        )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sink", [-math.inf, -800.0, -20.0, -8.0, 0.0, 0.5, 8.0, 20.0, 800.0])
def test_sinks_far_from_the_scores(sink, dtype):
    """One row attends to no key; its lse is the sink."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 3, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    height = torch.tensor([sink], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    leaves = [q, k, v, height]
    exact = [x.detach().double().requires_grad_() for x in leaves]

    def ours(q, k, v, height):
        return gnomon.attention(q, k, v, mask=mask, sink=height, return_lse=True)

    def plain(q, k, v, height):
        scores = (q @ k.mT / 2).masked_fill(~mask, -1e30)
        with_sink = torch.cat([scores, height.expand(1, 1, 3, 1)], -1)
        weights = torch.where(mask, with_sink.softmax(-1)[..., :-1], 0.0)
        return weights @ v, with_sink.logsumexp(-1)

    results = []
    for call, inputs in ((ours, leaves), (plain, exact)):
        o, lse = call(*inputs)
        seen = torch.where(lse.isfinite(), lse, 0.0) if sink == -math.inf else lse
        if sink == -math.inf:
            seen = seen[:, :, ::2]
        first = torch.autograd.grad(
            o.square().sum() + seen.square().sum(), inputs, create_graph=True
        )
        total = sum(one.square().sum() for one in first[:3])
        results.append([*first, *torch.autograd.grad(total, inputs)])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    for one, other in zip(*results, strict=True):
        if sink != -math.inf or other.shape != height.shape:
            # Relative to the largest number, because a far sink makes all of them small.
            assert (one - other).abs().max() <= tolerance * other.abs().max()
        else:
            assert one.isfinite().all()
