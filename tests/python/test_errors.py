"""Wrong arguments: the kind of error, and a message with the argument and what was expected."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gnomon
from gnomon import nn, position, similarity


def tokens(*shape, dtype=torch.float32, device=None):
    return torch.zeros(*shape, dtype=dtype, device=device)


def attend(q=None, k=None, v=None, **arguments):
    q = tokens(2, 4, 6, 8) if q is None else q
    k = tokens(2, 2, 6, 8) if k is None else k
    v = tokens(2, 2, 6, 5) if v is None else v
    return gnomon.attention(q, k, v, **arguments)


def on_cuda():
    with FakeTensorMode():
        x = torch.zeros(1, 1, 2, 2, device="cuda")
        gnomon.attention(x, x, x)


HEADS = torch.ones(4)
VALUE_ERRORS = {
    "a scale of infinity": (lambda: attend(scale=float("inf")), "scale is inf; expected a finite"),
    "a far offset": (lambda: attend(query_offset=2**62), r"query_offset is.*expected -2\^53"),
    "an offset beyond int64": (lambda: attend(query_offset=2**63), "query_offset is.*an int64"),
    "segments of queries alone": (
        lambda: attend(query_segments=torch.zeros(2, 6, dtype=torch.int64)),
        "key_segments is None; expected both",
    ),
    "segments of keys alone": (
        lambda: attend(key_segments=torch.zeros(2, 6, dtype=torch.int64)),
        "query_segments is None; expected both",
    ),
    "the shape of segments": (
        lambda: attend(
            query_segments=torch.zeros(2, 6, dtype=torch.int64),
            key_segments=torch.zeros(2, 5, dtype=torch.int64),
        ),
        r"key_segments has shape \[2, 5\]; expected \(B, length\) = \(2, 6\)",
    ),
    "a large segment": (
        lambda: attend(
            query_segments=torch.zeros(2, 6, dtype=torch.int64),
            key_segments=torch.full((2, 6), 2**40),
        ),
        "key_segments has numbers beyond int32",
    ),
    "offsets of another batch": (
        lambda: attend(query_offset=torch.zeros(3, dtype=torch.int64)),
        r"query_offset has shape \[3\]; expected \(B,\) = \(2,\)",
    ),
    "three axes": (lambda: attend(q=tokens(2, 6, 8)), r"q has shape \[2, 6, 8\].*four axes"),
    "no column": (lambda: attend(q=tokens(2, 4, 6, 0)), "q has shape.*at least one column"),
    "columns of k": (lambda: attend(k=tokens(2, 2, 6, 7)), r"k has shape \[2, 2, 6, 7\].*D = 8"),
    "batch of k": (lambda: attend(k=tokens(1, 2, 6, 8)), r"k has shape.*B = 2"),
    "length of v": (lambda: attend(v=tokens(2, 2, 5, 5)), r"v has shape.*as in k \[2, 2, 6, 8\]"),
    "heads": (
        lambda: attend(q=tokens(2, 3, 6, 8)),
        "q has 3 heads and k 2; expected a multiple",
    ),
    "gamma": (
        lambda: attend(similarity=similarity.Laplacian(torch.ones(2))),
        r"gamma of laplacian has shape \[2\]; expected \(H,\) = \(4,\)",
    ),
    "scale": (
        lambda: attend(similarity=similarity.Gaussian(1.0), scale=0.5),
        "scale goes with dot, not with gaussian",
    ),
    "scale of additive": (
        lambda: attend(*[tokens(2, 2, 6, 1)] * 2, similarity=similarity.Additive(), scale=0.5),
        "scale goes with dot, not with additive",
    ),
    "columns of additive": (
        lambda: attend(similarity=similarity.Additive()),
        "q has D = 8; additive has 1",
    ),
    "beta": (
        lambda: attend(similarity=similarity.Hyperbolic(torch.ones(3))),
        r"beta of hyperbolic has shape \[3\]; expected \(H,\) = \(4,\)",
    ),
    "a model": (
        lambda: attend(similarity=similarity.Hyperbolic(1.0, "torus")),
        "hyperbolic:model=torus; expected one of hyperboloid, half_space, ball, klein",
    ),
    "a map of another model": (
        lambda: attend(similarity=similarity.Hyperbolic(1.0, "ball", "psi")),
        "hyperbolic:map=psi; expected one of exp, none",
    ),
    "a hyperboloid in one dimension": (
        lambda: attend(*[tokens(2, 2, 6, 1)] * 2, similarity=similarity.Hyperbolic(1.0)),
        "q has D = 1; hyperbolic needs two columns",
    ),
    "K": (
        lambda: attend(similarity=similarity.Entailment(1.0, K=0.0)),
        "entailment:K=0; expected a positive number",
    ),
    "map of entailment": (
        lambda: attend(similarity=similarity.Entailment(1.0, map="exp")),
        "entailment:map=exp; expected one of ball, none",
    ),
    "a cone's name": (
        lambda: gnomon.cones.ancestor(HEADS, HEADS, cone="antumbral"),
        'cones.ancestor: cone is "antumbral"; expected one of penumbral, umbral',
    ),
    "a cone's radius": (
        lambda: gnomon.cones.lowest_common_ancestor(HEADS, HEADS, r=-1.0),
        "cones.lowest_common_ancestor: r is -1; expected a positive number",
    ),
    "points of a cone": (
        lambda: gnomon.cones.ancestor(HEADS, HEADS[:3]),
        r"u has shape \[4\] and v \[3\]; expected \(..., D\) each with D >= 2",
    ),
    "a cone in one dimension": (
        lambda: attend(
            q=tokens(1, 1, 2, 1),
            k=tokens(1, 1, 2, 1),
            v=tokens(1, 1, 2, 1),
            similarity=similarity.Umbral(1.0),
        ),
        "q has D = 1; umbral needs two columns",
    ),
    "map": (
        lambda: attend(similarity=similarity.Umbral(1.0, map="xi")),
        "umbral:map=xi; expected one of psi, exp, none",
    ),
    "score": (
        lambda: attend(similarity=similarity.Penumbral(1.0, score="depth")),
        "penumbral:score=depth; expected one of height, height2, log",
    ),
    "r": (
        lambda: attend(similarity=similarity.Penumbral(1.0, r=-1.0)),
        "penumbral:r=-1; expected a positive number",
    ),
    "an option in a word": (
        lambda: attend(similarity=similarity.Umbral(1.0, map="psi:r=3")),
        "umbral has map = 'psi:r=3'",
    ),
    "slopes": (
        lambda: attend(position=position.ALiBi(torch.ones(3))),
        r"slopes of alibi has shape \[3\]; expected \(H,\) = \(4,\)",
    ),
    "mode": (
        lambda: attend(position=position.HyPE(1.0, 0.1, mode="even")),
        "hype:mode=even; expected one of odd, abs, cosh",
    ),
    "kind": (
        lambda: attend(position=position.Kerple(HEADS, HEADS, kind="exp")),
        "kerple:kind=exp; expected one of log, power",
    ),
    "heads of T5": (
        lambda: attend(position=position.T5(torch.ones(32, 3), True)),
        r"table of T5 has shape \[32, 3\]; expected \(buckets, H\) with H = 4",
    ),
    "max_distance": (
        lambda: attend(position=position.T5(torch.ones(32, 4), False, max_distance=16)),
        "max_distance is 16; expected more than 16",
    ),
    "entries of OffsetBias": (
        lambda: attend(position=position.OffsetBias(torch.ones(4, 12))),
        r"table of OffsetBias has shape \[4, 12\]; expected \(H, Lq \+ Lk - 1\) = \(4, 11\)",
    ),
    "two RoPE": (lambda: attend(position=[position.RoPE()] * 2), "position has two RoPE"),
    "odd dims": (lambda: attend(position=position.RoPE(dims=3)), "RoPE has dims = 3"),
    "too many dims": (lambda: attend(position=position.RoPE(dims=10)), "dims = 10.*at most 8"),
    "dims and the height": (
        lambda: attend(position=position.RoPE(dims=8), similarity=similarity.Umbral(1.0)),
        r"dims = 8.*at most 7 \(the last coordinate is a height\)",
    ),
    "odd head": (
        lambda: attend(*[tokens(1, 1, 2, 3)] * 3, position=position.RoPE()),
        "q has 3 columns; expected an even number",
    ),
    "base": (lambda: attend(position=position.RoPE(base=0.0)), "base = 0; expected a positive"),
    "layout": (
        lambda: attend(position=position.RoPE(layout="split")),
        "rope:layout=split; expected one of interleaved, half",
    ),
    "left": (lambda: attend(window=(-1, 0)), "window has left = -1; expected at least 0, or None"),
    "right": (lambda: attend(window=(None, -2)), "window has right = -2"),
    "one number for a window": (lambda: attend(window=3), r"window is 3; expected \(left, right\)"),
    "shape of key_lengths": (
        lambda: attend(key_lengths=torch.tensor([1, 2, 3])),
        r"key_lengths has shape \[3\]; expected \(B,\) = \(2,\)",
    ),
    "too long": (
        lambda: attend(key_lengths=torch.tensor([6, 7])),
        r"key_lengths\[1\] is 7; expected 0 to Lk = 6",
    ),
    "negative start": (
        lambda: attend(key_starts=torch.tensor([-1, 0])),
        r"key_starts\[0\] is -1; expected 0 to Lk = 6",
    ),
    **{
        f"query_offset with {name}": (
            lambda arguments=arguments: attend(q=tokens(2, 4, 5, 8), **arguments),
            f"query_offset is None, Lq = 5 and Lk = 6; {name} needs query_offset",
        )
        for name, arguments in {
            "causal": {"causal": True},
            "a window": {"window": (3, None)},
            "a position": {"position": position.RoPE()},
        }.items()
    },
    "dim": (lambda: gnomon.sinusoid(torch.arange(3), 5), "dim is 5; expected a positive even"),
    "sinusoid's layout": (
        lambda: gnomon.sinusoid(torch.arange(3), 4, layout="half"),
        'layout is "half"; expected one of interleaved, split, split_xl',
    ),
    "buckets": (
        lambda: gnomon.t5_bucket(torch.arange(3), True, 3),
        "num_buckets is 3; expected at least 4",
    ),
    "slopes of no head": (lambda: gnomon.alibi_slopes(0), "num_heads is 0; expected at least 1"),
    "copies": (
        lambda: gnomon.hype_augment(tokens(1, 1, 2, 2), tokens(1, 1, 2, 2), 1.0, 0.1, copies=0),
        "copies is 0; expected at least 1",
    ),
    "heads of tau": (
        lambda: gnomon.hype_augment(tokens(1, 1, 2, 2), tokens(1, 1, 2, 2), HEADS, 0.1),
        r"tau has shape \[4\]; expected a number or \(H,\) = \(1,\)",
    ),
    "embed_dim": (
        lambda: nn.MultiheadAttention(10, 3),
        "embed_dim is 10 and num_heads 3; expected a positive multiple",
    ),
    "kv_heads": (lambda: nn.MultiheadAttention(8, 4, kv_heads=3), "kv_heads is 3; .*divisor"),
    "qk_dim": (lambda: nn.MultiheadAttention(8, 4, qk_dim=0), "qk_dim is 0; expected at least 1"),
    "a cone's qk_dim": (
        lambda: nn.MultiheadAttention(8, 4, qk_dim=1, similarity="penumbral"),
        "qk_dim is 1; penumbral needs two",
    ),
    "qk_dim of additive": (
        lambda: nn.MultiheadAttention(8, 4, qk_dim=2, similarity="additive"),
        "qk_dim is 2; additive has 1",
    ),
    "embeddings": (
        lambda: nn.MultiheadAttention(8, 4)(torch.zeros(2, 3, 7)),
        r"query has shape \(2, 3, 7\); expected \(B, L, 8\)",
    ),
    "a table's end": (
        lambda: nn.LearnedAbsolute(8, 4)(torch.zeros(2, 5, 4), offset=4),
        "positions 4 to 8; the table has 8 rows",
    ),
    "an unknown position": (
        lambda: nn.MultiheadAttention(8, 4, position="rop"),
        'unknown position "rop"; nearest: rope.*; known: none, sinusoidal, learned, conv, cape',
    ),
    "an unknown similarity": (
        lambda: nn.MultiheadAttention(8, 4, similarity="umbrall"),
        'unknown similarity "umbrall"; nearest: umbral.*; known: dot, laplacian',
    ),
    "nothing near": (
        lambda: nn.TokenPosition("xyzzy", 8, 16),
        'unknown position "xyzzy"; known: none',
    ),
    "an unknown option": (
        lambda: nn.MultiheadAttention(8, 4, position="hype:mu=0.1:nu=3"),
        'hype has no option "nu"; it has tau, mu, mode',
    ),
    "an option of an optionless": (
        lambda: nn.MultiheadAttention(8, 4, position="none:mu=1"),
        'none has no option "mu"; it has none',
    ),
    "a word for a number": (
        lambda: nn.MultiheadAttention(8, 4, position="hype:mu=small"),
        "hype:mu=small; expected learned, fixed or a number",
    ),
    "mu of zero": (
        lambda: nn.MultiheadAttention(8, 4, position="hype:mu=0"),
        "hype:mu=0; expected a positive number",
    ),
    "an option twice": (
        lambda: nn.MultiheadAttention(8, 4, position="hype:mu=0.1:mu=0.2"),
        "gives mu twice",
    ),
    "an empty option": (
        lambda: nn.MultiheadAttention(8, 4, position="hype::mu=0.1"),
        "has an empty option",
    ),
    "a table in a module": (
        lambda: nn.MultiheadAttention(8, 4, position="offset_bias"),
        r"offset_bias is an argument of attention\(\) only",
    ),
}


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_value_errors(name):
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()


TYPE_ERRORS = {
    "a slope": (
        lambda: attend(*[tokens(2, 2, 6, 1)] * 2, similarity=similarity.Additive("steep")),
        "slope of additive is a str; expected a number",
    ),
    "integers": (lambda: attend(q=tokens(2, 4, 6, 8, dtype=torch.int64)), "q has dtype Long"),
    "two dtypes": (
        lambda: attend(k=tokens(2, 2, 6, 8, dtype=torch.float64)),
        "k has dtype Double and q Float; expected the same",
    ),
    "segments that are no integers": (
        lambda: attend(query_segments=torch.zeros(2, 6), key_segments=torch.zeros(2, 6)),
        "query_segments has dtype Float; expected integers",
    ),
    "segments in a list": (
        lambda: attend(query_segments=[0] * 6, key_segments=torch.zeros(2, 6)),
        "query_segments is a list; expected a Tensor",
    ),
    "offsets that are no integers": (
        lambda: attend(query_offset=torch.zeros(2)),
        "query_offset has dtype Float; expected integers",
    ),
    "gamma's dtype": (
        lambda: attend(similarity=similarity.Gaussian(HEADS.double())),
        "gamma of gaussian has dtype Double and q Float; expected Float",
    ),
    "a table's dtype": (
        lambda: attend(position=position.OffsetBias(torch.ones(4, 11).double())),
        "table of offset_bias has dtype Double",
    ),
    "two devices": (
        lambda: attend(v=tokens(2, 2, 6, 5, device="meta")),
        "v is on meta and q on cpu; expected the same",
    ),
    "floating-point lengths": (
        lambda: attend(key_lengths=torch.ones(2)),
        "key_lengths has dtype Float; expected integers",
    ),
    "lengths that are no tensor": (lambda: attend(key_lengths=[6, 3]), "key_lengths is a list"),
    "an offset between rows": (lambda: attend(query_offset=1.5), "query_offset is a float"),
    "a window between columns": (lambda: attend(window=(1.5, 2)), "left is a float; expected"),
    "a worded scale": (lambda: attend(scale="1"), "scale is a str; expected a number"),
    "a worded flag": (lambda: attend(causal="yes"), "causal is a str; expected True or False"),
    "an array": (lambda: attend(k=tokens(2, 2, 6, 8).numpy()), "k is a ndarray; expected a Tensor"),
    "a radius with a gradient": (
        lambda: attend(similarity=similarity.Penumbral(1.0, r=torch.ones((), requires_grad=True))),
        "r of penumbral is a Tensor; expected a number",
    ),
    "a similarity's name": (
        lambda: attend(similarity="umbral"),
        "similarity is a str; expected one of gnomon.similarity",
    ),
    "a position's name": (lambda: attend(position="rope"), "position is a str; expected one of"),
    "a number for a table": (lambda: position.T5(1.0, True), "T5: table is a float; expected"),
    "cones of integers": (
        lambda: gnomon.cones.ancestor(HEADS.long(), HEADS.long()),
        "cones.ancestor: u has dtype Long and v Long; expected the same floating-point type",
    ),
    "a list for a point": (
        lambda: gnomon.cones.lowest_common_ancestor(HEADS, [0.0, 1.0]),
        "cones.lowest_common_ancestor: v is a list; expected a Tensor",
    ),
    "beta's dtype": (
        lambda: attend(similarity=similarity.Hyperbolic(HEADS.double())),
        "beta of hyperbolic has dtype Double",
    ),
    "floating-point distances": (
        lambda: gnomon.t5_bucket(torch.ones(3), True),
        "relative_position has dtype Float; expected integers",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_type_errors(name):
    call, message = TYPE_ERRORS[name]
    with pytest.raises(TypeError, match=message):
        call()


LATER = {
    "cuda": on_cuda,
}


@pytest.mark.parametrize("name", LATER)
def test_what_comes_later_says_so(name):
    with pytest.raises(NotImplementedError, match=name.replace(".", r"\.")):
        LATER[name]()


def test_none_window_needs_no_offset():
    assert attend(q=tokens(2, 4, 5, 8), window=(None, None)).shape == (2, 4, 5, 5)
