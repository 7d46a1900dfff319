"""Embeddings and softmax with smaller dimensions for rare tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon._checks import Device

# The factor by which the dimension decreases from one band to the next.
_REDUCTION = 4


def table_sizes(vocabulary: int, dim: int, cutoffs: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the shape (tokens, dimension) of each band's table."""
    bounds = [0, *cutoffs, vocabulary]
    return [
        (end - begin, max(dim // _REDUCTION**band, 1))
        for band, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]


class AdaptiveEmbedding(torch.nn.Module):
    """Adaptive input embeddings with a tied adaptive softmax.

    Tokens are sorted by descending frequency and split into bands that end at the cutoffs and at
    the vocabulary size. Band n has a table_n (tokens, dim_n) with dim_n = dim / 4^n, at least 1.
    All bands except the first also have a projection_n (dim, dim_n), which maps a token's row to
    its embedding. In the softmax, the head has one logit for each token of the first band and for
    each other band; their weights are table_0 and clusters (bands - 1, dim). A second softmax
    divides a band's probability among its tokens. Parameter names and initial distributions match
    those of the gnomon command (lab/models/adaptive_embedding.h).

    Sources: Baevski and Auli 2019, Adaptive Input Representations for Neural Language Modeling;
    Grave et al. 2017, Efficient Softmax Approximation for GPUs.
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        cutoffs: Sequence[int],
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if any(a >= b for a, b in zip([0, *cutoffs], [*cutoffs, vocabulary], strict=True)):
            raise ValueError(
                f"gnomon.models.LanguageModel: adaptive is {list(cutoffs)}; expected increasing "
                f"integers from 1 to {vocabulary - 1} (less than the vocabulary size)"
            )
        self.bounds = [0, *cutoffs, vocabulary]
        for band, (tokens, columns) in enumerate(table_sizes(vocabulary, dim, cutoffs)):
            table = torch.empty(tokens, columns, device=device, dtype=dtype)
            self.register_parameter(f"table_{band}", torch.nn.Parameter(table))
            if band > 0:
                projection = torch.empty(dim, columns, device=device, dtype=dtype)
                self.register_parameter(f"projection_{band}", torch.nn.Parameter(projection))
        self.clusters = torch.nn.Parameter(
            torch.empty(len(cutoffs), dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialises all parameters."""
        for name, parameter in self.named_parameters():
            columns = parameter.shape[0 if name.startswith("projection") else 1]
            torch.nn.init.normal_(parameter, 0, columns**-0.5)

    @property
    def weight(self) -> Tensor:
        """The table of the first band; all parameters share its dtype and device."""
        return self.get_parameter("table_0")

    def _bands(self) -> range:
        return range(1, len(self.bounds) - 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns embeddings (..., dim) of integer tokens (...).

        Raises IndexError if a token is not in the vocabulary.
        """
        flat = tokens.reshape(-1)
        if flat.numel() > 0 and not 0 <= flat.min() <= flat.max() < self.bounds[-1]:
            raise IndexError
        rows = self.weight.new_zeros(flat.numel(), self.weight.shape[1])
        for band in range(len(self.bounds) - 1):
            places = self._places(flat, band)
            own = torch.nn.functional.embedding(
                flat[places] - self.bounds[band], self.get_parameter(f"table_{band}")
            )
            if band > 0:
                own = own @ self.get_parameter(f"projection_{band}").T
            rows = rows.index_copy(0, places, own.to(rows.dtype))
        return rows.view(*tokens.shape, -1)

    def _places(self, flat: Tensor, band: int) -> Tensor:
        within = (flat >= self.bounds[band]) & (flat < self.bounds[band + 1])
        return within.nonzero().squeeze(1)

    def _head(self, x: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, torch.cat([self.weight, self.clusters]))
        return logits.log_softmax(-1)

    def _tail(self, x: Tensor, band: int) -> Tensor:
        narrow = x @ self.get_parameter(f"projection_{band}")
        logits = torch.nn.functional.linear(narrow, self.get_parameter(f"table_{band}"))
        return logits.log_softmax(-1)

    def log_probabilities(self, x: Tensor) -> Tensor:
        """Returns the log-probabilities (..., vocabulary) of all tokens for x (..., dim)."""
        head = self._head(x)
        first = self.bounds[1]
        parts = [head[..., :first]]
        for band in self._bands():
            cluster = first + band - 1
            parts.append(self._tail(x, band) + head[..., cluster : cluster + 1])
        return torch.cat(parts, -1)

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Returns the negative log-probabilities of the targets (...) only."""
        rows, flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        in_head = flat.clone()
        for band in self._bands():
            in_head[self._places(flat, band)] = self.bounds[1] + band - 1
        losses = -self._head(rows).gather(1, in_head[:, None])[:, 0]
        for band in self._bands():
            places = self._places(flat, band)
            target = flat[places] - self.bounds[band]
            own = self._tail(rows[places], band).gather(1, target[:, None])[:, 0]
            losses = losses.index_add(0, places, -own)
        return losses.view(targets.shape)
