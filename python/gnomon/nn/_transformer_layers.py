"""Drop-in replacements for torch.nn's Transformer layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from gnomon._checks import Device, check_flag, check_integer, check_number, wrong_type
from gnomon._position import Position
from gnomon._similarity import Similarity
from gnomon.nn._checks import check_factory
from gnomon.nn._held_terms import reset_children
from gnomon.nn._masks import is_causal_mask, pair_mask
from gnomon.nn._multihead_attention import MultiheadAttention

Activation = Callable[[Tensor], Tensor]
_Layer = TypeVar("_Layer", bound="_TransformerLayer")
_ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
}


class _TransformerLayer(torch.nn.Module):
    """Base class of encoder and decoder layers, with torch.nn's submodule names."""

    #: The corresponding torch.nn layer.
    _torch: ClassVar[type[torch.nn.Module]]
    #: Whether the layer has cross-attention to encoder memory.
    _has_memory: ClassVar[bool]

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = torch.nn.functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        similarity: Similarity | str = "dot",
        position: Position | Sequence[Position | str] | str | None = None,
    ) -> None:
        super().__init__()
        name = f"nn.{type(self).__name__}"
        if isinstance(activation, str):
            if activation not in _ACTIVATIONS:
                raise ValueError(
                    f"gnomon.{name}: activation is {activation!r}; expected relu, gelu or a "
                    "function"
                )
            activation = _ACTIVATIONS[activation]
        made = check_factory(name, device, dtype)
        dim_feedforward = check_integer(name, "dim_feedforward", dim_feedforward)
        layer_norm_eps = check_number(name, "layer_norm_eps", layer_norm_eps)
        self.batch_first = check_flag(name, "batch_first", batch_first)
        self.norm_first = check_flag(name, "norm_first", norm_first)
        self.activation = activation

        def attention(
            position: Position | Sequence[Position | str] | str | None,
        ) -> MultiheadAttention:
            return MultiheadAttention(
                d_model,
                nhead,
                similarity=similarity,
                position=position,
                dropout=dropout,
                bias=bias,
                **made,
            )

        self.self_attn = attention(position)
        # torch.nn.TransformerEncoder and TransformerDecoder read this attribute.
        self.self_attn.batch_first = self.batch_first
        if self._has_memory:
            self.multihead_attn = attention(None)
        self.linear1 = torch.nn.Linear(d_model, dim_feedforward, bias=bias, **made)
        self.dropout = torch.nn.Dropout(dropout)
        self.linear2 = torch.nn.Linear(dim_feedforward, d_model, bias=bias, **made)
        for n in range(1, 4 if self._has_memory else 3):
            norm = torch.nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **made)
            self.add_module(f"norm{n}", norm)
            self.add_module(f"dropout{n}", torch.nn.Dropout(dropout))

    def reset_parameters(self) -> None:
        """Resets all parameters and buffers to their initial values, and draws new weights."""
        reset_children(self)

    @classmethod
    def from_torch(
        cls: type[_Layer],
        layer: torch.nn.Module,
        *,
        similarity: Similarity | str = "dot",
        position: Position | Sequence[Position | str] | str | None = None,
    ) -> _Layer:
        """Creates a layer with a torch.nn layer's weights; see MultiheadAttention.from_torch."""
        if not isinstance(layer, cls._torch):
            expected = f"a torch.nn.{cls._torch.__name__}"
            raise wrong_type(f"nn.{cls.__name__}.from_torch", "layer", layer, expected)
        own = cls(**_arguments_of(layer), similarity=similarity, position=position)  # type: ignore[arg-type]
        own._copy(layer)
        return own

    def _batched(self, x: Tensor) -> Tensor:
        """Converts to (B, L, d_model); unbatched input becomes a batch of one."""
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _as_given(self, x: Tensor, like: Tensor) -> Tensor:
        if like.dim() == 2:
            return x.squeeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _attend(
        self,
        attention: MultiheadAttention,
        x: Tensor,
        memory: Tensor | None,
        masks: dict[str, Tensor | None],
        is_causal: bool,
    ) -> Tensor:
        """Computes attention; `masks` maps argument names to the pair mask and the key mask."""
        (pairs, pairs_mask), (_, key_mask) = masks.items()
        key = x if memory is None else memory
        if pairs_mask is not None and not is_causal and attention._reads_order:
            # Recognise causal masks, because some positions have a different causal form.
            is_causal = is_causal_mask(pairs_mask)
        name = f"nn.{type(self).__name__}"
        sizes = (x.shape[0], attention.num_heads, x.shape[1], key.shape[1])
        mask, bias = pair_mask(name, pairs, None if is_causal else pairs_mask, sizes)
        if key_mask is not None and key_mask.dim() == 1:
            key_mask = key_mask.unsqueeze(0)
        attended: Tensor = attention(
            x,
            memory,
            causal=is_causal,
            query_offset=0 if is_causal else None,
            mask=mask,
            pair_bias=bias,
            key_padding_mask=key_mask,
        )
        return attended

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return out

    def _branch(self, n: int, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Adds a residual branch to x, and normalises either the branch's input or the sum."""
        norm, dropout = self.get_submodule(f"norm{n}"), self.get_submodule(f"dropout{n}")
        if self.norm_first:
            return x + dropout(branch(norm(x)))
        out: Tensor = norm(x + dropout(branch(x)))
        return out

    def _copy(self, layer: torch.nn.Module) -> None:
        self.load_state_dict(layer.state_dict(), strict=False)
        for name, module in layer.named_children():
            if isinstance(module, torch.nn.Dropout):
                self.get_submodule(name).p = module.p
            elif isinstance(module, torch.nn.MultiheadAttention):
                # Submodules may have been replaced since the layer was constructed.
                own = self.get_submodule(name)
                own.dropout = module.dropout
                if module.bias_k is not None or module.add_zero_attn:
                    MultiheadAttention.from_torch(module)  # raises the error
        self.train(layer.training)


def _arguments_of(layer: torch.nn.Module) -> dict[str, object]:
    """Returns the constructor arguments of a torch.nn layer."""
    attention, linear, norm = layer.self_attn, layer.linear1, layer.norm1
    return {
        "d_model": attention.embed_dim,
        "nhead": attention.num_heads,
        "dim_feedforward": linear.out_features,
        "dropout": layer.dropout.p,
        "activation": layer.activation,
        "layer_norm_eps": norm.eps,
        "batch_first": attention.batch_first,
        "norm_first": layer.norm_first,
        "bias": linear.bias is not None,
        "device": linear.weight.device,
        "dtype": linear.weight.dtype,
    }


class TransformerEncoderLayer(_TransformerLayer):
    """torch.nn.TransformerEncoderLayer with any similarity and position in its attention.

    The arguments, call signature and submodule names are torch's. With the dot product and no
    position, the result equals torch's up to rounding. load_state_dict accepts the state_dict of
    torch's layer, and torch.nn.TransformerEncoder accepts this layer (pass
    enable_nested_tensor=False to avoid a warning).

    As in torch, masks are True where a key is hidden, or contain numbers that are added to the
    scores. is_causal is faster than a mask. For positions that require causal attention ("forget")
    or have a different causal form ("t5"), a causal mask implies is_causal. If all keys are masked
    for a query, its attention output is 0 instead of NaN.

    Args:
        similarity: see MultiheadAttention.
        position: see MultiheadAttention.

    The other arguments are torch's.

    Example:
        >>> layer = gnomon.nn.TransformerEncoderLayer(64, 4, batch_first=True, position="alibi")
        >>> y = layer(torch.randn(2, 16, 64))
    """

    _torch = torch.nn.TransformerEncoderLayer
    _has_memory = False

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Applies the layer to src; the result has the same shape.

        src is (L, B, d_model), (B, L, d_model) with batch_first, or (L, d_model). src_mask is (L,
        L) or (B * nhead, L, L); src_key_padding_mask is (B, L). Both are True where a key is
        hidden, or contain numbers that are added to the scores. is_causal makes attention causal;
        src_mask is then optional.
        """
        masks = {"src_mask": src_mask, "src_key_padding_mask": src_key_padding_mask}
        x = self._branch(
            1,
            self._batched(src),
            lambda x: self._attend(self.self_attn, x, None, masks, is_causal),
        )
        return self._as_given(self._branch(2, x, self._feed_forward), src)


class TransformerDecoderLayer(_TransformerLayer):
    """torch.nn.TransformerDecoderLayer with any similarity and position in its attention.

    See TransformerEncoderLayer for the differences from torch's layers. The position applies only
    to the self-attention of tgt.

    Args:
        similarity: used in self-attention and cross-attention; see MultiheadAttention.
        position: see MultiheadAttention.

    The other arguments are torch's.

    Example:
        >>> layer = gnomon.nn.TransformerDecoderLayer(64, 4, batch_first=True, position="alibi")
        >>> y = layer(torch.randn(2, 16, 64), torch.randn(2, 20, 64))
    """

    _torch = torch.nn.TransformerDecoderLayer
    _has_memory = True

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Applies the layer to tgt and memory; the result has tgt's shape.

        tgt and memory are (L, B, d_model), (B, L, d_model) with batch_first, or (L, d_model). Masks
        have the same form as in TransformerEncoderLayer.
        """
        own = {"tgt_mask": tgt_mask, "tgt_key_padding_mask": tgt_key_padding_mask}
        cross = {"memory_mask": memory_mask, "memory_key_padding_mask": memory_key_padding_mask}
        seen = self._batched(memory)
        x = self._branch(
            1,
            self._batched(tgt),
            lambda x: self._attend(self.self_attn, x, None, own, tgt_is_causal),
        )
        x = self._branch(
            2, x, lambda x: self._attend(self.multihead_attn, x, seen, cross, memory_is_causal)
        )
        return self._as_given(self._branch(3, x, self._feed_forward), tgt)
