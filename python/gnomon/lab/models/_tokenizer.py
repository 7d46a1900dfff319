"""Tokenizers of language models."""

from __future__ import annotations

import dataclasses

from gnomon._checks import wrong_type

TOKEN_KINDS = ("bytes", "words", "subwords")

# The characters that the program treats as spaces within a line (ASCII only).
_SPACES = b" \t\r\v\f"
_FIRST_WORDS = [b"<unk>", b"<eos>"]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of kind "bytes", "words" or "subwords", with the contents of a vocabulary file.

    For words, the file has one word per line, beginning with <unk> and <eos>. For subwords, it is a
    SentencePiece model. For bytes, the contents are empty.

    Example:
        >>> tokenizer = gnomon.models.Tokenizer("bytes")
        >>> tokenizer.kind
        'bytes'
    """

    kind: str = "bytes"
    vocabulary: bytes = b""

    def __repr__(self) -> str:
        size = "" if self.kind == "bytes" else f", {len(self.vocabulary)} bytes"
        return f"Tokenizer({self.kind!r}{size})"

    def __post_init__(self) -> None:
        if self.kind not in TOKEN_KINDS:
            raise ValueError(
                f"gnomon.models.Tokenizer: kind is {self.kind!r}; expected one of "
                f"{', '.join(TOKEN_KINDS)}"
            )
        if not isinstance(self.vocabulary, bytes):
            raise wrong_type("models.Tokenizer", "vocabulary", self.vocabulary, "bytes")
        if (self.kind == "bytes") != (self.vocabulary == b""):
            raise ValueError(
                f"gnomon.models.Tokenizer: the vocabulary of {self.kind} has "
                f"{len(self.vocabulary)} bytes; expected "
                f"{'none' if self.kind == 'bytes' else 'a file'}"
            )
        if self.kind == "words":
            self._check_words()

    def _check_words(self) -> None:
        """Checks a word vocabulary in the same way as lab/text/tokens.cc."""
        *lines, rest = self.vocabulary.split(b"\n")
        seen = set()
        for number, word in enumerate([*lines, rest] if rest else lines, 1):
            fault = (
                "is not a single word"
                if not word or any(space in word for space in _SPACES)
                else "appears twice"
                if word in seen
                else "has no end"
                if number > len(lines)
                else None
            )
            if fault is not None:
                raise ValueError(
                    f"gnomon.models.Tokenizer: line {number} of the word vocabulary {fault}; "
                    "expected one word per line, without duplicates"
                )
            seen.add(word)
        if lines[:2] != _FIRST_WORDS or len(lines) < 3:
            raise ValueError(
                "gnomon.models.Tokenizer: the word vocabulary begins with "
                f"{b', '.join(lines[:3])!r}; expected <unk>, <eos> and a word"
            )
