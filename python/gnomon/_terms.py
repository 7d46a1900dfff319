"""What similarities and positions have in common: how they are lowered to the operator.

A term becomes a specification, "name:key=value", and the tensors of those of its parameters that
are not numbers, in the order of the catalogue (include/gnomon/catalogue.h).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor


class Term:
    """A similarity or a position. Its fields are its parameters."""

    #: The name in the catalogue, and the fields that are numbers, words and flags there.
    _name: ClassVar[str]
    _options: ClassVar[tuple[str, ...]] = ()
    #: The fields that may be a tensor instead of a number.
    _tensors: ClassVar[tuple[str, ...]] = ()

    def _lower(self) -> tuple[str, list[Tensor]]:
        spec = self._name
        tensors: list[Tensor] = []
        for field in self._tensors:
            value = getattr(self, field)
            if isinstance(value, Tensor):
                tensors.append(value)
            else:
                spec += f":{field}={value}"
        for field in self._options:
            value = getattr(self, field)
            if isinstance(value, Tensor):
                raise TypeError(
                    f"gnomon.attention: {field} of {self._name} is a Tensor; expected a number"
                )
            if isinstance(value, bool):
                value = "true" if value else "false"
            # Formatting, unlike repr() and str(), is what torch.compile can do to a number.
            if value is not None:
                spec += f":{field}={value}"
        return spec, tensors


class LaterTerm:
    """A term of the interface that this version does not offer."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        module = type(self).__module__
        raise NotImplementedError(
            f"{module}.{type(self).__name__} is not implemented in this version"
        )
