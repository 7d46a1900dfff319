"""Positions: how the positions p_i of a query and p_j of a key change the scores.

``RoPE() + ALiBi(slopes)`` is their sum, as is a list of them: at most one rotation, one content
term (AbsoluteKeys, ContentBias, Disentangled, Relative, Relative2D, TransformerXL), which reads q
as it was passed, one QK-norm, one sink and one gate, and any number of biases. Each is learned if
its tensor requires grad. Where (H,) is expected, one for each query head, a number or a tensor ()
without axes stands for all heads.

A specification may be given wherever a position is expected, "rope+alibi", also in a sum: ``"rope"
+ ALiBi(slopes)``. What it leaves out is as a module has it at its start.
"""

# Written by `make facades` from the catalogue, that is the files of the terms.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from gnomon._grid import Grid
from gnomon._position import Position, Specified, Sum, flipped_grid, reversed_rows

__all__ = [
    "T5",
    "ALiBi",
    "AbsoluteKeys",
    "ContentBias",
    "Disentangled",
    "Forget",
    "Gate",
    "Grid",
    "GridBias",
    "HyPE",
    "Kerple",
    "KeyBias",
    "LogTemperature",
    "OffsetBias",
    "PairBias",
    "Position",
    "QKNorm",
    "Relative",
    "Relative2D",
    "RoPE",
    "RoPEMixed",
    "Sandwich",
    "ScalableSoftmax",
    "Sink",
    "Specified",
    "Sum",
    "TransformerXL",
]


@dataclass(frozen=True, eq=False)
class RoPE(Position):
    """q and k rotated by p base^(-2 i / dims); on a grid, dims / axes by each coordinate.

    Pair i of the first dims coordinates is rotated, before the map of the similarity. With a
    shape, tokens lie on a grid, after `prefix` tokens that are not rotated. The rotated
    coordinates are split evenly over its axes: each axis rotates its part by its own coordinate,
    with dims / axes in place of dims. Fewer tokens than the grid has are its first ones, as
    those that are generated so far.

    Su et al. 2021, RoFormer.

    Args:
        base: the base of the frequencies.
        layout: "interleaved": pairs (2 i, 2 i + 1); "half": pairs (i, i + dims / 2).
        dims: how many coordinates are rotated; by default D, or the largest even number <= D - 1
            where the last coordinate is a height; on a grid the largest multiple of 2 * axes.
        shape: lengths of the axes of the grid that tokens lie on, in row-major order.
        prefix: tokens before the grid, such as a class token.
        scaling: how frequencies are scaled for sequences longer than those in training, with the
            names and numbers of transformers:
            "yarn:factor=4:original_max_position_embeddings=2048"; dynamic and longrope depend on
            the length of the call, one past its last position.
        xpos: whether products of pairs decay with the distance; for dot only, and lengths up to
            65536 (Sun et al. 2023).
        sections: for positions with several axes: how many pairs each axis turns, dims / 2 in all,
            with the frequencies of a sequence (Qwen2-VL's temporal, height and width).
        section_order: "contiguous": one section after the other; "interleaved": pairs are dealt out
            to the axes in turn while their sections have room, and the first axis gets the rest
            (Qwen3-VL).
        angles: (1 or B, 1 or H, L, dims / 2), radians, learned if it requires grad: pair n of the
            token at position p is rotated by angles[..., p, n], instead of p times a frequency;
            heads may be those of k, too.
        key_angles: those of the keys, (1 or B, 1 or H, Lk, dims / 2), where q and k are other
            tokens: the rows of angles are then the queries, whatever their positions.
    """

    base: float = 10000.0
    layout: Literal["interleaved", "half"] = "interleaved"
    dims: int | None = None
    shape: Sequence[int] | None = None
    prefix: int = 0
    scaling: str | None = None
    xpos: bool = False
    sections: Sequence[int] | None = None
    section_order: Literal["contiguous", "interleaved"] = "contiguous"
    angles: Tensor | None = None
    key_angles: Tensor | None = None

    _name: ClassVar[str] = "rope"
    _tensors: ClassVar[tuple[str, ...]] = ("angles", "key_angles")
    _tables: ClassVar[tuple[str, ...]] = ("angles", "key_angles")
    _options: ClassVar[tuple[str, ...]] = (
        "base",
        "layout",
        "dims",
        "shape",
        "prefix",
        "xpos",
        "sections",
        "section_order",
    )
    _shapes: ClassVar[tuple[str, ...]] = ("shape", "sections")
    _details: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scaling": (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
            "mscale",
            "mscale_all_dim",
            "low_freq_factor",
            "high_freq_factor",
            "partial_rotary_factor",
            "short_factor",
            "long_factor",
        )
    }


@dataclass(frozen=True, eq=False)
class RoPEMixed(Position):
    """q and k rotated by t_h x + u_h y, frequencies of each head for each axis.

    Pair n of the first coordinates is rotated, before the map of the similarity, by its position
    along all axes at once: diagonals are directions just as the axes are. With a shape, tokens
    lie on a grid, after `prefix` tokens that are not rotated; without one the axes are those of
    the positions that the caller gives, or the sequence. In a module the frequencies are
    learned: they start as two directions at right angles (as many as there are axes), turned at
    random in each head, with frequencies base^(-n / n_max) along both.

    Heo et al. 2024, Rotary Position Embedding for Vision Transformer.

    Args:
        frequencies: (H, axes, dims / 2), radians per step along each axis; one head may stand for
            all, and those of k for groups of q's.
        layout: "interleaved": pairs (2 i, 2 i + 1); "half": pairs (i, i + dims / 2).
        shape: lengths of the axes of the grid that tokens lie on, in row-major order.
        prefix: tokens before the grid, such as a class token.
    """

    frequencies: Tensor
    layout: Literal["interleaved", "half"] = "interleaved"
    shape: Sequence[int] | None = None
    prefix: int = 0

    _name: ClassVar[str] = "rope_mixed"
    _tensors: ClassVar[tuple[str, ...]] = ("frequencies",)
    _tables: ClassVar[tuple[str, ...]] = ("frequencies",)
    _options: ClassVar[tuple[str, ...]] = ("layout", "shape", "prefix")
    _shapes: ClassVar[tuple[str, ...]] = ("shape",)


@dataclass(frozen=True, eq=False)
class ALiBi(Position):
    """-slopes_h |p_i - p_j|.

    Press et al. 2022, Train Short, Test Long.

    Args:
        slopes: slope of each head; alibi_slopes gives the paper's.
    """

    slopes: float | Tensor

    _name: ClassVar[str] = "alibi"
    _tensors: ClassVar[tuple[str, ...]] = ("slopes",)


@dataclass(frozen=True, eq=False)
class HyPE(Position):
    """-tau_h sinh(mu_h |p_i - p_j|); odd: of p_i - p_j; cosh: tau_h (1 - cosh(...)).

    With a causal mask "abs" and "odd" are the same; without one "odd" favours later keys, and
    the last one most of all. The argument of sinh and cosh is clamped to +-80; beyond it mu has
    gradient zero.

    Angelotti 2023, HyPE: Attention with Hyperbolic Biases for Relative Positional Encoding.

    Args:
        tau: amplitude of each head.
        mu: rate of each head, per token.
        mode: "abs": -tau_h sinh(mu_h |p_i - p_j|); "odd": -tau_h sinh(mu_h (p_i - p_j)), the form
            of the paper; "cosh": tau_h (1 - cosh(mu_h (p_i - p_j))).
    """

    tau: float | Tensor
    mu: float | Tensor
    mode: Literal["abs", "odd", "cosh"] = "abs"

    _name: ClassVar[str] = "hype"
    _tensors: ClassVar[tuple[str, ...]] = ("tau", "mu")
    _options: ClassVar[tuple[str, ...]] = ("mode",)


@dataclass(frozen=True, eq=False)
class Kerple(Position):
    """log: -r1_h log(1 + r2_h |p_i - p_j|); power: -r1_h |p_i - p_j|^r2_h.

    Chi et al. 2022, KERPLE: Kernelized Relative Positional Embedding.

    Args:
        r1: factor of each head.
        r2: rate of each head, per token, or its exponent.
        kind: "log": -r1_h log(1 + r2_h |p_i - p_j|); "power": -r1_h |p_i - p_j|^r2_h.
    """

    r1: float | Tensor
    r2: float | Tensor
    kind: Literal["log", "power"] = "log"

    _name: ClassVar[str] = "kerple"
    _tensors: ClassVar[tuple[str, ...]] = ("r1", "r2")
    _options: ClassVar[tuple[str, ...]] = ("kind",)


@dataclass(frozen=True, eq=False)
class OffsetBias(Position):
    """attention(): table[h, j - i + Lq - 1]; modules: table[h, p_j - p_i + length - 1].

    Entry n belongs to column - row = n - (Lq - 1), whatever query_offset is; -inf masks. In a
    module the table is (H, 2 n - 1), over positions: entry m belongs to p_j - p_i = m - (n - 1),
    and calls of up to n tokens, cached ones included, read the part that they need.

    Shaw et al. 2018, Self-Attention with Relative Position Representations.

    Args:
        table: (H, Lq + Lk - 1).
    """

    table: Tensor

    _name: ClassVar[str] = "offset_bias"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)
    _tables: ClassVar[tuple[str, ...]] = ("table",)


@dataclass(frozen=True, eq=False)
class Sandwich(Position):
    """factor_h sum over i = 1 .. dims / 2 of (cos(base^(-2 i / dims) (p_i - p_j)) - 1).

    Chi et al. 2023, Dissecting Transformer Length Extrapolation via the Lens of Receptive Field
    Analysis.

    Args:
        factor: factor of each head.
        dims: columns of the sinusoids, an even number.
        base: base of their wavelengths.
    """

    factor: float | Tensor
    dims: int = 128
    base: float = 10000.0

    _name: ClassVar[str] = "sandwich"
    _tensors: ClassVar[tuple[str, ...]] = ("factor",)
    _options: ClassVar[tuple[str, ...]] = ("dims", "base")


@dataclass(frozen=True, eq=False)
class T5(Position):
    """table[bucket(p_j - p_i), h].

    t5_bucket gives the bucket of a relative position.

    Raffel et al. 2020, Exploring the Limits of Transfer Learning.

    Args:
        table: (buckets, H).
        bidirectional: whether keys ahead of the query have buckets of their own.
        max_distance: the distance from which all share one bucket.
    """

    table: Tensor
    bidirectional: bool
    max_distance: int = 128

    _name: ClassVar[str] = "t5"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)
    _tables: ClassVar[tuple[str, ...]] = ("table",)
    _options: ClassVar[tuple[str, ...]] = ("bidirectional", "max_distance")


@dataclass(frozen=True, eq=False)
class GridBias(Position):
    """table[h, dy + height - 1, dx + width - 1], dy = y_j - y_i and dx = x_j - x_i; any number of
    axes.

    Tokens lie on a grid in row-major order, after `prefix` tokens without a bias, as in Grid.
    Swin's tables are indexed by the opposite differences: flip them along both axes.

    Liu et al. 2021, Swin Transformer.

    Args:
        table: (H, 2 height - 1, 2 width - 1), or of any number of axes.
        prefix: tokens before the grid, such as a class token.
    """

    table: Tensor
    prefix: int = 0

    _name: ClassVar[str] = "grid_bias"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)
    _tables: ClassVar[tuple[str, ...]] = ("table",)
    _options: ClassVar[tuple[str, ...]] = ("prefix",)

    @classmethod
    def from_query_minus_key(cls, table: Tensor, prefix: int = 0) -> GridBias:
        """Of a table indexed by y_i - y_j + height - 1 and so on, as in Swin.

        Example:
            >>> table = torch.zeros(13 * 13, 4)  # Swin's, windows of 7x7, 4 heads
            >>> table = table.t().view(4, 13, 13)
            >>> bias = gnomon.position.GridBias.from_query_minus_key(table)
        """
        table = flipped_grid("position.GridBias", "table", table)
        return cls(table, prefix)


@dataclass(frozen=True, eq=False)
class Forget(Position):
    """-(log f[h, 0] + ... + log f[h, j]): with causal, a weight is multiplied by the gates f of the
    keys after it, up to the query's.

    The sum is exact over long sequences: it is kept in float64, and each row subtracts the sum
    at its own position. lse and sinks see it without that subtraction. Gates of keys outside
    key_starts and key_lengths count as 1. The sum is that of a key's own segment, in the order
    of positions. A module computes the gates from its tokens, f = sigmoid(w_h x + b_h); they
    start out as ALiBi, with w at 0 and b such that log f is minus ALiBi's slope.

    Lin et al. 2025, Forgetting Transformer: Softmax Attention with a Forget Gate.

    Args:
        log_forget: (1 or B, 1 or H, Lk), the logarithm of each key's gate, at most 0: logsigmoid of
            a projection of its token; less than -1e6, such as -inf, counts as that: keys before it
            weigh nothing beside one after it.
    """

    log_forget: Tensor

    _name: ClassVar[str] = "forget"
    _tensors: ClassVar[tuple[str, ...]] = ("log_forget",)
    _tables: ClassVar[tuple[str, ...]] = ("log_forget",)


@dataclass(frozen=True, eq=False)
class KeyBias(Position):
    """bias[h, j], the same for all queries.

    The bias comes with each call, one number for each of its keys. -inf masks a key.

    Dai et al. 2019, Transformer-XL: Attentive Language Models beyond a Fixed-Length Context,
    whose u.k_j is one.

    Args:
        bias: (1 or B, 1 or H, Lk).
    """

    bias: Tensor

    _name: ClassVar[str] = "key_bias"
    _tensors: ClassVar[tuple[str, ...]] = ("bias",)
    _tables: ClassVar[tuple[str, ...]] = ("bias",)


@dataclass(frozen=True, eq=False)
class PairBias(Position):
    """bias[b, h, i, j].

    -inf masks a pair: this is what other libraries call a float mask, added to the scores. Where
    batches or heads share it, its gradient is summed over them in order. One that all queries
    share, or all keys, costs no memory for pairs. In float32 finite numbers count as at most
    1e37 in size, so that a row of nothing but the least number there is weighs all its keys
    alike; one number for all keys of a row, (Lq, 1), changes no weight.

    Jumper et al. 2021, AlphaFold; Ying et al. 2021, Graphormer.

    Args:
        bias: (1 or B, 1 or H, Lq, Lk), or what broadcasts to it.
    """

    bias: Tensor

    _name: ClassVar[str] = "pair_bias"
    _tensors: ClassVar[tuple[str, ...]] = ("bias",)
    _tables: ClassVar[tuple[str, ...]] = ("bias",)


@dataclass(frozen=True, eq=False)
class AbsoluteKeys(Position):
    """q_i.R[j] scale: learned absolute positions inside attention.

    Ke et al. 2021, Rethinking Positional Encoding in Language Pre-training.

    Args:
        table: (Lk, D), or (H, Lk, D).
    """

    table: Tensor

    _name: ClassVar[str] = "absolute_keys"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)
    _tables: ClassVar[tuple[str, ...]] = ("table",)


@dataclass(frozen=True, eq=False)
class ContentBias(Position):
    """r_i.E[p_j - p_i + extent - 1], past first; 0 where |p_i - p_j| >= extent.

    A module projects r_i, a few columns for each head, from its tokens, and has one table for
    all heads. It is "relative" with far "zero" and its own query.

    Shaw et al. 2018, Self-Attention with Relative Position Representations, whose query is q;
    models of 2026 project one.

    Args:
        query: (B, H, Lq, Dr), what multiplies the rows.
        table: (2 extent - 1, Dr), or extent rows for the past alone, which needs causal; or (H, n,
            Dr), a table of each head.
        extent: one more than the offset of the table's last row.
    """

    query: Tensor
    table: Tensor
    extent: int = 1024

    _name: ClassVar[str] = "content_bias"
    _tensors: ClassVar[tuple[str, ...]] = ("query", "table")
    _tables: ClassVar[tuple[str, ...]] = ("query", "table")
    _options: ClassVar[tuple[str, ...]] = ("extent",)

    @classmethod
    def from_future_first(cls, query: Tensor, table: Tensor, extent: int = 1024) -> ContentBias:
        """Of tables whose row n is for the offset p_j - p_i = max_offset - n."""
        table = reversed_rows("position.ContentBias", "table", table)
        return cls(query, table, extent)


@dataclass(frozen=True, eq=False)
class Disentangled(Position):
    """(q_i.K[r] + k_j.Q[r]) scale, r = clamp(bucket(p_i - p_j) + n, 0, 2 n - 1) of 2 n rows.

    Content to position, and position to content. Tables are DeBERTa's: the embeddings of
    relative positions, n as position_buckets and max_distance as max_relative_positions (without
    buckets n is that, and max_distance 0), projected as keys and as queries. With scale = 1 /
    sqrt(3 D), attention is DeBERTa's. On the CPU alone.

    He et al. 2021, DeBERTa: Decoding-enhanced BERT with Disentangled Attention; DeBERTaV3, whose
    buckets are logarithmic.

    Args:
        keys: (2 n, D), or (H, 2 n, D), a table of each head: what queries are multiplied by.
        queries: the same of what keys are multiplied by.
        max_distance: the distance from which all share the last bucket, more than n / 2 + 1 with n
            even; 0: a row for each offset, the nearest one beyond.
    """

    keys: Tensor
    queries: Tensor
    max_distance: int = 0

    _name: ClassVar[str] = "disentangled"
    _tensors: ClassVar[tuple[str, ...]] = ("keys", "queries")
    _tables: ClassVar[tuple[str, ...]] = ("keys", "queries")
    _options: ClassVar[tuple[str, ...]] = ("max_distance",)


@dataclass(frozen=True, eq=False)
class Relative(Position):
    """q_i.E[p_j - p_i + max_offset] scale, past first; with values, v_j + W[p_j - p_i + max_offset]
    for v_j; far: the nearest row, or none; with a query of its own, r_i.E[...].

    A table that starts with the future is this one with its rows reversed, table.flip(-2). With
    its own query, projected from the tokens to a few columns, and a table that heads share, this
    is the content-conditioned bias of models of 2026.

    Shaw et al. 2018, Self-Attention with Relative Position Representations; Huang et al. 2019,
    Music Transformer.

    Args:
        table: (2 max_offset + 1, D), or max_offset + 1 rows for the past alone, which needs causal;
            or (H, n, D), a table of each head.
        max_offset: the offset of the table's last row.
        far: the row beyond max_offset: "clip" is the nearest one (Shaw et al.), "zero" none (Huang
            et al.).
        values: (n, Dv) with as many rows as the table, or (H, n, Dv): the row of the offset is
            added to v_j.
        query: (B, H, Lq, Dr), what multiplies the rows instead of q: the table then has Dr columns,
            and the products are not scaled.
    """

    table: Tensor
    max_offset: int
    far: Literal["clip", "zero"] = "clip"
    values: Tensor | None = None
    query: Tensor | None = None

    _name: ClassVar[str] = "relative"
    _tensors: ClassVar[tuple[str, ...]] = ("table", "values", "query")
    _tables: ClassVar[tuple[str, ...]] = ("table", "values", "query")
    _options: ClassVar[tuple[str, ...]] = ("max_offset", "far")

    @classmethod
    def from_future_first(
        cls,
        table: Tensor,
        max_offset: int,
        far: Literal["clip", "zero"] = "clip",
        values: Tensor | None = None,
        query: Tensor | None = None,
    ) -> Relative:
        """Of tables whose row n is for the offset p_j - p_i = max_offset - n."""
        table = reversed_rows("position.Relative", "table", table)
        if values is not None:
            values = reversed_rows("position.Relative", "values", values)
        return cls(table, max_offset, far, values, query)


@dataclass(frozen=True, eq=False)
class Relative2D(Position):
    """q_i.(R[dy + height - 1] + C[dx + width - 1]) scale, dy = y_j - y_i and dx = x_j - x_i.

    R are the rows and C the columns; tokens lie on a grid in row-major order, after `prefix`
    tokens without this term, as in Grid.

    Ramachandran et al. 2019, Stand-Alone Self-Attention; Srinivas et al. 2021, Bottleneck
    Transformers.

    Args:
        rows: (2 height - 1, D), or (H, n, D).
        columns: (2 width - 1, D), or (H, n, D).
        height: height of the grid.
        width: width of the grid.
        prefix: tokens before the grid, such as a class token.
    """

    rows: Tensor
    columns: Tensor
    height: int
    width: int
    prefix: int = 0

    _name: ClassVar[str] = "relative2d"
    _tensors: ClassVar[tuple[str, ...]] = ("rows", "columns")
    _tables: ClassVar[tuple[str, ...]] = ("rows", "columns")
    _options: ClassVar[tuple[str, ...]] = ("prefix",)
    _axes: ClassVar[tuple[str, ...]] = ("height", "width")


@dataclass(frozen=True, eq=False)
class TransformerXL(Position):
    """(u_h.k_j + (q_i + v_h).r_h[p_i - p_j]) scale, r = W_R sinusoid, or learned.

    Only with dot, and with causal unless bidirectional (Conformers, Gulati et al. 2020).

    Dai et al. 2019, Transformer-XL.

    Args:
        u: (H, D), the part of the query that asks for keys.
        v: (H, D), the part of the query that asks for distances.
        r: (H, n, D): row n is the distance p_i - p_j = n, at least Lq + query_offset rows;
            bidirectional: (H, 2 n - 1, D), the distances from 1 - n to n - 1.
        bidirectional: whether r has rows for keys ahead of the query as well.
    """

    u: Tensor
    v: Tensor
    r: Tensor
    bidirectional: bool = False

    _name: ClassVar[str] = "transformer_xl"
    _tensors: ClassVar[tuple[str, ...]] = ("u", "v", "r")
    _tables: ClassVar[tuple[str, ...]] = ("u", "v", "r")
    _options: ClassVar[tuple[str, ...]] = ("bidirectional",)


@dataclass(frozen=True, eq=False)
class QKNorm(Position):
    """q / rms(q) * w_q and k / rms(k) * w_k, before anything else acts on them.

    Henry et al. 2020, Query-Key Normalization for Transformers; Dehghani et al. 2023, Scaling
    Vision Transformers to 22 Billion Parameters.

    Args:
        q_weight: (D,), the weight of the queries' norm.
        k_weight: (D,), the weight of the keys' norm.
        epsilon: added to the mean of the squares.
    """

    q_weight: Tensor
    k_weight: Tensor
    epsilon: float = 1e-06

    _name: ClassVar[str] = "qk_norm"
    _tensors: ClassVar[tuple[str, ...]] = ("q_weight", "k_weight")
    _tables: ClassVar[tuple[str, ...]] = ("q_weight", "k_weight")
    _options: ClassVar[tuple[str, ...]] = ("epsilon",)


@dataclass(frozen=True, eq=False)
class LogTemperature(Position):
    """multiplies the scores of row i by 1 + scale log(1 + floor((p_i + 1) / length)) (steps) or 1 +
    scale log(max(1, n_i / length)) (smooth), n_i the number of keys up to its own.

    Of the number of keys, those outside key_starts and key_lengths and those of other segments
    do not count; other masks make no difference, but that a window with no keys ahead is a
    causal mask. Positions (steps) are those of the call: padding before a row moves them.

    Meta 2025, Llama 4 (steps); Inkling 2026 (smooth).

    Args:
        scale: how fast it grows.
        length: the length up to which it is 1.
        kind: whether it grows by whole lengths or with each key.
    """

    scale: float = 0.1
    length: float = 8192.0
    kind: Literal["steps", "smooth"] = "steps"

    _name: ClassVar[str] = "log_temperature"
    _options: ClassVar[tuple[str, ...]] = ("scale", "length", "kind")


@dataclass(frozen=True, eq=False)
class ScalableSoftmax(Position):
    """multiplies the scores of row i by s[h] log n_i, n_i the number of keys up to its own.

    Keys outside key_starts and key_lengths do not count, nor do those of other segments; other
    masks make no difference, but that a window with no keys ahead is a causal mask.

    Nakanishi 2025, Scalable-Softmax Is Superior for Attention.

    Args:
        s: factor of each head.
    """

    s: float | Tensor

    _name: ClassVar[str] = "scalable_softmax"
    _tensors: ClassVar[tuple[str, ...]] = ("s",)


@dataclass(frozen=True, eq=False)
class Sink(Position):
    """adds one more score s[h] to the softmax of each row, whose key has no value.

    The same as the argument `sink` of a call, available by name in modules.

    Agarwal et al. 2025, gpt-oss-120b and gpt-oss-20b Model Card; Xiao et al. 2023, Efficient
    Streaming Language Models with Attention Sinks.

    Args:
        score: (H,), () or (B, H, Lq), learned in modules, from 0.
    """

    score: Tensor

    _name: ClassVar[str] = "sink"
    _tensors: ClassVar[tuple[str, ...]] = ("score",)
    _tables: ClassVar[tuple[str, ...]] = ("score",)


@dataclass(frozen=True, eq=False)
class Gate(Position):
    """o_i * g_i, the output of each head times the gate of its query.

    A module computes the gates from the tokens of its queries, g = sigmoid(W x).

    Qiu et al. 2025, Gated Attention for Large Language Models: Non-linearity, Sparsity, and
    Attention-Sink-Free.

    Args:
        values: (B, H, Lq, Dv), what multiplies the output.
    """

    values: Tensor

    _name: ClassVar[str] = "gate"
    _tensors: ClassVar[tuple[str, ...]] = ("values",)
    _tables: ClassVar[tuple[str, ...]] = ("values",)
