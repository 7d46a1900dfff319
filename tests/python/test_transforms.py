"""torch.func transforms, checkpointing, and copies of user-held objects."""

import copy
import io
import pickle

import pytest
import torch
from formulas import SIMILARITIES
from functorch.compile import aot_function
from operator_checks import peak_memory
from torch.func import functional_call, grad, jacrev, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gnomon
from gnomon import nn, position, similarity
from gnomon.lab.models import LanguageModel

SAMPLES, B, H, HKV, L, D = 3, 2, 4, 2, 7, 6


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def tokens(samples=SAMPLES, heads=(H, HKV, HKV)):
    torch.manual_seed(0)
    return [draw(samples, B, count, L, D) for count in heads]


# Functions of q, k, v and parameters, and the shapes of the parameters.
ATTENTIONS = {
    "dot, causal": (lambda q, k, v: gnomon.attention(q, k, v, causal=True), []),
    "with lse": (lambda q, k, v: gnomon.attention(q, k, v, return_lse=True), []),
    "lengths": (
        lambda q, k, v: gnomon.attention(
            q, k, v, key_lengths=torch.tensor([7, 4]), key_starts=torch.tensor([1, 0])
        ),
        [],
    ),
    "penumbral, rope, hype": (
        lambda q, k, v, gamma, tau: gnomon.attention(
            *(q, k, v),
            similarity=similarity.Penumbral(gamma),
            position=[position.RoPE(), position.HyPE(tau, 0.1)],
            causal=True,
        ),
        [(H,), (H,)],
    ),
    "umbral, t5": (
        lambda q, k, v, gamma, table: gnomon.attention(
            *(q, k, v),
            similarity=similarity.Umbral(gamma),
            position=position.T5(table, True),
            window=(4, 2),
        ),
        [(H,), (32, H)],
    ),
    "hyperbolic": (
        lambda q, k, v, beta: gnomon.attention(q, k, v, similarity=similarity.Hyperbolic(beta)),
        [(H,)],
    ),
    "lorentz": (
        lambda q, k, v, scale, c: gnomon.attention(
            *(q, k, v),
            similarity=similarity.Lorentz(scale, c + 0.5),
            position=position.RoPE(),
            aggregation="lorentz_centroid",
        ),
        [(H,), (H,)],
    ),
    "angles": (
        lambda q, k, v, angles, key_angles: gnomon.attention(
            q, k, v, position=position.RoPE(angles=angles, key_angles=key_angles)
        ),
        [(1, H, L, 3), (B, 1, L, 3)],
    ),
    "angles at positions": (
        lambda q, k, v, angles: gnomon.attention(
            q, k, v, position=position.RoPE(angles=angles), query_offset=torch.tensor([2, 0])
        ),
        [(1, H, L + 2, 2)],
    ),
    "mixed frequencies": (
        lambda q, k, v, frequencies: gnomon.attention(
            q, k, v, position=position.RoPEMixed(frequencies, shape=(2, 3), prefix=1)
        ),
        [(H, 2, 3)],
    ),
    "entailment": (
        lambda q, k, v, gamma: gnomon.attention(q, k, v, similarity=similarity.Entailment(gamma)),
        [(H,)],
    ),
    "relative keys and values": (
        lambda q, k, v, rows, values: gnomon.attention(
            q, k, v, position=position.Relative(rows, 2, values=values)
        ),
        [(5, D), (H, 5, D)],
    ),
    "disentangled attention": (
        lambda q, k, v, keys, queries: gnomon.attention(
            q, k, v, position=position.Disentangled(keys, queries, max_distance=6)
        ),
        [(8, D), (H, 8, D)],
    ),
    "shared relative values": (
        lambda q, k, v, rows, values: gnomon.attention(
            q, k, v, position=position.Relative(rows, 2, values=values), causal=True
        ),
        [(H, 5, D), (5, D)],
    ),
    "transformer_xl": (
        lambda q, k, v, u, w, rows: gnomon.attention(
            q, k, v, position=position.TransformerXL(u, w, rows), causal=True
        ),
        [(H, D), (H, D), (H, L, D)],
    ),
    "absolute keys": (
        lambda q, k, v, rows: gnomon.attention(q, k, v, position=position.AbsoluteKeys(rows)),
        [(L, D)],
    ),
    "relative keys on a grid": (
        lambda q, k, v, rows, columns: gnomon.attention(
            *(x[:, :, :6] for x in (q, k, v)), position=position.Relative2D(rows, columns, 2, 3)
        ),
        [(3, D), (5, D)],
    ),
    "a grid of biases": (
        lambda q, k, v, slopes: gnomon.attention(
            q, k, v, position=position.Grid((2, 3), [position.ALiBi(slopes)] * 2, prefix=1)
        ),
        [(H,)],
    ),
    "midpoints": (
        lambda q, k, v: gnomon.attention(
            q, k, v / 4, aggregation="einstein_midpoint", chunks=(3, 1, 0)
        ),
        [],
    ),
    "linear": (lambda q, k, v: gnomon.linear_attention(q, k, v), []),
    "linear, causal": (lambda q, k, v: gnomon.linear_attention(q, k, v, causal=True), []),
    "linear, favor": (
        lambda q, k, v: gnomon.linear_attention(q, k, v, feature="favor", causal=True, seed=1),
        [],
    ),
    "linear, rope": (
        lambda q, k, v: gnomon.linear_attention(q, k, v, rope=position.RoPE(), causal=True),
        [],
    ),
    "graph": (
        lambda q, k, v, gamma: gnomon.graph_attention(
            *(part[0].transpose(0, 1) for part in (q, k, v)),
            torch.tensor([0, 2, 3, 3, 5, 6, 7, 9]),
            torch.tensor([0, 6, 2, 1, 3, 4, 5, 0, 6]),
            similarity=similarity.Umbral(gamma),
        ),
        [(H,)],
    ),
}


def arguments(name):
    function, shapes = ATTENTIONS[name]
    inputs = tokens()
    parameters = [draw(SAMPLES, *shape).abs() / 2 for shape in shapes]
    return function, [*inputs, *parameters]


def looped(function, inputs, dims=0):
    """Applies the function to each sample and stacks the results."""
    dims = [dims] * len(inputs) if isinstance(dims, int) else dims
    results = [
        function(*(x if d is None else x.select(d, n) for x, d in zip(inputs, dims, strict=True)))
        for n in range(SAMPLES)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def loss_of(function):
    """The sum of the function's results with unequal weights."""

    def loss(*inputs):
        results = function(*inputs)
        results = (results,) if isinstance(results, torch.Tensor) else results
        weights = [
            torch.linspace(0.1, 1, r.numel(), dtype=r.dtype).reshape(r.shape) for r in results
        ]
        return torch.stack([(r * w).sum() for r, w in zip(results, weights, strict=True)]).sum()

    return loss


def autograd_of(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(loss_of(function)(*leaves), leaves)


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("name", ATTENTIONS)
def test_vmap_is_a_loop(name):
    function, inputs = arguments(name)
    torch.testing.assert_close(vmap(function)(*inputs), looped(function, inputs))
    # Map over the queries only, along a different axis.
    dims = [2, *[None] * (len(inputs) - 1)]
    some = [inputs[0].movedim(0, 2), *(x[0] for x in inputs[1:])]
    torch.testing.assert_close(vmap(function, tuple(dims))(*some), looped(function, some, dims))


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("name", ATTENTIONS)
def test_grad_and_gradients_of_each_sample(name):
    function, inputs = arguments(name)
    every = tuple(range(len(inputs)))
    first = [x[0] for x in inputs]
    expected = autograd_of(function, first)
    torch.testing.assert_close(grad(loss_of(function), every)(*first), expected)
    # All samples share the parameters, which have a gradient per sample.
    dims = (0, 0, 0, *[None] * (len(inputs) - 3))
    some = [*inputs[:3], *first[3:]]
    torch.testing.assert_close(
        vmap(grad(loss_of(function), every), dims)(*some),
        looped(lambda *x: autograd_of(function, x), some, dims),
    )
    # Differentiating the mapped function sums the gradients of inputs that samples share.
    ours = grad(lambda *x: vmap(loss_of(function), dims)(*x).sum(), every)(*some)
    each = looped(lambda *x: autograd_of(function, x), some, dims)
    # Gradients may be recorded by torch.func.grad or by autograd, beneath the mapping.
    leaves = [x.clone().requires_grad_() for x in some]
    beneath = torch.autograd.grad(vmap(loss_of(function), dims)(*leaves).sum(), leaves)
    for got, lower, want, dim in zip(ours, beneath, each, dims, strict=True):
        torch.testing.assert_close(got, want if dim == 0 else want.sum(0))
        torch.testing.assert_close(lower, want if dim == 0 else want.sum(0))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_no_sample(name):
    """Mapping over zero samples gives results of the right shapes and dtypes."""
    function, inputs = arguments(name)
    empty = [x[:0] for x in inputs]

    def shapes(results):
        results = (results,) if isinstance(results, torch.Tensor) else results
        return [(r.shape, r.dtype, r.device) for r in results]

    def none_of(results):
        results = (results,) if isinstance(results, torch.Tensor) else results
        return shapes([r[:0] for r in results])

    assert shapes(vmap(function)(*empty)) == none_of(vmap(function)(*inputs))
    each = vmap(grad(loss_of(function), tuple(range(len(inputs)))))
    assert shapes(each(*empty)) == none_of(each(*inputs))
    # Map twice over the queries only, with zero outer or zero inner samples.
    first = [x[0] for x in inputs[1:]]
    twice = vmap(vmap(lambda q: function(q, *first)))(empty[0][:, None])
    assert shapes(twice) == [
        ((0, 1, *shape[1:]), *rest) for shape, *rest in none_of(vmap(function)(*inputs))
    ]
    inner = vmap(vmap(lambda q: function(q, *first)))(empty[0][None])
    assert shapes(inner) == [
        ((1, *shape), *rest) for shape, *rest in none_of(vmap(function)(*inputs))
    ]
    total = grad(lambda k: vmap(lambda q: loss_of(function)(q, k, *first[1:]))(empty[0]).sum())
    assert torch.equal(total(first[0]), torch.zeros_like(first[0]))


def test_no_sample_of_a_projection():
    none = torch.empty(2, 0, D)
    projections = vmap(lambda x: torch.ops.gnomon.favor_projection(x, 5, 1), 1, out_dims=None)
    assert projections(none).shape == (5, D)


def test_vmap_of_other_operators():
    torch.manual_seed(0)
    q, k, v = (draw(SAMPLES, B, H, L, D) for _ in range(3))
    ops = torch.ops.gnomon
    for function, inputs in (
        (lambda q, k, tau: gnomon.hype_augment(q, k, tau, 0.1), [q, k, draw(SAMPLES, H)]),
        (lambda p: gnomon.sinusoid(p, 4), [torch.arange(6).view(SAMPLES, 2)]),
        (lambda p: gnomon.t5_bucket(p, True), [torch.arange(-30, 30).view(SAMPLES, 20)]),
        (gnomon.cones.ancestor, [q.sigmoid(), k.sigmoid()]),
        (gnomon.cones.lowest_common_ancestor, [q.sigmoid(), k.sigmoid()]),
        (nn.TokenPosition("conv:kernel=3:groups=2+learned", D, L).double(), [q[:, 0]]),
        (lambda x: ops.favor_projection(x, 5, 1), [q]),
        (lambda *x: ops.causal_exponent_sums(*x, None), [q, k, v, q[..., :1]]),
        (lambda *x: ops.causal_exponent_sums_backward(*x, None), [v, q, k, v, q[..., :1]]),
    ):
        torch.testing.assert_close(vmap(function)(*inputs), looped(function, inputs))


def test_every_operator_of_tensors_has_a_rule_of_vmap():
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("gnomon::"):
            continue
        schema = getattr(torch.ops.gnomon, name.removeprefix("gnomon::")).default._schema
        if any("Tensor" in str(argument.type) for argument in schema.arguments):
            assert any(
                torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
                for key in ("FuncTorchBatched", "FuncTorchBatchedDecomposition")
            ), name


def test_other_transforms_of_reverse_mode():
    function, inputs = arguments("dot, causal")
    q, k, v = (x[0] for x in inputs)
    o, pull = vjp(function, q, k, v)
    torch.testing.assert_close(o, function(q, k, v))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    d_o = torch.randn_like(o)
    torch.testing.assert_close(pull(d_o), torch.autograd.grad(function(*leaves), leaves, d_o))
    jacobian = jacrev(lambda q: function(q, k, v)[0, 0, :, 0])(q)
    row = torch.autograd.grad(function(leaves[0], k, v)[0, 0, 5, 0], leaves[0])[0]
    torch.testing.assert_close(jacobian[5], row)
    twice = vmap(vmap(function))(*(x.unflatten(1, (B, 1)) for x in inputs))
    torch.testing.assert_close(twice.flatten(1, 2), looped(function, inputs))


def test_vmap_of_integers_that_differ():
    q, k, v = tokens()
    lengths = torch.tensor([[7, 3], [1, 2], [5, 7]])
    offsets = torch.tensor([[0, 3], [1, 2], [5, 4]])

    def function(q, k, v, lengths, offsets):
        return gnomon.attention(
            q, k, v, key_lengths=lengths, query_offset=offsets, position=position.ALiBi(0.3)
        )

    inputs = [q, k, v, lengths, offsets]
    torch.testing.assert_close(vmap(function)(*inputs), looped(function, inputs))
    gradient = vmap(grad(loss_of(function)))(*inputs)
    expected = looped(lambda *x: grad(loss_of(function))(*x), inputs)
    torch.testing.assert_close(gradient, expected)


def test_dropout_under_vmap():
    q, k, v = tokens()

    def function(q, k, v, seed=None):
        return gnomon.attention(q, k, v, dropout=0.5, seed=seed)

    seeded = vmap(lambda *x: function(*x, seed=3))
    torch.testing.assert_close(seeded(q, k, v), looped(lambda *x: function(*x, seed=3), [q, k, v]))
    same = [x[:1].expand(SAMPLES, *x.shape[1:]) for x in (q, k, v)]
    drawn = vmap(function, randomness="different")(*same)
    assert not torch.equal(drawn[0], drawn[1])
    drawn = vmap(function, randomness="same")(*same)
    assert torch.equal(drawn[0], drawn[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(function)(q, k, v)


def test_second_derivatives_of_causal_linear_attention():
    """The gradients are causal sums, which are also differentiable."""
    q, k, v = (x[0][:1, :2, :4] for x in tokens())
    assert torch.autograd.gradgradcheck(
        lambda q: gnomon.linear_attention(q, k[:, :2], v[:, :2], causal=True),
        (q.clone().requires_grad_(),),
    )


MAPPED = """
q = torch.randn(2, 1, 2, {length}, 8)
gamma = torch.ones(2)
attend = lambda q, gamma: gnomon.attention(
    q, q, q, similarity=gnomon.similarity.Laplacian(gamma), position=gnomon.position.ALiBi(0.1)
).square().sum()
mapped = torch.func.vmap(torch.func.grad(attend, (0, 1)), (0, None))
mapped(q[..., :4, :], gamma)  # what is imported and made once
"""


def test_no_square_of_the_length_is_made():
    length = 4000
    used = peak_memory(MAPPED.format(length=length), "mapped(q, gamma)")
    assert used < length * length * 4 / 1024 / 4  # a quarter of one L x L array of fp32


SPECS = [
    ("dot", "rope"),
    ("penumbral", "rope+hype:tau=learned"),
    ("umbral:score=log", "t5+alibi:slopes=learned"),
    ("laplacian", "kerple"),
    ("dot", "transformer_xl"),
    ("hyperbolic", "relative:max_offset=3"),
    ("dot", "absolute_keys"),
    ("gaussian", "none"),
    ("entailment", "hype"),
    ("additive", "alibi"),
]


def module_and_input(similarity, position, dtype=torch.float32):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, similarity=similarity, position=position, max_length=L).to(
        dtype
    )
    return module, torch.randn(SAMPLES, L, 8, dtype=dtype)


def check_gradients_of_each_sample(loss, parameters, samples):
    """Per-sample gradients of loss(parameters, sample) by mapping, compared with a loop."""
    detached = {name: parameter.detach() for name, parameter in parameters.items()}
    ours = vmap(grad(loss), (None, 0))(detached, samples)
    for n in range(SAMPLES):
        expected = torch.autograd.grad(loss(parameters, samples[n]), list(parameters.values()))
        for name, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(ours[name][n], gradient)


@pytest.mark.parametrize(("similarity", "position"), SPECS)
def test_gradients_of_each_sample_of_a_module(similarity, position):
    module, x = module_and_input(similarity, position, torch.float64)
    parameters = dict(module.named_parameters())

    def loss(parameters, x):
        o = functional_call(module, parameters, (x[None],), {"causal": True})
        return (o * torch.linspace(0, 1, 8, dtype=o.dtype)).sum()

    check_gradients_of_each_sample(loss, parameters, x)


def test_gradients_of_each_sample_of_a_language_model():
    torch.manual_seed(0)
    position = "learned+conv:kernel=3:groups=2+hype:tau=learned"
    model = LanguageModel(11, 8, 2, 2, 16, "penumbral", position, max_length=L).double()
    texts = torch.randint(11, (SAMPLES, L + 1))

    def loss(parameters, text):
        logits = functional_call(model, parameters, (text[None, :-1],))
        return torch.nn.functional.cross_entropy(logits[0], text[1:])

    check_gradients_of_each_sample(loss, dict(model.named_parameters()), texts)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    module, x = module_and_input("penumbral", "rope+hype:tau=learned")
    module.dropout = 0.3
    gradients = []
    for run in (
        lambda x: module(x, causal=True),
        lambda x: checkpoint(lambda x: module(x, causal=True), x, use_reentrant=use_reentrant),
    ):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        run(leaf).square().sum().backward()
        gradients.append([leaf.grad, *(p.grad for p in module.parameters())])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": through_a_file,
}


@pytest.mark.real_device
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(("similarity", "position"), SPECS)
def test_copies_of_modules(similarity, position, way):
    module, x = module_and_input(similarity, position)
    expected = module(x, causal=True)
    twin = COPIES[way](module)
    assert torch.equal(twin(x, causal=True), expected)
    assert repr(twin) == repr(module)
    # The printed form contains only options with non-default values.
    for name, value, default in (("similarity", similarity, "dot"), ("position", position, "none")):
        assert (f"{name}='{value}'" in repr(module)) == (value != default)
    # The copies share no memory.
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(module(x, causal=True), expected)


@pytest.mark.real_device
@pytest.mark.parametrize(("similarity", "position"), SPECS)
def test_state_dicts_and_dtypes(similarity, position):
    module, x = module_and_input(similarity, position)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    torch.manual_seed(5)
    other, _ = module_and_input(similarity, position)
    torch.nn.init.normal_(other.q_proj.weight)
    assert other.load_state_dict(torch.load(file, weights_only=True)) == ([], [])
    expected = module(x, causal=True)
    assert torch.equal(other(x, causal=True), expected)
    for dtype, tolerance in ((torch.float64, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
        o = module.to(dtype)(x.to(dtype), causal=True)
        assert o.dtype == dtype
        assert all(p.dtype == dtype for p in module.state_dict().values())
        torch.testing.assert_close(o.float(), expected, atol=tolerance, rtol=tolerance)
        o.sum().backward()
        assert module.q_proj.weight.grad.dtype == dtype
        module.zero_grad()


def test_train_and_eval():
    module, x = module_and_input("dot", "none")
    module.dropout = 0.5
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    # CAPE draws random numbers only in training.
    cape = nn.TokenPosition("cape", 8, L)
    assert not torch.equal(cape(x), cape(x))
    cape.eval()
    assert torch.equal(cape(x), cape(x))


@pytest.mark.real_device
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_other_user_objects(way):
    torch.manual_seed(0)
    x = torch.randn(2, L, 8)
    encoding = nn.TokenPosition("learned+conv:kernel=3:groups=2", 8, L, causal=True)
    twin = COPIES[way](encoding)
    assert torch.equal(twin(x), encoding(x))
    assert twin.max_length == encoding.max_length == L
    # Copies of caches continue where the originals were.
    module, _ = module_and_input("dot", "rope")
    cache, tokens_before = nn.KVCache(), nn.TokenCache()
    with torch.no_grad():
        module(encoding(x[:, :4], cache=tokens_before), causal=True, cache=cache)
        copies = COPIES[way](cache), COPIES[way](tokens_before)
        expected = module(encoding(x[:, 4:], cache=tokens_before), causal=True, cache=cache)
        ours = module(twin(x[:, 4:], cache=copies[1]), causal=True, cache=copies[0])
    assert torch.equal(ours, expected)
    assert copies[0].length() == copies[1].length() == L


def similarities():
    """One object of each class, by name."""
    found = {}
    for entry in SIMILARITIES.values():
        parameters = {name: x.float() for name, x in entry.parameters(2).items()}
        if (term := entry.ours(parameters)) is not None:
            found.setdefault(type(term).__name__, term)
    return found


def terms():
    torch.manual_seed(0)
    heads = torch.rand(2)
    return {
        **similarities(),
        "RoPE": position.RoPE(layout="half"),
        "RoPEMixed": position.RoPEMixed(torch.rand(2, 2, 2), shape=(2, 3)),
        "ALiBi": position.ALiBi(heads),
        "HyPE": position.HyPE(heads, 0.1),
        "T5": position.T5(torch.rand(32, 2), True),
        "Kerple": position.Kerple(heads, heads, kind="power"),
        "Sandwich": position.Sandwich(heads, 6),
        "OffsetBias": position.OffsetBias(torch.rand(2, 11)),
        "Relative": position.Relative(torch.rand(5, 4), 2),
        "Disentangled": position.Disentangled(torch.rand(4, 4), torch.rand(4, 4)),
        "Relative2D": position.Relative2D(torch.rand(3, 4), torch.rand(5, 4), 2, 3),
        "TransformerXL": position.TransformerXL(*torch.rand(2, 2, 4), torch.rand(2, 6, 4)),
        "AbsoluteKeys": position.AbsoluteKeys(torch.rand(6, 4)),
        "Grid": position.Grid((2, 3), [position.ALiBi(heads)] * 2),
        "GridBias": position.GridBias(torch.rand(2, 3, 5)),
        "KeyBias": position.KeyBias(torch.rand(1, 2, 6)),
        "PairBias": position.PairBias(torch.rand(1, 1, 6, 6)),
        "Forget": position.Forget(-torch.rand(1, 2, 6)),
        "ContentBias": position.ContentBias(torch.rand(1, 2, 6, 3), torch.rand(5, 3), 3),
        "Gate": position.Gate(torch.rand(1, 2, 6, 4)),
        "QKNorm": position.QKNorm(torch.rand(4), torch.rand(4)),
        "Sink": position.Sink(heads),
        "ScalableSoftmax": position.ScalableSoftmax(heads),
        "LogTemperature": position.LogTemperature(length=2, kind="smooth"),
        "Specified": position.Specified("alibi:slopes=tensor", (heads,)),
    }


class Recorded(TorchDispatchMode):
    """Lists the passes of attention with their argument `recorded`."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def see(self, function, args):
        for name in ("forward", "backward"):
            operator = getattr(torch.ops.gnomon, f"attention_{name}").default
            if function is operator:
                names = [argument.name for argument in operator._schema.arguments]
                self.seen.append((name, args[names.index("recorded")]))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.see(function, args)
        return function(*args, **(kwargs or {}))

    def compile(self, graph, _inputs):
        for node in graph.graph.nodes:
            self.see(node.target, node.args)
        return graph


def test_operators_know_whether_autograd_records_them():
    """Otherwise inference would take the time of outputs that only a backward pass needs."""
    x = torch.randn(SAMPLES, 1, 2, 5, 4)
    leaf = x[0].clone().requires_grad_()
    passes = [("forward", True), ("backward", True)]

    def loss(q):
        return gnomon.attention(q, q, q, similarity="umbral").square().sum()

    for expected, run in [
        ([("forward", False)], lambda: loss(x[0])),
        ([("forward", False)], lambda: torch.no_grad()(loss)(leaf)),
        (passes, lambda: loss(leaf).backward()),
        (
            [("forward", False), *passes],
            lambda: checkpoint(loss, leaf, use_reentrant=True).backward(),
        ),
        (passes, lambda: grad(loss)(x[0])),
        (passes, lambda: vmap(grad(loss))(x)),
        (passes, lambda: grad(lambda x: vmap(loss)(x).sum())(x)),
    ]:
        with Recorded() as mode:
            run()
        assert mode.seen == expected
    mode.seen.clear()
    aot_function(loss, mode.compile, mode.compile)(leaf).backward()
    assert mode.seen == passes


def test_terms_keep_their_own_shapes():
    """Changing a list later affects neither the term nor its specification."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 6, 4)
    shape, axes = [2, 3], [position.ALiBi(0.5), position.HyPE(0.5, 0.1)]
    rope, grid = position.RoPE(shape=shape), position.Grid(shape, axes)
    before = [gnomon.attention(x, x, x, position=term) for term in (rope, grid)]
    shape[:] = [3, 2]
    axes.reverse()
    assert rope.shape == grid.shape == (2, 3)
    for term, o in zip((rope, grid), before, strict=True):
        for same in (term, pickle.loads(pickle.dumps(term))):
            assert torch.equal(gnomon.attention(x, x, x, position=same), o)


def test_every_term_is_copied_below():
    no_terms = {"DefinedSimilarity", "Position", "Similarity", "Sum", "define"}
    assert terms().keys() == {*similarity.__all__, *position.__all__} - no_terms


@pytest.mark.real_device
@pytest.mark.parametrize("name", terms())
def test_copies_of_terms(name):
    x = torch.randn(1, 2, 6, 1 if name == "Additive" else 4)
    for way, copied in COPIES.items():
        term = terms()[name]
        for before in (True, False):
            # A term caches its specification when it is first used.
            twin = copied(term)
            results = []
            for one in (term, twin):
                kind = "similarity" if isinstance(one, similarity.Similarity) else "position"
                causal = name == "TransformerXL"
                results.append(gnomon.attention(x, x, x, causal=causal, **{kind: one}))
            assert torch.equal(*results), (way, before)
        assert type(twin) is type(term), way
