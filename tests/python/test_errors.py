"""Invalid arguments raise exceptions that name the argument and the expected value."""

import warnings

import numpy as np
import pytest
import torch

import gnomon
from gnomon import nn, position, similarity
from gnomon.lab.models import LanguageModel

pytestmark = pytest.mark.cpu("errors are the same on all devices")


def tokens(*shape, dtype=torch.float32, device=None):
    return torch.zeros(*shape, dtype=dtype, device=device)


def attend(q=None, k=None, v=None, **arguments):
    q = tokens(2, 4, 6, 8) if q is None else q
    k = tokens(2, 2, 6, 8) if k is None else k
    v = tokens(2, 2, 6, 5) if v is None else v
    return gnomon.attention(q, k, v, **arguments)


def graph(q=None, k=None, v=None, indptr=None, indices=None, **arguments):
    q, k, v = (tokens(3, 2, 4) if x is None else x for x in (q, k, v))
    indptr = torch.tensor([0, 1, 2, 3]) if indptr is None else indptr
    indices = torch.tensor([0, 1, 2]) if indices is None else indices
    return gnomon.graph_attention(q, k, v, indptr, indices, **arguments)


def linear(q=None, k=None, v=None, **arguments):
    q, k, v = (tokens(2, 4, 6, 8) if x is None else x for x in (q, k, v))
    return gnomon.linear_attention(q, k, v, **arguments)


def augment(q=None, k=None, tau=1.0, mu=0.1, **arguments):
    q, k = (tokens(2, 4, 6, 8) if x is None else x for x in (q, k))
    return gnomon.hype_augment(q, k, tau, mu, **arguments)


def module(query=None, key=None, value=None, **arguments):
    query = tokens(2, 3, 8) if query is None else query
    return nn.MultiheadAttention(8, 2)(query, key, value, **arguments)


def positioned(*arguments, **named):
    return nn.TokenPosition("conv:kernel=3:groups=2", 8, 16)(*arguments, **named)


X = tokens(2, 3, 8)
FLOAT8 = torch.float8_e4m3fn
HEADS = torch.ones(4)
VALUE_ERRORS = {
    "a radius that requires grad": (
        lambda: attend(similarity=similarity.Penumbral(1.0, r=torch.ones((), requires_grad=True))),
        "r of penumbral requires grad, but it cannot be trained; expected a number",
    ),
    "graph q with two axes": (lambda: graph(q=tokens(2, 4)), "q has shape.*three axes"),
    "length of indptr": (
        lambda: graph(indptr=torch.tensor([0, 3])),
        r"indptr has shape \[2\]; expected \(N \+ 1,\) = \(4,\)",
    ),
    "a node index out of range": (
        lambda: graph(indices=torch.tensor([0, 1, 3])),
        r"indices\[2\] is 3; expected a key index from 0 to 2",
    ),
    "linear attention k with three axes": (
        lambda: linear(k=tokens(4, 6, 8)),
        "k has shape.*four axes",
    ),
    "a feature": (lambda: linear(feature="gelu"), 'feature is "gelu"; expected elu, relu or favor'),
    "projection with a wrong shape": (
        lambda: linear(feature="favor", projection=tokens(3, 3)),
        r"projection has shape \[3, 3\]; expected \(features, D\) with D = 8",
    ),
    "hype_augment k with a wrong head_dim": (
        lambda: augment(k=tokens(2, 4, 6, 7)),
        r"hype_augment: k has shape \[2, 4, 6, 7\]; expected .* as in q \[2, 4, 6, 8\]",
    ),
    "hype_augment k with a wrong batch size": (
        lambda: augment(k=tokens(1, 4, 6, 8)),
        "k has shape.*as in q",
    ),
    "module value with a wrong length": (
        lambda: module(X, X, X[:, :2]),
        r"v has shape \[2, 2, 2, 4\]; expected \(B, Hkv, Lk, Dv\) as in k",
    ),
    "embeddings with two axes": (
        lambda: positioned(X[0]),
        r"TokenPosition: embeddings has shape \(3, 8\); expected \(B, L, 8\)",
    ),
    "an infinite scale": (lambda: attend(scale=float("inf")), "scale is inf; expected a finite"),
    "a scale beyond float32": (lambda: attend(scale=1e39), "scale is 1e\\+39; expected a finite"),
    "an offset beyond 2^53": (
        lambda: attend(query_offset=2**62),
        r"query_offset is.*expected a value from -2\^53",
    ),
    "an offset beyond int64": (lambda: attend(query_offset=2**63), "query_offset is.*int64 range"),
    "only query_segments": (
        lambda: attend(query_segments=torch.zeros(2, 6, dtype=torch.int64)),
        "key_segments is None; expected both",
    ),
    "only key_segments": (
        lambda: attend(key_segments=torch.zeros(2, 6, dtype=torch.int64)),
        "query_segments is None; expected both",
    ),
    "segments with a wrong shape": (
        lambda: attend(
            query_segments=torch.zeros(2, 6, dtype=torch.int64),
            key_segments=torch.zeros(2, 5, dtype=torch.int64),
        ),
        r"key_segments has shape \[2, 5\]; expected \(B, length\) = \(2, 6\)",
    ),
    "a segment number beyond int32": (
        lambda: attend(
            query_segments=torch.zeros(2, 6, dtype=torch.int64),
            key_segments=torch.full((2, 6), 2**40),
        ),
        "key_segments has values outside int32",
    ),
    "offsets with a wrong batch size": (
        lambda: attend(query_offset=torch.zeros(3, dtype=torch.int64)),
        r"query_offset has shape \[3\]; expected \(B,\) = \(2,\)",
    ),
    "q with three axes": (lambda: attend(q=tokens(2, 6, 8)), r"q has shape \[2, 6, 8\].*four axes"),
    "no columns": (lambda: attend(q=tokens(2, 4, 6, 0)), "q has shape.*expected head_dim >= 1"),
    "k with a wrong head_dim": (
        lambda: attend(k=tokens(2, 2, 6, 7)),
        r"k has shape \[2, 2, 6, 7\].*D = 8",
    ),
    "k with a wrong batch size": (lambda: attend(k=tokens(1, 2, 6, 8)), r"k has shape.*B = 2"),
    "v with a wrong length": (
        lambda: attend(v=tokens(2, 2, 5, 5)),
        r"v has shape.*as in k \[2, 2, 6, 8\]",
    ),
    "number of heads": (
        lambda: attend(q=tokens(2, 3, 6, 8)),
        "q has 3 heads and k has 2; expected the number of heads of q to be a multiple",
    ),
    "gamma": (
        lambda: attend(similarity=similarity.Laplacian(torch.ones(2))),
        r"gamma of laplacian has shape \[2\]; expected \(H,\) = \(4,\)",
    ),
    "scale": (
        lambda: attend(similarity=similarity.Gaussian(1.0), scale=0.5),
        "scale applies to similarities such as dot, not to gaussian",
    ),
    "scale of additive": (
        lambda: attend(*[tokens(2, 2, 6, 1)] * 2, similarity=similarity.Additive(), scale=0.5),
        "scale applies to similarities such as dot, not to additive",
    ),
    "additive with eight columns": (
        lambda: attend(similarity=similarity.Additive()),
        "head_dim of q is 8; additive needs 1",
    ),
    "beta": (
        lambda: attend(similarity=similarity.Hyperbolic(torch.ones(3))),
        r"beta of hyperbolic has shape \[3\]; expected \(H,\) = \(4,\)",
    ),
    "an unknown model": (
        lambda: attend(similarity=similarity.Hyperbolic(1.0, "torus")),
        "hyperbolic:model=torus is invalid; expected one of hyperboloid, half_space, ball, klein",
    ),
    "a map for a different model": (
        lambda: attend(similarity=similarity.Hyperbolic(1.0, "ball", "psi")),
        "hyperbolic:map=psi with model=ball is invalid; expected exp or none",
    ),
    "a one-dimensional hyperboloid": (
        lambda: attend(*[tokens(2, 2, 6, 1)] * 2, similarity=similarity.Hyperbolic(1.0)),
        "head_dim of q is 1; hyperbolic needs at least 2",
    ),
    "K": (
        lambda: attend(similarity=similarity.Entailment(1.0, K=0.0)),
        "entailment:K=0.0 is invalid; expected a positive number",
    ),
    "map of entailment": (
        lambda: attend(similarity=similarity.Entailment(1.0, map="exp")),
        "entailment:map=exp is invalid; expected one of ball, none",
    ),
    "a cone's name": (
        lambda: gnomon.cones.ancestor(HEADS, HEADS, cone="antumbral"),
        'cones.ancestor: cone is "antumbral"; expected penumbral or umbral',
    ),
    "a cone's radius": (
        lambda: gnomon.cones.lowest_common_ancestor(HEADS, HEADS, r=-1.0),
        "cones.lowest_common_ancestor: r is -1; expected a positive number",
    ),
    "points that do not broadcast": (
        lambda: gnomon.cones.ancestor(torch.ones(3, 2), torch.ones(4, 2)),
        r"cones.ancestor: u has shape \[3, 2\] and v has shape \[4, 2\]; "
        "expected shapes that broadcast",
    ),
    "cone points without a height": (
        lambda: gnomon.cones.ancestor(HEADS, HEADS[:3]),
        r"u has shape \[4\] and v has shape \[3\]; expected \(..., D\) with D >= 2 for both",
    ),
    "a one-dimensional cone": (
        lambda: attend(
            q=tokens(1, 1, 2, 1),
            k=tokens(1, 1, 2, 1),
            v=tokens(1, 1, 2, 1),
            similarity=similarity.Umbral(1.0),
        ),
        "head_dim of q is 1; umbral needs at least 2",
    ),
    "map": (
        lambda: attend(similarity=similarity.Umbral(1.0, map="xi")),
        "umbral:map=xi is invalid; expected one of psi, exp, none",
    ),
    "score": (
        lambda: attend(similarity=similarity.Penumbral(1.0, score="depth")),
        "penumbral:score=depth is invalid; expected one of height, height2, log",
    ),
    "r": (
        lambda: attend(similarity=similarity.Penumbral(1.0, r=-1.0)),
        "penumbral:r=-1.0 is invalid; expected a positive number",
    ),
    "an option within a string": (
        lambda: attend(similarity=similarity.Umbral(1.0, map="psi:r=3")),
        "umbral has map = 'psi:r=3'",
    ),
    "slopes": (
        lambda: attend(position=position.ALiBi(torch.ones(3))),
        r"slopes of alibi has shape \[3\]; expected \(H,\) = \(4,\)",
    ),
    "mode": (
        lambda: attend(position=position.HyPE(1.0, 0.1, mode="even")),
        "hype:mode=even is invalid; expected one of abs, odd, cosh",
    ),
    "kind": (
        lambda: attend(position=position.Kerple(HEADS, HEADS, kind="exp")),
        "kerple:kind=exp is invalid; expected one of log, power",
    ),
    "heads of T5": (
        lambda: attend(position=position.T5(torch.ones(32, 3), True)),
        r"table of T5 has shape \[32, 3\]; expected \(buckets, H\) with H = 4",
    ),
    "max_distance": (
        lambda: attend(position=position.T5(torch.ones(32, 4), False, max_distance=16)),
        "max_distance is 16; expected more than 16",
    ),
    "number of entries of OffsetBias": (
        lambda: attend(position=position.OffsetBias(torch.ones(4, 12))),
        r"table of OffsetBias has shape \[4, 12\]; expected \(H, Lq \+ Lk - 1\) = \(4, 11\)",
    ),
    "two RoPE terms": (
        lambda: attend(position=[position.RoPE()] * 2),
        "position contains two rotations",
    ),
    "odd dims": (lambda: attend(position=position.RoPE(dims=3)), "RoPE has dims = 3"),
    "too many dims": (lambda: attend(position=position.RoPE(dims=10)), "dims = 10.*at most 8"),
    "dims that include the height": (
        lambda: attend(position=position.RoPE(dims=8), similarity=similarity.Umbral(1.0)),
        r"dims = 8.*at most 7 \(the last coordinate is a height\)",
    ),
    "odd head_dim": (
        lambda: attend(*[tokens(1, 1, 2, 3)] * 3, position=position.RoPE()),
        "q has head_dim 3; expected an even number",
    ),
    "base": (
        lambda: attend(position=position.RoPE(base=0.0)),
        "rope:base=0.0 is invalid; expected a positive",
    ),
    "layout": (
        lambda: attend(position=position.RoPE(layout="split")),
        "rope:layout=split is invalid; expected one of interleaved, half",
    ),
    "negative left window": (
        lambda: attend(window=(-1, 0)),
        "left of window is -1; expected at least 0, or None",
    ),
    "negative right window": (lambda: attend(window=(None, -2)), "right of window is -2"),
    "a window of three numbers": (
        lambda: attend(window=(1, 2, 3)),
        r"window is \(1, 2, 3\); expected \(left, right\)",
    ),
    "shape of key_lengths": (
        lambda: attend(key_lengths=torch.tensor([1, 2, 3])),
        r"key_lengths has shape \[3\]; expected \(B,\) = \(2,\)",
    ),
    "too large key_lengths": (
        lambda: attend(key_lengths=torch.tensor([6, 7])),
        r"key_lengths\[1\] is 7; expected a value from 0 to Lk = 6",
    ),
    "negative key_starts": (
        lambda: attend(key_starts=torch.tensor([-1, 0])),
        r"key_starts\[0\] is -1; expected a value from 0 to Lk = 6",
    ),
    **{
        f"query_offset with {name}": (
            lambda arguments=arguments: attend(q=tokens(2, 4, 5, 8), **arguments),
            f"query_offset is None, but Lq = 5 and Lk = 6 differ; {name} requires query_offset",
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
    "alibi_slopes without heads": (
        lambda: gnomon.alibi_slopes(0),
        "num_heads is 0; expected at least 1",
    ),
    "copies": (
        lambda: gnomon.hype_augment(tokens(1, 1, 2, 2), tokens(1, 1, 2, 2), 1.0, 0.1, copies=0),
        "copies is 0; expected at least 1",
    ),
    "heads of tau": (
        lambda: gnomon.hype_augment(tokens(1, 1, 2, 2), tokens(1, 1, 2, 2), HEADS, 0.1),
        r"tau has shape \[4\]; expected \(\) or \(H,\) = \(1,\)",
    ),
    "embed_dim": (
        lambda: nn.MultiheadAttention(10, 3),
        "embed_dim is 10 and num_heads is 3; embed_dim must be a positive multiple",
    ),
    "kv_heads": (lambda: nn.MultiheadAttention(8, 4, kv_heads=3), "kv_heads is 3; .*divisor"),
    "qk_dim": (lambda: nn.MultiheadAttention(8, 4, qk_dim=0), "qk_dim is 0; expected at least 1"),
    "qk_dim of a cone": (
        lambda: nn.MultiheadAttention(8, 4, qk_dim=1, similarity="penumbral"),
        "qk_dim is 1; penumbral needs at least 2",
    ),
    "qk_dim of additive": (
        lambda: nn.MultiheadAttention(8, 4, qk_dim=2, similarity="additive"),
        "qk_dim is 2; additive needs 1",
    ),
    "query of a module": (
        lambda: nn.MultiheadAttention(8, 4)(torch.zeros(2, 3, 7)),
        r"query has shape \(2, 3, 7\); expected \(B, L, 8\)",
    ),
    "a position beyond a table": (
        lambda: nn.LearnedAbsolute(8, 4)(torch.zeros(2, 5, 4), offset=4),
        "positions range from 4 to 8; expected 0 to 7, because the table has 8 rows",
    ),
    "an unknown position": (
        lambda: nn.MultiheadAttention(8, 4, position="rop"),
        'unknown position "rop"; did you mean rope.*\\? Known: (.+, )?rope, (.+, )?alibi,',
    ),
    "an unknown similarity": (
        lambda: nn.MultiheadAttention(8, 4, similarity="umbrall"),
        'unknown similarity "umbrall"; did you mean umbral\\? Known: (.+, )?dot, (.+, )?umbral;',
    ),
    "a missing term of a sum": (
        lambda: nn.MultiheadAttention(8, 4, position="rope+"),
        "a position contains a term without a name; `gnomon list` prints the valid names",
    ),
    "an empty similarity": (
        lambda: nn.MultiheadAttention(8, 4, similarity=""),
        "a similarity contains a term without a name",
    ),
    "a name unlike any other": (
        lambda: nn.TokenPosition("xyzzy", 8, 16),
        'unknown position "xyzzy"; known: none',
    ),
    "an unknown option": (
        lambda: nn.MultiheadAttention(8, 4, position="hype:mu=0.1:nu=3"),
        'hype has no option "nu"; did you mean mu\\? It has tau, mu, mode',
    ),
    "a misspelt option": (
        lambda: gnomon.attention(*[torch.zeros(1, 4, 3, 4)] * 3, position="alibi:slope=0.5"),
        'alibi has no option "slope"; did you mean slopes\\? It has ',
    ),
    "an option unlike any other": (
        lambda: nn.MultiheadAttention(8, 4, position="hype:width=3"),
        'hype has no option "width"; it has tau, mu, mode',
    ),
    "a name with wrong capitals": (
        lambda: nn.MultiheadAttention(8, 4, position="ALiBi"),
        'unknown position "ALiBi"; did you mean alibi\\?',
    ),
    "a name with swapped letters": (
        lambda: nn.MultiheadAttention(8, 4, position="hyep"),
        'unknown position "hyep"; did you mean hype\\?',
    ),
    "the beginning of a name": (
        lambda: nn.TokenPosition("sinus", 8, 16),
        'unknown position "sinus"; did you mean sinusoidal',
    ),
    "an option of a term without options": (
        lambda: nn.MultiheadAttention(8, 4, position="none:mu=1"),
        'none has no option "mu"; it has none',
    ),
    "a string instead of a number": (
        lambda: nn.MultiheadAttention(8, 4, position="hype:mu=small"),
        "hype:mu=small is invalid; expected learned, fixed or a number",
    ),
    "mu of zero": (
        lambda: nn.MultiheadAttention(8, 4, position="hype:mu=0"),
        "hype:mu=0 is invalid; expected a positive number",
    ),
    "a repeated option": (
        lambda: nn.MultiheadAttention(8, 4, position="hype:mu=0.1:mu=0.2"),
        "sets mu twice",
    ),
    "an empty option": (
        lambda: nn.MultiheadAttention(8, 4, position="hype::mu=0.1"),
        "has an empty option",
    ),
    "a negative rate": (
        lambda: attend(position="kerple:r2=-1"),
        r"kerple:r2=-1 is invalid; expected learned, fixed or a number of at least 0",
    ),
    "a number beyond float32": (
        lambda: attend(position="alibi:slopes=-1e60"),
        r"alibi:slopes=-1e60 is invalid; expected learned, fixed or a number that float32 can",
    ),
    "a table of length 0": (
        lambda: nn.MultiheadAttention(8, 4, position="offset_bias:length=0"),
        "offset_bias:length=0 is invalid; expected an integer of at least 1",
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
    "integer tokens": (lambda: attend(q=tokens(2, 4, 6, 8, dtype=torch.int64)), "q has dtype Long"),
    "two dtypes": (
        lambda: attend(k=tokens(2, 2, 6, 8, dtype=torch.float64)),
        "k has dtype Double, but q has Float; expected the same dtype",
    ),
    "float segments": (
        lambda: attend(query_segments=torch.zeros(2, 6), key_segments=torch.zeros(2, 6)),
        "query_segments has dtype Float; expected integers",
    ),
    "string segments": (
        lambda: attend(query_segments=["a"] * 6, key_segments=torch.zeros(2, 6)),
        r"query_segments\[0\] is a str; expected an integer",
    ),
    "float tensor as query_offset": (
        lambda: attend(query_offset=torch.zeros(2)),
        "query_offset has dtype Float; expected integers",
    ),
    "dtype of gamma": (
        lambda: attend(similarity=similarity.Gaussian(HEADS.double())),
        "gamma of gaussian has dtype Double, but q has Float; expected Float",
    ),
    "dtype of a table": (
        lambda: attend(position=position.OffsetBias(torch.ones(4, 11).double())),
        "table of offset_bias has dtype Double",
    ),
    "two devices": (
        lambda: attend(v=tokens(2, 2, 6, 5, device="meta")),
        "v is on meta, but q is on cpu; expected the same device",
    ),
    "float key_lengths": (
        lambda: attend(key_lengths=torch.ones(2)),
        "key_lengths has dtype Float; expected integers",
    ),
    "a set as key_lengths": (
        lambda: attend(key_lengths={6, 3}),
        "key_lengths is a set; expected a Te",
    ),
    "float query_offset": (lambda: attend(query_offset=1.5), "query_offset is a float"),
    "float window": (lambda: attend(window=(1.5, 2)), "left is a float; expected"),
    "a string as scale": (lambda: attend(scale="1"), "scale is a str; expected a number"),
    "a string as flag": (lambda: attend(causal="yes"), "causal is a str; expected True or False"),
    "a NumPy array": (
        lambda: attend(k=tokens(2, 2, 6, 8).numpy()),
        "k is a ndarray; expected a Tensor",
    ),
    "a vector as radius": (
        lambda: attend(similarity=similarity.Penumbral(1.0, r=torch.ones(2))),
        "r of penumbral is a Tensor; expected a number",
    ),
    "a similarity class": (
        lambda: attend(similarity=similarity.Umbral),
        "similarity is the class Umbral; expected a gnomon.similarity object, or a string",
    ),
    "a position class": (
        lambda: attend(position=position.RoPE),
        "position is the class RoPE; expected a gnomon.position object, a string such as 'rope', "
        "or a list of these",
    ),
    "a number as table": (lambda: position.T5(1.0, True), "T5: table is a float; expected"),
    "integer cones": (
        lambda: gnomon.cones.ancestor(HEADS.long(), HEADS.long()),
        "cones.ancestor: u has dtype Long and v has Long; expected the same floating-point dtype",
    ),
    "a list as point": (
        lambda: gnomon.cones.lowest_common_ancestor(HEADS, [0.0, 1.0]),
        "cones.lowest_common_ancestor: v is a list; expected a Tensor",
    ),
    "dtype of beta": (
        lambda: attend(similarity=similarity.Hyperbolic(HEADS.double())),
        "beta of hyperbolic has dtype Double",
    ),
    "float distances": (
        lambda: gnomon.t5_bucket(torch.ones(3), True),
        "relative_position has dtype Float; expected integers",
    ),
}


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # this layout is deprecated
    NESTED = torch.nested.nested_tensor([tokens(4, 6, 8), tokens(4, 3, 8)])


def wrong_tokens(call, names, shape, operator):
    """Cases in which one of the tensors has an unsupported type, dtype, layout or device."""
    cases = {}
    for name in names:
        other = "k" if name == "q" else name  # tensors are compared with q, so k is reported
        for what, value, message in (
            ("a str", "x", rf"{name} is a str; expected a Tensor"),
            ("integers", tokens(*shape, dtype=torch.int64), rf"{name} has dtype Long"),
            ("booleans", tokens(*shape, dtype=torch.bool), rf"{name} has dtype Bool"),
            ("complex", tokens(*shape, dtype=torch.complex64), rf"{name} has dtype ComplexFloat"),
            ("float8", tokens(*shape).to(FLOAT8), rf"{name} has dtype Float8_e4m3fn"),
            ("half", tokens(*shape, dtype=torch.half), rf"{other} has dtype"),
            (
                "meta",
                tokens(*shape, device="meta"),
                rf"{other} is on .*, but q is on .*; expected the",
            ),
            (
                "sparse",
                tokens(*shape).to_sparse(),
                rf"{name} has layout sparse_coo; expected a strided",
            ),
            ("nested", NESTED, rf"{name} is a nested tensor with the strided layout"),
        ):
            cases[f"{operator}: {name} {what}"] = (
                lambda name=name, value=value: call(**{name: value}),
                rf"gnomon\.{operator}: {message}",
            )
    return cases


def wrong_parameters(call, operator, of):
    """Cases in which a per-head parameter has an integer dtype or is on a different device."""
    return {
        f"{operator}: {of} of integers": (
            lambda: call(HEADS.long()),
            rf"gnomon\.{operator}: {of} has dtype Long",
        ),
        f"{operator}: {of} elsewhere": (
            lambda: call(HEADS.to("meta")),
            rf"gnomon\.{operator}: {of} is on meta, but q is on cpu; expected the same device",
        ),
        f"{operator}: {of} is a word": (
            lambda: call("steep"),
            rf"gnomon\.{operator}: {of} is a str; expected a number",
        ),
    }


TYPE_ERRORS |= {
    **wrong_tokens(attend, "qkv", (2, 4, 6, 8), "attention"),
    **wrong_tokens(linear, "qkv", (2, 4, 6, 8), "linear_attention"),
    **wrong_tokens(graph, "qkv", (3, 2, 4), "graph_attention"),
    **wrong_tokens(augment, "qk", (2, 4, 6, 8), "hype_augment"),
    **wrong_parameters(
        lambda x: attend(similarity=similarity.Umbral(x)), "attention", "gamma of umbral"
    ),
    **wrong_parameters(
        lambda x: attend(position=position.ALiBi(x)), "attention", "slopes of alibi"
    ),
    **wrong_parameters(lambda x: attend(position=position.HyPE(1.0, x)), "attention", "mu of hype"),
    **wrong_parameters(lambda x: augment(tau=x), "hype_augment", "tau"),
    **wrong_parameters(lambda x: augment(mu=x), "hype_augment", "mu"),
    **{
        f"{name} on a different device": (
            lambda name=name: attend(**{name: torch.zeros(2, dtype=torch.int64, device="meta")}),
            f"gnomon.attention: {name} is on meta, but q is on cpu; expected the same device",
        )
        for name in ("key_lengths", "key_starts", "query_offset")
    },
    "a list as slopes": (
        lambda: attend(position=position.ALiBi([1.0] * 4)),
        r"slopes of alibi is a list; expected a number or a tensor \(H,\)",
    ),
    "a string as return_lse": (
        lambda: attend(return_lse="no"),
        "return_lse is a str; expected True",
    ),
    "a string as dropout": (lambda: attend(dropout="no"), "dropout is a str; expected a number"),
    "a string as seed": (lambda: attend(seed="no"), "seed is a str; expected an integer"),
    "an integer as aggregation": (
        lambda: attend(aggregation=1),
        "aggregation is an int; expected a string",
    ),
    "float indices": (
        lambda: graph(indices=torch.ones(3)),
        "indices has dtype Float; expected integers",
    ),
    "indptr on a different device": (
        lambda: graph(indptr=torch.zeros(4, dtype=torch.int64, device="meta")),
        "indptr is on meta, but q is on cpu; expected the same device",
    ),
    "a string as indptr": (
        lambda: graph(indptr="0123"),
        "indptr is a str; expected a Tensor, a seq",
    ),
    "a similarity class in a graph": (
        lambda: graph(similarity=similarity.Dot),
        "similarity is the class Dot; expected a gnomon.similarity object",
    ),
    "an integer as feature": (lambda: linear(feature=3), "feature is an int; expected"),
    "the RoPE class": (
        lambda: linear(rope=position.RoPE),
        "rope is the class RoPE; expected a gnomon.position.RoPE, a specification, or None",
    ),
    "an integer projection": (
        lambda: linear(feature="favor", projection=torch.ones(3, 8).long()),
        "projection has dtype Long",
    ),
    "a layout": (
        lambda: gnomon.sinusoid(torch.arange(3), 4, layout=1),
        "layout is an int; expected",
    ),
    "layout of grid_sinusoid": (
        lambda: gnomon.grid_sinusoid((2, 2), 4, layout=None),
        "layout is a NoneType; expected a string",
    ),
    "a list with a float position": (
        lambda: gnomon.sinusoid([1, 1.5], 4),
        r"positions\[1\] is a float; expected an integer",
    ),
    "no gamma": (
        lambda: attend(similarity=similarity.Laplacian(None)),
        r"gamma of laplacian is a NoneType; expected a number or a tensor \(H,\)",
    ),
    "a bool in the shape of a grid": (
        lambda: position.Grid((True, 5), [position.ALiBi(1.0)] * 2),
        r"Grid: shape is \(True, 5\); expected a sequence of integers",
    ),
    "a bool in the shape of a rotation": (
        lambda: position.RoPE(shape=(5, True)),
        r"RoPE: shape is \(5, True\); expected a sequence of integers",
    ),
    "a bool as query_offset": (
        lambda: attend(query_offset=True),
        "query_offset is a bool; expected an integer, or None",
    ),
    "float dim": (
        lambda: gnomon.sinusoid(torch.arange(3), 4.0),
        "dim is a float; expected an int",
    ),
    "a list with a float distance": (
        lambda: gnomon.t5_bucket([0.5], True),
        r"relative_position\[0\] is a float; expected an integer",
    ),
    "float num_buckets": (
        lambda: gnomon.t5_bucket(torch.arange(3), True, 8.5),
        "num_buckets is a float; expected an integer",
    ),
    "a number as flag": (
        lambda: gnomon.t5_bucket(torch.arange(3), 1),
        "bidirectional is an int; expected True or False",
    ),
    "float num_heads of alibi_slopes": (
        lambda: gnomon.alibi_slopes(2.5),
        "num_heads is a float; expected an integer",
    ),
    "a string as num_heads of alibi_slopes": (
        lambda: gnomon.alibi_slopes("8"),
        "num_heads is a str; expected an integer",
    ),
    "an integer as cone": (
        lambda: gnomon.cones.ancestor(HEADS, HEADS, cone=1),
        "cones.ancestor: cone is an int; expected a string",
    ),
    "a string as radius": (
        lambda: gnomon.cones.ancestor(HEADS, HEADS, r="1"),
        "cones.ancestor: r is a str; expected a number, or None",
    ),
    "points on two devices": (
        lambda: gnomon.cones.ancestor(HEADS, HEADS.to("meta")),
        "cones.ancestor: u is on cpu, but v is on meta; expected the same device",
    ),
    "float8 points": (
        lambda: gnomon.cones.ancestor(HEADS.to(FLOAT8), HEADS.to(FLOAT8)),
        "cones.ancestor: u has dtype Float8_e4m3fn",
    ),
    "embed_dim": (lambda: nn.MultiheadAttention("8", 2), "embed_dim is a str; expected an integer"),
    "num_heads": (lambda: nn.MultiheadAttention(8, 2.0), "num_heads is a float; expected an int"),
    "a bias": (lambda: nn.MultiheadAttention(8, 2, bias=None), "bias is a NoneType; expected True"),
    "similarity of a module": (
        lambda: nn.MultiheadAttention(8, 2, similarity=similarity.Dot),
        "similarity is the class Dot; expected a gnomon.similarity object, or a string",
    ),
    "position of a module": (
        lambda: nn.MultiheadAttention(8, 2, position=0),
        "position is an int; expected a gnomon.position object, a string such as 'rope', "
        "or a list of these",
    ),
    "dtype of a module's query": (
        lambda: module(X.double()),
        "MultiheadAttention: query has dtype torch.float64 and the module has torch.float32",
    ),
    "integer query of a module": (
        lambda: module(X.long()),
        "query has dtype torch.int64 and the module",
    ),
    "dtype of a module's key": (
        lambda: module(X, X.half()),
        "key has dtype torch.float16 and the module",
    ),
    "device of a module's value": (
        lambda: module(X, X, X.to("meta")),
        "MultiheadAttention: value is on meta, but the module is on cpu; expected the same device",
    ),
    "a list as a module's query": (
        lambda: module([1]),
        "MultiheadAttention: query is a list; expected a Ten",
    ),
    "cache of a module": (
        lambda: module(X, cache={}),
        "cache is a dict; expected a KVCache, or None",
    ),
    "flag of a module": (lambda: module(X, causal=1), "causal is an int; expected True or False"),
    "specification of TokenPosition": (
        lambda: nn.TokenPosition(1, 8, 16),
        "position is an int; expected",
    ),
    "dim of TokenPosition": (
        lambda: nn.TokenPosition("none", 8.0, 16),
        "dim is a float; expected an",
    ),
    "max_length of TokenPosition": (
        lambda: nn.TokenPosition("learned", 8, "16"),
        "max_length is a str; expected an integer",
    ),
    "specification of TokenEncoding": (
        lambda: nn.TokenEncoding(3, 8),
        "spec is an int; expected a specification",
    ),
    "flag of TokenEncoding": (
        lambda: nn.TokenEncoding("conv", 8, causal="no"),
        "causal is a str; expected True or False",
    ),
    "max_length of LearnedAbsolute": (
        lambda: nn.LearnedAbsolute("3", 8),
        "max_length is a str; expected an int",
    ),
    "a kernel": (lambda: nn.Convolutional(8, 3.5), "kernel is a float; expected an integer"),
    "a prefix": (lambda: nn.CAPE(8, prefix=1.5), "nn.CAPE: prefix is a float; expected an int"),
    "a list as embeddings": (lambda: positioned([1]), "embeddings is a list; expected a Tensor"),
    "integer embeddings": (
        lambda: positioned(X.long()),
        "embeddings have dtype Long; expected",
    ),
    "offset of an encoding": (lambda: positioned(X, "1"), "offset is a str; expected an integer"),
    "lengths of an encoding": (
        lambda: positioned(X, lengths="1"),
        "lengths is a str; expected a T",
    ),
    "cache of an encoding": (
        lambda: positioned(X, cache=1),
        "cache is an int; expected a TokenCache",
    ),
    "generator of an encoding": (
        lambda: positioned(X, generator=1),
        "generator is an int; expected a torch.Generator, or None",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_type_errors(name):
    call, message = TYPE_ERRORS[name]
    with pytest.raises(TypeError, match=message):
        call()


def test_integers_of_other_classes():
    """Objects with __index__, such as NumPy integers, are accepted as integers."""

    class Two:
        def __index__(self):
            return 2

    torch.manual_seed(0)
    q = torch.randn(1, 2, 4, 8)
    for two in (np.int64(2), np.uint8(2), Two()):
        arguments = {"query_offset": two, "window": (two, None), "chunks": (two, two, 0)}
        plain = {"query_offset": 2, "window": (2, None), "chunks": (2, 2, 0)}
        bias = position.ALiBi(0.5)
        ours = gnomon.attention(q, q, q, position=bias, **arguments)
        assert torch.equal(ours, gnomon.attention(q, q, q, position=bias, **plain))
        assert gnomon.alibi_slopes(two).shape == (2,)
        assert nn.MultiheadAttention(np.int64(8), two)(X).shape == X.shape
        grid = position.Grid([two, two], [position.ALiBi(0.5)] * 2)
        assert gnomon.attention(q, q, q, position=grid).shape == q.shape
    model = LanguageModel(11, 8, np.int64(2), 2, 16)
    assert type(model.options["depth"]) is int


def test_none_window_needs_no_offset():
    assert attend(q=tokens(2, 4, 5, 8), window=(None, None)).shape == (2, 4, 5, 5)


def test_shapes_without_data():
    """All tensors are on the meta device, which stores only shapes."""
    q = tokens(2, 4, 6, 8, device="meta")
    lengths = torch.zeros(2, dtype=torch.int64, device="meta")
    o, lse = gnomon.attention(
        *(q, q, q[..., :5]),
        similarity=similarity.Penumbral(HEADS.to("meta")),
        position=position.RoPE(),
        key_lengths=lengths,
        dropout=0.5,
        return_lse=True,
    )
    assert (o.shape, lse.shape) == ((2, 4, 6, 5), (2, 4, 6))
    assert o.device.type == lse.device.type == "meta"
    assert linear(q, q, q, causal=True).shape == q.shape
    assert nn.MultiheadAttention(8, 2).to("meta")(X.to("meta")).shape == X.shape


def test_rows_that_are_not_contiguous():
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8)
    turned = q.mT.contiguous().mT
    assert turned.stride(3) != 1
    assert torch.equal(gnomon.attention(turned, turned, turned), gnomon.attention(q, q, q))
    assert torch.equal(linear(turned, turned, turned), linear(q, q, q))
    nodes = torch.randn(3, 2, 4)
    turned = nodes.mT.contiguous().mT
    assert torch.equal(graph(turned, turned, turned), graph(nodes, nodes, nodes))


def test_autocast_mixes_types():
    with torch.autocast("cpu", torch.bfloat16):
        assert module(X.half(), X.bfloat16(), X).dtype == torch.bfloat16
        for dtype in (torch.int64, torch.float64):
            with pytest.raises(TypeError, match=f"query has dtype {dtype}"):
                module(X.to(dtype))
