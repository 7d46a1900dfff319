"""Tests the conversion of FlexAttention masks to arguments, and FLOP counts by FlopCounterMode."""

import subprocess
import sys

import pytest
import torch
from formulas import mostly_long
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import gnomon
from gnomon.integrations.flex import flex_attention, mask_arguments

L = 24
DOCUMENT = torch.tensor([0] * 7 + [1] * 9 + [2] * 8)
LENGTHS, STARTS = torch.tensor([20, 24]), torch.tensor([3, 0])
SQUARE = {"Q_LEN": L, "KV_LEN": L}
FEW = {"Q_LEN": L - 4, "KV_LEN": L}
BATCHES = {"B": 2, **SQUARE}

# Each mask_mod, its sizes, and the names of the equivalent arguments.
MASKS = {
    "all": (lambda b, h, q, k: q >= -1, SQUARE, set()),
    "none": (lambda b, h, q, k: q < -1, SQUARE, {"key_lengths"}),
    "causal": (lambda b, h, q, k: q >= k, SQUARE, {"causal"}),
    "causal, aligned to the top left": (lambda b, h, q, k: q >= k, FEW, {"causal", "query_offset"}),
    "causal with an offset": (lambda b, h, q, k: q + 4 >= k, FEW, {"causal", "query_offset"}),
    "causal, negative offset": (lambda b, h, q, k: q - 4 >= k, SQUARE, {"causal", "query_offset"}),
    "window": (lambda b, h, q, k: (q - k).abs() <= 5, SQUARE, {"window"}),
    "causal window": (lambda b, h, q, k: (q >= k) & (q - k <= 5), SQUARE, {"causal", "window"}),
    "a window before": (
        lambda b, h, q, k: (q - k >= 3) & (q - k < 9), SQUARE, {"causal", "window", "query_offset"},
    ),
    "a window after": (
        lambda b, h, q, k: (k - q >= 3) & (k - q < 9), SQUARE, {"window", "query_offset"},
    ),
    "lengths": (lambda b, h, q, k: k < LENGTHS[b], BATCHES, {"key_lengths"}),
    "causal and starts": (
        lambda b, h, q, k: (k >= STARTS[b]) & (q >= k), BATCHES, {"causal", "key_starts"},
    ),
    "one length": (lambda b, h, q, k: k < 9, SQUARE, {"key_lengths"}),
    "documents": (
        lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k], SQUARE, {"query_segments", "key_segments"},
    ),
    "causal documents": (
        lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k),
        SQUARE,
        {"causal", "query_segments", "key_segments"},
    ),
    "causal window in documents": (
        lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k) & (q - k < 3),
        SQUARE,
        {"causal", "window", "query_segments", "key_segments"},
    ),
    "interleaved": (
        lambda b, h, q, k: (q % 3 == k % 3) & (q >= k),
        SQUARE,
        {"causal", "query_segments", "key_segments"},
    ),
    "per-batch chunks": (
        lambda b, h, q, k: q // (b + 4) == k // (b + 4),
        BATCHES,
        {"query_segments", "key_segments"},
    ),
    "prefix": (lambda b, h, q, k: (q >= k) | (k < 6), SQUARE, {"mask"}),
    "of a head": (lambda b, h, q, k: (q >= k) | (h == 1), {"H": 2, **SQUARE}, {"mask"}),
    "scattered": (lambda b, h, q, k: (q * 7 + k * 5) % 11 < 4, SQUARE, {"mask"}),
}  # fmt: skip


@pytest.mark.cpu("FlexAttention creates its masks on the CPU")
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_found(name):
    mask_mod, sizes, expected = MASKS[name]
    found = mask_arguments(mask_mod, **sizes)
    assert found.keys() == expected
    dense = create_mask(mask_mod, 2, 2, sizes["Q_LEN"], sizes["KV_LEN"], device="cpu")
    torch.manual_seed(0)
    q = torch.randn(2, 2, sizes["Q_LEN"], 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, sizes["KV_LEN"], 8, dtype=torch.float64).unbind()
    ours = gnomon.attention(q, k, v, return_lse=True, **found)
    torch.testing.assert_close(ours, gnomon.attention(q, k, v, mask=dense, return_lse=True))


@pytest.mark.cpu("FlexAttention creates its masks on the CPU")
def test_flex_attention():
    mask_mod = MASKS["causal documents"][0]
    block_mask = create_block_mask(mask_mod, None, None, L, L, device="cpu", BLOCK_SIZE=8)
    q, k, v = torch.randn(3, 2, 4, L, 8).unbind()
    dense = create_mask(mask_mod, 1, 1, L, L, device="cpu")
    expected = gnomon.scaled_dot_product_attention(q, k, v, dense, scale=0.2)
    for _ in range(2):  # results are cached
        ours = flex_attention(q, k, v, block_mask=block_mask, scale=0.2)
        torch.testing.assert_close(ours, expected)
    o, lse = flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True, return_lse=True)
    assert (o.shape, lse.shape) == ((2, 4, L, 8), (2, 4, L))
    with pytest.raises(
        NotImplementedError, match=r"score_mod is not supported; .* gnomon.position"
    ):
        flex_attention(q, k, v, score_mod=lambda score, *_: score)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="block_mask is for 24 queries and 24 keys; expected 9 "):
        flex_attention(q[:, :, :9], k, v, block_mask=block_mask)
    with pytest.raises(TypeError, match="block_mask is a function"):
        flex_attention(q, k, v, block_mask=mask_mod)
    with pytest.raises(ValueError, match="also pass Q_LEN and KV_LEN"):
        mask_arguments(mask_mod)


COUNT = """
import sys, torch
{imports}
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(2, 4, 24, 8, requires_grad=True)
k, v = torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 5)
with FlopCounterMode(display=False) as forward:
    o = gnomon.attention(q, k, v)
with FlopCounterMode(display=False) as backward:
    o.sum().backward()
x = torch.randn(9, 4, 8)
indptr, indices = gnomon.csr(torch.randint(9, (2, 40)), 9)
with FlopCounterMode(display=False) as graph:
    gnomon.graph_attention(x, x, x, indptr, indices)
print(*(mode.get_total_flops() for mode in (forward, backward, graph)))
"""


@pytest.mark.slow
@pytest.mark.cpu("starts its own processes")
@pytest.mark.parametrize("first", mostly_long(["torch.utils.flop_counter", "gnomon"]))
def test_flops(first):
    """The import order does not matter."""
    second = {"gnomon": "torch.utils.flop_counter"}.get(first, "gnomon")
    imports = f"import {first}\nassert '{second}' not in sys.modules\nimport {second}"
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(imports=imports)],
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    pairs = 2 * 4 * 24 * 30
    expected = [2 * pairs * (8 + 5), 2 * pairs * (3 * 8 + 2 * 5), 2 * 40 * 4 * 16]
    assert [int(number) for number in done.stdout.split()] == expected
