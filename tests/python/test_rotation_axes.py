"""RoPE with multi-axis positions, as in vision-language models."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import generator_of
from torch import Tensor
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

import gnomon
from gnomon.position import RoPE, RoPEMixed

B, H, HKV, L, D = 2, 4, 2, 9, 16
KINDS = {
    "qwen2_vl": (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, (2, 3, 3), "contiguous"),
    "qwen3_vl": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, (4, 2, 2), "interleaved"),
}


def tokens(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    heads = (H, HKV, HKV)
    return [torch.randn(B, n, L, D, dtype=torch.float64).to(dtype) for n in heads]


def coordinates() -> Tensor:
    return torch.randint(0, 200, (B, L, 3), generator=generator_of(1))


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(D)
    if causal:
        scores = scores.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sections_of_transformers(kind, causal):
    config_class, rotary_class, sections, order = KINDS[kind]
    config = config_class(
        hidden_size=H * D,
        num_attention_heads=H,
        num_key_value_heads=HKV,
        head_dim=D,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": list(sections),
            "mrope_interleaved": order == "interleaved",
        },
    )
    q, k, v = tokens()
    positions = coordinates()
    cos, sin = rotary_class(config)(q, positions.permute(2, 0, 1))
    cos, sin = cos.double()[:, None], sin.double()[:, None]

    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

    expected = dense(turned(q), turned(k), v, causal)
    position = RoPE(layout="half", sections=sections, section_order=order)
    # The frequencies of transformers are float32.
    found = gnomon.attention(q, k, v, position=position, positions=positions, causal=causal)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    # Positions that all batch elements share.
    one = gnomon.attention(q, k, v, position=position, positions=positions[:1], causal=causal)
    torch.testing.assert_close(one[0], found[0])


def test_masks_go_by_columns():
    q, k, v = tokens()
    positions = coordinates()
    sections = RoPE(sections=(2, 3, 3))
    turned = [gnomon.attention(q, k, v, position=sections, positions=positions, window=(3, 1))]
    weights = gnomon.attention_weights(
        q, k, slice(None), position=sections, positions=positions, window=(3, 1)
    )
    offset = torch.arange(L) - torch.arange(L)[:, None]
    assert (weights[:, :, (offset < -3) | (offset > 1)] == 0).all()
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), turned[0])
    some = gnomon.attention_weights(
        q, k, [2, 5], position=sections, positions=positions, window=(3, 1)
    )
    torch.testing.assert_close(some, weights[:, :, [2, 5]])


def test_queries_and_keys_have_their_own():
    q, k, v = tokens()
    positions = coordinates()
    whole = gnomon.attention(q, k, v, position="rope:sections=2x3x3", positions=positions)
    part = gnomon.attention(
        q[:, :, 6:],
        k,
        v,
        position="rope:sections=2x3x3",
        positions=positions[:, 6:],
        key_positions=positions,
    )
    torch.testing.assert_close(part, whole[:, :, 6:])


def test_sections_in_graphs_and_transforms():
    q, k, v = tokens(torch.float32)
    places = torch.randint(9, (B, L, 3))

    def attend(q):
        position = "rope:sections=4x2x2:section_order=interleaved"
        return gnomon.attention(q, k, v, position=position, positions=places)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), attend(q))
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(attend(leaf).sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda q: attend(q).sum())(q), expected)


def test_mixed_frequencies_and_equal_parts():
    q, k, v = tokens()
    places = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    frequencies = torch.randn(H, 2, 5, dtype=torch.float64)
    for free, grid in (
        (RoPEMixed(frequencies), RoPEMixed(frequencies, shape=(3, 3))),
        (RoPE(), RoPE(shape=(3, 3))),
    ):
        torch.testing.assert_close(
            gnomon.attention(q, k, v, position=free, positions=places[None]),
            gnomon.attention(q, k, v, position=grid),
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position": "alibi"}, "alibi does not support"),
        ({"position": "rope:sections=4x4"}, "positions have 3 axes; expected 2, or one"),
        ({"position": "rope:shape=3x3"}, "positions cannot have several axes"),
        (
            {"position": "rope:sections=2x3x3", "key_positions": torch.zeros(B, L, 2).long()},
            "key_positions has shape",
        ),
    ],
)
def test_wrong_axes(arguments, message):
    with pytest.raises(ValueError, match=message):
        gnomon.attention(*tokens(), positions=coordinates(), **arguments)
