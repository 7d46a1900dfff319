"""The operators under torch.library's checks and torch.compile."""

import ast
import math
import pathlib
import re

import pytest
import torch
from formulas import POSITIONS, SIMILARITIES, Case, Mask, assert_near, values_and_gradients
from operator_checks import CHECKS, opcheck_derivatives, opcheck_forward_and_backward

import gnomon
from gnomon._attention import AttentionArguments, lower_call, passed
from gnomon.position import RoPE
from gnomon.similarity import Laplacian, Penumbral, Umbral

ops = torch.ops.gnomon


def low_level_arguments(dtype, places=False):
    """Arguments of attention_forward for umbral, with all optional arguments except head scalars.

    With `places`, tokens have explicit positions instead of offsets, and the operator builds the
    bias.
    """
    torch.manual_seed(0)
    b, h, hkv, lq, lk, d = 2, 4, 2, 5, 7, 3
    shapes = (b, h, lq, d), (b, hkv, lk, d), (b, hkv, lk, 4)
    x, y, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    dtype = torch.promote_types(dtype, torch.float32)
    rows = torch.rand(1, b, h, lq, dtype=dtype)
    columns = torch.rand(1, b, hkv, lk, dtype=dtype)
    factor = torch.rand(h, dtype=dtype)
    bias = torch.randn(1, h, lq + lk - 1, dtype=dtype)
    key_bias = torch.randn(b, h, lk, dtype=dtype)
    pairs = torch.randn(1, h, lq, lk, dtype=dtype)
    temperature = torch.rand(b, h, lq, dtype=dtype) + 0.5
    relative = [torch.randn(b, h, lq, 2, dtype=dtype), torch.randn(1, 5, 2, dtype=dtype)]
    values = torch.randn(h, 5, 4, dtype=dtype)
    of_keys = [torch.randn(b, hkv, lk, 6, dtype=dtype), torch.randn(h, 5, 6, dtype=dtype)]
    biases = [None if places else bias, key_bias, pairs, temperature]
    slopes = torch.rand(h, dtype=dtype) if places else None
    tensors = [x, y, v, rows, columns, None, factor, *biases, *relative, values, *of_keys, slopes]
    constants = torch.randn(b, h, lk, dtype=dtype) / 1024, torch.randn(b, h, lq, dtype=dtype)
    mask = torch.rand(b, 1, lq, lk) < 0.8
    lengths = [torch.tensor([0, 1]), torch.tensor([7, 5])]
    offsets = [torch.tensor([2, 0]), None, None]
    if places:
        offsets = [None, torch.randint(9, (b, lq)), torch.randint(9, (b, lk))]
    terms = ("alibi:slopes=tensor", [1, h]) if places else ("", None)
    segments = [torch.tensor([[0, 0, 1, 1, 2]] * 2), torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * 2)]
    options = ("umbral", 0, 4, 0, [3, 1, 1], None, *terms)
    options += ("clip", 0.5, 0.25, 1.5, True, 2.0**-24, False)
    pages = [None] * 3
    integers = (*lengths, *offsets, *segments, *pages, torch.tensor([3]))
    return tensors, (*constants, mask, *integers, *options)


@pytest.mark.cpu("float64, positions and tokens of two dtypes")
@pytest.mark.parametrize("places", [False, True], ids=["offsets", "positions"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_opcheck_of_the_pair(dtype, places):
    opcheck_forward_and_backward(
        ops.attention_forward, ops.attention_backward, *low_level_arguments(dtype, places)
    )


@pytest.mark.cpu("forward mode and second derivatives")
@pytest.mark.parametrize("kernel", ["reference", "fused"])
def test_opcheck_of_derivatives(kernel):
    tensors, rest = low_level_arguments(torch.float32)
    if kernel == "fused":
        tensors[9:] = [None] * len(tensors[9:])  # the pair bias and all later tensors
        _, _, _, *lengths, offsets = rest[:6]
        options = ("umbral", 0, 4, 0, [3, 1, 1], None, "", None)
        options += ("clip", 1.0, 0.0, 0.0, True, 0.0, False)
        rest = (None, None, None, *lengths, offsets, *[None] * 8, *options)
    opcheck_derivatives(ops.attention_jvp, ops.attention_backward_jvp, tensors, rest)


def cone_map_formula(tokens, function, map, r):
    """The mapped tokens and their scalars, as compositions of PyTorch operators."""
    w, z = tokens[..., :-1], tokens[..., -1]
    if function == "umbral":
        height = z if map == "none" else z.clamp(-30, 30).exp()
        scale = torch.ones_like(height) if map == "none" else height
        return scale[..., None] * w / math.sinh(r), height[None]
    u = (z / r).clamp(0, 1) if map == "none" else z.sigmoid()
    rest = 1 - u if map == "none" else (-z).sigmoid()
    square = rest * (1 + u)
    a = torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)
    scale = torch.full_like(u, 1 / r) if map == "none" else u
    return scale[..., None] * w, torch.stack([u * u / (1 + a), u * u])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("function", "map"),
    [
        *(("umbral", map) for map in ("psi", "none")),
        *(("penumbral", map) for map in ("xi", "none")),
    ],
    ids=str,
)
def test_cone_map_and_its_gradients(function, map, dtype):
    torch.manual_seed(0)
    tokens = []
    for heads, length in ((4, 9), (2, 11)):
        # The tensors are not contiguous, and some heights exceed the limits.
        token = torch.randn(2, length, heads, 5, dtype=dtype).transpose(1, 2)
        token[..., 0, 4] = 40
        token[..., 1, 4] = -40
        tokens.append(token.requires_grad_())
    got = ops.cone_map(*tokens, function, map, 0.7)
    weights = [torch.randn_like(part) for part in got]
    got_all = [*got, *torch.autograd.grad(got, tokens, weights)]
    exact = [token.detach().double().requires_grad_() for token in tokens]
    expected = sum((cone_map_formula(t, function, map, 0.7) for t in exact), ())
    expected_all = [
        *expected,
        *torch.autograd.grad(expected, exact, [weight.double() for weight in weights]),
    ]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    for ours, theirs in zip(got_all, expected_all, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.real_device
def test_opcheck_of_the_backward_cone_map():
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 5, 3), torch.randn(1, 2, 6, 3)
    gradients = [torch.randn_like(t) for t in ops.cone_map(q, k, "penumbral", "xi", 1.0)]
    for needed in ([True, True], [False, True]):
        for given in (gradients, [gradients[0], None, None, gradients[3]]):
            torch.library.opcheck(
                ops.cone_map_backward,
                (*given, q, k, "penumbral", "xi", 1.0, needed),
                test_utils=CHECKS,
            )


@pytest.mark.parametrize(
    "arguments",
    [("umbral", "xi", 1.0), ("penumbral", "psi", 1.0), ("dot", "none", 1.0)],
    ids=str,
)
def test_cone_map_names_its_maps(arguments):
    q = torch.randn(1, 1, 2, 3)
    with pytest.raises(ValueError, match=r"expected (psi|umbral)"):
        ops.cone_map(q, q, *arguments)


@pytest.mark.parametrize("shape", [(1, 1, 2, 1), (1, 2, 3)], ids=str)
def test_cone_map_checks_its_tokens(shape):
    with pytest.raises(ValueError, match="k has shape"):
        ops.cone_map(torch.randn(1, 1, 2, 3), torch.randn(shape), "umbral", "psi", 0.1)
    with pytest.raises(TypeError, match="k has dtype"):
        ops.cone_map(torch.randn(1, 1, 2, 3), torch.randn(1, 1, 2, 3).half(), "umbral", "psi", 0.1)


def call(**given):
    """The arguments of a call in the form that operators accept."""
    return passed(lower_call("test", torch.empty(0), given, AttentionArguments))


COMPOSITE_CHECKS = {
    "attention": lambda q: (
        ops.attention_with_lse,
        (
            *(q, q, q, "penumbral:gamma=tensor", [torch.ones(2, requires_grad=True)]),
            *(["rope", "alibi:slopes=0.5"], []),
            *call(
                causal=True,
                window=(3, None),
                query_segments=torch.tensor([[0] * 5 + [1] * 4]),
                key_segments=torch.tensor([[0] * 4 + [1] * 5]),
                query_offset=torch.tensor([2]),
                chunks=(3, 1, 1),
                sink=torch.zeros(2, requires_grad=True),
                dropout=0.5,
                seed=1,
            ),
        ),
    ),
    "attention with relative keys and values": lambda q: (
        ops.attention,
        (
            *(q, q, q, "dot", [], ["relative:max_offset=2:table=tensor:values=tensor"]),
            [torch.randn(5, 4, requires_grad=True), torch.randn(2, 5, 4, requires_grad=True)],
            *call(causal=True, scale=0.5, aggregation="einstein_midpoint"),
        ),
    ),
    "module_attention of transformer_xl": lambda q: (
        ops.module_attention,
        (
            *(q, q, q, "dot", "transformer_xl"),
            [torch.randn(size, requires_grad=True) for size in ((2, 4), (2, 4), (2, 4, 8))],
            *call(causal=True),
        ),
    ),
    "module_attention": lambda q: (
        ops.module_attention,
        (
            *(q, q, q, "dot", "t5+alibi:slopes=learned"),
            [torch.randn(32, 2, requires_grad=True), torch.zeros(2, requires_grad=True)],
            *call(causal=True),
        ),
    ),
    "module_attention of keys that a cache has rotated": lambda q: (
        ops.module_attention_of_turned_keys,
        (*(q, q, q, "dot", "rope", [], None), *call(causal=True)),
    ),
    "module_attention of keys that it rotates": lambda q: (
        ops.module_attention_of_turned_keys,
        (
            *(q.detach(), q.detach().clone(), q.detach(), "dot", "rope", []),
            *(q.detach()[:, :, :2], *call(causal=True)),
        ),
    ),
    "module_turned_keys": lambda q: (
        ops.module_turned_keys,
        (q, "dot", "rope", 2, 3, torch.arange(9)),
    ),
    "t5_bucket": lambda q: (ops.t5_bucket, (torch.arange(-200, 200), True, 32, 128)),
    "module_attention on a grid": lambda q: (
        ops.module_attention,
        (
            *(q, q, q, "dot", "alibi:shape=2x4:prefix=1:slopes=learned+rope:shape=2x4:prefix=1"),
            [torch.zeros(2, requires_grad=True)],
            *call(),
        ),
    ),
    "encode_tokens": lambda q: (
        ops.encode_tokens,
        (
            *(q[0], "conv:kernel=3:groups=2", 4, True),
            [torch.randn(s, requires_grad=True) for s in ((1, 1, 3), (4, 2, 3), (4,))],
            *(5, False, torch.tensor([9, 4]), q[0, :, :2], None),
        ),
    ),
    "encode_tokens in training": lambda q: (
        ops.encode_tokens,
        (q[0], "cape:global_shift=0:local_shift=0:global_scale=1", 4, False, [], 0, True)
        + (None, None, None),
    ),
    "grid_sinusoid": lambda q: (ops.grid_sinusoid, ([2, 3], 8, "split", 1)),
    "sinusoid": lambda q: (ops.sinusoid, (torch.arange(9), 6, "split")),
    "attention with additive scores": lambda q: (
        ops.attention,
        (
            *([q[..., :1]] * 2 + [q]),
            *("additive", [], ["alibi:slopes=0.5"], [], *call(causal=True)),
        ),
    ),
    "attention with hyperbolic distances": lambda q: (
        ops.attention,
        (
            *(
                q,
                q,
                q,
                "hyperbolic:model=half_space:beta=tensor",
                [torch.ones(2, requires_grad=True)],
            ),
            *([], [], *call()),
        ),
    ),
    "attention with centroids": lambda q: (
        ops.attention_with_lse,
        (
            *(q, q, q, "lorentz:scale=tensor:c=tensor"),
            [torch.ones(2, requires_grad=True), torch.rand(2, requires_grad=True)],
            *(["rope:angles=tensor"], [torch.rand(1, 2, 9, 2, requires_grad=True)]),
            *call(causal=True, aggregation="lorentz_centroid"),
        ),
    ),
    "attention with mixed frequencies": lambda q: (
        ops.attention,
        (
            *(q, q, q, "dot", [], ["rope_mixed:frequencies=tensor:shape=2x4:prefix=1"]),
            [torch.rand(2, 2, 2, requires_grad=True)],
            *call(),
        ),
    ),
    "aggregate_centroid": lambda q: (
        ops.aggregate_centroid,
        (q, q, "lorentz:c=tensor", [torch.rand(2, requires_grad=True)]),
    ),
    "lorentz_lift": lambda q: (
        ops.lorentz_lift,
        (q, torch.rand(2, 1, requires_grad=True), 1.0),
    ),
    "lorentz_centroid": lambda q: (
        ops.lorentz_centroid,
        (q, torch.rand(2, requires_grad=True), 1.0),
    ),
    "add_sink": lambda q: (
        ops.add_sink,
        (q, torch.randn(1, 2, 9, requires_grad=True), torch.zeros(2, requires_grad=True)),
    ),
    "cone_map": lambda q: (ops.cone_map, (q, q, "penumbral", "xi", 2.0)),
    "cone_map of rotated tokens": lambda q: (
        ops.cone_map,
        (q, q, "umbral", "psi", 2.0, *torch.randn(4, 9, 1), 0, torch.bfloat16),
    ),
    "rotate_tokens": lambda q: (
        ops.rotate_tokens,
        (q, q, *torch.randn(4, 9, 2), 4, False, torch.bfloat16),
    ),
    "rotate_tokens by learned angles": lambda q: (
        ops.rotate_tokens,
        (
            *(q, None),
            *(torch.randn(9, 2, requires_grad=True) for _ in range(2)),
            *(None, None, 0, True, torch.float32),
        ),
    ),
    "rotate_tokens_backward": lambda q: (
        ops.rotate_tokens_backward,
        (*[q.detach()] * 4, *torch.randn(4, 9, 2), 0, False),
    ),
    "check_module": lambda q: (
        ops.check_module,
        ("gnomon.nn.M", 0.5, 0.0, True, True, True, "rope"),
    ),
    "module_similarity": lambda q: (
        ops.module_similarity,
        (
            *(q, "lorentz:c=learned"),
            [torch.ones(()), *(torch.rand(2, requires_grad=True) for _ in range(2))],
        ),
    ),
    # Other similarities measure their initial gamma, which requires tensors with data.
    "module_tensors": lambda q: (ops.module_tensors, ("dot", "rope+t5", 2, 4, 4, 16, 8, 8, [])),
    "module_projections": lambda q: (
        ops.module_projections,
        *(
            (
                *("dot", "forget+content_bias:columns=3+alibi:slopes=learned", 2),
                [
                    torch.rand(2, 8),
                    torch.rand(2),
                    torch.rand(6, 8),
                    torch.rand(9, 3),
                    torch.ones(2),
                ],
                *(torch.rand(2, 5, 8, requires_grad=True) for _ in range(2)),
            ),
        ),
    ),
    "module_learned": lambda q: (
        ops.module_learned,
        ("laplacian", "alibi:slopes=learned", 2, 4, 4, [torch.ones(2)] * 3),
    ),
    "attention_weights": lambda q: (
        ops.attention_weights,
        (
            *(q.detach(), q.detach(), [0, 8], "penumbral:gamma=tensor", [torch.ones(2)]),
            *(["rope"], [], *call(causal=True, window=(3, None))),
        ),
    ),
    "module_attention_weights": lambda q: (
        ops.module_attention_weights,
        (
            *(q.detach(), q.detach(), [-1], "dot", "alibi:slopes=learned", [torch.ones(2)]),
            *call(causal=True),
        ),
    ),
    "query": lambda q: (ops.query, ("layer_positions", '["rope;none"]')),
    "token_encoding_tensors": lambda q: (
        ops.token_encoding_tensors,
        ("conv:kernel=3:groups=2", 4, True),
    ),
    "alibi_slopes": lambda q: (ops.alibi_slopes, (6,)),
    "cone_ancestor": lambda q: (ops.cone_ancestor, (q.detach(), q.detach(), "umbral", None)),
    "cone_lowest_common_ancestor": lambda q: (
        ops.cone_lowest_common_ancestor,
        (q, q.flip(2), "penumbral", 2.0),
    ),
    "hype_augment": lambda q: (
        ops.hype_augment,
        (q, q, torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True), 2, [], 3),
    ),
}


@pytest.mark.real_device
@pytest.mark.parametrize("name", COMPOSITE_CHECKS)
def test_opcheck_of_compositions(name):
    op, arguments = COMPOSITE_CHECKS[name](torch.randn(1, 2, 9, 4, requires_grad=True))
    # The last check does not support operators that return strings.
    words = any("str" in str(value.type) for value in op.default._schema.returns)
    torch.library.opcheck(op, arguments, test_utils=CHECKS[:-1] if words else CHECKS)


def test_every_operator_has_its_opcheck():
    names = torch._C._dispatch_get_all_op_names()
    registered = {name.removeprefix("gnomon::") for name in names if name.startswith("gnomon::")}
    assert {"attention", "attention_forward"} <= registered
    q = torch.randn(1, 2, 9, 4, requires_grad=True)
    checked = {check(q)[0].__name__ for check in COMPOSITE_CHECKS.values()}
    for path in pathlib.Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # torch.library.opcheck(ops.NAME, ...), opcheck_derivatives(ops.NAME, ops.NAME, ...)
            if isinstance(node, ast.Call) and "opcheck" in ast.unparse(node.func):
                for argument in node.args[:2]:
                    checked |= set(re.findall(r"^ops\.(\w+)$", ast.unparse(argument)))
    # load_terms reads a term library; test_terms.py tests it.
    elsewhere = {"load_terms"}
    assert checked == registered - elsewhere


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("similarity", "position"),
    [("dot", "rope + hype + t5"), ("penumbral", "rope half"), ("umbral", "kerple log")],
)
def test_compile(similarity, position, dynamic):
    def case(length):
        mask = Mask(True, (9, None), [0, 1], [length, length - 2])
        return Case(similarity, position, 2, 4, 2, length, length, 8, 5, mask)

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def compiled(inputs, starts, lengths):
        return gnomon.attention(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            causal=True,
            window=(9, None),
            key_starts=starts,
            key_lengths=lengths,
            return_lse=True,
            similarity=SIMILARITIES[similarity].ours(inputs),
            position=POSITIONS[position].ours(inputs),
        )

    for length in (13, 21):
        this = case(length)
        inputs = this.inputs()
        starts, lengths = torch.tensor(this.mask.key_starts), torch.tensor(this.mask.key_lengths)
        assert_near(
            values_and_gradients(lambda x: compiled(x, starts, lengths), inputs),  # noqa: B023
            values_and_gradients(this.ours, inputs),
            1e-12,
        )


@pytest.mark.slow
@pytest.mark.real_device
@pytest.mark.usefixtures("_fresh_compiler")
def test_compile_with_inductor():
    @torch.compile(fullgraph=True)
    def layer(q, gamma):
        return gnomon.attention(q, q, q, similarity=Penumbral(gamma), position=RoPE(), causal=True)

    torch.manual_seed(0)
    q = torch.randn(1, 2, 11, 6, dtype=torch.float64, requires_grad=True)
    gamma = torch.rand(2, dtype=torch.float64, requires_grad=True)
    expected = gnomon.attention(q, q, q, similarity=Penumbral(gamma), position=RoPE(), causal=True)
    ours = layer(q, gamma)
    torch.testing.assert_close(ours, expected)
    for got, want in zip(
        torch.autograd.grad(ours.square().sum(), (q, gamma)),
        torch.autograd.grad(expected.square().sum(), (q, gamma)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compile_of_a_module():
    torch.manual_seed(0)
    module = gnomon.nn.MultiheadAttention(
        16, 4, kv_heads=2, similarity="umbral", position="rope+hype:tau=learned:mu=learned"
    )
    x = torch.randn(2, 9, 16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, causal=True), module(x, causal=True))


def test_gradients_that_are_not_needed_are_not_computed():
    inputs = Case("umbral", "alibi").inputs()
    inputs["v"].requires_grad_()
    o, _ = Case("umbral", "alibi").ours(inputs)
    o.sum().backward()
    assert [name for name, x in inputs.items() if x.grad is not None] == ["v"]


def test_no_grad_and_inference_mode():
    case = Case("penumbral", "rope + hype + t5")
    inputs = case.inputs()
    expected = case.ours({name: x.requires_grad_() for name, x in inputs.items()})[0].detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o, _ = case.ours(inputs)
        assert not o.requires_grad
        assert torch.equal(o, expected)


SMALL_CALLS = {
    "dot": ("dot", []),
    "laplacian": ("laplacian", []),
    "umbral": ("umbral", ["cone_map"]),
    "penumbral": ("penumbral", ["cone_map"]),
}


@pytest.mark.cpu("only CPU kernels bypass PyTorch's dispatcher")
@pytest.mark.parametrize("name", SMALL_CALLS)
def test_a_call_that_records_nothing_is_few_operators(name):
    """Each operator call takes a few percent of a small call's time, so a call runs each of our
    operators once, and none of PyTorch's."""
    similarity, maps = SMALL_CALLS[name]
    inputs = {x: t.float().requires_grad_() for x, t in Case(similarity).inputs().items()}
    call = {"similarity": SIMILARITIES[similarity].ours(inputs)}
    tokens = [inputs[x] for x in "qkv"]
    with torch.no_grad():
        gnomon.attention(*tokens, **call)
        with torch.profiler.profile() as profile:
            gnomon.attention(*tokens, **call)
    seen = {event.key: event.count for event in profile.key_averages() if "::" in event.key}
    assert seen == {f"gnomon::{own}": 1 for own in ("attention", *maps, "attention_forward")}


@pytest.mark.parametrize(
    "promised",
    [
        lambda gamma: torch.complex(gamma, -gamma).conj().imag,
        lambda gamma: torch._neg_view(-gamma),
        lambda gamma: torch._efficientzerotensor(gamma.shape, device=gamma.device),
    ],
    ids=["imaginary", "negative", "zero"],
)
def test_numbers_that_memory_does_not_hold(promised):
    """Tensors that PyTorch negates or fills with zeros lazily."""
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    gamma = promised(torch.rand(2))
    for similarity in (Laplacian, Umbral, Penumbral):
        expected = gnomon.attention(q, k, v, similarity=similarity(gamma.clone()))
        found = gnomon.attention(q, k, v, similarity=similarity(gamma))
        torch.testing.assert_close(found, expected)


def test_any_one_tensor_may_need_a_gradient():
    """A call may bypass autograd only if none of its tensors requires a gradient."""
    names = ("q", "k", "v", "gamma", "slopes", "sink", "temperature")
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3)]
    tensors += [torch.rand(2, dtype=torch.float64) for _ in range(3)]
    tensors.append(torch.rand(1, 2, 5, dtype=torch.float64))

    def attend(q, k, v, gamma, slopes, sink, temperature):
        return gnomon.attention(
            *(q, k, v),
            similarity=Penumbral(gamma),
            position=gnomon.position.ALiBi(slopes),
            sink=sink,
            temperature=temperature,
        )

    def gradients(of):
        leaves = [
            t.clone().requires_grad_(name in of) for name, t in zip(names, tensors, strict=True)
        ]
        attend(*leaves).square().sum().backward()
        return {name: leaf.grad for name, leaf in zip(names, leaves, strict=True) if name in of}

    together = gradients(names)
    for name in names:
        torch.testing.assert_close(gradients([name])[name], together[name])


def test_a_call_of_constants_within_a_transform():
    q = torch.randn(1, 2, 5, 4)
    gamma = torch.ones(2)

    def scaled(x):
        return x * gnomon.attention(q, q, q, similarity=Penumbral(gamma)).sum()

    expected = gnomon.attention(q, q, q, similarity=Penumbral(gamma)).sum()
    torch.testing.assert_close(torch.func.grad(scaled)(torch.tensor(2.0)), expected)
    torch.testing.assert_close(torch.vmap(scaled)(torch.arange(3.0)), torch.arange(3.0) * expected)


def test_a_mistake_is_one_each_time():
    """Valid specifications are cached, but errors are not."""
    q = torch.randn(1, 2, 5, 4)
    for _ in range(2):
        with pytest.raises(ValueError, match="unknown similarity"):
            gnomon.attention(q, q, q, similarity="penumbrel")
        with pytest.raises(ValueError, match="unknown position"):
            gnomon.attention(q, q, q, position="rope+alibo")
        with pytest.raises(ValueError, match="gamma of penumbral is missing"):
            gnomon.attention(q, q, q, similarity="penumbral:gamma=tensor")


@pytest.mark.parametrize(
    ("index", "change", "argument"),
    [
        (1, lambda t: t[:1], "y"),
        (2, lambda t: t[:, :, :3], "v"),
        (3, lambda t: t.repeat(2, 1, 1, 1), "row_scalars"),
        (4, lambda t: t[..., :3], "column_scalars"),
        (6, lambda t: t[:1], "factor"),
        (7, lambda t: t[..., 1:], "bias"),
        (7, lambda t: t.double(), "bias"),
    ],
)
def test_the_operator_pair_checks_its_arguments(index, change, argument):
    tensors, rest = low_level_arguments(torch.float32)
    tensors[index] = change(tensors[index])
    with pytest.raises((ValueError, TypeError), match=rf"gnomon.attention: {argument} has"):
        ops.attention_forward(*tensors, *rest)
