"""Conversion from torch.nn: weights, replaced layers, and grids of a different resolution."""

import copy
import itertools

import pytest
import torch
from formulas import pairwise

import gnomon
from gnomon import nn
from gnomon.position import ALiBi, Grid, GridBias, OffsetBias, Relative, RoPE

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def theirs(dtype=torch.float64, seed=0, **arguments):
    torch.manual_seed(seed)
    module = torch.nn.MultiheadAttention(32, 4, **{"batch_first": True} | arguments)
    with torch.no_grad():
        for parameter in module.parameters():  # biases start at 0
            parameter.normal_(0, 0.3)
    return module.to(dtype).eval()


@pairwise(
    widths=[{}, {"kdim": 20}, {"vdim": 12}, {"kdim": 20, "vdim": 12}],
    dtype=DTYPES,
    bias=[True, False],
    batch_first=[True, False],
    padded=[False, True],
)
def test_from_torch(dtype, bias, widths, batch_first, padded):
    module = theirs(dtype, bias=bias, batch_first=batch_first, **widths)
    own = nn.MultiheadAttention.from_torch(module, batch_first=True)
    query = torch.randn(3, 7, 32).to(dtype)
    key = torch.randn(3, 9, module.kdim).to(dtype)
    value = torch.randn(3, 9, module.vdim).to(dtype)
    mask = torch.rand(3, 9) < 0.4 if padded else None
    if padded:
        mask[:, 4] = False  # torch returns NaN if all keys are masked
    side = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    expected, weights = module(side(query), side(key), side(value), key_padding_mask=mask)
    got = own(query, key, value, key_padding_mask=mask)
    assert got.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(got, side(expected), atol=tolerance, rtol=tolerance)
    if not padded:
        mine = own.attention_weights(query, key, slice(None)).mean(1)
        torch.testing.assert_close(mine, weights, atol=tolerance, rtol=tolerance)
    elif dtype == torch.float64:
        mine = own.attention_weights(query, key, slice(None), key_padding_mask=mask).mean(1)
        torch.testing.assert_close(mine, weights)


def test_gradients_from_torch():
    module = theirs()
    own = nn.MultiheadAttention.from_torch(module)
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    future = torch.nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    module(x, x, x, attn_mask=future, is_causal=True)[0].square().sum().backward()
    own(x, causal=True).square().sum().backward()
    parts = [own.q_proj, own.k_proj, own.v_proj]
    torch.testing.assert_close(
        torch.cat([part.weight.grad for part in parts]), module.in_proj_weight.grad
    )
    torch.testing.assert_close(
        torch.cat([part.bias.grad for part in parts]), module.in_proj_bias.grad
    )
    torch.testing.assert_close(own.out_proj.weight.grad, module.out_proj.weight.grad)


def test_from_torch_keeps_attributes():
    module = theirs(torch.float32, dropout=0.3).train()
    module.in_proj_weight.requires_grad_(False)
    own = nn.MultiheadAttention.from_torch(module, similarity="penumbral", position="rope+t5")
    assert own.dropout == 0.3
    assert own.training
    assert {n: p.requires_grad for n, p in own.named_parameters()} == {
        "gamma_theta": True,
        "t5_table": True,
        **{f"{part}_proj.weight": False for part in "qkv"},
        **{f"{part}_proj.bias": True for part in "qkv"},
        "out_proj.weight": True,
        "out_proj.bias": True,
    }
    with torch.no_grad():
        own.q_proj.weight.zero_()
    assert module.in_proj_weight[:32].any()
    assert own.similarity == "penumbral"
    assert not nn.MultiheadAttention.from_torch(module.eval()).training


@pytest.mark.parametrize("widths", [{}, {"kdim": 20, "vdim": 12}], ids=str)
def test_a_state_of_torch_loads(widths):
    module = theirs(torch.float32, **widths)
    model = torch.nn.ModuleDict({"layer": module})
    own = torch.nn.ModuleDict({"layer": nn.MultiheadAttention(32, 4, **widths)})
    own.load_state_dict(model.state_dict())
    x, key, value = (torch.randn(2, 5, n) for n in (32, module.kdim, module.vdim))
    torch.testing.assert_close(own["layer"](x, key, value), module(x, key, value)[0])
    # The converted layer can still load its own state dict.
    copy.deepcopy(own).load_state_dict(own.state_dict())


REFUSED = {
    "add_bias_kv": (
        lambda: nn.MultiheadAttention.from_torch(theirs(add_bias_kv=True)),
        NotImplementedError,
        "add_bias_kv is True; expected False",
    ),
    "add_zero_attn": (
        lambda: nn.MultiheadAttention.from_torch(theirs(add_zero_attn=True)),
        NotImplementedError,
        "add_zero_attn is True; expected False",
    ),
    "a state with bias_k": (
        lambda: nn.MultiheadAttention(32, 4).load_state_dict(theirs(add_bias_kv=True).state_dict()),
        NotImplementedError,
        "the state_dict contains bias_k of add_bias_kv",
    ),
    "a layer with add_zero_attn": (
        lambda: nn.TransformerEncoderLayer.from_torch(with_zero_attn()),
        NotImplementedError,
        "add_zero_attn is True",
    ),
    "length first": (
        lambda: nn.MultiheadAttention.from_torch(theirs(batch_first=False)),
        ValueError,
        r"module has batch_first=False and expects.*drop_in=True.*or batch_first=True",
    ),
    "a drop-in with add_bias_kv": (
        lambda: nn.MultiheadAttention.from_torch(theirs(add_bias_kv=True), drop_in=True),
        NotImplementedError,
        "add_bias_kv is True; expected False",
    ),
    "a drop-in with other heads": (
        lambda: nn.TorchMultiheadAttention(32, 4, similarity="additive"),
        ValueError,
        "which needs a head dimension of 1, but the module has 8",
    ),
    "a mask of a drop-in": (
        lambda: nn.TorchMultiheadAttention(8, 2)(
            *[torch.ones(4, 3, 8)] * 3, attn_mask=torch.ones(3, 3)
        ),
        ValueError,
        r"attn_mask has shape \[3, 3\]; expected \(Lq, Lk\) = \(4, 4\)",
    ),
    "a causal call of a drop-in without a mask": (
        lambda: nn.TorchMultiheadAttention(8, 2)(*[torch.ones(4, 3, 8)] * 3, is_causal=True),
        RuntimeError,
        "is_causal is True but attn_mask is None",
    ),
    "another module": (
        lambda: nn.MultiheadAttention.from_torch(torch.nn.Linear(3, 3)),
        TypeError,
        "module is a Linear; expected a torch.nn.MultiheadAttention",
    ),
    "another layer": (
        lambda: nn.TransformerDecoderLayer.from_torch(torch.nn.TransformerEncoderLayer(8, 2)),
        TypeError,
        "layer is a TransformerEncoderLayer; expected a torch.nn.TransformerDecoderLayer",
    ),
    "heads with one column": (
        lambda: nn.MultiheadAttention.from_torch(theirs(), similarity="additive"),
        ValueError,
        "similarity is 'additive', which needs a head dimension of 1, but the module has 8",
    ),
    "a mask with a wrong shape": (
        lambda: nn.MultiheadAttention(8, 2)(
            torch.ones(2, 3, 8), key_padding_mask=torch.ones(2, 4, dtype=torch.bool)
        ),
        ValueError,
        r"key_padding_mask has shape \[2, 4\]; expected \(B, Lk\) = \(2, 3\)",
    ),
    "an integer mask": (
        lambda: nn.MultiheadAttention(8, 2)(
            torch.ones(2, 3, 8), key_padding_mask=torch.ones(2, 3, dtype=torch.int64)
        ),
        TypeError,
        "key_padding_mask has dtype torch.int64; expected torch.bool",
    ),
    "a mask and segments": (
        lambda: nn.MultiheadAttention(8, 2)(
            torch.ones(2, 3, 8),
            query_segments=[0, 0, 1],
            key_segments=[0, 0, 1],
            key_padding_mask=torch.zeros(2, 3, dtype=torch.bool),
        ),
        ValueError,
        "key_padding_mask and segments are both given",
    ),
    "kdim": (lambda: nn.MultiheadAttention(8, 2, kdim=0), ValueError, "kdim is 0; expected at"),
    "key": (
        lambda: nn.MultiheadAttention(8, 2, kdim=5)(torch.ones(1, 3, 8)),
        ValueError,
        r"key has shape \(1, 3, 8\); expected \(B, L, 5\)",
    ),
    "activation": (
        lambda: nn.TransformerEncoderLayer(8, 2, activation="tanh"),
        ValueError,
        "activation is 'tanh'; expected relu, gelu or a function",
    ),
    "an even table": (
        lambda: nn.resize_grid_table(torch.ones(2, 4, 5), (3, 3)),
        ValueError,
        r"table has shape \[2, 4, 5\]; expected \(H, 2 h - 1, 2 w - 1\)",
    ),
    "axes": (
        lambda: nn.resize_grid_table(torch.ones(2, 3, 5), (3,)),
        ValueError,
        r"shape is \(3,\); expected 2 axes",
    ),
    "a length of 0": (
        lambda: nn.resize_grid_table(torch.ones(2, 3, 5), (3, 0)),
        ValueError,
        r"shape is \(3, 0\); expected positive sizes",
    ),
    "no table": (
        lambda: nn.resize_grid_table([1.0], (3,)),
        TypeError,
        "table is a list; expected a Tensor",
    ),
    "an integer table": (
        lambda: nn.resize_grid_table(torch.ones(2, 3, dtype=torch.int64), (3,)),
        TypeError,
        "table has dtype torch.int64",
    ),
    "no grid": (
        lambda: nn.resize_grid(nn.MultiheadAttention(8, 2, position="rope"), (3, 3)),
        ValueError,
        "module has no position on a grid",
    ),
    "a different number of axes": (
        lambda: nn.resize_grid(nn.MultiheadAttention(8, 2, position="alibi:shape=3x4"), (3,)),
        ValueError,
        r"shape is \(3,\), but alibi:shape=3x4 has the shape \(3, 4\); expected the same number",
    ),
    "a mask for nested tensors": (
        lambda: with_nested(torch.zeros(2, 3, dtype=torch.bool), False),
        NotImplementedError,
        "query is a nested tensor; pass the same tensor as key and value, no masks",
    ),
    "weights of nested tensors": (
        lambda: with_nested(None, True),
        NotImplementedError,
        "query is a nested tensor; .* need_weights=False",
    ),
}


def with_nested(key_padding_mask, need_weights):
    rows = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)])
    layer = nn.TorchMultiheadAttention(8, 2, batch_first=True)
    return layer(rows, rows, rows, key_padding_mask, need_weights)


def with_zero_attn():
    layer = torch.nn.TransformerEncoderLayer(8, 2)
    layer.self_attn.add_zero_attn = True
    return layer


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


MASKS = {
    "none": lambda *sizes: None,
    "booleans": lambda *sizes: (torch.rand(sizes) < 0.3).index_fill(-1, torch.tensor(0), False),
    "numbers": lambda *sizes: torch.randn(sizes, dtype=torch.float64),
    "0 and -inf": lambda *sizes: float_mask(MASKS["booleans"](*sizes)),
}


@pairwise(
    masks=[
        (pairs, keys)
        for pairs, keys in itertools.product(MASKS, repeat=2)
        # torch warns about mixed mask types.
        if "none" in (pairs, keys) or (pairs == "booleans") == (keys == "booleans")
    ],
    widths=[{}, {"kdim": 20, "vdim": 12, "bias": False}],
    batch_first=[True, False],
)
def test_a_drop_in_is_called_as_torch_s_module(masks, widths, batch_first):
    pairs, keys = masks
    module = theirs(batch_first=batch_first, **widths)
    own = nn.MultiheadAttention.from_torch(module, drop_in=True)
    assert isinstance(own, torch.nn.MultiheadAttention)
    assert {n: t.shape for n, t in own.state_dict().items()} == {
        n: t.shape for n, t in module.state_dict().items()
    }
    query, key, value = (
        torch.randn(3, n, columns, dtype=torch.float64).transpose(0, 0 if batch_first else 1)
        for n, columns in ((5, 32), (7, module.kdim), (7, module.vdim))
    )
    hidden = MASKS[keys](3, 7)
    for sizes, average, need in itertools.product(
        [(5, 7), (12, 5, 7)], [True, False], [True, False]
    ):
        arguments = {
            "key_padding_mask": hidden,
            "attn_mask": MASKS[pairs](*sizes),
            "average_attn_weights": average,
            "need_weights": need,
        }
        expected, found = (m(query, key, value, **arguments) for m in (module, own))
        torch.testing.assert_close(found, expected)
    # Compare unbatched inputs, with a per-head mask.
    one = [x[0] if batch_first else x[:, 0] for x in (query, key, value)]
    arguments = {
        "key_padding_mask": None if hidden is None else hidden[0],
        "attn_mask": MASKS[pairs](4, 5, 7),
        "average_attn_weights": False,
    }
    torch.testing.assert_close(own(*one, **arguments), module(*one, **arguments))
    # In a drop-in, need_weights may also select rows of the weights.
    weights = module(query, key, value)[1]
    for rows, chosen in ((-1, [4]), ([0, 3], [0, 3]), (slice(1, 3), [1, 2])):
        torch.testing.assert_close(own(query, key, value, need_weights=rows)[1], weights[:, chosen])


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_drop_in_trains(dropout):
    module = theirs(dropout=dropout).train()
    own = nn.MultiheadAttention.from_torch(module, drop_in=True)
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    bias = torch.randn(8, 6, 6, dtype=torch.float64, requires_grad=True)
    found = own(x, x, x, attn_mask=future, is_causal=True, need_weights=False)
    assert found[1] is None
    if dropout > 0:
        # Dropout scales up the remaining weights, so the mean is preserved.
        mean = sum(own(x, x, x, need_weights=False)[0].detach() for _ in range(800)) / 800
        torch.testing.assert_close(mean, module.eval()(x, x, x)[0].detach(), atol=0.3, rtol=0)
        return
    torch.testing.assert_close(
        found[0], module(x, x, x, attn_mask=future, is_causal=True, need_weights=False)[0]
    )
    gradients = [
        torch.autograd.grad(m(x, x, x, attn_mask=bias)[0].square().sum(), [bias, *m.parameters()])
        for m in (own, module)
    ]
    torch.testing.assert_close(*gradients)
    learned = nn.TorchMultiheadAttention(32, 4, similarity="umbral", position="t5+alibi")
    learned(*[x.float()] * 3)[0].square().sum().backward()
    assert all(p.grad is not None for p in learned.parameters())
    same = copy.deepcopy(learned)
    torch.testing.assert_close(same(*[x.float()] * 3), learned(*[x.float()] * 3))
    compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, attn_mask=future), own(x, x, x, attn_mask=future))


def test_causal_masks_of_positions_that_read_the_order():
    """A causal mask is equivalent to is_causal."""
    torch.manual_seed(0)
    x, future = torch.randn(2, 6, 32), torch.ones(6, 6, dtype=torch.bool).triu(1)
    for place in (
        "t5", "forget", "transformer_xl", "scalable_softmax",
        "log_temperature:kind=smooth:length=2", "relative:max_offset=4:past=true",
        "content_bias:past=true", Relative(torch.randn(5, 8), 4),
    ):  # fmt: skip
        own = nn.TorchMultiheadAttention(32, 4, batch_first=True, position=place)
        layer = nn.TransformerEncoderLayer(32, 4, batch_first=True, position=place).eval()
        if place == "t5":
            torch.nn.init.normal_(own.t5_table)
            torch.nn.init.normal_(layer.self_attn.t5_table)
        expected = own(x, x, x, attn_mask=future, is_causal=True)
        for mask in (future, float_mask(future).float(), future.expand(8, 6, 6)):
            torch.testing.assert_close(own(x, x, x, attn_mask=mask), expected)
            torch.testing.assert_close(layer(x, src_mask=mask), layer(x, is_causal=True))


class Subclass(torch.nn.MultiheadAttention):
    """A subclass like those in projects that extend the layer."""


def swapped(model, **terms):
    """A copy in which every torch.nn.MultiheadAttention is replaced."""
    model = copy.deepcopy(model)
    for name, module in [*model.named_modules()]:
        if isinstance(module, torch.nn.MultiheadAttention):
            parent, _, child = name.rpartition(".")
            own = nn.MultiheadAttention.from_torch(module, drop_in=True, **terms)
            setattr(model.get_submodule(parent), child, own)
    return model


def test_subclasses_are_accepted():
    torch.manual_seed(0)
    module = Subclass(8, 2, batch_first=True).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = module(x, x, x)
    torch.testing.assert_close(
        nn.MultiheadAttention.from_torch(module, drop_in=True)(x, x, x), expected
    )
    torch.testing.assert_close(nn.MultiheadAttention.from_torch(module)(x), expected[0])


@pytest.mark.real_device
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_drop_ins_in_torch_s_transformer(batch_first, norm_first):
    torch.manual_seed(0)
    model = torch.nn.Transformer(
        16, 2, 2, 2, 24, batch_first=batch_first, norm_first=norm_first, dropout=0.0
    )
    model = randomized(model).double()
    own = swapped(model)
    assert sum(isinstance(m, nn.TorchMultiheadAttention) for m in own.modules()) == 6
    source, target = torch.randn(2, 7, 16).double(), torch.randn(2, 5, 16).double()
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    future = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    padding = float_mask(torch.tensor([[0] * 7, [0] * 5 + [1] * 2]).bool())
    arguments = {
        "tgt_mask": future,
        "tgt_is_causal": True,
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    for training in (True, False):
        model.train(training)
        own.train(training)
        torch.testing.assert_close(
            own(source, target, **arguments), model(source, target, **arguments)
        )
    other = swapped(model, similarity="umbral")
    assert not torch.allclose(
        other(source, target, **arguments), model(source, target, **arguments)
    )


@pytest.mark.real_device
@pytest.mark.parametrize("similarity", ["dot", "gaussian"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_torch_s_fused_layer_does_not_take_a_drop_in_s_place(similarity):
    """The drop-in may be inserted before or after the encoder is built; padding is supported."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    model = randomized(torch.nn.TransformerEncoder(layer, 2))
    assert model.use_nested_tensor
    later = swapped(model, similarity=similarity).eval()
    built = torch.nn.TransformerEncoder(swapped(layer, similarity=similarity), 2).eval()
    built.load_state_dict(later.state_dict())
    x = torch.randn(3, 6, 16)
    hidden = torch.arange(6) >= torch.tensor([6, 4, 2])[:, None]
    for padding in (None, hidden):
        with torch.no_grad():
            expected = model(x, src_key_padding_mask=padding)
            fused = [own(x, src_key_padding_mask=padding) for own in (later, built)]
        # If gradients are needed, torch does not use its fused layer.
        slow = later(x, src_key_padding_mask=padding)
        seen = torch.ones(3, 6, dtype=torch.bool) if padding is None else ~padding
        for found in fused:
            torch.testing.assert_close(found[seen], slow[seen], atol=1e-5, rtol=1e-5)
            close = torch.allclose(found[seen], expected[seen], atol=1e-4)
            assert close == (similarity == "dot")


def test_drop_ins_in_torchvision_s_vision_transformer():
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.VisionTransformer(16, 4, 2, 2, 16, 24, num_classes=5).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the classification head starts at 0
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    own = swapped(model)
    torch.testing.assert_close(own(images), model(images))
    # There are 16 patches after the class token.
    other = swapped(model, similarity="penumbral", position="grid_bias:shape=4x4:prefix=1")
    other(images).square().sum().backward()
    learned = [p for n, p in other.named_parameters() if "gamma_theta" in n or "grid_bias" in n]
    # The model reads only the last layer's class token, which is outside the grid.
    assert [bool((p.grad != 0).any()) for p in learned] == [True, True, True, False]


OPTIONS = {
    "batch_first": [False, True],
    "norm_first": [False, True],
    "bias": [True, False],
    "activation": ["relu", "gelu", torch.nn.functional.silu],
    "layer_norm_eps": [1e-5, 0.1],
}


@pytest.fixture
def variant(batch_first, norm_first, bias, activation, layer_norm_eps):
    values = (batch_first, norm_first, bias, activation, layer_norm_eps)
    return dict(zip(OPTIONS, values, strict=True))


def randomized(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
    return layer.eval()


def float_mask(mask):
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf).double()


@pairwise(
    masked=["no", "causal", "padding", "both", "floats", "any", "each head", "added"], **OPTIONS
)
def test_encoder_layers(variant, masked):
    torch.manual_seed(0)
    layer = randomized(torch.nn.TransformerEncoderLayer(16, 2, 24, **variant)).double()
    own = nn.TransformerEncoderLayer.from_torch(layer)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    if not variant["batch_first"]:
        x = x.transpose(0, 1)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]]).bool()
    if masked == "floats":
        future, padding = float_mask(future), float_mask(padding)
    arguments = {}
    if masked in ("causal", "both", "floats"):
        arguments["src_mask"] = future
    if masked in ("padding", "both", "floats"):
        arguments["src_key_padding_mask"] = padding
    if masked in ("any", "each head"):
        hidden = torch.rand(*([6] * (masked == "each head")), 5, 5) < 0.4
        arguments["src_mask"] = hidden & ~torch.eye(5, dtype=torch.bool)
    if masked == "added":
        arguments["src_mask"] = torch.randn(5, 5, dtype=torch.float64)
        arguments["src_key_padding_mask"] = torch.randn(3, 5, dtype=torch.float64)
    expected = layer(x, **arguments)
    assert expected.isfinite().all()
    torch.testing.assert_close(own(x, **arguments), expected)
    if masked == "causal":
        torch.testing.assert_close(own(x, is_causal=True), expected)
        assert not torch.allclose(own(x), expected)
    # Our layer accepts the state dict of torch's layer.
    fresh = nn.TransformerEncoderLayer(16, 2, 24, **variant).double().eval()
    fresh.load_state_dict(layer.state_dict())
    torch.testing.assert_close(fresh(x, **arguments), expected)


@pairwise(masked=["no", "causal", "padding", "memory"], **OPTIONS)
def test_decoder_layers(variant, masked):
    torch.manual_seed(0)
    layer = randomized(torch.nn.TransformerDecoderLayer(16, 2, 24, **variant)).double()
    own = nn.TransformerDecoderLayer.from_torch(layer)
    x, memory = (torch.randn(2, n, 16, dtype=torch.float64) for n in (5, 7))
    if not variant["batch_first"]:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    arguments = {
        "no": {},
        "causal": {"tgt_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        "padding": {
            "tgt_key_padding_mask": torch.tensor([[0, 0, 1, 0, 1], [0] * 5]).bool(),
            "memory_key_padding_mask": torch.tensor([[0] * 7, [1, 0, 0, 0, 1, 1, 0]]).bool(),
        },
        "memory": {"memory_mask": torch.ones(5, 7, dtype=torch.bool).triu(1)},
    }[masked]
    expected = layer(x, memory, **arguments)
    torch.testing.assert_close(own(x, memory, **arguments), expected)
    if masked == "causal":
        torch.testing.assert_close(own(x, memory, tgt_is_causal=True), expected)
    fresh = nn.TransformerDecoderLayer(16, 2, 24, **variant).double().eval()
    fresh.load_state_dict(layer.state_dict())
    torch.testing.assert_close(fresh(x, memory, **arguments), expected)


@pytest.mark.parametrize("batch_first", [True, False])
def test_stacks_of_torch_take_our_layers(batch_first):
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=batch_first),
        2,
        enable_nested_tensor=False,
    )
    decoder = torch.nn.TransformerDecoder(
        torch.nn.TransformerDecoderLayer(16, 2, 24, batch_first=batch_first), 2
    )
    own_encoder = torch.nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 24, batch_first=batch_first),
        2,
        enable_nested_tensor=False,
    )
    own_decoder = torch.nn.TransformerDecoder(
        nn.TransformerDecoderLayer(16, 2, 24, batch_first=batch_first), 2
    )
    for own, original in ((own_encoder, encoder), (own_decoder, decoder)):
        own.load_state_dict(randomized(original).state_dict())
        own.eval()
    x, y = torch.randn(6, 6, 16), torch.randn(6, 6, 16)
    future = torch.nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.zeros(6, 6, dtype=torch.bool)
    padding[2, 4:] = True
    for arguments in ({}, {"mask": future}, {"src_key_padding_mask": padding}):
        torch.testing.assert_close(
            own_encoder(x, **arguments), encoder(x, **arguments), atol=1e-4, rtol=1e-4
        )
    arguments = {"tgt_mask": future, "memory_key_padding_mask": padding}
    torch.testing.assert_close(
        own_decoder(y, x, **arguments), decoder(y, x, **arguments), atol=1e-4, rtol=1e-4
    )


def test_layers_without_a_batch():
    torch.manual_seed(0)
    layer = randomized(torch.nn.TransformerDecoderLayer(16, 2, 24)).double()
    own = nn.TransformerDecoderLayer.from_torch(layer)
    x, memory = torch.randn(5, 16).double(), torch.randn(7, 16).double()
    hidden = torch.tensor([0, 0, 0, 1, 0]).bool()
    torch.testing.assert_close(
        own(x, memory, tgt_key_padding_mask=hidden), layer(x, memory, tgt_key_padding_mask=hidden)
    )


@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_layers_with_another_similarity_and_position_train(kind):
    torch.manual_seed(0)
    slopes = torch.nn.Parameter(gnomon.alibi_slopes(2))
    layer = getattr(nn, f"Transformer{kind}Layer")(
        16,
        2,
        24,
        dropout=0.1,
        batch_first=True,
        similarity="penumbral",
        position=RoPE() + ALiBi(slopes),
    )
    assert layer.self_attn.alibi_slopes is slopes
    assert layer.self_attn.similarity == "penumbral"
    assert layer.self_attn.dropout == 0.1
    if kind == "Decoder":
        assert layer.multihead_attn.similarity == "penumbral"
        assert layer.multihead_attn.position == "none"
    x, target = torch.randn(4, 9, 16), torch.randn(4, 9, 16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    losses = []
    for _ in range(12):
        inputs = (x, target) if kind == "Decoder" else (x,)
        loss = (layer(*inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < sum(losses[:3])
    assert all(not torch.equal(p, before[name]) for name, p in layer.named_parameters())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("old", "new"),
    [((3, 4), (6, 5)), ((4, 4), (2, 7)), ((5,), (9,)), ((2, 3, 4), (4, 3, 2)), ((1, 3), (3, 1))],
    ids=str,
)
def test_resized_tables(old, new, dtype):
    torch.manual_seed(0)
    sizes = [2 * n - 1 for n in old]
    table = torch.randn(2, *sizes).to(dtype)
    resized = nn.resize_grid_table(table, new)
    assert resized.dtype == dtype
    assert resized.shape == (2, *[2 * n - 1 for n in new])
    # Offset 0 and the farthest offsets are unchanged.
    middle, its = [tuple(n - 1 for n in shape) for shape in (old, new)]
    torch.testing.assert_close(resized[(slice(None), *its)], table[(slice(None), *middle)])
    if all(n > 1 for n in new):
        corner = (slice(None), *[-1] * len(old))
        torch.testing.assert_close(resized[corner], table[corner])
    assert torch.equal(nn.resize_grid_table(table, old), table)


def test_a_linear_table_stays_linear():
    # A table that is linear in the offset as a fraction of the farthest offset stays linear at
    # every resolution.
    old = torch.linspace(-1, 1, 7).double()[None, :, None] + 2 * torch.linspace(-1, 1, 7).double()
    new = torch.linspace(-1, 1, 13).double()[None, :, None] + 2 * torch.linspace(-1, 1, 13).double()
    inner = (slice(None), slice(2, -2), slice(2, -2))  # bicubic interpolation deviates at the edges
    torch.testing.assert_close(nn.resize_grid_table(old, (7, 7))[inner], new[inner])


def test_a_grid_that_does_not_fit_changes_nothing():
    parts = ("grid_bias:shape=3x3", "offset_bias:shape=3x3")
    model = torch.nn.Sequential(*(nn.MultiheadAttention(8, 2, position=part) for part in parts))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="one table for all axes; expected axes of equal length"):
        nn.resize_grid(model, (3, 4))
    assert [layer.position for layer in model] == list(parts)
    model.load_state_dict(before)


@pytest.mark.parametrize(
    "position",
    [
        "grid_bias:shape=3x4",
        "grid_bias:shape=3x4:prefix=2",
        "relative2d:shape=3x4",
        "relative2d:shape=3x4:per_head=true",
        "offset_bias:shape=3x4:axis=0+offset_bias:shape=3x4:axis=1",
        "alibi:shape=3x4+hype:shape=3x4:tau=learned+rope:shape=3x4",
        "t5:shape=3x4:axis=1+grid_bias:shape=3x4",
        "grid_bias:shape=3x4+alibi:shape=3x4:slopes=learned+grid_bias:shape=3x4",
    ],
)
def test_modules_move_to_another_grid(position):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 2, position=position).double()
    with torch.no_grad():
        for name in module._term_names:
            getattr(module, name).normal_(0, 0.2)
    before = copy.deepcopy(module)
    assert nn.resize_grid(module, (6, 8)) is module
    prefix = 2 if "prefix" in position else 0
    assert module(torch.randn(1, 48 + prefix, 32).double()).isfinite().all()
    with pytest.raises(ValueError, match="6x8"):
        module(torch.randn(1, 12 + prefix, 32).double())
    fresh = nn.MultiheadAttention(32, 2, position=position.replace("3x4", "6x8")).double()
    fresh.load_state_dict(module.state_dict())  # the same names and shapes
    # Resizing back would restore only linear tables, but it always restores names and shapes.
    nn.resize_grid(module, (3, 4))
    assert module.position == before.position
    assert [(n, p.shape, p.requires_grad) for n, p in module.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in before.named_parameters()
    ]


def test_terms_move_to_another_grid():
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(2, 5, 7))
    module = nn.MultiheadAttention(8, 2, position=GridBias(table) + RoPE(shape=(3, 4)))
    nn.resize_grid(module, (6, 8))
    assert torch.equal(module.grid_bias_table, nn.resize_grid_table(table, (6, 8)))
    assert module(torch.randn(1, 48, 8)).isfinite().all()
    axes = [ALiBi(torch.rand(2)), OffsetBias(torch.randn(2, 7))]
    module = nn.MultiheadAttention(8, 2, position=Grid((3, 4), axes))
    nn.resize_grid(module, [2, 9])
    assert module.offset_bias_table.shape == (2, 17)
    assert module(torch.randn(1, 18, 8)).isfinite().all()


def test_a_model_moves_to_another_grid():
    class Model(torch.nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.position = nn.TokenPosition(f"sinusoidal:shape={shape}+learned:length=99", 8, 12)
            self.blocks = torch.nn.ModuleList(
                nn.MultiheadAttention(8, 2, position=f"grid_bias:shape={shape}") for _ in range(2)
            )

        def forward(self, x):
            x = self.position(x)
            for block in self.blocks:
                x = x + block(x)
            return x

    model = nn.resize_grid(Model("3x4"), (5, 6))
    assert model.position.max_length == 30
    other = Model("5x6")
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, 30, 8)
    torch.testing.assert_close(model(x), other(x))
    assert model.blocks[1].grid_bias_table.requires_grad
