"""What gnomon.similarity has besides a class for each term: their base and specifications."""

from __future__ import annotations

from gnomon._checks import wrong_type
from gnomon._terms import SpecifiedTerm, Term


class Similarity(Term):
    """The base of all similarities."""

    _module = "similarity"


class Specified(SpecifiedTerm, Similarity):
    """One that is given by a specification, "penumbral:gamma=tensor:score=height2".

    tensors are those of its parameters that are "name=tensor" there.
    """


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
