"""Tests the weights of selected rows, and the learned values and printed form of modules."""

import math

import pytest
import torch

import gnomon
from gnomon import nn
from gnomon.lab._program import options as program_options
from gnomon.position import (
    T5,
    AbsoluteKeys,
    ALiBi,
    Disentangled,
    Grid,
    GridBias,
    HyPE,
    OffsetBias,
    Relative,
    Relative2D,
    RoPE,
    RoPEMixed,
    TransformerXL,
)

HEADS, KEY_HEADS, QUERIES, KEYS, DIM = 4, 2, 9, 12, 8


def tokens(queries=QUERIES, keys=KEYS, dtype=torch.float64):
    torch.manual_seed(0)
    return (
        torch.randn(2, HEADS, queries, DIM, dtype=dtype),
        torch.randn(2, KEY_HEADS, keys, DIM, dtype=dtype),
    )


def table(*sizes):
    return torch.randn(*sizes, dtype=torch.float64)


SLOPES = gnomon.alibi_slopes(HEADS).double()
CALLS = {
    "plain": {},
    "causal": {"causal": True, "query_offset": 3},
    "per-batch offsets": {
        "causal": True,
        "query_offset": torch.tensor([3, 1]),
        "position": "alibi",
    },
    "scale": {"scale": 0.7},
    "window": {"window": (2, 1), "query_offset": 1, "position": "rope+hype"},
    "lengths": {"key_lengths": [5, 12], "key_starts": [1, 0], "query_offset": 0},
    "segments": {
        "query_segments": torch.arange(QUERIES).div(4, rounding_mode="floor"),
        "key_segments": torch.arange(KEYS).div(4, rounding_mode="floor").expand(2, -1),
    },
    "chunks": {"chunks": (3, 1, 0), "query_offset": 2},
    **{
        name: {"similarity": name}
        for name in ("laplacian", "gaussian", "umbral", "penumbral", "hyperbolic", "lorentz")
    },
    "entailment": {"similarity": "entailment"},
    "per-position angles": {
        "position": lambda: RoPE(angles=table(1, HEADS, QUERIES + KEYS, 4)),
        "query_offset": 2,
    },
    "per-token angles": {
        "position": lambda: RoPE(
            angles=table(1, 1, QUERIES, 4), key_angles=table(2, HEADS, KEYS, 4)
        ),
        "query_offset": 0,
    },
    "mixed frequencies": {
        "position": lambda: RoPEMixed(table(HEADS, 1, 4)),
        "query_offset": 1,
    },
    "a sum": {"position": RoPE() + ALiBi(SLOPES) + HyPE(1.0, 0.1), "query_offset": 1},
    "t5": {"position": lambda: T5(table(8, HEADS), True, 20), "query_offset": 0},
    "offset bias": {
        "position": lambda: OffsetBias(table(HEADS, QUERIES + KEYS - 1)),
        "query_offset": 0,
    },
    "relative": {"position": lambda: Relative(table(7, DIM), 3), "query_offset": 1},
    "disentangled": {
        "position": lambda: Disentangled(table(8, DIM), table(8, DIM), 5),
        "query_offset": 1,
    },
    "relative with values": {
        "position": lambda: Relative(table(7, DIM), 3, values=table(7, KEYS)),
        "query_offset": 1,
    },
    "absolute keys": {"position": lambda: AbsoluteKeys(table(KEYS, DIM)), "query_offset": 0},
    "transformer xl": {
        "position": lambda: TransformerXL(
            table(HEADS, DIM), table(HEADS, DIM), table(HEADS, KEYS + 1, DIM)
        ),
        "causal": True,
        "query_offset": 3,
    },
    "grid": {"position": Grid((3, 4), [ALiBi(SLOPES), HyPE(1.0, 0.2)])},
    "grid in a specification": {"position": "alibi:slopes=0.3:shape=2x5:prefix=2"},
    "grid bias": {"position": lambda: GridBias(table(HEADS, 5, 7))},
    "relative2d": {"position": lambda: Relative2D(table(5, DIM), table(7, DIM), 3, 4)},
    "rope on a grid": {"position": RoPE(10.0, shape=(3, 4))},
}


def dense_weights(q, k, arguments):
    """The weights, read from attention() with one-hot values, without the terms that a position
    adds to the output."""
    keys = k.shape[2]
    eye = torch.eye(keys, dtype=q.dtype).expand(*k.shape[:2], keys, keys)
    return gnomon.attention(q, k, eye, **arguments) - gnomon.attention(
        q, k, torch.zeros_like(eye), **arguments
    )


@pytest.mark.cpu("its parameters are created on the CPU at import")
@pytest.mark.parametrize("name", CALLS)
def test_weights_are_those_of_attention(name):
    arguments = dict(CALLS[name])
    on_grid = "grid" in name or "2d" in name
    q, k = tokens(*(12, 12) if on_grid else (QUERIES, KEYS))
    if callable(arguments.get("position")):
        arguments["position"] = arguments["position"]()
    everything = dense_weights(q, k, arguments)
    for rows in (slice(None), [0, 1, 2], [5, 2, 3, -1], 4, -1, torch.tensor([7, 8]), (1, 2, 3)):
        index = rows if isinstance(rows, slice) else torch.as_tensor(rows).reshape(-1)
        got = gnomon.attention_weights(q, k, rows, **arguments)
        torch.testing.assert_close(got, everything[:, :, index])
    last = gnomon.attention_weights(q, k, **arguments)
    assert last.shape == (2, HEADS, 1, k.shape[2])
    torch.testing.assert_close(last, everything[:, :, -1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_low_precision(dtype):
    q, k = tokens()
    exact = gnomon.attention_weights(q, k, [1, 5], similarity="penumbral:gamma=1")
    low = gnomon.attention_weights(q.to(dtype), k.to(dtype), [1, 5], similarity="penumbral:gamma=1")
    assert low.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(low.double(), exact, atol=tolerance, rtol=tolerance)
    assert (low.double().sum(-1) - 1).abs().max() < tolerance


def test_weights_over_many_keys():
    """There are more rows than the operator processes at a time."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 700, 4).double(), torch.randn(1, 1, 700, 4).double()
    got = gnomon.attention_weights(q, k, [699, 3], position="alibi", causal=True)
    scores = (q @ k.transpose(2, 3)) / 2
    distance = torch.arange(700)[:, None] - torch.arange(700)
    scores = scores - gnomon.alibi_slopes(2).double()[:, None, None] * distance.abs()
    expected = scores.masked_fill(distance < 0, -math.inf).softmax(-1)
    torch.testing.assert_close(got, expected[:, :, [699, 3]])


def test_a_row_that_sees_nothing_has_no_weights():
    q, k = tokens()
    weights = gnomon.attention_weights(q, k, slice(None), causal=True, query_offset=-2)
    assert not weights[:, :, :2].any()
    torch.testing.assert_close(
        weights[:, :, 2:].sum(-1), torch.ones(2, HEADS, QUERIES - 2).double()
    )


def test_no_rows_and_no_keys():
    q, k = tokens()
    assert gnomon.attention_weights(q, k, []).shape == (2, HEADS, 0, KEYS)
    assert gnomon.attention_weights(q, k, slice(3, 3)).shape == (2, HEADS, 0, KEYS)
    assert gnomon.attention_weights(q, k[:, :, :0], 2).shape == (2, HEADS, 1, 0)


@pytest.mark.parametrize("rows", [-1, [5, 1], (2, 3), slice(3)])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"position": "alibi", "query_offset": 2}, {"position": "rope", "query_offset": 2}],
    ids=["all rows", "alibi", "rope"],
)
def test_weights_in_a_graph(rows, arguments):
    """In a graph without an offset, all rows are computed before the selection."""
    q, k = tokens()

    def weights(q):
        return gnomon.attention_weights(q, k, rows, **arguments)

    torch._dynamo.reset()
    compiled = torch.compile(weights, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), weights(q))


def test_weights_have_gradients():
    q, k = tokens(4, 5)
    q, slopes = q.requires_grad_(), torch.rand(HEADS, dtype=torch.float64, requires_grad=True)

    def weights(q, slopes):
        return gnomon.attention_weights(
            q, k, [0, 3], position=ALiBi(slopes), similarity="laplacian:gamma=1", query_offset=0
        )

    assert torch.autograd.gradcheck(weights, (q, slopes))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, k: (q, k, 9), ValueError, "rows contains 9; expected -9 to 8, because Lq is 9"),
        (lambda q, k: (q, k, [0, -10]), ValueError, "rows contains -10"),
        (lambda q, k: (q, k, "last"), TypeError, "rows is a str; expected an integer, a sequence"),
        (lambda q, k: (q, k, 0.5), TypeError, "rows is a float; expected an integer, a sequence"),
        (lambda q, k: (q, k, [[1]]), ValueError, r"rows has shape \[1, 1\]"),
        (lambda q, k: (q, k, torch.ones(2)), ValueError, "rows has .* dtype torch.float32"),
        (lambda q, k: (q[0], k), ValueError, "attention_weights: q has shape"),
        (lambda q, k: (q, [k]), TypeError, "attention_weights: k is a list"),
    ],
)
def test_mistakes_in_rows(call, error, message):
    with pytest.raises(error, match=message):
        gnomon.attention_weights(*call(*tokens()))


@pytest.mark.parametrize(
    ("similarity", "position"),
    [
        ("dot", "none"),
        ("penumbral", "rope+hype:tau=learned"),
        ("laplacian", "t5"),
        ("dot", "relative:max_offset=3:values"),
        ("dot", "transformer_xl"),
        ("umbral", "absolute_keys+alibi:slopes=learned"),
        ("dot", "offset_bias"),
        ("gaussian", "alibi:shape=2x5"),
        ("dot", "grid_bias:shape=2x5"),
    ],
)
def test_weights_of_a_module(similarity, position):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(
        HEADS * DIM, HEADS, kv_heads=2, similarity=similarity, position=position
    ).double()
    with torch.no_grad():
        for name in module._term_names:
            getattr(module, name).add_(torch.randn_like(getattr(module, name)) / 5)
    x = torch.randn(2, 10, HEADS * DIM, dtype=torch.float64)
    weights = module.attention_weights(x, rows=slice(None), causal=True)
    v = module.v_proj(x).unflatten(2, (2, DIM)).transpose(1, 2).repeat_interleave(2, 1)
    if "values" not in position:
        out = module.out_proj((weights @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(out, module(x, causal=True))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 10, dtype=torch.float64))
    torch.testing.assert_close(
        module.attention_weights(x, x, [7, 2], causal=True), weights[:, :, [7, 2]]
    )
    assert module.attention_weights(x, causal=True).shape == (2, HEADS, 1, 10)


@pytest.mark.cpu("its parameters are created on the CPU at import")
def test_learned_values_act():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(
        32,
        HEADS,
        similarity="laplacian",
        position="rope+hype:mu=0.01:tau=learned+alibi:slopes=learned+alibi+t5",
    ).double()
    before = module.learned_values()
    assert list(before) == ["gamma", "hype_tau", "alibi_slopes", "t5_table"]
    torch.testing.assert_close(before["gamma"].value, module.gamma_start.expand(HEADS))
    torch.testing.assert_close(before["alibi_slopes"].value, SLOPES)
    torch.testing.assert_close(before["hype_tau"].start, SLOPES / 0.01)
    for name in ("gamma", "hype_tau", "alibi_slopes"):
        torch.testing.assert_close(before[name].value, before[name].start)
    assert before["t5_table"].start is None
    with torch.no_grad():
        for name in ("gamma_theta", "hype_tau_theta", "alibi_slopes_theta", "t5_table"):
            getattr(module, name).normal_(0, 0.1)
    learned = module.learned_values()
    assert torch.equal(before["gamma"].value, before["gamma"].start)  # a copy
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    q, k, v = (
        projection(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    o = gnomon.attention(
        q,
        k,
        v,
        similarity=gnomon.similarity.Laplacian(learned["gamma"].value),
        position=RoPE()
        + HyPE(learned["hype_tau"].value, 0.01)
        + ALiBi(learned["alibi_slopes"].value)
        + ALiBi(SLOPES)
        + T5(learned["t5_table"].value, True),
    )
    torch.testing.assert_close(module(x), module.out_proj(o.transpose(1, 2).flatten(2)))
    for value, start in learned.values():
        assert not value.requires_grad
        if start is not None:
            assert not torch.equal(value, start)


@pytest.mark.parametrize(
    ("similarity", "position", "names"),
    [
        ("dot", None, []),
        ("laplacian:gamma=0.5", "alibi", []),
        ("gaussian:gamma=fixed", "hype", []),
        ("hyperbolic", "none", ["beta"]),
        ("umbral", "hype:mu=learned:tau=learned", ["gamma", "hype_tau", "hype_mu"]),
        ("dot", "kerple+kerple", ["kerple_r1", "kerple_r2", "kerple2_r1", "kerple2_r2"]),
        ("dot", "relative:values", ["relative_table", "relative_values"]),
        ("additive", "alibi:slopes=learned:shape=2x5", ["alibi_slopes"]),
    ],
)
def test_learned_values(similarity, position, names):
    module = nn.MultiheadAttention(32, HEADS, similarity=similarity, position=position)
    assert list(module.learned_values()) == names
    assert list(module.requires_grad_(False).learned_values()) == names


def test_learned_values_of_a_model():
    model = gnomon.models.LanguageModel(
        11, 16, 2, 2, 32, similarity="penumbral", position="learned+alibi:slopes=learned"
    )
    values = model.learned_values()
    assert list(values) == [
        f"blocks.{n}.attention.{name}" for n in (0, 1) for name in ("gamma", "alibi_slopes")
    ]
    torch.testing.assert_close(
        values["blocks.1.attention.alibi_slopes"].value, gnomon.alibi_slopes(2)
    )


def test_modules_print_in_a_line():
    module = nn.MultiheadAttention(32, 4)
    assert repr(module) == "MultiheadAttention(32, 4)"
    module = nn.MultiheadAttention(
        32, 4, 2, 6, "penumbral:r=2", "rope+alibi", 0.1, False, kdim=5, vdim=7
    )
    assert repr(module) == (
        "MultiheadAttention(32, 4, kv_heads=2, qk_dim=6, similarity='penumbral:r=2', "
        "position='rope+alibi', dropout=0.1, kdim=5, vdim=7, bias=False)"
    )
    # If a projection has been replaced, the new module is printed.
    module.q_proj = torch.nn.Sequential(module.q_proj)
    assert "(q_proj): Sequential(" in repr(module)


def test_checkpoints_print_in_a_line(tmp_path):
    words = gnomon.models.Tokenizer(
        "words", b"<unk>\n<eos>\n" + b"".join(b"w%d\n" % n for n in range(98))
    )
    model = gnomon.models.LanguageModel(100, 16, 2, 2, 32, position="rope")
    gnomon.models.save_checkpoint(tmp_path / "model", model, words)
    checkpoint = gnomon.models.load_checkpoint(tmp_path / "model")
    assert repr(checkpoint.tokenizer) == f"Tokenizer('words', {len(words.vocabulary)} bytes)"
    assert repr(gnomon.models.Tokenizer()) == "Tokenizer('bytes')"
    assert repr(checkpoint) == (
        "Checkpoint(model=LanguageModel(similarity='dot', position='rope', vocabulary=100, dim=16, "
        "depth=2, heads=2, mlp=32, dropout=0.0, norm='layer', activation='gelu', no_bias=False, "
        "adaptive=[], max_length=512), "
        f"tokenizer={checkpoint.tokenizer!r}, training=None)"
    )
    training = gnomon.models.TrainingState(
        options={
            name: {"integer": 4, "number": 0.5}.get(option.kind, option.default)
            for name, option in program_options("training").items()
        },
        step=3,
        optimizer={"exp_avg.embedding.weight": torch.zeros(100, 16)},
        memory={},
        memory_tokens=0,
        data={"path": "text", "sha256": "0" * 64},
    )
    assert repr(training) == "TrainingState(step 3 of 4, data 'text')"
