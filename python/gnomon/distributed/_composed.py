"""The ring as a composition of differentiable operations, for derivatives other than the gradient.

Unlike RingAttention, it keeps the shards that have passed for the derivatives, so its memory is
linear in the length of the whole sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon.distributed._parts import Parts
from gnomon.distributed._sequence import WholeSequence
from gnomon.distributed._sums import Sums


class _Passage(torch.autograd.Function):
    """Sends keys to the process `hops` places ahead in the ring, and receives `length` others."""

    @staticmethod
    def forward(keys: Tensor, parts: Parts, length: int, hops: int) -> Tensor:
        return parts.send_around(keys, length, hops).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        keys, ctx.parts, ctx.length, ctx.hops = inputs
        ctx.sent = keys.size(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Passage.apply(gradient, ctx.parts, ctx.sent, -ctx.hops), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: Any) -> Tensor | None:
        if tangent is None:
            return None
        passed: Tensor = _Passage.apply(tangent, ctx.parts, ctx.length, ctx.hops)
        return passed

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], keys: Tensor, parts: Parts, length: int, hops: int
    ) -> tuple[Tensor, int]:
        folded = keys.movedim(in_dims[0], 0).flatten(0, 1)
        passed = _Passage.apply(folded, parts, length, hops)
        return passed.unflatten(0, (info.batch_size, -1)), 0


class _Zeros(torch.autograd.Function):
    """Returns zeros like `keys` whose derivatives, all 0, reach the other argument and the keys."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, keys: Tensor) -> Tensor:
        return torch.zeros_like(keys)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_gradient, keys = ctx.saved_tensors
        return _Zeros.apply(gradient, of_gradient), _Zeros.apply(gradient, keys)

    @staticmethod
    def jvp(ctx: Any, *_: Tensor) -> Tensor:
        return torch.zeros_like(ctx.saved_tensors[1])


class _Awaiting(torch.autograd.Function):
    """Returns o. Its backward pass reaches the keys' passages in every process.

    A process that attends to none of the last keys must still take part in sending their gradients.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(o: Tensor, keys: Tensor) -> Tensor:
        return o.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (keys,) = ctx.saved_tensors
        return gradient, _Zeros.apply(gradient, keys)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.clone()


def _change(x: Tensor) -> Tensor:
    """Returns zeros with the derivatives of x; 0 for infinite numbers, which have none."""
    x = torch.where(x.isinf(), 0.0, x)
    return x - x.detach()


class _Result(NamedTuple):
    """The result for some rows, merged over the shards processed so far."""

    o: Tensor
    lse: Tensor
    sums: Sums

    def plus(self, other: _Result) -> _Result:
        total = self.sums.plus(other.sums)
        # The values are those of the partial sums, and the derivatives are those of lse.
        masses = [
            part.sums.share_of(total) * _change(part.lse).exp().unsqueeze(3)
            for part in (self, other)
        ]
        mass = masses[0] + masses[1]
        mass = torch.where(mass == 0, 1.0, mass)
        lse = torch.logaddexp(self.lse.detach(), other.lse.detach())
        return _Result(
            (self.o * masses[0] + other.o * masses[1]) / mass,
            lse + mass.log().squeeze(3),
            total,
        )


def composed_ring(
    sequence: WholeSequence, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes what RingAttention computes."""
    parts = sequence.parts
    computing = torch.promote_types(q.dtype, torch.float32)
    query = q.to(computing)
    head_dim = k.size(3)
    keys = torch.cat([k, v], 3).to(computing)
    pieces = parts.query_pieces[parts.rank]
    results: list[_Result | None] = [None] * len(pieces)
    last = sequence.last_step()
    for step in range(last + 1):
        source = parts.source(step)
        seen = sequence.seen(parts.rank, source)
        if step == 0:
            # All rows have a result, even if they attend to no key.
            seen = [(n, parts.key_pieces[source][0]) for n in range(len(pieces))] + [
                pair for pair in seen if pair[1] is not parts.key_pieces[source][0]
            ]
        for n, columns in seen:
            key, value = keys[:, :, columns.rows].split([head_dim, v.size(3)], 3)
            rows = pieces[n]
            o, lse, statistics = sequence.attend(
                rows, columns, query[:, :, rows.rows], key, value, tensors
            )
            part = _Result(o, lse, Sums.of(statistics.detach()))
            before = results[n]
            results[n] = part if before is None else before.plus(part)
        if step < last:
            keys = _Passage.apply(keys, parts, parts.keys[parts.source(step + 1)], 1)
    done = [result for result in results if result is not None]
    o = torch.cat([result.o for result in done], 2)
    lse = torch.cat([result.lse for result in done], 2)
    return _Awaiting.apply(o, keys).to(q.dtype), lse
