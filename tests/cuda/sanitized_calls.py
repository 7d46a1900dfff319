"""Runs attention on a GPU, forward and backward, for use under compute-sanitizer.

The only argument is the similarity. The calls cover two dtypes; square, decoding and
cross-attention shapes; and no position, ALiBi with learned slopes, and relative keys.
"""

import itertools
import sys

import torch

import gnomon

SIMILARITIES = {
    "dot": None,
    "laplacian": gnomon.similarity.Laplacian(0.5),
    "umbral": gnomon.similarity.Umbral(0.5),
}
#: Head dimension, queries, keys.
SHAPES = [(64, 70, 70), (128, 1, 130), (24, 97, 33)]

similarity = SIMILARITIES[sys.argv[1]]
torch.set_default_device("cuda")
count = 0
for dtype, (dim, queries, keys), name in itertools.product(
    [torch.bfloat16, torch.float32], SHAPES, ["none", "alibi", "relative"]
):
    q = torch.randn(2, 4, queries, dim, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, 2, keys, dim, dtype=dtype, requires_grad=True) for _ in range(2))
    position = {
        "none": lambda: None,
        "alibi": lambda: gnomon.position.ALiBi(gnomon.alibi_slopes(4).cuda().requires_grad_()),
        "relative": lambda dim=dim: gnomon.position.Relative(
            torch.randn(7, dim, requires_grad=True), 3
        ),
    }[name]()
    o = gnomon.attention(
        q,
        k,
        v,
        similarity=similarity,
        position=position,
        causal=queries == keys,
        query_offset=keys - 1 if queries == 1 else 0,
        dropout=0.1 if name == "none" else 0.0,
    )
    o.float().square().sum().backward()
    torch.cuda.synchronize()
    count += 1
print("calls", count)
