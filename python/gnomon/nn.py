"""Modules. Positions and similarities are terms or specifications (include/gnomon/catalogue.h).

The parameters have the same names as in C++ (include/gnomon/torch/nn.h).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from gnomon._attention import Integers, MaskArguments, Rows, check_rows, lower_call, takes
from gnomon._checks import (
    check_flag,
    check_integer,
    check_integers,
    check_number,
    check_optional_integer,
    check_optional_integers,
    check_string,
    check_tensors,
    wrong_type,
)
from gnomon._library import ops
from gnomon._position import Position, Sum, to_positions
from gnomon._similarity import Similarity, to_similarity
from gnomon._terms import to_spec

__all__ = [
    "CAPE",
    "Convolutional",
    "KVCache",
    "LearnedAbsolute",
    "LearnedValue",
    "LorentzMultiheadAttention",
    "MultiheadAttention",
    "Sinusoidal",
    "TokenCache",
    "TokenEncoding",
    "TokenPosition",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "attention_position",
    "resize_grid",
    "resize_grid_table",
]

_SPEC = "a specification, a string"
# What autocast makes one type of.
_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


class KVCache:
    """Projected keys and values of the tokens so far, before any rotation or map.

    k (B, Hkv, L, D) and v (B, Hkv, L, Dv), or None; in projections what else a position makes of
    tokens that are keys, (B, H, L, ...). positions (B, L) or (L,) say where they stand, if the
    calls do; None else.
    """

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.projections: list[Tensor] = []
        self.positions: Tensor | None = None

    def length(self) -> int:
        """How many tokens it holds."""
        return 0 if self.k is None else self.k.shape[2]

    def joined(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values with those of more tokens, which the cache does not keep."""
        if self.k is None or self.v is None:
            return k, v
        for name, old, new in (("k", self.k, k), ("v", self.v, v)):
            if old.shape[:2] != new.shape[:2] or old.shape[3] != new.shape[3]:
                raise ValueError(
                    f"gnomon.nn.KVCache: {name} has shape {list(new.shape)} and the cache "
                    f"{list(old.shape)}; expected the same but for the length"
                )
        return torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)

    def joined_projections(self, projections: list[Tensor]) -> list[Tensor]:
        """The same of what else is made of more tokens."""
        if self.k is None:
            return projections
        if len(projections) != len(self.projections):
            raise ValueError(
                f"gnomon.nn.KVCache: it has {len(self.projections)} projections and takes "
                f"{len(projections)}; expected the same number"
            )
        return [torch.cat(pair, 2) for pair in zip(self.projections, projections, strict=True)]

    def joined_positions(self, positions: Tensor | None, batch: int) -> Tensor | None:
        """The same of where more tokens stand.

        Tokens that came without positions before others with them stand one after the other.
        """
        if self.k is None:
            return positions
        if positions is None:
            if self.positions is not None:
                raise ValueError(
                    "gnomon.nn.KVCache: it has positions of its tokens; expected those of the "
                    "tokens that it takes"
                )
            return None
        known = self.positions
        if known is None:
            known = torch.arange(self.length(), device=positions.device)
        if 3 in (known.dim(), positions.dim()):
            # Coordinates.
            if known.dim() != positions.dim() or known.shape[2] != positions.shape[2]:
                raise ValueError(
                    "gnomon.nn.KVCache: its tokens have positions of another number of axes; "
                    "expected positions as those of the first tokens"
                )
            if len(known) != len(positions):
                known, positions = (one.expand(batch, -1, -1) for one in (known, positions))
            return torch.cat([known, positions], 1)
        axes = max(known.dim(), positions.dim())
        parts = [one if one.dim() == axes else one.expand(batch, -1) for one in (known, positions)]
        return torch.cat(parts, -1)

    def append(
        self,
        k: Tensor,
        v: Tensor,
        projections: Sequence[Tensor] = (),
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Adds tokens; returns all keys and values."""
        of_keys = self.joined_projections(list(projections))
        places = self.joined_positions(positions, k.shape[0])
        self.k, self.v = self.joined(k, v)
        self.projections, self.positions = of_keys, places
        return self.k, self.v

    def reset(self) -> None:
        """Forgets all tokens."""
        self.k = self.v = self.positions = None
        self.projections = []


def attention_position(position: str) -> str:
    """The components of a position that act in attention, "none" where there are none.

    A model whose users name a position hands it to TokenPosition, which takes the components that
    are added to embeddings, and this to its MultiheadAttention, which refuses those.

    Raises:
        ValueError: a mistake in the specification.
    """
    check_string("nn.attention_position", "position", position, _SPEC)
    acts: str = ops.attention_position(position)
    return acts


class LearnedValue(NamedTuple):
    """A value that a module has learned, as it acts, and where it started.

    start is None where the module does not know it: of tables, and of tensors of terms.
    """

    value: Tensor
    start: Tensor | None


class MultiheadAttention(torch.nn.Module):
    """softmax(similarity + position) over heads, between projections.

    Submodules q_proj, k_proj, v_proj, out_proj: weights N(0, 1 / in_features), biases 0, so that
    inputs of unit variance give q and k of unit variance and logits of spread 1. Parameters of the
    similarity and of the position are (H,) tensors "<component>_<name>_theta" that start at 0,
    with value = start * exp(5 theta), "gamma_theta" or "beta_theta" among them, and tables: of
    biases, which start at 0, "t5_table" (buckets, H) and "grid_bias_table" (H, 2 height - 1,
    2 width - 1) among them; of content terms, which start as N(0, 1 / columns), "relative_table"
    (2 max_offset + 1, D) among them; "transformer_xl_u" and "transformer_xl_v" (H, D) start at 0,
    and "transformer_xl_r" (H, D, embed_dim) maps sinusoids to rows. What is made of tokens in each
    call has a weight (H columns, embed_dim or kdim) and may have a bias (H columns):
    "forget_log_forget_weight" and "forget_log_forget_bias", "content_bias_query_weight". The start
    of gamma or beta, the buffer "gamma_start" or "beta_start", makes the spread of the logits of
    N(0, 1) tokens 1.

    Args:
        embed_dim: columns of the input and the output.
        num_heads: query heads; a divisor of embed_dim.
        kv_heads: heads of keys and values, a divisor of num_heads; num_heads by default.
        qk_dim: columns of one head of q and k; embed_dim / num_heads by default, or the only number
            that the similarity takes (1 of "additive").
        similarity: a specification, "penumbral:score=height2", or one of gnomon.similarity.
        position: a specification, "rope+hype:mu=0.001:tau=learned", one of gnomon.position, or
            several of them for their sum, "rope" + ALiBi(slopes); None is "none". A component that
            is added to embeddings, which can do nothing here, is an error: see TokenPosition and
            attention_position.
        dropout: the probability of dropping a weight, in training.
        bias: whether the projections have one.
        max_length: rows of a learned table of positions ("absolute_keys"), unless the component
            has a length.
        kdim: columns of key, embed_dim by default.
        vdim: columns of value, embed_dim by default.
        qk_norm: whether q and k of each head are normed before anything else acts on them, by the
            RMSNorms q_norm and k_norm (Henry et al. 2020; Dehghani et al. 2023).
        gate: whether the output of attention is multiplied by sigmoid(gate_proj(query)) (Qiu et al.
            2025).
        sink: whether each head has a learned sink, as of gnomon.attention: the parameter sink (H,),
            which starts at 0.
        tolerance: of gnomon.attention.

    A tensor of a term is held under the name "<component>_<name>", of a similarity "<name>", and
    read as it is: a parameter where it requires grad, the same object if it is a
    torch.nn.Parameter, and else a buffer. The table of OffsetBias is then one of positions, for all
    lengths up to its own, as is that of "offset_bias:length=512", "offset_bias_table"
    (H, 2 length - 1).
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
        tolerance: float = 2.0**-24,
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
        widths = {
            name: embed_dim if width is None else check_integer(operator, name, width)
            for name, width in (("kdim", kdim), ("vdim", vdim))
        }
        for name, width in widths.items():
            if width < 1:
                raise ValueError(f"gnomon.{operator}: {name} is {width}; expected at least 1")
        bias = check_flag(operator, "bias", bias)
        dropout = check_number(operator, "dropout", dropout)
        if not 0 <= dropout <= 1:
            raise ValueError(f"gnomon.nn.MultiheadAttention: dropout is {dropout}; expected 0 to 1")
        tolerance = check_number(operator, "tolerance", tolerance)
        if not 0 <= tolerance < 1:
            raise ValueError(
                f"gnomon.{operator}: tolerance is {tolerance}; expected at least 0, less than 1"
            )
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads != 0:
            raise ValueError(
                f"gnomon.nn.MultiheadAttention: embed_dim is {embed_dim} and num_heads "
                f"{num_heads}; expected a positive multiple"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.kv_heads = num_heads if kv_heads is None else kv_heads
        self.qk_dim = (
            ops.module_head_columns(similarity_spec, embed_dim // num_heads)
            if qk_dim is None
            else qk_dim
        )
        #: The specifications; "<name>=tensor" says what came as a tensor.
        self.similarity = similarity_spec
        self.position = position_spec
        self.dropout = dropout
        self.tolerance = tolerance
        if self.kv_heads < 1 or num_heads % self.kv_heads != 0:
            raise ValueError(
                f"gnomon.nn.MultiheadAttention: kv_heads is {kv_heads}; expected a divisor of "
                f"num_heads = {num_heads}"
            )
        if self.qk_dim < 1:
            raise ValueError(
                f"gnomon.nn.MultiheadAttention: qk_dim is {qk_dim}; expected at least 1"
            )
        value_dim = embed_dim // num_heads
        self.kdim, self.vdim = widths["kdim"], widths["vdim"]
        self.q_proj = torch.nn.Linear(embed_dim, num_heads * self.qk_dim, bias=bias)
        self.k_proj = torch.nn.Linear(self.kdim, self.kv_heads * self.qk_dim, bias=bias)
        self.v_proj = torch.nn.Linear(self.vdim, self.kv_heads * value_dim, bias=bias)
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, bias=bias)
        self.qk_norm = check_flag(operator, "qk_norm", qk_norm)
        self.gate = check_flag(operator, "gate", gate)
        if self.gate:
            self.gate_proj = torch.nn.Linear(embed_dim, embed_dim, bias=bias)
        if self.qk_norm:
            self.q_norm = torch.nn.RMSNorm(self.qk_dim, eps=1e-6)
            self.k_norm = torch.nn.RMSNorm(self.qk_dim, eps=1e-6)
        has_sink = check_flag(operator, "sink", sink)
        sink_start = torch.nn.Parameter(torch.zeros(num_heads)) if has_sink else None
        self.register_parameter("sink", sink_start)
        names, starts, learned = ops.module_tensors(
            self.similarity,
            self.position,
            num_heads,
            self.qk_dim,
            value_dim,
            max_length,
            embed_dim,
            self.kdim,
            given,
        )
        self._has_projections: bool = ops.module_has_projections(self.position)
        self._term_names = tuple(names)
        for name, start, is_learned in zip(names, starts, learned, strict=True):
            own = next((tensor for tensor in given if tensor is start), None)
            if isinstance(own, torch.nn.Parameter) and is_learned:
                self.register_parameter(name, own)
                continue
            value = start.detach().to(torch.get_default_dtype())
            value = value if own is None else value.clone()
            if is_learned:
                self.register_parameter(name, torch.nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_split_in_proj)

    def reset_parameters(self) -> None:
        """Draws the projections anew."""
        gate = [self.gate_proj] if self.gate else []
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj, *gate):
            torch.nn.init.normal_(layer.weight, 0, layer.in_features**-0.5)
            if layer.bias is not None:
                torch.nn.init.zeros_(layer.bias)

    @takes(MaskArguments)
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        key_padding_mask: Tensor | None = None,
        **arguments: Unpack[MaskArguments],
    ) -> Tensor:
        """Attention of query (B, Lq, embed_dim) over key (B, Lk, kdim) and value (B, Lk, vdim).

        key is query by default, value is key. The keys and values of this call are appended to the
        cache, the queries see all of it, and query_offset is its length before by default;
        positions and key_positions are those of the tokens of this call, and the cache keeps them.
        key_padding_mask (B, Lk), as in torch.nn, is True, or -inf, where a key is hidden, of the
        cache, too; where padding lies at the ends, key_lengths and key_starts say so in fewer
        numbers. The other arguments are those of gnomon.attention. Returns (B, Lq, embed_dim).
        """
        key = query if key is None else key
        value = key if value is None else value
        for name, tokens, width, layer in (
            ("query", query, self.embed_dim, self.q_proj),
            ("key", key, self.kdim, self.k_proj),
            ("value", value, self.vdim, self.v_proj),
        ):
            _check_embeddings("MultiheadAttention", name, tokens, width, layer)
        q, k = self._queries_and_keys(query, key)
        v = self.v_proj(value).unflatten(2, (self.kv_heads, -1)).transpose(1, 2)
        if cache is not None:
            if not isinstance(cache, KVCache):
                raise wrong_type("nn.MultiheadAttention", "cache", cache, "a KVCache, or None")
            # Positions of several axes do not say what a query sees.
            places = arguments.get("positions")
            says_order = places is not None and check_integers("nn", "positions", places).dim() < 3
            if arguments.get("query_offset") is None and not says_order:
                arguments["query_offset"] = cache.length()
            places = cache.joined_positions(self._key_positions(query, key, arguments), len(k))
            if places is not None:
                arguments["key_positions"] = places
            # The cache takes them once nothing can be refused any more.
            k, v = cache.joined(k, v)
        tensors, of_keys = self._term_tensors(query, key)
        projections = [tensors[n] for n in of_keys]
        if cache is not None:
            projections = cache.joined_projections(projections)
            for n, joined in zip(of_keys, projections, strict=True):
                tensors[n] = joined
        if key_padding_mask is not None:
            arguments["query_segments"], arguments["key_segments"] = _segments_of_padding(
                key_padding_mask,
                q,
                k,
                arguments.get("query_segments"),
                arguments.get("key_segments"),
            )
        call = lower_call(
            "nn.MultiheadAttention",
            q,
            arguments,
            MaskArguments,
            dropout=self.dropout if self.training else 0.0,
            sink=self.sink,
            tolerance=self.tolerance,
        )
        o = ops.module_attention.default(
            q,
            k,
            v,
            self.similarity,
            self.position,
            tensors,
            *call.values(),
        )
        o = o.transpose(1, 2).flatten(2)
        if self.gate:
            o = o * self.gate_proj(query).sigmoid()
        out: Tensor = self.out_proj(o)
        if cache is not None:
            cache.k, cache.v = k, v
            cache.projections, cache.positions = projections, places
        return out

    def _key_positions(
        self, query: Tensor, key: Tensor, arguments: Mapping[str, Any]
    ) -> Tensor | None:
        """Where the keys of a call stand, as a tensor; None where it does not say."""
        operator = "nn.MultiheadAttention"
        positions = arguments.get("key_positions")
        if positions is None:
            positions = arguments.get("positions")
            if positions is not None and query.shape[1] != key.shape[1]:
                raise ValueError(
                    f"gnomon.{operator}: key_positions is None, query has {query.shape[1]} tokens "
                    f"and key {key.shape[1]}; expected the positions of the keys"
                )
        return check_optional_integers(operator, "positions", positions, query)

    def _term_tensors(self, query: Tensor, key: Tensor) -> tuple[list[Tensor], list[int]]:
        """Those of the similarity and of the position for a call; which of them are of keys."""
        tensors = [getattr(self, name) for name in self._term_names]
        if not self._has_projections:
            return tensors, []
        return ops.module_projections(
            self.similarity, self.position, self.num_heads, tensors, query, key
        )

    def _queries_and_keys(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, Lq, qk_dim) and (B, Hkv, Lk, qk_dim)."""
        q = self.q_proj(query).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        k = self.k_proj(key).unflatten(2, (self.kv_heads, -1)).transpose(1, 2)
        return (self.q_norm(q), self.k_norm(k)) if self.qk_norm else (q, k)

    @takes(MaskArguments)
    def attention_weights(
        self,
        query: Tensor,
        key: Tensor | None = None,
        rows: Rows = -1,
        **arguments: Unpack[MaskArguments],
    ) -> Tensor:
        """The weights (B, H, n, Lk) of n rows of query (B, Lq, embed_dim), the last by default.

        As gnomon.attention_weights, with the projections, the similarity and the position of this
        module; without dropout.
        """
        operator = "nn.MultiheadAttention.attention_weights"
        key = query if key is None else key
        _check_embeddings("MultiheadAttention", "query", query, self.embed_dim, self.q_proj)
        _check_embeddings("MultiheadAttention", "key", key, self.kdim, self.k_proj)
        q, k = self._queries_and_keys(query, key)
        weights: Tensor = ops.module_attention_weights.default(
            q,
            k,
            check_rows(operator, rows, q),
            self.similarity,
            self.position,
            self._term_tensors(query, key)[0],
            self.embed_dim // self.num_heads,
            *lower_call(operator, q, arguments, MaskArguments, sink=self.sink).values(),
        )
        return weights

    @torch.no_grad()
    def learned_values(self) -> dict[str, LearnedValue]:
        """What the similarity and the position have learned, as it acts, beside its start.

        By the names "gamma", "alibi_slopes", "hype_tau", "t5_table": of a value for each head
        (H,) the value itself, start * exp(5 theta), not theta. Copies, without gradients; empty
        where nothing is learned.
        """
        names, values, starts = ops.module_learned(
            self.similarity,
            self.position,
            self.num_heads,
            self.qk_dim,
            self.embed_dim // self.num_heads,
            [getattr(self, name) for name in self._term_names],
        )
        return {
            name: LearnedValue(value.clone(), start.clone() if start.numel() > 0 else None)
            for name, value, start in zip(names, values, starts, strict=True)
        }

    @classmethod
    def from_torch(
        cls,
        module: torch.nn.MultiheadAttention,
        *,
        similarity: Similarity | str = "dot",
        position: Position | Sequence[Position | str] | str | None = None,
    ) -> MultiheadAttention:
        """A module with the weights of a torch.nn.MultiheadAttention, copied.

        With the dot product and no position its output in evaluation is that of torch's module, up
        to rounding; dtype, device, dropout, mode and requires_grad are kept. Tokens are (B, L, ...)
        whatever module.batch_first. Rows that see no key give 0, not NaN. A state_dict of torch's
        module can also be loaded into a module of the same sizes.

        Raises:
            TypeError: another module.
            NotImplementedError: add_bias_kv or add_zero_attn.
        """
        name = f"nn.{cls.__name__}.from_torch"
        if type(module) is not torch.nn.MultiheadAttention:
            raise wrong_type(name, "module", module, "a torch.nn.MultiheadAttention")
        for refused, is_there in (
            ("add_bias_kv", module.bias_k is not None or module.bias_v is not None),
            ("add_zero_attn", module.add_zero_attn),
        ):
            if is_there:
                raise NotImplementedError(f"gnomon.{name}: {refused} is True; expected False")
        own = cls(
            module.embed_dim,
            module.num_heads,
            similarity=similarity,
            position=position,
            dropout=module.dropout,
            bias=module.out_proj.bias is not None,
            kdim=module.kdim,
            vdim=module.vdim,
        )
        weight = module.out_proj.weight
        own.to(device=weight.device, dtype=weight.dtype)
        if own.qk_dim * own.num_heads != own.embed_dim:
            raise ValueError(
                f"gnomon.{name}: similarity is {own.similarity!r}, whose heads have {own.qk_dim} "
                f"columns, and those of the module {module.head_dim}; expected the same"
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
        # Projections are in the arguments, unless others have taken their place.
        plain = (torch.nn.Linear, torch.nn.RMSNorm)
        if all(type(layer) in plain for layer in self.children()):
            return f"{self._get_name()}({self.extra_repr()})"
        return super().__repr__()

    def extra_repr(self) -> str:
        """The arguments that are not the default, for print()."""
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
    """Renames what a state_dict of torch.nn.MultiheadAttention has to what one of ours has."""
    for kept in ("bias_k", "bias_v"):
        if prefix + kept in state:
            raise NotImplementedError(
                f"gnomon.nn.MultiheadAttention: the state has {prefix}{kept}, of add_bias_kv; "
                "expected a module without it"
            )
    for kind in ("weight", "bias"):
        joined = state.get(f"{prefix}in_proj_{kind}")
        if joined is None:
            continue
        if joined.shape[0] % 3 != 0:
            raise ValueError(
                f"gnomon.nn.MultiheadAttention: {prefix}in_proj_{kind} has shape "
                f"{list(joined.shape)}; expected three times embed_dim rows"
            )
        del state[f"{prefix}in_proj_{kind}"]
        for part, rows in zip("qkv", joined.chunk(3), strict=True):
            state[f"{prefix}{part}_proj.{kind}"] = rows
    for part in "qkv":
        if f"{prefix}{part}_proj_weight" in state:
            state[f"{prefix}{part}_proj.weight"] = state.pop(f"{prefix}{part}_proj_weight")


def is_hidden(operator: str, argument: str, mask: object) -> Tensor:
    """Of a mask of torch.nn, True or -inf where hidden, the booleans."""
    if not isinstance(mask, Tensor):
        raise wrong_type(operator, argument, mask, "a Tensor, or None")
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(
            f"gnomon.{operator}: {argument} has dtype {mask.dtype}; expected booleans, or numbers "
            "that are 0 or -inf"
        )
    hidden = mask == -torch.inf
    if not torch.compiler.is_compiling() and not bool((hidden | (mask == 0)).all()):
        raise NotImplementedError(
            f"gnomon.{operator}: {argument} has numbers other than 0 and -inf, which are added to "
            "scores; expected booleans"
        )
    return hidden


def _segments_of_padding(
    mask: Tensor, q: Tensor, k: Tensor, query_segments: object, key_segments: object
) -> tuple[Tensor, Tensor]:
    """Segments by which all queries see the keys that a key_padding_mask leaves."""
    operator = "nn.MultiheadAttention"
    hidden = is_hidden(operator, "key_padding_mask", mask)
    if hidden.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"gnomon.{operator}: key_padding_mask has shape {list(hidden.shape)}; expected (B, Lk) "
            f"= ({k.shape[0]}, {k.shape[2]})"
        )
    if query_segments is not None or key_segments is not None:
        raise ValueError(
            f"gnomon.{operator}: key_padding_mask and segments are both given; expected keys that "
            "are hidden to be of a segment of their own"
        )
    return torch.zeros(q.shape[2], dtype=torch.int64, device=hidden.device), hidden.long()


class TokenCache:
    """What token encodings keep of the tokens so far.

    embeddings (B, N, dim), of those that the next tokens read (a convolution's), or None.
    """

    def __init__(self) -> None:
        self.embeddings: Tensor | None = None
        self._length = 0

    def length(self) -> int:
        """How many tokens there were."""
        return self._length

    def append(self, embeddings: Tensor, history: int) -> None:
        """Adds tokens; keeps the last `history` of all."""
        self._length += embeddings.shape[1]
        if history > 0:
            parts = [embeddings] if self.embeddings is None else [self.embeddings, embeddings]
            self.embeddings = torch.cat(parts, 1)[:, -history:]

    def reset(self) -> None:
        """Forgets all tokens."""
        self.embeddings = None
        self._length = 0


class TokenEncoding(torch.nn.Module):
    """A component of a position that is added to embeddings.

    What it learns are parameters with the names that the classes below document.

    Args:
        spec: one component of the catalogue, "conv:kernel=64".
        dim: columns of the embeddings.
        causal: whether no token may see a later one.
    """

    def __init__(self, spec: str, dim: int, causal: bool = False) -> None:
        super().__init__()
        dim, causal = _check_encoding("TokenEncoding", "spec", spec, dim, causal)
        names, starts, max_length, history = ops.token_encoding_tensors(spec, dim, causal)
        self.spec = spec
        self.dim = dim
        self.causal = causal
        #: How many positions it is defined at, None for all.
        self.max_length: int | None = max_length
        #: How many tokens before the first one it reads.
        self.history: int = history
        self._tensor_names = tuple(names)
        for name, start in zip(names, starts, strict=True):
            value = start.to(torch.get_default_dtype())
            self.register_parameter(name, torch.nn.Parameter(value))

    def encode(
        self,
        embeddings: Tensor,
        offset: int = 0,
        before: Tensor | None = None,
        lengths: Integers | None = None,
        generator: torch.Generator | None = None,
        positions: Integers | None = None,
    ) -> Tensor:
        """What forward adds; it broadcasts with the embeddings.

        before (B, N, dim) are the embeddings of the N tokens before the first one.
        """
        encoding: Tensor = ops.encode_tokens(
            embeddings,
            self.spec,
            self.dim,
            self.causal,
            [getattr(self, name) for name in self._tensor_names],
            check_integer("nn", "offset", offset),
            self.training,
            check_optional_integers("nn", "lengths", lengths, embeddings),
            before,
            generator,
            check_optional_integers("nn", "positions", positions, embeddings),
        )
        return encoding

    def forward(
        self,
        embeddings: Tensor,
        offset: int | None = None,
        *,
        lengths: Integers | None = None,
        cache: TokenCache | None = None,
        generator: torch.Generator | None = None,
        positions: Integers | None = None,
    ) -> Tensor:
        """embeddings (B, L, dim) and their encoding, their sum; the same shape.

        The first token is at position `offset`: by default the length of the cache before the call,
        and 0 without one. The tokens from lengths on, (B,) integers or one for all, are padding,
        which no other token sees; without a cache only. The tokens of a call follow those that went
        through the cache. What training draws comes from the generator, Torch's own by default.
        positions (B, L), or (L,) for all, are integers: where the tokens stand, instead of one
        after the other from offset on.
        """
        return _add_encodings([self], embeddings, offset, lengths, cache, generator, positions)

    def extra_repr(self) -> str:
        """The arguments, for print()."""
        return f"{self.spec!r}, {self.dim}, causal={self.causal}"


class Sinusoidal(TokenEncoding):
    """Adds the sinusoids of their positions to embeddings; see gnomon.sinusoid.

    With a shape, those of the coordinates of tokens on a grid; see gnomon.grid_sinusoid.
    """

    def __init__(
        self,
        dim: int,
        layout: str = "interleaved",
        shape: Sequence[int] | None = None,
        prefix: int = 0,
    ) -> None:
        super().__init__(to_spec("sinusoidal", layout=layout, shape=shape, prefix=prefix), dim)


class LearnedAbsolute(TokenEncoding):
    """Adds a learned table of positions to embeddings.

    Parameter `table` (max_length, dim), which starts as N(0, 0.02^2) (Radford et al. 2019).
    """

    def __init__(self, max_length: int, dim: int) -> None:
        max_length = check_integer("nn.LearnedAbsolute", "max_length", max_length)
        super().__init__(to_spec("learned", length=max_length), dim)


class Convolutional(TokenEncoding):
    """Adds GELU(conv(x)), a grouped convolution over the tokens (Baevski et al. 2020, wav2vec 2.0).

    Token i sees `kernel` tokens from i - kernel // 2 on or, causal, the last `kernel` up to itself.
    The weight is weight_g weight_v / |weight_v|, normalised for each place of the kernel.
    Parameters `weight_g` (1, 1, kernel), `weight_v` (dim, dim / groups, kernel), which starts as
    N(0, 4 / (kernel dim)), and `bias` (dim), which starts at 0.
    """

    def __init__(self, dim: int, kernel: int = 128, groups: int = 16, causal: bool = False) -> None:
        kernel = check_integer("nn.Convolutional", "kernel", kernel)
        groups = check_integer("nn.Convolutional", "groups", groups)
        super().__init__(to_spec("conv", kernel=kernel, groups=groups), dim, causal)


class CAPE(TokenEncoding):
    """Continuous augmented positional embeddings (Likhomanenko et al. 2021).

    Adds sinusoids of positions that are shifted, jittered and scaled at random in training, anew
    for each call and each sequence; as they are in evaluation. On a grid, wave n of the dim / 2 is
    [cos | sin](pi 10^(n / (dim / 2 - 1)) (x cos n + y sin n)), x the column of a token and y its
    row, each from -1, the first, to 1, the last.

    Args:
        dim: columns of the embeddings, an even number.
        global_shift: bound of the shift of all positions; 5 by default.
        local_shift: bound of the shift of each position, in spacings of the positions; 0.5.
        global_scale: bound, with its inverse, of the factor of all positions; 1.03.
        normalize: subtract the mean of the positions first; in a sequence only.
        shape: (height, width) of a grid, the numbers of its rows and of its columns, whose
            coordinates lie in [-1, 1]: global_shift is then 0.5 and global_scale 1.4 by default.
            Tokens are in row-major order: row by row, x running fastest.
        prefix: tokens before the grid, which get nothing.
    """

    def __init__(
        self,
        dim: int,
        global_shift: float | None = None,
        local_shift: float | None = None,
        global_scale: float | None = None,
        normalize: bool = False,
        shape: Sequence[int] | None = None,
        prefix: int = 0,
    ) -> None:
        spec = to_spec(
            "cape",
            global_shift=global_shift,
            local_shift=local_shift,
            global_scale=global_scale,
            normalize=normalize,
            shape=shape,
            prefix=prefix,
        )
        super().__init__(spec, dim)


class TokenPosition(torch.nn.Module):
    """Adds the token encodings of a position to embeddings: sinusoidal, learned, conv, cape.

    Nothing for the components that act in attention. Each encoding reads the embeddings that came
    in, so that their order does not matter. Submodules "<name><n>", n counting those of a name.

    Args:
        position: a specification, or what else MultiheadAttention takes.
        dim: columns of the embeddings.
        max_length: rows of a learned table; "learned:length=N" in the specification overrides it.
        causal: whether no token may see a later one.
    """

    def __init__(
        self,
        position: Position | Sequence[Position | str] | str | None,
        dim: int,
        max_length: int,
        causal: bool = False,
    ) -> None:
        super().__init__()
        position, _ = Sum(to_positions("nn.TokenPosition", position))._lower()
        dim, causal = _check_encoding("TokenPosition", "position", position, dim, causal)
        max_length = check_integer("nn.TokenPosition", "max_length", max_length)
        self.position = position
        self.dim = dim
        count: dict[str, int] = {}
        names, specs, end = ops.token_encodings(position, max_length)
        # Of positions in attention, too, such as a grid of alibi's.
        ends: list[int] = [] if end is None else [end]
        for name, spec in zip(names, specs, strict=True):
            n = count[name] = count.get(name, -1) + 1
            encoding = TokenEncoding(spec, dim, causal)
            self.add_module(f"{name}{n}", encoding)
            if encoding.max_length is not None:
                ends.append(encoding.max_length)
        #: The longest length at which the whole position is defined, None for any.
        self.max_length: int | None = min(ends, default=None)

    def forward(
        self,
        embeddings: Tensor,
        offset: int | None = None,
        *,
        lengths: Integers | None = None,
        cache: TokenCache | None = None,
        generator: torch.Generator | None = None,
        positions: Integers | None = None,
    ) -> Tensor:
        """embeddings (B, L, dim); the same shape. The arguments are those of TokenEncoding."""
        _check_embeddings("TokenPosition", "embeddings", embeddings, self.dim)
        return _add_encodings(
            list(self.children()), embeddings, offset, lengths, cache, generator, positions
        )


def _add_encodings(
    encodings: Sequence[Any],
    embeddings: Tensor,
    offset: int | None,
    lengths: Integers | None,
    cache: TokenCache | None,
    generator: torch.Generator | None,
    positions: Integers | None,
) -> Tensor:
    """Adds to embeddings what each of them makes of them."""
    check_tensors("nn", embeddings=embeddings)
    lengths = check_optional_integers("nn", "lengths", lengths, embeddings)
    offset = check_optional_integer("nn", "offset", offset)
    if cache is not None and not isinstance(cache, TokenCache):
        raise wrong_type("nn", "cache", cache, "a TokenCache, or None")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise wrong_type("nn", "generator", generator, "a torch.Generator, or None")
    if lengths is not None and cache is not None:
        raise ValueError(
            "gnomon.nn: lengths and a cache are both given; expected lengths in a call of all "
            "tokens, without a cache"
        )
    positions = check_optional_integers("nn", "positions", positions, embeddings)
    if positions is not None and offset is not None:
        raise ValueError("gnomon.nn: positions and offset are both given; expected one of them")
    if offset is None:
        offset = 0 if cache is None or positions is not None else cache.length()
    before = None if cache is None else cache.embeddings
    tokens = embeddings
    for encoding in encodings:
        tokens = tokens + encoding.encode(embeddings, offset, before, lengths, generator, positions)
    if cache is not None:
        cache.append(embeddings, max((encoding.history for encoding in encodings), default=0))
    return tokens


def _check_encoding(
    module: str, argument: str, spec: object, dim: object, causal: object
) -> tuple[int, bool]:
    """dim and causal, as the operators take them."""
    check_string(f"nn.{module}", argument, spec, _SPEC)
    return check_integer(f"nn.{module}", "dim", dim), check_flag(f"nn.{module}", "causal", causal)


def _check_embeddings(
    module: str, argument: str, tokens: Tensor, dim: int, layer: torch.nn.Module | None = None
) -> None:
    """layer is the one that reads the tokens."""
    check_tensors(f"nn.{module}", **{argument: tokens})
    if tokens.dim() != 3 or tokens.shape[2] != dim:
        raise ValueError(
            f"gnomon.nn.{module}: {argument} has shape {tuple(tokens.shape)}; expected "
            f"(B, L, {dim})"
        )
    # Other layers, of quantized weights among them, know themselves what they read.
    if layer is None or type(layer) is not torch.nn.Linear:
        return
    weight = layer.weight
    if tokens.device != weight.device:
        raise TypeError(
            f"gnomon.nn.{module}: {argument} is on {tokens.device} and the module on "
            f"{weight.device}; expected the same"
        )
    if tokens.dtype == weight.dtype:
        return
    cast = all(dtype in _AUTOCAST for dtype in (tokens.dtype, weight.dtype))
    if not (cast and torch.is_autocast_enabled(tokens.device.type)):
        raise TypeError(
            f"gnomon.nn.{module}: {argument} has dtype {tokens.dtype} and the module "
            f"{weight.dtype}; expected the same"
        )


# They are made of the modules above.
from gnomon._layers import (  # noqa: E402
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    resize_grid,
    resize_grid_table,
)
from gnomon._lorentz import LorentzMultiheadAttention  # noqa: E402
