"""Linear attention."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gnomon._attention import Integers
from gnomon._checks import (
    by_default,
    check_flag,
    check_integer,
    check_optional_integer,
    check_optional_integers,
    check_tensors,
    checks_argument_names,
    wrong_type,
)
from gnomon._library import ops
from gnomon.position import RoPE


@checks_argument_names()
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature: Literal["elu", "relu", "favor"] = "elu",
    rope: RoPE | None = None,
    causal: bool = False,
    *,
    key_lengths: Integers | None = None,
    query_offset: int | None = None,
    num_features: int | None = None,
    seed: int | None = None,
    projection: Tensor | None = None,
) -> Tensor:
    """Computes attention with a feature map, linear in time and memory.

    The output is phi(q_i).(sum_j phi(k_j) v_j^T) / (phi(q_i).sum_j phi(k_j)). Causal attention is
    computed in chunks; the sums of phi(k_j) v_j^T are carried from one chunk to the next.

    Args:
        q: (B, H, Lq, D), bfloat16, float16, float32 or float64, on the CPU or an NVIDIA GPU. k and
            v must have the same dtype and device.
        k: (B, Hkv, Lk, D), where Hkv divides H. Query head h uses key head h // (H / Hkv).
        v: (B, Hkv, Lk, Dv).
        feature: the feature map phi. "elu": elu(x) + 1 (Katharopoulos et al. 2020); "relu": max(x,
            0); "favor": positive orthogonal random features exp(w.x - |x|^2 / 2) of tokens divided
            by D^(1/4), which approximate softmax attention with scale 1/sqrt(D) (Choromanski et al.
            2021).
        rope: a RoPE that rotates the features, in the numerator only (Su et al. 2021, eq. 19), or
            None.
        causal: whether query i attends only to keys 0 to i; requires Lq = Lk.
        key_lengths: (B,) integers, or one integer for the whole batch: keys j >= key_lengths[b] are
            ignored and may contain NaN.
        query_offset: position of the first query, for rope. It defaults to 0 if Lq = Lk; otherwise
            rope requires it.
        num_features: number of "favor" features; by default the even number nearest to D ln D, at
            least 2.
        seed: seed of the "favor" projection, which is redrawn in every call. The same seed gives
            the same projection; None means 0.
        projection: (num_features, D), a "favor" projection to use instead of drawing one; see
            gnomon.favor_projection.

    Returns:
        o (B, H, Lq, Dv) in q's dtype; 0 where the denominator is 0.

    Raises:
        ValueError: an invalid shape or value.
        TypeError: an invalid dtype or device.

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind()  # (B, H, L, D)
        >>> o = gnomon.linear_attention(q, k, v, feature="elu", causal=True)
    """
    operator = "linear_attention"
    check_tensors(operator, q=q, k=k, v=v)
    key_lengths = check_optional_integers(operator, "key_lengths", key_lengths, q)
    if projection is not None:
        check_tensors(operator, projection=projection)
    if not isinstance(feature, str):
        raise wrong_type(operator, "feature", feature, '"elu", "relu" or "favor"')
    if rope is not None and not isinstance(rope, (RoPE, str)):
        raise wrong_type(operator, "rope", rope, "a gnomon.position.RoPE, a specification, or None")
    causal = check_flag(operator, "causal", causal)
    query_offset = check_optional_integer(operator, "query_offset", query_offset)
    num_features = check_optional_integer(operator, "num_features", num_features)
    seed = check_optional_integer(operator, "seed", seed)
    o: Tensor = ops.linear_attention(
        q,
        k,
        v,
        feature,
        rope._lower()[0] if isinstance(rope, RoPE) else rope,
        causal,
        key_lengths,
        query_offset,
        num_features,
        seed,
        projection,
    )
    return o


def favor_projection(num_features: int, head_dim: int, seed: int = 0) -> Tensor:
    """Returns the FAVOR+ projection (num_features, head_dim), in the default dtype.

    The rows in each block of head_dim rows are orthogonal, and each row follows N(0, I)
    (Choromanski et al. 2021, section 2.4). The same arguments give the same numbers on every
    machine.

    Raises:
        ValueError: num_features or head_dim is below 1.
        TypeError: an argument is not an integer.

    Example:
        >>> projection = gnomon.favor_projection(num_features=64, head_dim=32)
        >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind()  # (B, H, L, D)
        >>> o = gnomon.linear_attention(q, k, v, feature="favor", projection=projection)
    """
    operator = "favor_projection"
    num_features = check_integer(operator, "num_features", num_features)
    head_dim = check_integer(operator, "head_dim", head_dim)
    seed = check_integer(operator, "seed", seed)
    if head_dim < 1:
        raise ValueError(f"gnomon.{operator}: head_dim is {head_dim}; expected at least 1")
    like = torch.empty(head_dim, device="cpu")
    return by_default(ops.favor_projection(like, num_features, seed))
