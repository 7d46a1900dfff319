"""All modules with all similarities and positions, following the conventions of torch.nn."""

import inspect
import itertools

import pytest
import torch
import torch.distributed.fsdp

import gnomon
from gnomon import position, similarity
from gnomon.lab.models import LanguageModel
from gnomon.nn import (
    Attention,
    LorentzMultiheadAttention,
    MultiheadAttention,
    TokenEncoding,
    TokenPosition,
    TorchMultiheadAttention,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)

HEADS, DIM = 2, 32
#: Terms that require a user tensor.
GIVEN_ALONE = {"key_bias", "pair_bias"}


def specs_of(entry):
    """The variants of a catalogue entry: plain, on a grid, and with each parameter learned or
    fixed."""
    if entry["name"] in GIVEN_ALONE:
        return
    parameters = {p["name"]: p for p in entry["parameters"]}
    start = entry["name"] + (":shape=3x3" if entry["needs_grid"] else "")
    yield start
    if "shape" in parameters and not entry["needs_grid"]:
        yield start + ":shape=3x3"
    own = [n for n, p in parameters.items() if p["kind"] == "per_head"]
    own = [n for n in own if (entry["name"], n) != ("lorentz", "bias")]  # a number in modules
    for word in ("learned", "fixed"):
        for name in own:
            yield f"{start}:{name}={word}"
    if len(own) > 1:
        yield start + "".join(f":{name}=learned" for name in own)
    for name, p in parameters.items():
        if p["kind"] in ("choice", "flag") and p["takes_tensor"]:
            yield f"{start}:{name}={'learned' if p['kind'] == 'choice' else 'true'}"
    for name in ("per_head", "bidirectional"):
        if name in parameters:
            yield f"{start}:{name}=true"


CATALOGUE = gnomon.catalogue()
SIMILARITIES = [spec for entry in CATALOGUE["similarities"] for spec in specs_of(entry)]
EMBEDDINGS = [
    spec
    for entry in CATALOGUE["positions"]
    if entry["role"] == "embedding"
    for spec in specs_of(entry)
]
POSITIONS = [
    spec
    for entry in CATALOGUE["positions"]
    if entry["role"] not in ("embedding", "none")
    for spec in specs_of(entry)
]


def attention_of(spec="dot", position="none", **made):
    narrow = spec == "additive"
    return Attention(HEADS, 1 if narrow else DIM // HEADS, spec, position, token_dim=DIM, **made)


#: Each module as a function of its similarity and its position.
MODULES = {
    "MultiheadAttention": lambda s, p, **made: MultiheadAttention(
        DIM, HEADS, similarity=s, position=p, **made
    ),
    "Attention": lambda s, p, **made: attention_of(s, p, **made),
    "LorentzMultiheadAttention": lambda s, p, **made: LorentzMultiheadAttention(
        1.5, 16, 17, HEADS, trans_heads_concat=True, position=p, **made
    ),
    "TorchMultiheadAttention": lambda s, p, **made: TorchMultiheadAttention(
        DIM, HEADS, batch_first=True, similarity=s, position=p, **made
    ),
    "TransformerEncoderLayer": lambda s, p, **made: TransformerEncoderLayer(
        DIM, HEADS, 48, batch_first=True, similarity=s, position=p, **made
    ),
    "TransformerDecoderLayer": lambda s, p, **made: TransformerDecoderLayer(
        DIM, HEADS, 48, batch_first=True, similarity=s, position=p, **made
    ),
    "LanguageModel": lambda s, p, **made: LanguageModel(
        60, DIM, 2, HEADS, 48, similarity=s, position=p, **made
    ),
}


def takes(module, spec, position):
    if module == "LorentzMultiheadAttention":
        # It has a similarity of its own, and a centroid has no sink.
        return spec == "dot" and not position.startswith(("transformer_xl", "sink"))
    if module == "TorchMultiheadAttention" and spec == "additive":
        return False  # its heads have more than the one column that `additive` supports
    # A language model is causal and one-dimensional.
    return module != "LanguageModel" or ":shape" not in position


def combinations(steps=(0, 3)):
    """Each similarity and each position with two modules. All modules share the code for terms."""
    terms = [(spec, "none") for spec in SIMILARITIES] + [("dot", place) for place in POSITIONS]
    for n, chosen in enumerate(terms):
        able = [module for module in MODULES if takes(module, *chosen)]
        for step in steps:
            yield able[(n + step) % len(able)], *chosen
    yield "MultiheadAttention", "umbral", "rope+t5+hype:tau=learned+alibi:slopes=learned"


def encodings():
    for spec in EMBEDDINGS:
        yield (
            f"TokenPosition {spec}",
            lambda spec=spec, **made: TokenPosition(spec, DIM, 24, **made),
        )
    yield from {
        "CAPE": lambda **made: gnomon.nn.CAPE(DIM, **made),
        "Convolutional": lambda **made: gnomon.nn.Convolutional(DIM, 8, 4, **made),
        "LearnedAbsolute": lambda **made: gnomon.nn.LearnedAbsolute(24, DIM, **made),
        "Sinusoidal": lambda **made: gnomon.nn.Sinusoidal(DIM, **made),
        "TokenEncoding": lambda **made: TokenEncoding("learned:length=24", DIM, **made),
        "with norms, a gate and a sink": lambda **made: MultiheadAttention(
            DIM, HEADS, qk_norm=True, gate=True, sink=True, **made
        ),
        "other sizes": lambda **made: MultiheadAttention(
            DIM, HEADS, 1, 8, kdim=20, vdim=24, bias=False, **made
        ),
        "a point's c": lambda **made: LorentzMultiheadAttention(
            torch.nn.Parameter(torch.tensor(0.7)), 17, 17, HEADS, use_weight=False, **made
        ),
        "a fixed c": lambda **made: LorentzMultiheadAttention(
            torch.tensor(0.7), 16, 17, HEADS, **made
        ),
        "adaptive": lambda **made: LanguageModel(
            90,
            DIM,
            1,
            HEADS,
            48,
            adaptive=[30, 60],
            norm="rms",
            activation="swiglu",
            position="learned+sinusoidal+conv:kernel=4",
            **made,
        ),
        "torch module with other sizes": lambda **made: TorchMultiheadAttention(
            DIM, HEADS, kdim=20, vdim=24, bias=False, **made
        ),
        "a sink": lambda **made: Attention(HEADS, 8, sink=True, value_dim=4, **made),
    }.items()


MAKERS = {
    f"{module} {spec} {place}": (
        lambda module=module, spec=spec, place=place, **made: MODULES[module](spec, place, **made)
    )
    for module, spec, place in combinations(steps=(0,))
} | dict(encodings())


def given_terms():
    """Terms with user tensors, and the tensors that are learned."""

    def learned(*sizes):
        return torch.nn.Parameter(torch.rand(*sizes) + 0.1)

    width = DIM // HEADS
    per_head = {
        name: lambda make=make: (t := learned(HEADS), make(t))
        for name, make in {
            "laplacian": similarity.Laplacian,
            "gaussian": similarity.Gaussian,
            "umbral": similarity.Umbral,
            "penumbral": similarity.Penumbral,
            "hyperbolic": similarity.Hyperbolic,
            "entailment": similarity.Entailment,
            "cosine": similarity.Cosine,
            "lorentz": similarity.Lorentz,
            "alibi": position.ALiBi,
            "hype": lambda t: position.HyPE(t, 0.01),
            "kerple": lambda t: position.Kerple(t, torch.ones(HEADS)),
            "a sum": lambda t: "rope" + position.ALiBi(t),
        }.items()
    }
    tables = {
        "t5": ((8, HEADS), lambda t: position.T5(t, True)),
        "offset_bias": ((HEADS, 17), position.OffsetBias),
        "grid_bias": ((HEADS, 5, 5), position.GridBias),
        "relative": ((9, width), lambda t: position.Relative(t, 4)),
        "absolute_keys": ((24, width), position.AbsoluteKeys),
        "grid": ((HEADS,), lambda t: position.Grid((3, 3), [position.ALiBi(t)] * 2)),
    }
    yield from per_head.items()
    for name, (sizes, make) in tables.items():
        yield name, lambda sizes=sizes, make=make: (t := learned(*sizes), make(t))


def build(module, term):
    is_similarity = isinstance(term, similarity.Similarity)
    return MODULES[module](*((term, "none") if is_similarity else ("dot", term)))


def given_combinations():
    """Each term with two modules that accept it."""
    for n, (name, given) in enumerate(given_terms()):
        able = [*MODULES]
        able.remove("LanguageModel")
        if isinstance(given()[1], similarity.Similarity):
            able.remove("LorentzMultiheadAttention")
        for step in (0, 3):
            module = able[(n + step) % len(able)]
            yield pytest.param(module, given, id=f"{module} {name}")


def tensors_of(module):
    return dict(itertools.chain(module.named_parameters(), module.named_buffers()))


def reset_as_fsdp_does(module):
    """Like FSDP, initialises one submodule after the other from uninitialised memory."""
    for part in module.modules():
        if [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
            part.to_empty(device="cpu", recurse=False)
            with torch.no_grad():
                for tensor in [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
                    tensor.fill_(torch.nan)
            part.reset_parameters()


def spread(tensor):
    return tensor.double().square().mean().sqrt().item()


@pytest.mark.cpu("measures CPU memory")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_deferred_initialisation_sets_everything(make):
    torch.manual_seed(0)
    # The two modules differ only in random numbers.
    fresh, other = tensors_of(make()), tensors_of(make())
    whole, by_parts = make().to("meta").to_empty(device="cpu"), make().to("meta")
    with torch.no_grad():
        for tensor in tensors_of(whole).values():
            tensor.fill_(torch.nan)
    whole.reset_parameters()
    reset_as_fsdp_does(by_parts)
    for module in (whole, by_parts):
        found = tensors_of(module)
        assert found.keys() == fresh.keys()
        for name, expected in fresh.items():
            tensor = found[name]
            if torch.equal(expected, other[name]):  # nothing is drawn
                torch.testing.assert_close(tensor, expected, rtol=0, atol=0, msg=name)
                continue
            assert tensor.isfinite().all(), name
            assert not torch.equal(tensor, expected), name
            if expected.numel() >= 32:
                # The tolerance is six standard errors of the ratio.
                bound = 6 / expected.numel() ** 0.5
                assert abs(spread(tensor) / spread(expected) - 1) < bound, name
    assert not any(
        torch.equal(a, tensors_of(by_parts)[name])
        for name, a in tensors_of(whole).items()
        if not torch.equal(fresh[name], other[name])
    )


@pytest.mark.cpu("names the devices itself")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_device_and_dtype(make):
    expected = {name: tuple(tensor.shape) for name, tensor in tensors_of(make()).items()}
    with torch.device("meta"):
        by_context = make()
    skipped = torch.nn.utils.skip_init(make_class(make), dtype=torch.float64)
    for module, device, dtype in (
        (make(device="cpu", dtype=torch.float64), "cpu", torch.float64),
        (make(device="meta", dtype=torch.bfloat16), "meta", torch.bfloat16),
        (make(device=torch.device("meta")), "meta", torch.float32),
        (by_context, "meta", torch.float32),
        (skipped, "cpu", torch.float64),
    ):
        found = tensors_of(module)
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
        assert {tensor.device.type for tensor in found.values()} <= {device}
        assert {tensor.dtype for tensor in found.values()} <= {dtype}
        repr(module)
    torch.set_default_dtype(torch.float64)
    try:
        assert {tensor.dtype for tensor in tensors_of(make()).values()} <= {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(TypeError, match=r"dtype is torch\.int64; expected a floating-point dtype"):
        make(dtype=torch.int64)


def make_class(make):
    """Makes a class that meets the requirements of torch.nn.utils.skip_init."""

    class Made(torch.nn.Module):
        def __new__(cls, device=None, dtype=None):
            return make(device=device, dtype=dtype)

        def __init__(self, device=None, dtype=None):
            pass

    return Made


def call(module, causal, run=None):
    """A self-attention call with nine tokens; `run` is the compiled module."""
    run = module if run is None else run
    if isinstance(module, LanguageModel):
        return run(torch.arange(18).view(2, 9))
    x = torch.randn(2, 9, DIM)
    if isinstance(module, Attention):
        q = torch.randn(2, HEADS, 9, module.head_dim, requires_grad=True)
        return run(q, q.flip(2), q.cos(), tokens=x, causal=causal)
    if isinstance(module, TorchMultiheadAttention):
        future = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else None
        return run(x, x, x, need_weights=False, attn_mask=future, is_causal=causal)[0]
    if isinstance(module, TransformerDecoderLayer):
        return run(x, x.flip(1), tgt_is_causal=causal)
    if isinstance(module, TransformerEncoderLayer):
        return run(x, is_causal=causal)
    return run(x, causal=causal)


COMBINATIONS = list(combinations())


@pytest.mark.parametrize(
    ("module", "spec", "place"), COMBINATIONS, ids=[" ".join(chosen) for chosen in COMBINATIONS]
)
def test_learned_values_are_parameters_with_gradients(module, spec, place):
    torch.manual_seed(0)
    built = MODULES[module](spec, place)
    if "learned" in spec + place:
        assert any(name.split(".")[-1].endswith(("_theta", "_r")) for name in tensors_of(built))
    causal = place.startswith("transformer_xl") and "bidirectional" not in place
    call(built, causal).square().sum().backward()
    terms = {
        f"{prefix}.{name}".strip(".")
        for prefix, part in built.named_modules()
        for name in getattr(part, "_term_names", ())
    }
    assert terms <= set(built.state_dict())
    for name, parameter in built.named_parameters():
        if name in terms:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_language_models_refuse_terms_with_tensors():
    """Checkpoints store terms as specifications."""
    for _, given in given_terms():
        with pytest.raises(
            ValueError, match="contains tensors; expected numbers or a specification"
        ):
            build("LanguageModel", given()[1])


@pytest.mark.parametrize(("module", "given"), given_combinations())
def test_tensors_in_terms_are_the_modules(module, given):
    torch.manual_seed(0)
    tensor, term = given()
    built = build(module, term)
    assert any(parameter is tensor for parameter in built.parameters())
    (name,) = {name for name, value in built.named_parameters() if value is tensor}
    assert torch.equal(built.state_dict()[name], tensor)
    call(built, causal=False).square().sum().backward()
    assert (tensor.grad != 0).any()
    # A reset restores tensors that the user passed.
    expected = tensor.detach().clone()
    with torch.no_grad():
        tensor.fill_(torch.nan)
    built.reset_parameters()
    assert torch.equal(tensor, expected)
    loaded = build(module, given()[1])
    loaded.load_state_dict(built.state_dict())
    assert torch.equal(loaded.state_dict()[name], expected)


@pytest.mark.cpu("uses a CPU process group")
@pytest.mark.filterwarnings("ignore")
def test_sharded_models_start_on_the_meta_device(tmp_path):
    """Tests both versions of FSDP; the first one calls reset_parameters() itself."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        for generation in (1, 2):
            torch.manual_seed(0)
            model = MODULES["LanguageModel"]("umbral", "relative+hype:tau=learned", device="meta")
            if generation == 1:
                model = torch.distributed.fsdp.FullyShardedDataParallel(
                    model, device_id=torch.device("cpu")
                )
            else:
                mesh = torch.distributed.init_device_mesh("cpu", (1,))
                for part in (*model.blocks, model):
                    torch.distributed.fsdp.fully_shard(part, mesh=mesh)
                model.to_empty(device="cpu")
                with torch.no_grad():
                    for tensor in tensors_of(model).values():
                        tensor.fill_(torch.nan)
                model.reset_parameters()
            loss = model(torch.arange(18).view(2, 9)).square().mean()
            assert loss.isfinite()
            loss.backward()
    finally:
        torch.distributed.destroy_process_group()


def test_a_tensor_without_numbers_cannot_be_reset():
    slopes = torch.nn.Parameter(torch.empty(HEADS, device="meta"))
    module = MultiheadAttention(DIM, HEADS, position=position.ALiBi(slopes), device="meta")
    with pytest.raises(RuntimeError, match="alibi_slopes is a tensor on the meta device"):
        module.to_empty(device="cpu").reset_parameters()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Attention(2, 16, "additive"),
            ValueError,
            r"^gnomon\.nn\.Attention: head_dim is 16",
        ),
        (
            lambda: Attention(2, 8, position="learned"),
            ValueError,
            r"^gnomon\.nn\.Attention: .*learned",
        ),
        (lambda: Attention(2, 8, position="forget"), ValueError, "token_dim is None"),
        (lambda: Attention(2, 0), ValueError, "head_dim is 0; expected at least 1"),
        (
            lambda: Attention(2, 8)(*torch.ones(3, 1, 2, 5, 4)),
            ValueError,
            r"q has shape \[1, 2, 5, 4\]; expected \(B, H, Lq, D\) with H = 2 and D = 8",
        ),
        (
            lambda: Attention(2, 8, position="forget", token_dim=3)(*torch.ones(3, 1, 2, 5, 8)),
            TypeError,
            "tokens is a NoneType; expected a Tensor",
        ),
        (
            lambda: TorchMultiheadAttention(7, 2),
            ValueError,
            r"^gnomon\.nn\.TorchMultiheadAttention: embed_dim is 7 and num_heads is 2",
        ),
        (
            lambda: LorentzMultiheadAttention(1.0, 4, 5, 2, position="transformer_xl"),
            ValueError,
            "works only with the similarity dot, not with lorentz",
        ),
        (
            lambda: MultiheadAttention(8, 2)(torch.ones(1, 3, 8), key_padding_mask=torch.ones(3)),
            ValueError,
            r"key_padding_mask has shape \[3\]; expected \(B, Lk\) = \(1, 3\)",
        ),
        (
            lambda: MultiheadAttention(8, 2)(torch.ones(1, 3, 8), pair_bias=1.0),
            TypeError,
            "pair_bias is a float; expected a Tensor, or None",
        ),
    ],
)
def test_mistakes_name_the_module(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_attention_without_projections_is_that_of_a_module():
    """The calls include caches, masks and tokens that terms project."""
    torch.manual_seed(0)
    for spec, place in (("umbral", "rope+hype:tau=learned"), ("dot", "forget+relative")):
        module = MultiheadAttention(DIM, HEADS, 1, similarity=spec, position=place, sink=True)
        own = Attention(HEADS, DIM // HEADS, spec, place, token_dim=DIM, sink=True)
        own.load_state_dict({n: t for n, t in module.state_dict().items() if n in own.state_dict()})
        x = torch.randn(2, 9, DIM)

        def heads(part, module=module):
            q, k = module._queries_and_keys(part, part)
            return q, k, module.v_proj(part).unflatten(2, (1, -1)).transpose(1, 2)

        padding, bias = torch.rand(2, 9) < 0.3, torch.randn(1, HEADS, 9, 9)
        masks = {"key_padding_mask": padding, "pair_bias": bias, "window": (4, 2)}
        o = own(*heads(x), tokens=x, **masks)
        expected = module(x, **masks)
        torch.testing.assert_close(module.out_proj(o.transpose(1, 2).flatten(2)), expected)
        q, k, _ = heads(x)
        torch.testing.assert_close(
            own.attention_weights(q, k, slice(None), tokens=x, **masks),
            module.attention_weights(x, rows=slice(None), **masks),
        )
        cache = gnomon.nn.KVCache()
        parts = [own(*heads(part), tokens=part, causal=True, cache=cache) for part in x.split(4, 1)]
        whole = own(*heads(x), tokens=x, causal=True)
        torch.testing.assert_close(torch.cat(parts, 2), whole)


# With torch.compile(fullgraph=True), there must be no graph breaks.


def _tokens():
    return torch.randn(3, 2, HEADS, 9, 8).unbind()


FUNCTIONS = {
    "alibi_slopes": lambda: gnomon.alibi_slopes(6),
    "alibi_slopes in a call": lambda: gnomon.attention(
        *torch.ones(3, 1, HEADS, 5, 4), position=position.ALiBi(gnomon.alibi_slopes(HEADS))
    ),
    "attention": lambda q, k, v: gnomon.attention(
        q, k, v, similarity=similarity.Penumbral(0.5), position=["rope", position.HyPE(0.1, 0.01)]
    ),
    "attention with specifications": lambda q, k, v: gnomon.attention(
        q, k, v, similarity="umbral", position="rope+alibi", key_lengths=[5, 9], window=(3, 0)
    ),
    "attention with lse": lambda q, k, v: gnomon.attention(q, k, v, return_lse=True),
    "attention_weights": lambda q, k, v: gnomon.attention_weights(q, k, [0, 3], position="alibi"),
    "attention_weights of all rows": lambda q, k, v: gnomon.attention_weights(q, k, slice(None)),
    "cones.ancestor": lambda: gnomon.cones.ancestor(torch.ones(3, 4), torch.ones(3, 4)),
    "cones.lowest_common_ancestor": lambda: gnomon.cones.lowest_common_ancestor(
        torch.ones(3, 4), torch.ones(3, 4), cone="umbral", r=0.1
    ),
    "csr": lambda: gnomon.csr(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3),
    "favor_projection": lambda: gnomon.favor_projection(16, 8),
    "graph_attention": lambda q, k, v: gnomon.graph_attention(
        *(x[0].transpose(0, 1) for x in (q, k, v)), torch.arange(10), torch.arange(9).flip(0)
    ),
    "grid_sinusoid": lambda: gnomon.grid_sinusoid((3, 3), 8, prefix=1),
    "hype_augment": lambda q, k, v: gnomon.hype_augment(q, k, 0.1, 0.01),
    "hype_augment with tensors": lambda q, k, v: gnomon.hype_augment(
        q, k, torch.ones(HEADS), torch.full((HEADS,), 0.01), axes=(3, 3)
    ),
    "linear_attention": lambda q, k, v: gnomon.linear_attention(q, k, v, causal=True),
    "linear_attention with features": lambda q, k, v: gnomon.linear_attention(q, k, v, "favor"),
    "linear_attention with rope": lambda q, k, v: gnomon.linear_attention(
        q, k, v, rope=position.RoPE()
    ),
    "lorentz.centroid": lambda q, k, v: gnomon.lorentz.centroid(gnomon.lorentz.lift(q, 2.0), 2.0),
    "lorentz.lift": lambda q, k, v: gnomon.lorentz.lift(q, torch.tensor(0.5)),
    "nn.attention_position": lambda q, k, v: gnomon.attention(
        q, k, v, position=gnomon.nn.attention_position("learned+alibi")
    ),
    "nn.resize_grid_table": lambda: gnomon.nn.resize_grid_table(
        torch.arange(70.0).view(2, 5, 7), (4, 4)
    ),
    "scaled_dot_product_attention": lambda q, k, v: gnomon.scaled_dot_product_attention(
        q, k, v, is_causal=True
    ),
    "sinusoid": lambda: gnomon.sinusoid(torch.arange(5), 8),
    "sinusoid of a list": lambda: gnomon.sinusoid([3, 5], 8, layout="split"),
    "t5_bucket": lambda: gnomon.t5_bucket(torch.arange(-5, 5), True),
    "varlen_attention": lambda q, k, v: gnomon.varlen_attention(
        *(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 2, 9]), causal=True
    ),
    "t5_bucket of a list": lambda: gnomon.t5_bucket([-3, 0, 200], False),
}
#: Functions that read or extend the catalogue, which are called before a model is built.
NOT_IN_GRAPHS = {"catalogue", "load_terms"}


@pytest.mark.real_device
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_in_one_graph(function):
    torch.manual_seed(0)
    torch._dynamo.reset()
    arguments = _tokens() if function.__code__.co_argcount else ()
    found = torch.compile(function, fullgraph=True, backend="eager")(*arguments)
    torch.testing.assert_close(found, function(*arguments))
    if not arguments:  # such functions follow the default device
        torch._dynamo.reset()
        with torch.device("cpu"):
            torch.compile(function, fullgraph=True, backend="eager")()


def test_all_functions_are_in_the_list_above():
    known = {name.split()[0] for name in FUNCTIONS} | NOT_IN_GRAPHS
    for prefix, module in (
        ("", gnomon),
        ("cones.", gnomon.cones),
        ("lorentz.", gnomon.lorentz),
        ("nn.", gnomon.nn),
    ):
        for name in getattr(module, "__all__", dir(module)):
            value = getattr(module, name)
            if inspect.isfunction(value) and value.__module__.startswith("gnomon"):
                if not name.startswith(("_", "check_")) and prefix + name != "nn.resize_grid":
                    assert prefix + name in known


#: Each term in MultiheadAttention, and one similarity and one position in all other modules.
TRACED = [
    (module, spec, place)
    for module, spec, place in COMBINATIONS
    if "=" not in (spec + place).replace(":shape=3x3", "")
    and (module == "MultiheadAttention" or (spec, place) in (("penumbral", "none"), ("dot", "t5")))
]


@pytest.mark.real_device
@pytest.mark.parametrize(
    ("module", "spec", "place"), TRACED, ids=[" ".join(chosen) for chosen in TRACED]
)
def test_modules_in_one_graph(module, spec, place):
    torch.manual_seed(0)
    torch._dynamo.reset()
    built = MODULES[module](spec, place).eval()
    causal = place.startswith("transformer_xl") and "bidirectional" not in place
    torch.manual_seed(1)
    expected = call(built, causal)
    torch.manual_seed(1)
    with torch.no_grad():
        found = call(built, causal, torch.compile(built, fullgraph=True, backend="eager"))
    torch.testing.assert_close(found, expected)


@pytest.mark.real_device
@pytest.mark.parametrize("spec", EMBEDDINGS)
def test_encodings_in_one_graph(spec):
    torch.manual_seed(0)
    torch._dynamo.reset()
    built, x = TokenPosition(spec, DIM, 24).eval(), torch.randn(2, 9, DIM)
    found = torch.compile(built, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(found, built(x))
