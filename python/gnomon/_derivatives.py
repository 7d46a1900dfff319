"""Backward passes without second derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class _Refusal(torch.autograd.Function):
    """Returns gradients unchanged; differentiating them raises an error."""

    @staticmethod
    def forward(ctx: Any, operator: str, gradients: tuple[Any, ...], *inputs: Any) -> Any:
        ctx.operator = operator
        return gradients

    @staticmethod
    def backward(ctx: Any, *d_gradients: Any) -> Any:
        raise NotImplementedError(
            f"gnomon.{ctx.operator}: second derivatives (gradients of gradients, as with "
            "create_graph=True) are not supported; detach the gradient where it is used as a "
            "constant"
        )


def first_derivatives_only(operator: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the backward of an autograd.Function that has no second derivative.

    Unlike with torch.autograd.function.once_differentiable, the error names the operator, and it is
    also raised if only saved tensors require grad.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *d_outputs: Any) -> Any:
            with torch.no_grad():
                gradients = backward(ctx, *d_outputs)
            if not torch.is_grad_enabled():
                return gradients
            return _Refusal.apply(operator, gradients, *d_outputs, *ctx.saved_tensors)

        return wrapper

    return decorate
