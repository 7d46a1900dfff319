"""Attention over the edges of a graph."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gnomon._attention import Integers
from gnomon._checks import (
    check_flag,
    check_integer,
    check_integers,
    check_layout,
    check_number,
    check_optional_integer,
    check_optional_number,
    check_tensors,
    checks_argument_names,
    is_integer_type,
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
    sink: Tensor | float | None = ...,
    edge_bias: Tensor | None = ...,
    dropout: float = ...,
    seed: int | None = ...,
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
    sink: Tensor | float | None = ...,
    edge_bias: Tensor | None = ...,
    dropout: float = ...,
    seed: int | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@checks_argument_names()
def graph_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Integers,
    indices: Integers,
    similarity: Similarity | str | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | float | None = None,
    edge_bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention over the edges of a graph, with any similarity and exact gradients.

    The output of node i is sum_e p_e v_j over its edges e = (i, j), where the weights p_e are the
    softmax of the similarities over these edges. The graph is in compressed sparse row (CSR)
    format: node i attends to the nodes indices[indptr[i]], ..., indices[indptr[i + 1] - 1]. csr
    converts PyTorch Geometric's edge_index to this format. Duplicate edges count once per
    occurrence. Memory is linear in the number of edges. For a graph attention network (GAT,
    Velickovic et al. 2018), use Additive(), with target and source scores (N, H, 1) as q and k.

    Args:
        q: (N, H, D), bfloat16, float16, float32 or float64, on the CPU or an NVIDIA GPU (which
            computes float64 on the CPU). k and v must have the same dtype and device.
        k: (Nk, Hkv, D), where Hkv divides H. The key nodes may differ from the query nodes.
        v: (Nk, Hkv, Dv).
        indptr: (N + 1,) non-decreasing integers from 0 to E, a tensor or a list.
        indices: (E,) integers in [0, Nk).
        similarity: an object from gnomon.similarity, or a specification; None means Dot(). Its
            tensors must have q's dtype, or float32 if q is bfloat16 or float16, and the shape (H,),
            or () if shared by all heads.
        scale: factor of the dot product; 1/sqrt(D) by default. Other similarities do not accept it.
        sink: (H,), (N, H) or a number: the score, in each node's softmax, of an additional key
            without a value, as in attention. lse includes the sink. -inf means no sink.
        edge_bias: (E, H), or (E,) if shared by all heads: values that are added to the scores of
            the edges; -inf removes an edge. It must have q's dtype, or float32 if q is bfloat16 or
            float16.
        dropout: probability of dropping a weight, from 0 to 1. The remaining weights are multiplied
            by 1 / (1 - dropout); lse is computed before dropout.
        seed: seed of the dropout mask; by default, it is drawn from PyTorch's generator. For a
            given seed, whether a weight is dropped depends only on its head, node and edge index.
        return_lse: whether to also return lse (N, H), the natural logarithm of the sum of
            exp(score) over a node's edges. lse is differentiable.

    Returns:
        o (N, H, Dv) in q's dtype, or (o, lse), with lse in float32 or float64. For a node without
        edges, o is 0 and lse is -inf.

    Raises:
        ValueError: an invalid shape or value.
        TypeError: an invalid dtype or device.
        NotImplementedError: a third derivative.

    Example:
        >>> x = torch.randn(3, 2, 8)  # 3 nodes, 2 heads
        >>> indptr, indices = gnomon.csr(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
        >>> o = gnomon.graph_attention(x, x, x, indptr, indices, similarity="gaussian")

        With edge features and dropout:

        >>> edge_bias = torch.nn.Linear(5, 2)(torch.randn(len(indices), 5))
        >>> o = gnomon.graph_attention(x, x, x, indptr, indices, edge_bias=edge_bias, dropout=0.1)
    """
    operator = "graph_attention"
    check_tensors(operator, q=q, k=k, v=v)
    indptr = check_integers(operator, "indptr", indptr, q)
    indices = check_integers(operator, "indices", indices, q)
    scale = check_optional_number(operator, "scale", scale)
    return_lse = check_flag(operator, "return_lse", return_lse)
    if edge_bias is not None:
        check_tensors(operator, edge_bias=edge_bias)
    dropout = check_number(operator, "dropout", dropout)
    seed = check_optional_integer(operator, "seed", seed)
    seed_tensor = None if seed is None else torch.tensor([seed])
    spec, tensors = to_similarity(operator, similarity)._lower()
    o, lse = ops.graph_attention(
        q, k, v, indptr, indices, spec, tensors, scale, edge_bias, dropout, seed_tensor
    )
    if sink is not None:
        o, lse = _with_sink(o, lse, sink)
    return (o, lse) if return_lse else o


def _with_sink(o: Tensor, lse: Tensor, sink: Tensor | float) -> tuple[Tensor, Tensor]:
    operator = "graph_attention"
    check_layout(operator, "sink", sink)
    if not isinstance(sink, Tensor):
        number = check_number(operator, "sink", sink, "a Tensor, a number, or None")
        sink = torch.tensor(number, dtype=lse.dtype, device=lse.device)
    if sink.dim() > 2 or sink.shape not in ((), lse.shape[1:], lse.shape):
        raise ValueError(
            f"gnomon.{operator}: sink has shape {list(sink.shape)}; expected (), (H,) or (N, H) = "
            f"{tuple(lse.shape)}"
        )
    # add_sink expects (B, H, Lq, Dv).
    sink = sink.to(lse.dtype)
    if sink.dim() == 2:
        sink = sink.t()[None]
    o, lse = ops.add_sink(o.transpose(0, 1)[None], lse.t()[None], sink)
    return o[0].transpose(0, 1), lse[0].t()


def csr(edge_index: Integers, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Converts PyTorch Geometric's edge_index to the CSR format of graph_attention.

    In PyTorch Geometric, an edge (j, i) carries messages from j to i, so node i attends to node j.
    The edges of a node keep their order.

    Args:
        edge_index: (2, E) integers, sources j and targets i.
        num_nodes: number of target nodes.

    Returns:
        indptr (num_nodes + 1,) and indices (E,), int64.

    Raises:
        ValueError: an invalid shape, or a target that is not a node.
        TypeError: an invalid type.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])  # a path of three nodes
        >>> indptr, indices = gnomon.csr(edge_index, 3)
        >>> x = torch.randn(3, 2, 8)  # 3 nodes, 2 heads
        >>> o = gnomon.graph_attention(x, x, x, indptr, indices)
    """
    edges = check_integers("csr", "edge_index", edge_index, expected="a Tensor (2, E)")
    num_nodes = check_integer("csr", "num_nodes", num_nodes)
    if edges.dim() != 2 or edges.shape[0] != 2 or not is_integer_type(edges.dtype):
        raise ValueError(
            f"gnomon.csr: edge_index has shape {list(edges.shape)} and dtype {edges.dtype}; "
            "expected (2, E) integers"
        )
    if num_nodes < 0:
        raise ValueError(f"gnomon.csr: num_nodes is {num_nodes}; expected at least 0")
    source, target = edges.to(torch.int64).unbind()
    target, order = target.sort(stable=True)
    if not is_compiling() and target.shape[0] > 0 and target.device.type != "meta":
        least, most = int(target[0]), int(target[-1])
        if least < 0 or most >= num_nodes:
            expected = (
                f"nodes from 0 to {num_nodes - 1}"
                if num_nodes > 0
                else "no edges, because num_nodes is 0"
            )
            raise ValueError(
                f"gnomon.csr: edge_index has targets from {least} to {most}; expected {expected}"
            )
    nodes = torch.arange(num_nodes + 1, device=target.device)
    return torch.searchsorted(target, nodes), source[order]
