"""Lowers similarities and positions to operator arguments.

A term (a similarity or a position) becomes a specification, "name:key=value", and a list of
tensors. The tensors are the values of the parameters written as "name=tensor", in catalogue order
(include/gnomon/catalogue.h).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import SymFloat, SymInt, Tensor
from torch.compiler import is_compiling

from gnomon._checks import (
    check_layout,
    is_flag,
    is_integer,
    is_number,
    shown,
    to_integer,
    to_number,
    unknown_name,
    wrong_type,
)


def to_spec(name: str, **options: object) -> str:
    """Returns the specification "name:key=value" for the options that are not None."""
    term = name.split(":")[0]
    spec = name
    for key, value in options.items():
        if value is None:
            continue
        if is_flag(value):
            value = "true" if value else "false"
        elif is_integer(value):
            value = to_integer(value)
        elif is_number(value):
            value = to_number("attention", f"{key} of {term}", value)
        elif isinstance(value, Tensor):
            raise wrong_type("attention", f"{key} of {term}", value, "a number")
        elif isinstance(value, str) and any(mark in value for mark in ":+="):
            raise ValueError(
                f"gnomon: {term} has {key} = {value!r}; expected a word without :, + or ="
            )
        between = f":{key}="
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(part, (str, int, float, SymInt, SymFloat)):
                expected = "a number, a word, a flag or a sequence of integers"
                raise wrong_type("attention", f"{key} of {term}", part, expected)
            # torch.compile traces f-strings of numbers, but not repr(), str() or join(). PyTorch
            # 2.11 traces f-strings only for results of operations, hence `* 1`.
            spec += f"{between}{part if isinstance(part, str) else part * 1}"
            between = "x"
    return spec


def check_shape(what: str, shape: object) -> list[int]:
    """Returns a grid's axis lengths; `what` names the operator and the argument in errors."""
    if not isinstance(shape, Sequence) or not all(is_integer(size) for size in shape):
        raise TypeError(f"{what} is {shown(shape)}; expected a sequence of integers")
    if len(shape) == 0:
        raise ValueError(f"{what} is {shown(shape)}; expected at least one axis")
    return [to_integer(size) for size in shape]


def _fits(value: object, kinds: str) -> bool:
    """Returns whether a value matches an annotation such as "int | None"."""
    for kind in kinds.split(" | "):
        if kind == "None":
            fits = value is None
        elif kind == "bool":
            fits = is_flag(value)
        elif kind == "str" or kind.startswith("Literal["):
            fits = isinstance(value, str)  # the operator rejects invalid words
        elif kind == "int":
            fits = is_integer(value)
        elif kind == "float":
            fits = is_number(value)
        else:
            fits = isinstance(value, (list, tuple))
        if fits:
            return True
    return False


class _TermType(type):
    """Metaclass of terms: the error for an unknown parameter suggests the closest name."""

    # Type checkers skip this, and inspect reads __signature__, so both see a class's parameters.
    if not TYPE_CHECKING:

        @property
        def __signature__(cls) -> inspect.Signature:
            signature = inspect.signature(cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])

        def __call__(cls, *args, **kwargs):
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                known = list(cls.__signature__.parameters)
                unknown = [name for name in kwargs if name not in known]
                if not unknown:
                    raise
                where = f"{cls.__module__}.{cls.__name__}"
                raise unknown_name(where, "parameter", unknown[0], known) from None


class Term(metaclass=_TermType):
    """A similarity or a position. Its fields are its parameters."""

    #: Name of the module, such as "position".
    _module: ClassVar[str]
    #: Name in the catalogue.
    _name: ClassVar[str]
    #: Fields that are numbers, words or flags.
    _options: ClassVar[tuple[str, ...]] = ()
    #: Fields that may be tensors, in catalogue order.
    _tensors: ClassVar[tuple[str, ...]] = ()
    #: Fields of _tensors that cannot be numbers; None is allowed only as a default.
    _tables: ClassVar[tuple[str, ...]] = ()
    #: Suboptions of fields that accept a word with suboptions, such as "yarn:factor=4".
    _details: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: Options that are shapes.
    _shapes: ClassVar[tuple[str, ...]] = ()
    #: Fields that are axis lengths: height and width.
    _axes: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in self._tensors:
            check_layout(f"{self._module}.{type(self).__name__}", field, getattr(self, field))
        for field in self._tables:
            value = getattr(self, field)
            if isinstance(value, Tensor):
                continue
            # A field with a default is also a class attribute.
            optional = hasattr(type(self), field)
            if value is not None or not optional:
                expected = "a tensor, or None" if optional else "a tensor"
                raise wrong_type(f"{self._module}.{type(self).__name__}", field, value, expected)
        for field in self._shapes:
            shape = getattr(self, field)
            if shape is not None:
                what = f"gnomon.{self._module}.{type(self).__name__}: {field}"
                # Make a copy, because changing a list later would not update the stored
                # specification.
                self._set(field, tuple(check_shape(what, shape)))
        self._keep_lowered()

    def _keep_lowered(self) -> None:
        """Stores the specification of all non-tensor fields, together with the tensors.

        Building the specification takes as long as attention over a few tokens. Storing it also
        keeps torch.compile from formatting a term's numbers, which may be symbolic.
        """
        if hasattr(self, "_name") and not is_compiling():
            self._set("_lowered", (self._to_spec(), tuple(self._own_tensors())))

    def _lower(self) -> tuple[str, Sequence[Tensor]]:
        """Returns the specification and the tensors, in the order that the operator expects."""
        lowered: tuple[str, Sequence[Tensor]] | None = getattr(self, "_lowered", None)
        return (self._to_spec(), self._own_tensors()) if lowered is None else lowered

    def _tensor_fields(self) -> list[str]:
        """Returns the fields that are tensors, in the order that the operator expects."""
        return [field for field in self._tensors if isinstance(getattr(self, field), Tensor)]

    def _own_tensors(self) -> list[Tensor]:
        return [getattr(self, field) for field in self._tensor_fields()]

    def _to_spec(self) -> str:
        if not hasattr(self, "_name"):
            raise TypeError(
                f"gnomon.attention: {type(self).__name__} is an abstract class; "
                "expected one of its subclasses"
            )
        options: dict[str, object] = {}
        for field in self._tensors:
            value = getattr(self, field)
            if not isinstance(value, Tensor) and field not in self._tables:
                self._check(field, value, "float", "a number or a tensor (H,)")
            options[field] = "tensor" if isinstance(value, Tensor) else value
        for field in self._axes:
            self._check(field, getattr(self, field), "int")
        if self._axes:
            options["shape"] = tuple([getattr(self, field) for field in self._axes])
        for field in self._options:
            value = getattr(self, field)
            self._check(field, value, type(self).__annotations__[field])
            options[field] = value
        spec = to_spec(self._name, **options)
        for field, details in self._details.items():
            words = getattr(self, field)
            if words is not None:
                self._check(field, words, "str", "a string")
                word, *options_of_it = words.split(":")
                names = {option.partition("=")[0] for option in options_of_it}
                if "+" in words or "=" in word or not names <= set(details):
                    raise ValueError(
                        f"gnomon: {self._name} has {field} = {words!r}; expected a word, "
                        f"optionally followed by options from {', '.join(details)}"
                    )
                spec += f":{field}={words}"
        return spec

    def _check(self, field: str, value: object, kinds: str, expected: str = "") -> None:
        if not _fits(value, kinds):
            words = {"float": "a number", "int": "an integer"}
            if kinds.startswith("Literal["):
                kinds = kinds.replace(kinds[: kinds.index("]") + 1], "str")
            expected = expected or words.get(kinds, kinds)
            raise wrong_type("attention", f"{field} of {self._name}", value, expected)

    def _set(self, field: str, value: object) -> None:
        """Sets a field of a frozen instance during construction."""
        object.__setattr__(self, field, value)


@dataclass(frozen=True, eq=False)
class SpecifiedTerm(Term):
    """A term given by a specification and its tensors, in catalogue order."""

    spec: str
    tensors: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        name = f"{self._module}.{type(self).__name__}"
        if not isinstance(self.spec, str):
            raise wrong_type(name, "spec", self.spec, "a string")
        is_sequence = isinstance(self.tensors, (tuple, list))
        if not is_sequence or not all(isinstance(tensor, Tensor) for tensor in self.tensors):
            raise wrong_type(name, "tensors", self.tensors, "a tuple of tensors")
        for n, tensor in enumerate(self.tensors):
            check_layout(name, f"tensors[{n}]", tensor)

    def _lower(self) -> tuple[str, Sequence[Tensor]]:
        return self.spec, self.tensors

    def _own_tensors(self) -> list[Tensor]:
        return list(self.tensors)
