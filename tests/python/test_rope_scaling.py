"""RoPE beyond the training length: scaled frequencies and xPos."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import generator_of, rotate
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import gnomon

D = 16
LIST = [1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.5, 8.0]
TEXT = "x".join(map(str, LIST))
LONGER = [2 * number for number in LIST]

# The options in the format of transformers, and the length of the sequence.
SCALINGS = {
    "linear": ({"factor": 4.0}, 40),
    "dynamic, short": ({"factor": 2.0, "original_max_position_embeddings": 64}, 40),
    "dynamic, long": ({"factor": 2.0, "original_max_position_embeddings": 16}, 40),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 256}, 40),
    "yarn of deepseek": (
        {
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
        },
        40,
    ),
    "yarn of gpt-oss": (
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        40,
    ),
    "yarn, attention factor": (
        {"factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 1.5},
        40,
    ),
    "longrope, short": (
        {
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "short_factor": LIST,
            "long_factor": LONGER,
        },
        40,
    ),
    "longrope, long": (
        {
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "short_factor": LIST,
            "long_factor": LONGER,
        },
        40,
    ),
    "llama3": (
        {
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        40,
    ),
    "proportional": ({"partial_rotary_factor": 0.4}, 40),
    "proportional, scaled": ({"partial_rotary_factor": 0.75, "factor": 3.0}, 40),
}


def specification(name: str, base: float) -> str:
    options, _ = SCALINGS[name]
    words = [f"rope:base={base}:layout=half:scaling={name.split(',')[0].split(' ')[0]}"]
    for key, value in options.items():
        if isinstance(value, list):
            value = "x".join(map(str, value))
        elif isinstance(value, bool):
            value = str(value).lower()
        words.append(f"{key}={value}")
    return ":".join(words)


def tokens(length: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, length, D, dtype=torch.float64) for _ in range(3)]


def turned(x: torch.Tensor, frequencies: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE in the half layout, computed by complex multiplication."""
    angles = positions[:, None] * frequencies.double()
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([pairs.real, pairs.imag], -1)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.full((q.shape[2], k.shape[2]), -math.inf, dtype=q.dtype).triu(1)
    return (q @ k.mT / math.sqrt(D) + mask).softmax(-1) @ v


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_of_transformers(name, base):
    options, length = SCALINGS[name]
    kind = name.split(",")[0].split(" ")[0]
    original = options.get("original_max_position_embeddings", 64)
    # For dynamic scaling, transformers uses the maximum length as the original length.
    config = LlamaConfig(
        hidden_size=2 * D,
        num_attention_heads=2,
        max_position_embeddings=original,
        rope_parameters={"rope_type": kind, "rope_theta": base, **options},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
        config, device=torch.get_default_device(), seq_len=length
    )
    q, k, v = tokens(length)
    positions = torch.arange(length, dtype=torch.float64)
    theirs = plain(*(turned(x, frequencies, positions) * factor for x in (q, k)), v)
    ours = gnomon.attention(q, k, v, position=specification(name, base), causal=True)
    # transformers' frequencies are float32.
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
    without = gnomon.attention(q, k, v, position=f"rope:base={base}:layout=half", causal=True)
    if name != "dynamic, short":
        assert (ours - without).abs().max() > 1e-3


def random_options(kind: str, seed: int) -> tuple[dict[str, object], int, float, int]:
    """Random options, sequence length, base and columns for a kind of scaling."""
    generator = generator_of(seed)

    def number(low: float, high: float) -> float:
        return round(low + (high - low) * float(torch.rand((), generator=generator)), 4)

    def maybe(options: dict[str, object]) -> dict[str, object]:
        return {key: value for key, value in options.items() if number(0, 1) < 0.5}

    dims = 2 * int(number(2, 20))
    original = int(number(8, 5000))
    length = int(number(20, 60))
    needed: dict[str, object] = {
        "factor": number(1, 40),
        "original_max_position_embeddings": original,
    }
    options = {
        "linear": {"factor": needed["factor"]},
        "dynamic": needed | {"original_max_position_embeddings": int(number(8, 60))},
        "yarn": needed
        | maybe({"beta_fast": number(16, 64), "beta_slow": number(0.5, 4), "truncate": False})
        | maybe({"attention_factor": number(0.5, 2)}),
        "longrope": needed
        | {
            "original_max_position_embeddings": int(number(8, 60)),
            "short_factor": [number(1, 3) for _ in range(dims // 2)],
            "long_factor": [number(1, 30) for _ in range(dims // 2)],
        }
        | maybe({"attention_factor": number(0.5, 2)}),
        "llama3": needed | {"low_freq_factor": number(0.5, 2), "high_freq_factor": number(3, 8)},
        "proportional": {"partial_rotary_factor": number(0.05, 1)}
        | maybe({"factor": number(1, 8)}),
    }[kind]
    if kind == "yarn" and seed % 3 == 0:
        options |= {"mscale": number(0.3, 1.5), "mscale_all_dim": number(0.3, 1.5)}
    return options, length, number(100, 1e6), dims


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "kind", ["linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
)
def test_scalings_of_transformers_by_any_numbers(kind, seed):
    options, length, base, dims = random_options(kind, seed)
    config = LlamaConfig(
        hidden_size=2 * dims,
        num_attention_heads=2,
        max_position_embeddings=options.get("original_max_position_embeddings", 64),
        rope_parameters={"rope_type": kind, "rope_theta": base, **options},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
        config, device=torch.get_default_device(), seq_len=length
    )
    words = [f"rope:base={base}:layout=half:dims={dims}:scaling={kind}"]
    for key, value in options.items():
        text = "x".join(map(str, value)) if isinstance(value, list) else str(value).lower()
        words.append(f"{key}={text}")
    # The last two columns are not rotated.
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, length, dims + 2, dtype=torch.float64) for _ in range(3))
    angles = torch.arange(length)[:, None] * frequencies.double()
    turn = torch.polar(torch.full_like(angles, factor), angles)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        half = dims // 2
        pairs = torch.complex(x[..., :half], x[..., half:dims]) * turn
        return torch.cat([pairs.real, pairs.imag, x[..., dims:]], -1)

    scores = rotated(q) @ rotated(k).mT / math.sqrt(dims + 2)
    mask = torch.full((length, length), -math.inf, dtype=q.dtype).triu(1)
    theirs = (scores + mask).softmax(-1) @ v
    ours = gnomon.attention(q, k, v, position=":".join(words), causal=True)
    # The frequencies of the other implementation are float32, and positions go up to 60.
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_ntk_is_a_larger_base():
    q, k, v = tokens(40)
    ours = gnomon.attention(q, k, v, position="rope:scaling=ntk:factor=4", causal=True)
    base = 10000 * 4 ** (D / (D - 2))
    torch.testing.assert_close(
        ours, gnomon.attention(q, k, v, position=gnomon.position.RoPE(base=base), causal=True)
    )


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("offset", [0, 1000, 50000])
def test_xpos_is_the_formula_of_the_paper(layout, offset):
    q, k, v = tokens(40)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys = torch.arange(40, dtype=torch.float64)
    # Keys start at position 0, so products with distant queries have decayed.
    queries = keys + offset
    zeta = (torch.arange(0, D, 2, dtype=torch.float64) / D + 0.4) / 1.4

    def scaled(x, positions, sign):
        power = zeta ** (sign * positions[:, None] / 512)
        columns = power.repeat(1, 2) if layout == "half" else power.repeat_interleave(2, 1)
        return rotate(x, positions, has_height=False, layout=layout) * columns

    scores = scaled(q, queries, 1) @ scaled(k, keys, -1).mT / math.sqrt(D)
    theirs = scores.softmax(-1) @ v
    position = f"rope:xpos:layout={layout}"
    ours = gnomon.attention(q, k, v, position=position, query_offset=offset)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), leaves),
        torch.autograd.grad(theirs.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    single = gnomon.attention(*(x.float() for x in leaves), position=position, query_offset=offset)
    torch.testing.assert_close(single.double(), theirs, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("name", ["dynamic, long", "yarn", "longrope, long", "llama3"])
def test_compiled_and_in_a_module(name):
    torch.manual_seed(0)
    _, length = SCALINGS[name]
    module = gnomon.nn.MultiheadAttention(2 * D, 2, position=specification(name, 10000.0))
    x = torch.randn(2, length, 2 * D)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, causal=True), module(x, causal=True))
    # Passing two tokens at a time changes the length, on which these scalings do not depend.
    if name in ("yarn", "llama3"):
        cache = gnomon.nn.KVCache()
        parts = [module(part, causal=True, cache=cache) for part in x.split(2, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), module(x, causal=True))


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ("rope:scaling=yarn", "scaling=yarn, which needs factor"),
        ("rope:scaling=yarn:factor=4", "which needs original_max_position_embeddings"),
        ("rope:scaling=linear", "scaling=linear, which needs factor"),
        ("rope:scaling=lin:factor=2", "expected one of none, linear"),
        ("rope:scaling=linear:factor=-2", "expected a positive number"),
        (
            "rope:scaling=longrope:original_max_position_embeddings=8:long_factor=1x2",
            r"short_factor has 0 elements; expected dims / 2 = 8",
        ),
        (
            # The message does not depend on the length of the text.
            "rope:scaling=longrope:original_max_position_embeddings=99:short_factor=1x2x3x4x5x6x7x8"
            ":long_factor=1x2",
            r"long_factor has 2 elements; expected dims / 2 = 8",
        ),
        (
            "rope:scaling=longrope:original_max_position_embeddings=8:long_factor=1x-2",
            "joined by x",
        ),
        ("rope:scaling=proportional:partial_rotary_factor=1.5", "expected at most 1"),
        (
            "rope:scaling=llama3:factor=8:original_max_position_embeddings=9:low_freq_factor=5",
            "expected low_freq_factor to be smaller",
        ),
    ],
)
def test_wrong_scalings(position, message):
    q, k, v = tokens(40)
    with pytest.raises(ValueError, match=message):
        gnomon.attention(q, k, v, position=position, causal=True)


def test_rows_whose_frequencies_go_by_the_length_of_all():
    q, k, _ = tokens(40)
    position = "rope:scaling=dynamic:factor=2:original_max_position_embeddings=8"
    arguments = {"position": position, "query_offset": 30}
    some = gnomon.attention_weights(q, k[:, :, :9], [3, 20], **arguments)
    torch.testing.assert_close(
        some, gnomon.attention_weights(q, k[:, :, :9], slice(None), **arguments)[:, :, [3, 20]]
    )


def test_xpos_needs_products():
    q, k, v = tokens(5)
    with pytest.raises(ValueError, match="xpos, which scales inner products"):
        gnomon.attention(q, k, v, similarity="penumbral", position="rope:xpos")


def test_xpos_beyond_the_range_of_float32():
    x = torch.ones(1, 1, 2, 4)
    long = {"position": "rope:xpos", "causal": True, "query_offset": 65535}
    with pytest.raises(ValueError, match="has length 65537; expected at most 65536, or float64"):
        gnomon.attention(x, x, x, **long)
    o = gnomon.attention(x.double(), x.double(), x.double(), **long)
    torch.testing.assert_close(o, x.double())
    far = torch.tensor([[0, 1], [200000, 200001]])
    x = x.expand(2, -1, -1, -1)
    for where in (
        {"positions": far, "key_positions": far},
        {"query_offset": -70000},
        {"query_offset": torch.tensor([0, -70000])},
    ):
        with pytest.raises(ValueError, match="xpos, and the positions of Float tokens are up to"):
            gnomon.attention(x, x, x, position="rope:xpos", **where)
        o = gnomon.attention(x.double(), x.double(), x.double(), position="rope:xpos", **where)
        assert o.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("rope:factor=4", "factor with scaling=none"),
        ("rope:scaling=linear:factor=2:beta_fast=3", "beta_fast with scaling=linear"),
        ("rope:scaling=ntk:factor=2:attention_factor=9", "attention_factor with scaling=ntk"),
        (
            "rope:scaling=dynamic:factor=2:original_max_position_embeddings=4:truncate=false",
            "truncate with scaling=dynamic",
        ),
        ("rope:scaling=proportional:low_freq_factor=2", "low_freq_factor with scaling=prop"),
    ],
)
def test_numbers_that_a_scaling_does_not_read_are_refused(spec, name):
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=f"rope has {name}.*ignores it"):
        gnomon.attention(q, q, q, position=spec, causal=True)
    # Building a module raises the same error.
    with pytest.raises(ValueError, match=f"rope has {name}.*ignores it"):
        gnomon.nn.MultiheadAttention(16, 2, position=spec)
