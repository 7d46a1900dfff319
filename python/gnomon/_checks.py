"""Checks of arguments that the operators cannot make: they see what Torch has converted."""

from __future__ import annotations

from torch import SymInt, Tensor


def wrong_type(operator: str, argument: str, value: object, expected: str) -> TypeError:
    return TypeError(
        f"gnomon.{operator}: {argument} is a {type(value).__name__}; expected {expected}"
    )


def check_tensors(operator: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise wrong_type(operator, name, tensor, "a Tensor")


def check_flag(operator: str, argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise wrong_type(operator, argument, value, "True or False")


def check_string(operator: str, argument: str, value: object, expected: str = "a string") -> None:
    if not isinstance(value, str):
        raise wrong_type(operator, argument, value, expected)


def check_number(operator: str, argument: str, value: object, expected: str = "a number") -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong_type(operator, argument, value, expected)


def check_scale(operator: str, scale: object) -> None:
    if scale is not None:
        check_number(operator, "scale", scale, "a number, or None")


def check_optional_integer(operator: str, argument: str, value: object) -> None:
    if value is not None:
        check_integer(operator, argument, value, "an integer, or None")


def check_integer(
    operator: str, argument: str, value: object, expected: str = "an integer"
) -> None:
    if not isinstance(value, (int, SymInt)) or isinstance(value, bool):
        raise wrong_type(operator, argument, value, expected)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"gnomon.{operator}: {argument} is {value}; expected an int64")
