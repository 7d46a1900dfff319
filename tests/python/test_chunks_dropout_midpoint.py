"""Tests chunks, dropout and the Einstein midpoint, and the corresponding module arguments."""

from __future__ import annotations

import math

import formulas
import pytest
import torch
from formulas import SIMILARITIES, Case, Mask

import gnomon
from gnomon.position import ALiBi, Relative


def tokens(*shape: int, count: int = 3, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=dtype) for _ in range(count)]


# Relative local attention (Huang et al. 2019): queries attend to their own block and the previous
# one. The formula splits the sequence into blocks.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("similarity", ["dot", "penumbral"])
def test_chunks_are_blocks_that_see_the_one_before(similarity, dtype):
    size, count = 7, 6
    case = Case(similarity, batch=2, heads=2, key_heads=2, queries=size * count, keys=size * count)
    inputs = case.inputs() | {"table": torch.randn(2 * size, 8, dtype=torch.float64) / 3}
    inputs = {name: x.to(dtype) for name, x in inputs.items()}

    def ours(p):
        return gnomon.attention(
            p["q"], p["k"], p["v"], similarity=SIMILARITIES[similarity].ours(p),
            position=Relative(p["table"], 2 * size - 1), causal=True, chunks=(size, 1, 0),
            return_lse=True,
        )  # fmt: skip

    def theirs(p):
        scores = SIMILARITIES[similarity].scores(p, p["q"], p["k"])
        outputs = []
        for block in range(count):
            rows = slice(block * size, (block + 1) * size)
            columns = slice(max(block - 1, 0) * size, (block + 1) * size)
            i = torch.arange(rows.start, rows.stop)[:, None]
            j = torch.arange(columns.start, columns.stop)
            content = torch.einsum(
                "bhid,ijd->bhij",
                p["q"][:, :, rows],
                p["table"][(j - i).clamp_max(0) + 2 * size - 1],
            )
            part = scores[:, :, rows, columns] + content / math.sqrt(8)
            part = part.masked_fill(j > i, -math.inf)
            outputs.append((part.softmax(-1) @ p["v"][:, :, columns], part.logsumexp(-1)))
        return torch.cat([o for o, _ in outputs], 2), torch.cat([lse for _, lse in outputs], 2)

    formulas.check(ours, theirs, inputs, dtype)


@pytest.mark.parametrize("offset", [-11, 0, 5, 23])
def test_chunks_of_positions_of_any_sign(offset):
    q, k, v = tokens(1, 1, 30, 4)
    q = q[:, :, :13]
    o = gnomon.attention(q, k, v, chunks=(5, 1, 2), query_offset=offset)
    i, j = torch.arange(13)[:, None] + offset, torch.arange(30)
    distance = j.div(5, rounding_mode="floor") - i.div(5, rounding_mode="floor")
    visible = (distance >= -1) & (distance <= 2)
    scores = (q @ k.mT / 2).masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(o, weights @ v)


def test_wrong_chunks():
    q, k, _ = tokens(1, 1, 4, 4)
    for chunks in ((0, 1, 1), (4, -1, 0), (4, 1)):
        with pytest.raises(ValueError, match="chunks is"):
            gnomon.attention(q, k, k, chunks=chunks)
    with pytest.raises(TypeError, match="chunks"):
        gnomon.attention(q, k, k, chunks=(4.0, 1, 1))
    with pytest.raises(ValueError, match="chunks requires query_offset"):
        gnomon.attention(q, k[:, :, :3], k[:, :, :3], chunks=(4, 1, 1))


def dropped_weights(
    rate: float, seed: int, **keywords: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of 64 tokens without and with dropout, read from outputs for one-hot values."""
    q, k = tokens(2, 3, 64, 8, count=2)
    v = torch.eye(64, dtype=q.dtype).expand(2, 3, 64, 64)
    return (
        gnomon.attention(q, k, v, **keywords),
        gnomon.attention(q, k, v, dropout=rate, seed=seed, **keywords),
    )


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_dropout_keeps_or_drops_each_weight(rate):
    all_of_them, some = dropped_weights(rate, 7, causal=True)
    kept = some != 0
    torch.testing.assert_close(some[kept], (all_of_them / (1 - rate))[kept])
    seen = torch.ones(64, 64, dtype=torch.bool).tril().expand_as(some)
    count = int(seen.sum())
    share = float(kept[seen].double().mean())
    assert abs(share - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / count)
    assert (dropped_weights(1.0, 7)[1] == 0).all()


def test_the_mask_of_dropout_can_be_computed_again():
    q, k, v = tokens(1, 2, 40, 8)
    first = gnomon.attention(q, k, v, dropout=0.5, seed=3)
    assert torch.equal(first, gnomon.attention(q, k, v, dropout=0.5, seed=3))
    assert not torch.equal(first, gnomon.attention(q, k, v, dropout=0.5, seed=4))
    torch.manual_seed(5)
    drawn = gnomon.attention(q, k, v, dropout=0.5)
    assert not torch.equal(drawn, gnomon.attention(q, k, v, dropout=0.5))
    torch.manual_seed(5)
    assert torch.equal(drawn, gnomon.attention(q, k, v, dropout=0.5))
    # The mask depends only on a pair's indices, so float32 and float64 drop the same weights.
    torch.testing.assert_close(
        gnomon.attention(q.float(), k.float(), v.float(), dropout=0.5, seed=3).double(),
        first,
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("similarity", ["dot", "umbral"])
def test_gradients_of_dropout(similarity, dtype):
    case = Case(similarity, "alibi", key_heads=2, queries=20, keys=20, mask=Mask(causal=True))
    inputs = case.inputs() | {
        "table": torch.randn(9, 8, dtype=torch.float64) / 3,
        "values": torch.randn(9, 5, dtype=torch.float64) / 3,
    }
    inputs = {name: x.to(dtype) for name, x in inputs.items()}

    def ours(p, v=None):
        return gnomon.attention(
            p["q"], p["k"], p["v"] if v is None else v,
            similarity=SIMILARITIES[similarity].ours(p),
            position=[*case.positions(p), Relative(p["table"], 4, values=p["values"])],
            causal=True, dropout=0.4, seed=9, return_lse=True,
        )  # fmt: skip

    # With one-hot values, the output reveals the dropout mask.
    with torch.no_grad():
        double = {name: x.double() for name, x in inputs.items()}
        unit = torch.eye(20, dtype=torch.float64).expand(2, 2, 20, 20)
        parameters = double | {"values": torch.zeros(9, 20, dtype=torch.float64)}
        kept = ours(parameters, unit)[0] != 0

    def theirs(p):
        i, j = torch.arange(20)[:, None], torch.arange(20)
        index = (j - i).clamp(-4, 4) + 4
        content = torch.einsum("bhid,ijd->bhij", p["q"], p["table"][index]) / math.sqrt(8)
        scores = case.scores(p) + content
        weights = scores.softmax(-1) * kept / 0.6
        v = p["v"].repeat_interleave(2, 1)
        o = weights @ v + torch.einsum("bhij,ijd->bhid", weights, p["values"][index])
        return o, scores.logsumexp(-1)

    formulas.check(ours, theirs, inputs, dtype)


def test_wrong_dropout():
    q, k, v = tokens(1, 1, 4, 4)
    for rate in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="dropout is"):
            gnomon.attention(q, k, v, dropout=rate)
    with pytest.raises(TypeError, match="dropout is a str"):
        gnomon.attention(q, k, v, dropout="a lot")
    with pytest.raises(TypeError, match="seed is a float"):
        gnomon.attention(q, k, v, dropout=0.1, seed=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("similarity", ["dot", "hyperboloid", "penumbral"])
def test_einstein_midpoint(similarity, dtype):
    case = Case(similarity, "alibi", key_heads=2, mask=Mask(key_lengths=(13, 9)))
    inputs = case.inputs()
    v = inputs["v"]
    inputs["v"] = v / v.norm(dim=-1, keepdim=True) * torch.rand(*v.shape[:-1], 1).double() * 0.9
    inputs = {name: x.to(dtype) for name, x in inputs.items()}

    def ours(p):
        return gnomon.attention(
            p["q"], p["k"], p["v"], similarity=SIMILARITIES[similarity].ours(p),
            position=case.positions(p), aggregation="einstein_midpoint", return_lse=True,
            **case.mask.arguments(case.batch),
        )  # fmt: skip

    def theirs(p):
        values = p["v"].repeat_interleave(2, 1)
        factor = 1 / (1 - values.square().sum(-1)).sqrt()
        scores = case.scores(p)
        weights = scores.exp() * factor[:, :, None]
        o = weights @ values / weights.sum(-1, keepdim=True)
        return o, weights.sum(-1).log()

    formulas.check(ours, theirs, inputs, dtype)


# The midpoint does not depend on the choice of origin: boosting all values boosts the midpoint.
def test_einstein_midpoint_goes_with_isometries():
    q, k, v = tokens(1, 1, 9, 4)
    v = v / (1 + v.norm(dim=-1, keepdim=True))
    gamma, beta = 1 / math.sqrt(1 - 0.6**2), 0.6

    def boost(x):
        shared = 1 + beta * x[..., :1]
        return torch.cat([(x[..., :1] + beta) / shared, x[..., 1:] / (gamma * shared)], -1)

    midpoint = lambda values: gnomon.attention(q, k, values, aggregation="einstein_midpoint")  # noqa: E731
    torch.testing.assert_close(midpoint(boost(v)), boost(midpoint(v)))


def test_values_on_and_outside_the_sphere_are_finite():
    q, k, v = tokens(1, 1, 9, 4)
    v = (v * 3).requires_grad_()
    o = gnomon.attention(q, k, v, aggregation="einstein_midpoint")
    assert (o.norm(dim=-1) < 1).all()
    assert o.sum().backward() is None
    assert v.grad.isfinite().all()
    with pytest.raises(ValueError, match="aggregation"):
        gnomon.attention(q, k, v, aggregation="median")


def test_hidden_values_may_be_nan():
    q, k, v = tokens(1, 1, 9, 4)
    v = v / 9
    v[:, :, 6:] = math.nan
    v.requires_grad_()
    o = gnomon.attention(q, k, v, aggregation="einstein_midpoint", key_lengths=torch.tensor([6]))
    o.sum().backward()
    assert o.isfinite().all()
    assert v.grad.isfinite().all()


MODULE_POSITIONS = [
    "relative:max_offset=5",
    "relative:max_offset=5:far=zero:values=true:per_head=true",
    "relative:max_offset=20:past=true:values=true",
    "disentangled:span=4",
    "disentangled:span=8:max_distance=10:per_head=true",
    "transformer_xl",
    "transformer_xl:r=learned:length=30",
    "absolute_keys:length=30",
    "absolute_keys:length=30:per_head=true",
    "rope+relative:max_offset=3",
]


@pytest.mark.parametrize("position", MODULE_POSITIONS)
def test_modules_decode_as_they_read_the_whole(position):
    torch.manual_seed(0)
    module = gnomon.nn.MultiheadAttention(16, 4, kv_heads=2, position=position).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    whole = module(x, causal=True)
    cache = gnomon.nn.KVCache()
    parts = [module(x[:, t : t + 1], causal=True, cache=cache) for t in range(11)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    whole.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("causal", [True, False])
def test_transformer_xl_module_is_the_paper(causal):
    torch.manual_seed(0)
    spec = "transformer_xl" if causal else "transformer_xl:bidirectional=true"
    module = gnomon.nn.MultiheadAttention(12, 3, position=spec).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    heads = lambda y: y.unflatten(2, (3, 4)).transpose(1, 2)  # noqa: E731
    q, k, v = (heads(p(x)) for p in (module.q_proj, module.k_proj, module.v_proj))
    # Negative distances come last, so that row i - j is also found for i < j.
    distances = torch.cat([torch.arange(9), torch.arange(-8, 0)])
    waves = gnomon.sinusoid(distances.double(), 12, layout="split_xl")
    r = torch.einsum("hde,ne->hnd", module.transformer_xl_r, waves)
    scores = torch.full((1, 3, 9, 9), -math.inf, dtype=torch.float64)
    for i in range(9):
        for j in range(i + 1 if causal else 9):
            scores[:, :, i, j] = (
                (q[:, :, i] + module.transformer_xl_u) * k[:, :, j]
                + (q[:, :, i] + module.transformer_xl_v) * r[:, i - j]
            ).sum(-1) / 2
    expected = module.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, causal=causal), expected)
    if not causal:
        # Reordering tokens with their positions reorders the output, and a cross-attention call at
        # an offset returns the same rows.
        order = torch.randperm(9)
        torch.testing.assert_close(module(x[:, order], positions=order), expected[:, order])
        rows = module(x[:, 3:5], x, query_offset=3)
        torch.testing.assert_close(rows, expected[:, 3:5])
        learned = gnomon.nn.MultiheadAttention(
            12, 3, position=spec + ":r=learned:length=9"
        ).double()
        assert learned.transformer_xl_r.shape == (3, 17, 4)
        own = module.state_dict() | {"transformer_xl_r": torch.cat([r[:, 9:], r[:, :9]], 1)}
        learned.load_state_dict(own)
        torch.testing.assert_close(learned(x), expected)
        with pytest.raises(
            ValueError, match="r of transformer_xl has 17 rows, and bidirectional is True"
        ):
            learned(torch.cat([x, x], 1))


def test_modules_pass_their_masks_on():
    torch.manual_seed(0)
    module = gnomon.nn.MultiheadAttention(8, 2, position="alibi")
    x = torch.randn(2, 6, 8)
    mask = {
        "causal": True,
        "key_starts": torch.tensor([0, 2]),
        "query_segments": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2),
        "key_segments": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2),
        "query_offset": torch.tensor([0, 1]),
        "chunks": (4, 1, 0),
    }
    heads = lambda y: y.unflatten(2, (2, 4)).transpose(1, 2)  # noqa: E731
    q, k, v = (heads(p(x)) for p in (module.q_proj, module.k_proj, module.v_proj))
    slopes = gnomon.alibi_slopes(2).float()
    o = gnomon.attention(q, k, v, position=ALiBi(slopes), **mask)
    torch.testing.assert_close(module(x, **mask), module.out_proj(o.transpose(1, 2).flatten(2)))


def test_modules_apply_dropout_only_in_training():
    torch.manual_seed(0)
    module = gnomon.nn.MultiheadAttention(8, 2, dropout=0.5)
    x = torch.randn(1, 6, 8)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    with pytest.raises(ValueError, match=r"dropout is 1\.5"):
        gnomon.nn.MultiheadAttention(8, 2, dropout=1.5)


def test_dropout_compiles_in_one_graph():
    q, k, v = tokens(1, 2, 16, 8, dtype=torch.float32)
    attend = torch.compile(
        lambda q: gnomon.attention(q, k, v, dropout=0.5), fullgraph=True, backend="aot_eager"
    )
    torch.manual_seed(0)
    first = attend(q)
    assert not torch.equal(first, attend(q))
    seeded = torch.compile(
        lambda q: gnomon.attention(q, k, v, dropout=0.5, seed=2), fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    torch.testing.assert_close(seeded(q), gnomon.attention(q, k, v, dropout=0.5, seed=2))


def test_absolute_keys_of_a_module_end_at_their_length():
    module = gnomon.nn.MultiheadAttention(8, 2, position="absolute_keys:length=5")
    with pytest.raises(ValueError, match="absolute_keys:length is 5, but there are 6 keys"):
        module(torch.randn(1, 6, 8))
    module = gnomon.nn.MultiheadAttention(8, 2, position="absolute_keys", max_length=6)
    assert module.absolute_keys_table.shape == (6, 4)
    with pytest.raises(ValueError, match="absolute_keys:length=0"):
        gnomon.nn.MultiheadAttention(8, 2, position="absolute_keys:length=0")
    assert gnomon.nn.TokenPosition("absolute_keys:length=5+alibi", 8, 32).max_length == 5


def test_a_rejected_call_leaves_the_cache_unchanged(device):
    module = gnomon.nn.MultiheadAttention(8, 2)
    cache = gnomon.nn.KVCache()
    x = torch.randn(2, 6, 8)
    module(x, cache=cache, causal=True)
    # On a GPU, the values of key_lengths are not checked.
    held = [({"key_lengths": torch.tensor([99, 99])}, ValueError)] * (device.type != "cuda")
    for wrong, error in (*held, ({"causal": "yes"}, TypeError)):
        with pytest.raises(error):
            module(x, cache=cache, **wrong)
        assert cache.length() == 6
    with pytest.raises(ValueError, match="equal shapes, except for the length"):
        module(x[:1], cache=cache, causal=True)
    assert cache.length() == 6


@pytest.mark.cpu("its autocast")
@pytest.mark.parametrize("position", ["transformer_xl", "relative:values=true", "rope+alibi"])
def test_autocast_leaves_the_computing_type(position):
    torch.manual_seed(0)
    module = gnomon.nn.MultiheadAttention(16, 4, position=position)
    x = torch.randn(2, 6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        o = module(x, causal=True)
    with_float = module(x, causal=True)
    assert o.dtype == torch.bfloat16
    assert (o.float() - with_float).abs().max() < 0.05 * with_float.abs().max()


def test_autocast_does_not_round_linear_attention():
    q, k, v = tokens(1, 2, 40, 8, dtype=torch.float32)
    for feature in ("elu", "favor"):
        expected = gnomon.linear_attention(q, k, v, feature=feature, causal=True)
        with torch.autocast("cpu", torch.bfloat16):
            o = gnomon.linear_attention(q, k, v, feature=feature, causal=True)
        torch.testing.assert_close(o, expected)


@pytest.mark.parametrize("offset", [2**53 + 1, -(2**60), 2**63 - 1])
def test_offsets_of_batches_have_the_range_of_one(offset):
    q, k, v = tokens(2, 1, 4, 4)
    with pytest.raises(ValueError, match=r"query_offset\[1\] is"):
        gnomon.attention(q, k, v, causal=True, query_offset=torch.tensor([0, offset]))


@pytest.mark.cpu("values of GPU tensors are not checked")
def test_linear_attention_checks_its_lengths():
    q, k, v = tokens(2, 1, 6, 4)
    expected = r"key_lengths\[1\] is 99; expected a value from 0 to Lk = 6"
    with pytest.raises(ValueError, match=expected):
        gnomon.linear_attention(q, k, v, key_lengths=torch.tensor([6, 99]))


SPECIFICATIONS = {
    "a second component": lambda t: Relative(t, 2, "clip+rope"),
    "an additional option": lambda t: Relative(t, 2, "clip:max_offset=3"),
    "a string instead of a number": lambda t: Relative(t, "2"),
    "None instead of a number": lambda t: Relative(t, None),
    "None instead of a string": lambda t: Relative(t, 2, None),
    "a tensor instead of a number": lambda t: Relative(t, torch.tensor(2.0)),
    "a string as slopes": lambda t: ALiBi("0.5"),
    "a number as shape": lambda t: gnomon.position.RoPE(shape=6),
    "a string as prefix": lambda t: gnomon.position.Grid((2, 3), [ALiBi(0.5)] * 2, prefix="0"),
    "None instead of biases": lambda t: gnomon.position.Grid((2, 3), None),
    "a string as height": lambda t: gnomon.position.Relative2D(t[:3], t, "2", 3),
    "the abstract base class": lambda t: gnomon.position.Position(),
    "a list as values": lambda t: Relative.from_future_first(t, 2, values=[1]),
    "a vector as table": lambda t: Relative.from_future_first(t[0], 2),
}


@pytest.mark.parametrize("what", SPECIFICATIONS)
def test_options_are_of_their_types(what):
    q = torch.randn(1, 2, 6, 4)
    with pytest.raises((TypeError, ValueError), match="gnomon"):
        gnomon.attention(q, q, q, position=SPECIFICATIONS[what](torch.randn(5, 4)))


MODULES = {
    "embed_dim is a float": lambda: gnomon.nn.MultiheadAttention(16.0, 4),
    "num_heads is a str": lambda: gnomon.nn.MultiheadAttention(16, "4"),
    "qk_dim is a float": lambda: gnomon.nn.MultiheadAttention(16, 4, qk_dim=2.0),
    "max_length is a float": lambda: gnomon.nn.MultiheadAttention(16, 4, max_length=4.0),
    "similarity is an ALiBi": lambda: gnomon.nn.MultiheadAttention(16, 4, similarity=ALiBi(1.0)),
    "position is a Dot": lambda: gnomon.nn.MultiheadAttention(
        16, 4, position=gnomon.similarity.Dot()
    ),
    "dropout is a str": lambda: gnomon.nn.MultiheadAttention(16, 4, dropout="x"),
    "key_lengths is a dict": lambda: call_module(key_lengths={1: 2}),
    "key_segments is a float": lambda: call_module(key_segments=0.5),
    "query_offset is a float": lambda: call_module(query_offset=1.0),
    "query_offset is a bool": lambda: call_module(query_offset=True),
    "causal is an int": lambda: call_module(causal=1),
    "cache is a dict": lambda: call_module(cache={}),
    "num_heads is a float": lambda: gnomon.alibi_slopes(2.5),
    "relative_position is a set": lambda: gnomon.t5_bucket({1}, True),
    "bidirectional is a str": lambda: gnomon.t5_bucket(torch.tensor([1]), "x"),
    "positions is a set": lambda: gnomon.sinusoid({1}, 4),
    "dim is a str": lambda: gnomon.sinusoid(torch.tensor([1]), "4"),
    "prefix is a float": lambda: gnomon.grid_sinusoid((2, 2), 4, prefix=1.0),
    "q is a list": lambda: gnomon.hype_augment([1], torch.zeros(1, 1, 2, 2), 1.0, 1.0),
}


def call_module(**arguments: object) -> torch.Tensor:
    module = gnomon.nn.MultiheadAttention(16, 4)
    return module(torch.randn(2, 6, 16), **arguments)


@pytest.mark.parametrize("message", MODULES)
def test_arguments_of_a_wrong_type(message):
    with pytest.raises(TypeError, match=message):
        MODULES[message]()
