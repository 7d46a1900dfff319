"""bfloat16 and float16: errors relative to float64 are at most twice those of the unfused reference
in the same dtype."""

import math
import statistics

import pytest
import torch
from formulas import POSITIONS, SIMILARITIES, Case, Mask, pairwise, values_and_gradients

import gnomon
from gnomon import nn

LOW = [torch.bfloat16, torch.float16]
TOKENS = ("q", "k", "v")


class PlainCase(Case):
    """The formula with every step in the tokens' dtype; supports only positions that are biases."""

    def scores(self, inputs):
        similarity, position = SIMILARITIES[self.similarity], POSITIONS[self.position]
        dtype = inputs["q"].dtype
        inputs = {name: x.to(dtype) for name, x in inputs.items()}
        i = torch.arange(self.queries, dtype=torch.float64)[:, None]
        j = torch.arange(self.keys, dtype=torch.float64)[None, :]
        k = inputs["k"].repeat_interleave(self.heads // self.key_heads, 1)
        bias = torch.as_tensor(position.bias(inputs, i, j)).to(dtype)
        scores = similarity.scores(inputs, inputs["q"], k) + bias
        return scores.masked_fill(~self.mask.visible(i, j, self.batch), -math.inf)


def low_inputs(case, dtype, parameter_dtype):
    return {
        name: x.to(dtype if name in TOKENS else parameter_dtype)
        for name, x in case.inputs().items()
    }


def errors(results, exact):
    return {name: float((results[name].double() - x).abs().max()) for name, x in exact.items()}


@pairwise(similarity=SIMILARITIES, position=["none", "alibi", "t5 both"], dtype=LOW)
def test_errors_are_at_most_twice_those_of_the_plain_formula(similarity, position, dtype):
    arguments = (similarity, position, 2, 4, 2, 65, 65, 24, 16, Mask(causal=True, query_offset=0))
    inputs = low_inputs(Case(*arguments), dtype, torch.float32)
    exact = values_and_gradients(
        Case(*arguments).theirs, {name: x.double() for name, x in inputs.items()}
    )
    plain = errors(values_and_gradients(PlainCase(*arguments).theirs, inputs), exact)
    ours = errors(values_and_gradients(Case(*arguments).ours, inputs), exact)
    for name, x in exact.items():
        # Rounding the largest number to the dtype causes an error of up to eps / 2.
        least = torch.finfo(dtype).eps * float(x.abs().max()) / 2
        assert ours[name] <= 2 * max(plain[name], least), (name, ours[name], plain[name])


@pytest.mark.parametrize("parameter_dtype", ["own", "float32"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_dtypes(dtype, parameter_dtype):
    of_parameters = dtype if parameter_dtype == "own" else torch.float32
    case = Case("penumbral", "rope + hype + t5", key_heads=2)
    results = values_and_gradients(case.ours, low_inputs(case, dtype, of_parameters))
    for name, x in results.items():
        expected = of_parameters if name.startswith("d") else torch.float32
        if name in ("o", "dq", "dk", "dv"):
            expected = dtype
        assert x.dtype == expected, name


# A difference between table entries that bfloat16 would round away decides the softmax.
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_bias_is_not_rounded(dtype):
    q, k = torch.zeros(1, 1, 1, 4, dtype=dtype), torch.zeros(1, 1, 2, 4, dtype=dtype)
    v = torch.tensor([[[[0.0], [1.0]]]], dtype=dtype)
    table = torch.tensor([[1024.0, 1024.25]])
    o, lse = gnomon.attention(
        q, k, v, position=gnomon.position.OffsetBias(table), query_offset=0, return_lse=True
    )
    assert abs(float(o) - torch.tensor(0.25).sigmoid()) < 4e-3
    assert abs(float(lse) - float(table.double().logsumexp(1))) < 1e-3


# Equal q and k have distance 0, although their squared norms are large.
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_near_tokens_keep_their_distance(dtype):
    torch.manual_seed(0)
    k = (torch.randn(1, 1, 20, 64) * 4).to(dtype)
    q = k.clone()
    _, lse = gnomon.attention(
        q, k, k, similarity=gnomon.similarity.Laplacian(100.0), return_lse=True
    )
    assert float(lse.abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("similarity", ["dot", "umbral", "penumbral"])
def test_modules(similarity, dtype):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, similarity=similarity, position="rope+hype:tau=learned")
    x = torch.randn(2, 17, 32)
    exact = module(x, causal=True)
    module.to(dtype)
    y = module(x.to(dtype), causal=True)
    y.float().square().sum().backward()
    assert y.dtype == dtype
    assert (y.float() - exact).abs().max() < 0.1 * exact.abs().max()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.cpu("its autocast")
@pytest.mark.parametrize("similarity", ["dot", "umbral"])
def test_autocast(similarity):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, similarity=similarity, position="alibi:slopes=learned")
    x = torch.randn(2, 17, 32)
    exact = module(x, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, causal=True)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert (y.float() - exact).abs().max() < 0.1 * exact.abs().max()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.cpu("its autocast")
def test_autocast_takes_tokens_of_several_types():
    torch.manual_seed(0)
    types = (torch.float32, torch.bfloat16, torch.float16)
    q, k, v = (torch.randn(2, 4, 9, 8).to(dtype).requires_grad_() for dtype in types)
    low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = gnomon.attention(*low, causal=True)
    weights = gnomon.attention_weights(*low[:2], causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        o = gnomon.attention(q, k, v, causal=True)
        assert torch.equal(gnomon.attention_weights(q, k, causal=True), weights)
        exact = gnomon.attention(q.double(), k.double(), v.double(), causal=True)
        assert exact.dtype == torch.float64
        with pytest.raises(TypeError, match="k has dtype"):
            gnomon.attention(q, k.double(), v)
    assert torch.equal(o, expected)
    o.float().square().sum().backward()
    expected.float().square().sum().backward()
    for mine, its in zip((q, k, v), low, strict=True):
        assert mine.grad.dtype == mine.dtype
        assert torch.equal(mine.grad, its.grad.to(mine.dtype))
    with pytest.raises(TypeError, match="dtype"):
        gnomon.attention(q, k, v)


@pytest.mark.cpu("its autocast")
def test_autocast_compiles():
    q = torch.randn(1, 2, 9, 8)
    compiled = torch.compile(
        lambda q: gnomon.attention(q, q.bfloat16(), q), fullgraph=True, backend="aot_eager"
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(q), gnomon.attention(q, q, q))


@pytest.mark.parametrize("length", [257, 1025])
def test_forget_gates(length, device):
    """The gradient of each gate is a sum over all later keys, so their errors add up."""

    def gradient(attend, q, k, v, gates, d_o):
        gates = gates.clone().requires_grad_()
        attend(q, k, v, gates).backward(d_o)
        return gates.grad.double()

    def plain(q, k, v, gates):
        sums = gates.cumsum(-1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores + (sums[..., :, None] - sums[..., None, :]).to(q.dtype)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v

    def ours(q, k, v, gates):
        return gnomon.attention(q, k, v, position=gnomon.position.Forget(gates), causal=True)

    found = []
    for seed in range(7):
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(1, 2, length, 32, generator=generator, device="cpu") for _ in range(4)]
        gates = torch.randn(1, 2, length, generator=generator, device="cpu").to(device)
        gates = gates.add(2).sigmoid().log()
        x = [each.to(device).bfloat16() for each in drawn]
        wide = [each.double() for each in x]
        truth = gradient(plain, *wide[:3], gates.double(), wide[3])
        found.append(
            [
                float((gradient(attend, *x[:3], gates, x[3]) - truth).abs().max())
                for attend in (ours, plain)
            ]
        )
    error, allowed = (statistics.median(column) for column in zip(*found, strict=True))
    assert error <= 2 * allowed
