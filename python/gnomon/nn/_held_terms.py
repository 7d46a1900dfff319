"""Base class of modules with a similarity and a position."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon._attention import UNSET, MaskArguments, lower_call, passed
from gnomon._catalogue import Component, components_of
from gnomon._checks import Device, by_default, wrong_type
from gnomon._library import ops, query
from gnomon.nn._caches import KVCache, place_tokens


class LearnedValue(NamedTuple):
    """The current value of a learned parameter (value), and its initial value (start).

    start is None if the initial value is not stored, as for tables and tensors passed in terms.

    Example:
        >>> layer = gnomon.nn.MultiheadAttention(64, 4, similarity="gaussian")
        >>> layer.learned_values()["gamma"].value.shape
        torch.Size([4])
    """

    value: Tensor
    start: Tensor | None


class Projection(torch.nn.Linear):
    """Linear layer with weights drawn from N(0, gain^2 / in_features) and zero biases."""

    gain = 1.0

    def reset_parameters(self) -> None:
        """Draws new weights."""
        torch.nn.init.normal_(self.weight, 0, self.gain * self.in_features**-0.5)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def with_gain(self, gain: float) -> Projection:
        """Sets the gain, draws new weights and returns the layer."""
        self.gain = gain
        self.reset_parameters()
        return self


def reset_children(module: torch.nn.Module) -> None:
    """Calls reset_parameters() on each submodule, recursing into submodules that lack it."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if reset is None:
            reset_children(child)
        else:
            reset()


def set_start(tensor: Tensor, start: Tensor) -> None:
    """Copies an initial value into a parameter or buffer, which may be a DTensor."""
    with torch.no_grad():
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            from torch.distributed.tensor import DTensor, distribute_tensor

            if isinstance(tensor, DTensor):
                start = distribute_tensor(
                    start.to(tensor.device, tensor.dtype), mesh, tensor.placements
                )
        tensor.copy_(start)


@contextlib.contextmanager
def named_as(module: str, head_dim: str = "qk_dim") -> Iterator[None]:
    """Replaces the names MultiheadAttention and qk_dim in error messages of shared operators."""
    try:
        yield
    except (ValueError, TypeError) as error:
        message = str(error).replace("gnomon.nn.MultiheadAttention", f"gnomon.nn.{module}")
        message = message.replace(": qk_dim is", f": {head_dim} is")
        raise type(error)(message) from None


class Terms(NamedTuple):
    """One or more specifications joined by "+", and the tensors that they mention."""

    spec: str
    tensors: Sequence[Tensor] = ()


class Attended(NamedTuple):
    """Results of a module call."""

    o: Tensor
    #: Attention weights of the requested queries.
    weights: Tensor | None
    #: Appends the call's tokens to the cache; called after all steps that can fail.
    keep: Callable[[], None]


class TermSizes(NamedTuple):
    """The sizes that the tensors of terms depend on, in the operators' argument order."""

    num_heads: int
    #: Head dimension of q and k.
    head_dim: int
    #: Head dimension of v.
    value_dim: int
    #: Number of rows of a position table.
    max_length: int
    #: Embedding dimension of the query tokens.
    query_tokens: int
    #: Embedding dimension of the key tokens.
    key_tokens: int


class HeldTerms(torch.nn.Module):
    """Base class of modules that own the tensors of a similarity, a position and a sink."""

    #: The specifications; "<name>=tensor" marks a parameter passed as a tensor.
    similarity: str
    position: str
    _term_names: tuple[str, ...]
    #: (H,), the score of each head's sink; None without sinks.
    sink: torch.nn.Parameter | None
    #: The name of the constructor's argument for the head dimension.
    _head_dim_name = "qk_dim"
    tolerance: float = UNSET["tolerance"]

    def _hold_terms(
        self,
        similarity: str,
        position: str,
        given: Sequence[Tensor],
        sizes: TermSizes,
        device: Device,
        dtype: torch.dtype | None,
        has_sink: bool = False,
    ) -> None:
        """Registers the tensors of the similarity and the position, and the sink if there is one.

        `given` contains the tensors that the specifications mention, in order.
        """
        made = {"device": device, "dtype": dtype}
        sink = torch.nn.Parameter(torch.zeros(sizes.num_heads, **made)) if has_sink else None
        self.register_parameter("sink", sink)
        self.similarity = similarity
        self.position = position
        self._term_sizes = sizes
        with named_as(type(self).__name__, self._head_dim_name):
            names, starts, learned = ops.module_tensors(similarity, position, *sizes, given)
        self._has_projections: bool = query("module_has_projections", position)
        self._turns_keys_once: bool = query("module_turns_keys_once", similarity, position)
        self._term_names = tuple(names)
        #: Whether a term depends on the causal flag itself, not only on the mask.
        self._reads_order = any(_reads_order(component) for component in components_of(position))
        #: Values to which reset_parameters() sets the tensors passed in terms.
        self._given_starts: dict[str, Tensor] = {}
        for name, start, is_learned in zip(names, starts, learned, strict=True):
            own = next((tensor for tensor in given if tensor is start), None)
            if own is None:
                value = by_default(start.detach(), device, dtype)
            else:
                value = own.detach()
                self._given_starts[name] = (
                    value if value.is_meta else value.to(device="cpu", copy=True)
                )
                if isinstance(own, torch.nn.Parameter) and is_learned:
                    self.register_parameter(name, own)
                    continue
                value = by_default(
                    value, own.device if device is None else device, dtype, copy=True
                )
            if is_learned:
                self.register_parameter(name, torch.nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        if self._given_starts and (device is not None or dtype is not None):
            # to() preserves the identity of a torch.nn.Parameter if torch can change it in place.
            self.to(device=device, dtype=dtype)
        _pass_drawn(starts)

    def _reset_terms(self) -> None:
        """Resets the sink and the tensors of the terms to their initial values.

        Tensors passed in terms are reset to the values that they had at construction.

        Raises:
            RuntimeError: a tensor passed in a term is on the meta device, which stores no values.
        """
        if self.sink is not None:
            torch.nn.init.zeros_(self.sink)
        for name, given in self._given_starts.items():
            if given.is_meta and not getattr(self, name).is_meta:
                raise RuntimeError(
                    f"gnomon.nn.{type(self).__name__}: {name} is a tensor on the meta device, "
                    "which has no values; expected a specification, or a tensor with values"
                )
        _, starts, _ = ops.module_tensors(
            self.similarity, self.position, *self._term_sizes, list(self._given_starts.values())
        )
        for name, start in zip(self._term_names, starts, strict=True):
            set_start(getattr(self, name), self._given_starts.get(name, start))
        _pass_drawn(starts)

    def _own_arguments(self) -> dict[str, Any]:
        """Returns the non-default arguments that the module sets in its calls."""
        own: dict[str, Any] = {}
        if self.sink is not None:
            own["sink"] = self.sink
        if self.tolerance != UNSET["tolerance"]:
            own["tolerance"] = self.tolerance
        return own

    def _term_tensors(self, query: Tensor, key: Tensor) -> tuple[list[Tensor], list[int]]:
        """Returns the terms' tensors for a call, and the indices of those computed from key tokens.

        Some tensors are computed from the tokens query (B, Lq, ...) and key (B, Lk, ...).
        """
        tensors = [getattr(self, name) for name in self._term_names]
        if not self._has_projections:
            return tensors, []
        return ops.module_projections(
            self.similarity, self.position, self._term_sizes.num_heads, tensors, query, key
        )

    def _attend(
        self,
        operator: str,
        heads: tuple[Tensor, Tensor, Tensor],
        tokens: tuple[Tensor, Tensor],
        given: MaskArguments,
        allowed: Any,
        own: Mapping[str, Any],
        *,
        dropout: float = 0.0,
        aggregation: str = "mean",
        cache: KVCache | None = None,
        hidden: Tensor | None = None,
        similarity: Terms | None = None,
        more: Terms | None = None,
        rows: list[int] | None = None,
    ) -> Attended:
        """Computes the attention of one call.

        Args:
            operator: the caller's name, for error messages.
            heads: q (B, H, Lq, D), k (B, Hkv, Lk, D) and v (B, Hkv, Lk, Dv) of this call.
            tokens: (B, Lq, ...) and (B, Lk, ...), the tokens of the queries and the keys.
            given: the caller's arguments; only those in `allowed`, a TypedDict, are accepted.
            own: arguments that the module sets.
            dropout: probability of dropping an attention weight.
            aggregation: how values are combined.
            cache: tokens of earlier calls, or None.
            hidden: (B, Lk), including cached keys; True for keys that no query attends to.
            similarity: replaces the module's similarity, if given.
            more: terms to add to the module's position.
            rows: the queries whose weights are returned, or None.
        """
        q, k, v = heads
        places, turns, new_keys = None, False, None
        draft = None
        if cache is not None:
            if not isinstance(cache, KVCache):
                raise wrong_type(operator, "cache", cache, "a KVCache, or None")
            draft = cache._draft()
            places = place_tokens(operator, cache, *tokens, given)
            if rows is None and similarity is None and more is None:
                turns = self._turns_keys(k, places)
            if turns:
                turn = functools.partial(self._turned_keys, places)
                rotation = (self.similarity, self.position)
                k, v, new_keys = draft._append_turned(k, v, turn, rotation)
            else:
                k, v = draft._append(k, v)
        held, of_keys = self._term_tensors(*tokens)
        projections = [held[n] for n in of_keys]
        if cache is not None:
            projections = cache.joined_projections(projections)
            for n, joined in zip(of_keys, projections, strict=True):
                held[n] = joined
        if hidden is not None:
            given["query_segments"], given["key_segments"] = _segments_of_padding(
                operator, hidden, q, given.get("query_segments"), given.get("key_segments")
            )
        terms = self._terms_of_call(held, similarity, more)
        call = lower_call(operator, q, given, allowed, **own)
        weights = None
        if rows is not None:
            weights = ops.module_attention_weights.default(q, k, rows, *terms, *passed(call))
        if dropout != 0:
            call["dropout"] = dropout
        if aggregation != "mean":
            call["aggregation"] = aggregation
        if turns:
            o = ops.module_attention_of_turned_keys.default(
                q, k, v, *terms, new_keys, *passed(call)
            )
        else:
            o = ops.module_attention.default(q, k, v, *terms, *passed(call))

        def keep() -> None:
            if cache is None or draft is None:
                return
            draft.projections, draft._positions = projections, places
            cache._keep(draft)

        return Attended(o, weights, keep)

    def _turns_keys(self, k: Tensor, places: Tensor | None) -> bool:
        """Returns whether a cache stores the rotated keys of a call.

        It does not in low precision, because the keys would be rounded twice, or under
        torch.compile, which would recompile for each number of earlier calls.
        """
        return (
            self._turns_keys_once
            and k.dtype in (torch.float32, torch.float64)
            and (places is None or places.dim() < 3)
            and not torch.compiler.is_compiling()
        )

    def _turned_keys(self, places: Tensor | None, k: Tensor, first: int) -> Tensor:
        """Rotates keys whose first token has index `first`.

        `places` contains the positions of all tokens, or is None.
        """
        if places is not None:
            places = places[..., first : first + k.shape[2]]
        turned: Tensor = ops.module_turned_keys.default(
            k, self.similarity, self.position, self._term_sizes.num_heads, first, places
        )
        return turned

    def _weights(
        self,
        operator: str,
        heads: tuple[Tensor, Tensor],
        tokens: tuple[Tensor, Tensor],
        rows: list[int],
        given: MaskArguments,
        allowed: Any,
        own: Mapping[str, Any],
        *,
        hidden: Tensor | None = None,
        more: Terms | None = None,
    ) -> Tensor:
        """Returns the weights (B, H, n, Lk) of n queries; the arguments are those of _attend."""
        if hidden is not None:
            given["query_segments"], given["key_segments"] = _segments_of_padding(
                operator, hidden, heads[0], given.get("query_segments"), given.get("key_segments")
            )
        weights: Tensor = ops.module_attention_weights.default(
            *heads,
            rows,
            *self._terms_of_call(self._term_tensors(*tokens)[0], None, more),
            *passed(lower_call(operator, heads[0], given, allowed, **own)),
        )
        return weights

    def _terms_of_call(
        self, held: list[Tensor], similarity: Terms | None, more: Terms | None
    ) -> tuple[str, str, list[Tensor]]:
        position = self.position
        if more is not None:
            position = more.spec if position == "none" else f"{position}+{more.spec}"
            held = [*held, *more.tensors]
        if similarity is None:
            return self.similarity, position, held
        return similarity.spec, position, [*similarity.tensors, *held]

    @torch.no_grad()
    def learned_values(self) -> dict[str, LearnedValue]:
        """Returns the current values of all learned parameters of the similarity and the position.

        The keys are names such as "gamma", "alibi_slopes", "hype_tau" or "t5_table". For a per-head
        parameter (H,), the value is start * exp(5 theta) rather than theta. The tensors are copies
        without gradients. The dictionary is empty if nothing is learned.
        """
        names, values, starts = ops.module_learned(
            self.similarity,
            self.position,
            *self._term_sizes[:3],
            [getattr(self, name) for name in self._term_names],
        )
        return {
            name: LearnedValue(value.clone(), start.clone() if start.numel() > 0 else None)
            for name, value, start in zip(names, values, starts, strict=True)
        }


def _pass_drawn(starts: Sequence[Tensor]) -> None:
    """Advances the CPU generator if initial values were drawn from it.

    The operators draw initial values without changing the generator's state, so the next module
    would otherwise get the same values.
    """
    for start in starts:
        if start.numel() > 1 and not start.is_meta and bool((start != start.flatten()[0]).any()):
            torch.empty((), dtype=torch.long, device="cpu").random_()
            return


def _reads_order(component: Component) -> bool:
    names = [parameter["name"] for parameter in component.entry.get("parameters", [])]
    if component.entry.get("needs_causal", False):
        return component.options.get("bidirectional") != "true"
    if "past" in names or component.entry.get("role") == "temperature":
        # The table may be limited to earlier keys, or the temperature may depend on the number of a
        # query's keys.
        return True
    return "bidirectional" in names and "bidirectional" not in component.options


def _segments_of_padding(
    operator: str,
    hidden: Tensor,
    q: Tensor,
    query_segments: object,
    key_segments: object,
) -> tuple[Tensor, Tensor]:
    """Returns segments that hide the padded keys of key_padding_mask from all queries."""
    if query_segments is not None or key_segments is not None:
        raise ValueError(
            f"gnomon.{operator}: key_padding_mask and segments are both given; assign padded keys "
            "to a separate segment instead"
        )
    return torch.zeros(q.shape[2], dtype=torch.int64, device=hidden.device), hidden.long()
