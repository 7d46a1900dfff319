"""Attention over the edges of a graph."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from gnomon._attention import Integers
from gnomon._checks import (
    check_flag,
    check_integers,
    check_optional_number,
    check_tensors,
)
from gnomon._library import ops
from gnomon._similarity import Similarity, to_similarity


@overload
def graph_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Integers,
    indices: Integers,
    similarity: Similarity | str | None = ...,
    *,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def graph_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Integers,
    indices: Integers,
    similarity: Similarity | str | None = ...,
    *,
    scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def graph_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Integers,
    indices: Integers,
    similarity: Similarity | str | None = None,
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
        q: (N, H, D), bfloat16, float16, float32 or float64; k and v as q. On the CPU, or but
            for float64 on a GPU of NVIDIA's.
        k: (Nk, Hkv, D), H a multiple of Hkv; the same nodes as q, or others.
        v: (Nk, Hkv, Dv).
        indptr: (N + 1,) integers from 0 to E that never fall, a tensor or a list.
        indices: (E,) integers in [0, Nk).
        similarity: of gnomon.similarity, or a specification; None is Dot(). Its tensors have q's
            dtype, or float32 where that is lower; they are (H,), or without axes for all heads.
        scale: of the dot product, by default 1/sqrt(D); an error with another similarity.
        return_lse: also return lse (N, H), the natural logarithm of the sum of exp(s) over a row's
            edges; differentiable.

    Returns:
        o (N, H, Dv) in q's dtype, or (o, lse), lse in float32 or float64. A node without edges
        gives 0, and lse = -inf.

    Raises:
        ValueError: a shape or a value.
        TypeError: a dtype or a device.
        NotImplementedError: forward-mode differentiation, or a gradient of the gradient.
    """
    operator = "graph_attention"
    check_tensors(operator, q=q, k=k, v=v)
    indptr = check_integers(operator, "indptr", indptr, q)
    indices = check_integers(operator, "indices", indices, q)
    scale = check_optional_number(operator, "scale", scale)
    return_lse = check_flag(operator, "return_lse", return_lse)
    spec, tensors = to_similarity(operator, similarity)._lower()
    o, lse = ops.graph_attention(q, k, v, indptr, indices, spec, tensors, scale)
    return (o, lse) if return_lse else o
