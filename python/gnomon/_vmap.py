"""Batching rules of the operators for torch.func.vmap.

Composite operators are decomposed (src/ops/library.cc). Kernel operators fold the samples into the
head or batch axis and run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnomon._library import ops, query

# Batch axis of each argument of the operators for token maps and causal sums.
_BATCH = {
    **dict.fromkeys(("q", "k", "v", "x", "y", "z", "d_x", "d_y", "o", "denominator"), 0),
    **dict.fromkeys(("query", "key", "value", "largest_met", "d"), 0),
    **dict.fromkeys(("row_scalars", "column_scalars", "d_row_scalars", "d_column_scalars"), 1),
}


class _Rule:
    """Batching rule that folds the samples into one axis of the arguments.

    axes maps the names of arguments and outputs to this axis. In a backward pass, each gradient has
    the name of its argument. Arguments in `shared` may have size 1 along the axis; their single
    entry then applies to all heads.
    """

    def __init__(
        self,
        operator: Any,
        axes: dict[str, int],
        outputs: Sequence[str],
        is_backward: bool,
        shared: frozenset[str] = frozenset(),
    ) -> None:
        self.operator = operator
        self.axes = axes
        self.outputs = outputs
        self.may_be_shared = shared
        self.is_backward = is_backward
        self.names = [argument.name for argument in operator._schema.arguments]
        self.defaults = [argument.default_value for argument in operator._schema.arguments]

    def __call__(self, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        samples = info.batch_size
        # PyTorch omits trailing arguments that have their default values.
        given = dict(zip(self.names, (*args, *self.defaults[len(args) :]), strict=True))
        mapped = {
            name: dim
            for name, dim in zip(self.names, in_dims, strict=False)
            if dim is not None and isinstance(given[name], Tensor)
        }
        for name, dim in mapped.items():
            given[name] = given[name].movedim(dim, 0)
        needed = given.get("needed", [True] * len(self.outputs))
        if samples == 0:
            results = self._of_none(given, mapped, needed)
        # These cases need one call per sample: arguments without the axis differ between samples,
        # rotations and packed biases fit the tokens of one sample, and dropout masks depend on the
        # head index.
        elif (
            mapped.keys() - self.axes.keys()
            or any(given.get(name) is not None for name in ("q_cosine", "k_cosine"))
            or given.get("dropout", 0) > 0
            or given.get("bias_parameters") is not None
        ):
            results = self._one_by_one(samples, given, mapped, needed)
        else:
            results = self._along_the_axis(samples, given, mapped, needed)
        dims = [0 if is_needed else None for is_needed in needed]
        # An operator with one output returns a tensor, not a tuple.
        return (tuple(results), tuple(dims)) if len(results) > 1 else (results[0], dims[0])

    def _call(self, given: dict[str, Any]) -> Sequence[Tensor]:
        results = self.operator(*given.values())
        return (results,) if isinstance(results, Tensor) else results

    def _of_none(
        self, given: dict[str, Any], mapped: dict[str, int], needed: Sequence[bool]
    ) -> list[Tensor]:
        """Returns empty results for zero samples; their shapes are computed on the meta device."""
        meta = dict(given)
        for name, value in given.items():
            if isinstance(value, Tensor):
                shape = value.shape[1:] if name in mapped else value.shape
                meta[name] = value.new_empty(shape, device="meta")
        like = given[next(iter(mapped))]
        return [
            like.new_empty((0, *one.shape) if is_needed else one.shape, dtype=one.dtype)
            for one, is_needed in zip(self._call(meta), needed, strict=True)
        ]

    def _one_by_one(
        self, samples: int, given: dict[str, Any], mapped: dict[str, int], needed: Sequence[bool]
    ) -> list[Tensor]:
        calls = [
            self._call(given | {name: given[name][sample] for name in mapped})
            for sample in range(samples)
        ]
        return [
            torch.stack(results) if is_needed else results[0]
            for results, is_needed in zip(zip(*calls, strict=True), needed, strict=True)
        ]

    def _along_the_axis(
        self, samples: int, given: dict[str, Any], mapped: dict[str, int], needed: Sequence[bool]
    ) -> list[Tensor]:
        shared = set()
        folded = dict(given)
        for name, axis in self.axes.items():
            tensor = given.get(name)
            if tensor is None:
                continue
            if name not in mapped:
                # A table shared by all heads can be shared by all samples, except in a backward
                # pass, which would sum its gradient over the samples.
                if name in self.may_be_shared and tensor.shape[axis] == 1 and not self.is_backward:
                    continue
                tensor = tensor.expand(samples, *tensor.shape)
            if name in self.may_be_shared and tensor.shape[axis + 1] == 1:
                shared.add(name)
                # x precedes the tables in axes, so it has already been folded.
                sizes = [-1] * tensor.dim()
                sizes[axis + 1] = folded["x"].shape[self.axes["x"]] // samples
                tensor = tensor.expand(sizes)
            folded[name] = tensor.movedim(0, axis).flatten(axis, axis + 1)
        results = []
        for name, result, is_needed in zip(self.outputs, self._call(folded), needed, strict=True):
            if is_needed:
                axis = self.axes[name]
                count = result.shape[axis] // samples
                result = result.unflatten(axis, (samples, count)).movedim(axis, 0)
                if name in shared and self.is_backward:
                    result = result.sum(axis + 1, keepdim=True)
            results.append(result)
        return results


class _OneByOne:
    """Batching rule that calls an operator once per sample."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator

    def __call__(self, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        results = [
            self.operator(*(self._of(sample, x, dim) for x, dim in zip(args, in_dims, strict=True)))
            for sample in range(info.batch_size)
        ]
        if not results:
            raise NotImplementedError(
                "gnomon: vmap of zero samples is not supported for derivatives and rotations; "
                "expected at least one sample"
            )
        stacked = [torch.stack(of_samples) for of_samples in zip(*results, strict=True)]
        kind = type(results[0])
        return kind(stacked), kind([0] * len(stacked))

    def _of(self, sample: int, x: Any, dim: Any) -> Any:
        if isinstance(x, list | tuple) and isinstance(dim, list | tuple):
            return [self._of(sample, *pair) for pair in zip(x, dim, strict=True)]
        return x if dim is None else x.select(dim, sample)


def _favor_projection(info: Any, in_dims: Sequence[Any], like: Tensor, *args: Any) -> Any:
    """Draws one projection for all samples; only the device and last axis of `like` matter."""
    one = like.new_empty(like.movedim(in_dims[0], 0).shape[1:])  # valid for zero samples
    return ops.favor_projection(one, *args), None


def _rules_of(name: str) -> list[_Rule]:
    """Returns an operator's forward and backward rules, which fold samples into the head axis."""
    axes: dict[str, str] = dict(query("operator_axes", name))
    heads = {
        argument: next((n for n, axis in enumerate(of) if axis[-1] in "HG"), None)
        for argument, of in ((argument, letters.split()) for argument, letters in axes.items())
    }
    along = {argument: axis for argument, axis in heads.items() if axis is not None}
    along |= {"d_o": along["o"], "d_lse": along["lse"]}
    shared = frozenset(argument for argument, letters in axes.items() if "1|H" in letters)
    forward = getattr(ops, f"{name}_forward").default
    backward = getattr(ops, f"{name}_backward").default
    gradients = [output.name.removeprefix("d_") for output in backward._schema.returns]
    return [
        _Rule(forward, along, ("o", "lse", "statistics"), False, shared),
        _Rule(backward, along, gradients, True, shared),
    ]


def register() -> None:
    """Registers the rules of all operators; called once, at import."""
    rules = [*_rules_of("attention"), *_rules_of("graph")]
    for operator, outputs, is_backward in (
        (ops.cone_map, ("x", "row_scalars", "y", "column_scalars"), False),
        (ops.cone_map_backward, ("q", "k"), True),
        (ops.causal_sums, ("o",), False),
        (ops.causal_linear, ("o", "denominator"), False),
        (ops.causal_exponent_sums, ("o",), False),
        (ops.causal_exponent_sums_backward, ("query", "key", "value"), True),
    ):
        rules.append(_Rule(operator.default, _BATCH, outputs, is_backward))
    for rule in rules:
        torch.library.register_vmap(rule.operator, rule)
    alone = [
        f"{name}_{kind}" for name in ("attention", "graph") for kind in ("jvp", "backward_jvp")
    ]
    # Calls that are batched compose rotations of PyTorch's operators instead.
    alone += ["rotate_tokens", "rotate_tokens_backward"]
    for name in alone:
        operator = getattr(ops, name).default
        torch.library.register_vmap(operator, _OneByOne(operator))
    torch.library.register_vmap(ops.favor_projection.default, _favor_projection)
