"""Terms, specifications and sums are accepted wherever a similarity or a position is."""

import copy
import dataclasses

import pytest
import torch

import gnomon
from gnomon import nn
from gnomon.position import (
    T5,
    AbsoluteKeys,
    ALiBi,
    Grid,
    GridBias,
    HyPE,
    Kerple,
    LogTemperature,
    OffsetBias,
    Relative,
    Relative2D,
    RoPE,
    Sandwich,
    ScalableSoftmax,
    TransformerXL,
)
from gnomon.similarity import Dot, Hyperbolic, Laplacian, Lorentz, Penumbral, Umbral

pytestmark = pytest.mark.cpu("its parameters are created on the CPU at import")

HEADS, LENGTH, DIM = 4, 12, 8
SLOPES = gnomon.alibi_slopes(HEADS)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tokens(dtype=torch.float64, dim=DIM):
    torch.manual_seed(0)
    return [torch.randn(2, HEADS, LENGTH, dim, dtype=dtype) for _ in range(3)]


def parameter(*sizes):
    return torch.randn(sizes, dtype=torch.float64).div(3).requires_grad_()


# Specifications with numbers only, and the equivalent terms.
POSITIONS = {
    "none": [],
    "rope": RoPE(),
    "rope:layout=half:dims=4:base=100": RoPE(100.0, "half", 4),
    "alibi": ALiBi(SLOPES),
    "alibi:slopes=fixed": ALiBi(SLOPES),
    "alibi:slopes=0.25": ALiBi(0.25),
    "hype": HyPE(SLOPES / 0.001, 0.001),
    "hype:mu=0.02": HyPE(SLOPES / 0.02, 0.02),
    "hype:tau=1.5:mu=0.1:mode=odd": HyPE(1.5, 0.1, "odd"),
    "kerple": Kerple(torch.tensor([0.25, 0.75, 1.25, 1.75]), 0.5),
    "kerple:kind=power": Kerple(SLOPES, 1.0, "power"),
    "sandwich": Sandwich(torch.tensor([4 / 8, 4 / 16, 4 / 24, 4 / 32])),
    "sandwich:dims=6:factor=0.5": Sandwich(0.5, 6),
    "scalable_softmax:s=0.5": ScalableSoftmax(0.5),
    "log_temperature:length=4": LogTemperature(length=4),
    "rope+alibi+hype:tau=2:mu=0.05": [RoPE(), ALiBi(SLOPES), HyPE(2.0, 0.05)],
    "alibi:slopes=0.1:shape=3x4": Grid((3, 4), [ALiBi(0.1), ALiBi(0.1)]),
}


def test_all_positions_without_tensors_are_covered():
    names = {
        entry["name"]
        for entry in gnomon.catalogue()["positions"]
        if entry["role"] != "embedding"
        and not any(
            p["kind"] == "table" and p["argument"] == "required" for p in entry["parameters"]
        )
    }
    assert names == {part.split(":")[0] for spec in POSITIONS for part in spec.split("+")}


def as_double(term):
    """The term with float64 tensors."""
    fields = {} if term is None else vars(term)
    tensors = {name: its.double() for name, its in fields.items() if torch.is_tensor(its)}
    return dataclasses.replace(term, **tensors) if tensors else term


@pytest.mark.parametrize("spec", POSITIONS)
def test_a_specification_is_its_terms(spec):
    for dtype in DTYPES:
        q, k, v = tokens(dtype)
        terms = POSITIONS[spec]
        if dtype == torch.float64:
            terms = [as_double(term) for term in (terms if isinstance(terms, list) else [terms])]
        expected = gnomon.attention(q, k, v, position=terms)
        torch.testing.assert_close(gnomon.attention(q, k, v, position=spec), expected)
        if spec not in ("none", "rope"):
            assert not torch.allclose(expected, gnomon.attention(q, k, v))


@pytest.mark.parametrize(
    "words", ["none+alibi", "none:dims=4", "yarn:factor=2:base=3", "linear:factor=2+alibi", "=2"]
)
def test_details_are_those_of_their_word(words):
    q, k, v = tokens()
    with pytest.raises(
        ValueError, match=r"rope has scaling = .*; expected a word, optionally followed"
    ):
        gnomon.attention(q, k, v, position=RoPE(scaling=words))
    gnomon.attention(q, k, v, position=RoPE(scaling="linear:factor=2"))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ((3,), "spec is an int"),
        (("alibi:slopes=tensor", ("x",)), "tensors is"),
        (("alibi:slopes=tensor", torch.ones(4)), "tensors is"),
    ],
)
def test_fields_of_a_specified_term(fields, error):
    with pytest.raises(TypeError, match=f"gnomon.position.Specified: {error}"):
        gnomon.position.Specified(*fields)


def test_numbers_of_sandwich():
    q, k, v = tokens()
    for dims in (3, 0, 1_000_000_000):
        with pytest.raises(ValueError, match="sandwich"):
            gnomon.attention(q, k, v, position=f"sandwich:dims={dims}")


def test_a_number_that_no_float_holds():
    q, k, v = tokens()
    for number in ("1e-46", "1e-40", "1e39"):
        with pytest.raises(ValueError, match=f"umbral:r={number}"):
            gnomon.attention(q, k, v, similarity=f"umbral:r={number}")
    gnomon.attention(q, k, v, similarity="umbral:r=1e-30")


#: The parameter of each similarity that multiplies the scores; None if it has none.
FACTORS = {
    entry["name"]: next((p["name"] for p in entry["parameters"] if p["kind"] == "per_head"), None)
    for entry in gnomon.catalogue()["similarities"]
}


def plain(entry):
    """A function that creates a similarity without options from its factor."""
    its_class = getattr(gnomon.similarity, entry["class_name"])
    return its_class if FACTORS[entry["name"]] else lambda factor: its_class()


SIMILARITIES = {
    **{entry["name"]: plain(entry) for entry in gnomon.catalogue()["similarities"]},
    "umbral:map=exp:score=log": lambda gamma: Umbral(gamma, map="exp", score="log"),
    "penumbral:score=height2:r=2": lambda gamma: Penumbral(gamma, r=2.0, score="height2"),
    "hyperbolic:model=klein": lambda beta: Hyperbolic(beta, "klein"),
    "lorentz:map=exp:c=0.5": lambda scale: Lorentz(scale, c=0.5, map="exp"),
}


@pytest.mark.parametrize("spec", SIMILARITIES)
def test_a_similarity_by_its_specification(spec):
    module = nn.MultiheadAttention(HEADS * DIM, HEADS, similarity=spec)
    start = [float(buffer) for _, buffer in module.named_buffers()]
    term = SIMILARITIES[spec](start[0] if start else None)
    for dtype in DTYPES:
        q, k, v = tokens(dtype)
        if spec == "additive":
            q, k = q[..., :1], k[..., :1]
        expected = gnomon.attention(q, k, v, similarity=term)
        torch.testing.assert_close(gnomon.attention(q, k, v, similarity=spec), expected)
        if start:
            name = FACTORS[spec.split(":")[0]]
            given = gnomon.attention(q, k, v, similarity=f"{spec}:{name}=0.5")
            torch.testing.assert_close(
                given, gnomon.attention(q, k, v, similarity=SIMILARITIES[spec](0.5))
            )
            assert not torch.allclose(given, expected)


def test_sums():
    q, k, v = tokens()
    slopes = SLOPES.double().requires_grad_()
    expected = gnomon.attention(q, k, v, position=[RoPE(), ALiBi(slopes), HyPE(1.0, 0.1)])
    (gradient,) = torch.autograd.grad(expected.square().sum(), slopes)
    for position in (
        RoPE() + ALiBi(slopes) + HyPE(1.0, 0.1),
        RoPE() + (ALiBi(slopes) + HyPE(1.0, 0.1)),
        "rope" + ALiBi(slopes) + "hype:tau=1:mu=0.1",
        ["rope", ALiBi(slopes) + "hype:tau=1:mu=0.1"],
        ALiBi(slopes) + "rope+hype:tau=1:mu=0.1",
        ("hype:tau=1:mu=0.1+rope", ALiBi(slopes)),
    ):
        o = gnomon.attention(q, k, v, position=position)
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(torch.autograd.grad(o.square().sum(), slopes)[0], gradient)
    assert repr(RoPE() + "alibi") == f"{RoPE()!r} + 'alibi'"


def test_a_sum_keeps_its_own_list():
    terms = [RoPE()]
    total = gnomon.position.Sum(terms)
    terms.append(ALiBi(1.0))
    q, k, v = tokens()
    assert torch.equal(
        gnomon.attention(q, k, v, position=total), gnomon.attention(q, k, v, position=RoPE())
    )


@pytest.mark.parametrize("similarity", ["penumbral", "dot"])
def test_compiled(similarity):
    torch._dynamo.reset()
    q, k, v = tokens()
    slopes = SLOPES.double()

    def attend(q, k, v, slopes):
        return gnomon.attention(
            q, k, v, similarity=similarity, position="rope+hype" + ALiBi(slopes), causal=True
        )

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, slopes), attend(q, k, v, slopes))


@pytest.mark.parametrize("similarity", ["umbral:r=0.7", "entailment:K=0.3"])
def test_the_start_of_gamma_is_found_within_transforms_and_graphs(similarity):
    # Use sizes and options for which no earlier call has computed the initial gamma.
    q, k, v = tokens(dim=5 if "umbral" in similarity else 7)

    def attend(q):
        return gnomon.attention(q, k, v, similarity=similarity)

    mapped = torch.func.vmap(attend)(q[None])[0]
    torch.testing.assert_close(mapped, attend(q))
    torch._dynamo.reset()
    other = similarity + ":map=none"
    compiled = torch.compile(
        lambda q: gnomon.attention(q, k, v, similarity=other), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(q), gnomon.attention(q, k, v, similarity=other))


def known_names(message):
    return message.split("known: ")[1].split(";")[0].split(", ")


# These names require an option in a call.
COMPLETE = {"grid_bias": "grid_bias:shape=3x4", "relative2d": "relative2d:shape=3x4"}


def test_attention_accepts_all_listed_terms():
    q, k, v = tokens()
    with pytest.raises(ValueError, match="unknown position") as error:
        gnomon.attention(q, k, v, position="quaternion")
    names = known_names(str(error.value))
    temperatures = {"scalable_softmax", "log_temperature"}
    assert {"none", "rope", "alibi", "hype", "kerple", *temperatures} <= set(names)
    # These are all positions that act inside attention and need no table.
    assert set(names) == {
        entry["name"]
        for entry in gnomon.catalogue()["positions"]
        if entry["role"] != "embedding"
        and not any(
            parameter["kind"] == "table" and parameter["argument"] == "required"
            for parameter in entry["parameters"]
        )
    }
    for name in names:
        gnomon.attention(q, k, v, position=name, causal=True)
    with pytest.raises(ValueError, match="unknown similarity") as error:
        gnomon.attention(q, k, v, similarity="quaternion")
    for name in known_names(str(error.value)):
        columns = 1 if name == "additive" else DIM
        gnomon.attention(q[..., :columns], k[..., :columns], v, similarity=name)


def test_modules_accept_all_listed_terms():
    with pytest.raises(ValueError, match="unknown position") as error:
        nn.MultiheadAttention(HEADS * DIM, HEADS, position="quaternion")
    names = known_names(str(error.value))
    assert "offset_bias" in names
    assert not {"sinusoidal", "learned", "conv", "cape"} & set(names)
    x = torch.randn(2, LENGTH, HEADS * DIM)
    for name in names:
        module = nn.MultiheadAttention(HEADS * DIM, HEADS, position=COMPLETE.get(name, name))
        assert module(x, causal=True).isfinite().all()


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "conv", "cape", "rope+cape"])
def test_encodings_have_no_effect_in_attention(position):
    name = position.split("+")[-1]
    q, k, v = tokens()
    for call in (
        lambda: nn.MultiheadAttention(HEADS * DIM, HEADS, position=position),
        lambda: gnomon.attention(q, k, v, position=position),
        lambda: gnomon.attention_weights(q, k, position=position),
    ):
        with pytest.raises(ValueError, match=f"position {name} is added to the embeddings and"):
            call()
    assert nn.attention_position(position) == ("rope" if "rope" in position else "none")


def test_attention_position():
    spec = "sinusoidal+rope:layout=half+none+learned:length=9+alibi:slopes=1e+2"
    assert nn.attention_position(spec) == "rope:layout=half+alibi:slopes=1e+2"
    with pytest.raises(ValueError, match='unknown position "rop"'):
        nn.attention_position("rop")
    with pytest.raises(TypeError, match="position is an int"):
        nn.attention_position(3)


def test_a_model_shares_out_its_position():
    torch.manual_seed(0)
    model = gnomon.models.LanguageModel(
        11, 16, 2, 2, 32, position="sinusoidal+rope+learned", max_length=16
    )
    assert model.blocks[0].attention.position == "rope"
    assert [type(m).__name__ for m in model.token_position.children()] == ["TokenEncoding"] * 2


# Terms with tensors for all parameters that support them, and the names of these tensors in a
# module.
TERMS = {
    "alibi": (lambda: ALiBi(parameter(HEADS)), ["alibi_slopes"]),
    "alibi for all heads": (lambda: ALiBi(parameter()), ["alibi_slopes"]),
    "hype": (lambda: HyPE(parameter(HEADS), parameter(HEADS)), ["hype_tau", "hype_mu"]),
    "hype with one tensor": (lambda: HyPE(1.5, parameter(HEADS)), ["hype_mu"]),
    "t5": (lambda: T5(parameter(8, HEADS), True, 20), ["t5_table"]),
    "kerple": (
        lambda: Kerple(parameter(HEADS), torch.rand(HEADS, dtype=torch.float64).requires_grad_()),
        ["kerple_r1", "kerple_r2"],
    ),
    "sandwich": (lambda: Sandwich(parameter(HEADS)), ["sandwich_factor"]),
    "offset_bias": (lambda: OffsetBias(parameter(HEADS, 2 * LENGTH - 1)), ["offset_bias_table"]),
    "relative": (lambda: Relative(parameter(7, DIM), 3), ["relative_table"]),
    "relative with values": (
        lambda: Relative(parameter(HEADS, 7, DIM), 3, "zero", parameter(7, DIM)),
        ["relative_table", "relative_values"],
    ),
    "transformer_xl": (
        lambda: TransformerXL(
            parameter(HEADS, DIM), parameter(HEADS, DIM), parameter(HEADS, LENGTH, DIM)
        ),
        ["transformer_xl_u", "transformer_xl_v", "transformer_xl_r"],
    ),
    "absolute_keys": (lambda: AbsoluteKeys(parameter(LENGTH, DIM)), ["absolute_keys_table"]),
    "relative2d": (
        lambda: Relative2D(parameter(5, DIM), parameter(7, DIM), 3, 4),
        ["relative2d_rows", "relative2d_columns"],
    ),
    "grid": (
        lambda: Grid((3, 4), [ALiBi(parameter(HEADS)), OffsetBias(parameter(HEADS, 7))]),
        ["alibi_slopes", "offset_bias_table"],
    ),
    "grid_bias": (lambda: GridBias(parameter(HEADS, 5, 7)), ["grid_bias_table"]),
    "a sum": (
        lambda: "rope" + ALiBi(parameter(HEADS)) + ALiBi(parameter(HEADS)),
        ["alibi_slopes", "alibi2_slopes"],
    ),
}


@pytest.fixture
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def attended(module, x, **arguments):
    """The expected result of the module, computed by attention()."""
    q, k, v = (
        projection(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    o = gnomon.attention(q, k, v, **arguments)
    return module.out_proj(o.transpose(1, 2).flatten(2))


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("name", TERMS)
def test_every_term_enters_a_module(name, learned):
    torch.manual_seed(0)
    make, names = TERMS[name]
    term = make()
    if not learned:
        with torch.no_grad():
            for tensor in term._lower()[1]:
                tensor.requires_grad_(False)
    given = term._lower()[1]
    module = nn.MultiheadAttention(HEADS * DIM, HEADS, position=term)
    assert list(module._term_names) == names
    held = dict(module.named_parameters() if learned else module.named_buffers())
    for its_name, tensor in zip(names, given, strict=True):
        assert torch.equal(held[its_name], tensor)
    x = torch.randn(2, LENGTH, HEADS * DIM)
    out = module(x, causal=True)
    expected = attended(module, x, position=term, causal=True)
    torch.testing.assert_close(out, expected)
    if learned:
        theirs = torch.autograd.grad(expected.square().sum(), given)
        ours = torch.autograd.grad(out.square().sum(), [held[n] for n in names])
        for mine, its in zip(ours, theirs, strict=True):
            assert mine.abs().max() > 0
            torch.testing.assert_close(mine, its)
    twin = copy.deepcopy(module)
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin(x, causal=True), out)
    # The module has its own copy of the tensor.
    with torch.no_grad():
        for tensor in given:
            tensor.add_(1)
    torch.testing.assert_close(module(x, causal=True), out)
    assert all(n in module.learned_values() for n in names) == learned


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("name", ["laplacian", "gaussian", "umbral", "penumbral", "hyperbolic"])
@pytest.mark.parametrize("sizes", [(HEADS,), ()], ids=str)
def test_a_similarity_with_a_tensor_enters_a_module(name, sizes):
    torch.manual_seed(0)
    factor = torch.rand(sizes).requires_grad_()
    term = SIMILARITIES[name](factor)
    module = nn.MultiheadAttention(HEADS * DIM, HEADS, similarity=term, position="rope")
    own = "beta" if name == "hyperbolic" else "gamma"
    assert torch.equal(getattr(module, own), factor)
    x = torch.randn(2, LENGTH, HEADS * DIM)
    torch.testing.assert_close(module(x), attended(module, x, similarity=term, position="rope"))
    module(x).square().sum().backward()
    assert getattr(module, own).grad.abs().max() > 0
    assert torch.equal(module.learned_values()[own].value, factor)


def test_a_parameter_is_shared_and_a_tensor_copied():
    slopes = torch.nn.Parameter(SLOPES.clone())
    layers = [nn.MultiheadAttention(32, HEADS, position="rope" + ALiBi(slopes)) for _ in range(2)]
    assert all(layer.alibi_slopes is slopes for layer in layers)
    assert len(list(torch.nn.ModuleList(layers).parameters())) == 2 * 8 + 1
    module = nn.MultiheadAttention(32, HEADS, position=ALiBi(SLOPES.double().requires_grad_()))
    assert module.alibi_slopes.dtype == torch.float32
    assert isinstance(module.alibi_slopes, torch.nn.Parameter)
    fixed = nn.MultiheadAttention(32, HEADS, position=ALiBi(SLOPES))
    assert [name for name, _ in fixed.named_buffers()] == ["alibi_slopes"]
    assert fixed.alibi_slopes.data_ptr() != SLOPES.data_ptr()


def test_numbers_of_terms_enter_a_module():
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, 32)
    module = nn.MultiheadAttention(32, HEADS, similarity=Laplacian(0.5), position=[RoPE(), "hype"])
    same = nn.MultiheadAttention(32, HEADS, similarity="laplacian:gamma=0.5", position="rope+hype")
    same.load_state_dict(module.state_dict())
    assert torch.equal(module(x), same(x))
    assert not list(module.named_buffers())


# As a specification, offset_bias needs a table, so only modules accept it.


def test_the_offset_bias_of_a_module():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, HEADS, position="offset_bias:length=16").double()
    assert module.offset_bias_table.shape == (HEADS, 31)
    with torch.no_grad():
        module.offset_bias_table.normal_()
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    for length in (16, 9, 1):
        part = x[:, :length]
        table = module.offset_bias_table[:, 16 - length : 15 + length]
        torch.testing.assert_close(module(part), attended(module, part, position=OffsetBias(table)))
    cache = nn.KVCache()
    parts = [module(x[:, a:b], causal=True, cache=cache) for a, b in ((0, 5), (5, 6), (6, 16))]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, causal=True))
    # Each batch element has its own offset.
    late = module(x[:, :3], x, query_offset=torch.tensor([4, 9]))
    for batch, offset in enumerate((4, 9)):
        one = module(x[batch : batch + 1, :3], x[batch : batch + 1], query_offset=offset)
        torch.testing.assert_close(late[batch : batch + 1], one)
    default = nn.MultiheadAttention(32, HEADS, position="offset_bias", max_length=20)
    assert default.offset_bias_table.shape == (HEADS, 39)


@pytest.mark.parametrize("offset", [1, torch.tensor([0, 1])], ids=["one", "each"])
def test_the_offset_bias_of_a_module_ends(offset):
    module = nn.MultiheadAttention(32, HEADS, position="offset_bias:length=4")
    x = torch.randn(2, 5, 32)
    module(x[:, :4])
    with pytest.raises(
        ValueError, match=r"has n = 4, but p_j - p_i runs from -4 to 4; expected.*\+-3"
    ):
        module(x)
    with pytest.raises(ValueError, match=r"n = 4, but p_j - p_i runs from -4 to [23]"):
        module(x[:, :4], x[:, :4], query_offset=offset)


def test_a_model_with_an_offset_bias(tmp_path):
    torch.manual_seed(0)
    model = gnomon.models.LanguageModel(11, 16, 1, 2, 32, position="offset_bias", max_length=8)
    assert model.max_length == 8
    text = torch.randint(11, (2, 8))
    model(text).square().sum().backward()
    assert model.blocks[0].attention.offset_bias_table.grad.abs().max() > 0
    with pytest.raises(ValueError, match="8"):
        model(torch.randint(11, (2, 9)))


def test_a_model_takes_terms(tmp_path):
    torch.manual_seed(0)
    model = gnomon.models.LanguageModel(
        256, 16, 1, 2, 32, similarity=Penumbral(0.5), position=RoPE() + HyPE(1.0, 0.01) + "cape"
    )
    gnomon.models.save_checkpoint(tmp_path / "model", model)
    loaded = gnomon.models.load_checkpoint(tmp_path / "model").model
    assert loaded.options == model.options
    text = torch.randint(11, (2, 8))
    assert torch.equal(loaded.eval()(text), model.eval()(text))
    with pytest.raises(ValueError, match="position contains tensors; expected numbers"):
        gnomon.models.LanguageModel(heads=HEADS, position=ALiBi(SLOPES))
    with pytest.raises(ValueError, match="similarity contains tensors"):
        gnomon.models.LanguageModel(heads=HEADS, similarity=Laplacian(SLOPES))


def test_token_position_takes_terms():
    x = torch.randn(2, 5, 8)
    module = nn.TokenPosition(["sinusoidal", RoPE() + ALiBi(SLOPES)], 8, 16)
    assert torch.equal(module(x), nn.TokenPosition("sinusoidal", 8, 16)(x))


def test_graphs_and_linear_attention_take_specifications():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 4) for _ in range(3))
    graph = ([0, 2, 3, 4], [0, 1, 2, 0])
    by_spec = gnomon.graph_attention(q, k, v, *graph, similarity="laplacian:gamma=0.5")
    assert torch.equal(by_spec, gnomon.graph_attention(q, k, v, *graph, similarity=Laplacian(0.5)))
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    by_spec = gnomon.linear_attention(q, k, v, rope="rope:base=100", causal=True)
    assert torch.equal(by_spec, gnomon.linear_attention(q, k, v, rope=RoPE(100.0), causal=True))


MISTAKES = {
    "a number": (lambda: RoPE() + 3, TypeError, "unsupported operand"),
    "a number before": (lambda: 3 + RoPE(), TypeError, "unsupported operand"),
    "an object that is not a position": (
        lambda: gnomon.attention(*tokens(), position=3),
        TypeError,
        "position is an int; expected a gnomon.position object, a string such as 'rope', "
        "or a list of these",
    ),
    "None in a list of positions": (
        lambda: gnomon.attention(*tokens(), position=[RoPE(), None]),
        TypeError,
        "position is a NoneType; expected a gnomon.position object",
    ),
    "a similarity as position of a module": (
        lambda: nn.MultiheadAttention(8, 2, position=Dot()),
        TypeError,
        "nn.MultiheadAttention: position is a Dot; expected a gnomon.position object",
    ),
    "an object that is not a similarity": (
        lambda: nn.MultiheadAttention(8, 2, similarity=RoPE()),
        TypeError,
        "similarity is a RoPE; expected a gnomon.similarity object, or a string",
    ),
    "a string as terms of a sum": (
        lambda: gnomon.position.Sum("rope"),
        TypeError,
        "terms is a str; expected a sequence of positions",
    ),
    "learned in a call": (
        lambda: gnomon.attention(*tokens(), position="alibi:slopes=learned"),
        ValueError,
        "alibi:slopes=learned works only in modules; here pass a tensor",
    ),
    "learned gamma in a call": (
        lambda: gnomon.attention(*tokens(), similarity="laplacian:gamma=learned"),
        ValueError,
        "laplacian:gamma=learned works only in modules; here pass a tensor",
    ),
    "a string as parameter in a call": (
        lambda: gnomon.attention(*tokens(), position="alibi:slopes=small"),
        ValueError,
        "alibi:slopes=small is invalid; expected learned, fixed or a number",
    ),
    "a table in a call": (
        lambda: gnomon.attention(*tokens(), position="t5"),
        ValueError,
        "table of t5 is missing; pass a term that contains the tensor",
    ),
    "a missing tensor": (
        lambda: gnomon.attention(*tokens(), position="alibi:slopes=tensor"),
        ValueError,
        "slopes of alibi is missing",
    ),
    "a missing tensor of a module": (
        lambda: nn.MultiheadAttention(8, 2, similarity="laplacian:gamma=tensor"),
        ValueError,
        "gamma of laplacian is missing",
    ),
    "a tensor instead of a number": (
        lambda: gnomon.attention(*tokens(), position="rope:base=tensor"),
        ValueError,
        "rope:base=tensor is invalid; expected a positive number",
    ),
    "a tensor for an unknown parameter": (
        lambda: nn.MultiheadAttention(8, 2, position="rope:nonsense=tensor"),
        ValueError,
        'rope has no option "nonsense"',
    ),
    "heads": (
        lambda: nn.MultiheadAttention(8, 2, position=ALiBi(torch.ones(3))),
        ValueError,
        r"slopes of alibi has shape \[3\]; expected \(H,\) = \(2,\), or \(\)",
    ),
    "integers": (
        lambda: nn.MultiheadAttention(8, 2, position=ALiBi(torch.ones(2, dtype=torch.int64))),
        TypeError,
        "slopes of alibi has dtype (long|Long|int64); expected a floating-point dtype",
    ),
    "an even table": (
        lambda: nn.MultiheadAttention(8, 2, position=OffsetBias(torch.ones(2, 4)))(
            torch.ones(1, 2, 8)
        ),
        ValueError,
        r"position-indexed table of OffsetBias has shape \[2, 4\]; expected \(H, 2 n - 1\)",
    ),
    "rope of linear attention": (
        lambda: gnomon.linear_attention(*tokens(), rope="alibi"),
        ValueError,
        "rope is alibi; expected RoPE",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_hype_is_safe_by_default():
    """Without a mask, a token attends to its neighbours, not only to the last key."""
    torch.manual_seed(0)
    q = torch.zeros(1, 1, 101, 4, dtype=torch.float64)
    tau, mu = 10.0, 0.05
    terms = {"default": HyPE(tau, mu), "abs": HyPE(tau, mu, "abs"), "odd": HyPE(tau, mu, "odd")}
    weights = {
        name: gnomon.attention_weights(q, q, slice(None), position=term)[0, 0]
        for name, term in terms.items()
    }
    assert torch.equal(weights["default"], weights["abs"])
    assert torch.equal(weights["abs"].argmax(1), torch.arange(101))
    assert (weights["odd"].argmax(1) == 100).all()
    spec = f"hype:tau={tau}:mu={mu}"
    assert torch.equal(
        weights["abs"], gnomon.attention_weights(q, q, slice(None), position=spec)[0, 0]
    )
    seen = gnomon.attention_weights(q, q, slice(None), position=spec, causal=True)
    odd = gnomon.attention_weights(q, q, slice(None), position=spec + ":mode=odd", causal=True)
    assert torch.equal(seen, odd)
