"""Convenient argument forms: one value for all heads, NumPy numbers, lists."""

import functools
import inspect

import numpy as np
import pytest
import torch
from formulas import generator_of
from torch.nn import Parameter

import gnomon
from gnomon import _attention, nn, position, similarity
from gnomon.lab.models import LanguageModel

B, H, L, D = 2, 4, 6, 8

SIMILARITIES = {
    "cosine": (similarity.Cosine, 0.5),
    "laplacian": (similarity.Laplacian, 0.5),
    "gaussian": (similarity.Gaussian, 0.5),
    "umbral": (similarity.Umbral, 0.5),
    "umbral log": (functools.partial(similarity.Umbral, score="log"), 0.5),
    "umbral exp": (functools.partial(similarity.Umbral, map="exp"), 0.5),
    "penumbral": (similarity.Penumbral, 0.5),
    "penumbral height2": (functools.partial(similarity.Penumbral, score="height2"), 0.5),
    "penumbral log": (functools.partial(similarity.Penumbral, score="log"), 0.5),
    "hyperbolic": (similarity.Hyperbolic, 0.5),
    "half-space": (functools.partial(similarity.Hyperbolic, model="half_space"), 0.5),
    "ball": (functools.partial(similarity.Hyperbolic, model="ball"), 0.5),
    "klein": (functools.partial(similarity.Hyperbolic, model="klein"), 0.5),
    "lorentz's scale": (similarity.Lorentz, 0.5),
    "lorentz's c": (functools.partial(similarity.Lorentz, 0.5), 0.7),
    "lorentz's bias": (lambda bias: similarity.Lorentz(0.5, bias=bias), 0.7),
    "entailment": (similarity.Entailment, 0.5),
}


def on_grid(bias, **arguments):
    return position.Grid((2, 3), [bias, position.ALiBi(0.5)], **arguments)


# Positions in which one argument takes per-head values; all other arguments are numbers.
POSITIONS = {
    "alibi": (position.ALiBi, 0.5),
    "hype's tau": (lambda tau: position.HyPE(tau, 0.1), 0.5),
    "hype's mu": (lambda mu: position.HyPE(0.5, mu), 0.1),
    "hype's mu, abs": (lambda mu: position.HyPE(0.5, mu, "abs"), 0.1),
    "hype's mu, cosh": (lambda mu: position.HyPE(0.5, mu, "cosh"), 0.1),
    "kerple's r1": (lambda r1: position.Kerple(r1, 0.7), 0.5),
    "kerple's r2": (lambda r2: position.Kerple(0.5, r2), 0.7),
    "kerple's r2, power": (lambda r2: position.Kerple(0.5, r2, "power"), 0.7),
    "sandwich": (position.Sandwich, 0.5),
    "scalable softmax": (position.ScalableSoftmax, 0.5),
    "alibi on a grid": (lambda slopes: on_grid(position.ALiBi(slopes)), 0.5),
    "hype on a grid": (lambda tau: on_grid(position.HyPE(tau, 0.1)), 0.5),
    "kerple on a grid": (lambda r1: on_grid(position.Kerple(r1, 0.7)), 0.5),
}


def draw(*shapes):
    generator = generator_of(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


# Drawn once, because random numbers are not allowed under vmap.
TOKENS = draw((B, H, L, D), (B, 2, L, D), (B, 2, L, D))
NODES = draw((L, H, D), (L, 2, D), (L, 2, D))
INDICES = torch.randint(L, (3 * L,), generator=generator_of(0))


def make_tokens(dtype=torch.float64):
    return [x.to(torch.get_default_device(), dtype, copy=True) for x in TOKENS]


def make_graph():
    device = torch.get_default_device()
    nodes = (x.to(device, copy=True) for x in NODES)
    return *nodes, torch.arange(0, 3 * L + 1, 3), INDICES.to(device)


def of_similarity(make, value):
    return gnomon.attention(*make_tokens(), similarity=make(value), causal=True, return_lse=True)


def of_graph(make, value):
    return gnomon.graph_attention(*make_graph(), make(value), return_lse=True)


def of_position(make, value):
    return gnomon.attention(*make_tokens(), position=make(value), return_lse=True)


HEAD_VALUES = {
    **{f"{name}": (of_similarity, *case) for name, case in SIMILARITIES.items()},
    **{f"{name} in a graph": (of_graph, *case) for name, case in SIMILARITIES.items()},
    **{name: (of_position, *case) for name, case in POSITIONS.items()},
}


def test_all_terms_with_values_of_heads_are_covered():
    covered = {type(make(number)) for _, make, number in HEAD_VALUES.values()}
    catalogue = gnomon.catalogue()
    for module, entries in zip(
        (similarity, position), (catalogue["similarities"], catalogue["positions"]), strict=True
    ):
        for entry in entries:
            if any(p["kind"] == "per_head" for p in entry["parameters"]) and not entry["library"]:
                assert getattr(module, entry["class_name"]) in covered


def gradient_of(call, make, value):
    o, lse = call(make, value)
    (o.square().sum() + lse.sin().sum()).backward()
    return o.detach(), lse.detach(), value.grad


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, torch.Tensor.requires_grad_) for name in HEAD_VALUES), ("alibi", Parameter)],
)
def test_one_value_for_all_heads(name, kind):
    call, make, number = HEAD_VALUES[name]
    o, lse, gradient = gradient_of(call, make, kind(torch.tensor(number, dtype=torch.float64)))
    each = torch.full((H,), number, dtype=torch.float64, requires_grad=True)
    expected_o, expected_lse, of_each = gradient_of(call, make, each)
    assert torch.equal(o, expected_o)
    assert torch.equal(lse, expected_lse)
    assert gradient.shape == ()
    torch.testing.assert_close(gradient, of_each.sum(), rtol=1e-12, atol=1e-12)
    assert gradient != 0


@pytest.mark.parametrize("name", HEAD_VALUES)
def test_one_value_for_all_heads_compiled(name):
    call, make, number = HEAD_VALUES[name]

    def step(value):
        o, lse = call(make, value)
        return o.square().sum() + lse.sin().sum()

    value = Parameter(torch.tensor(number, dtype=torch.float64))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=False)
    (gradient,) = torch.autograd.grad(compiled(value), value)
    (expected,) = torch.autograd.grad(step(value), value)
    assert gradient.shape == ()
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", ["gaussian", "penumbral in a graph", "hype's tau"])
def test_one_value_for_all_heads_of_each_sample(name):
    call, make, number = HEAD_VALUES[name]
    values = number * torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64)
    results = torch.func.vmap(lambda value: call(make, value)[0])(values)
    gradients = torch.func.vmap(torch.func.grad(lambda value: call(make, value)[0].square().sum()))(
        values
    )
    assert gradients.shape == values.shape
    for value, result, gradient in zip(values, results, gradients, strict=True):
        torch.testing.assert_close(result, call(make, value)[0])
        expected = torch.func.grad(lambda value: call(make, value)[0].square().sum())(value)
        torch.testing.assert_close(gradient, expected)


def test_one_value_for_all_heads_of_low_precision():
    """Tests a float32 value with bfloat16 tokens, and a bfloat16 value."""
    q, k, v = make_tokens(torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        gamma = Parameter(torch.tensor(0.5, dtype=dtype))
        o = gnomon.attention(q, k, v, similarity=similarity.Laplacian(gamma))
        assert torch.equal(o, gnomon.attention(q, k, v, similarity=similarity.Laplacian(0.5)))
        o.float().square().sum().backward()
        assert (gamma.grad.shape, gamma.grad.dtype) == ((), dtype)


def test_one_value_for_all_heads_of_hype_augment():
    q, k, _ = make_tokens()
    for grid in (None, (2, 3)):
        values = [Parameter(torch.tensor(x, dtype=torch.float64)) for x in (0.5, 0.1)]
        ours = gnomon.hype_augment(q, k, *values, axes=grid)
        for tensor, expected in zip(
            ours, gnomon.hype_augment(q, k, 0.5, 0.1, axes=grid), strict=True
        ):
            assert torch.equal(tensor, expected)
        (ours[0].sum() + ours[1].square().sum()).backward()
        assert all(value.grad.shape == () for value in values)


def test_two_values_for_four_heads_stay_an_error():
    for value in (torch.ones(2), torch.ones(1), torch.ones(1, 1)):
        with pytest.raises(ValueError, match=r"expected \(H,\) = \(4,\), or \(\) if shared"):
            of_similarity(similarity.Laplacian, value.double())


def module(**arguments):
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(16, H, position="alibi").double()
    torch.manual_seed(0)
    return attention(torch.randn(B, L, 16, dtype=torch.float64), **arguments)


def encoding(spec, **arguments):
    torch.manual_seed(1)
    encode = nn.TokenPosition(spec, 16, 32).double().eval()
    torch.manual_seed(0)
    return encode(torch.randn(B, L, 16, dtype=torch.float64), **arguments)


def attend(**arguments):
    return gnomon.attention(*make_tokens(), position=position.ALiBi(0.5), **arguments)


def linear(**arguments):
    return gnomon.linear_attention(*make_tokens(), **arguments)


# Calls that accept per-batch integers.
BATCH_CALLS = {
    "key_lengths": (attend, "key_lengths", 4),
    "key_starts": (attend, "key_starts", 2),
    "query_offset": (attend, "query_offset", 3),
    "key_lengths of a module": (module, "key_lengths", 4),
    "key_starts of a module": (module, "key_starts", 2),
    "query_offset of a module": (module, "query_offset", 3),
    "key_lengths of linear attention": (linear, "key_lengths", 4),
    "favor": (functools.partial(linear, feature="favor"), "key_lengths", 4),
    "causal": (functools.partial(linear, causal=True), "key_lengths", 4),
    "lengths of a convolution": (
        functools.partial(encoding, "conv:kernel=5:groups=4"),
        "lengths",
        4,
    ),
    "lengths of cape": (functools.partial(encoding, "cape:normalize"), "lengths", 4),
}
# Ways to pass a number, and the equivalent per-batch tensor.
NUMBERS = {
    "an int": int,
    "int64": np.int64,
    "uint8": np.uint8,
    "an array without axes": np.array,
    "a tensor without axes": torch.tensor,
    "an int32 tensor": functools.partial(torch.tensor, dtype=torch.int32),
}
LISTS = {
    "a list": list,
    "a tuple": tuple,
    "an array": np.array,
    "NumPy's numbers": lambda numbers: [np.int32(number) for number in numbers],
    "tensors": lambda numbers: [torch.tensor(number) for number in numbers],
    "int16": lambda numbers: np.array(numbers, np.int16),
    "an int32 tensor": functools.partial(torch.tensor, dtype=torch.int32),
}


@pytest.mark.parametrize("name", BATCH_CALLS)
def test_one_integer_for_all_batches(name):
    call, argument, number = BATCH_CALLS[name]
    expected = call(**{argument: torch.full((B,), number)})
    for way, make in NUMBERS.items():
        assert torch.equal(call(**{argument: make(number)}), expected), way
    other = call(**{argument: torch.full((B,), number - 1)})
    # ALiBi biases do not change if all positions are shifted.
    assert argument == "query_offset" or not torch.equal(other, expected)


@pytest.mark.parametrize("name", BATCH_CALLS)
def test_integers_in_a_list(name):
    call, argument, number = BATCH_CALLS[name]
    numbers = [number, number - 1]
    expected = call(**{argument: torch.tensor(numbers)})
    for way, make in LISTS.items():
        assert torch.equal(call(**{argument: make(numbers)}), expected), way


@pytest.mark.parametrize("zero", [0, np.int64(0), np.array(0)])
def test_no_offset_on_a_grid(zero):
    """A grid does not support per-batch offsets, but supports a single number."""
    grid = on_grid(position.ALiBi(0.5))
    ours = gnomon.attention(*make_tokens(), position=grid, query_offset=zero)
    assert torch.equal(ours, gnomon.attention(*make_tokens(), position=grid))


def test_a_range_of_integers():
    ours = attend(key_lengths=range(3, 5))
    assert torch.equal(ours, attend(key_lengths=torch.tensor([3, 4])))


@pytest.mark.parametrize("call", [attend, module])
@pytest.mark.parametrize("way", LISTS)
def test_segments_in_lists(call, way):
    queries, keys = [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]], [[0, 0, 1, 1, 1, 1], [0] * 4 + [1, 2]]
    make = LISTS[way]
    expected = call(query_segments=torch.tensor(queries), key_segments=torch.tensor(keys))
    if way != "an int32 tensor":
        nested = call(
            query_segments=[make(row) for row in queries]
            if way == "tensors"
            else make(queries)
            if way in ("an array", "int16")
            else list(map(make, queries)),
            key_segments=list(map(list, keys)),
        )
        assert torch.equal(nested, expected)
    # A single row of segment numbers applies to all batch elements.
    for row in (0, 1):
        ours = call(query_segments=make(queries[row]), key_segments=make(keys[row]))
        repeated = call(
            query_segments=torch.tensor([queries[row]] * B),
            key_segments=torch.tensor([keys[row]] * B),
        )
        assert torch.equal(ours, repeated)
        assert torch.equal(ours[row], expected[row])


def test_a_graph_in_lists():
    q, k, v, indptr, indices = make_graph()
    expected = gnomon.graph_attention(q, k, v, indptr, indices)
    for make in (list, tuple, np.array, functools.partial(np.array, dtype=np.int32)):
        ours = gnomon.graph_attention(q, k, v, make(indptr.tolist()), make(indices.tolist()))
        assert torch.equal(ours, expected)


def test_positions_in_lists():
    distances = [[-3, 0], [2, 200]]
    assert torch.equal(
        gnomon.t5_bucket(distances, True), gnomon.t5_bucket(torch.tensor(distances), True)
    )
    assert torch.equal(gnomon.sinusoid(range(5), 8), gnomon.sinusoid(torch.arange(5), 8))


def test_integers_of_one_number_elsewhere():
    """Zero-dimensional tensors are accepted as integer arguments."""
    two = torch.tensor(2)
    q, k, v = make_tokens()
    rope = position.RoPE()
    assert torch.equal(linear(rope=rope, query_offset=two), linear(rope=rope, query_offset=2))
    for augmented, expected in zip(
        gnomon.hype_augment(q, k, 0.5, 0.1, copies=two, query_offset=two),
        gnomon.hype_augment(q, k, 0.5, 0.1, copies=2, query_offset=2),
        strict=True,
    ):
        assert torch.equal(augmented, expected)
    assert torch.equal(encoding("sinusoidal", offset=two), encoding("sinusoidal", offset=2))
    table = torch.randn(5, D, dtype=torch.float64)
    assert torch.equal(
        gnomon.attention(q, k, v, position=position.Relative(table, two)),
        gnomon.attention(q, k, v, position=position.Relative(table, 2)),
    )
    assert torch.equal(
        gnomon.attention(q, k, v, dropout=0.5, seed=two),
        gnomon.attention(q, k, v, dropout=0.5, seed=2),
    )


@pytest.mark.parametrize(
    "make",
    [np.float16, np.float32, np.float64, np.array, functools.partial(np.array, dtype=np.float32)],
)
def test_numpy_numbers(make):
    """Tests with a number that is exact in all dtypes."""
    q, k, v = make_tokens()
    number = make(0.5)
    for arguments in (
        lambda x: {"scale": x},
        lambda x: {"dropout": x, "seed": 3},
        *(lambda x, make=make: {"similarity": make(x)} for make, _ in SIMILARITIES.values()),
        *(lambda x, make=make: {"position": make(x)} for make, _ in POSITIONS.values()),
        lambda x: {"similarity": similarity.Umbral(1.0, r=x)},
        lambda x: {"similarity": similarity.Penumbral(1.0, r=x)},
        lambda x: {"similarity": similarity.Entailment(1.0, K=x)},
        lambda x: {"position": position.RoPE(base=x)},
    ):
        ours = gnomon.attention(q, k, v, **arguments(number))
        assert torch.equal(ours, gnomon.attention(q, k, v, **arguments(0.5)))
    scores = q[..., :1], k[..., :1], v
    assert torch.equal(
        gnomon.attention(*scores, similarity=similarity.Additive(number)),
        gnomon.attention(*scores, similarity=similarity.Additive(0.5)),
    )
    graph = make_graph()
    assert torch.equal(
        gnomon.graph_attention(*graph, scale=number), gnomon.graph_attention(*graph, scale=0.5)
    )
    for ours, expected in zip(
        gnomon.hype_augment(q, k, number, number),
        gnomon.hype_augment(q, k, 0.5, 0.5),
        strict=True,
    ):
        assert torch.equal(ours, expected)
    points = torch.rand(2, 5, 3)
    for of in (gnomon.cones.ancestor, gnomon.cones.lowest_common_ancestor):
        assert torch.equal(of(*points, r=number), of(*points, r=0.5))
    assert nn.MultiheadAttention(16, 4, dropout=number).dropout == 0.5
    cape = nn.CAPE(8, global_shift=number, local_shift=number, global_scale=make(1.5))
    assert cape.spec == nn.CAPE(8, 0.5, 0.5, 1.5).spec
    assert LanguageModel(11, 8, 1, 2, 16, dropout=number).options["dropout"] == 0.5


def attend_with(**arguments):
    q, k, v = make_tokens()
    return gnomon.attention(q, k, v, **arguments)


def shadow(r):
    return gnomon.cones.ancestor(*torch.rand(2, 5, 3, generator=generator_of(1)), r=r)


# Arguments that take numbers: a call, the name in messages, and the number.
NUMBER_CALLS = {
    "scale": (lambda x: attend_with(scale=x), "scale", 0.5),
    "dropout": (lambda x: attend_with(dropout=x, seed=3), "dropout", 0.5),
    "tolerance": (lambda x: attend_with(tolerance=x), "tolerance", 0.25),
    "softcap": (
        lambda x: attend_with(similarity=similarity.Dot(softcap=x)), "softcap of dot", 0.5,
    ),
    "umbral's r": (
        lambda x: attend_with(similarity=similarity.Umbral(1.0, r=x)), "r of umbral", 0.5,
    ),
    "penumbral's r": (
        lambda x: attend_with(similarity=similarity.Penumbral(1.0, r=x)), "r of penumbral", 0.5,
    ),
    "K": (
        lambda x: attend_with(similarity=similarity.Entailment(1.0, K=x)), "K of entailment", 0.5,
    ),
    "base": (lambda x: attend_with(position=position.RoPE(base=x)), "base of rope", 50.0),
    "a graph's scale": (lambda x: gnomon.graph_attention(*make_graph(), scale=x), "scale", 0.5),
    "a cone's r": (shadow, "r", 0.5),
    "a module's dropout": (
        lambda x: nn.MultiheadAttention(16, 4, dropout=x).dropout, "dropout", 0.5,
    ),
    "a module's tolerance": (
        lambda x: nn.MultiheadAttention(16, 4, tolerance=x).tolerance, "tolerance", 0.25,
    ),
    "cape's shift": (lambda x: nn.CAPE(8, global_shift=x).spec, "global_shift of cape", 0.5),
    "a model's dropout": (
        lambda x: LanguageModel(11, 8, 1, 2, 16, dropout=x).options["dropout"], "dropout", 0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBER_CALLS)
def test_numbers_in_tensors_without_axes(name):
    call, argument, number = NUMBER_CALLS[name]
    expected = call(number)
    for dtype in (torch.float16, torch.float32, torch.float64):
        ours = call(torch.tensor(number, dtype=dtype))
        assert type(ours) is type(expected)
        assert torch.equal(ours, expected) if isinstance(ours, torch.Tensor) else ours == expected
        # A tensor that requires grad is rejected, because converting it to a number would lose its
        # gradient.
        with pytest.raises(
            ValueError,
            match=f"{argument} requires grad, but it cannot be trained; expected a number",
        ):
            call(torch.tensor(number, dtype=dtype, requires_grad=True))
    for wrong in (torch.full((1,), number), torch.tensor(True), torch.tensor(1j)):
        # Encodings have their own message for an invalid specification.
        with pytest.raises((TypeError, ValueError), match=argument.split(" of ")[0]):
            call(wrong)


def test_numpy_numbers_are_not_rounded():
    """0.1 in float32 differs from the Python number 0.1."""
    q, k, v = make_tokens()
    for make in (lambda x: {"scale": x}, lambda x: {"similarity": similarity.Gaussian(x)}):
        ours = gnomon.attention(q, k, v, **make(np.float32(0.1)))
        assert torch.equal(ours, gnomon.attention(q, k, v, **make(float(np.float32(0.1)))))
        assert not torch.equal(ours, gnomon.attention(q, k, v, **make(0.1)))


@pytest.mark.parametrize("make", [np.bool_, np.array])
def test_numpy_flags(make):
    q, k, v = make_tokens()
    graph = make_graph()
    for flag in (True, False):
        ours = make(flag)
        assert torch.equal(attend(causal=ours), attend(causal=flag))
        assert torch.equal(module(causal=ours), module(causal=flag))
        assert torch.equal(linear(causal=ours), linear(causal=flag))
        assert isinstance(gnomon.attention(q, k, v, return_lse=ours), tuple) is flag
        assert isinstance(gnomon.graph_attention(*graph, return_lse=ours), tuple) is flag
        buckets = torch.arange(-40, 40)
        assert torch.equal(gnomon.t5_bucket(buckets, ours), gnomon.t5_bucket(buckets, flag))
        table = torch.randn(32, H, dtype=torch.float64)
        assert torch.equal(
            gnomon.attention(q, k, v, position=position.T5(table, ours)),
            gnomon.attention(q, k, v, position=position.T5(table, flag)),
        )
        assert (nn.MultiheadAttention(8, 2, bias=ours).q_proj.bias is not None) is flag
        assert nn.Convolutional(8, 3, 2, causal=ours).causal is flag
        assert nn.CAPE(8, normalize=ours).spec == nn.CAPE(8, normalize=flag).spec


@pytest.mark.parametrize("number", [np.bool_(True), np.complex64(1), np.str_("1"), np.ones(4)])
def test_values_that_are_not_numbers(number):
    q, k, v = make_tokens()
    for argument in ("scale", "dropout", "seed"):
        with pytest.raises(TypeError, match=rf"gnomon.attention: {argument} is a "):
            gnomon.attention(q, k, v, **{argument: number})
    with pytest.raises(
        TypeError, match=r"gamma of gaussian is an? .*; expected a number or a tens"
    ):
        gnomon.attention(q, k, v, similarity=similarity.Gaussian(number))
    with pytest.raises(TypeError, match="prefix is a "):
        position.Grid((2, 3), [position.ALiBi(0.5)] * 2, prefix=number)


@pytest.mark.parametrize("flag", [1, 0.0, np.int64(1), np.array([True]), "True", None])
def test_values_that_are_not_flags(flag):
    with pytest.raises(TypeError, match=r"causal is an? .*; expected True or False"):
        attend(causal=flag)


WRONG_INTEGERS = {
    "a float": ([4.0, 3], TypeError, r"key_lengths\[0\] is a float; expected an integer"),
    "a flag": ([4, True], TypeError, r"key_lengths\[1\] is a bool; expected an integer"),
    "a word": ("44", TypeError, "key_lengths is a str; expected a Tensor, a sequence of integers"),
    "a number": (4.5, TypeError, "key_lengths is a float; expected a Tensor, a sequence of"),
    "floats": (np.ones(2), TypeError, r"key_lengths\[0\] is a float; expected an integer"),
    "a large one": (
        [4, 2**63],
        ValueError,
        r"key_lengths\[1\] is 9223.*; expected an integer in the int64 range",
    ),
    "rows": ([[1, 2], [3]], ValueError, "key_lengths has rows of different lengths"),
    "too many": ([1, 2, 3], ValueError, r"has shape \[3\]; expected \(B,\) = \(2,\), or \(\)"),
    "a tensor of floats": (torch.tensor(4.0), TypeError, "key_lengths has dtype Float"),
    "beyond the keys": (7, ValueError, r"key_lengths\[0\] is 7; expected a value from 0 to Lk = 6"),
}


@pytest.mark.parametrize("name", WRONG_INTEGERS)
def test_wrong_integers(name):
    value, error, message = WRONG_INTEGERS[name]
    with pytest.raises(error, match=message):
        attend(key_lengths=value)


@pytest.mark.parametrize("call", [attend, module])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("both", [0, 2, np.int64(2), torch.tensor(2)])
def test_one_number_for_a_window(call, causal, both):
    ours = call(window=both, causal=causal)
    assert torch.equal(ours, call(window=(int(both), int(both)), causal=causal))
    assert not torch.equal(ours, call(window=(int(both), 3), causal=False))


def test_a_wrong_window():
    with pytest.raises(ValueError, match="left of window is -1; expected at least 0"):
        attend(window=-1)
    with pytest.raises(TypeError, match=r"window is a float; expected \(left, right\), one number"):
        attend(window=1.5)
    for window in ((), (1,), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"window is .*; expected \(left, right\)"):
            attend(window=window)


WAYS_COMPILED = {
    "a list": [4, 3],
    "a range": range(4, 2, -1),
    "an array": np.array([4, 3]),
    "a tensor": torch.tensor([4, 3]),
}


@pytest.mark.parametrize("way", WAYS_COMPILED)
@pytest.mark.parametrize("is_argument", [False, True])
def test_integers_compiled(way, is_argument):
    """The integers may be constants of the compiled function, or its arguments."""
    lengths = WAYS_COMPILED[way]
    if way == "a tensor":
        lengths = lengths.to(torch.get_default_device())
    tokens = make_tokens()

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def compiled(q, k, v, given=None):
        return gnomon.attention(q, k, v, key_lengths=lengths if given is None else given)

    ours = compiled(*tokens, *([lengths] if is_argument else []))
    torch.testing.assert_close(ours, gnomon.attention(*tokens, key_lengths=torch.tensor([4, 3])))


def test_numpy_numbers_compiled():
    """torch.compile treats NumPy numbers as tensors of data, so the graph breaks."""
    tokens = make_tokens()
    arguments = {
        "scale": np.float32(0.5),
        "causal": np.bool_(True),
        "window": np.int64(2),
        "dropout": np.float64(0.5),
        "seed": np.int32(3),
    }
    plain = {"scale": 0.5, "causal": True, "window": 2, "dropout": 0.5, "seed": 3}

    @functools.partial(torch.compile, backend="aot_eager")
    def compiled(*tokens, **arguments):
        return gnomon.attention(*tokens, **arguments)

    expected = gnomon.attention(*tokens, **plain)
    torch.testing.assert_close(compiled(*tokens, **arguments), expected)


@pytest.mark.real_device
def test_all_of_it_compiled():
    """A single graph supports changing lengths."""

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(q, k, v, gamma, slopes, length):
        return call(q, k, v, gamma, slopes, length)

    def call(q, k, v, gamma, slopes, length):
        return gnomon.attention(
            q,
            k,
            v,
            similarity=similarity.Gaussian(gamma),
            position=position.ALiBi(slopes),
            window=3,
            key_lengths=length,
            key_starts=[0, 1],
            query_offset=torch.tensor(0, device=q.device),
        )

    gamma, slopes = (Parameter(torch.tensor(x)) for x in (0.5, 0.1))
    for tokens in (5, 7, 9):
        q, k, v = torch.randn(3, 2, H, tokens, D)
        arguments = q, k, v, gamma, slopes, torch.tensor(tokens - 1)
        torch.testing.assert_close(compiled(*arguments), call(*arguments))
        ours = torch.autograd.grad(compiled(*arguments).square().sum(), (gamma, slopes))
        expected = torch.autograd.grad(call(*arguments).square().sum(), (gamma, slopes))
        torch.testing.assert_close(ours, expected)


def test_arguments_are_those_of_the_operators():
    """Python checks every tensor argument of the operators exactly once."""
    lowered = [
        name
        for argument in _attention._ARGUMENTS
        for name in {
            "window": ("left", "right"),
            "query_offset": ("query_offset", "query_offsets"),
        }.get(argument, (argument,))
    ]
    schema = torch.ops.gnomon.attention.default._schema.arguments
    assert sorted(lowered) == sorted(argument.name for argument in schema[7:])
    assert {"similarity", "position", *_attention._ARGUMENTS} == set(
        _attention.AttentionArguments.__annotations__
    )


def test_calls_pass_only_the_given_arguments():
    """Every argument that is passed to an operator costs time, so defaults are not passed."""

    def passed(**given):
        call = _attention.lower_call("test", TOKENS[0], given, _attention.AttentionArguments)
        return _attention.passed(call)

    assert passed() == []
    assert passed(causal=True) == [True]
    assert passed(window=(3, None)) == [False, 3, None]
    defaults = list(_attention.UNSET.values())
    assert passed(tolerance=0.5) == [*defaults[: defaults.index(2**-24)], 0.5]
    signature = inspect.signature(gnomon.attention).parameters
    assert signature["tolerance"].default == 2**-24
    assert signature["aggregation"].default == "mean"


def with_module(q, k, v, **wrong):
    return nn.MultiheadAttention(D, 2)(q[:, 0], **wrong)


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        (gnomon.attention, "causl", "did you mean causal?"),
        (gnomon.attention, "window_sizes", "did you mean window?"),
        (gnomon.attention, "zzz", "expected one of similarity, .*, return_lse"),
        (gnomon.attention_weights, "dropout", "expected one of"),
        # The counterpart of dropout_p, dropout, is not an argument of this function.
        (gnomon.attention_weights, "dropout_p", "expected one of"),
        (gnomon.attention_weights, "is_causal", "expected causal="),
        (with_module, "sink", "expected one of"),
        (with_module, "key_length", "did you mean key_lengths?"),
        (with_module, "is_causal", "expected causal="),
        (gnomon.attention_weights, "row", "did you mean rows?"),
        # The error names the unknown argument even if a required argument is also missing.
        (gnomon.graph_attention, "indptrs", "did you mean indptr?"),
        (gnomon.graph_attention, "edge_biases", "did you mean edge_bias?"),
        (gnomon.graph_attention, "zzz", "expected one of q, k, v, indptr, .*, return_lse"),
        (gnomon.linear_attention, "features", "did you mean feature?"),
        (gnomon.linear_attention, "is_causal", "did you mean causal?"),
        (gnomon.scaled_dot_product_attention, "causal", "did you mean is_causal?"),
        (gnomon.scaled_dot_product_attention, "dropout", "did you mean dropout_p?"),
        (gnomon.varlen_attention, "cu_seqlen_q", "did you mean cu_seqlens_q?"),
        (gnomon.varlen_attention, "cu_seqlens", "expected cu_seqlens_q"),
        (gnomon.varlen_attention, "causl", "did you mean causal?"),
    ],
)
def test_arguments_that_are_not_there_are_named(function, name, hint):
    tokens = [x.float() for x in make_tokens()]
    if function is gnomon.attention_weights:
        tokens.pop()
    with pytest.raises(TypeError, match=f"unexpected argument {name}; {hint}"):
        function(*tokens, **{name: 0.5})


# Argument names in other libraries, and the hint in the error message (a regular expression).
FOREIGN = {
    "attn_mask": "mask=.*PairBias",
    "is_causal": "causal=",
    "dropout_p": "dropout=",
    "enable_gqa": "leave it out",
    "score_mod": "position=.*PairBias",
    "block_mask": "flex.mask_arguments",
    "softmax_scale": "scale=",
    "cu_seqlens_q": "gnomon.varlen_attention",
    "window_size": "window=",
    "alibi_slopes": r"position=gnomon.position.ALiBi\(slopes\)",
    "softcap": "similarity=.*Dot",
    "key_padding_mask": "key_lengths=",
    "need_weights": "gnomon.attention_weights",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_arguments_of_other_libraries_name_ours(name):
    with pytest.raises(
        TypeError, match=f"gnomon.attention: unexpected argument {name}; .*{FOREIGN[name]}"
    ):
        gnomon.attention(*make_tokens(), **{name: None})


def test_arguments_of_other_libraries_are_rejected():
    ours = set(inspect.signature(gnomon.attention).parameters)
    assert not ours & _attention.FOREIGN_ARGUMENTS.keys()
    named = {argument for argument, _ in _attention.FOREIGN_ARGUMENTS.values()}
    assert named - {None} <= ours


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: similarity.Umbral(gama=1.0),
            "similarity.Umbral: unexpected parameter gama; did you mean gamma?",
        ),
        (
            lambda: similarity.Umbral(1.0, maps="exp"),
            "unexpected parameter maps; did you mean map?",
        ),
        (
            lambda: position.T5(tabel=torch.ones(32, H)),
            "T5: unexpected parameter tabel; did you mean table?",
        ),
        (lambda: position.Grid((2, 3), [0.5], zzz=1), "expected one of shape, axes, prefix"),
        (lambda: similarity.Umbral(), "missing 1 required positional argument: 'gamma'"),
    ],
)
def test_parameters_that_are_not_there_are_named(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_signatures_of_terms_are_their_parameters():
    assert list(inspect.signature(similarity.Umbral).parameters) == ["gamma", "r", "map", "score"]


@pytest.mark.real_device
def test_terms_are_made_in_compiled_functions():
    tokens = make_tokens()

    def step(q, k, v):
        return gnomon.attention(q, k, v, similarity=similarity.Umbral(gamma=0.5, r=0.2))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tokens), step(*tokens))


SPARSE = torch.ones(2, 2, dtype=torch.int64).to_sparse()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(
            (name, lambda name=name: gnomon.attention(*make_tokens(), **{name: SPARSE}))
            for name in (
                *("key_lengths", "key_starts", "query_segments", "query_offset", "positions"),
                *("mask", "sink", "temperature"),
            )
        ),
        ("cu_seqlens_q", lambda: gnomon.varlen_attention(*torch.ones(3, 2, 1, 4), SPARSE)),
        ("indices", lambda: gnomon.graph_attention(*torch.ones(3, 1, 1, 4), [0, 1], SPARSE)),
        ("edge_index", lambda: gnomon.csr(SPARSE, 2)),
        ("positions", lambda: gnomon.sinusoid(SPARSE, 4)),
        ("u", lambda: gnomon.cones.ancestor(SPARSE, SPARSE)),
        ("tau", lambda: gnomon.hype_augment(*make_tokens()[:2], SPARSE, 0.5)),
        ("slopes", lambda: position.ALiBi(SPARSE)),
        ("gamma", lambda: similarity.Umbral(SPARSE)),
        (r"tensors\[0\]", lambda: position.Specified("alibi:slopes=tensor", (SPARSE,))),
        ("query", lambda: nn.MultiheadAttention(8, 2)(SPARSE)),
        (
            "key_padding_mask",
            lambda: nn.MultiheadAttention(8, 2)(torch.ones(2, 2, 8), key_padding_mask=SPARSE),
        ),
    ],
)
def test_sparse_tensors_are_refused_by_name(name, call):
    with pytest.raises(TypeError, match=f": {name} has layout sparse_coo; expected a strided"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: gnomon.attention(*make_tokens(), chunks=torch.ones(2, 3)),
            r"chunks is a Tensor of shape \[2, 3\]; expected \(size, before, after\)",
        ),
        (
            lambda: gnomon.attention(*make_tokens(), window=list(range(99))),
            r"window is \[0, 1, .*\.\.\.; expected \(left, right\)",
        ),
        (lambda: gnomon.grid_sinusoid(torch.ones(2, 2), 8), "shape is a Tensor of shape"),
        (
            lambda: gnomon.attention_weights(
                *make_tokens()[:2], sink=torch.zeros(H, device="meta")
            ),
            "attention_weights: sink is on meta, but q is on cpu; expected the same device",
        ),
        (lambda: nn.CAPE(8, normalize={}), "normalize of cape is a dict; expected a number"),
        (lambda: nn.Sinusoidal(8, shape=torch.nn.Identity()), "shape of sinusoidal is an Identity"),
        (lambda: nn.TorchMultiheadAttention(8, 2, kdim={}), "kdim is a dict; expected an integer"),
        (
            lambda: nn.TransformerEncoderLayer(8, 2, dim_feedforward=None),
            "dim_feedforward is a NoneType; expected an integer",
        ),
        (
            lambda: nn.TransformerEncoderLayer(8, 2, layer_norm_eps="x"),
            "layer_norm_eps is a str; expected a number",
        ),
    ],
)
def test_wrong_values_are_named_in_one_short_line(call, message):
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.MultiheadAttention(D, 2, positon="rope"),
            "gnomon.nn.MultiheadAttention: unexpected argument positon; did you mean position?",
        ),
        (
            lambda: nn.MultiheadAttention(D, 2, batch_first=True),
            "unexpected argument batch_first; gnomon.nn.TorchMultiheadAttention accepts",
        ),
        (
            lambda: nn.TransformerEncoderLayer(D, 2, similarty="dot"),
            "TransformerEncoderLayer: unexpected argument similarty; did you mean similarity?",
        ),
        (lambda: nn.CAPE(D, normalise=True), "gnomon.nn.CAPE: .*; did you mean normalize?"),
        # Other errors of Python and of constructors are unchanged.
        (lambda: nn.MultiheadAttention(D), "missing 1 required positional argument: 'num_heads'"),
        (lambda: nn.MultiheadAttention(D, "2"), "num_heads is a str; expected an integer"),
    ],
)
def test_constructors_name_unknown_arguments(make, message):
    with pytest.raises(TypeError, match=message):
        make()
    parameters = inspect.signature(nn.MultiheadAttention).parameters
    assert list(parameters)[:2] == ["embed_dim", "num_heads"]
