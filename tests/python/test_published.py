"""Positions and similarities compared with other published implementations."""

import math
import types

import geoopt
import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.sew_d import modeling_sew_d
from transformers.models.swin.modeling_swin import SwinConfig, SwinModel
from transformers.models.swinv2.modeling_swinv2 import Swinv2Config, Swinv2SelfAttention
from transformers.models.t5.modeling_t5 import T5Attention, T5Config
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEConfig, ViTMAEEmbeddings
from transformers.models.wav2vec2.modeling_wav2vec2 import (
    Wav2Vec2Config,
    Wav2Vec2PositionalConvEmbedding,
)
from transformers.models.xlnet.modeling_xlnet import XLNetConfig, XLNetRelativeAttention

import gnomon


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bucket(bidirectional):
    relative = torch.arange(-5000, 5000)
    for buckets, max_distance in ((32, 128), (64, 1000), (8, 20)):
        expected = T5Attention._relative_position_bucket(
            relative, bidirectional, buckets, max_distance
        )
        ours = gnomon.t5_bucket(relative, bidirectional, buckets, max_distance)
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_t5_attention(is_decoder):
    torch.manual_seed(0)
    config = T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=is_decoder, dropout_rate=0.0)
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    with torch.no_grad():
        layer.relative_attention_bias.weight.normal_()
    x = torch.randn(2, 90, 32)
    bias = layer.compute_bias(90, 90)
    q, k, v = (
        projection(x).unflatten(2, (4, 8)).transpose(1, 2)
        for projection in (layer.q, layer.k, layer.v)
    )
    table = layer.relative_attention_bias.weight
    for causal in {False, is_decoder}:
        mask = torch.full((90, 90), -torch.inf).triu(1) if causal else 0.0
        expected = (q @ k.transpose(2, 3) + bias + mask).softmax(-1) @ v
        ours = gnomon.attention(
            q,
            k,
            v,
            scale=1.0,
            position=gnomon.position.T5(table, bidirectional=not is_decoder),
            causal=causal,
        )
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("span", "max_distance"), [(256, 512), (128, 512), (16, 64), (4, 9)])
def test_deberta_buckets(span, max_distance):
    """Each table row contains its own index, so lse reveals the row for each distance."""
    length = 3 * max_distance
    distances = torch.arange(-length, length + 1)
    bucket = modeling_deberta_v2.make_log_bucket_position(distances, span, max_distance).long()
    expected = (bucket + span).clamp(0, 2 * span - 1)
    keys = torch.arange(2 * span, dtype=torch.float64).unsqueeze(1)
    one, nothing = torch.ones(1, 1, 1, 1).double(), torch.zeros(1, 1, 2 * length + 1, 1).double()
    for tables in ((keys, 0 * keys), (0 * keys, keys)):
        q, k = (one, nothing) if tables[0].any() else (0 * one, nothing + 1)
        _, lse = gnomon.attention(
            q.expand(1, 1, len(distances), 1),
            # One key per query.
            k,
            k,
            position=gnomon.position.Disentangled(*tables, max_distance=max_distance),
            scale=1.0,
            query_segments=torch.arange(len(distances)).expand(1, -1),
            key_segments=torch.arange(len(distances)).expand(1, -1),
            positions=distances.expand(1, -1),
            key_positions=torch.zeros_like(distances).expand(1, -1),
            return_lse=True,
        )
        assert torch.equal(lse[0, 0].round().long(), expected)


DEBERTA = {
    "v1": (modeling_deberta, modeling_deberta.DebertaConfig, 0, {}),
    "v2": (modeling_deberta_v2, modeling_deberta_v2.DebertaV2Config, 0, {}),
    "v3": (
        modeling_deberta_v2,
        modeling_deberta_v2.DebertaV2Config,
        24,
        {"position_buckets": 8, "share_att_key": True},
    ),
    "sew-d": (
        modeling_sew_d,
        modeling_sew_d.SEWDConfig,
        24,
        {"position_buckets": 8, "share_att_key": True},
    ),
}


@pytest.mark.parametrize("name", DEBERTA)
def test_disentangled_attention(name):
    torch.manual_seed(0)
    models, configuration, max_distance, options = DEBERTA[name]
    config = configuration(
        hidden_size=32,
        num_attention_heads=4,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=24,
        **options,
    )
    layer = models.DisentangledSelfAttention(config).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    span = config.position_buckets if max_distance else 24
    x = torch.randn(2, 70, 32, requires_grad=True)
    rows = torch.randn(2 * span, 32, requires_grad=True)
    lengths = torch.tensor([70, 51])
    seen = torch.arange(70) < lengths[:, None]
    distances = torch.arange(70)[:, None] - torch.arange(70)
    if max_distance:
        distances = models.make_log_bucket_position(distances, span, max_distance).long()
    theirs = layer(
        x, seen[:, None, None] & seen[:, None, :, None], relative_pos=distances[None],
        rel_embeddings=rows,
    )[0]  # fmt: skip

    def heads(y):
        return y.unflatten(-1, (4, -1)).transpose(-2, -3)

    if name == "v1":
        q, k, v = heads(layer.in_proj(x)).chunk(3, -1)
        q, v = (y + heads(bias[None]) for y, bias in ((q, layer.q_bias), (v, layer.v_bias)))
        keys, queries = layer.pos_proj(rows), layer.pos_q_proj(rows)
    else:
        q, k, v = (heads(p(x)) for p in (layer.query_proj, layer.key_proj, layer.value_proj))
        shares = options.get("share_att_key")
        keys = (layer.key_proj if shares else layer.pos_key_proj)(rows)
        queries = (layer.query_proj if shares else layer.pos_query_proj)(rows)
    ours = gnomon.attention(
        q, k, v, scale=(3 * 8) ** -0.5, key_lengths=lengths,
        position=gnomon.position.Disentangled(heads(keys), heads(queries), max_distance),
    ).transpose(1, 2).flatten(2)  # fmt: skip
    # Rows that attend to no key have other outputs in the published implementation.
    theirs, ours = theirs[seen], ours[seen]
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    d_o = torch.randn_like(ours)
    leaves = [x, rows, *layer.parameters()]
    expected = torch.autograd.grad(theirs, leaves, d_o)
    gradients = torch.autograd.grad(ours, leaves, d_o)
    for gradient, of_theirs in zip(gradients, expected, strict=True):
        # The gradient of a shift of all keys is 0 up to rounding.
        largest = max(1.0, float(of_theirs.abs().max()))
        torch.testing.assert_close(gradient, of_theirs, atol=2e-5 * largest, rtol=0)


@pytest.mark.parametrize("heads", [4, 8, 12])
def test_alibi_of_bloom_and_mpt(heads):
    torch.manual_seed(0)
    length = 50
    q, k, v = (torch.randn(1, heads, length, 8) for _ in range(3))
    slopes = gnomon.alibi_slopes(heads)
    ours = gnomon.attention(q, k, v, position=gnomon.position.ALiBi(slopes), causal=True)
    mask = torch.full((length, length), -torch.inf).triu(1)
    # Bloom and MPT add slope * column, which differs from our bias by a constant per row.
    bloom = build_alibi_tensor(torch.ones(1, length), heads, torch.float32).view(1, heads, 1, -1)
    biases = [bloom]
    if heads != 12:  # MPT orders slopes differently unless their number is a power of two
        biases.append(build_mpt_alibi_tensor(heads, length))
    for bias in biases:
        scores = q @ k.transpose(2, 3) / 8**0.5 + bias + mask
        torch.testing.assert_close(ours, scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)


def test_rope_of_llama():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    angles = (torch.arange(40.0)[:, None] * frequencies).repeat(1, 2)[None]
    turned_q, turned_k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    expected = torch.nn.functional.scaled_dot_product_attention(turned_q, turned_k, v)
    ours = gnomon.attention(q, k, v, position=gnomon.position.RoPE(layout="half"))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def in_ball(x, ball):
    """Maps our tangent coordinates to the ball; geoopt's are half as large, as its metric at 0 is
    4."""
    return ball.expmap0(x / 2)


@pytest.mark.parametrize(
    ("model", "map_name", "points"),
    [
        ("ball", None, lambda x, ball: in_ball(x, ball)),
        ("klein", None, lambda x, ball: in_ball(x, ball)),
        ("half_space", "exp", lambda x, ball: in_ball(x, ball)),
        ("hyperboloid", "exp", lambda x, ball: in_ball(x, ball)),
        ("ball", "none", lambda x, ball: x),
        (
            "klein",
            "none",
            # Maps the hyperboloid (c x, c), c = 1 / sqrt(1 - |x|^2), to the ball: c x / (1 + c).
            lambda x, ball: x / (1 + (1 - x.square().sum(-1, keepdim=True)).sqrt()),
        ),
        (
            "half_space",
            "none",
            # The inversion about (0, ..., 0, -1) with radius sqrt(2) maps one model to the other.
            lambda x, ball: inverted(x),
        ),
    ],
)
def test_hyperbolic_distance_of_geoopt(model, map_name, points):
    torch.manual_seed(0)
    ball = geoopt.PoincareBall()
    q, k = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (9, 11))
    if map_name == "none":
        q, k = (0.9 * x / (1 + x.norm(dim=-1, keepdim=True)) for x in (q, k))
    if model == "half_space" and map_name == "none":
        q[..., -1], k[..., -1] = q[..., -1].exp(), k[..., -1].exp()
    x, y = points(q, ball), points(k, ball)
    distance = ball.dist(x[..., :, None, :], y[..., None, :, :])
    v = torch.randn(2, 3, 11, 5, dtype=torch.float64)
    o, lse = gnomon.attention(
        q, k, v, similarity=gnomon.similarity.Hyperbolic(1.3, model, map_name), return_lse=True
    )
    torch.testing.assert_close(lse, (-1.3 * distance).logsumexp(-1))
    torch.testing.assert_close(o, (-1.3 * distance).softmax(-1) @ v)


def inverted(x):
    centre = torch.zeros_like(x)
    centre[..., -1] = -1
    return centre + 2 * (x - centre) / (x - centre).square().sum(-1, keepdim=True)


@pytest.mark.parametrize("map_name", ["none", "pseudopolar"])
def test_the_hyperboloid_of_geoopt(map_name):
    torch.manual_seed(0)
    lorentz = geoopt.Lorentz()
    q, k = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (9, 11))

    def point(x):
        # The exponential map from the origin along the tangent (0, z x / |x|); time is the first
        # coordinate.
        x, z = x[..., :-1], x[..., -1:]
        return lorentz.expmap0(
            torch.cat([torch.zeros_like(z), z * x / x.norm(dim=-1)[..., None]], -1)
        )

    x, y = point(q), point(k)
    distance = lorentz.dist(x[..., :, None, :], y[..., None, :, :])
    tokens = (q, k) if map_name == "pseudopolar" else (p.roll(-1, -1) for p in (x, y))
    _, lse = gnomon.attention(
        *tokens,
        torch.zeros(2, 3, 11, 1, dtype=torch.float64),
        similarity=gnomon.similarity.Hyperbolic(0.8, map=map_name),
        return_lse=True,
    )
    torch.testing.assert_close(lse, (-0.8 * distance).logsumexp(-1))


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 3, 4)], ids=str)
def test_axial_rope_of_rotary_embedding_torch(shape):
    torch.manual_seed(0)
    part = 8
    q, k, v = (torch.randn(2, 3, math.prod(shape), part * len(shape)) for _ in range(3))
    theirs = RotaryEmbedding(dim=part, theta=100)
    frequencies = theirs.get_axial_freqs(*shape).flatten(0, -2)
    turned_q, turned_k = (apply_rotary_emb(frequencies, x) for x in (q, k))
    expected = torch.nn.functional.scaled_dot_product_attention(turned_q, turned_k, v)
    ours = gnomon.attention(q, k, v, position=gnomon.position.RoPE(100.0, shape=shape))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kernel", "length"), [(128, 200), (128, 40), (7, 30), (8, 30)])
def test_convolution_of_wav2vec2(kernel, length):
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32, num_conv_pos_embeddings=kernel, num_conv_pos_embedding_groups=4
    )
    theirs = Wav2Vec2PositionalConvEmbedding(config).double()
    weight = theirs.conv.parametrizations.weight
    ours = gnomon.nn.Convolutional(32, kernel, 4).double()
    with torch.no_grad():
        weight.original0.mul_(torch.rand(weight.original0.shape) + 0.5)
        ours.weight_g.copy_(weight.original0)
        ours.weight_v.copy_(weight.original1)
        ours.bias.copy_(theirs.conv.bias)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(x), x + theirs(x))


def test_sinusoids_of_mae():
    dim = 24
    config = ViTMAEConfig(
        hidden_size=dim,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=20,
        patch_size=4,
    )
    embeddings = ViTMAEEmbeddings(config)
    embeddings.initialize_weights()
    theirs = embeddings.position_embeddings[0]
    ours = gnomon.grid_sinusoid((5, 5), dim, layout="split_xl", prefix=1)
    # In their code, the columns of x come first.
    expected = torch.cat([theirs[:, dim // 2 :], theirs[:, : dim // 2]], 1)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("radius", [1.0, 0.7])
def test_cones_as_released(radius):
    """Compares with the authors' code, which squares penumbral heights and divides umbral z."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 40, 6, dtype=torch.float64).unbind()
    q[..., -1] *= 2

    def weights(similarity, q, k):
        return gnomon.attention_weights(q, k, list(range(40)), similarity=similarity)

    # Penumbral: a sigmoid keeps heights below the horosphere, and heights scale the positions.
    height_q, height_k = (torch.sigmoid(x[..., -1]) * radius for x in (q, k))
    place_q, place_k = (
        x[..., :-1] * height.unsqueeze(-1) for x, height in ((q, height_q), (k, height_k))
    )
    distance = torch.cdist(place_q, place_k)
    a, b = height_q.unsqueeze(-1), height_k.unsqueeze(-2)
    width_a, width_b = (radius**2 - a**2).sqrt(), (radius**2 - b**2).sqrt()
    meeting = radius**2 - ((width_a + width_b - distance) / 2) ** 2
    below = torch.maximum(torch.maximum(a, b) ** 2, meeting)
    beyond = ((distance**2 + b**2 - a**2) / (2 * distance)) ** 2 + a**2
    meets = (distance <= width_a) | ((distance - width_a) ** 2 + b**2 <= radius**2)
    expected = -1.3 * torch.where(meets, below, beyond)
    assert 0.05 < meets.double().mean() < 0.95
    torch.testing.assert_close(
        weights(gnomon.similarity.Penumbral(1.3, r=radius, score="height2"), q, k),
        expected.softmax(-1),
    )

    # For umbral cones, z is divided by D.
    q, k = (torch.cat([x[..., :-1], x[..., -1:] / 6], -1) for x in (q, k))
    height_q, height_k = (x[..., -1].exp() for x in (q, k))
    distance = torch.cdist(
        q[..., :-1] * height_q.unsqueeze(-1), k[..., :-1] * height_k.unsqueeze(-1)
    )
    a, b = height_q.unsqueeze(-1), height_k.unsqueeze(-2)
    common = (distance / math.sinh(radius) + a + b) / 2
    expected = -1.3 * torch.maximum(torch.maximum(a, b), common)
    torch.testing.assert_close(
        weights(gnomon.similarity.Umbral(1.3, r=radius), q, k), expected.softmax(-1)
    )


def test_grid_bias_of_swin():
    torch.manual_seed(0)
    config = SwinConfig(
        image_size=28,
        patch_size=4,
        embed_dim=16,
        depths=[1],
        num_heads=[2],
        window_size=7,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = SwinModel(config).eval()
    layer = next(m for m in model.modules() if type(m).__name__.endswith("SwinAttention"))
    table = next(p for n, p in layer.named_parameters() if "bias_table" in n)
    with torch.no_grad():
        table.normal_()
    x = torch.randn(2, 49, 16)
    linear = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    q, k, v = (projection(x).unflatten(2, (2, 8)).transpose(1, 2) for projection in linear[:3])
    bias = gnomon.position.GridBias.from_query_minus_key(
        table.unflatten(0, (13, 13)).permute(2, 0, 1)
    )
    o = gnomon.attention(q, k, v, position=bias)
    ours = linear[3](o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, layer(x)[0], atol=1e-5, rtol=1e-5)


# Scores, biases and gradients of Swin V2, with the mask of shifted windows.
@pytest.mark.cpu("the model creates tensors on the CPU")
@pytest.mark.parametrize("masked", [False, True])
def test_cosine_of_swin_v2(masked):
    torch.manual_seed(0)
    layer = Swinv2SelfAttention(Swinv2Config(qkv_bias=True), dim=16, num_heads=2, window_size=4)
    layer.eval()
    with torch.no_grad():
        layer.logit_scale.copy_(torch.tensor([1.0, 4.0]).view(2, 1, 1))
    x = torch.randn(6, 16, 16, requires_grad=True)
    windows = torch.randn(3, 16, 16) > -1
    # The model adds its mask twice.
    mask = torch.where(windows, 0.0, -50.0) if masked else None
    expected = layer(x, mask)[0]
    d_o = torch.randn_like(expected)
    inputs = [x, layer.logit_scale, layer.query.weight, layer.key.weight]
    expected_gradients = torch.autograd.grad(expected, inputs, d_o, retain_graph=True)

    q, k, v = (
        projection(x).unflatten(2, (2, 8)).transpose(1, 2)
        for projection in (layer.query, layer.key, layer.value)
    )
    scale = layer.logit_scale.clamp(max=math.log(100)).exp().flatten()
    rows = layer.continuous_position_bias_mlp(layer.relative_coords_table).view(-1, 2)
    # Swin's rows are indexed by query - key.
    table = 16 * rows.sigmoid().unflatten(0, (7, 7)).permute(2, 0, 1).flip(1, 2)
    o = gnomon.attention(
        q,
        k,
        v,
        similarity=gnomon.similarity.Cosine(scale),
        position=gnomon.position.GridBias(table),
        mask=windows.repeat(2, 1, 1).unsqueeze(1) if masked else None,
    )
    ours = o.transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    for actual, wanted in zip(
        torch.autograd.grad(ours, inputs, d_o), expected_gradients, strict=True
    ):
        scale_of = wanted.abs().max().item()
        torch.testing.assert_close(actual, wanted, atol=2e-5 * max(scale_of, 1), rtol=0)


# XLNet uses Transformer-XL's attention, with rows in order of decreasing distance.
@pytest.mark.cpu("the model creates tensors on the CPU")
@pytest.mark.parametrize("causal", [True, False])
def test_transformer_xl_of_xlnet(causal):
    torch.manual_seed(0)
    length, heads, dim = 23, 2, 8
    layer = XLNetRelativeAttention(XLNetConfig(d_model=heads * dim, n_head=heads, n_layer=1))
    layer.eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    q, k, v = (torch.randn(length, 2, heads, dim) for _ in range(3))
    rows = torch.randn(2 * length, 1, heads, dim).expand(-1, 2, -1, -1)
    hidden = torch.ones(length, length).triu(1)[:, :, None, None] if causal else None
    expected = layer.rel_attn_core(q, k, v, rows, attn_mask=hidden)
    first = 0 if causal else 1 - length
    distances = torch.stack([rows[length - n, 0] for n in range(first, length)], 1)
    ours = gnomon.attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)),
        position=gnomon.position.TransformerXL(
            layer.r_w_bias, layer.r_r_bias, distances, bidirectional=not causal
        ),
        causal=causal,
    )
    torch.testing.assert_close(ours.permute(2, 0, 1, 3), expected, atol=2e-5, rtol=2e-5)


def grouped_tokens():
    """q with four heads, k and v with two, and an additive causal mask."""
    torch.manual_seed(0)
    q, k, v = (3 * torch.randn(2, heads, 21, 8) for heads in (4, 2, 2))
    return q, k, v, torch.full((21, 21), -math.inf).triu(1)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_soft_caps_of_gemma_2(softcap):
    q, k, v, mask = grouped_tokens()
    module = types.SimpleNamespace(num_key_value_groups=2, training=False)
    expected, _ = modeling_gemma2.eager_attention_forward(
        module, q, k, v, mask, scaling=0.3, softcap=softcap
    )
    capped = gnomon.similarity.Dot(softcap=softcap)
    ours = gnomon.attention(q, k, v, similarity=capped, scale=0.3, causal=True)
    torch.testing.assert_close(ours.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)
    by_name = gnomon.attention(q, k, v, similarity=f"dot:softcap={softcap}", scale=0.3, causal=True)
    assert torch.equal(by_name, ours)


def test_sinks_of_gpt_oss():
    q, k, v, mask = grouped_tokens()
    sinks = torch.randn(4)
    module = types.SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    expected, _ = modeling_gpt_oss.eager_attention_forward(module, q, k, v, mask, scaling=0.3)
    ours = gnomon.attention(q, k, v, scale=0.3, causal=True, sink=sinks)
    torch.testing.assert_close(ours.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)
