"""Checks of arguments that the operators cannot make: they see what Torch has converted."""

from __future__ import annotations

import operator as operators
from typing import SupportsIndex, cast

from torch import SymInt, Tensor, strided


def wrong_type(operator: str, argument: str, value: object, expected: str) -> TypeError:
    return TypeError(
        f"gnomon.{operator}: {argument} is a {type(value).__name__}; expected {expected}"
    )


def check_tensors(operator: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise wrong_type(operator, name, tensor, "a Tensor")
        # Those of a jagged layout are refused by it; these have the layout of others.
        if tensor.is_nested and tensor.layout == strided:
            raise TypeError(f"gnomon.{operator}: {name} is nested; expected a tensor of one shape")


def check_flag(operator: str, argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise wrong_type(operator, argument, value, "True or False")


def check_string(operator: str, argument: str, value: object, expected: str = "a string") -> None:
    if not isinstance(value, str):
        raise wrong_type(operator, argument, value, expected)


def check_number(operator: str, argument: str, value: object, expected: str = "a number") -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong_type(operator, argument, value, expected)


def check_optional_number(operator: str, argument: str, value: object) -> None:
    if value is not None:
        check_number(operator, argument, value, "a number, or None")


# torch.compile knows the types of its own numbers, and does not ask them for attributes.
def is_integer(value: object) -> bool:
    if isinstance(value, (bool, Tensor)):
        return False
    return isinstance(value, (int, SymInt)) or hasattr(value, "__index__")


def to_integer(value: object) -> int:
    """Of what is_integer, a number that the operators take, which NumPy's are not all."""
    if not isinstance(value, (int, SymInt)):
        value = operators.index(cast(SupportsIndex, value))
    return cast("int", value)


def check_optional_integer(operator: str, argument: str, value: object) -> int | None:
    """As check_integer."""
    if value is None:
        return None
    return check_integer(operator, argument, value, "an integer, or None")


def check_integer(operator: str, argument: str, value: object, expected: str = "an integer") -> int:
    """The value as to_integer has it."""
    if not is_integer(value):
        raise wrong_type(operator, argument, value, expected)
    number = to_integer(value)
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ValueError(f"gnomon.{operator}: {argument} is {number}; expected an int64")
    return number
