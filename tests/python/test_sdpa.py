"""gnomon.scaled_dot_product_attention compared with the math kernel of PyTorch's function."""

import inspect
import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from formulas import generator_of
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

import gnomon

TORCHS = F.scaled_dot_product_attention


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def formula(*tensors, **arguments):
    """PyTorch's function with its math kernel, whichever kernel it would select."""
    with sdpa_kernel(SDPBackend.MATH):
        return TORCHS(*tensors, **arguments)


def results(function, tensors, arguments):
    leaves = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in tensors]
    o = function(*leaves, **arguments)
    learned = [x for x in leaves if x.requires_grad]
    d_o = torch.randn(o.shape, generator=generator_of(1), dtype=o.dtype)
    return [o.detach(), *torch.autograd.grad(o, learned, d_o)]


def check(*tensors, **arguments):
    ours = results(gnomon.scaled_dot_product_attention, tensors, arguments)
    theirs = results(formula, tensors, arguments)
    for own, expected in zip(ours, theirs, strict=True):
        assert own.shape == expected.shape
        torch.testing.assert_close(own, expected, atol=1e-11, rtol=1e-11)


# For each call: the shapes of query, key and value, and the arguments.
CALLS = {
    "two axes": ((3, 4), (5, 4), (5, 6), {}),
    "three axes": ((2, 3, 4), (2, 5, 4), (2, 5, 6), {}),
    "five axes": ((2, 3, 2, 3, 4), (2, 3, 2, 5, 4), (2, 3, 2, 5, 4), {}),
    "query with more axes": ((2, 2, 3, 4), (2, 5, 4), (2, 5, 6), {}),
    "query with fewer axes": ((3, 4), (2, 5, 4), (2, 5, 6), {}),
    "keys with batch size 1": ((2, 3, 3, 4), (1, 3, 5, 4), (1, 3, 5, 4), {}),
    "queries with batch size 1": ((1, 3, 3, 4), (2, 1, 5, 4), (2, 1, 5, 4), {}),
    "keys and values of different shapes": ((1, 3, 3, 4), (1, 3, 5, 4), (2, 1, 5, 4), {}),
    "only values have several heads": ((1, 1, 3, 4), (1, 1, 5, 4), (1, 3, 5, 4), {}),
    "five axes of size 1": ((2, 1, 2, 3, 4), (3, 2, 5, 4), (2, 3, 1, 5, 4), {}),
    "no columns": ((2, 3, 3, 0), (2, 3, 5, 0), (2, 3, 5, 4), {}),
    "values without columns": ((2, 3, 3, 4), (2, 3, 5, 4), (2, 3, 5, 0), {}),
    "no keys": ((2, 3, 3, 4), (2, 3, 0, 4), (2, 3, 0, 4), {}),
    "no queries": ((2, 3, 0, 4), (2, 3, 5, 4), (2, 3, 5, 4), {}),
    "no batch": ((0, 3, 3, 4), (0, 3, 5, 4), (0, 3, 5, 4), {}),
    "no heads": ((2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 4), {}),
    "causal": ((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4), {"is_causal": True}),
    "causal with more keys": ((2, 3, 3, 4), (2, 3, 5, 4), (2, 3, 5, 4), {"is_causal": True}),
    "causal with more queries": ((3, 5, 4), (3, 3, 4), (3, 3, 4), {"is_causal": True}),
    "grouped heads": ((2, 6, 3, 4), (2, 3, 5, 4), (2, 3, 5, 4), {"enable_gqa": True}),
    "grouped, three axes": ((6, 3, 4), (3, 5, 4), (3, 5, 4), {"enable_gqa": True}),
    "grouped, five axes": (
        (2, 2, 6, 3, 4), (2, 2, 3, 5, 4), (2, 2, 3, 5, 4), {"enable_gqa": True, "is_causal": True},
    ),
    "grouped, different key and value heads": (
        (2, 6, 3, 4), (2, 3, 5, 4), (2, 2, 5, 4), {"enable_gqa": True},
    ),
    "grouped, batch size 1": ((2, 6, 3, 4), (1, 3, 5, 4), (1, 1, 5, 4), {"enable_gqa": True}),
    "a scale": ((2, 6, 3, 4), (2, 6, 5, 4), (2, 6, 5, 4), {"scale": -1.5}),
    "scale 0": ((2, 6, 3, 4), (2, 6, 5, 4), (2, 6, 5, 4), {"scale": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name):
    torch.manual_seed(0)
    *shapes, arguments = CALLS[name]
    check(*(draw(*shape) for shape in shapes), **arguments)


def masks_of(kind, shape):
    """A Boolean mask with a row that attends to no key, or a numeric mask with some -inf."""
    hidden = torch.rand(shape) > 0.6
    if kind == "bool":
        if len(shape) > 1 and shape[-2] > 1:
            hidden[..., 0, :] = True
        return ~hidden
    return draw(*shape).masked_fill(hidden, -math.inf)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("axes", range(5))
def test_masks_of_every_broadcastable_shape(axes, kind):
    """A numeric mask may require a gradient."""
    torch.manual_seed(0)
    q, k, v = draw(2, 3, 4, 4), draw(2, 3, 5, 4), draw(2, 3, 5, 6)
    whole = (2, 3, 4, 5)
    for full in itertools.product((False, True), repeat=axes):
        shape = [n if is_full else 1 for n, is_full in zip(whole[4 - axes :], full, strict=True)]
        check(q, k, v, masks_of(kind, shape))


MASKS_OF_AXES = {
    "two": ((4, 4), (5, 4), (4, 5)),
    "three": ((3, 4, 4), (3, 5, 4), (3, 4, 5)),
    "five": ((2, 3, 2, 4, 4), (2, 3, 2, 5, 4), (2, 1, 2, 4, 5)),
    "five axes, by key": ((2, 3, 2, 4, 4), (2, 3, 2, 5, 4), (1, 1, 2, 1, 5)),
    "five axes, mask with four": ((2, 3, 2, 4, 4), (2, 3, 2, 5, 4), (3, 1, 4, 5)),
    "grouped heads": ((2, 6, 4, 4), (2, 2, 5, 4), (6, 4, 5)),
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", MASKS_OF_AXES)
def test_masks_of_other_axes(name, kind):
    torch.manual_seed(0)
    queries, keys, mask = MASKS_OF_AXES[name]
    arguments = {"enable_gqa": True} if name == "grouped heads" else {}
    check(draw(*queries), draw(*keys), draw(*keys), masks_of(kind, mask), **arguments)


def test_rows_that_see_nothing_are_zero():
    torch.manual_seed(0)
    q, k, v = (draw(2, 3, 5, 4) for _ in range(3))
    for mask in (torch.zeros(5, 5, dtype=torch.bool), torch.full((5, 5), -math.inf).double()):
        found = results(gnomon.scaled_dot_product_attention, (q, k, v, mask), {})
        assert not any(x.any() for x in found)
    # The lowest finite number hides a key only in rows that attend to other keys.
    least = torch.full((5, 5), torch.finfo(torch.float64).min, dtype=torch.float64)
    check(q, k, v, least)
    check(q, k, v, least.tril(-1))
    q, k, v = q.float(), k.float(), v.float()
    mask = torch.full((5, 5), torch.finfo(torch.float32).min)
    o = gnomon.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(o, v.mean(2, keepdim=True).expand_as(o))


@pytest.mark.parametrize("make", [bias.causal_upper_left, bias.causal_lower_right])
def test_causal_biases_of_pytorch(make):
    torch.manual_seed(0)
    q, k, v = draw(2, 3, 4, 4), draw(2, 3, 7, 4), draw(2, 3, 7, 4)
    mask = make(4, 7)
    ours = gnomon.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(ours, formula(q, k, v, mask._materialize(q.device)))
    with pytest.raises(ValueError, match="attn_mask is a causal bias for 4 queries and 7 keys"):
        gnomon.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["bool", "own", "float32"])
def test_masks_of_lower_types(dtype, kind):
    torch.manual_seed(0)
    q, k, v = (draw(2, 3, 8, 16).to(dtype) for _ in range(3))
    mask = masks_of("bool" if kind == "bool" else "float", (8, 8))
    mask = mask.to({"own": dtype, "float32": torch.float32}.get(kind, torch.bool))
    ours = gnomon.scaled_dot_product_attention(q, k, v, mask)
    assert ours.dtype == dtype
    wide = mask if kind == "bool" else mask.double()
    expected = formula(q.double(), k.double(), v.double(), wide)
    error = (ours.double() - expected).abs().max()
    theirs = (formula(q, k, v, mask).double() - expected).abs().max()
    assert error <= max(2 * theirs, 1e-5)


def test_signature_is_pytorchs():
    signature = inspect.signature(gnomon.scaled_dot_product_attention)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    empty = inspect.Parameter.empty
    assert list(defaults.items()) == [
        ("query", empty), ("key", empty), ("value", empty), ("attn_mask", None), ("dropout_p", 0.0),
        ("is_causal", False), ("scale", None), ("enable_gqa", False),
    ]  # fmt: skip


WRONG = {
    "one axis": (ValueError, "query has shape", (draw(4), draw(4), draw(4))),
    "other types": (TypeError, "key is torch.float32", (draw(3, 4), torch.ones(3, 4), draw(3, 4))),
    "integers": (TypeError, "dtype", (draw(1, 1, 3, 4).int(),) * 3),
    "other columns": (ValueError, "key has head_dim 5", (draw(3, 4), draw(5, 5), draw(5, 4))),
    "other lengths": (ValueError, "value has length 6", (draw(3, 4), draw(5, 4), draw(6, 4))),
    "heads without enable_gqa": (
        ValueError, "enable_gqa=True", (draw(2, 6, 3, 4), draw(2, 3, 5, 4), draw(2, 3, 5, 4)),
    ),
    "other batches": (ValueError, "broadcast", (draw(2, 1, 3, 4), draw(3, 1, 5, 4), draw(5, 4))),
}  # fmt: skip
WRONG_ARGUMENTS = {
    "head counts that do not divide": (
        ValueError, "query has 3 heads and key has 2", {"enable_gqa": True},
    ),
    "a mask and is_causal": (
        ValueError, "one of them", {"attn_mask": torch.ones(3, 5).bool(), "is_causal": True},
    ),
    "a mask of integers": (TypeError, "attn_mask has dtype", {"attn_mask": torch.ones(3, 5).int()}),
    "a mask of a different dtype": (
        TypeError, "attn_mask has dtype", {"attn_mask": torch.ones(3, 5).half()},
    ),
    "a mask of a wrong shape": (ValueError, "attn_mask has", {"attn_mask": torch.ones(3, 4) > 0}),
    "a larger mask": (ValueError, "attn_mask has shape", {"attn_mask": torch.ones(2, 1, 3, 5) > 0}),
    "a mask with too many axes": (
        ValueError, "attn_mask has shape", {"attn_mask": torch.ones(1, 1, 1, 3, 5) > 0},
    ),
    "a list": (TypeError, "attn_mask is a list", {"attn_mask": [[True] * 5] * 3}),
    "dropout": (ValueError, "dropout_p is 1.5; expected a probability", {"dropout_p": 1.5}),
    "less dropout": (ValueError, "dropout_p is -1; expected a probability", {"dropout_p": -1}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*WRONG, *WRONG_ARGUMENTS])
def test_errors_where_pytorch_has_them(name):
    arguments = {}
    if name in WRONG:
        error, message, tensors = WRONG[name]
    else:
        error, message, arguments = WRONG_ARGUMENTS[name]
        heads = 2 if "enable_gqa" in arguments else 3
        tensors = draw(1, 3, 3, 4), draw(1, heads, 5, 4), draw(1, heads, 5, 4)
    device = torch.get_default_device()
    tensors = [x.to(device) for x in tensors]
    with pytest.raises(error, match=message):
        gnomon.scaled_dot_product_attention(*tensors, **arguments)
    # PyTorch's formula treats a negative dropout as 0.
    if not isinstance(arguments.get("attn_mask"), list) and arguments.get("dropout_p") != -1:
        with pytest.raises((RuntimeError, IndexError)):
            formula(*tensors, **arguments)


def test_dropout_is_drawn_from_the_default_generator():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 64, 8).unbind()

    def dropped(seed, rate=0.25):
        torch.manual_seed(seed)
        return gnomon.scaled_dot_product_attention(q, k, v, dropout_p=rate)

    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))
    assert not dropped(1, 1.0).any()
    # Dropout scales up the other weights, so the mean is preserved.
    one = torch.ones_like(v)
    torch.manual_seed(3)
    sums = gnomon.scaled_dot_product_attention(torch.zeros_like(q), k, one, dropout_p=0.25)
    assert abs(float(sums.mean()) - 1) < 0.05
    assert sums.std() > 0.02


@pytest.mark.real_device
@pytest.mark.parametrize("name", ["causal", "float", "gqa", "dropout"])
def test_compiled_in_one_graph(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    mask, arguments = None, {}
    if name == "float":
        mask = masks_of(name, (2, 1, 6, 6)).float().requires_grad_()
    elif name == "gqa":
        q, k, v = q[0], k[0, :2], v[0, :2]
        arguments = {"enable_gqa": True}
    elif name == "causal":
        arguments = {"is_causal": True}
    elif name == "dropout":
        arguments = {"dropout_p": 0.5}

    def step(q, k, v, mask):
        return gnomon.scaled_dot_product_attention(q, k, v, mask, **arguments)

    def seeded(function):
        torch.manual_seed(1)
        return function(q, k, v, mask)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    ours, expected = seeded(compiled), seeded(step)
    torch.testing.assert_close(ours, expected)
    learned = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
    for own, of_eager in zip(
        torch.autograd.grad(ours.sum(), learned),
        torch.autograd.grad(expected.sum(), learned),
        strict=True,
    ):
        torch.testing.assert_close(own, of_eager)


def test_vmap():
    torch.manual_seed(0)
    q, k, v, mask = draw(3, 2, 4, 8), draw(3, 2, 5, 8), draw(3, 2, 5, 8), draw(3, 4, 5)
    ours = torch.func.vmap(gnomon.scaled_dot_product_attention)(q, k, v, mask)
    torch.testing.assert_close(ours, formula(q, k, v, mask[:, None]))

    def loss(q, mask):
        return gnomon.scaled_dot_product_attention(q, k[0], v[0], mask).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(q, mask)
    for n in range(3):
        for own, expected in zip(
            gradients, torch.func.grad(loss, argnums=(0, 1))(q[n], mask[n]), strict=True
        ):
            torch.testing.assert_close(own[n], expected)


def test_autocast():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    mask = torch.randn(6, 6)
    with torch.autocast(q.device.type, torch.bfloat16):
        ours = gnomon.scaled_dot_product_attention(q, k, v, mask)
        expected = TORCHS(q, k, v, mask)
    assert ours.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected, atol=0.02, rtol=0.02)


@pytest.fixture
def calls(monkeypatch):
    """Counts calls to gnomon that replace calls to PyTorch."""
    count = []

    def replacement(*tensors, **arguments):
        count.append(1)
        return gnomon.scaled_dot_product_attention(*tensors, **arguments)

    def install():
        monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)

    return install, count


def same_with_it(calls, module, *inputs, **arguments):
    install, count = calls
    module = module.double()

    def run():
        module.zero_grad()
        o = module(*inputs, **arguments)
        o = o[0] if isinstance(o, tuple) else o
        o.square().sum().backward()
        return [o.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]

    expected = run()
    install()
    ours = run()
    assert count
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both"])
def test_torch_multihead_attention_with_it(calls, mask):
    torch.manual_seed(0)
    x = draw(2, 7, 16)
    arguments = {"need_weights": False}
    if mask in ("causal", "both"):
        arguments["attn_mask"] = torch.nn.Transformer.generate_square_subsequent_mask(
            7, dtype=torch.float64
        )
        arguments["is_causal"] = True
    if mask in ("padding", "both"):
        arguments["key_padding_mask"] = torch.arange(7) > torch.tensor([[4], [6]])
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    if mask == "both":
        arguments["key_padding_mask"] = (
            torch.zeros(2, 7).double().masked_fill(arguments["key_padding_mask"], -math.inf)
        )
    same_with_it(calls, module, x, x, x, **arguments)


def test_torch_encoder_layer_with_it(calls):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    same_with_it(
        calls, layer, draw(2, 7, 16), src_key_padding_mask=torch.arange(7).repeat(2, 1) > 4
    )


def test_timm_vision_transformer_with_it(calls):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=5
    )
    same_with_it(calls, model, draw(2, 3, 16, 16))
