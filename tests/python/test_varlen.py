"""Packed and nested sequences compared with attention() in a loop over the sequences."""

import itertools
import math

import pytest
import torch
from formulas import POSITIONS, SIMILARITIES, Case, generator_of
from operator_checks import peak_memory
from torch.nested import nested_tensor_from_jagged

import gnomon
from gnomon import _varlen, position
from gnomon._attention import AttentionArguments

# The sequences include an empty one, a single token, consecutive ones of equal length, and queries
# without keys.
QUERIES = [5, 0, 1, 4, 4, 2, 7, 3]
KEYS = [5, 0, 1, 6, 6, 2, 9, 0]
H = 4


def ends_of(lengths):
    return [0, *itertools.accumulate(lengths)]


@pytest.fixture(params=["each", "one call"])
def way(request, monkeypatch):
    """Tests both implementations: a call per length, and a single call, as under torch.compile."""
    monkeypatch.setattr(_varlen, "_SHORT", 0)
    if request.param == "one call":
        monkeypatch.setattr(_varlen, "_applies_to_each", lambda *_: False)
    return request.param


def looped(q, k, v, lengths_q, lengths_k, arguments):
    """o (total_q, H, Dv) and lse (H, total_q); `arguments` returns the arguments of a sequence."""
    outputs, sums = [], []
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    for n, tokens in enumerate(parts):
        batch = [x.transpose(0, 1).unsqueeze(0) for x in tokens]
        o, lse = gnomon.attention(
            *batch,
            return_lse=True,
            **{"query_offset": lengths_k[n] - lengths_q[n]} | arguments(n),
        )
        outputs.append(o[0].transpose(0, 1))
        sums.append(lse[0])
    return torch.cat(outputs), torch.cat(sums, 1)


def with_gradients(call, inputs):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    o, lse = call(leaves)
    d_o = torch.randn(o.shape, generator=generator_of(1), dtype=o.dtype)
    d_lse = torch.randn(lse.shape, generator=generator_of(2), dtype=o.dtype)
    seen = lse != -math.inf
    gradients = torch.autograd.grad(
        [o, lse.masked_fill(~seen, 0.0)], list(leaves.values()), [d_o, d_lse]
    )
    return [o.detach(), lse.detach(), *gradients]


def same(ours, theirs, inputs):
    for own, expected in zip(
        with_gradients(ours, inputs), with_gradients(theirs, inputs), strict=True
    ):
        assert own.shape == expected.shape
        torch.testing.assert_close(own, expected, atol=1e-11, rtol=1e-11)


def packed_inputs(case):
    inputs = case.inputs()
    return inputs | {name: inputs[name][0].transpose(0, 1) for name in ("q", "k", "v")}


# Each similarity and each position occurs, in varying combinations.
SIMILARITY_NAMES, POSITION_NAMES = list(SIMILARITIES), list(POSITIONS)
PAIRS = [
    (SIMILARITY_NAMES[n % len(SIMILARITY_NAMES)], POSITION_NAMES[n % len(POSITION_NAMES)])
    for n in range(max(len(SIMILARITY_NAMES), len(POSITION_NAMES)))
]


@pytest.mark.parametrize(("similarity", "its_position"), PAIRS)
def test_every_similarity_and_position(similarity, its_position, way):
    for lengths_k, causal in ((KEYS, True), (QUERIES, False)):
        case = Case(similarity, its_position, 1, H, 2, sum(QUERIES), sum(lengths_k))

        def terms(inputs, case=case, causal=causal):
            return {
                "similarity": SIMILARITIES[case.similarity].ours(inputs),
                "position": case.positions(inputs),
                # For "t5 past", the table covers only the past.
                "causal": causal or case.position == "t5 past",
            }

        def ours(inputs, lengths_k=lengths_k, terms=terms):
            keys = None if lengths_k is QUERIES else torch.tensor(ends_of(lengths_k))
            return gnomon.varlen_attention(
                inputs["q"], inputs["k"], inputs["v"], torch.tensor(ends_of(QUERIES)), keys,
                return_lse=True, **terms(inputs),
            )  # fmt: skip

        def theirs(inputs, lengths_k=lengths_k, terms=terms):
            tokens = inputs["q"], inputs["k"], inputs["v"]
            return looped(*tokens, QUERIES, lengths_k, lambda n: terms(inputs))

        same(ours, theirs, packed_inputs(case))


@pytest.mark.parametrize(
    "arguments",
    [
        {"window": (2, 1)},
        {"window": 1, "causal": True},
        {"causal": True, "window": (3, None)},
        {"chunks": (3, 1, 0)},
        {"scale": 0.3, "tolerance": 0.0},
        {"sink": 0.5, "temperature": 1.5},
        {"aggregation": "einstein_midpoint"},
    ],
    ids=str,
)
def test_arguments(arguments, way):
    """Tests all arguments that do not depend on lengths. Windows are aligned to the last key."""
    case = Case("dot", "alibi", 1, H, 2, sum(QUERIES), sum(KEYS))

    def ours(inputs):
        return gnomon.varlen_attention(
            inputs["q"], inputs["k"], inputs["v"], ends_of(QUERIES), ends_of(KEYS),
            return_lse=True, **arguments,
        )  # fmt: skip

    def theirs(inputs):
        tokens = inputs["q"], inputs["k"], inputs["v"]
        return looped(*tokens, QUERIES, KEYS, lambda n: arguments)

    inputs = packed_inputs(case)
    if "aggregation" in arguments:
        # Values are points inside the unit ball, because gradients of clamped points are
        # ill-conditioned.
        inputs["v"] = 0.5 * inputs["v"] / inputs["v"].norm(dim=-1).max()
    same(ours, theirs, {name: inputs[name] for name in ("q", "k", "v")})


TOTAL = sum(QUERIES)
ENDS = ends_of(QUERIES)


def of_sequence(x, axis, n):
    return x.narrow(axis, ENDS[n], QUERIES[n])


# Terms with one number per token, packed and per sequence.
OF_TOKENS = {
    "key bias": ((1, H, TOTAL), position.KeyBias, lambda x, n: of_sequence(x, 2, n)),
    "forget": (
        (1, H, TOTAL),
        lambda x: position.Forget(torch.nn.functional.logsigmoid(x)),
        lambda x, n: of_sequence(x, 2, n),
    ),
    "relative": (
        (1, H, TOTAL, 3),
        lambda x: position.Relative(torch.linspace(-1, 1, 15).double().reshape(5, 3), 2, query=x),
        lambda x, n: of_sequence(x, 2, n),
    ),
    "gate": ((1, H, TOTAL, 5), position.Gate, lambda x, n: of_sequence(x, 2, n)),
    "absolute keys": (
        (max(QUERIES), 8), position.AbsoluteKeys, lambda x, n: x[: QUERIES[n]],
    ),
    # The middle entry belongs to offset 0.
    "offset bias": (
        (H, 2 * max(QUERIES) - 1),
        position.OffsetBias,
        lambda x, n: x.narrow(
            1, max(QUERIES) - max(QUERIES[n], 1), max(2 * QUERIES[n] - 1, 0)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TOKENS)
def test_terms_with_an_entry_for_each_token(name):
    shape, make, part = OF_TOKENS[name]
    torch.manual_seed(0)
    inputs = {
        "q": torch.randn(TOTAL, H, 8, dtype=torch.float64),
        "k": torch.randn(TOTAL, H, 8, dtype=torch.float64),
        "v": torch.randn(TOTAL, H, 5, dtype=torch.float64),
        "x": torch.randn(shape, dtype=torch.float64),
    }

    def ours(p):
        return gnomon.varlen_attention(
            p["q"], p["k"], p["v"], ENDS, causal=True, position=make(p["x"]), return_lse=True
        )

    def theirs(p):
        tokens = p["q"], p["k"], p["v"]
        return looped(
            *tokens, QUERIES, QUERIES,
            lambda n: {"causal": True, "position": make(part(p["x"], n))} if QUERIES[n] else {},
        )  # fmt: skip

    same(ours, theirs, inputs)


def test_sinks_and_temperatures_of_each_token():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, TOTAL, H, 8, dtype=torch.float64).unbind()
    sink, temperature = torch.rand(2, 1, H, TOTAL, dtype=torch.float64).unbind()
    ours = gnomon.varlen_attention(q, k, v, ENDS, sink=sink, temperature=temperature)
    theirs, _ = looped(
        q, k, v, QUERIES, QUERIES,
        lambda n: {
            "sink": of_sequence(sink, 2, n), "temperature": of_sequence(temperature, 2, n),
        },
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs)


def test_dropout_is_of_all_tokens_and_repeats():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, TOTAL, H, 8).unbind()

    def dropped(seed):
        return gnomon.varlen_attention(q, k, v, ENDS, dropout=0.5, seed=seed)

    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))
    # Two sequences of the same tokens have different dropout masks.
    twice = gnomon.varlen_attention(
        *(x[:5].repeat(2, 1, 1) for x in (q, k, v)), [0, 5, 10], dropout=0.5, seed=1
    )
    assert not torch.equal(twice[:5], twice[5:])


def test_no_sequence_and_no_token():
    x = torch.randn(0, H, 8)
    for ends in ([0], [0, 0, 0]):
        o, lse = gnomon.varlen_attention(x, x, x, ends, return_lse=True)
        assert (o.shape, lse.shape) == ((0, H, 8), (H, 0))


@pytest.mark.real_device
def test_compiled_in_one_graph():
    torch.manual_seed(0)
    q = torch.randn(TOTAL, H, 8, requires_grad=True)
    k = torch.randn(sum(KEYS), H, 8, requires_grad=True)
    ends, ends_k = (torch.tensor(ends_of(lengths)) for lengths in (QUERIES, KEYS))

    def step(q, k, ends, ends_k):
        return gnomon.varlen_attention(q, k, k, ends, ends_k, causal=True, position="alibi")

    ours = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, ends, ends_k)
    expected = step(q, k, ends, ends_k)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(
        torch.autograd.grad(ours.square().sum(), (q, k)),
        torch.autograd.grad(expected.square().sum(), (q, k)),
    )


@pytest.mark.slow
@pytest.mark.cpu("measures a CPU process")
def test_nothing_is_padded():
    """One long sequence and many short ones: padding would take 500 times the memory."""
    before = (
        "q, k, v = (torch.randn(1000, 2, 16, requires_grad=True) for _ in range(3))\n"
        "ends = [0, 500, *range(501, 1001)]\n"
        "gnomon.varlen_attention(q[:4], k[:4], v[:4], [0, 3, 4], causal=True).sum().backward()"
    )
    step = "gnomon.varlen_attention(q, k, v, ends, causal=True).sum().backward()"
    assert peak_memory(before, step) < 20_000


WRONG = {
    "ends": ({"cu_seqlens_q": [0, 3, 9]}, ValueError, r"cu_seqlens_q is \[0, 3, 9\]; .* 0 to 8"),
    "falling ends": ({"cu_seqlens_q": [0, 5, 3, 8]}, ValueError, "non-decreasing offsets"),
    "ends of keys": ({"cu_seqlens_k": [1, 3, 8]}, ValueError, "cu_seqlens_k is"),
    "numbers of sequences": (
        {"cu_seqlens_k": [0, 8]},
        ValueError,
        "3 elements and cu_seqlens_k has 2",
    ),
    "floats": ({"cu_seqlens_q": torch.tensor([0.0, 8.0])}, ValueError, "integers"),
    "a padded batch": ({"q": torch.ones(1, 8, 2, 4)}, ValueError, r"expected three axes, \(total"),
    "max_seqlen_q": (
        {"max_seqlen_q": 5},
        TypeError,
        "unexpected argument max_seqlen_q; leave it out",
    ),
    "key_lengths": ({"key_lengths": [3, 5]}, TypeError, "unexpected argument key_lengths"),
    "causl": ({"causl": True}, TypeError, "did you mean causal?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    given, error, message = WRONG[name]
    x = torch.ones(8, 2, 4)
    arguments = {"q": x, "k": x, "v": x, "cu_seqlens_q": [0, 3, 8]} | given
    with pytest.raises(error, match=message):
        gnomon.varlen_attention(**arguments)


def nest(x, ends):
    return nested_tensor_from_jagged(x, ends).transpose(1, 2)


@pytest.mark.parametrize("of_keys", [QUERIES, KEYS])
def test_nested_tensors(of_keys, way):
    torch.manual_seed(0)
    ends = torch.tensor(ends_of(QUERIES))
    ends_k = ends if of_keys is QUERIES else torch.tensor(ends_of(of_keys))
    leaves = [
        torch.randn(total, heads, 8, dtype=torch.float64, requires_grad=True)
        for total, heads in ((TOTAL, H), (sum(of_keys), 2), (sum(of_keys), 2))
    ]
    q, k, v = leaves
    arguments = {"causal": True, "position": "alibi", "similarity": "gaussian:gamma=0.5"}
    o, lse = gnomon.attention(
        nest(q, ends), nest(k, ends_k), nest(v, ends_k), return_lse=True, **arguments
    )
    expected, expected_lse = gnomon.varlen_attention(
        q, k, v, ends, ends_k, return_lse=True, **arguments
    )
    assert o.is_nested
    assert o.shape[:2] == (len(QUERIES), H)
    assert torch.equal(o.transpose(1, 2).values(), expected)
    assert torch.equal(lse.transpose(1, 2).values(), expected_lse.T)
    # The output has the ragged length of q, so that both can be added.
    (o + nest(q, ends)).transpose(1, 2).values().square().sum().backward()
    gradients = torch.autograd.grad((expected + q).square().sum(), leaves)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_nested_tensors_in_scaled_dot_product_attention():
    torch.manual_seed(0)
    ends = torch.tensor(ENDS)
    q, k, v = torch.randn(3, TOTAL, H, 8).unbind()
    nested = [nest(x, ends) for x in (q, k, v)]
    ours = gnomon.scaled_dot_product_attention(*nested, is_causal=True)
    expected = gnomon.varlen_attention(q, k, v, ENDS, causal=True)
    torch.testing.assert_close(ours.transpose(1, 2).values(), expected)
    with pytest.raises(ValueError, match="attn_mask is not supported with nested tensors"):
        gnomon.scaled_dot_product_attention(*nested, torch.ones(1, 1) > 0)


@pytest.mark.real_device
def test_nested_tensors_compiled():
    ends = torch.tensor(ENDS)
    x = nest(torch.randn(TOTAL, H, 8), ends)

    def step(x):
        return gnomon.attention(x, x, x, causal=True, position="alibi")

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(x).transpose(1, 2).values(), step(x).transpose(1, 2).values()
    )


def test_nested_tensors_that_are_refused():
    ends = torch.tensor(ENDS)
    plain = torch.randn(TOTAL, H, 8)
    x = nest(plain, ends)
    with pytest.raises(
        NotImplementedError, match=("mask is not supported with nested tensors; supported")
    ):
        gnomon.attention(x, x, x, mask=torch.ones(1, 1) > 0)
    with pytest.raises(TypeError, match="v is not nested, but other inputs are"):
        gnomon.attention(x, x, plain)
    with pytest.raises(ValueError, match=r"expected \(batch, heads, length, head_dim\)"):
        gnomon.attention(*[x.transpose(1, 2)] * 3)
    gaps = torch.nested.narrow(
        torch.randn(2, 9, H, 8), 1, torch.tensor([0, 1]), torch.tensor([3, 4]), layout=torch.jagged
    )
    with pytest.raises(NotImplementedError, match="gaps between its sequences"):
        gnomon.attention(*[gaps.transpose(1, 2)] * 3)


@pytest.mark.parametrize(
    "options",
    [
        {"similarity": "penumbral", "position": "rope+alibi:slopes=learned"},
        {"position": "t5", "kv_heads": 2, "gate": True, "sink": True, "qk_norm": True},
        {"position": "relative:max_offset=3:values=true"},
        {"position": "forget"},
    ],
    ids=str,
)
def test_modules_of_nested_tensors(options):
    torch.manual_seed(0)
    module = gnomon.nn.MultiheadAttention(16, H, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(TOTAL, 16, dtype=torch.float64, requires_grad=True)
    ours = module(nested_tensor_from_jagged(x, torch.tensor(ENDS)), causal=True)
    assert ours.is_nested
    expected = torch.cat(
        [module(part.unsqueeze(0), causal=True)[0] for part in x.split(QUERIES) if len(part)]
    )
    torch.testing.assert_close(ours.values(), expected)
    leaves = [x, *module.parameters()]
    for own, of_loop in zip(
        torch.autograd.grad(ours.values().square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(own, of_loop)


def test_modules_of_nested_keys_of_other_lengths():
    torch.manual_seed(0)
    module = gnomon.nn.MultiheadAttention(16, H, position="alibi").double()
    x, y = (torch.randn(sum(n), 16, dtype=torch.float64) for n in (QUERIES, KEYS))
    nested = [
        nested_tensor_from_jagged(tokens, torch.tensor(ends_of(lengths)))
        for tokens, lengths in ((x, QUERIES), (y, KEYS))
    ]
    ours = module(*nested).values()
    parts = zip(x.split(QUERIES), y.split(KEYS), strict=True)
    expected = [
        module(q.unsqueeze(0), k.unsqueeze(0), query_offset=len(k) - len(q))[0] for q, k in parts
    ]
    torch.testing.assert_close(ours, torch.cat(expected))
    with pytest.raises(
        NotImplementedError, match="key_padding_mask is not supported with nested tensors"
    ):
        module(nested[0], key_padding_mask=torch.zeros(8, 7) > 0)
    with pytest.raises(TypeError, match="key is not nested, but other inputs are"):
        module(nested[0], y.unsqueeze(0))


@pytest.mark.parametrize("length", [40, 200])
def test_short_sequences_form_one_call(length):
    """Short sequences use a single call, because separate calls would be mostly overhead."""
    lengths = [length, 0, 130, length + 7]
    q, k, v = (torch.randn(sum(lengths), H, 8, dtype=torch.float64) for _ in range(3))
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            _varlen, "attention", lambda *a, **b: calls.append(a) or gnomon.attention(*a, **b)
        )
        found = gnomon.varlen_attention(q, k, v, ends_of(lengths), causal=True, return_lse=True)
    expected = looped(q, k, v, lengths, lengths, lambda _: {"causal": True})
    assert len(calls) == (1 if length == 40 else 4)
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-12, rtol=1e-12)


def test_positions_are_left_out_only_if_offsets_suffice():
    table, grid = torch.zeros(4), {"shape": (2, 3)}
    by_offset = [
        position.ALiBi(table), position.HyPE(table, 1.0), position.Kerple(table, 2.0, kind="power"),
        position.RoPE(), position.RoPE(base=3.0, layout="half", dims=4), position.Sandwich(0.5),
        position.T5(torch.zeros(8, 4), bidirectional=True),
    ]  # fmt: skip
    others = [
        position.Grid((2, 3), [position.ALiBi(table)] * 2), position.RoPE(xpos=True),
        position.RoPE(scaling="linear:factor=2"), position.RoPE(**grid),
        position.RoPE(sections=(2, 2)), position.RoPE(angles=torch.zeros(3, 4)),
        position.OffsetBias(torch.zeros(4, 9)), position.KeyBias(torch.zeros(1, 4, 3)),
    ]  # fmt: skip
    assert {type(term).__name__.lower() for term in by_offset} == set(_varlen._BY_OFFSET)
    assert all(_varlen._depend_on_offsets([term]) for term in by_offset)
    assert not any(_varlen._depend_on_offsets([by_offset[0], term]) for term in others)


def test_every_argument_of_attention_is_known_to_depend_on_lengths_or_not():
    own = set(_varlen.VarlenArguments.__optional_keys__)
    of_lengths = {
        "key_lengths", "key_positions", "key_segments", "key_starts", "mask", "page_table",
        "positions", "query_offset", "query_segments",
    }  # fmt: skip
    assert own | of_lengths == set(AttentionArguments.__optional_keys__)
    assert not own & of_lengths
