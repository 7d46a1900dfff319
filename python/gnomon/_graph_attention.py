"""Attention over the edges of a graph."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from gnomon._checks import check_optional_number, check_tensors, wrong_type
from gnomon._library import ops
from gnomon.similarity import Dot, Similarity


@overload
def graph_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Tensor,
    indices: Tensor,
    similarity: Similarity | None = ...,
    *,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def graph_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Tensor,
    indices: Tensor,
    similarity: Similarity | None = ...,
    *,
    scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def graph_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Tensor,
    indices: Tensor,
    similarity: Similarity | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """sum_e p_e v_j over the edges e of each node i, p the softmax of the similarities of i and j.

    Every similarity, with exact gradients. The graph is in compressed rows (CSR): row i lists the
    keys that node i sees, which are indices[indptr[i]] ... indices[indptr[i + 1] - 1]. An edge that
    is there twice counts twice. Memory is linear in the number of edges. Graph attention networks
    (Velickovic et al. 2018) have Additive(), q and k the scores of targets and sources, (N, H, 1).

    Args:
        q: (N, H, D), bfloat16, float16, float32 or float64, on the CPU; k and v as q.
        k: (Nk, Hkv, D), H a multiple of Hkv; the same nodes as q, or others.
        v: (Nk, Hkv, Dv).
        indptr: (N + 1,) integers from 0 to E that never fall.
        indices: (E,) integers in [0, Nk).
        similarity: of gnomon.similarity; None is Dot(). Its tensors have q's dtype, or float32
            where that is lower.
        scale: of the dot product, by default 1/sqrt(D); an error with another similarity.
        return_lse: also return lse (N, H), the natural logarithm of the sum of exp(s) over a row's
            edges; differentiable.

    Returns:
        o (N, H, Dv) in q's dtype, or (o, lse), lse in float32 or float64. A node without edges
        gives 0, and lse = -inf.

    Raises:
        ValueError: a shape or a value.
        TypeError: a dtype or a device.
    """
    operator = "graph_attention"
    check_tensors(operator, q=q, k=k, v=v, indptr=indptr, indices=indices)
    check_optional_number(operator, "scale", scale)
    similarity = Dot() if similarity is None else similarity
    if not isinstance(similarity, Similarity):
        raise wrong_type(operator, "similarity", similarity, "one of gnomon.similarity")
    spec, tensors = similarity._lower()
    o, lse = ops.graph_attention(q, k, v, indptr, indices, spec, tensors, scale)
    return (o, lse) if return_lse else o
