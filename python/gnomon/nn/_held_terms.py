"""What modules with a similarity and a position have in common."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon._attention import MaskArguments, lower_call, passed
from gnomon._catalogue import Component, components_of
from gnomon._checks import Device, by_default, wrong_type
from gnomon._library import ops
from gnomon.nn._caches import KVCache, place_tokens


class LearnedValue(NamedTuple):
    """A value that a module has learned, as it acts, and where it started.

    start is None where the module does not know it: for tables and for tensors given in terms.
    """

    value: Tensor
    start: Tensor | None


class Projection(torch.nn.Linear):
    """A linear layer that starts with weights N(0, gain^2 / in_features) and biases 0."""

    gain = 1.0

    def reset_parameters(self) -> None:
        """Draws new weights."""
        torch.nn.init.normal_(self.weight, 0, self.gain * self.in_features**-0.5)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def with_gain(self, gain: float) -> Projection:
        """Draws new weights for another gain; returns the layer."""
        self.gain = gain
        self.reset_parameters()
        return self


def reset_children(module: torch.nn.Module) -> None:
    """Calls reset_parameters() of the submodules, or of theirs where they have none."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if reset is None:
            reset_children(child)
        else:
            reset()


def set_start(tensor: Tensor, start: Tensor) -> None:
    """Copies a start into a parameter or a buffer, which may be distributed."""
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
def named_as(module: str) -> Iterator[None]:
    """Operators that all modules share name MultiheadAttention in their messages."""
    try:
        yield
    except (ValueError, TypeError) as error:
        message = str(error).replace("gnomon.nn.MultiheadAttention", f"gnomon.nn.{module}")
        raise type(error)(message) from None


class Terms(NamedTuple):
    """A specification, or several joined by "+", and the tensors that it mentions."""

    spec: str
    tensors: Sequence[Tensor] = ()


class Attended(NamedTuple):
    """What a call of a module has computed."""

    o: Tensor
    #: Of the rows that were asked for.
    weights: Tensor | None
    #: Adds the call's tokens to the cache: once nothing can fail any more.
    keep: Callable[[], None]


class HeldTerms(torch.nn.Module):
    """A module that holds the tensors of its similarity and its position."""

    #: The specifications; "<name>=tensor" says what came as a tensor.
    similarity: str
    position: str
    _term_names: tuple[str, ...]

    def _hold_terms(
        self,
        similarity: str,
        position: str,
        given: Sequence[Tensor],
        sizes: tuple[int, int, int, int, int, int],
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        """Registers the tensors of both.

        sizes are num_heads, the columns of a head of q and k and of v, the rows of a table of
        positions, and the columns of the tokens that queries and keys are made from. given are the
        tensors that the specifications mention, in their order.
        """
        self.similarity = similarity
        self.position = position
        self._term_sizes = sizes
        with named_as(type(self).__name__):
            names, starts, learned = ops.module_tensors(similarity, position, *sizes, given)
        self._has_projections: bool = ops.module_has_projections(position)
        self._turns_keys_once: bool = ops.module_turns_keys_once(similarity, position)
        self._term_names = tuple(names)
        #: Whether a causal call is more than one that sees no later key.
        self._reads_order = any(_reads_order(component) for component in components_of(position))
        #: Of those that were given, what reset_parameters() sets them to.
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
            # A torch.nn.Parameter stays the same object where torch can change it in place.
            self.to(device=device, dtype=dtype)
        _pass_drawn(starts)

    def _reset_terms(self) -> None:
        """Sets the tensors of the terms to their starts, those that were given to what they were.

        Raises:
            RuntimeError: a tensor was given on the meta device, which has no numbers.
        """
        for name, given in self._given_starts.items():
            if given.is_meta and not getattr(self, name).is_meta:
                raise RuntimeError(
                    f"gnomon.nn.{type(self).__name__}: {name} was given as a tensor on the meta "
                    "device, which has no numbers; expected a specification, or a tensor with "
                    "numbers"
                )
        _, starts, _ = ops.module_tensors(
            self.similarity, self.position, *self._term_sizes, list(self._given_starts.values())
        )
        for name, start in zip(self._term_names, starts, strict=True):
            set_start(getattr(self, name), self._given_starts.get(name, start))
        _pass_drawn(starts)

    def _term_tensors(self, query: Tensor, key: Tensor) -> tuple[list[Tensor], list[int]]:
        """The tensors of the terms for a call, and which of them belong to keys.

        query (B, Lq, ...) and key (B, Lk, ...) are tokens, which some of these are made from.
        """
        tensors = [getattr(self, name) for name in self._term_names]
        if not self._has_projections:
            return tensors, []
        return ops.module_projections(
            self.similarity, self.position, self._term_sizes[0], tensors, query, key
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
        """Attention of one call.

        Args:
            operator: the name in messages.
            heads: q (B, H, Lq, D), k (B, Hkv, Lk, D) and v (B, Hkv, Lk, Dv) of this call.
            tokens: (B, Lq, ...) and (B, Lk, ...), what queries and keys were made from.
            given: the caller's arguments, those of `allowed`, a TypedDict.
            own: arguments that the module sets.
            dropout: the probability of dropping a weight.
            aggregation: how values are summed.
            cache: tokens of earlier calls, or None.
            hidden: (B, Lk), including the keys of the cache: True where no query sees a key.
            similarity: in place of the module's own.
            more: positions beside the module's own.
            rows: the rows of weights to return, or None.
        """
        q, k, v = heads
        own_k, places, turns = k, None, False
        if cache is not None:
            if not isinstance(cache, KVCache):
                raise wrong_type(operator, "cache", cache, "a KVCache, or None")
            places = place_tokens(operator, cache, *tokens, given)
            turns = rows is None and similarity is None and more is None
            turns = turns and self._turns_keys(k, places)
            if turns:
                k, v = cache._joined_turned(k, v, functools.partial(self._turned_keys, places))
            else:
                k, v = cache.joined(k, v)
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
            weights = ops.module_attention_weights.default(
                q, k, rows, *terms, self._term_sizes[2], *passed(call)
            )
        if dropout != 0:
            call["dropout"] = dropout
        if aggregation != "mean":
            call["aggregation"] = aggregation
        attend = ops.module_attention_of_turned_keys if turns else ops.module_attention
        o = attend.default(q, k, v, *terms, *passed(call))

        def keep() -> None:
            if cache is None:
                return
            if turns:
                cache._keep(own_k, k)
            else:
                cache.k = k
            cache.v, cache.projections, cache.positions = v, projections, places

        return Attended(o, weights, keep)

    def _turns_keys(self, k: Tensor, places: Tensor | None) -> bool:
        """Whether a cache keeps the keys of a call as the position rotates them.

        Keys of low precision would be rounded once more, and a traced call would be traced anew for
        each number of calls before it.
        """
        return (
            self._turns_keys_once
            and k.dtype in (torch.float32, torch.float64)
            and (places is None or places.dim() < 3)
            and not torch.compiler.is_compiling()
        )

    def _turned_keys(self, places: Tensor | None, k: Tensor, first: int) -> Tensor:
        """Keys of the tokens from `first` on, rotated; places are the positions of all, or None."""
        if places is not None:
            places = places[..., first : first + k.shape[2]]
        turned: Tensor = ops.module_turned_keys(
            k, self.similarity, self.position, self._term_sizes[0], first, places
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
        """The weights (B, H, n, Lk) of n rows; the arguments are those of _attend."""
        if hidden is not None:
            given["query_segments"], given["key_segments"] = _segments_of_padding(
                operator, hidden, heads[0], given.get("query_segments"), given.get("key_segments")
            )
        weights: Tensor = ops.module_attention_weights.default(
            *heads,
            rows,
            *self._terms_of_call(self._term_tensors(*tokens)[0], None, more),
            self._term_sizes[2],
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
        """What the similarity and the position have learned, as it acts, with its start.

        By name, "gamma", "alibi_slopes", "hype_tau", "t5_table". Of one value per head (H,) it is
        the value itself, start * exp(5 theta), not theta. The tensors are copies without gradients;
        where nothing is learned, the dictionary is empty.
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
    """Moves on the state of the CPU's generator where starts were drawn by it.

    They are drawn without a change of that state: those of the next module would be the same.
    """
    for start in starts:
        if start.numel() > 1 and not start.is_meta and bool((start != start.flatten()[0]).any()):
            torch.empty((), dtype=torch.long, device="cpu").random_()
            return


def _reads_order(component: Component) -> bool:
    names = [parameter["name"] for parameter in component.entry.get("parameters", [])]
    if component.entry.get("needs_causal", False):
        return component.options.get("bidirectional") != "true"
    return "bidirectional" in names and "bidirectional" not in component.options


def _segments_of_padding(
    operator: str,
    hidden: Tensor,
    q: Tensor,
    query_segments: object,
    key_segments: object,
) -> tuple[Tensor, Tensor]:
    """Segments with which all queries see the keys that a key_padding_mask leaves."""
    if query_segments is not None or key_segments is not None:
        raise ValueError(
            f"gnomon.{operator}: key_padding_mask and segments are both given; expected keys that "
            "are hidden to be of a segment of their own"
        )
    return torch.zeros(q.shape[2], dtype=torch.int64, device=hidden.device), hidden.long()
