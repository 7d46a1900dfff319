"""Multi-head attention of points of a hyperboloid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from gnomon import lorentz, similarity
from gnomon._attention import OrderArguments, attention, attention_weights, takes
from gnomon._checks import check_flag, check_integer, check_number, check_string, wrong_type
from gnomon._library import ops
from gnomon._position import Position, to_positions
from gnomon.nn._caches import KVCache, place_tokens
from gnomon.nn._heads import split_heads
from gnomon.position import RoPE

_NAME = "nn.LorentzMultiheadAttention"


class LorentzMultiheadAttention(torch.nn.Module):
    """softmax(2 c + 2 (q.k)_L) over heads, and the centroids of values, all on one hyperboloid.

    The layer of HyperCore, with its arguments, parameters and results for attention_type "full", so
    that a state_dict of one fits the other (He et al. 2025; Chen et al. 2022; Yang et al. 2024,
    Hypformer): submodules Wq, Wk and Wv (without use_weight no Wv) make the coordinates of space of
    each head, times follow from them, and final_linear those of the output; parameters scale (1,),
    which starts at sqrt(num_heads out_channels), and bias (), a number added to all scores, which
    does not change the softmax.

    Points of hyperboloids have their time coordinate first. Memory is linear in the lengths.

    Args:
        manifold: the hyperboloid (x.x)_L = -c: c itself, a number or a tensor of one element,
            learned if it is a parameter; or what has it as its attribute c, such as a manifold of
            HyperCore or of geoopt, kept as it is.
        in_channels: columns of one head: a token has num_heads in_channels columns.
        out_channels: columns of a point of each head, including its time.
        num_heads: heads of q, k and v.
        use_weight: whether values are projected; without it tokens are the points of all heads, and
            in_channels is out_channels.
        power_k: of the attention_type "linear_focused".
        attention_type: "full". HyperCore's "linear_focused", its default, is no softmax, and is
            refused.
        trans_heads_concat: whether final_linear maps the points of all heads to one of
            num_heads out_channels columns; else the output is their centroid, of out_channels.
        normalize: whether the coordinates of space of q and k are divided by their length.
        position: one of gnomon.position without tensors of its own, "rope", or several; they turn
            coordinates of space, and biases are added to scores.
        dropout: the probability of dropping a weight, in training.

    Raises:
        ValueError: a shape or a value.
        TypeError: an argument of another type.
        NotImplementedError: attention_type="linear_focused".
    """

    def __init__(
        self,
        manifold: Any,
        in_channels: int,
        out_channels: int,
        num_heads: int,
        use_weight: bool = True,
        power_k: float = 2.0,
        attention_type: str = "full",
        trans_heads_concat: bool = False,
        normalize: bool = False,
        *,
        position: Position | Sequence[Position | str] | str | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_channels = check_integer(_NAME, "in_channels", in_channels)
        self.out_channels = check_integer(_NAME, "out_channels", out_channels)
        self.num_heads = check_integer(_NAME, "num_heads", num_heads)
        for name, count, least in (
            ("in_channels", self.in_channels, 1),
            ("out_channels", self.out_channels, 2),
            ("num_heads", self.num_heads, 1),
        ):
            if count < least:
                raise ValueError(f"gnomon.{_NAME}: {name} is {count}; expected at least {least}")
        self.use_weight = check_flag(_NAME, "use_weight", use_weight)
        if not self.use_weight and self.in_channels != self.out_channels:
            raise ValueError(
                f"gnomon.{_NAME}: use_weight is False, in_channels {in_channels} and out_channels "
                f"{out_channels}; expected the same number"
            )
        self.power_k = check_number(_NAME, "power_k", power_k)
        check_string(_NAME, "attention_type", attention_type)
        if attention_type == "linear_focused":
            raise NotImplementedError(
                f"gnomon.{_NAME}: attention_type is 'linear_focused', which is no softmax; "
                "expected 'full', or gnomon.linear_attention"
            )
        if attention_type != "full":
            raise ValueError(
                f"gnomon.{_NAME}: attention_type is {attention_type!r}; expected 'full'"
            )
        self.attention_type = attention_type
        self.trans_heads_concat = check_flag(_NAME, "trans_heads_concat", trans_heads_concat)
        self.normalize = check_flag(_NAME, "normalize", normalize)
        self.position = to_positions(_NAME, position)
        self.dropout = check_number(_NAME, "dropout", dropout)
        ops.check_module(f"gnomon.{_NAME}", self.dropout)
        self._keep_curvature(manifold)
        tokens, space = self.num_heads * self.in_channels, self.num_heads * (self.out_channels - 1)
        self.Wk = torch.nn.Linear(tokens, space)
        self.Wq = torch.nn.Linear(tokens, space)
        if self.use_weight:
            self.Wv = torch.nn.Linear(tokens, space)
        columns = self.num_heads * self.out_channels
        self.scale = torch.nn.Parameter(torch.tensor([columns**0.5]))
        self.bias = torch.nn.Parameter(torch.zeros(()))
        if self.trans_heads_concat:
            self.final_linear = torch.nn.Linear(columns, columns - 1)

    def _keep_curvature(self, manifold: Any) -> None:
        if isinstance(manifold, torch.nn.Parameter):
            self.register_parameter("c", manifold)
        elif isinstance(manifold, Tensor):
            self.register_buffer("c", manifold.detach().clone())
        elif hasattr(manifold, "c"):
            self.manifold = manifold
        else:
            number = check_number(
                _NAME, "manifold", manifold, "c, a number or a tensor, or what has it as its c"
            )
            if not number > 0:
                raise ValueError(f"gnomon.{_NAME}: manifold is {number}; expected a positive c")
            self.c = number
        c = self._curvature()
        if isinstance(c, Tensor) and c.numel() != 1:
            raise ValueError(
                f"gnomon.{_NAME}: c of manifold has shape {list(c.shape)}; expected one number"
            )
        if not isinstance(c, (Tensor, int, float)):
            raise wrong_type(_NAME, "c of manifold", c, "a number or a tensor")

    def _curvature(self) -> Any:
        return self.manifold.c if hasattr(self, "manifold") else self.c

    @takes(OrderArguments)
    def forward(
        self,
        query_input: Tensor,
        source_input: Tensor | None = None,
        output_attentions: bool = False,
        mask: Tensor | None = None,
        rot_pos: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        **arguments: Unpack[OrderArguments],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of query_input (B, Lq, num_heads in_channels) over source_input (B, Lk, ...).

        Args:
            query_input: tokens; points, if all of their columns are those of one.
            source_input: those of keys and values; query_input by default.
            output_attentions: also return the weights (B, H, Lq, Lk), which are not linear in the
                lengths.
            mask: HyperCore's, booleans that are True where a pair is hidden, unlike that of
                gnomon.attention: (Lq, Lk), (B, Lk), (B, Lq, Lk), (B, 1, Lk), (B, H, Lk) or
                (B, 1 or H, Lq, Lk).
            rot_pos: complex numbers of modulus 1 (L, (out_channels - 1) / 2) that coordinates of
                space (2 i, 2 i + 1) are turned by.
            cache: points of keys and values of the tokens so far; those of this call are added.

        The other arguments are those of gnomon.attention.

        Returns:
            Points (B, Lq, num_heads out_channels) with trans_heads_concat, else
            (B, Lq, out_channels).
        """
        source_input = query_input if source_input is None else source_input
        for name, tokens in (("query_input", query_input), ("source_input", source_input)):
            if not isinstance(tokens, Tensor):
                raise wrong_type(_NAME, name, tokens, "a Tensor")
            if tokens.dim() != 3 or tokens.shape[2] != self.Wq.in_features:
                raise ValueError(
                    f"gnomon.{_NAME}: {name} has shape {list(tokens.shape)}; expected (B, L, "
                    f"num_heads in_channels) with {self.Wq.in_features} columns"
                )
        q, k = (
            split_heads(layer(tokens), self.num_heads)
            for layer, tokens in ((self.Wq, query_input), (self.Wk, source_input))
        )
        positions = list(self.position)
        c = self._curvature()
        c = c.to(q.dtype).reshape(()) if isinstance(c, Tensor) else float(c)
        if rot_pos is not None:
            positions.append(self._angles(rot_pos, q, k))
        if self.normalize:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        if self.use_weight:
            space = split_heads(self.Wv(source_input), self.num_heads)
            v = lorentz.lift(space, c)
        else:
            v = split_heads(source_input, self.num_heads)
        if cache is not None:
            if not isinstance(cache, KVCache):
                raise wrong_type(_NAME, "cache", cache, "a KVCache, or None")
            places = place_tokens(_NAME, cache, query_input, source_input, arguments)
            k, v = cache.joined(k, v)
        seen = None if mask is None else ~_pairs(mask, q, k)
        term = similarity.Lorentz(1 / self.scale.to(q.dtype).reshape(()), c, self.bias.to(q.dtype))
        o = attention(
            q,
            k,
            v,
            similarity=term,
            position=positions,
            dropout=self.dropout if self.training else 0.0,
            aggregation="lorentz_centroid",
            mask=seen,
            **arguments,
        )
        o = o.transpose(1, 2)
        if self.trans_heads_concat:
            out = lorentz.lift(self.final_linear(o.flatten(2)), c)
        else:
            out = lorentz.centroid(o, c)
        if output_attentions:
            weights = attention_weights(
                q, k, slice(None), similarity=term, position=positions, mask=seen, **arguments
            )
        if cache is not None:
            cache.k, cache.v, cache.positions = k, v, places
        return (out, weights) if output_attentions else out

    def _angles(self, rot_pos: Tensor, q: Tensor, k: Tensor) -> Position:
        if not rot_pos.is_complex() or rot_pos.dim() != 2:
            raise ValueError(
                f"gnomon.{_NAME}: rot_pos has shape {list(rot_pos.shape)} and dtype "
                f"{rot_pos.dtype}; expected complex numbers (L, (out_channels - 1) / 2)"
            )
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return RoPE(angles=rot_pos.angle().to(wide)[None, None])

    def extra_repr(self) -> str:
        """The arguments that are not the default, for print()."""
        c = self._curvature()
        shown: list[str] = [str(float(c))] if not hasattr(self, "manifold") else ["manifold"]
        shown += [str(n) for n in (self.in_channels, self.out_channels, self.num_heads)]
        defaults = {"use_weight": True, "trans_heads_concat": False, "normalize": False}
        given = {name: getattr(self, name) for name in defaults}
        shown += [f"{name}={value}" for name, value in given.items() if value != defaults[name]]
        return ", ".join(shown)


def _pairs(mask: object, q: Tensor, k: Tensor) -> Tensor:
    """HyperCore's masks as what broadcasts to (B, H, Lq, Lk)."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise wrong_type(_NAME, "mask", mask, "a Tensor of booleans, or None")
    batch, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    shape = tuple(mask.shape)
    if shape == (queries, keys):
        return mask
    if shape == (batch, keys):
        return mask[:, None, None]
    if shape in ((batch, queries, keys), (batch, 1, keys)):
        return mask[:, None]
    if shape == (batch, heads, keys):
        return mask[:, :, None]
    if mask.dim() == 4:
        return mask
    raise ValueError(
        f"gnomon.{_NAME}: mask has shape {list(shape)}; expected (Lq, Lk) = ({queries}, {keys}), "
        f"(B, Lk) with B = {batch}, (B, Lq, Lk), (B, 1, Lk), (B, H, Lk) with H = {heads}, or "
        "(B, 1 or H, Lq, Lk)"
    )
