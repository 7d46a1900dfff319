"""Published models whose attention is replaced by gnomon have the same results in float64.

Each replacement has at most ten lines, and replaces the attention code in the model's own package.
"""

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import gnomon
from gnomon.position import ALiBi, GridBias


def results(model, *inputs, **arguments):
    model.zero_grad()
    o = model(*inputs, **arguments)
    o = o[0] if isinstance(o, tuple) else o
    o.square().sum().backward()
    return {"o": o.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def check(model, swap, *inputs, **arguments):
    """Compares results before and after `swap`, which returns a list that records attention
    calls."""
    model = model.double()
    with torch.no_grad():
        # Parameters that start at 0 would hide differences in the attention.
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = results(model, *inputs, **arguments)
    calls = swap(model)
    ours = results(model, *inputs, **arguments)
    assert calls
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, atol=1e-9, rtol=1e-8)


class CausalSelfAttention(nn.Module):
    """Attention as in small GPTs: one projection, SDPA, one projection."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, tokens, dim, heads, depth):
        super().__init__()
        self.embedding = nn.Embedding(tokens, dim)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(dim),
                    CausalSelfAttention(dim, heads),
                    nn.LayerNorm(dim),
                    nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)),
                ]
            )
            for _ in range(depth)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, attention, other_norm, mlp in self.layers:
            x = x + attention(norm(x))
            x = x + mlp(other_norm(x))
        return x @ self.embedding.weight.T


def test_a_small_gpt(monkeypatch):
    torch.manual_seed(0)
    calls = []

    def attend(self, q, k, v):
        calls.append(q.shape)
        return gnomon.attention(q, k, v, causal=True)

    def swap(model):
        monkeypatch.setattr(CausalSelfAttention, "attend", attend)
        return calls

    check(GPT(17, 16, 2, 2), swap, torch.randint(17, (2, 9)))


def test_x_transformers_with_alibi(monkeypatch):
    """gnomon receives a vector of slopes instead of an array of biases."""
    pytest.importorskip("x_transformers")
    from x_transformers import Decoder, TransformerWrapper
    from x_transformers.attend import Attend, Intermediates

    torch.manual_seed(0)
    layers = Decoder(
        dim=16, depth=2, heads=4, attn_dim_head=8, attn_kv_heads=2, alibi_pos_bias=True
    )
    model = TransformerWrapper(num_tokens=17, max_seq_len=32, attn_layers=layers)
    for module in model.modules():
        if isinstance(module, Attend):
            module.attn_fn = functools.partial(F.softmax, dim=-1)  # the original uses float32
    calls = []

    def swap(model):
        slopes = model.attn_layers.rel_pos.slopes.flatten()

        def forward(self, q, k, v, **_):
            calls.append(q.shape)
            # In x_transformers, query heads alternate between key heads instead of forming groups.
            k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
            o = gnomon.attention(q, k, v, causal=True, position=ALiBi(slopes))
            return o, Intermediates()

        monkeypatch.setattr(Attend, "forward", forward)
        return calls

    check(model, swap, torch.randint(17, (2, 9)))


def test_gat_of_pytorch_geometric(monkeypatch):
    from torch_geometric.nn import GATConv

    torch.manual_seed(0)
    calls = []

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = GATConv(7, 4, heads=3), GATConv(12, 5, heads=2)

        def forward(self, x, edge_index):
            return self.second(F.elu(self.first(x, edge_index)), edge_index)

    def forward(self, x, edge_index):
        calls.append(x.shape)
        loops = torch.arange(len(x)).expand(2, -1)
        edge_index = torch.cat([edge_index[:, edge_index[0] != edge_index[1]], loops], 1)
        values = self.lin(x).view(len(x), self.heads, -1)
        q, k = ((values * a).sum(-1, keepdim=True) for a in (self.att_dst, self.att_src))
        additive = gnomon.similarity.Additive(self.negative_slope)
        o = gnomon.graph_attention(q, k, values, *gnomon.csr(edge_index, len(x)), additive)
        return o.flatten(1) + self.bias

    def swap(model):
        monkeypatch.setattr(GATConv, "forward", forward)
        return calls

    x = torch.randn(20, 7, dtype=torch.float64)
    check(Network(), swap, x, torch.randint(20, (2, 90)))


def test_dit_of_diffusers():
    pytest.importorskip("diffusers")
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    ).eval()  # fmt: skip
    calls = []

    class Processor:
        def __call__(self, attn, hidden_states, *_, **__):
            calls.append(hidden_states.shape)
            q, k, v = (
                projection(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
                for projection in (attn.to_q, attn.to_k, attn.to_v)
            )
            return attn.to_out[0](gnomon.attention(q, k, v).transpose(1, 2).flatten(2))

    def swap(model):
        for block in model.transformer_blocks:
            block.attn1.set_processor(Processor())
        return calls

    check(
        model,
        swap,
        torch.randn(2, 4, 8, 8, dtype=torch.float64),
        timestep=torch.tensor([3, 7]),
        class_labels=torch.tensor([1, 2]),
        return_dict=False,
    )


@pytest.mark.parametrize("shift", [0, 2])
def test_swin_block_of_timm(monkeypatch, shift):
    """The bias table becomes one term, and shifted windows become a mask."""
    pytest.importorskip("timm")
    from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention

    torch.manual_seed(0)
    calls = []

    def forward(self, x, mask=None):
        calls.append(x.shape)
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        height, width = (2 * n - 1 for n in self.window_size)
        table = self.relative_position_bias_table.T.unflatten(1, (height, width)).flip(1, 2)
        if mask is not None:
            mask = mask.eq(0).repeat(len(x) // len(mask), 1, 1).unsqueeze(1)
        o = gnomon.attention(q, k, v, position=GridBias(table), mask=mask)
        return self.proj(o.transpose(1, 2).flatten(2))

    def swap(model):
        monkeypatch.setattr(WindowAttention, "forward", forward)
        return calls

    block = SwinTransformerBlock(
        dim=16, input_resolution=(8, 8), num_heads=2, window_size=4, shift_size=shift
    )
    check(block, swap, torch.randn(2, 8, 8, 16, dtype=torch.float64))
