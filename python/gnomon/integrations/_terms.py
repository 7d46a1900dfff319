"""Similarities and positions with learned parameters, for attention layers of other libraries."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon._attention import AttentionArguments, attention, lower_call, passed
from gnomon._catalogue import components_of, module_tensors
from gnomon._checks import Device, as_autocast
from gnomon._library import ops, query
from gnomon._terms import to_spec
from gnomon.nn._held_terms import set_start
from gnomon.position import Position, Sum
from gnomon.similarity import Dot, Similarity, Specified

#: Names of the submodules that contain a layer's similarity and position.
SIMILARITY, POSITION = "gnomon_similarity", "gnomon_position"


def check_similarity(operator: str, spec: str) -> None:
    """Raises an error if a similarity expects points on a manifold.

    A model's linear projections do not produce such points.
    """
    if option := query("points_option", spec):
        (component,) = components_of(spec)
        raise ValueError(
            f"{operator}: {spec!r}: {option} expects queries and keys that are already points in "
            f"the space of {component.name}, but a model's projections are not; leave out "
            f"{option.split('=')[0]}, or choose another value"
        )


def check_position(operator: str, spec: str) -> None:
    """Raises an error if a position requires inputs other than a layer's queries and keys."""
    for component in components_of(spec):
        if component.entry.get("role") == "embedding":
            raise NotImplementedError(
                f"{operator}: position {component.name!r} is added to the embeddings, which the "
                "model computes; expected a position that acts in attention, such as 'alibi', "
                "'rope' or 'sink'"
            )
    if query("module_has_projections", spec):
        raise NotImplementedError(
            f"{operator}: position {spec!r} projects the tokens of a layer, but only queries and "
            "keys are available here; use gnomon.nn.MultiheadAttention"
        )


class _Terms(torch.nn.Module):
    """Base class of learned terms, with the same tensors as in gnomon.nn.MultiheadAttention."""

    _warned = False
    #: merge_and_unload() of LoHa, IA3 and other PEFT methods reads this attribute of every module.
    weight = None

    def __init__(
        self,
        similarity: str,
        position: str,
        num_heads: int,
        head_dim: int,
        value_dim: int,
        max_length: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        names, starts, learned = ops.module_tensors(
            similarity, position, num_heads, head_dim, value_dim, max_length, 0, 0, []
        )
        self._names = tuple(names)
        #: The initial values of the tensors, as Python numbers, because a buffer would be
        #: uninitialised after loading a checkpoint that lacks it.
        self._begin: dict[str, list[float]] = {}
        for name, start, is_learned in zip(names, starts, learned, strict=True):
            self._begin[name] = start.double().flatten().tolist()
            value = start.detach().to(device, dtype or torch.get_default_dtype(), copy=True)
            if is_learned:
                self.register_parameter(name, torch.nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def reset_parameters(self) -> None:
        """Resets all parameters and buffers to their initial values."""
        for name in self._begin:
            self._begin_one(name)

    def begin_what_is_missing(self) -> None:
        """Initialises the tensors that from_pretrained() did not find in the checkpoint."""
        for name in self._begin:
            if not getattr(getattr(self, name), "_is_hf_initialized", False):
                self._begin_one(name)

    def _begin_one(self, name: str) -> None:
        tensor: Tensor = getattr(self, name)
        start = torch.tensor(self._begin[name], dtype=torch.float64, device="cpu")
        set_start(tensor, start.view(tensor.shape))

    def held(self) -> list[Tensor]:
        """Returns the tensors in the order that the module operator expects."""
        return [getattr(self, name) for name in self._names]

    def warn_if_frozen(self, q: Tensor) -> None:
        """Warns once if the model is training but these parameters are frozen."""
        if torch.compiler.is_compiling() or _Terms._warned or not self.training:
            return
        if not (torch.is_grad_enabled() and q.requires_grad):
            return
        parameters = list(self.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            _Terms._warned = True
            warnings.warn(
                "gnomon.integrations: the parameters of a similarity or a position are frozen "
                "(requires_grad is False). PEFT freezes modules that its configuration does not "
                f"name; pass it modules_to_save=[{SIMILARITY!r}, {POSITION!r}], or call "
                "with_attention after get_peft_model",
                stacklevel=3,
            )


class LearnedSimilarity(_Terms):
    """A learned similarity with the same parameters as in gnomon.nn.MultiheadAttention."""

    def __init__(
        self,
        spec: str,
        num_heads: int,
        head_dim: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(spec, "none", num_heads, head_dim, head_dim, 1, device, dtype)
        (component,) = components_of(spec)
        # The operator receives both learned and fixed values as tensors.
        held = [tensor.parameter for tensor in module_tensors(spec, "none")]
        options = dict(component.options) | dict.fromkeys(held, "tensor")
        self.spec = to_spec(component.name, **options)
        #: The specification for the module operator.
        self.module_spec = spec
        #: The coordinate that is a height and must not be rotated: -1 (last), 0 (first), or None.
        self.height: int | None = query("height_coordinate", spec)
        #: Whether the model's scale applies.
        self.takes_scale: bool = component.entry["takes_scale"]

    def forward(self, q: Tensor) -> Similarity:
        """Returns the similarity with its current parameters, for q (B, H, L, D) of any dtype."""
        self.warn_if_frozen(q)
        values = ops.module_similarity(q, self.module_spec, self.held())
        return Specified(self.spec, tuple(values))

    def extra_repr(self) -> str:
        """Returns the specification, for print()."""
        return repr(self.spec)


class LearnedPosition(_Terms):
    """A learned position or sum, with the same parameters as in gnomon.nn.MultiheadAttention."""

    def __init__(
        self,
        spec: str,
        num_heads: int,
        head_dim: int,
        value_dim: int,
        max_length: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__("dot", spec, num_heads, head_dim, value_dim, max_length, device, dtype)
        #: The specification for the module operator.
        self.module_spec = spec
        roles = {component.entry.get("role") for component in components_of(spec)}
        #: Whether the model's scale applies, whatever the similarity is.
        self.takes_scale: bool = "content" in roles
        #: Whether the position depends on the positions of queries and keys.
        self.reads_positions: bool = not roles <= {"sink", "norm"}

    def extra_repr(self) -> str:
        """Returns the specification, for print()."""
        return repr(self.module_spec)


def attend(
    operator: str,
    layer: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Sequence[Position],
    arguments: AttentionArguments,
    softcap: float | None = None,
) -> Tensor:
    """Calls gnomon.attention with a layer's similarity and position, and additional positions.

    softcap applies only to the dot product.
    """
    learned, own = getattr(layer, SIMILARITY, None), getattr(layer, POSITION, None)
    dot = Dot(softcap=softcap)
    if own is None:
        arguments["similarity"] = dot if learned is None else learned(q)
        arguments["position"] = list(positions)
        return attention(q, k, v, **arguments)
    own.warn_if_frozen(q)
    q, k, v = as_autocast(q, k, v)
    spec, given = Sum(positions)._lower()
    o: Tensor = ops.module_attention.default(
        q,
        k,
        v,
        dot._lower()[0] if learned is None else learned.module_spec,
        own.module_spec + ("" if spec == "none" else f"+{spec}"),
        [*(() if learned is None else learned.held()), *own.held(), *given],
        *passed(lower_call(operator, q, arguments, AttentionArguments)),
    )
    return o
