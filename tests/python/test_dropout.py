"""Compares the dropout mask, at every index, with a second implementation of its hash."""

import numpy as np
import pytest
import torch

import gnomon

B, H, L = 3, 4, 48
STEP = np.uint64(0x9E3779B97F4A7C15)


def mix(x):
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_columns(seed, b, h, i, j):
    """The 32-bit hash of each query-key pair; the index arrays broadcast."""
    with np.errstate(over="ignore"):
        row = mix(np.uint64(seed % 2**64) + STEP)
        for place in (b, h, i):
            row = mix(row + STEP * (place.astype(np.uint64) + np.uint64(1)))
        first = row.astype(np.uint32)
        second = (row >> np.uint64(32)).astype(np.uint32)
        x = j.astype(np.uint32) + first
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = ((x ^ (x >> np.uint32(15))) + second) * np.uint32(0x846CA68B)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        return x ^ (x >> np.uint32(15))


def kept(seed, rate, dtype, heads=H):
    """The mask of weights that dropout keeps, read from the output for one-hot values."""
    q = torch.zeros(B, heads, L, 2, dtype=dtype)
    v = torch.eye(L, dtype=dtype).expand(B, heads, L, L)
    return gnomon.attention(q, q, v, dropout=rate, seed=seed) != 0


SEEDS = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, -1, -(2**63), 3 - 2**40]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mask_is_that_of_the_hash(seed):
    b, h, i, j = np.ix_(*map(np.arange, (B, H, L, L)))
    for rate in (0.5, 0.1):
        expected = hash_columns(seed, b, h, i, j) >= np.uint32(round(rate * 2**32))
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert torch.equal(kept(seed, rate, dtype).cpu(), torch.from_numpy(expected)), dtype


def test_masks_are_of_their_own():
    """Masks differ between seeds, batch elements, heads and rows: any two agree in about half of
    the pairs."""
    masks = torch.cat([kept(seed, 0.5, torch.float32) for seed in SEEDS]).flatten(0, 1)
    signs = masks.flatten(1).double() * 2 - 1
    shared = signs @ signs.T / signs.shape[1]
    shared.fill_diagonal_(0)
    assert shared.abs().max() < 6 / signs.shape[1] ** 0.5
    rows = masks.flatten(0, 1).double() * 2 - 1
    assert len(rows.unique(dim=0)) == len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_has_the_mask_of_its_output(dtype):
    seed = 2**40 + 5
    torch.manual_seed(0)
    q, k = torch.randn(2, B, H, L, 8, dtype=dtype)
    v = torch.zeros(B, H, L, L, dtype=dtype, requires_grad=True)
    mask = kept(seed, 0.5, dtype)
    d_o = torch.eye(L, dtype=dtype).expand(B, H, L, L)
    gnomon.attention(q, k, v, dropout=0.5, seed=seed).backward(d_o)
    # As d_o is the identity matrix, the gradient of v is the transposed weight matrix.
    assert torch.equal(v.grad.mT != 0, mask)
