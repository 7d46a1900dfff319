"""What gnomon.similarity has besides a class for each term: their base and specifications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gnomon._checks import wrong_type
from gnomon._terms import Term


class Similarity(Term):
    """The base of all similarities."""

    _module = "similarity"


@dataclass(frozen=True, eq=False)
class Specified(Similarity):
    """One that is given by a specification, "penumbral:gamma=tensor:score=height2".

    tensors are those of its parameters that are "name=tensor" there.
    """

    spec: str
    tensors: tuple[Tensor, ...] = ()

    def _lower(self) -> tuple[str, Sequence[Tensor]]:
        return self.spec, self.tensors

    def _own_tensors(self) -> list[Tensor]:
        return list(self.tensors)


_DOT = Specified("dot")


def to_similarity(operator: str, similarity: object) -> Similarity:
    """What an argument that is a similarity, a specification or None stands for."""
    if isinstance(similarity, Similarity):
        return similarity
    if similarity is None:
        return _DOT
    if isinstance(similarity, str):
        return Specified(similarity)
    raise wrong_type(
        operator, "similarity", similarity, "one of gnomon.similarity, or a specification"
    )


# Where they are found.
for _term in (Similarity, Specified):
    _term.__module__ = "gnomon.similarity"
