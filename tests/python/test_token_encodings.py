"""Encodings added to embeddings: convolutions, CAPE, sinusoids on grids, and properties from a
survey.

The survey is Dufter, Schmitt and Schütze 2022, Position Information in Transformers.
"""

import itertools
import math

import pytest
import torch
from formulas import generator_of

import gnomon
from gnomon._catalogue import entry_of
from gnomon.nn import (
    CAPE,
    Convolutional,
    LearnedAbsolute,
    MultiheadAttention,
    Sinusoidal,
    TokenCache,
    TokenEncoding,
    TokenPosition,
)


def convolution(module, x, kernel, groups, first):
    """GELU of the sum over the kernel, token by token; element s reads token t + first + s."""
    direction = module.weight_v
    weight = direction * module.weight_g / direction.square().sum((0, 1), keepdim=True).sqrt()
    batch, length, dim = x.shape
    width = dim // groups
    frames = []
    for t in range(length):
        frame = module.bias.expand(batch, dim)
        for s in range(kernel):
            at = t + first + s
            if 0 <= at < length:
                parts = [
                    x[:, at, g * width : (g + 1) * width]
                    @ weight[g * width : (g + 1) * width, :, s].T
                    for g in range(groups)
                ]
                frame = frame + torch.cat(parts, 1)
        frames.append(frame)
    y = torch.stack(frames, 1)
    return y * (1 + torch.erf(y / math.sqrt(2))) / 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 3, 11])
@pytest.mark.parametrize(("kernel", "groups"), [(1, 1), (4, 2), (5, 3), (8, 6)])
def test_convolution(kernel, groups, length, causal):
    torch.manual_seed(0)
    module = Convolutional(6, kernel, groups, causal).double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape))
    x = torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True)
    first = -(kernel - 1) if causal else -(kernel // 2)
    expected = x + convolution(module, x, kernel, groups, first)
    ours = module(x)
    torch.testing.assert_close(ours, expected)
    leaves = [x, *module.parameters()]
    direction = torch.randn(ours.shape, dtype=torch.float64)
    for got, want in zip(
        torch.autograd.grad(ours, leaves, direction),
        torch.autograd.grad(expected, leaves, direction),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("kernel", "groups"), [(4, 2), (5, 3)])
def test_a_causal_convolution_is_padded_only_on_the_left(kernel, groups):
    torch.manual_seed(0)
    module = Convolutional(6, kernel, groups, causal=True).double()
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    # Initially, weight_g is the norm of weight_v, so the weight equals weight_v.
    padded = torch.nn.functional.pad(x.transpose(1, 2), (kernel - 1, 0))
    y = torch.nn.functional.conv1d(padded, module.weight_v, module.bias, groups=groups)
    torch.testing.assert_close(module(x), x + torch.nn.functional.gelu(y).transpose(1, 2))


def test_a_convolution_starts_as_in_wav2vec():
    torch.manual_seed(0)
    module = Convolutional(256)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "weight_g": (1, 1, 128),
        "weight_v": (256, 16, 128),
        "bias": (256,),
    }
    assert math.isclose(module.weight_v.std().item(), math.sqrt(4 / (128 * 256)), rel_tol=0.01)
    assert not module.bias.any()
    norms = module.weight_v.square().sum((0, 1), keepdim=True).sqrt()
    torch.testing.assert_close(module.weight_g, norms)


@pytest.mark.parametrize(("causal", "sees_later"), [(True, False), (False, True)])
def test_a_convolution_sees_the_future_unless_causal(causal, sees_later):
    torch.manual_seed(0)
    module = Convolutional(16, 9, 4, causal)
    x = torch.randn(1, 30, 16)
    changed = x.clone()
    changed[:, 20] += 1
    before, after = module(x), module(changed)
    assert torch.equal(before[:, :20], after[:, :20]) != sees_later
    assert not torch.equal(before[:, 20:], after[:, 20:])


@pytest.mark.parametrize("causal", [False, True])
def test_padding_reaches_no_token(causal):
    torch.manual_seed(0)
    module = Convolutional(6, 7, 2, causal).double()
    x = torch.randn(3, 12, 6, dtype=torch.float64)
    lengths = [12, 5, 0]
    padded = x.clone()
    for row, length in zip(padded, lengths, strict=True):
        row[length:] = math.nan
    padded.requires_grad_()
    encoding = module.encode(padded, lengths=torch.tensor(lengths))
    for b, length in enumerate(lengths):
        torch.testing.assert_close(
            encoding[b : b + 1, :length], module.encode(x[b : b + 1, :length])
        )
    (gradient,) = torch.autograd.grad(encoding.sum(), padded)
    assert gradient.isfinite().all()


ENCODINGS = [
    "conv:kernel=6:groups=2",
    "conv:kernel=1:groups=8",
    "sinusoidal",
    "learned",
    "cape",
    "sinusoidal:shape=4x5:prefix=1",
    "cape:shape=4x5:prefix=1",
    "conv:kernel=3:groups=1+learned+conv:kernel=9:groups=4+cape",
]


@pytest.mark.parametrize("position", ENCODINGS)
def test_a_cache_gives_the_same_as_the_whole(position):
    torch.manual_seed(0)
    module = TokenPosition(position, 8, 21, causal=True).double().eval()
    x = torch.randn(2, 21, 8, dtype=torch.float64)
    cache = TokenCache()
    parts = []
    for begin, end in ((0, 1), (1, 3), (3, 4), (4, 15), (15, 16), (16, 21)):
        assert cache.length() == begin
        parts.append(module(x[:, begin:end], cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), module(x))
    if "conv" not in position:
        torch.testing.assert_close(module(x[:, 7:], 7), module(x)[:, 7:])
    cache.reset()
    assert cache.length() == 0
    torch.testing.assert_close(module(x[:, :4], cache=cache), module(x)[:, :4])


def test_a_cache_keeps_the_range_of_the_longest_kernel():
    module = TokenPosition("conv:kernel=3:groups=1+conv:kernel=5:groups=1", 8, 16, causal=True)
    cache = TokenCache()
    for length, kept in ((2, 2), (1, 3), (6, 4), (1, 4)):
        module(torch.randn(1, length, 8), cache=cache)
        assert cache.embeddings.shape == (1, kept, 8)


def test_token_positions_add_up_in_any_order():
    torch.manual_seed(0)
    first = TokenPosition("conv:groups=2:kernel=3+rope+learned+conv:groups=4+sinusoidal", 8, 16)
    assert [name for name, _ in first.named_children()] == [
        *("conv0", "learned0", "conv1", "sinusoidal0")
    ]
    second = TokenPosition("learned+conv:groups=2:kernel=3+sinusoidal+conv:groups=4", 8, 16)
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(first(x), second(x))
    expected = x + sum(encoding(x) - x for encoding in first.children())
    torch.testing.assert_close(first(x), expected)


@pytest.mark.parametrize(
    ("position", "max_length"),
    [
        *(("cape", None), ("conv", None), ("learned", 32), ("cape:shape=3x4:prefix=1+learned", 13)),
        *(("rope:shape=3x4+learned", 12), ("alibi:shape=3x4:prefix=1+rope:shape=4x4", 13)),
    ],
)
def test_where_a_token_position_ends(position, max_length):
    assert TokenPosition(position, 16, 32).max_length == max_length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("position", ENCODINGS)
def test_low_precision(position, dtype):
    torch.manual_seed(0)
    module = TokenPosition(position, 8, 21).double().eval()
    x = torch.randn(2, 21, 8, dtype=torch.float64)
    exact = module(x)
    rounded = module.to(dtype)(x.to(dtype))
    assert rounded.dtype == dtype
    # The error is at most a few rounding errors of the largest number.
    assert (rounded - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()
    if list(module.parameters()):
        rounded.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch.compiler.reset()
    torch.manual_seed(0)
    module = TokenPosition("conv:kernel=4:groups=2+learned+sinusoidal+cape", 8, 32, causal=True)
    module.eval()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (9, 14):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(compiled(x), module(x))


def test_vmap_draws_for_each_sample():
    torch.manual_seed(0)
    module = TokenPosition("cape", 8, 9)
    x = torch.ones(3, 2, 5, 8)
    for randomness, same in (("different", False), ("same", True)):
        out = torch.func.vmap(module, randomness=randomness)(x)
        assert torch.equal(out[0], out[1]) == same
        assert not torch.equal(out[0, 0], out[0, 1])


def test_modules_are_their_specifications():
    torch.manual_seed(0)
    x = torch.randn(2, 13, 16)
    for module, spec in (
        (
            Sinusoidal(16, "split", shape=(3, 4), prefix=1),
            "sinusoidal:layout=split:shape=3x4:prefix=1",
        ),
        (CAPE(16, shape=(3, 4), prefix=1), "cape:shape=3x4:prefix=1"),
        (CAPE(16, normalize=True), "cape:normalize"),
        (Convolutional(16, 4, 2), "conv:kernel=4:groups=2"),
        (LearnedAbsolute(13, 16), "learned:length=13"),
    ):
        other = TokenEncoding(spec, 16)
        other.load_state_dict(module.state_dict())
        assert torch.equal(module.eval()(x), other.eval()(x))


@pytest.mark.parametrize(
    ("module", "name", "dim"),
    [(Sinusoidal, "sinusoidal", 8), (Convolutional, "conv", 32), (CAPE, "cape", 8)],
)
def test_defaults_of_modules_are_the_catalogue_s(module, name, dim):
    said = dict(option.split("=") for option in module(dim).spec.split(":")[1:])
    defaults = {p["name"]: p["default"] for p in entry_of(name)["parameters"]}
    assert said.items() <= defaults.items()


@pytest.mark.parametrize("normalize", [False, True])
def test_cape_in_evaluation(normalize):
    module = CAPE(10, normalize=normalize).eval()
    x = torch.zeros(2, 7, 10)
    lengths = torch.tensor([7, 4])
    for b, length in enumerate((7, 4)):
        mean = (length - 1) / 2 if normalize else 0
        expected = gnomon.sinusoid(torch.arange(7, dtype=torch.float64) - mean, 10).float()
        torch.testing.assert_close(module(x, lengths=lengths)[b], expected)
    torch.testing.assert_close(module(x)[1], module(x)[0])
    torch.testing.assert_close(module(x)[0], module(x, lengths=lengths)[0])


def positions_of(encoding):
    """Decodes the positions p (..., L) from encodings sin p and cos p of a single frequency, |p| <
    pi."""
    return torch.atan2(encoding[..., 0], encoding[..., 1])


def draw(batch, length, **arguments):
    module = CAPE(2, **{"global_shift": 0.0, "local_shift": 0.0, "global_scale": 1.0} | arguments)
    generator = generator_of(5)
    return positions_of(
        module(torch.zeros(batch, length, 2, dtype=torch.float64), generator=generator)
    )


def assert_uniform(sample, low, high):
    """Checks that a sample has the bounds and the quantiles of a uniform distribution."""
    assert low <= sample.min()
    assert sample.max() <= high
    quantiles = torch.linspace(0.1, 0.9, 9, dtype=sample.dtype)
    expected = low + (high - low) * quantiles
    assert (sample.quantile(quantiles) - expected).abs().max() < 0.04 * (high - low)


def test_cape_shifts_scales_and_jitters():
    p = torch.arange(2, dtype=torch.float64)
    shift = draw(3000, 2, global_shift=2.0) - p
    torch.testing.assert_close(shift[:, 0], shift[:, 1])
    assert_uniform(shift[:, 0], -2.0, 2.0)
    jitter = draw(3000, 2, local_shift=0.4) - p
    assert_uniform(jitter[:, 0], -0.4, 0.4)
    assert_uniform(jitter[:, 1], -0.4, 0.4)
    assert jitter.T.corrcoef()[0, 1].abs() < 0.06
    scale = draw(3000, 3, global_scale=1.5)
    torch.testing.assert_close(scale[:, 2], 2 * scale[:, 1])
    assert_uniform(scale[:, 1].log(), -math.log(1.5), math.log(1.5))
    # The order of the operations is p' = (p - mean + D + e) exp(l).
    centred = draw(3000, 3, normalize=True, global_scale=1.5)
    torch.testing.assert_close(centred[:, 0], -centred[:, 2])
    both = draw(3000, 2, global_shift=1.0, global_scale=1.5)
    factor = both[:, 1] - both[:, 0]
    assert_uniform(both[:, 0] / factor, -1.0, 1.0)


def test_cape_draws_from_a_generator():
    module = CAPE(8)
    x = torch.zeros(2, 5, 8)

    def seeded(seed):
        return module(x, generator=generator_of(seed))

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    assert not torch.equal(seeded(1)[0], seeded(1)[1])
    torch.manual_seed(3)
    first = module(x)
    assert not torch.equal(module(x), first)
    torch.manual_seed(3)
    assert torch.equal(module(x), first)
    assert torch.equal(module.eval()(x), module(x))


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize(("height", "width"), [(3, 5), (4, 2), (1, 3)])
def test_cape_on_a_grid(height, width, prefix):
    dim = 12
    module = CAPE(dim, shape=(height, width), prefix=prefix).eval()
    encoding = module(torch.zeros(1, prefix + height * width, dim, dtype=torch.float64))[0]
    assert not encoding[:prefix].any()
    for t, (row, column) in enumerate(itertools.product(range(height), range(width))):
        y = 0.0 if height == 1 else 2 * row / (height - 1) - 1
        x = 0.0 if width == 1 else 2 * column / (width - 1) - 1
        for k in range(dim // 2):
            rho = 10 ** (k / (dim // 2 - 1))
            phase = math.pi * (rho * math.cos(k) * x + rho * math.sin(k) * y)
            assert math.isclose(encoding[prefix + t, k], math.cos(phase), abs_tol=1e-12)
            assert math.isclose(encoding[prefix + t, dim // 2 + k], math.sin(phase), abs_tol=1e-12)


def test_cape_on_a_grid_in_training():
    # With one wave along x, the phase divided by pi is x.
    def draw_x(**arguments):
        bounds = {"global_shift": 0.0, "local_shift": 0.0, "global_scale": 1.0} | arguments
        module = CAPE(2, shape=(2, 5), **bounds)
        x = torch.zeros(3000, 10, 2, dtype=torch.float64)
        encoding = module(x, generator=generator_of(5))
        return torch.atan2(encoding[..., 1], encoding[..., 0]) / math.pi

    middle, right = 2, 3  # x = 0 and x = 0.5
    shift = draw_x(global_shift=0.4)
    assert_uniform(shift[:, middle], -0.4, 0.4)
    torch.testing.assert_close(
        shift[:, right] - shift[:, middle], torch.full_like(shift[:, 0], 0.5)
    )
    torch.testing.assert_close(shift[:, 5 + middle], shift[:, middle])
    jitter = draw_x(local_shift=0.5)
    assert_uniform(jitter[:, middle], -0.25, 0.25)  # half of the spacing of 0.5
    assert not torch.equal(jitter[:, middle], jitter[:, 5 + middle])
    scale = draw_x(global_scale=1.5)
    assert_uniform((scale[:, right] / 0.5).log(), -math.log(1.5), math.log(1.5))


@pytest.mark.parametrize("layout", ["interleaved", "split", "split_xl"])
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (7,)])
def test_grid_sinusoid(shape, prefix, layout):
    part = 6
    table = gnomon.grid_sinusoid(shape, part * len(shape), layout=layout, prefix=prefix)
    assert table.shape == (prefix + math.prod(shape), part * len(shape))
    assert not table[:prefix].any()
    for t, coordinates in enumerate(itertools.product(*map(range, shape))):
        expected = torch.cat(
            [gnomon.sinusoid(torch.tensor(c), part, layout=layout) for c in coordinates]
        )
        assert torch.equal(table[prefix + t], expected)
    module = Sinusoidal(part * len(shape), layout, shape, prefix)
    x = torch.randn(2, len(table), part * len(shape))
    torch.testing.assert_close(module(x), x + table)


def shift_matrix(k, dim, layout):
    """T_k of the survey: a rotation by k times the frequency for each pair of sine and cosine."""
    divisor = max(dim // 2 - 1, 1) if layout == "split" else dim // 2
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    for i in range(dim // 2):
        sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, dim // 2 + i)
        angle = k * 10000.0 ** (-i / divisor)
        matrix[sine, sine] = matrix[cosine, cosine] = math.cos(angle)
        matrix[sine, cosine] = math.sin(angle)
        matrix[cosine, sine] = -math.sin(angle)
    return matrix


@pytest.mark.parametrize("layout", ["interleaved", "split", "split_xl"])
@pytest.mark.parametrize("k", [1, -3, 1000])
def test_a_shift_rotates_sinusoids(k, layout):
    p = torch.arange(-5, 40, dtype=torch.float64)
    rotation = shift_matrix(k, 16, layout)
    torch.testing.assert_close(
        gnomon.sinusoid(p + k, 16, layout=layout),
        gnomon.sinusoid(p, 16, layout=layout) @ rotation.T,
        atol=1e-10,
        rtol=0,
    )
    # The products of two encodings therefore depend only on the offset.
    table = gnomon.sinusoid(p, 16, layout=layout)
    products = table @ table.T
    torch.testing.assert_close(products[1:, 1:], products[:-1, :-1])


def test_scores_with_absolute_positions_have_four_terms():
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2).double()
    positions = TokenPosition("learned", 16, 9).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    p = positions(torch.zeros_like(x))

    def queries(tokens):
        return (tokens @ module.q_proj.weight.T).unflatten(2, (2, 8)).transpose(1, 2)

    def keys(tokens):
        return (tokens @ module.k_proj.weight.T).unflatten(2, (2, 8)).transpose(1, 2)

    terms = [queries(a) @ keys(b).transpose(2, 3) for a in (x, p) for b in (x, p)]
    scores = sum(terms) / math.sqrt(8)
    v = (module.v_proj(positions(x))).unflatten(2, (2, 8)).transpose(1, 2)
    expected = module.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(positions(x)), expected)
    o, lse = gnomon.attention(queries(x + p), keys(x + p), v, return_lse=True)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(o, scores.softmax(-1) @ v)


def test_without_positions_only_the_mask_gives_order():
    torch.manual_seed(0)
    first = MultiheadAttention(16, 2, position="none").double()
    second = MultiheadAttention(16, 2, position="none").double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    order = torch.tensor([3, 1, 4, 0, 5, 2, 7, 6, 8])
    # Without a mask, permuting the tokens permutes the output.
    torch.testing.assert_close(first(x[:, order]), first(x)[:, order])
    # With a causal mask, the last token depends on the order of the others only if there are at
    # least two layers.
    one = first(x, causal=True)[:, -1]
    torch.testing.assert_close(first(x[:, order], causal=True)[:, -1], one)
    two = second(first(x, causal=True), causal=True)[:, -1]
    other = second(first(x[:, order], causal=True), causal=True)[:, -1]
    assert (two - other).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Convolutional(10),
            "conv has groups = 16; expected a divisor of the embedding dimension, 10",
        ),
        (
            lambda: Convolutional(8, 0, 1),
            "conv:kernel=0 is invalid; expected an integer of at least 1",
        ),
        (
            lambda: Convolutional(8, 5, 1, causal=True)(torch.zeros(1, 2, 8), 3),
            "conv needs the 3 tokens before position 3 but has 0; pass the cache",
        ),
        (
            lambda: Convolutional(8, 5, 1)(torch.zeros(1, 2, 8), 3),
            "conv reads tokens on both sides, but the call begins at position 3",
        ),
        (
            lambda: Convolutional(8, 5, 1).encode(torch.zeros(1, 2, 8), 0, torch.zeros(2, 2, 8)),
            r"the preceding embeddings have shape \[2, 2, 8\]; expected \(B, N, 8\) with B = 1",
        ),
        (lambda: CAPE(7), "cape: dim is 7; expected a positive even"),
        (
            lambda: CAPE(8, global_shift=-1.0),
            "cape:global_shift=-1.0 is invalid; expected a number of at least 0",
        ),
        (
            lambda: CAPE(8, global_scale=0.5),
            "cape:global_scale=0.5 is invalid; expected a number of at least 1",
        ),
        (lambda: CAPE(8, shape=(2, 3, 4)), "cape: shape is 2x3x4; expected two axes"),
        (lambda: CAPE(8, shape=(2, 3), normalize=True), "cape:normalize is set with a shape"),
        (lambda: CAPE(8, shape=(2, 0)), "cape:shape=2x0 is invalid; expected positive integers"),
        (lambda: CAPE(8, prefix=1), "cape:prefix=1 needs a shape"),
        (
            lambda: CAPE(8, shape=(2, 3))(torch.zeros(1, 7, 8)),
            "cape: token indices range from 0 to 6, but the grid 2x3 has 6",
        ),
        (
            lambda: CAPE(8, normalize=True)(torch.zeros(1, 7, 8), 2),
            "cape:normalize is set in a call that begins at position 2; pass all tokens in one "
            "call",
        ),
        (
            lambda: TokenPosition("cape:normalize", 8, 16, causal=True),
            "cape:normalize is set in a causal model",
        ),
        (
            lambda: Sinusoidal(8, shape=(2, 3))(torch.zeros(1, 2, 8), 5),
            "sinusoidal: positions range from 5 to 6; expected 0 to 5, because the grid 2x3 has 6",
        ),
        (lambda: Sinusoidal(6, shape=(2, 3)), r"dim is 6; expected.*2 \* axes = 4"),
        (lambda: Sinusoidal(8)(torch.zeros(2, 8)), r"embeddings have shape \[2, 8\]"),
        (
            lambda: Sinusoidal(8)(
                torch.zeros(1, 3, 8), lengths=torch.tensor([3]), cache=TokenCache()
            ),
            "lengths and a cache are both given",
        ),
        (
            lambda: Sinusoidal(8)(torch.zeros(2, 3, 8), lengths=torch.tensor([3])),
            r"lengths have shape \[1\]; expected \(B,\) = \(2,\)",
        ),
        (lambda: TokenEncoding("rope", 8), "position rope acts inside attention"),
        (
            lambda: gnomon.grid_sinusoid((2, 0), 8),
            r"the shape of a grid is \[2, 0\]; expected positive",
        ),
        (lambda: gnomon.grid_sinusoid((2, 2), 8, prefix=-1), "prefix is -1"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Sinusoidal(8)(torch.zeros(1, 3, 8, dtype=torch.int64)),
            "sinusoidal: embeddings have dtype Long",
        ),
        (
            lambda: Sinusoidal(8)(torch.zeros(1, 3, 8), lengths=torch.tensor([2.0])),
            "sinusoidal: lengths have dtype Float; expected integers",
        ),
        (lambda: Sinusoidal(8)(torch.zeros(1, 3, 8), lengths=[0.5]), r"lengths\[0\] is a float"),
        (lambda: CAPE(8)([0.0]), "embeddings is a list; expected a Tensor"),
        (lambda: TokenPosition("cape", 8, 16)([0.0]), "embeddings is a list; expected a Tensor"),
        (lambda: gnomon.grid_sinusoid((2.5, 2), 8), r"shape is \(2.5, 2\); expected a sequence of"),
        (lambda: gnomon.grid_sinusoid(4, 8), "shape is 4; expected a sequence of integers"),
    ],
)
def test_wrong_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_golden_convolution():
    """Uses the module, weights and expected numbers of tests/torch/nn_test.cc."""
    module = Convolutional(4, 3, 2).double()
    with torch.no_grad():
        for n, p in enumerate(module.parameters()):
            index = torch.arange(p.numel(), dtype=torch.float64)
            p.copy_((index * 0.7 + n).sin().reshape(p.shape))
    x = (torch.arange(20, dtype=torch.float64) * 0.37).cos().reshape(1, 5, 4)
    expected = x + convolution(module, x, 3, 2, -1)
    torch.testing.assert_close(module(x), expected)
    expected_frame = [-0.487749022173, -0.844797908636, -0.902171932861, -0.741380287787]
    torch.testing.assert_close(
        module(x)[0, 2], torch.tensor(expected_frame, dtype=torch.float64), atol=1e-9, rtol=0
    )
