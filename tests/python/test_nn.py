"""The modules of gnomon.nn."""

import copy
import math

import pytest
import torch

import gnomon
from gnomon._catalogue import module_tensors
from gnomon.nn import KVCache, LearnedAbsolute, MultiheadAttention, Sinusoidal, TokenPosition
from gnomon.nn._heads import split_heads

# All similarities, and variants of some.
SIMILARITIES = [
    *(entry["name"] for entry in gnomon.catalogue()["similarities"]),
    "umbral:r=1:map=psi",
    "penumbral:score=height2",
    "gaussian:gamma=fixed",
    "umbral:map=exp:score=log",
    "penumbral:map=exp",
    "penumbral:score=log",
    "hyperbolic:map=exp",
    "hyperbolic:model=half_space",
    "hyperbolic:model=half_space:map=xi",
    "hyperbolic:model=ball:beta=fixed",
    "hyperbolic:model=klein:map=none",
    "lorentz:c=learned",
    "lorentz:map=none:c=2:scale=fixed",
]
# Biases and rotations; test_module_sweep.py has all positions.
POSITIONS = [
    "none",
    "rope",
    "rope:layout=half:dims=4",
    "alibi",
    "alibi:slopes=learned",
    "t5",
    "rope_mixed",
    "hype",
    "hype:mu=0.01:tau=learned",
    "hype:mu=learned:tau=learned:mode=abs",
    "kerple",
    "kerple:kind=power:r2=fixed",
    "rope+hype:mu=0.001:tau=learned",
    "alibi+alibi:slopes=learned+hype+hype:tau=learned",
]


def term_parameters(module):
    return {name: p for name, p in module.named_parameters() if "_proj" not in name}


# `additive` has a single column, which RoPE cannot rotate.
COMBINATIONS = [
    (similarity, position)
    for similarity in SIMILARITIES
    for position in POSITIONS
    if similarity != "additive" or "rope" not in position
]


def parameters_that_training_moves(module, x, target) -> set[str]:
    """The names of the parameters that three steps change; two steps must reduce the loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    losses = []
    for _ in range(3):
        loss = (module(x, causal=True) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}


# Each position is combined with several similarities, and each similarity with several positions.
@pytest.mark.parametrize(("similarity", "position"), COMBINATIONS[::3])
def test_two_steps_of_training(similarity, position):
    torch.manual_seed(0)
    module = MultiheadAttention(32, 4, kv_heads=2, similarity=similarity, position=position)
    x, target = torch.randn(2, 20, 32), torch.randn(2, 20, 32)
    moved = parameters_that_training_moves(module, x, target)
    # A key-projection bias shifts all dot products of a row equally, so its gradient is 0.
    still = {"k_proj.bias"} if similarity == "dot" else set()
    assert moved | still == {name for name, _ in module.named_parameters()}


def test_parameter_names():
    module = MultiheadAttention(
        32, 4, similarity="umbral", position="rope+t5+hype:tau=learned:mu=learned+hype:tau=learned"
    )
    assert {name: tuple(p.shape) for name, p in term_parameters(module).items()} == {
        "gamma_theta": (4,),
        "t5_table": (32, 4),
        "hype_tau_theta": (4,),
        "hype_mu_theta": (4,),
        "hype2_tau_theta": (4,),
    }
    assert all(not p.any() for p in term_parameters(module).values())
    assert [name for name, _ in module.named_buffers()] == ["gamma_start"]


@pytest.mark.parametrize(
    ("similarity", "position", "expected"),
    [
        (
            "umbral",
            "rope+t5+t5:buckets=8+alibi+hype:tau=learned+hype:mu=learned",
            {
                "gamma_start": (-1, "gamma", "start", ""),
                "gamma_theta": (-1, "gamma", "theta", ""),
                "t5_table": (1, "table", "value", "buckets"),
                "t52_table": (2, "table", "value", "buckets"),
                "hype_tau_theta": (4, "tau", "theta", ""),
                "hype2_mu_theta": (5, "mu", "theta", ""),
            },
        ),
        (
            "lorentz:scale=fixed:c=learned",
            "forget+content_bias:columns=3",
            {
                "scale_start": (-1, "scale", "start", ""),
                "c_theta": (-1, "c", "theta", ""),
                "forget_log_forget_weight": (0, "log_forget", "weight", ""),
                "forget_log_forget_bias": (0, "log_forget", "bias", ""),
                "content_bias_query_weight": (1, "query", "weight", ""),
                "content_bias_table": (1, "table", "value", "near_offsets"),
            },
        ),
        (
            "gaussian:gamma=2",
            "none+relative2d:shape=3x4",
            {
                "relative2d_rows": (1, "rows", "value", "first_axis"),
                "relative2d_columns": (1, "columns", "value", "second_axis"),
            },
        ),
        # A learned or given table is stored as it is; if a table is computed, the module stores the
        # tensor that it is computed from.
        ("dot", "transformer_xl", {"transformer_xl_r": (0, "r", "value", "")}),
        ("dot", "transformer_xl:r=learned", {"transformer_xl_r": (0, "r", "value", "distances")}),
    ],
)
def test_origins_of_tensors(similarity, position, expected):
    module = MultiheadAttention(32, 4, similarity=similarity, position=position)
    components = position.split("+")
    found = {}
    for tensor in module_tensors(module.similarity, module.position):
        spec = tensor.component.spec
        place = -1 if spec == similarity else components.index(spec)
        found[tensor.name] = (place, tensor.parameter, tensor.part, tensor.indexed_by)
    if "transformer_xl" in position:
        assert found.pop("transformer_xl_u") == (0, "u", "value", "")
        assert found.pop("transformer_xl_v") == (0, "v", "value", "")
    assert found == expected
    assert list(module._term_names) == [t.name for t in module_tensors(similarity, position)]


def test_origins_of_given_tensors():
    module = MultiheadAttention(
        8,
        2,
        similarity=gnomon.similarity.Laplacian(torch.ones(2)),
        position="alibi"
        + gnomon.position.ALiBi(torch.ones(2))
        + gnomon.position.TransformerXL(torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 9, 4)),
    )
    tensors = module_tensors(module.similarity, module.position)
    assert [(tensor.name, tensor.component.name, tensor.indexed_by) for tensor in tensors] == [
        ("gamma", "laplacian", ""),
        ("alibi2_slopes", "alibi", ""),
        ("transformer_xl_u", "transformer_xl", ""),
        ("transformer_xl_v", "transformer_xl", ""),
        ("transformer_xl_r", "transformer_xl", "distances"),
    ]
    assert {tensor.part for tensor in tensors} == {"value"}
    assert {tensor.name for tensor in tensors} == set(dict(module.named_buffers()))


def test_mistakes_are_found_in_each_module():
    """The checks of a module do not depend on earlier modules of other sizes."""
    for _ in range(2):
        MultiheadAttention(32, 2, position="rope:dims=10")
        with pytest.raises(ValueError, match="dims"):
            MultiheadAttention(16, 2, position="rope:dims=10")
        tables = torch.ones(5, 8), torch.ones(5, 4)
        for table in tables:
            position = gnomon.position.AbsoluteKeys(table) + "rope:dims=8"
            MultiheadAttention(16, 2, position=position)
            with pytest.raises(ValueError, match="dims"):
                MultiheadAttention(8, 2, position=position)


def at_its_start(module):
    """The similarity of a module, with the initial gamma or beta."""
    name, *options = module.similarity.split(":")
    fields = dict(option.split("=") for option in options)
    fields = {key: value for key, value in fields.items() if value != "learned"}
    fields |= {key: float(fields[key]) for key in ("r", "K", "c") if key in fields}
    for buffer, start in module.named_buffers():
        fields[buffer.removesuffix("_start")] = start.expand(module.num_heads)
    return getattr(gnomon.similarity, name.capitalize())(**fields)


@pytest.mark.parametrize("head_dim", [8, 16, 64])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_logits_spread_by_about_one(similarity, head_dim):
    torch.manual_seed(0)
    module = MultiheadAttention(2 * head_dim, 2, similarity=similarity).double()
    x = torch.randn(4, 200, 2 * head_dim, dtype=torch.float64)
    q, k = (
        projection(x).unflatten(2, (2, module.qk_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj)
    )
    # With one-hot values, the output is the weight matrix, whose logarithms are the logits up to a
    # constant per row.
    v = torch.eye(200, dtype=torch.float64).expand(4, 2, 200, 200)
    weights = gnomon.attention(q, k, v, similarity=at_its_start(module))
    spread = weights.clamp_min(1e-300).log().var(-1).mean().sqrt().item()
    assert 0.3 <= spread <= 3


def test_additive_has_one_column():
    module = MultiheadAttention(32, 4, kv_heads=2, similarity="additive").double()
    assert module.qk_dim == 1
    assert module.q_proj.weight.shape == (4, 32)
    assert module.k_proj.weight.shape == (2, 32)
    assert not term_parameters(module)


def test_beta_is_named_as_it_is():
    module = MultiheadAttention(32, 4, similarity="hyperbolic:model=half_space")
    assert list(term_parameters(module)) == ["beta_theta"]
    assert [name for name, _ in module.named_buffers()] == ["beta_start"]
    fixed = MultiheadAttention(32, 4, similarity="hyperbolic:beta=2.5")
    assert not term_parameters(fixed)
    assert not list(fixed.named_buffers())


def test_hype_starts_as_alibi():
    torch.manual_seed(0)
    alibi = MultiheadAttention(32, 4, position="alibi").double()
    hype = MultiheadAttention(32, 4, position="hype:mu=0.00001:tau=learned").double()
    hype.load_state_dict(alibi.state_dict(), strict=False)
    x = torch.randn(2, 50, 32, dtype=torch.float64)
    torch.testing.assert_close(hype(x, causal=True), alibi(x, causal=True))


@pytest.mark.parametrize(
    ("position", "name", "value"),
    [
        ("alibi:slopes=learned", "alibi_slopes_theta", lambda s: s),
        ("hype:mu=0.01:tau=learned", "hype_tau_theta", lambda s: s / 0.01),
        ("hype:tau=1.5:mu=learned", "hype_mu_theta", lambda s: torch.full((4,), 0.001)),
    ],
)
def test_learned_values_are_exponential(position, name, value):
    torch.manual_seed(0)
    module = MultiheadAttention(32, 4, position=position, bias=False).double()
    theta = torch.tensor([0.1, -0.2, 0.0, 0.3], dtype=torch.float64)
    with torch.no_grad():
        getattr(module, name).copy_(theta)
    learned = value(gnomon.alibi_slopes(4)).double() * (5 * theta).exp()
    term = {
        "alibi_slopes_theta": lambda: gnomon.position.ALiBi(learned),
        "hype_tau_theta": lambda: gnomon.position.HyPE(learned, 0.01),
        "hype_mu_theta": lambda: gnomon.position.HyPE(1.5, learned),
    }[name]()
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    q, k, v = (
        projection(x).unflatten(2, (4, 8)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    o = gnomon.attention(q, k, v, position=term, causal=True)
    expected = module.out_proj(o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, causal=True), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_t5_looks_both_ways_unless_causal(causal):
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, position="t5").double()
    explicit = MultiheadAttention(
        16, 2, position=f"t5:bidirectional={'false' if causal else 'true'}"
    ).double()
    with torch.no_grad():
        module.t5_table.normal_()
    explicit.load_state_dict(module.state_dict())
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    assert torch.equal(module(x, causal=causal), explicit(x, causal=causal))
    assert not torch.allclose(module(x, causal=causal), module(x, causal=not causal))


@pytest.mark.parametrize("similarity", ["dot", "penumbral"])
@pytest.mark.parametrize("position", POSITIONS)
def test_cache(similarity, position):
    torch.manual_seed(0)
    module = MultiheadAttention(
        32, 4, kv_heads=2, qk_dim=6, similarity=similarity, position=position
    ).double()
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    whole = module(x, causal=True)
    cache = KVCache()
    parts = [module(x[:, a:b], causal=True, cache=cache) for a, b in ((0, 5), (5, 6), (6, 11))]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert cache.length() == 11
    assert cache.k.shape == (2, 2, 11, 6)
    cache.reset()
    assert cache.length() == 0


def test_padding_may_be_longer_than_the_cache():
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, position="rope+alibi").double()
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    padding = {"key_starts": [4, 0, 1]}
    whole = module(x, causal=True, **padding)
    for sizes in ([1] * 6, [2, 3, 1]):
        cache = KVCache()
        parts = [module(part, causal=True, cache=cache, **padding) for part in x.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole)
    with pytest.raises(ValueError, match=r"key_starts\[1\] is -1"):
        module(x, causal=True, cache=KVCache(), key_starts=[9, -1, 0])
    with pytest.raises(ValueError, match=r"key_lengths\[0\] is 7"):
        module(x, causal=True, cache=KVCache(), key_lengths=[7, 6, 6])


@pytest.mark.parametrize(
    "kind",
    [
        "rope",
        "rope:layout=half:scaling=dynamic:factor=2:original_max_position_embeddings=4",
        "rope:dims=4+alibi",
    ],
)
@torch.no_grad()
def test_a_cache_of_rotated_keys_follows_modifications(kind):
    torch.manual_seed(0)
    module = MultiheadAttention(32, 4, kv_heads=2, position=kind).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    whole = module(x, causal=True)
    last = torch.testing.assert_close
    lasts = "dynamic" not in kind
    cache = KVCache()
    for n in range(8):
        o = module(x[:, n : n + 1], causal=True, cache=cache)
        if lasts:
            last(o, whole[:, n : n + 1])
    plain, draft = copy.deepcopy(cache), copy.copy(cache)
    # The cache provides the keys before rotation.
    last(plain.k, split_heads(module.k_proj(x[:, :8]), 2))
    for other in (cache, draft, plain):
        last(module(x[:, 8:], causal=True, cache=other), module(x, causal=True)[:, 8:])
    # A cache may be truncated, and its batch reordered.
    cache.k, cache.v = cache.k[:, :, :5].flip(0), cache.v[:, :, :5].flip(0)
    assert cache.length() == 5
    last(module(x[:, 5:].flip(0), causal=True, cache=cache).flip(0), whole[:, 5:])
    # Calls may pass positions.
    places = torch.arange(12) * 2
    cache = KVCache()
    module(x[:, :5], causal=True, cache=cache, positions=places[:5])
    o = module(x[:, 5:], causal=True, cache=cache, positions=places[5:])
    last(o, module(x, causal=True, positions=places)[:, 5:])
    with pytest.raises(ValueError, match="KVCache: k has shape"):
        module(x[:1], causal=True, cache=cache, positions=places)


@pytest.mark.parametrize("kind", ["rope", "alibi", "forget"])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_cache_grows_in_place_and_copies_of_it_part_ways(kind, guard):
    torch.manual_seed(0)
    module = MultiheadAttention(32, 4, kv_heads=2, position=kind).double()
    x = torch.randn(2, 60, 32, dtype=torch.float64)
    other = torch.randn(2, 60, 32, dtype=torch.float64)
    close = torch.testing.assert_close
    with guard():
        whole = module(x, causal=True)
        cache = KVCache()
        module(x[:, :4], causal=True, cache=cache)
        places = []
        for n in range(4, 40):
            o = module(x[:, n : n + 1], causal=True, cache=cache)
            close(o, whole[:, n : n + 1])
            places.append(cache.v.data_ptr())
        # There is one address for the copy, one after the prefill, and one each time the capacity
        # grows by half.
        assert len(set(places)) < 9
        read = cache.v
        before = read.clone()
        # The two caches are extended with different tokens, so the second one must be copied.
        twin = copy.copy(cache)
        second = torch.cat([x[:, :40], other[:, :20]], 1)
        of_other = module(second, causal=True)
        for n in range(40, 60):
            close(module(x[:, n : n + 1], causal=True, cache=cache), whole[:, n : n + 1])
            token = second[:, n : n + 1]
            close(module(token, causal=True, cache=twin), of_other[:, n : n + 1])
        assert torch.equal(read, before)
        assert cache.length() == twin.length() == 60
        deep = copy.deepcopy(twin)
        for one in (deep, twin):
            o = module(x[:, :3], causal=True, cache=one)
            close(o, module(torch.cat([second, x[:, :3]], 1), causal=True)[:, 60:])
    # Extending a cache does not change tensors that autograd has saved.
    with torch.no_grad():
        cache = KVCache()
        for n in range(6):
            module(x[:, n : n + 1], causal=True, cache=cache)
    leaf = x[:, 6:7].clone().requires_grad_()
    o = module(leaf, causal=True, cache=cache)
    with torch.no_grad():
        module(x[:, 7:8], causal=True, cache=cache)
    (ours,) = torch.autograd.grad(o.sum(), leaf)
    (expected,) = torch.autograd.grad(
        module(torch.cat([x[:, :6], leaf], 1), causal=True)[:, 6].sum(), leaf
    )
    close(ours, expected)


@pytest.mark.parametrize("records", [False, True])
def test_a_cache_of_rotated_keys_follows_modules_and_positions(records):
    torch.manual_seed(0)
    x = torch.randn(1, 8, 32, dtype=torch.float64)
    close = torch.testing.assert_close
    with torch.set_grad_enabled(records):
        module = MultiheadAttention(32, 4, position="rope").double()
        for position in ("rope:base=500", "rope:layout=half", "rope:dims=4", "rope", None):
            other = MultiheadAttention(32, 4, position=position).double()
            other.load_state_dict(module.state_dict())
            cache = KVCache()
            module(x[:, :5], causal=True, cache=cache)
            for one in (module, other, module):
                n = cache.length()
                o = one(x[:, n : n + 1], causal=True, cache=cache)
                close(o, one(x, causal=True)[:, n : n + 1])
        for before, after in ((torch.arange(7), torch.arange(7) + 10), (torch.arange(7) * 3, None)):
            cache = KVCache()
            module(x[:, :6], causal=True, cache=cache, positions=before[:6])
            module(x[:, 6:7], causal=True, cache=cache, positions=before[6:])
            cache.positions = after
            own = {} if after is None else {"positions": torch.tensor([17])}
            whole = {} if after is None else {"positions": torch.arange(10, 18)}
            o = module(x[:, 7:], causal=True, cache=cache, **own)
            close(o, module(x, causal=True, **whole)[:, 7:])


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_reading_a_cache_keeps_its_gradients(guard):
    torch.manual_seed(0)
    module = MultiheadAttention(32, 4, position="rope").double()
    x = torch.randn(1, 80, 32, dtype=torch.float64, requires_grad=True)
    cache = KVCache()
    for n in range(70):
        module(x[:, n : n + 1], causal=True, cache=cache)
        if n in (1, 69):
            with guard():
                assert cache.k.shape[2] == n + 1
    o = module(x[:, 70:], causal=True, cache=cache)
    expected = module(x, causal=True)[:, 70:]
    torch.testing.assert_close(o, expected)
    gradients = [torch.autograd.grad(one.square().sum(), x)[0] for one in (o, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("position", [None, "rope"])
@pytest.mark.parametrize("records", [False, True])
def test_a_cache_takes_nothing_from_a_call_that_raises(position, records):
    module, cache = MultiheadAttention(8, 2, position=position), KVCache()
    x, other = torch.randn(1, 9, 8), torch.randn(1, 3, 8)
    with torch.set_grad_enabled(records):
        whole = module(x, causal=True)
        for begin in (0, 3, 6):
            known = cache.length()
            torch.testing.assert_close(
                module(x[:, begin : begin + 3], causal=True, cache=cache),
                whole[:, begin : begin + 3],
            )
            assert cache.length() == known + 3
            with pytest.raises(ValueError, match="left of window is -1"):
                module(other, window=(-1, 0), cache=cache)
            projection, module.out_proj = module.out_proj, torch.nn.Linear(7, 8)
            with pytest.raises(RuntimeError):
                module(other, causal=True, cache=cache)
            module.out_proj = projection
            assert cache.length() == known + 3


def test_cross_attention():
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2).double()
    query, key, value = (torch.randn(2, n, 16, dtype=torch.float64) for n in (3, 7, 7))
    q, k, v = (
        projection(x).unflatten(2, (2, 8)).transpose(1, 2)
        for projection, x in (
            (module.q_proj, query),
            (module.k_proj, key),
            (module.v_proj, value),
        )
    )
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(
        module(query, key, value), module.out_proj(o.transpose(1, 2).flatten(2))
    )
    lengths = torch.tensor([7, 4])
    masked = module(query, key, value, key_lengths=lengths)
    torch.testing.assert_close(masked[1:], module(query[1:], key[1:, :4], value[1:, :4]))


def test_golden_module():
    """Uses the module, weights and expected numbers of tests/torch/nn_test.cc."""
    module = MultiheadAttention(
        8,
        2,
        kv_heads=1,
        similarity="penumbral",
        position="rope+t5+hype:mu=0.01:tau=learned",
    ).double()
    with torch.no_grad():
        for n, (_, p) in enumerate(sorted(module.named_parameters())):
            index = torch.arange(p.numel(), dtype=torch.float64)
            p.copy_((index * 0.7 + n).sin().mul(0.3).reshape(p.shape))
        module.gamma_start.fill_(1.25)
    x = (torch.arange(48, dtype=torch.float64) * 0.37).cos().reshape(1, 6, 8)
    out = module(x, causal=True, window=(3, None))[0, -1]
    expected = [
        *(-0.312258745162, -0.388714625559, -0.284255134003, -0.047230407236),
        *(0.212166622111, 0.373149561168, 0.360602219062, 0.180139130061),
    ]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.real_device
def test_modules_copy_and_load():
    import copy

    module = MultiheadAttention(16, 2, similarity="gaussian", position="t5")
    twin = copy.deepcopy(module)
    twin.load_state_dict(module.state_dict())
    x = torch.randn(1, 5, 16)
    assert torch.equal(twin(x), module(x))
    assert "penumbral" in repr(MultiheadAttention(16, 2, similarity="penumbral"))


@pytest.mark.parametrize("layout", ["interleaved", "split", "split_xl"])
def test_sinusoidal(layout):
    x = torch.randn(2, 5, 8)
    expected = x + gnomon.sinusoid(torch.arange(3, 8), 8, layout=layout)
    torch.testing.assert_close(Sinusoidal(8, layout)(x, offset=3), expected)
    spec = f"sinusoidal:layout={layout}"
    torch.testing.assert_close(TokenPosition(spec, 8, 16)(x, offset=3), expected)


def test_learned_absolute():
    torch.manual_seed(0)
    module = LearnedAbsolute(400, 64)
    assert math.isclose(module.table.std().item(), 0.02, rel_tol=0.05)
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(module(x, offset=7), x + module.table[7:12])


@pytest.mark.parametrize(
    ("position", "max_length", "names"),
    [
        ("none", None, []),
        ("rope+hype", None, []),
        ("sinusoidal+alibi", None, []),
        ("learned", 32, ["learned0.table"]),
        ("learned:length=12+rope+learned", 12, ["learned0.table", "learned1.table"]),
    ],
)
def test_token_position(position, max_length, names):
    module = TokenPosition(position, 8, 32)
    assert module.max_length == max_length
    assert [name for name, _ in module.named_parameters()] == names
    x = torch.randn(1, 4, 8)
    changes = "learned" in position or "sinusoidal" in position
    assert torch.equal(module(x), x) != changes


@pytest.mark.parametrize("similarity", ["dot", "penumbral"])
def test_norms_gates_and_sinks(similarity):
    """Each option has its documented effect and no other; the operator's tests cover the rest."""
    torch.manual_seed(0)
    module = MultiheadAttention(
        16,
        4,
        kv_heads=2,
        similarity=similarity,
        position="rope",
        qk_norm=True,
        gate=True,
        sink=True,
    ).double()
    for parameter in module.parameters():
        parameter.data.normal_()
    x = torch.randn(2, 9, 16, dtype=torch.float64)

    def heads(name, count):
        return getattr(module, name)(x).unflatten(2, (count, -1)).transpose(1, 2)

    def normed(tokens, weight):
        return tokens / (tokens.square().mean(3, keepdim=True) + 1e-6).sqrt() * weight

    q = normed(heads("q_proj", 4), module.q_norm.weight)
    k = normed(heads("k_proj", 2), module.k_norm.weight)
    gamma = module.gamma_start * (5 * module.gamma_theta).exp() if similarity != "dot" else None
    term = gnomon.similarity.Penumbral(gamma) if similarity != "dot" else None
    o = gnomon.attention(
        q, k, heads("v_proj", 2), similarity=term, position="rope", causal=True, sink=module.sink
    )
    o = o.transpose(1, 2).flatten(2) * torch.sigmoid(module.gate_proj(x))
    torch.testing.assert_close(module(x, causal=True), module.out_proj(o))
    weights = module.attention_weights(x, rows=slice(None), causal=True)
    expected = gnomon.attention_weights(
        q, k, slice(None), similarity=term, position="rope", causal=True, sink=module.sink
    )
    torch.testing.assert_close(weights, expected)

    cache = gnomon.nn.KVCache()
    parts = [module(part, causal=True, cache=cache) for part in x.split([4, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, causal=True))
    module(x, causal=True).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in module.parameters())
    assert {"q_norm.weight", "k_norm.weight", "gate_proj.weight", "sink"} <= set(
        module.state_dict()
    )
    assert "qk_norm=True, gate=True, sink=True" in repr(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, causal=True), module(x, causal=True))


def test_modules_without_them_are_as_before():
    names = set(MultiheadAttention(16, 4).state_dict())
    assert names == {
        f"{part}_proj.{kind}" for part in ("q", "k", "v", "out") for kind in ("weight", "bias")
    }
    for flag in ("qk_norm", "gate", "sink"):
        with pytest.raises(TypeError, match=f"{flag} is an int; expected True or False"):
            MultiheadAttention(16, 4, **{flag: 1})


@pytest.mark.parametrize(
    ("similarity", "position", "told"),
    [
        ("dot", "rope+rope", "two rotations"),
        ("dot", "rope:dims=3", "dims = 3"),
        ("dot", "rope:dims=40", "dims = 40"),
        ("penumbral", "rope:dims=8", "a height"),
        ("dot", "rope:scaling=yarn", "scaling=yarn, which needs factor"),
        ("dot", "rope:sections=1x1", "sections = 1x1"),
        ("umbral", "transformer_xl", "works only with the similarity dot"),
        ("additive", "rope", "rotates pairs"),
        ("dot", "relative:max_offset=3+transformer_xl", "two content terms"),
        ("dot", "alibi:shape=3x3+rope:shape=2x2", "grid"),
        ("dot", "sink+sink", "two sinks"),
        ("dot", ["rope+rope", gnomon.position.KeyBias(torch.zeros(1, 4, 7))], "two rotations"),
        (
            gnomon.similarity.Laplacian(torch.ones(4)),
            ["transformer_xl", gnomon.position.KeyBias(torch.zeros(1, 4, 7))],
            "works only with the similarity dot",
        ),
    ],
)
def test_terms_that_no_call_supports_are_rejected_at_once(similarity, position, told):
    with pytest.raises(ValueError, match=told):
        MultiheadAttention(32, 4, similarity=similarity, position=position)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"dropout": -0.5}, "dropout is -0.5; expected a probability from 0 to 1"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"tolerance": 1.0}, "tolerance is 1; expected at least 0 and less than 1"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
    ],
)
def test_numbers_of_a_module(arguments, told):
    with pytest.raises(ValueError, match="^gnomon.nn.MultiheadAttention: " + told):
        MultiheadAttention(32, 4, **arguments)


@pytest.mark.parametrize(
    ("own", "given"),
    [
        ("sink", "sink"),
        ("sink", gnomon.position.Sink(torch.zeros(4))),
        ("sink", ["rope", "sink"]),
        ("gate", "gate"),
        ("qk_norm", "rope+qk_norm"),
    ],
)
def test_features_of_both_module_and_position(own, given):
    expected = f"{own} is set, and position contains {own}; use only one of them"
    with pytest.raises(ValueError, match=expected):
        MultiheadAttention(32, 4, position=given, **{own: True})
    MultiheadAttention(32, 4, position=given)


@pytest.mark.parametrize(
    "position",
    [
        "t5:max_distance=12",  # too small for a causal call
        "transformer_xl",
        "forget",
        "grid_bias:shape=40x50:prefix=1+rope:shape=40x50:prefix=1",
        lambda: gnomon.position.PairBias(torch.zeros(1, 4, 9, 9)),
        lambda: gnomon.position.KeyBias(torch.zeros(1, 4, 9)),
        lambda: [gnomon.position.GridBias(torch.zeros(4, 5, 5)), "rope:shape=3x3"],
    ],
)
def test_terms_that_some_call_supports_are_accepted(position):
    position = position() if callable(position) else position
    module = MultiheadAttention(32, 4, position=position)
    x = torch.randn(2, 2001 if "40x50" in str(position) else 9, 32)
    causal = position in ("forget", "transformer_xl")
    assert module(x, causal=causal).isfinite().all()
