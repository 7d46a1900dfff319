"""Terms that a module computes from its tokens: forget gates and content-conditioned biases."""

import math

import pytest
import torch
from formulas import generator_of

import gnomon
from gnomon.nn import KVCache, MultiheadAttention
from gnomon.position import (
    ContentBias,
    Forget,
    Gate,
    LogTemperature,
    QKNorm,
    Relative,
    ScalableSoftmax,
    Sink,
)

DIM, HEADS, B, L = 24, 4, 2, 37
TERMS = [
    "forget",
    "content_bias:extent=9:columns=5",
    "gate",
    "forget+content_bias:extent=64:past=true+gate",
]


def module_of(position, **options):
    torch.manual_seed(3)
    module = MultiheadAttention(DIM, HEADS, position=position, **options).double()
    with torch.no_grad():
        # Initially, gates are equal for all tokens, so the parameters are changed.
        for name, parameter in module.named_parameters():
            if "forget" in name or "content_bias" in name or "gate" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return module


def tokens(length=L, dim=DIM, seed=0):
    generator = generator_of(seed)
    return torch.randn(B, length, dim, generator=generator, dtype=torch.float64)


def by_hand(module, query, key, positions, **arguments):
    def heads(x, count):
        return x.unflatten(2, (count, -1)).transpose(1, 2)

    q = heads(module.q_proj(query), HEADS)
    k = heads(module.k_proj(key), module.kv_heads)
    v = heads(module.v_proj(key), module.kv_heads)
    o = gnomon.attention(q, k, v, position=positions, **arguments)
    return module.out_proj(o.transpose(1, 2).flatten(2))


def log_gates(module, key):
    weight, bias = module.forget_log_forget_weight, module.forget_log_forget_bias
    return torch.nn.functional.logsigmoid(key @ weight.T + bias).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_forget_gates_are_of_the_keys_tokens(causal, kv_heads):
    module = module_of("forget", kv_heads=kv_heads, kdim=10, vdim=10)
    query, key = tokens(), tokens(dim=10, seed=1).requires_grad_()
    parameters = [key, *module.parameters()]
    found = module(query, key, causal=causal)
    expected = by_hand(module, query, key, Forget(log_gates(module, key)), causal=causal)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), parameters, allow_unused=True),
        torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    assert module.forget_log_forget_weight.shape == (HEADS, 10)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graphs_of_forget_gates(backend):
    module = module_of("forget")
    x = tokens()
    expected = torch.autograd.grad(module(x, causal=True).sum(), list(module.parameters()))
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    found = torch.autograd.grad(compiled(x, causal=True).sum(), list(module.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gates_begin_as_alibi():
    torch.manual_seed(0)
    module = MultiheadAttention(DIM, HEADS, position="forget").double()
    plain = MultiheadAttention(DIM, HEADS, position="alibi").double()
    plain.load_state_dict({n: p for n, p in module.state_dict().items() if "forget" not in n})
    x = tokens(200)
    # The initial bias of the gates is rounded to float32, so the results differ slightly.
    torch.testing.assert_close(module(x, causal=True), plain(x, causal=True), rtol=0, atol=1e-5)


@pytest.mark.parametrize("past", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_content_bias_is_relative_with_a_separate_query(past, per_head):
    spec = f"content_bias:extent=9:columns=5:past={past}:per_head={per_head}".lower()
    module = module_of(spec)
    x = tokens()
    r = (x @ module.content_bias_query_weight.T).unflatten(2, (HEADS, -1)).transpose(1, 2)
    table = module.content_bias_table
    assert table.shape == ((HEADS,) if per_head else ()) + (9 if past else 17, 5)
    found = module(x, causal=past)
    expected = by_hand(module, x, x, ContentBias(r, table, 9), causal=past)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    other = Relative(table, 8, far="zero", query=r)
    torch.testing.assert_close(found, by_hand(module, x, x, other, causal=past), rtol=0, atol=1e-12)
    # The result is also compared with the formula.
    offsets = torch.arange(L) - torch.arange(L)[:, None]
    rows = (offsets + 8).clamp(0, table.shape[-2] - 1)
    near = (offsets.abs() < 9) & (offsets <= 0 if past else torch.ones(L, L, dtype=torch.bool))
    each = table if per_head else table.expand(HEADS, *table.shape)
    bias = torch.einsum("bhid,hijd->bhij", r, each[:, rows]) * near
    q, k, v = (
        layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        for layer in (module.q_proj, module.k_proj, module.v_proj)
    )
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + bias
    if past:
        scores = scores.masked_fill(offsets > 0, -torch.inf)
    o = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, module.out_proj(o), rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", TERMS)
@pytest.mark.parametrize("parts", [[1] * L, [20, 1, 16], [36, 1]])
def test_a_cache_keeps_projections_of_keys(position, parts):
    module = module_of(position).eval()
    x = tokens()
    with torch.no_grad():
        whole = module(x, causal=True)
        cache = KVCache()
        pieces = [module(part, cache=cache, causal=True) for part in x.split(parts, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)
    assert [p.shape[:3] for p in cache.projections] == (
        [(B, HEADS, L)] if "forget" in position else []
    )
    cache.reset()
    assert cache.length() == 0
    assert not cache.projections


def test_a_cache_of_another_module_is_refused():
    cache = KVCache()
    MultiheadAttention(DIM, HEADS)(torch.randn(B, 3, DIM), cache=cache, causal=True)
    module = MultiheadAttention(DIM, HEADS, position="forget")
    with pytest.raises(ValueError, match="contains 0 projections, but the call has 1"):
        module(torch.randn(B, 1, DIM), cache=cache, causal=True)
    assert cache.length() == 3


@pytest.mark.parametrize("position", TERMS)
def test_compiled_and_under_autocast(position):
    module = module_of(position).float()
    x = tokens().float()
    expected = module(x, causal=True)
    compiled = torch.compile(lambda x: module(x, causal=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        low = module(x, causal=True)
    torch.testing.assert_close(low.float(), expected, rtol=0, atol=0.05)
    low.float().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("position", TERMS)
def test_weights_are_those_of_the_output(position):
    module = module_of(position)
    x = tokens()
    weights = module.attention_weights(x, rows=range(L), causal=True)
    v = module.v_proj(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
    o = weights @ v
    if "gate" in position:
        # The gate multiplies the output and is not included in `weights`.
        gate = (x @ module.gate_values_weight.T).sigmoid()
        o = o * gate.unflatten(2, (HEADS, -1)).transpose(1, 2)
    o = module.out_proj(o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(o, module(x, causal=True), rtol=0, atol=1e-11)


def test_gates_are_gradients_and_learned_values():
    module = module_of("forget+content_bias:extent=4:columns=2").eval()
    assert list(module.learned_values()) == ["content_bias_table"]
    x = tokens(7).requires_grad_()
    for name in ("forget_log_forget_weight", "content_bias_query_weight"):
        parameter = getattr(module, name)

        def of(value, name=name):
            return torch.func.functional_call(module, {name: value}, (x,), {"causal": True})

        torch.autograd.gradcheck(of, parameter.detach().clone().requires_grad_())


def test_a_term_that_came_with_tensors_keeps_them():
    """The module stores the tensors of a term, which have the shapes that a call expects."""
    table = torch.nn.Parameter(torch.randn(17, 5, dtype=torch.float64))
    # Module buffers have the default dtype, so use numbers that it can represent.
    query = torch.randn(B, HEADS, L, 5).double()
    module = MultiheadAttention(DIM, HEADS, position=ContentBias(query, table, 9)).double()
    assert module.content_bias_table is table
    x = tokens()
    expected = by_hand(module, x, x, ContentBias(query, table, 9))
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", ["forget", "content_bias"])
def test_a_call_needs_the_tensors(position):
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=f"position '?{position}"):
        gnomon.attention(q, q, q, position=position, causal=True)


@pytest.mark.parametrize(
    ("rows", "extent", "causal", "message"),
    [
        (16, 9, True, r"16 rows, but extent is 9; expected 17 rows \(past to future\) or 9 \(past"),
        (9, 9, False, r"rows \(past only\), but causal is False"),
    ],
)
def test_tables_of_other_sizes_are_refused(rows, extent, causal, message):
    q = torch.randn(1, 2, 5, 4)
    term = ContentBias(torch.randn(1, 2, 5, 3), torch.randn(rows, 3), extent)
    with pytest.raises(ValueError, match=message):
        gnomon.attention(q, q, q, position=term, causal=causal)


def tensors_of_a_call(dtype=torch.float64):
    generator = generator_of(4)
    return (
        torch.randn(B, heads, L, 8, generator=generator, dtype=dtype) for heads in (HEADS, 2, 2)
    )


def test_norms_sinks_and_gates_by_name():
    """Terms passed to a call, terms named in a module's position, and module options agree."""
    q, k, v = tensors_of_a_call()
    weights = torch.rand(2, 8, dtype=torch.float64) + 0.5
    score = torch.randn(HEADS, dtype=torch.float64)
    gate = torch.rand(B, HEADS, L, 8, dtype=torch.float64)
    found = gnomon.attention(
        q, k, v, position=[QKNorm(*weights, 1e-3), Sink(score), Gate(gate)], causal=True
    )

    def norm(x, weight):
        return torch.nn.functional.rms_norm(x, (8,), weight, 1e-3)

    expected = gnomon.attention(
        norm(q, weights[0]), norm(k, weights[1]), v, sink=score, causal=True
    )
    torch.testing.assert_close(found, expected * gate, rtol=0, atol=1e-12)

    torch.manual_seed(5)
    named = MultiheadAttention(DIM, HEADS, position="rope+qk_norm+gate+sink")
    with torch.no_grad():
        for parameter in named.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    own = MultiheadAttention(DIM, HEADS, position="rope", qk_norm=True, gate=True, sink=True)
    renamed = {
        "sink_score": "sink",
        "qk_norm_q_weight": "q_norm.weight",
        "qk_norm_k_weight": "k_norm.weight",
        "gate_values_weight": "gate_proj.weight",
    }
    state = {renamed.get(name, name): value for name, value in named.state_dict().items()}
    own.load_state_dict({**state, "gate_proj.bias": torch.zeros(DIM)})
    x = tokens().float()
    torch.testing.assert_close(named(x, causal=True), own(x, causal=True), rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("offset", [0, 5, [3, 0]])
def test_temperatures_by_name(causal, offset):
    q, k, v = tensors_of_a_call()
    rows = 20
    q = q[:, :, :rows]
    lengths = torch.tensor([30, L])
    positions = torch.arange(rows).double() + torch.tensor(offset).reshape(-1, 1)
    keys = lengths[:, None].double().expand(B, rows)
    seen = torch.minimum(positions + 1, keys) if causal else keys
    s = torch.rand(HEADS, dtype=torch.float64)
    steps = 1 + 0.3 * torch.log1p(torch.floor((positions + 1) / 7))
    smooth = 1 + 0.3 * torch.log(torch.clamp(seen / 7, min=1))
    for term, expected in (
        (ScalableSoftmax(s), s[:, None] * seen.log()[:, None]),
        (LogTemperature(0.3, 7), steps[:, None].expand(B, 1, rows)),
        (LogTemperature(0.3, 7, kind="smooth"), smooth[:, None]),
        ("log_temperature:scale=0.3:length=7", steps[:, None].expand(B, 1, rows)),
    ):
        arguments = {"causal": causal, "query_offset": offset, "key_lengths": lengths}
        found = gnomon.attention(q, k, v, position=["alibi", term], **arguments)
        by_hand = gnomon.attention(
            q, k, v, position="alibi", temperature=expected.double(), **arguments
        )
        torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-12)
    # The two temperatures are multiplied, and one of them is learned.
    leaf = s.clone().requires_grad_()
    both = gnomon.attention(
        q, k, v, position=["alibi", ScalableSoftmax(leaf)], temperature=steps[:, None].double(),
        **arguments,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(both.square().sum(), leaf)
    assert gradient.isfinite().all()
    assert gradient.abs().min() > 0


def test_two_sinks_are_refused():
    q, k, v = tensors_of_a_call()
    score = torch.zeros(HEADS, dtype=torch.float64)
    with pytest.raises(ValueError, match="sink is given, and position contains a sink"):
        gnomon.attention(q, k, v, position=Sink(score), sink=score)
    with pytest.raises(ValueError, match="two sinks"):
        gnomon.attention(q, k, v, position=[Sink(score), Sink(score)])
    with pytest.raises(ValueError, match="tensor of gate has shape"):
        gnomon.attention(q, k, v, position=Gate(torch.ones(B, HEADS, L, 3).double()))
    with pytest.raises(ValueError, match="q_weight of qk_norm has shape"):
        gnomon.attention(q, k, v, position=QKNorm(*torch.ones(2, 1, 8).double().unbind(0)))


@pytest.mark.cpu("compares with NumPy arrays")
def test_modules_begin_with_plain_scores():
    """Sinks start at 0, norm weights at 1, and scalable softmax at a factor of 1 for 100 keys."""
    torch.manual_seed(0)
    named = MultiheadAttention(DIM, HEADS, position="scalable_softmax+qk_norm+sink").double()
    assert not named.sink_score.any()
    assert (named.qk_norm_q_weight == 1).all()
    assert named.learned_values()["scalable_softmax_s"].value[0] == pytest.approx(1 / math.log(100))
