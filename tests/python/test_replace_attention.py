"""timm and torch.nn models with their attention replaced by gnomon's."""

import copy
import pickle
import warnings

import pytest
import torch

timm = pytest.importorskip("timm")

import gnomon  # noqa: E402
from gnomon.integrations import replace_attention  # noqa: E402

# The tests copy models with their buffers, which requires a real device.
pytestmark = pytest.mark.real_device


def vit(name="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    sizes = {"img_size": 48, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = timm.create_model(name, **sizes | options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images():
    return torch.randn(
        2, 3, 48, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def check_equal(theirs, ours, *inputs, **options):
    expected, found = (model(*inputs, **options) for model in (theirs, ours))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    for out in (expected, found):
        out.square().sum().backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-9, rtol=1e-8, msg=name)


VITS = {
    "plain": {},
    "query and key norms": {"qk_norm": True, "scale_attn_norm": True},
    "two tokens before the patches": {"class_token": True, "reg_tokens": 1},
}


@pytest.mark.parametrize("options", VITS.values(), ids=VITS)
def test_vision_transformers_of_timm(options):
    theirs = vit(**options)
    ours = copy.deepcopy(theirs)
    assert replace_attention(ours) is ours
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    check_equal(theirs, ours, images())
    with torch.no_grad(), torch.profiler.profile() as profile:
        ours(images())
    names = {event.key for event in profile.key_averages()}
    assert "gnomon::attention_forward" in names
    assert not any("scaled_dot_product" in name for name in names)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), ours(images()))


def test_models_of_timm_that_rotate():
    options = {"patch_size": 16, "use_rot_pos_emb": True, "attn_type": "rope"}
    theirs = vit("eva02_tiny_patch14_224", **options)
    ours = replace_attention(copy.deepcopy(theirs))
    assert "GnomonAttentionRope" in {type(part).__name__ for part in ours.modules()}
    check_equal(theirs, ours, images())
    replace_attention(ours, "laplacian")(images())
    with pytest.raises(NotImplementedError, match="including the height of 'penumbral'"):
        replace_attention(ours, "penumbral")(images())
    # A layer with fewer key heads.
    layer = timm.layers.AttentionRope(24, 3, qkv_fused=False, num_kv_heads=1).double()
    theirs, ours = (torch.nn.ModuleList([copy.deepcopy(layer)]) for _ in range(2))
    replace_attention(ours)
    check_equal(theirs[0], ours[0], torch.randn(2, 10, 24, dtype=torch.float64))


def test_windows_of_swin():
    torch.manual_seed(0)
    sizes = {"img_size": 48, "patch_size": 2, "window_size": 3, "embed_dim": 12, "num_classes": 5}
    theirs = timm.create_model(
        "swin_tiny_patch4_window7_224", **sizes, depths=(2, 2), num_heads=(3, 2)
    ).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ours = replace_attention(copy.deepcopy(theirs.eval()))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    # Shifted windows hide keys. In addition to the windows of 3 x 3 tokens, a layer with windows of
    # 2 x 4 tokens would reveal swapped axes.
    assert any(block.attn_mask is not None for block in ours.layers[0].blocks)
    check_equal(theirs, ours, images())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(ours, backend="eager")
        torch.testing.assert_close(compiled(images()), ours(images()))
    layer = timm.models.swin_transformer.WindowAttention(12, 3, window_size=(2, 4)).double()
    torch.nn.init.normal_(layer.relative_position_bias_table)
    pair = [torch.nn.ModuleList([copy.deepcopy(layer)]) for _ in range(2)]
    replace_attention(pair[1])
    hidden = torch.zeros(2, 8, 8, dtype=torch.float64)
    hidden[1, :4, 4:] = hidden[1, 4:, :4] = -torch.inf
    check_equal(pair[0][0], pair[1][0], torch.randn(6, 8, 12, dtype=torch.float64), mask=hidden)
    replace_attention(ours, "laplacian", "sink")(images()).sum().backward()
    terms = [part for name, part in ours.named_parameters() if "gnomon" in name]
    assert len(terms) == 8
    assert all(part.grad.abs().max() > 0 for part in terms)


@pytest.mark.parametrize(
    "options", [{}, {"qkv_fused": False}, {"scale_attn_inner": True, "qkv_bias": False}]
)
def test_eva(options):
    theirs = vit("eva02_tiny_patch14_224", patch_size=16, use_rot_pos_emb=True, **options)
    ours = replace_attention(copy.deepcopy(theirs))
    assert "GnomonEvaAttention" in {type(part).__name__ for part in ours.modules()}
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    check_equal(theirs, ours, images())


@pytest.mark.parametrize("kind", ["bool", "added", "causal"])
def test_masks_of_timm(kind):
    layer = timm.layers.attention.Attention(24, 3, gated=True).double()
    theirs, ours = (torch.nn.ModuleList([copy.deepcopy(layer)]) for _ in range(2))
    replace_attention(ours)
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    options = {
        "bool": {"attn_mask": torch.rand(2, 1, 10, 10) < 0.8},
        "added": {"attn_mask": torch.randn(10, 10, dtype=torch.float64)},
        "causal": {"is_causal": True},
    }[kind]
    if kind == "bool":
        options["attn_mask"] |= torch.eye(10, dtype=torch.bool)
    check_equal(theirs[0], ours[0], x, **options)


def test_similarities_and_positions_of_timm(tmp_path):
    theirs = vit()
    ours = replace_attention(copy.deepcopy(theirs), "laplacian", ["alibi", "sink"])
    layer = ours.blocks[0].attn
    torch.nn.init.normal_(layer.gnomon_position.sink_score)
    q, k, v = torch.randn(3, 2, 3, 10, 8, dtype=torch.float64)
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    found = layer(x)
    q, k, v = layer.qkv(x).view(2, 10, 3, 3, 8).permute(2, 0, 3, 1, 4)
    gamma = layer.gnomon_similarity.gamma_start.double()
    distance = (torch.arange(10)[:, None] - torch.arange(10)).abs()
    scores = -gamma * torch.cdist(q, k) - gnomon.alibi_slopes(3)[:, None, None] * distance
    sink = layer.gnomon_position.sink_score.view(3, 1, 1).expand(2, 3, 10, 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    expected = layer.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    ours(images()).sum().backward()
    assert layer.gnomon_similarity.gamma_theta.grad.abs().min() > 0
    again = replace_attention(vit(), "laplacian", "alibi+sink")
    again.load_state_dict(ours.state_dict())
    for copied in (again, pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(copied(images()), ours(images()), atol=0, rtol=0)
    # The patches are on a grid, after a class token.
    rotated = replace_attention(vit(), position="rope:shape=3x3:prefix=1")
    assert not torch.allclose(rotated(images()), theirs(images()), atol=1e-3)
    # Replacing again gives the same result.
    replace_attention(ours)
    torch.testing.assert_close(ours(images()), theirs(images()), atol=1e-10, rtol=1e-10)


def test_deferred_initialisation():
    def built():
        return replace_attention(vit().float(), "laplacian", ["hype:tau=learned", "t5", "sink"])

    expected = built()
    ours = built().to("meta").to_empty(device="cpu")
    ours.load_state_dict(vit().float().state_dict(), strict=False)
    for tensor in (t for b in ours.blocks for n, t in b.attn.state_dict().items() if "gnomon" in n):
        tensor.fill_(torch.nan)
    for part in ours.modules():
        if type(part).__module__.startswith("gnomon") and hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


class Block(torch.nn.Module):
    """One module used in two places."""

    def __init__(self, batch_first):
        super().__init__()
        self.first = torch.nn.MultiheadAttention(24, 3, batch_first=batch_first)
        self.again = self.first

    def forward(self, x, **options):
        y, _ = self.first(x, x, x, need_weights=False, **options)
        return self.again(y, x, x, need_weights=False)[0]


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_of_torch(batch_first):
    theirs = Block(batch_first).double()
    ours = replace_attention(copy.deepcopy(theirs))
    assert ours.first is ours.again
    assert type(ours.first) is not torch.nn.MultiheadAttention
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[1, 5:] = True
    x = torch.randn(4, 7, 24, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    check_equal(theirs, ours, x, key_padding_mask=padding)


def test_encoders_of_torch():
    layer = torch.nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
    theirs = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    ours = replace_attention(copy.deepcopy(theirs))
    x = torch.randn(4, 7, 24, dtype=torch.float64)
    check_equal(theirs, ours, x)
    theirs.eval(), ours.eval()
    with torch.no_grad(), torch.profiler.profile() as profile:
        found = ours(x)
    torch.testing.assert_close(found, theirs(x), atol=1e-10, rtol=1e-10)
    # PyTorch's fused layer would bypass the replaced attention.
    assert "gnomon::attention_forward" in {event.key for event in profile.key_averages()}


def test_models_that_are_refused():
    class OddAttention(torch.nn.Module):
        def forward(self, x):
            return x.cumsum(1)

    class Extended(torch.nn.MultiheadAttention):
        """A subclass, which may compute anything."""

    model = vit()
    for arguments, error, match in (
        ((3,), TypeError, "similarity is an int"),
        (("dot", 3), TypeError, "position is an int"),
        (
            ("umbral:map=none",),
            ValueError,
            "map=none expects queries and keys that are already points",
        ),
        (("dot", "sinusoidal"), NotImplementedError, "'sinusoidal' is added to the embeddings"),
        (("nonsense",), ValueError, "nonsense"),
    ):
        with pytest.raises(error, match=match):
            replace_attention(model, *arguments)
        assert type(model.blocks[0].attn) is timm.layers.attention.Attention
    with pytest.raises(TypeError, match="model is an int"):
        replace_attention(3)
    with pytest.raises(TypeError, match="expected a model that contains such modules"):
        replace_attention(torch.nn.MultiheadAttention(8, 2))
    with pytest.raises(
        NotImplementedError, match=("Sequential contains no supported attention module")
    ):
        replace_attention(torch.nn.Sequential(OddAttention()))
    model.odd = OddAttention()
    with pytest.warns(
        UserWarning, match="VisionTransformer with unsupported attention .*: OddAttention"
    ):
        replace_attention(model)
    encoder = torch.nn.TransformerEncoderLayer(8, 2)
    encoder.more = Extended(8, 2)
    with pytest.warns(UserWarning, match="with unsupported attention .*: Extended"):
        replace_attention(encoder)
    assert type(encoder.more) is Extended
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace_attention(vit())
