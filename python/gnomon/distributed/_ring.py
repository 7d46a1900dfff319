"""Computes attention over key shards passed around a ring, and merges the results exactly."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon.distributed._composed import composed_ring
from gnomon.distributed._sequence import WholeSequence
from gnomon.distributed._sums import Sums


class _Result(NamedTuple):
    """The result for some rows, merged over the shards processed so far."""

    o: Tensor
    lse: Tensor
    sums: Sums

    @classmethod
    def of_nothing(cls, q: Tensor, columns: int) -> _Result:
        lse = q.new_full(q.shape[:3], -torch.inf)
        return cls(q.new_zeros(*q.shape[:3], columns), lse, Sums(lse, torch.zeros_like(lse)))

    def plus(self, o: Tensor, lse: Tensor, statistics: Tensor) -> _Result:
        part = Sums.of(statistics)
        total = self.sums.plus(part)
        return _Result(
            self.o * self.sums.share_of(total) + o * part.share_of(total),
            torch.logaddexp(self.lse, lse),
            total,
        )

    @classmethod
    def of_rows(cls, results: list[_Result]) -> _Result:
        """Concatenates the results of consecutive rows."""
        if len(results) == 1:
            return results[0]
        o, lse, sums = zip(*results, strict=True)
        largest, weight = (torch.cat(parts, 2) for parts in zip(*sums, strict=True))
        return cls(torch.cat(o, 2), torch.cat(lse, 2), Sums(largest, weight))


class RingAttention(torch.autograd.Function):
    """Computes o and lse from (sequence, q, k, v, *tensors).

    The tensors are those of the sequence's terms, followed by the temperature if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, sequence: WholeSequence, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = sequence.parts
        # In low precision, round only the inputs and the final output, not each partial result.
        computing = torch.promote_types(q.dtype, torch.float32)
        query = q.to(computing)
        last = sequence.last_step()
        head_dim = k.size(3)
        keys = torch.cat([k, v], 3)
        pieces = parts.query_pieces[parts.rank]
        results = [_Result.of_nothing(query[:, :, piece.rows], v.size(3)) for piece in pieces]
        for step in range(last + 1):
            source = parts.source(step)
            passage = None
            if step < last:
                passage = parts.send_around(keys, parts.keys[parts.source(step + 1)])
            seen = sequence.seen(parts.rank, source)
            if step == 0 and not seen:
                # Always attend to some of the process's own keys, so that all processes detect
                # invalid arguments.
                seen = [(0, parts.key_pieces[source][0])]
            try:
                for n, columns in seen:
                    part = keys[:, :, columns.rows].to(computing)
                    key, value = part.split([head_dim, v.size(3)], 3)
                    rows = pieces[n]
                    results[n] = results[n].plus(
                        *sequence.attend(rows, columns, query[:, :, rows.rows], key, value, tensors)
                    )
            except Exception:
                if passage is not None:
                    passage.wait()
                raise
            if passage is not None:
                keys = passage.wait()
        whole = _Result.of_rows(results)
        o, lse, sums = whole.o, whole.lse, whole.sums
        ctx.sequence = sequence
        ctx.last = last
        ctx.save_for_backward(q, k, v, o, *sums, *tensors)
        ctx.set_materialize_grads(False)
        return o.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # with create_graph=True
            return _differentiable_gradients(ctx, d_o, d_lse)
        sequence: WholeSequence = ctx.sequence
        parts = sequence.parts
        last: int = ctx.last
        q, k, v, o, largest, sum_of_weights, *tensors = ctx.saved_tensors
        pieces = parts.query_pieces[parts.rank]
        totals = [
            Sums(largest[:, :, piece.rows], sum_of_weights[:, :, piece.rows]) for piece in pieces
        ]
        d_out = torch.zeros_like(o) if d_o is None else d_o.to(o.dtype)
        d_total = torch.zeros_like(largest) if d_lse is None else d_lse
        # A part of weight w has d_part_lse = w (d_o . part_o - d_o . o + d_lse) =
        # w (d_o . part_o + rest).
        rest = d_total - (d_out * o).sum(3)
        query = q.to(o.dtype).detach()
        head_dim = k.size(3)
        needs_q, needs_terms = ctx.needs_input_grad[1], ctx.needs_input_grad[4:]
        needs_keys = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        d_q = torch.zeros_like(query)
        d_tensors = [
            torch.zeros_like(tensor) if needs else None
            for tensor, needs in zip(tensors, needs_terms, strict=True)
        ]
        keys = torch.cat([k, v], 3).detach()
        d_keys = torch.zeros_like(keys, dtype=o.dtype) if needs_keys else None
        d_passage = None
        for step in range(last + 1):
            source = parts.source(step)
            passage = None
            if step < last:
                passage = parts.send_around(keys, parts.keys[parts.source(step + 1)])
            d_part = None
            for n, columns in sequence.seen(parts.rank, source):
                rows = pieces[n]
                with torch.enable_grad():
                    leaf_q = query[:, :, rows.rows].detach().requires_grad_(needs_q)
                    leaf_keys = keys[:, :, columns.rows].to(o.dtype).detach()
                    leaf_keys.requires_grad_(needs_keys)
                    leaves = [
                        tensor.detach().requires_grad_(needs)
                        for tensor, needs in zip(tensors, needs_terms, strict=True)
                    ]
                    key, value = leaf_keys.split([head_dim, v.size(3)], 3)
                    part_o, part_lse, statistics = sequence.attend(
                        rows, columns, leaf_q, key, value, leaves
                    )
                weight = Sums.of(statistics).share_of(totals[n])
                d_part_o = weight * d_out[:, :, rows.rows]
                d_part_lse = (d_part_o * part_o.detach()).sum(3)
                d_part_lse += weight.squeeze(3) * rest[:, :, rows.rows]
                inputs = [leaf for leaf in (leaf_q, leaf_keys, *leaves) if leaf.requires_grad]
                gradients = iter(
                    torch.autograd.grad((part_o, part_lse), inputs, (d_part_o, d_part_lse))
                )
                if needs_q:
                    d_q[:, :, rows.rows] += next(gradients)
                if needs_keys:
                    if d_part is None:
                        d_part = torch.zeros_like(keys, dtype=o.dtype)
                    d_part[:, :, columns.rows] += next(gradients)
                for sum_of, gradient in zip(
                    [d_tensor for d_tensor in d_tensors if d_tensor is not None],
                    gradients,
                    strict=True,
                ):
                    sum_of += gradient
            # The keys' gradient arrives after the keys, because the previous process adds to it.
            if d_passage is not None:
                d_keys = d_passage.wait()
            if d_keys is not None and d_part is not None:
                d_keys = d_keys + d_part
            if passage is not None:
                keys = passage.wait()
                if d_keys is not None:
                    d_passage = parts.send_around(d_keys, keys.size(2))
        if d_keys is not None and last > 0:
            # Return the gradient to the process that owns the keys.
            d_keys = parts.send_around(d_keys, k.size(2), hops=-last).wait()
        d_k = d_v = None
        if d_keys is not None:
            d_k, d_v = d_keys.split([head_dim, v.size(3)], 3)
        return (
            None,
            d_q.to(q.dtype) if needs_q else None,
            d_k.to(k.dtype) if d_k is not None and ctx.needs_input_grad[2] else None,
            d_v.to(v.dtype) if d_v is not None and ctx.needs_input_grad[3] else None,
            *d_tensors,
        )


def _differentiable_gradients(
    ctx: Any, d_o: Tensor | None, d_lse: Tensor | None
) -> tuple[Any, ...]:
    """Computes the gradients of RingAttention so that they can be differentiated."""
    q, k, v, _, _, _, *tensors = ctx.saved_tensors
    inputs = [q, k, v, *tensors]
    outputs = composed_ring(ctx.sequence, *inputs)
    given = [
        (output, gradient)
        for output, gradient in zip(outputs, (d_o, d_lse), strict=True)
        if gradient is not None
    ]
    needs = ctx.needs_input_grad[1:]
    gradients = iter(
        torch.autograd.grad(
            [output for output, _ in given],
            [tensor for tensor, needed in zip(inputs, needs, strict=True) if needed],
            [gradient for _, gradient in given],
            create_graph=True,
            materialize_grads=True,
        )
    )
    return None, *(next(gradients) if needed else None for needed in needs)
