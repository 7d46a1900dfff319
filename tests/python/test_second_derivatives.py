"""Gradients of gradients of compositions; those of the operators are in test_derivatives.py."""

import functools
import pathlib

import pytest
import torch
from test_arguments import make_tokens
from torch.func import grad

import gnomon
from gnomon import nn, position

pytestmark = pytest.mark.cpu("takes tensors that are made when the file is read")

MESSAGE = r": second derivatives \(.*create_graph=True\) are not supported"


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
