"""torch.nn.MultiheadAttention with any similarity and position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnomon._attention import MaskArguments, Rows, check_rows
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
from gnomon.nn._checks import check_factory
from gnomon.nn._heads import split_heads
from gnomon.nn._held_terms import HeldTerms, TermSizes, named_as
from gnomon.nn._masks import is_causal_mask, pair_mask, to_masks

_NAME = "nn.TorchMultiheadAttention"


class _Output(torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
    """torch's output projection, with a reset_parameters() that also sets the bias to 0."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)


class TorchMultiheadAttention(HeldTerms, torch.nn.MultiheadAttention):
    """Drop-in replacement for torch.nn.MultiheadAttention with any similarity and position.

    This subclass keeps torch's arguments, call signature, results and state_dict, so it works in
    code written for torch.nn.MultiheadAttention, such as torch.nn.TransformerEncoderLayer and
    vision models. To convert an existing module, use MultiheadAttention.from_torch(module,
    drop_in=True).

    With the dot product and no position, the results equal torch's up to rounding. There is one
    exception: if all keys are masked for a query, its attention output (before out_proj) is 0
    instead of NaN. See MultiheadAttention for the parameter names of the similarity and the
    position. torch.nn.TransformerEncoderLayer does not use its fused path with this module.

    Args:
        embed_dim: embedding dimension of the query and the output.
        num_heads: number of heads; must divide embed_dim.
        dropout: probability of dropping an attention weight during training.
        bias: whether the projections have biases.
        add_bias_kv: must be False.
        add_zero_attn: must be False. With the dot product, use the position "sink" instead. Its
            initial effect is the same, but it is learned.
        kdim: embedding dimension of key; embed_dim by default.
        vdim: embedding dimension of value; embed_dim by default.
        batch_first: whether tokens are (B, L, ...) rather than (L, B, ...).
        device: device of parameters and buffers; the default device if None.
        dtype: floating-point dtype of parameters and buffers; the default dtype if None.
        similarity: see MultiheadAttention.
        position: see MultiheadAttention.

    Raises:
        ValueError: an invalid value, or a similarity that needs a head_dim other than embed_dim /
            num_heads.
        TypeError: an argument of the wrong type.
        NotImplementedError: add_bias_kv or add_zero_attn is True.

    Example:
        >>> layer = gnomon.nn.TorchMultiheadAttention(64, 4, batch_first=True, position="alibi")
        >>> x = torch.randn(2, 16, 64)
        >>> y, _ = layer(x, x, x, need_weights=False)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        similarity: Similarity | str = "dot",
        position: Position | Sequence[Position | str] | str | None = None,
    ) -> None:
        made = check_factory(_NAME, device, dtype)
        embed_dim = check_integer(_NAME, "embed_dim", embed_dim)
        num_heads = check_integer(_NAME, "num_heads", num_heads)
        dropout = check_number(_NAME, "dropout", dropout)
        kdim = check_optional_integer(_NAME, "kdim", kdim)
        vdim = check_optional_integer(_NAME, "vdim", vdim)
        for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if check_flag(_NAME, name, value):
                raise NotImplementedError(f"gnomon.{_NAME}: {name} is True; expected False")
        similarity_spec, given = to_similarity(_NAME, similarity)._lower()
        position_spec, position_tensors = Sum(to_positions(_NAME, position))._lower()
        ops.check_module(f"gnomon.{_NAME}", dropout)
        with named_as("TorchMultiheadAttention"):
            _, width, kdim, vdim = query(
                "module_sizes", similarity_spec, embed_dim, num_heads, None, None, kdim, vdim
            )
        if width * num_heads != embed_dim:
            raise ValueError(
                f"gnomon.{_NAME}: similarity is {similarity_spec!r}, which needs a head "
                f"dimension of {width}, but the module has {embed_dim // num_heads}; choose a "
                "similarity that fits"
            )
        torch.nn.MultiheadAttention.__init__(
            self,
            embed_dim,
            num_heads,
            dropout,
            bias=check_flag(_NAME, "bias", bias),
            kdim=kdim,
            vdim=vdim,
            batch_first=check_flag(_NAME, "batch_first", batch_first),
            **made,
        )
        self.out_proj = _Output(embed_dim, embed_dim, bias=bias, **made)
        # Makes torch.nn.TransformerEncoderLayer call this module instead of its fused kernel.
        self._qkv_same_embed_dim = False
        self._hold_terms(
            similarity_spec,
            position_spec,
            [*given, *position_tensors],
            TermSizes(num_heads, width, width, 512, embed_dim, kdim),
            device,
            dtype,
        )

    @classmethod
    def _with_weights_of(
        cls,
        module: torch.nn.MultiheadAttention,
        batch_first: bool | None,
        arguments: dict[str, Any],
    ) -> TorchMultiheadAttention:
        """Creates a module with a copy of the weights of `module`."""
        own = cls(
            module.embed_dim,
            module.num_heads,
            batch_first=module.batch_first if batch_first is None else batch_first,
            **arguments,
        )
        own.load_state_dict(module.state_dict(), strict=False)
        for name, parameter in module.named_parameters():
            # torch's module may be a subclass with additional tensors, which are ignored.
            if name in own._parameters or name.startswith("out_proj."):
                own.get_parameter(name).requires_grad_(parameter.requires_grad)
        return own.train(module.training)

    def _reset_parameters(self) -> None:
        """Initialises the projections as torch does."""
        weights = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        for weight in weights:
            if weight is not None:
                torch.nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            torch.nn.init.zeros_(self.in_proj_bias)

    def reset_parameters(self) -> None:
        """Resets all parameters and buffers to their initial values, and draws new weights."""
        self.out_proj.reset_parameters()
        self._reset_parameters()
        self._reset_terms()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | Rows = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention as torch.nn.MultiheadAttention.forward does.

        Args:
            query: (Lq, B, embed_dim), (B, Lq, embed_dim) with batch_first, or (Lq, embed_dim).
            key: like query, but with Lk and kdim.
            value: like key, but with vdim.
            key_padding_mask: (B, Lk), or (Lk,) without a batch: True where a key is hidden, or
                numbers that are added to the scores.
            need_weights: whether to also return the weights, which requires quadratic memory. To
                return them for selected queries only, pass an index, several indices or a slice.
            attn_mask: (Lq, Lk) or (B * num_heads, Lq, Lk): True where a key is hidden, or numbers
                that are added to the scores.
            average_attn_weights: whether to average the weights over heads.
            is_causal: declares that attn_mask is a causal mask, whose values are then not read. As
                in torch, attn_mask is still required.

        Returns:
            A tuple of the output, which has the shape of query, and the weights or None. The
            weights are (B, Lq, Lk) if averaged, otherwise (B, num_heads, Lq, Lk), without dropout.
            B is omitted for unbatched input.

        Raises:
            ValueError: an invalid shape.
            TypeError: an invalid dtype or type.
            RuntimeError: is_causal is True and attn_mask is None.
        """
        for name, tokens in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tokens, Tensor):
                raise wrong_type(_NAME, name, tokens, "a Tensor")
        if query.is_nested and query.layout == torch.strided:
            return self._forward_nested(
                query, key, value, attn_mask, key_padding_mask, need_weights, is_causal
            )
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ValueError(
                f"gnomon.{_NAME}: query, key and value have shapes {list(query.shape)}, "
                f"{list(key.shape)} and {list(value.shape)}; expected all batched or all "
                "unbatched"
            )
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (tokens.unsqueeze(0) for tokens in (query, key, value))
            if key_padding_mask is not None and key_padding_mask.dim() == 1:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (tokens.transpose(0, 1) for tokens in (query, key, value))
        if check_flag(_NAME, "is_causal", is_causal) and attn_mask is None:
            raise RuntimeError(
                f"gnomon.{_NAME}: is_causal is True but attn_mask is None; pass the causal mask "
                "as well, as torch.nn.MultiheadAttention requires"
            )
        if attn_mask is not None and not is_causal and self._reads_order:
            is_causal = is_causal_mask(attn_mask)
        q, k, v = self._project(query, key, value)
        sizes = (q.shape[0], self.num_heads, q.shape[2], k.shape[2])
        mask, bias = pair_mask(_NAME, "attn_mask", None if is_causal else attn_mask, sizes)
        masks = to_masks(_NAME, sizes, q, key_padding_mask, bias)
        if isinstance(need_weights, bool):
            rows = check_rows(_NAME, slice(None), q) if need_weights else None
        else:
            rows = check_rows(_NAME, need_weights, q)
        given: MaskArguments = {"causal": True, "query_offset": 0} if is_causal else {"mask": mask}
        attended = self._attend(
            _NAME,
            (q, k, v),
            (query, key),
            given,
            MaskArguments,
            {},
            dropout=self.dropout if self.training else 0.0,
            hidden=masks.hidden,
            more=masks.biases,
            rows=rows,
        )
        out = self.out_proj(attended.o.transpose(1, 2).flatten(2))
        weights = attended.weights
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Projects queries, keys and values, and splits them into heads."""
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        tokens = (query, key, value)
        for name, own, weight in zip(("query", "key", "value"), tokens, weights, strict=True):
            if own.shape[2] != weight.shape[1] or own.shape[0] != query.shape[0]:
                raise ValueError(
                    f"gnomon.{_NAME}: {name} has shape {list(own.shape)} (batch first); expected "
                    f"(B, L, {weight.shape[1]}) with B = {query.shape[0]}"
                )
        if query is key is value and self.in_proj_weight is not None:
            joined = torch.nn.functional.linear(query, self.in_proj_weight, self.in_proj_bias)
            return tuple(split_heads(part, self.num_heads) for part in joined.chunk(3, -1))
        return tuple(
            split_heads(torch.nn.functional.linear(own, weight, bias), self.num_heads)
            for own, weight, bias in zip(tokens, weights, biases, strict=True)
        )

    def _forward_nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        need_weights: bool | Rows,
        is_causal: bool,
    ) -> tuple[Tensor, None]:
        """Handles the nested tensors that torch.nn.TransformerEncoder creates in inference."""
        is_plain = query is key is value and attn_mask is key_padding_mask is None
        if not is_plain or need_weights is not False:
            raise NotImplementedError(
                f"gnomon.{_NAME}: query is a nested tensor; pass the same tensor as key and "
                "value, no masks, and need_weights=False"
            )
        rows = query.unbind()
        lengths = torch.tensor([len(row) for row in rows], device=query.device)
        padded = query.to_padded_tensor(0.0)
        hidden = torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]
        if not self.batch_first:
            padded = padded.transpose(0, 1)
        out, _ = self.forward(padded, padded, padded, hidden, False, is_causal=is_causal)
        if not self.batch_first:
            out = out.transpose(0, 1)
        parts = [own[: len(row)] for own, row in zip(out, rows, strict=True)]
        return torch.nested.as_nested_tensor(parts), None
