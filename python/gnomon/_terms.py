"""What similarities and positions have in common: how they are lowered to the operator.

A term becomes a specification, "name:key=value", and the tensors of those of its parameters that
are not numbers, in the order of the catalogue (include/gnomon/catalogue.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor


def to_spec(name: str, **options: object) -> str:
    """The specification "name:key=value" of the options that are not None."""
    spec = name
    for key, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool):
            value = "true" if value else "false"
        elif isinstance(value, (tuple, list)):
            value = "x".join([f"{size}" for size in value])
        # Formatting, unlike repr() and str(), is what torch.compile can do to a number.
        spec += f":{key}={value}"
    return spec


def check_shape(what: str, shape: object) -> list[int]:
    """The lengths of the axes of a grid; `what` names the operator and the argument."""
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) for size in shape):
        raise TypeError(f"{what} is {shape!r}; expected a sequence of integers")
    if len(shape) == 0:
        raise ValueError(f"{what} is {shape!r}; expected one axis or more")
    return list(shape)


class Term:
    """A similarity or a position. Its fields are its parameters."""

    #: The name in the catalogue, and the fields that are numbers, words and flags there.
    _name: ClassVar[str]
    _options: ClassVar[tuple[str, ...]] = ()
    #: The fields that may be a tensor instead of a number.
    _tensors: ClassVar[tuple[str, ...]] = ()

    def _lower(self) -> tuple[str, list[Tensor]]:
        tensors: list[Tensor] = []
        options: dict[str, object] = {}
        for field in self._tensors:
            value = getattr(self, field)
            if isinstance(value, Tensor):
                tensors.append(value)
            else:
                options[field] = value
        for field in self._options:
            value = getattr(self, field)
            if isinstance(value, Tensor):
                raise TypeError(
                    f"gnomon.attention: {field} of {self._name} is a Tensor; expected a number"
                )
            options[field] = value
        return to_spec(self._name, **options), tensors
