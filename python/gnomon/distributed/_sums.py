"""Partial softmax sums, by which the results of key shards are merged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sums(NamedTuple):
    """The partial softmax sums of rows: sums of 2^(score - largest), with scores in log2 units.

    Results are merged by these sums rather than by lse, because merging by lse would multiply every
    weight by the exponential of lse's rounding error: e^0.06 for an lse of a million.
    """

    largest: Tensor
    weight: Tensor

    @staticmethod
    def of(statistics: Tensor) -> Sums:
        return Sums(statistics[0], statistics[1])

    def plus(self, other: Sums) -> Sums:
        largest = torch.maximum(self.largest, other.largest)
        return Sums(largest, self._by(largest) + other._by(largest))

    def _by(self, largest: Tensor) -> Tensor:
        """Returns the weights rescaled to a new maximum; 0 for rows whose keys are all masked."""
        return torch.where(self.weight == 0, 0.0, self.weight * (self.largest - largest).exp2())

    def share_of(self, total: Sums) -> Tensor:
        """Returns the shares (B, H, Lq, 1) of the total; 0 for rows whose keys are all masked."""
        share = self._by(total.largest) / total.weight
        return torch.where(self.weight == 0, 0.0, share).unsqueeze(3)
