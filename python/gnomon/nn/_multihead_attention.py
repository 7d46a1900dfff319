"""Multi-head attention with a trainable similarity and position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from gnomon._attention import UNSET, MaskArguments, Rows, check_rows, takes
from gnomon._checks import (
    Device,
    check_flag,
    check_integer,
    check_number,
    check_optional_integer,
    wrong_type,
)
from gnomon._library import ops, query
from gnomon._position import Position, Sum, to_positions
from gnomon._similarity import Similarity, to_similarity
from gnomon._varlen import nested_module
from gnomon.nn._caches import KVCache
from gnomon.nn._checks import check_embeddings, check_factory
from gnomon.nn._heads import split_heads
from gnomon.nn._held_terms import HeldTerms, Projection, TermSizes, reset_children
from gnomon.nn._masks import to_masks
from gnomon.nn._torch_multihead_attention import TorchMultiheadAttention


class MultiheadAttention(HeldTerms):
    """Multi-head attention with any similarity and position: softmax(similarity + position) v.

    The projections q_proj, k_proj, v_proj and out_proj are initialised with weights from
    N(0, 1 / in_features) and zero biases. With unit-variance inputs, q and k then have unit
    variance, and the logits have a standard deviation of 1.

    The similarity and the position add parameters of these kinds:

    - Per-head parameters "<component>_<name>_theta" (H,), such as "gamma_theta" or "beta_theta",
      are initialised to 0. Their effective value is start * exp(5 theta).
    - Bias tables, such as "t5_table" (buckets, H) and "grid_bias_table"
      (H, 2 height - 1, 2 width - 1), are initialised to 0.
    - Tables that are multiplied by q or k, such as "relative_table" (2 max_offset + 1, D), are
      drawn from N(0, 1 / D), where D is the dimension of a row. "transformer_xl_u" and
      "transformer_xl_v" (H, D) are initialised to 0, and "transformer_xl_r" (H, D, embed_dim) maps
      sinusoids to rows.
    - Projections of the tokens to n numbers per head have a weight (H * n, embed_dim or kdim), such
      as "forget_log_forget_weight" and "content_bias_query_weight", and may have a bias (H * n),
      such as "forget_log_forget_bias".
    - The buffer "gamma_start" ("beta_start", "scale_start") contains the initial value of a
      similarity's factor. With this value, the logits of N(0, 1) tokens have a standard deviation
      of 1.

    Terms can contain tensors, as in ALiBi(slopes). Each tensor is registered under
    "<component>_<name>" ("<name>" for similarities). It becomes a parameter if it requires grad
    and a buffer otherwise. A torch.nn.Parameter is registered as is, not copied. A table passed to
    OffsetBias has the shape (H, 2 length - 1) and is used for all sequences up to that length, like
    the "offset_bias_table" of "offset_bias:length=512".

    Args:
        embed_dim: embedding dimension of the input and the output.
        num_heads: number of query heads; must divide embed_dim.
        kv_heads: number of key and value heads; must divide num_heads, which is the default. Query
            head h uses key head h // (num_heads / kv_heads).
        qk_dim: head_dim of q and k. The default is embed_dim / num_heads. For the similarity
            "additive", it is 1, the only supported value.
        similarity: a specification such as "penumbral:score=height2", or an object from
            gnomon.similarity.
        position: a specification such as "rope+hype:mu=0.001:tau=learned", an object from
            gnomon.position, or a sum such as "rope" + ALiBi(slopes); None means "none". A component
            that is added to embeddings raises an error; see TokenPosition and attention_position.
            The constructor checks the shapes of per-head tensors; the first call checks tables.
        dropout: probability of dropping an attention weight during training.
        bias: whether the projections have biases.
        max_length: number of rows of a learned position table ("absolute_keys"), unless the
            specification sets a length.
        kdim: embedding dimension of key; embed_dim by default.
        vdim: embedding dimension of value; embed_dim by default.
        qk_norm: whether the RMSNorm submodules q_norm and k_norm normalise q and k of each head
            first (Henry et al. 2020; Dehghani et al. 2023).
        gate: whether the attention output is multiplied by sigmoid(gate_proj(query)) (Qiu et al.
            2025).
        sink: whether each head has a learned sink (the parameter sink (H,), initialised to 0); see
            gnomon.attention.
        tolerance: see gnomon.attention.
        device: device of parameters and buffers; the default device if None.
        dtype: floating-point dtype of parameters and buffers; the default dtype if None.

    Example:
        >>> layer = gnomon.nn.MultiheadAttention(64, 4, similarity="umbral", position="rope")
        >>> y = layer(torch.randn(2, 16, 64), causal=True)  # (B, L, embed_dim)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kv_heads: int | None = None,
        qk_dim: int | None = None,
        similarity: Similarity | str = "dot",
        position: Position | Sequence[Position | str] | str | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        max_length: int = 512,
        kdim: int | None = None,
        vdim: int | None = None,
        qk_norm: bool = False,
        gate: bool = False,
        sink: bool = False,
        tolerance: float = UNSET["tolerance"],
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        operator = "nn.MultiheadAttention"
        embed_dim = check_integer(operator, "embed_dim", embed_dim)
        num_heads = check_integer(operator, "num_heads", num_heads)
        max_length = check_integer(operator, "max_length", max_length)
        kv_heads = check_optional_integer(operator, "kv_heads", kv_heads)
        qk_dim = check_optional_integer(operator, "qk_dim", qk_dim)
        similarity_spec, given = to_similarity(operator, similarity)._lower()
        position_spec, position_tensors = Sum(to_positions(operator, position))._lower()
        given = [*given, *position_tensors]
        kdim, vdim = (
            None if width is None else check_integer(operator, name, width)
            for name, width in (("kdim", kdim), ("vdim", vdim))
        )
        bias = check_flag(operator, "bias", bias)
        dropout = check_number(operator, "dropout", dropout)
        tolerance = check_number(operator, "tolerance", tolerance)
        has_sink = check_flag(operator, "sink", sink)
        self.qk_norm = check_flag(operator, "qk_norm", qk_norm)
        self.gate = check_flag(operator, "gate", gate)
        ops.check_module(
            f"gnomon.{operator}",
            dropout,
            tolerance,
            has_sink,
            self.gate,
            self.qk_norm,
            position_spec,
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.kv_heads, self.qk_dim, self.kdim, self.vdim = query(
            "module_sizes", similarity_spec, embed_dim, num_heads, kv_heads, qk_dim, kdim, vdim
        )
        self.dropout = dropout
        self.tolerance = tolerance
        value_dim = embed_dim // num_heads
        made = check_factory(operator, device, dtype)
        self.q_proj = Projection(embed_dim, num_heads * self.qk_dim, bias=bias, **made)
        self.k_proj = Projection(self.kdim, self.kv_heads * self.qk_dim, bias=bias, **made)
        self.v_proj = Projection(self.vdim, self.kv_heads * value_dim, bias=bias, **made)
        self.out_proj = Projection(embed_dim, embed_dim, bias=bias, **made)
        if self.gate:
            self.gate_proj = Projection(embed_dim, embed_dim, bias=bias, **made)
        if self.qk_norm:
            epsilon = query("rms_norm_epsilon")
            self.q_norm = torch.nn.RMSNorm(self.qk_dim, eps=epsilon, **made)
            self.k_norm = torch.nn.RMSNorm(self.qk_dim, eps=epsilon, **made)
        self._hold_terms(
            similarity_spec,
            position_spec,
            given,
            TermSizes(num_heads, self.qk_dim, value_dim, max_length, embed_dim, self.kdim),
            device,
            dtype,
            has_sink,
        )
        self.register_load_state_dict_pre_hook(_split_in_proj)

    def reset_parameters(self) -> None:
        """Resets all parameters and buffers to their initial values, and draws new weights.

        Tensors passed in terms are reset to the values that they had at construction.
        """
        reset_children(self)
        self._reset_terms()

    @takes(MaskArguments)
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        key_padding_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
        **arguments: Unpack[MaskArguments],
    ) -> Tensor:
        """Computes multi-head attention and returns the output (B, Lq, embed_dim).

        query is (B, Lq, embed_dim), key is (B, Lk, kdim) and value is (B, Lk, vdim). key defaults
        to query, and value defaults to key.

        With a cache, the keys and values of this call are appended to it, and queries attend to all
        cached keys. query_offset then defaults to the length of the cache before the call.
        positions and key_positions are those of this call's tokens; the cache stores them.

        As in torch.nn, key_padding_mask (B, Lk) is True where a key is hidden, or contains numbers
        that are added to the scores (-inf hides a key). With a cache, the mask also covers the
        cached keys. For padding at the start or end, key_starts and key_lengths are simpler.
        pair_bias (1 or B, 1 or H, Lq, Lk) is added to the scores. The other arguments are those of
        gnomon.attention.

        In a jagged nested tensor (B, length, embed_dim), each component is a separate sequence, as
        in gnomon.varlen_attention; the result is then nested as well.
        """
        if isinstance(query, Tensor) and query.is_nested:
            padded = {"cache": cache, "key_padding_mask": key_padding_mask, "pair_bias": pair_bias}
            operator = "nn.MultiheadAttention"
            return nested_module(operator, self.forward, query, key, value, padded, arguments)
        key = query if key is None else key
        value = key if value is None else value
        for name, tokens, width, layer in (
            ("query", query, self.embed_dim, self.q_proj),
            ("key", key, self.kdim, self.k_proj),
            ("value", value, self.vdim, self.v_proj),
        ):
            check_embeddings("MultiheadAttention", name, tokens, width, layer)
        q, k = self._queries_and_keys(query, key)
        v = split_heads(self.v_proj(value), self.kv_heads)
        known = cache.length() if isinstance(cache, KVCache) else 0
        masks = to_masks(
            "nn.MultiheadAttention",
            (q.shape[0], self.num_heads, q.shape[2], k.shape[2] + known),
            q,
            key_padding_mask,
            pair_bias,
        )
        attended = self._attend(
            "nn.MultiheadAttention",
            (q, k, v),
            (query, key),
            arguments,
            MaskArguments,
            self._own_arguments(),
            dropout=self.dropout if self.training else 0.0,
            cache=cache,
            hidden=masks.hidden,
            more=masks.biases,
        )
        o = attended.o.transpose(1, 2).flatten(2)
        if self.gate:
            o = o * self.gate_proj(query).sigmoid()
        out: Tensor = self.out_proj(o)
        attended.keep()
        return out

    def _queries_and_keys(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q (B, H, Lq, qk_dim) and k (B, Hkv, Lk, qk_dim)."""
        q = split_heads(self.q_proj(query), self.num_heads)
        k = split_heads(self.k_proj(key), self.kv_heads)
        return (self.q_norm(q), self.k_norm(k)) if self.qk_norm else (q, k)

    @takes(MaskArguments)
    def attention_weights(
        self,
        query: Tensor,
        key: Tensor | None = None,
        rows: Rows = -1,
        *,
        key_padding_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
        **arguments: Unpack[MaskArguments],
    ) -> Tensor:
        """Returns the attention weights (B, H, n, Lk) of n queries.

        `rows` selects the queries; by default, only the last one. query is (B, Lq, embed_dim). The
        weights are those of gnomon.attention_weights with this module's projections, similarity and
        position, without dropout. key_padding_mask and pair_bias are as in forward.
        """
        operator = "nn.MultiheadAttention.attention_weights"
        key = query if key is None else key
        check_embeddings("MultiheadAttention", "query", query, self.embed_dim, self.q_proj)
        check_embeddings("MultiheadAttention", "key", key, self.kdim, self.k_proj)
        q, k = self._queries_and_keys(query, key)
        masks = to_masks(
            operator,
            (q.shape[0], self.num_heads, q.shape[2], k.shape[2]),
            q,
            key_padding_mask,
            pair_bias,
        )
        return self._weights(
            operator,
            (q, k),
            (query, key),
            check_rows(operator, rows, q),
            arguments,
            MaskArguments,
            self._own_arguments(),
            hidden=masks.hidden,
            more=masks.biases,
        )

    @overload
    @classmethod
    def from_torch(
        cls,
        module: torch.nn.MultiheadAttention,
        *,
        similarity: Similarity | str = ...,
        position: Position | Sequence[Position | str] | str | None = ...,
        drop_in: Literal[False] = ...,
        batch_first: bool | None = ...,
    ) -> MultiheadAttention: ...
    @overload
    @classmethod
    def from_torch(
        cls,
        module: torch.nn.MultiheadAttention,
        *,
        similarity: Similarity | str = ...,
        position: Position | Sequence[Position | str] | str | None = ...,
        drop_in: Literal[True],
        batch_first: bool | None = ...,
    ) -> TorchMultiheadAttention: ...
    @classmethod
    def from_torch(
        cls,
        module: torch.nn.MultiheadAttention,
        *,
        similarity: Similarity | str = "dot",
        position: Position | Sequence[Position | str] | str | None = None,
        drop_in: bool = False,
        batch_first: bool | None = None,
    ) -> MultiheadAttention | TorchMultiheadAttention:
        """Creates a module with the weights of a torch.nn.MultiheadAttention.

        With the dot product and no position, its output in evaluation equals that of torch's module
        up to rounding. There is one exception: if all keys are masked for a query, its attention
        output (before out_proj) is 0 instead of NaN. The weights are copied; dtype, device,
        dropout, training mode and requires_grad are preserved. load_state_dict also accepts the
        state_dict of a torch module of the same sizes.

        Args:
            module: a torch.nn.MultiheadAttention. If a subclass overrides forward, the override is
                ignored.
            similarity: see MultiheadAttention.
            position: see MultiheadAttention.
            drop_in: whether to return a TorchMultiheadAttention, whose forward has the same
                arguments and results as torch's, so that calling code need not change.
            batch_first: with drop_in, batch_first of the new module; by default, that of `module`.
                Without drop_in, the new module accepts only (B, L, ...). If `module` has
                batch_first=False, pass True to confirm that your calls will use that layout.

        Raises:
            TypeError: module has the wrong type.
            ValueError: module has batch_first=False, unless drop_in or batch_first is True.
            NotImplementedError: module has add_bias_kv or add_zero_attn.
        """
        name = f"nn.{cls.__name__}.from_torch"
        drop_in = check_flag(name, "drop_in", drop_in)
        if batch_first is not None:
            batch_first = check_flag(name, "batch_first", batch_first)
        if not isinstance(module, torch.nn.MultiheadAttention):
            raise wrong_type(name, "module", module, "a torch.nn.MultiheadAttention")
        for refused, is_there in (
            ("add_bias_kv", module.bias_k is not None or module.bias_v is not None),
            ("add_zero_attn", module.add_zero_attn),
        ):
            if is_there:
                raise NotImplementedError(f"gnomon.{name}: {refused} is True; expected False")
        weight = module.out_proj.weight
        arguments: dict[str, Any] = {
            "similarity": similarity,
            "position": position,
            "dropout": module.dropout,
            "bias": module.out_proj.bias is not None,
            "kdim": module.kdim,
            "vdim": module.vdim,
            "device": weight.device,
            "dtype": weight.dtype,
        }
        if drop_in:
            return TorchMultiheadAttention._with_weights_of(module, batch_first, arguments)
        takes_batch_first = module.batch_first if batch_first is None else batch_first
        if not takes_batch_first:
            raise ValueError(
                f"gnomon.{name}: module has batch_first=False and expects (L, B, ...), but "
                "gnomon.nn.MultiheadAttention expects (B, L, ...); pass drop_in=True to keep "
                "calls unchanged, or batch_first=True to confirm that you will change them"
            )
        own = cls(module.embed_dim, module.num_heads, **arguments)
        if own.qk_dim * own.num_heads != own.embed_dim:
            raise ValueError(
                f"gnomon.{name}: similarity is {own.similarity!r}, which needs a head dimension "
                f"of {own.qk_dim}, but the module has {module.head_dim}; choose a similarity that "
                "fits"
            )
        own.load_state_dict(module.state_dict(), strict=False)
        sources = {"out_proj.weight": weight, "out_proj.bias": module.out_proj.bias}
        for part in ("q", "k", "v"):
            sources[f"{part}_proj.bias"] = module.in_proj_bias
            sources[f"{part}_proj.weight"] = (
                getattr(module, f"{part}_proj_weight")
                if module.in_proj_weight is None
                else module.in_proj_weight
            )
        for key, source in sources.items():
            if source is not None:
                own.get_parameter(key).requires_grad_(source.requires_grad)
        return own.train(module.training)

    def __repr__(self) -> str:
        # extra_repr() describes the projections completely unless they have been replaced.
        plain = (Projection, torch.nn.Linear, torch.nn.RMSNorm)
        if all(type(layer) in plain for layer in self.children()):
            return f"{self._get_name()}({self.extra_repr()})"
        return super().__repr__()

    def extra_repr(self) -> str:
        """Returns the non-default arguments, for print()."""
        defaults = {
            "kv_heads": self.num_heads,
            "qk_dim": self.embed_dim // self.num_heads,
            "similarity": "dot",
            "position": "none",
            "dropout": 0.0,
            "kdim": self.embed_dim,
            "vdim": self.embed_dim,
            "qk_norm": False,
            "gate": False,
            "tolerance": UNSET["tolerance"],
        }
        given = [
            f"{name}={getattr(self, name)!r}"
            for name, default in defaults.items()
            if getattr(self, name) != default
        ]
        if isinstance(self.q_proj, torch.nn.Linear) and self.q_proj.bias is None:
            given.append("bias=False")
        if self.sink is not None:
            given.append("sink=True")
        return ", ".join([str(self.embed_dim), str(self.num_heads), *given])


def _split_in_proj(
    module: MultiheadAttention, state: dict[str, Any], prefix: str, *arguments: Any
) -> None:
    """Converts the entries of a torch.nn.MultiheadAttention state_dict to this module's names."""
    for kept in ("bias_k", "bias_v"):
        if prefix + kept in state:
            raise NotImplementedError(
                f"gnomon.nn.MultiheadAttention: the state_dict contains {prefix}{kept} of "
                "add_bias_kv, which is not supported; expected the state_dict of a module without "
                "it"
            )
    for kind in ("weight", "bias"):
        joined = state.get(f"{prefix}in_proj_{kind}")
        if joined is None:
            continue
        if joined.shape[0] % 3 != 0:
            raise ValueError(
                f"gnomon.nn.MultiheadAttention: {prefix}in_proj_{kind} has shape "
                f"{list(joined.shape)}; expected 3 * embed_dim rows"
            )
        del state[f"{prefix}in_proj_{kind}"]
        for part, rows in zip("qkv", joined.chunk(3), strict=True):
            state[f"{prefix}{part}_proj.{kind}"] = rows
    for part in "qkv":
        if f"{prefix}{part}_proj_weight" in state:
            state[f"{prefix}{part}_proj.weight"] = state.pop(f"{prefix}{part}_proj_weight")
