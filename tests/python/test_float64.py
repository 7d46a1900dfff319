"""The fused float64 kernels compared with the plain loops of the reference."""

import math

import pytest
import torch
from formulas import (
    ONE_PER_PAIR_FUNCTION,
    POSITIONS,
    Case,
    Mask,
    assert_near,
    generator_of,
    pairwise,
    values_and_gradients,
)
from operator_checks import peak_memory
from test_derivatives import CALLS, finite, of_call, of_formula

import gnomon

pytestmark = pytest.mark.cpu("float64 runs only on the CPU")

MASKS = {
    "none": Mask(query_offset=16),
    "causal": Mask(causal=True, query_offset=16),
    "window": Mask(window=(20, 3), query_offset=16),
    "lengths and an empty row": Mask(key_lengths=[53, 0], query_offset=16),
    "starts and offsets": Mask(causal=True, key_starts=[5, 0], query_offset=[15, -3]),
}


@pairwise(similarity=ONE_PER_PAIR_FUNCTION, mask=MASKS)
def test_every_pair_function(similarity, mask, on_reference):
    case = Case(similarity, "alibi", key_heads=2, queries=37, keys=53, mask=MASKS[mask])
    compare(case.ours, case.inputs(), on_reference)


@pytest.mark.parametrize("position", POSITIONS)
def test_every_position(position, on_reference):
    case = Case("dot", position, queries=19, keys=19, mask=Mask(causal=position == "t5 past"))
    compare(case.ours, case.inputs(), on_reference)


@pytest.mark.parametrize("scale", [1, 3, 10])
@pytest.mark.parametrize("similarity", ["dot", "gaussian", "laplacian", "penumbral", "hyperboloid"])
def test_large_scores(similarity, scale, on_reference):
    case = Case(
        similarity, "none", batch=1, queries=70, keys=150, dim=16, mask=Mask(query_offset=0)
    )
    inputs = case.inputs()
    if similarity == "dot":
        inputs |= {name: scale * inputs[name] for name in ("q", "k")}
    else:
        parameter = next(name for name in inputs if name not in ("q", "k", "v"))
        inputs[parameter] = scale * inputs[parameter]
    compare(case.ours, inputs, on_reference, tolerance=1e-14 * scale**2)


@pytest.mark.parametrize("name", CALLS)
def test_every_term(name, on_reference):
    call, tokens = of_call(name)
    names = ("q", "k", "v", "extra")
    inputs = {n: x.detach() for n, x in zip(names, tokens, strict=True)}
    compare(lambda inputs: call(*(inputs[n] for n in names)), inputs, on_reference)


def compare(call, inputs, on_reference, tolerance=2e-14):
    expected = on_reference(values_and_gradients, call, inputs)
    assert_near(values_and_gradients(call, inputs), expected, tolerance)
    expected = on_reference(of_formula, finite(call), inputs)
    assert_near(of_formula(finite(call), inputs), expected, 10 * tolerance)


def test_any_number_of_threads():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, 300, 17, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    slopes = torch.rand(3, dtype=torch.float64, requires_grad=True)

    def results():
        o = gnomon.attention(q, k, v, position=gnomon.position.ALiBi(slopes), causal=True)
        return o, *torch.autograd.grad(o.sin().sum(), (q, k, v, slopes))

    one = results()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        three = results()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@pytest.mark.slow
def test_memory_is_linear():
    before = """
import sys, torch, gnomon
length = int(sys.argv[1])
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 1, length, 16, dtype=torch.float64, requires_grad=True) for _ in "qkv")
gnomon.attention(q[:, :, :8], k[:, :, :8], v[:, :, :8]).sum().backward()
"""
    step = "gnomon.attention(q, k, v, causal=True).sum().backward()"
    # The scores of all pairs would take 512 MiB.
    assert peak_memory(before, step, 8192) < 40 * 1024
    before += """
def differentiate(length):
    rows = [x.detach()[:, :, :length] for x in (q, k, v)]
    loss = lambda q: gnomon.attention(q, *rows[1:], causal=True).square().sum()
    torch.func.jvp(torch.func.grad(loss), (rows[0],), (rows[1],))
differentiate(8)
"""
    assert peak_memory(before, "differentiate(length)", 8192) < 64 * 1024


def test_unknown_kernels(monkeypatch):
    monkeypatch.setenv("GNOMON_FLOAT64", "fast")
    x = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    with pytest.raises(
        ValueError,
        match=r"attention: GNOMON_FLOAT64 is 'fast'; expected reference or an empty value",
    ):
        gnomon.attention(x, x, x)


def head_factor(number):
    return torch.full((2,), number, dtype=torch.float64)


NEAR = {
    "laplacian": lambda s: gnomon.similarity.Laplacian(head_factor(1 / s)),
    "hyperbolic": lambda s: gnomon.similarity.Hyperbolic(
        head_factor(1 / s), model="ball", map="none"
    ),
    "entailment": lambda s: gnomon.similarity.Entailment(1.0, map="none"),
}


@pytest.mark.parametrize("kernels", ["fused", "reference"])
@pytest.mark.parametrize("scale", [1e-20, 1e-60])
@pytest.mark.parametrize("name", NEAR)
def test_tiny_tokens(name, scale, kernels, on_reference):
    """Near the origin, scaling the tokens scales distances and does not change angles."""
    inputs = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64, generator=generator_of(0)).unbind()

    def results(s):
        q, k, v = ((s * x).requires_grad_() for x in inputs)
        o = gnomon.attention(q, k, v, similarity=NEAR[name](s))
        return [o, *(s * x for x in torch.autograd.grad(o.square().sum(), [q, k]))]

    expected = results(1e-7)
    assert all(x.any() for x in expected)
    ours = results(scale) if kernels == "fused" else on_reference(results, scale)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_padding_may_hold_anything(on_reference):
    q, k, v = (torch.randn(2, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    k[1, :, 13:], v[1, :, 13:] = math.nan, math.inf
    lengths = [40, 13]
    expected = on_reference(lambda: gnomon.attention(q, k, v, key_lengths=lengths))
    torch.testing.assert_close(
        gnomon.attention(q, k, v, key_lengths=lengths), expected, rtol=0, atol=1e-14
    )
