"""Argument parser of this package's programs, with one-line messages and suggestions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gnomon._checks import did_you_mean


def failure(program: str) -> Callable[[str], NoReturn]:
    """Returns a function that prints an error of the program on one line and exits with code 2."""

    def fail(message: str) -> NoReturn:
        print(f"{program}: {message}", file=sys.stderr)
        raise SystemExit(2)

    return fail


class Parser(argparse.ArgumentParser):
    """Reports invalid input on one line and suggests the closest known option.

    A subcommand rejects its unknown arguments itself, because only it knows its options.

    Args:
        fail: called with the message; it must not return.
        options: passed to ``argparse.ArgumentParser``.
    """

    def __init__(self, *, fail: Callable[[str], NoReturn], **options: Any) -> None:
        super().__init__(**options)
        self._fail = fail
        self._words: list[str] = []

    def add_subparsers(self, **options: Any) -> Any:
        commands = super().add_subparsers(**options)
        add_parser = commands.add_parser

        def add(name: str, **parser_options: Any) -> argparse.ArgumentParser:
            return add_parser(name, fail=self._fail, **parser_options)

        commands.add_parser = add  # type: ignore[method-assign]
        return commands

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._words = list(sys.argv[1:] if args is None else args)
        options, extra = super().parse_known_args(self._words, namespace)
        if extra:
            noun = "argument" if len(extra) == 1 else "arguments"
            self.error(f"unexpected {noun}: {' '.join(extra)}")
        return options, []

    def error(self, message: str) -> NoReturn:
        self._fail(f"{message}{self._suggestion(message)} (see {self.prog} --help)")

    def _suggestion(self, message: str) -> str:
        """Returns a message suffix that suggests a known option for the first unknown one."""
        known = [option for action in self._actions for option in action.option_strings]
        for word in self._words:
            option = word.partition("=")[0]
            # argparse accepts unambiguous abbreviations.
            is_known = any(name.startswith(option) for name in known)
            if option.startswith("--") and not is_known and (hint := did_you_mean(option, known)):
                return f"; {hint}" if option in message else f"; {option} is unknown, {hint}"
        return ""
