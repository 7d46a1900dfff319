"""The base class of similarities, and similarities given by specifications."""

from __future__ import annotations

from gnomon._checks import wrong_type
from gnomon._terms import SpecifiedTerm, Term


class Similarity(Term):
    """Base class of all similarities."""

    _module = "similarity"


class Specified(SpecifiedTerm, Similarity):
    """A similarity given by a specification, such as "penumbral:gamma=tensor:score=height2".

    tensors contains the values of the parameters written as "name=tensor", in catalogue order.

    Example:
        >>> gamma = torch.ones(8, requires_grad=True)
        >>> term = gnomon.similarity.Specified("gaussian:gamma=tensor", (gamma,))
        >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind()  # (B, H, L, D)
        >>> o = gnomon.attention(q, k, v, similarity=term)
    """


_DOT = Specified("dot")


def to_similarity(operator: str, similarity: object) -> Similarity:
    """Converts a Similarity, a specification or None (the dot product) to a Similarity."""
    if isinstance(similarity, Similarity):
        return similarity
    if similarity is None:
        return _DOT
    if isinstance(similarity, str):
        return Specified(similarity)
    raise wrong_type(
        operator,
        "similarity",
        similarity,
        "a gnomon.similarity object, or a string such as 'cosine'",
    )


# Error messages and pickles should name the public module.
for _term in (Similarity, Specified):
    _term.__module__ = "gnomon.similarity"
