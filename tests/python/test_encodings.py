"""Compares position tables with their formulas, and hype_augment with the HyPE bias."""

import math

import pytest
import torch
from formulas import t5_bucket

import gnomon
from gnomon.position import ALiBi, HyPE


@pytest.mark.parametrize("layout", ["interleaved", "split", "split_xl"])
@pytest.mark.parametrize("dim", [2, 6, 64])
def test_sinusoid(layout, dim):
    positions = torch.tensor([[0, 1, 7], [-3, 1000, 123456]])
    table = gnomon.sinusoid(positions, dim, layout=layout)
    assert table.dtype == torch.float32
    assert table.shape == (2, 3, dim)
    divisor = max(dim // 2 - 1, 1) if layout == "split" else dim // 2
    for i in range(dim // 2):
        angle = positions.double() * 10000.0 ** (-i / divisor)
        sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, dim // 2 + i)
        torch.testing.assert_close(table[..., sine], angle.sin().float(), atol=2e-7, rtol=0)
        torch.testing.assert_close(table[..., cosine], angle.cos().float(), atol=2e-7, rtol=0)


def test_sinusoid_of_float64_positions_is_float64():
    table = gnomon.sinusoid(torch.tensor([0.5], dtype=torch.float64), 2)
    assert table.dtype == torch.float64
    expected = torch.tensor([math.sin(0.5), math.cos(0.5)], dtype=torch.float64)
    torch.testing.assert_close(table[0], expected, atol=1e-15, rtol=0)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 500), (12, 30)])
def test_t5_bucket(bidirectional, buckets, max_distance):
    relative = torch.arange(-700, 700)
    expected = [t5_bucket(int(n), bidirectional, buckets, max_distance) for n in relative]
    got = gnomon.t5_bucket(relative, bidirectional, buckets, max_distance)
    assert got.tolist() == expected


def test_t5_bucket_starts_its_buckets_where_the_paper_does():
    def first_distances(bidirectional):
        past = gnomon.t5_bucket(-torch.arange(200), bidirectional)
        return [int((past == b).nonzero()[0]) for b in past.unique()]

    assert first_distances(True)[8:] == [8, 12, 16, 23, 32, 46, 64, 91]
    assert first_distances(False)[16:] == [
        *(16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113)
    ]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20])
def test_alibi_slopes(heads):
    def power_of_two(n):
        return [2 ** (-8 * (h + 1) / n) for h in range(n)]

    below = 2 ** int(math.log2(heads))
    expected = power_of_two(below) + power_of_two(2 * below)[0::2][: heads - below]
    torch.testing.assert_close(gnomon.alibi_slopes(heads), torch.tensor(expected))


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("per_head", [True, False])
def test_sdpa_on_augmented_tokens_is_our_bias(copies, key_heads, per_head):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 31, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, key_heads, 40, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, key_heads, 40, 5, dtype=torch.float64, requires_grad=True)
    tau, mu = 3.0, 0.03
    if per_head:
        tau = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64, requires_grad=True)
        mu = torch.tensor([0.01, 0.03, 0.02, 0.05], dtype=torch.float64, requires_grad=True)
    augmented_q, augmented_k = gnomon.hype_augment(q, k, tau, mu, copies, query_offset=9)
    assert augmented_q.shape == (2, 4, 31, 8 + 2 * copies)
    groups = augmented_q.shape[1] // augmented_k.shape[1]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        augmented_q,
        augmented_k.repeat_interleave(groups, 1),
        v.repeat_interleave(4 // key_heads, 1),
        scale=8**-0.5,
    )
    ours = gnomon.attention(q, k, v, position=HyPE(tau, mu, mode="odd"), query_offset=9)
    torch.testing.assert_close(ours, theirs)
    leaves = [x for x in (q, k, v, tau, mu) if isinstance(x, torch.Tensor)]
    for got, expected in zip(
        torch.autograd.grad(ours.square().sum(), leaves),
        torch.autograd.grad(theirs.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_hype_approaches_alibi_with_the_cube_of_mu():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 60, 8, dtype=torch.float64) for _ in range(3))
    slopes = gnomon.alibi_slopes(4).double()
    alibi = gnomon.attention(q, k, v, position=ALiBi(slopes), causal=True)

    def error(mu):
        hype = gnomon.attention(q, k, v, position=HyPE(slopes / mu, mu), causal=True)
        return float((hype - alibi).abs().max())

    # tau sinh(mu x) = m x (1 + (mu x)^2 / 6 + ...), so reducing mu by a factor of 10 reduces the
    # error by a factor of 100.
    assert 90 < error(1e-3) / error(1e-4) < 110


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["odd", "abs", "cosh"])
def test_the_gradient_of_mu_is_zero_beyond_the_clamp(mode, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 300, 4, dtype=dtype) for _ in range(3))
    mu = torch.tensor([1.0], dtype=dtype, requires_grad=True)
    tau = torch.tensor([1.0], dtype=dtype, requires_grad=True)
    o, lse = gnomon.attention(
        q, k, v, position=HyPE(tau, mu, mode=mode), causal=True, return_lse=True
    )
    (o.square().sum() + lse.sum()).backward()
    assert mu.grad.isfinite()
    assert tau.grad.isfinite()
    far = gnomon.attention(
        q[:, :, :1],
        k[:, :, :50],
        v[:, :, :50],
        position=HyPE(tau, mu, mode=mode),
        query_offset=1000,
        return_lse=True,
    )
    (gradient,) = torch.autograd.grad(far[1].sum(), mu)
    assert gradient == 0
