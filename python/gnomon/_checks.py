"""Argument checks that run before PyTorch converts the values for the operators."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator as operators
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, SupportsIndex, TypeAlias, TypeVar, cast

import torch
from torch import SymFloat, SymInt, Tensor, jagged, strided
from torch.compiler import is_compiling

#: A device argument, as in torch.nn.
Device: TypeAlias = torch.device | str | int | None

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kind_of(value: object) -> str:
    """Returns the value's type with an article ("an int"), or "the class T" for a class."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIO" else f"a {name}"


def shown(value: object) -> str:
    """Formats a value as one short line, for messages."""
    if isinstance(value, Tensor):
        return f"a Tensor of shape {list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def wrong_type(operator: str, argument: str, value: object, expected: str) -> TypeError:
    return TypeError(f"gnomon.{operator}: {argument} is {kind_of(value)}; expected {expected}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean rope?", or "" if no known name is close."""
    close = difflib.get_close_matches(name, list(known))
    return f"did you mean {' or '.join(close)}?" if close else ""


def unknown_name(where: str, kind: str, name: str, known: Sequence[str]) -> TypeError:
    """Returns the error for an unknown argument, with the closest known name."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(known)}"
    return TypeError(f"{where}: unexpected {kind} {name}{hint}")


def checks_argument_names(
    error: Callable[[str], TypeError] | None = None,
) -> Callable[[_Function], _Function]:
    """Decorates a function so that its error for an unknown argument suggests the closest name.

    error: a function that creates the error for a name; by default, unknown_name.
    """

    def decorate(function: _Function) -> _Function:
        known = list(inspect.signature(function).parameters)
        where = f"gnomon.{function.__name__}"

        def unknown(_: tuple[Any, ...], name: str) -> TypeError:
            return error(name) if error else unknown_name(where, "argument", name, known)

        return _checking_names(function, known, unknown)

    return decorate


def name_unknown_arguments(cls: type, advice: Mapping[str, str] | None = None) -> None:
    """Makes a constructor's error for an unknown argument suggest the closest name.

    advice: maps other libraries' argument names to a text that replaces the suggestion.
    """
    for base in cls.__mro__:
        construct = vars(base).get("__init__")
        if base.__module__.startswith("gnomon.") and construct is not None:
            base.__init__ = _naming(construct, advice or {})  # type: ignore[misc]


def _naming(construct: Callable[..., None], advice: Mapping[str, str]) -> Callable[..., None]:
    parameters = inspect.signature(construct).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if takes_any or hasattr(construct, "__wrapped__"):
        return construct
    known = list(parameters)[1:]

    def unknown(args: tuple[Any, ...], name: str) -> TypeError:
        where = f"{type(args[0]).__module__}.{type(args[0]).__name__}"
        if name in advice:
            return TypeError(f"{where}: unexpected argument {name}; {advice[name]}")
        return unknown_name(where, "argument", name, known)

    return _checking_names(construct, known, unknown)


def _checking_names(
    function: _Function,
    known: Iterable[str],
    unknown: Callable[[tuple[Any, ...], str], TypeError],
) -> _Function:
    names = frozenset(known)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                raise unknown(args, name)
        return function(*args, **kwargs)

    return cast(_Function, checked)


def check_tensors(operator: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise wrong_type(operator, name, tensor, "a Tensor")
        layout = tensor.layout
        # Functions that do not support the jagged layout reject it themselves.
        if layout == strided and tensor.is_nested:
            raise TypeError(
                f"gnomon.{operator}: {name} is a nested tensor with the strided "
                "layout; expected a dense tensor or the jagged layout"
            )
        if layout != strided and layout != jagged:
            check_layout(operator, name, tensor)


def check_layout(operator: str, argument: str, value: object) -> None:
    """Rejects sparse and nested tensors; other values pass."""
    if not isinstance(value, Tensor):
        return
    if value.is_nested:
        raise TypeError(
            f"gnomon.{operator}: {argument} is a nested tensor; expected a dense tensor"
        )
    if value.layout != strided:
        layout = str(value.layout).removeprefix("torch.")
        raise TypeError(
            f"gnomon.{operator}: {argument} has layout {layout}; expected a strided tensor"
        )


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts floating-point tensors other than float64 to autocast's dtype, as SDPA does."""
    # Reading tensor.device takes as long as the rest of this function, so check is_cpu first.
    kind = "cpu" if tensors[0].is_cpu else tensors[0].device.type
    # Autocast does not support the meta device.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )


def by_default(
    start: Tensor, device: Device = None, dtype: torch.dtype | None = None, *, copy: bool = False
) -> Tensor:
    """Converts a CPU tensor to the device and dtype that torch.empty() would use.

    This works under torch.compile, which does not trace torch.get_default_device().
    """
    like = torch.empty(0, device=device, dtype=dtype)
    return start.to(like.device, like.dtype, copy=copy)


def plain(value: Any) -> Any:
    """Converts NumPy scalars and 0-d arrays to Python numbers; returns other values unchanged.

    NumPy types are recognised by their module's name, so NumPy need not be installed.
    """
    # This comes first because torch.compile cannot read attributes of its symbolic numbers.
    if isinstance(value, (bool, int, float, str, Tensor, SymInt, SymFloat)):
        # This includes NumPy's float64 and str_.
        return value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def is_flag(value: object) -> bool:
    return isinstance(plain(value), bool)


def check_flag(operator: str, argument: str, value: object) -> bool:
    """Checks a flag and converts it to bool."""
    if value is True or value is False:
        return value
    if not is_flag(value):
        raise wrong_type(operator, argument, value, "True or False")
    return bool(value)


def check_string(operator: str, argument: str, value: object, expected: str = "a string") -> None:
    if not isinstance(value, str):
        raise wrong_type(operator, argument, value, expected)


def is_number(value: object) -> bool:
    """Returns whether a value is a real number (0-d tensors count, but Booleans do not)."""
    value = plain(value)
    if isinstance(value, bool):
        return False
    if isinstance(value, Tensor):
        return value.dim() == 0 and (value.is_floating_point() or is_integer_type(value.dtype))
    return isinstance(value, (float, SymFloat)) or is_integer(value) or isinstance(value, Real)


def to_number(operator: str, argument: str, value: object) -> float:
    """Converts a value that passes is_number to a float, without a gradient."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(
                f"gnomon.{operator}: {argument} requires grad, but it cannot be trained; expected "
                "a number"
            )
        value = value.item()
    value = plain(value)
    if not isinstance(value, (int, float, SymInt, SymFloat)):
        value = float(cast(Real, value))
    return cast("float", value)


def check_number(operator: str, argument: str, value: object, expected: str = "a number") -> float:
    """Checks a number and converts it with to_number."""
    if type(value) is float:
        return value
    if not is_number(value):
        raise wrong_type(operator, argument, value, expected)
    return to_number(operator, argument, value)


def check_optional_number(operator: str, argument: str, value: object) -> float | None:
    """Like check_number, but accepts None."""
    if value is None:
        return None
    return check_number(operator, argument, value, "a number, or None")


def is_integer_type(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def is_integer(value: object) -> bool:
    """Returns whether a value is an integer (0-d tensors count, but Booleans do not)."""
    value = plain(value)
    if isinstance(value, (bool, float, SymFloat)):
        return False
    if isinstance(value, Tensor):
        return value.dim() == 0 and is_integer_type(value.dtype)
    if isinstance(value, (int, SymInt)):
        return True
    # NumPy arrays have __index__ for every dtype, so exclude them.
    return hasattr(value, "__index__") and not hasattr(value, "__array__")


def to_integer(value: object) -> int:
    """Converts a value that passes is_integer to an int."""
    value = value.item() if isinstance(value, Tensor) else plain(value)
    if not isinstance(value, (int, SymInt)):
        value = operators.index(cast(SupportsIndex, value))
    return cast("int", value)


def check_optional_integer(operator: str, argument: str, value: object) -> int | None:
    """Like check_integer, but accepts None."""
    if value is None:
        return None
    return check_integer(operator, argument, value, "an integer, or None")


def check_integer(operator: str, argument: str, value: object, expected: str = "an integer") -> int:
    """Checks an integer and converts it with to_integer."""
    if type(value) is int:
        number = value
    elif is_integer(value):
        number = to_integer(value)
    else:
        raise wrong_type(operator, argument, value, expected)
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ValueError(
            f"gnomon.{operator}: {argument} is {number}; expected an integer in the int64 range"
        )
    return number


_INTEGERS = "a Tensor, a sequence of integers or an integer"


def check_integers(
    operator: str,
    argument: str,
    value: object,
    like: Tensor | None = None,
    expected: str = _INTEGERS,
) -> Tensor:
    """Returns tensors unchanged; converts other integer inputs to a tensor on like's device."""
    if isinstance(value, Tensor):
        check_layout(operator, argument, value)
        return value
    device = None if like is None else like.device
    if hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0:
        # torch.compile traces an array as a tensor and cannot list its numbers.
        if is_compiling():
            return torch.as_tensor(value, device=device)
        value = cast(Any, value).tolist()
    numbers = _to_integers(operator, argument, value, expected)
    try:
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    except ValueError:
        raise ValueError(
            f"gnomon.{operator}: {argument} has rows of different lengths; expected equal lengths"
        ) from None


def check_optional_integers(
    operator: str, argument: str, value: object, like: Tensor
) -> Tensor | None:
    """Like check_integers, but accepts None."""
    if value is None:
        return value
    return check_integers(operator, argument, value, like, f"{_INTEGERS}, or None")


def _to_integers(operator: str, argument: str, value: object, expected: str) -> Any:
    if isinstance(value, (list, tuple, range)):
        return [
            _to_integers(operator, f"{argument}[{n}]", item, "an integer")
            for n, item in enumerate(value)
        ]
    return check_integer(operator, argument, value, expected)
