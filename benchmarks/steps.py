"""Benchmark steps for gnomon's operators and for the baselines."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measuring import Step
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import gnomon

HEADS = 8
LENGTH = 2048
DIM = 64
HYPE_MU = 0.001

Arrays = tuple[Tensor, Tensor, Tensor]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def tokens(
    batch: int = 1,
    heads: int = HEADS,
    length: int = LENGTH,
    dim: int = DIM,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Arrays:
    q, k = (leaf(batch, heads, length, dim, dtype=dtype) for _ in range(2))
    return q, k, leaf(batch, heads, length, dim if value_dim is None else value_dim, dtype=dtype)


def step(call: Callable[[], Tensor], inputs: Sequence[Tensor], backward: bool) -> Step:
    """Returns a step: one call of an operator, either without autograd or with a backward pass."""
    if backward:
        d_o = torch.randn_like(call().detach())
        return lambda: torch.autograd.grad(call(), inputs, d_o)

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    return forward


def sdpa(backward: bool = False, causal: bool = False, **shape: Any) -> Step:
    qkv = tokens(**shape)
    return step(lambda: scaled_dot_product_attention(*qkv, is_causal=causal), qkv, backward)


def ours_of(
    qkv: Arrays, backward: bool = False, learned: Sequence[Tensor] = (), **arguments: Any
) -> Step:
    return step(lambda: gnomon.attention(*qkv, **arguments), [*qkv, *learned], backward)


def ours(
    backward: bool = False,
    causal: bool = False,
    similarity: str | None = None,
    **shape: Any,
) -> Step:
    qkv = tokens(**shape)
    made = None if similarity is None else SIMILARITIES[similarity]()
    return ours_of(qkv, backward, causal=causal, similarity=made)


def ours_placed(backward: bool, length: int = LENGTH, **arguments: Any) -> Step:
    return ours_of(tokens(length=length), backward, **arguments)


def gamma() -> Tensor:
    return torch.full((HEADS,), 0.5)


SIMILARITIES: dict[str, Callable[[], gnomon.similarity.Similarity]] = {
    "laplacian": lambda: gnomon.similarity.Laplacian(gamma()),
    "umbral": lambda: gnomon.similarity.Umbral(gamma()),
    "penumbral h^2": lambda: gnomon.similarity.Penumbral(gamma(), score="height2"),
    "penumbral h": lambda: gnomon.similarity.Penumbral(gamma()),
}
BIASES = ["ALiBi", "T5", "HyPE"]


def bias(name: str, learned: bool, heads: int = HEADS) -> tuple[Any, list[Tensor]]:
    """Returns a position and its parameters."""

    def tensor(values: Tensor) -> Tensor:
        return values.float().clone().requires_grad_(learned)

    slopes = gnomon.alibi_slopes(heads)
    if name == "ALiBi":
        parameters = [tensor(slopes)]
        return gnomon.position.ALiBi(*parameters), parameters
    if name == "T5":
        parameters = [tensor(torch.randn(32, heads))]
        return gnomon.position.T5(parameters[0], bidirectional=True), parameters
    parameters = [tensor(slopes / HYPE_MU), tensor(torch.full((heads,), HYPE_MU))]
    return gnomon.position.HyPE(parameters[0], parameters[1], mode="abs"), parameters


def ours_with_bias(name: str, learned: bool, backward: bool = False) -> Step:
    position, parameters = bias(name, learned)
    return ours_of(tokens(), backward, parameters if learned else (), position=position)


def offsets() -> Tensor:
    places = torch.arange(LENGTH)
    return places[None, :] - places[:, None]


def mask_maker(name: str, learned: bool) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Returns a function that creates SDPA's mask (H, L, L), and the mask's parameters."""
    slopes = gnomon.alibi_slopes(HEADS).float()
    distance = offsets().abs().float()
    if name == "ALiBi":
        slopes.requires_grad_(learned)
        return lambda: -slopes[:, None, None] * distance, [slopes]
    if name == "T5":
        table = torch.randn(32, HEADS, requires_grad=learned)
        buckets = gnomon.t5_bucket(offsets(), bidirectional=True)
        return lambda: table[buckets].permute(2, 0, 1), [table]
    tau = (slopes / HYPE_MU).requires_grad_(learned)
    mu = torch.full((HEADS,), HYPE_MU, requires_grad=learned)
    return lambda: -tau[:, None, None] * torch.sinh(mu[:, None, None] * distance), [tau, mu]


def sdpa_with_mask(name: str) -> Step:
    """Returns a step that passes SDPA a fixed mask, created once."""
    qkv = tokens()
    mask = mask_maker(name, learned=False)[0]().contiguous()
    return step(lambda: scaled_dot_product_attention(*qkv, attn_mask=mask), qkv, False)


def sdpa_with_learned_mask(name: str) -> Step:
    """Returns a step that passes SDPA a learned mask, recreated in every call."""
    qkv = tokens()
    make, parameters = mask_maker(name, learned=True)
    return step(
        lambda: scaled_dot_product_attention(*qkv, attn_mask=make()), [*qkv, *parameters], True
    )


def penumbral_formula(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    """Causal penumbral attention in plain PyTorch, with the map xi (Tseng et al. 2023, eq. 23)."""

    def below_horosphere(token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        height = torch.sigmoid(token[..., -1:])
        square = height.square().squeeze(-1)
        return token[..., :-1] * height, square, 1 - (1 - square).sqrt()

    x, u2, alpha = below_horosphere(q)
    y, v2, beta = below_horosphere(k)
    u2, alpha = u2[..., :, None], alpha[..., :, None]
    v2, beta = v2[..., None, :], beta[..., None, :]
    squares = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :]
    d2 = (squares - 2 * x @ y.transpose(-1, -2)).clamp_min(1e-12)
    reach = alpha + beta + torch.maximum((alpha - beta).abs(), d2.sqrt())
    common = reach * (4 - reach)
    apart = d2 + 2 * (u2 + v2) + (u2 - v2).square() / d2
    height = torch.where(reach <= 2, common, apart).clamp_min(1e-12).sqrt() / 2
    visible = torch.ones(d2.shape[-2:], dtype=torch.bool).tril()
    scores = -factor[:, None, None] * height
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v


def formula_step(compiled: bool) -> Step:
    qkv = tokens()
    similarity = SIMILARITIES["penumbral h"]()
    with torch.no_grad():
        torch.testing.assert_close(
            penumbral_formula(*qkv, gamma()),
            gnomon.attention(*qkv, causal=True, similarity=similarity),
            rtol=1e-3,
            atol=1e-3,
        )
    function = torch.compile(penumbral_formula) if compiled else penumbral_formula
    return step(lambda: function(*qkv, gamma()), qkv, True)


def relative_step(most_offset: int, backward: bool) -> Step:
    keys = (torch.randn(2 * most_offset + 1, DIM) / math.sqrt(DIM)).requires_grad_()
    return ours_of(tokens(), backward, [keys], position=gnomon.position.Relative(keys, most_offset))


def document_lengths(longest: int, total: int = 2 * LENGTH) -> list[int]:
    """Returns random document lengths that add up to `total`."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(torch.randint(longest // 20, longest, (), generator=generator)))
    lengths[-1] -= sum(lengths) - total
    return lengths


def packed_step(
    lengths: Sequence[int],
    backward: bool,
    causal: bool,
    key_heads: int = HEADS,
    restarts: bool = False,
    looped: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Returns a step on documents packed into one sequence or, if `looped`, computed one by one."""
    q = leaf(1, HEADS, sum(lengths), DIM, dtype=dtype)
    k, v = (leaf(1, key_heads, sum(lengths), DIM, dtype=dtype) for _ in range(2))
    if not looped:
        segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        return ours_of(
            (q, k, v),
            backward,
            causal=causal,
            query_segments=segments,
            key_segments=segments,
            positions=positions if restarts else None,
        )
    documents = zip(*(x.detach().split(lengths, 2) for x in (q, k, v)), strict=True)
    steps = [
        ours_of(tuple(x.clone().requires_grad_() for x in document), backward, causal=causal)
        for document in documents
    ]
    return lambda: [one() for one in steps]


def window_step(gathered: bool, segmented: bool = False) -> Step:
    """Returns a forward and backward step on Swin's 7 x 7 windows with a learned 2-D bias."""
    side, heads = 7, 4
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    offsets = places[None, :] - places[:, None] + side - 1
    entries = (offsets[..., 0] * (2 * side - 1) + offsets[..., 1]).flatten()
    table = leaf(heads, 2 * side - 1, 2 * side - 1)
    qkv = tokens(batch=128, heads=heads, length=side * side, dim=16)
    segments = torch.randint(0, 3, (128, side * side)).sort(1)[0] if segmented else None

    def call() -> Tensor:
        bias: gnomon.position.Position = gnomon.position.GridBias(table)
        if gathered:
            pairs = table.flatten(1)[:, entries].view(1, heads, side * side, side * side)
            bias = gnomon.position.PairBias(pairs)
        return gnomon.attention(*qkv, position=bias, query_segments=segments, key_segments=segments)

    return step(call, [*qkv, table], True)


def decoding_step(position: str | None, dim: int = 32, keys: int = LENGTH) -> Step:
    """Returns a step that decodes one token; the cache is reset before its memory grows again."""
    module = gnomon.nn.MultiheadAttention(HEADS * dim, HEADS, position=position).eval()
    prompt, token = gnomon.nn.KVCache(), torch.randn(1, 1, HEADS * dim)
    with torch.no_grad():
        module(torch.randn(1, keys, HEADS * dim), causal=True, cache=prompt)
    cache = copy.copy(prompt)

    def decode() -> Tensor:
        nonlocal cache
        if cache.length() == keys + 1000:
            cache = copy.copy(prompt)
        with torch.no_grad():
            return module(token, causal=True, cache=cache)

    return decode


def linear_step() -> Step:
    qkv = tokens(length=8192)
    return step(lambda: gnomon.linear_attention(*qkv, causal=True), qkv, False)


def flex_step() -> Step:
    from torch.nn.attention.flex_attention import flex_attention

    slopes = gnomon.alibi_slopes(HEADS).float()

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j).abs()

    attend = torch.compile(flex_attention)
    qkv = [tensor.detach() for tensor in tokens()]
    return step(lambda: attend(*qkv, score_mod=add_bias), qkv, False)
