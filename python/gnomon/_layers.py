"""Layers of a Transformer in the place of torch.nn's, and grids of another resolution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from gnomon._catalogue import components_of
from gnomon._checks import check_flag, wrong_type
from gnomon._library import ops
from gnomon._terms import check_shape, to_spec
from gnomon.nn import MultiheadAttention, TokenEncoding, TokenPosition, is_hidden
from gnomon.position import Position
from gnomon.similarity import Similarity

Activation = Callable[[Tensor], Tensor]
_Layer = TypeVar("_Layer", bound="_TransformerLayer")
_ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
}


class _TransformerLayer(torch.nn.Module):
    """What encoder and decoder layers have in common; submodules have the names of torch.nn's."""

    #: torch.nn's own layer.
    _torch: ClassVar[type[torch.nn.Module]]
    #: Whether a second attention looks at the memory of an encoder.
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
        device: torch.device | str | None = None,
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
            )

        self.self_attn = attention(position)
        # torch.nn.TransformerEncoder and -Decoder ask it which axis is the length.
        self.self_attn.batch_first = self.batch_first
        if self._has_memory:
            self.multihead_attn = attention(None)
        self.linear1 = torch.nn.Linear(d_model, dim_feedforward, bias=bias)
        self.dropout = torch.nn.Dropout(dropout)
        self.linear2 = torch.nn.Linear(dim_feedforward, d_model, bias=bias)
        for n in range(1, 4 if self._has_memory else 3):
            norm = torch.nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
            self.add_module(f"norm{n}", norm)
            self.add_module(f"dropout{n}", torch.nn.Dropout(dropout))
        self.to(device=device, dtype=dtype)

    @classmethod
    def from_torch(
        cls: type[_Layer],
        layer: torch.nn.Module,
        *,
        similarity: Similarity | str = "dot",
        position: Position | Sequence[Position | str] | str | None = None,
    ) -> _Layer:
        """A layer with the weights of torch's, copied; see MultiheadAttention.from_torch."""
        if not isinstance(layer, cls._torch):
            expected = f"a torch.nn.{cls._torch.__name__}"
            raise wrong_type(f"nn.{cls.__name__}.from_torch", "layer", layer, expected)
        own = cls(**_arguments_of(layer), similarity=similarity, position=position)  # type: ignore[arg-type]
        own._copy(layer)
        return own

    def _batched(self, x: Tensor) -> Tensor:
        """(B, L, d_model), of which (L, d_model) is one."""
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
        """masks are the one of pairs and the one of keys, under their names."""
        (pairs, pair_mask), (keys, key_mask) = masks.items()
        causal = is_causal or _is_causal(f"nn.{type(self).__name__}", pairs, pair_mask)
        if key_mask is not None:
            key_mask = is_hidden(f"nn.{type(self).__name__}", keys, key_mask)
            key_mask = key_mask.unsqueeze(0) if key_mask.dim() == 1 else key_mask
        attended: Tensor = attention(
            x, memory, causal=causal, query_offset=0 if causal else None, key_padding_mask=key_mask
        )
        return attended

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return out

    def _branch(self, n: int, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """x and what a branch makes of it, with the norm before it or behind the sum."""
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
                # Its own numbers, which may have changed since it was made.
                own = self.get_submodule(name)
                own.dropout = module.dropout
                if module.bias_k is not None or module.add_zero_attn:
                    MultiheadAttention.from_torch(module)  # says what it does not take
        self.train(layer.training)


def _is_causal(operator: str, argument: str, mask: Tensor | None) -> bool:
    """Whether a mask of pairs, (Lq, Lk), is the causal one; it may also hide nothing."""
    if mask is None:
        return False
    hidden = is_hidden(operator, argument, mask)
    if not bool(hidden.any()):
        return False
    rows, columns = hidden.shape[-2:]
    future = torch.ones(rows, columns, dtype=torch.bool, device=hidden.device).triu(1)
    if bool((hidden == future).all()):
        return True
    raise NotImplementedError(
        f"gnomon.{operator}: {argument} is neither causal nor empty; expected one of these, for "
        "other masks gnomon.nn.MultiheadAttention with window, chunks or segments"
    )


def _arguments_of(layer: torch.nn.Module) -> dict[str, object]:
    """Of a layer of torch.nn, those of its constructor."""
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
    """torch.nn.TransformerEncoderLayer with any similarity and any position in its attention.

    The arguments, the call and the names of submodules are torch's, and so is the result with the
    dot product and no position, up to rounding; state_dicts of torch's layer load, and
    torch.nn.TransformerEncoder takes it (with enable_nested_tensor=False it does not warn). Masks
    of pairs are none or causal, those of keys any of booleans, or of 0 and -inf; others raise
    NotImplementedError. A row that sees no key gets 0 from attention, not NaN.

    Args:
        similarity: as of MultiheadAttention, as is position.

    The others are torch's.
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
        """src (L, B, d_model), (B, L, d_model) with batch_first, or (L, d_model); the same shape.

        src_mask (L, L) and src_key_padding_mask (B, L) are True, or -inf, where hidden; is_causal
        stands for the causal src_mask, which need not be given then.
        """
        masks = {"src_mask": src_mask, "src_key_padding_mask": src_key_padding_mask}
        x = self._branch(
            1,
            self._batched(src),
            lambda x: self._attend(self.self_attn, x, None, masks, is_causal),
        )
        return self._as_given(self._branch(2, x, self._feed_forward), src)


class TransformerDecoderLayer(_TransformerLayer):
    """torch.nn.TransformerDecoderLayer with any similarity and any position in its attention.

    As TransformerEncoderLayer; the position is that of the attention of tgt to itself.

    Args:
        similarity: of both attentions, as of MultiheadAttention.
        position: as of MultiheadAttention.

    The others are torch's.
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
        """tgt and memory (L, B, d_model), (B, L, d_model) with batch_first, or (L, d_model).

        Masks as of TransformerEncoderLayer. Returns the shape of tgt.
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


def resize_grid_table(table: Tensor, shape: Sequence[int]) -> Tensor:
    """A table of biases over the offsets of a grid, (H, 2 h - 1, 2 w - 1), for another grid.

    The farthest offsets stay the farthest, and offset 0 stays offset 0; between them the table is
    interpolated, cubically over two axes and linearly over one or three.

    Args:
        table: of gnomon.position.GridBias, of one to three axes; of any floating-point dtype.
        shape: of the new grid, as many axes as the table has.

    Returns:
        (H, 2 h' - 1, 2 w' - 1) for the new shape (h', w'), in the table's dtype; differentiable.

    Raises:
        ValueError: a table of another number of axes, or of an even number of offsets.
        TypeError: a table that is no tensor of floating-point numbers, a shape of no integers.
    """
    name = "nn.resize_grid_table"
    if not isinstance(table, Tensor):
        raise wrong_type(name, "table", table, "a Tensor")
    if not table.is_floating_point():
        raise TypeError(
            f"gnomon.{name}: table has dtype {table.dtype}; expected a floating-point one"
        )
    sizes = check_shape(f"gnomon.{name}: shape", shape)
    if min(sizes) < 1:
        raise ValueError(f"gnomon.{name}: shape is {tuple(sizes)}; expected positive lengths")
    axes = table.dim() - 1
    if not 1 <= axes <= 3 or any(size % 2 == 0 for size in table.shape[1:]):
        raise ValueError(
            f"gnomon.{name}: table has shape {list(table.shape)}; expected (H, 2 h - 1, 2 w - 1), "
            "of one to three axes"
        )
    if len(sizes) != axes:
        raise ValueError(
            f"gnomon.{name}: shape is {tuple(sizes)}; expected {axes} axes, as the table has"
        )
    target = [2 * size - 1 for size in sizes]
    if list(table.shape[1:]) == target:
        return table.clone()
    wide = table if table.dtype == torch.float64 else table.float()
    for axis, new in enumerate(target, 1):
        if new == 1:
            # Offset 0 alone, where interpolation takes the first one.
            wide = wide.narrow(axis, table.shape[axis] // 2, 1)
    mode = {1: "linear", 2: "bicubic", 3: "trilinear"}[axes]
    resized = torch.nn.functional.interpolate(wide[None], target, mode=mode, align_corners=True)
    return resized[0].to(table.dtype)


def resize_grid(module: torch.nn.Module, shape: Sequence[int]) -> torch.nn.Module:
    """Moves a model whose positions lie on a grid to a grid of another shape; returns it.

    In place: the specifications of MultiheadAttention, TokenPosition and TokenEncoding with a shape
    get the new one, and their tables are interpolated as by resize_grid_table, biases ("grid_bias",
    "offset_bias" along an axis) and the rows of "relative2d" alike; so that a model trained at one
    resolution starts well at another. What a sequence has stays as it is. Make the optimiser anew
    afterwards.

    Args:
        module: a MultiheadAttention, or a model with some of them.
        shape: of the new grid, of as many axes.

    Raises:
        ValueError: no position on a grid in it, or one of another number of axes.
        TypeError: no module, or a shape of no integers.
    """
    name = "nn.resize_grid"
    if not isinstance(module, torch.nn.Module):
        raise wrong_type(name, "module", module, "a torch.nn.Module")
    sizes = check_shape(f"gnomon.{name}: shape", shape)
    if min(sizes) < 1:
        raise ValueError(f"gnomon.{name}: shape is {tuple(sizes)}; expected positive lengths")
    parts = [
        part
        for part in module.modules()
        if isinstance(part, (MultiheadAttention, TokenPosition, TokenEncoding))
        and any(component.lies_on_a_grid for component in components_of(_spec_of(part)))
    ]
    if not parts:
        raise ValueError(f"gnomon.{name}: module has no position on a grid; expected one")
    for part in parts:
        for component in components_of(_spec_of(part)):
            old = component.options.get("shape")
            if old is not None and old.count("x") + 1 != len(sizes):
                raise ValueError(
                    f"gnomon.{name}: shape is {tuple(sizes)} and that of {_spec_of(part)} {old}; "
                    "expected as many axes"
                )
    for part in parts:
        if isinstance(part, MultiheadAttention):
            _resize_tables(part, sizes)
        spec = "+".join(
            to_spec(
                component.name,
                **{
                    key: sizes if key == "shape" else value
                    for key, value in component.options.items()
                },
            )
            for component in components_of(_spec_of(part))
        )
        setattr(part, "spec" if isinstance(part, TokenEncoding) else "position", spec)
        if isinstance(part, TokenEncoding):
            part.max_length = TokenEncoding(spec, part.dim, part.causal).max_length
    for part in parts:
        if isinstance(part, TokenPosition):
            _, _, end = ops.token_encodings(part.position, 1)
            ends = [encoding.max_length for encoding in part.children()]
            part.max_length = min((n for n in [end, *ends] if n is not None), default=None)
    return module


def _spec_of(part: MultiheadAttention | TokenPosition | TokenEncoding) -> str:
    return part.spec if isinstance(part, TokenEncoding) else part.position


def _resize_tables(module: MultiheadAttention, shape: list[int]) -> None:
    count: dict[str, int] = {}
    for component in components_of(module.position):
        name = component.name
        count[name] = count.get(name, 0) + 1
        prefix = name if count[name] == 1 else f"{name}{count[name]}"

        def resize(table: str, change: Callable[[Tensor], Tensor], prefix: str = prefix) -> None:
            _replace(module, f"{prefix}_{table}", change)

        for table in component.tables("grid"):
            resize(table, lambda old: resize_grid_table(old, shape))
        for axis, index in enumerate(("first_axis", "second_axis")):
            for table in component.tables(index):
                resize(table, functools.partial(_resize_rows, size=shape[axis]))
        for table in component.tables("offsets") if component.lies_on_a_grid else ():
            along = component.options.get("axis")
            if along is None and len(set(shape)) > 1:
                raise ValueError(
                    f"gnomon.nn.resize_grid: shape is {tuple(shape)} and {component.spec} has one "
                    "table for all axes; expected one length"
                )
            resize(table, functools.partial(resize_grid_table, shape=[shape[int(along or 0)]]))


def _resize_rows(table: Tensor, size: int) -> Tensor:
    """Of (n, D) or (H, n, D), the rows; the columns stand for heads."""
    each = table.unsqueeze(0) if table.dim() == 2 else table
    moved = [resize_grid_table(one.T, [size]).T for one in each]
    return moved[0] if table.dim() == 2 else torch.stack(moved)


def _replace(module: MultiheadAttention, name: str, change: Callable[[Tensor], Tensor]) -> None:
    old = getattr(module, name)
    with torch.no_grad():
        new = change(old.detach()).contiguous()
    if isinstance(old, torch.nn.Parameter):
        module.register_parameter(name, torch.nn.Parameter(new, requires_grad=old.requires_grad))
    else:
        module.register_buffer(name, new)
