"""Multi-head attention on a hyperboloid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from gnomon import lorentz, similarity
from gnomon._attention import MaskArguments, OrderArguments, takes
from gnomon._catalogue import components_of
from gnomon._checks import Device, check_flag, check_integer, check_number, check_string, wrong_type
from gnomon._library import ops
from gnomon._position import Position, Sum, to_positions
from gnomon.nn._caches import KVCache
from gnomon.nn._checks import check_factory
from gnomon.nn._heads import split_heads
from gnomon.nn._held_terms import HeldTerms, Terms, TermSizes, reset_children, set_start
from gnomon.position import RoPE

_NAME = "nn.LorentzMultiheadAttention"


class LorentzMultiheadAttention(HeldTerms):
    """Multi-head attention on a hyperboloid, with weighted centroids of the values as outputs.

    The weights are softmax((2 c + 2 (q.k)_L) / scale).

    The arguments, parameters and results are those of HyperCore's layer with attention_type "full"
    (He et al. 2025; Chen et al. 2022; Yang et al. 2024, Hypformer), so state_dicts are
    interchangeable.

    The submodules Wq, Wk and, with use_weight, Wv compute the space coordinates of each head, and
    final_linear computes those of the output. The time coordinate comes first and is computed from
    the space coordinates. The parameter scale (1,) is initialised to
    sqrt(num_heads * out_channels). The parameter bias () is added to all scores, which does not
    change the softmax. Memory is linear in the sequence lengths.

    Args:
        manifold: the constant c of the hyperboloid (x.x)_L = -c, or an object with an attribute c,
            such as a HyperCore or geoopt manifold. The object is stored unchanged. c is a number or
            a one-element tensor; it is trained if it is a parameter.
        in_channels: channels per head; a token has num_heads * in_channels channels.
        out_channels: channels of each head's points, including the time coordinate.
        num_heads: number of heads of q, k and v.
        use_weight: whether values are projected. If False, the tokens must contain the points of
            all heads, which are used directly as the values, and in_channels must equal
            out_channels.
        power_k: ignored; HyperCore uses it only for attention_type "linear_focused".
        attention_type: must be "full". HyperCore's default, "linear_focused", does not use softmax
            and is not supported.
        trans_heads_concat: whether final_linear maps the points of all heads to one point with
            num_heads * out_channels channels; otherwise, the output is the centroid of these
            points, with out_channels channels.
        normalize: whether the space coordinates of q and k are divided by their norm.
        position: see MultiheadAttention, also for parameter names such as "hype_tau_theta".
            Rotations apply to the space coordinates, and biases are added to the scores. A sink
            raises an error, because it would have no effect on centroids.
        dropout: probability of dropping an attention weight during training.
        max_length: see MultiheadAttention.
        device: device of parameters and buffers; the default device if None.
        dtype: floating-point dtype of parameters and buffers; the default dtype if None.

    Raises:
        ValueError: an invalid shape or value.
        TypeError: an argument of the wrong type.
        NotImplementedError: attention_type="linear_focused".

    Example:
        >>> layer = gnomon.nn.LorentzMultiheadAttention(1.0, 17, 17, num_heads=4)
        >>> x = gnomon.lorentz.lift(torch.randn(2, 16, 4, 16)).flatten(2)  # (B, L, 4 x 17)
        >>> y = layer(x)
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
        max_length: int = 512,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = check_factory(_NAME, device, dtype)
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
                f"gnomon.{_NAME}: out_channels is {out_channels} with use_weight=False; expected "
                f"{in_channels}, the value of in_channels"
            )
        self.power_k = check_number(_NAME, "power_k", power_k)
        check_string(_NAME, "attention_type", attention_type)
        if attention_type == "linear_focused":
            raise NotImplementedError(
                f"gnomon.{_NAME}: attention_type is 'linear_focused', which does not use "
                "softmax; expected 'full', or use gnomon.linear_attention"
            )
        if attention_type != "full":
            raise ValueError(
                f"gnomon.{_NAME}: attention_type is {attention_type!r}; expected 'full'"
            )
        self.attention_type = attention_type
        self.trans_heads_concat = check_flag(_NAME, "trans_heads_concat", trans_heads_concat)
        self.normalize = check_flag(_NAME, "normalize", normalize)
        position_spec, given = Sum(to_positions(_NAME, position))._lower()
        if any(part.entry.get("role") == "sink" for part in components_of(position_spec)):
            raise ValueError(
                f"gnomon.{_NAME}: position has a sink, which has no effect on centroids; expected "
                "a position without one"
            )
        max_length = check_integer(_NAME, "max_length", max_length)
        self.dropout = check_number(_NAME, "dropout", dropout)
        ops.check_module(f"gnomon.{_NAME}", self.dropout)
        self._keep_curvature(manifold, made)
        tokens, space = self.num_heads * self.in_channels, self.num_heads * (self.out_channels - 1)
        self.Wk = torch.nn.Linear(tokens, space, **made)
        self.Wq = torch.nn.Linear(tokens, space, **made)
        if self.use_weight:
            self.Wv = torch.nn.Linear(tokens, space, **made)
        columns = self.num_heads * self.out_channels
        self.scale = torch.nn.Parameter(torch.tensor([columns**0.5], **made))
        self.bias = torch.nn.Parameter(torch.zeros((), **made))
        if self.trans_heads_concat:
            self.final_linear = torch.nn.Linear(columns, columns - 1, **made)
        # The tensors of the similarity are scale, c and bias.
        self._hold_terms(
            "lorentz:scale=1",
            position_spec,
            given,
            TermSizes(
                self.num_heads,
                self.out_channels - 1,
                self.out_channels,
                max_length,
                tokens,
                tokens,
            ),
            device,
            dtype,
        )

    def reset_parameters(self) -> None:
        """Resets all parameters and buffers to their initial values, and draws new weights.

        The c of a manifold object does not change, unless the object has a method
        reset_parameters().
        """
        reset_children(self)
        set_start(self.scale, torch.tensor([(self.num_heads * self.out_channels) ** 0.5]))
        torch.nn.init.zeros_(self.bias)
        if isinstance(self._c_start, Tensor):
            if self._c_start.is_meta and not self._curvature().is_meta:
                raise RuntimeError(
                    f"gnomon.{_NAME}: manifold is a tensor on the meta device, which has no "
                    "values; expected a number, or a tensor with values"
                )
            set_start(self._curvature(), self._c_start)
        self._reset_terms()

    def _keep_curvature(self, manifold: Any, made: dict[str, Any]) -> None:
        self._c_start: Tensor | None = None
        if isinstance(manifold, Tensor):
            start = manifold.detach()
            self._c_start = start if start.is_meta else start.to(device="cpu", copy=True)
        if isinstance(manifold, torch.nn.Parameter):
            self.register_parameter("c", manifold)
            if any(value is not None for value in made.values()):
                self.to(**made)
        elif isinstance(manifold, Tensor):
            self.register_buffer("c", manifold.detach().to(**made, copy=True))
        elif hasattr(manifold, "c"):
            self.manifold = manifold
        else:
            number = check_number(
                _NAME, "manifold", manifold, "a number, a tensor, or an object with an attribute c"
            )
            if not number > 0:
                raise ValueError(f"gnomon.{_NAME}: manifold is {number}; expected a positive c")
            self.c = number
        c = self._curvature()
        if isinstance(c, Tensor) and c.numel() != 1:
            raise ValueError(
                f"gnomon.{_NAME}: c of manifold has shape {list(c.shape)}; expected one element"
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
        """Attends from query_input (B, Lq, num_heads * in_channels) to source_input (B, Lk, ...).

        Args:
            query_input: tokens; each contains the points of all heads, or one point with all
                channels.
            source_input: the tokens of keys and values; query_input by default.
            output_attentions: whether to also return the weights (B, H, Lq, Lk), whose memory is
                quadratic.
            mask: a Boolean mask as in HyperCore: True hides a key from a query, the opposite of
                mask in gnomon.attention. Its shape is (Lq, Lk), (B, Lk), (B, Lq, Lk), (B, 1, Lk),
                (B, H, Lk) or (B, 1 or H, Lq, Lk).
            rot_pos: complex tensor (L, (out_channels - 1) / 2) with modulus 1: entry i of a token's
                row rotates the pair of space coordinates (2 i, 2 i + 1).
            cache: key and value points of earlier tokens; this call appends its points.

        The other arguments are those of gnomon.attention.

        Returns:
            Points (B, Lq, num_heads * out_channels) with trans_heads_concat, otherwise
            (B, Lq, out_channels). With output_attentions, a tuple of the points and the weights.
        """
        source_input = query_input if source_input is None else source_input
        for name, tokens in (("query_input", query_input), ("source_input", source_input)):
            if not isinstance(tokens, Tensor):
                raise wrong_type(_NAME, name, tokens, "a Tensor")
            if tokens.dim() != 3 or tokens.shape[2] != self.Wq.in_features:
                raise ValueError(
                    f"gnomon.{_NAME}: {name} has shape {list(tokens.shape)}; expected (B, L, "
                    f"num_heads * in_channels), where the last size is {self.Wq.in_features}"
                )
        q, k = (
            split_heads(layer(tokens), self.num_heads)
            for layer, tokens in ((self.Wq, query_input), (self.Wk, source_input))
        )
        c = self._curvature()
        c = c.to(q.dtype).reshape(()) if isinstance(c, Tensor) else float(c)
        turn = None
        if rot_pos is not None:
            turn = Terms(*self._angles(rot_pos, q)._lower())
        if self.normalize:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        if self.use_weight:
            space = split_heads(self.Wv(source_input), self.num_heads)
            v = lorentz.lift(space, c)
        else:
            v = split_heads(source_input, self.num_heads)
        known = cache.length() if isinstance(cache, KVCache) else 0
        given: MaskArguments = {**arguments}
        if mask is not None:
            given["mask"] = ~_pairs(mask, q, k.shape[2] + known)
        bias = self.bias.to(q.dtype)
        # The bias does not affect the weights. Its gradient must be 0, not None, which
        # DistributedDataParallel treats as an error.
        scale = 1 / self.scale.to(q.dtype).reshape(()) + 0 * bias
        term = similarity.Lorentz(scale, c, bias)
        attended = self._attend(
            _NAME,
            (q, k, v),
            (query_input, source_input),
            given,
            MaskArguments,
            {},
            dropout=self.dropout if self.training else 0.0,
            aggregation="lorentz_centroid",
            cache=cache,
            similarity=Terms(*term._lower()),
            more=turn,
            rows=list(range(q.shape[2])) if output_attentions else None,
        )
        o = attended.o.transpose(1, 2)
        if self.trans_heads_concat:
            out = lorentz.lift(self.final_linear(o.flatten(2)), c)
        else:
            out = lorentz.centroid(o, c)
        attended.keep()
        if attended.weights is not None:
            return out, attended.weights
        return out

    def _angles(self, rot_pos: Tensor, q: Tensor) -> Position:
        if not rot_pos.is_complex() or rot_pos.dim() != 2:
            raise ValueError(
                f"gnomon.{_NAME}: rot_pos has shape {list(rot_pos.shape)} and dtype "
                f"{rot_pos.dtype}; expected a complex tensor of shape (L, (out_channels - 1) / 2)"
            )
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return RoPE(angles=rot_pos.angle().to(wide)[None, None])

    def extra_repr(self) -> str:
        """Returns the non-default arguments, for print()."""
        c = self._curvature()
        is_known = not hasattr(self, "manifold") and not (isinstance(c, Tensor) and c.is_meta)
        shown: list[str] = [str(float(c))] if is_known else ["manifold"]
        shown += [str(n) for n in (self.in_channels, self.out_channels, self.num_heads)]
        defaults = {"use_weight": True, "trans_heads_concat": False, "normalize": False}
        given = {name: getattr(self, name) for name in defaults}
        shown += [f"{name}={value}" for name, value in given.items() if value != defaults[name]]
        return ", ".join(shown)


def _pairs(mask: object, q: Tensor, keys: int) -> Tensor:
    """Reshapes a HyperCore mask to broadcast to (B, H, Lq, Lk)."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise wrong_type(_NAME, "mask", mask, "a Tensor of booleans, or None")
    batch, heads, queries = q.shape[:3]
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
