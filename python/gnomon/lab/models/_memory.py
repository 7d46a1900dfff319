"""Caches and memories of language models."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from gnomon._checks import check_integer
from gnomon.nn import KVCache, TokenCache


class LanguageModelCache:
    """The cached state for all previous tokens, in a model with `depth` layers.

    Example:
        >>> model = gnomon.models.LanguageModel(dim=32, depth=2, position="rope").eval()
        >>> cache = gnomon.models.LanguageModelCache(depth=2)
        >>> logits = model(torch.randint(256, (1, 16)), cache=cache)
        >>> logits = model(torch.randint(256, (1, 1)), cache=cache)
    """

    def __init__(self, depth: int) -> None:
        depth = check_integer("models.LanguageModelCache", "depth", depth)
        if depth < 1:
            raise ValueError(
                f"gnomon.models.LanguageModelCache: depth is {depth}; expected at least 1"
            )
        self.tokens = TokenCache()
        self.layers = [KVCache() for _ in range(depth)]

    def _draft(self) -> LanguageModelCache:
        """Returns a copy for one call, committed by _keep after all steps that can fail."""
        draft = copy.copy(self)
        draft.tokens = copy.copy(self.tokens)
        draft.layers = [copy.copy(layer) for layer in self.layers]
        return draft

    def _keep(self, draft: LanguageModelCache) -> None:
        self.tokens.__dict__.update(draft.tokens.__dict__)
        for layer, changed in zip(self.layers, draft.layers, strict=True):
            layer.__dict__.update(changed.__dict__)

    def _batch(self) -> int | None:
        """Returns the batch size of the cached tokens, or None if there are none."""
        v = self.layers[0].v if self.layers else None
        return None if v is None else v.shape[0]


class LanguageModelMemory:
    """The memory of Transformer-XL (Dai et al. 2019, section 3.2), with up to max_length tokens.

    For the last tokens of the previous segments, it stores each layer's input (B, length, dim).
    Gradients do not flow into the memory.

    Example:
        >>> model = gnomon.models.LanguageModel(dim=32, depth=2, position="transformer_xl")
        >>> memory = gnomon.models.LanguageModelMemory(max_length=64)
        >>> logits = model(torch.randint(256, (1, 16)), memory=memory)
    """

    def __init__(self, max_length: int) -> None:
        max_length = check_integer("models.LanguageModelMemory", "max_length", max_length)
        if max_length < 0:
            raise ValueError(
                f"gnomon.models.LanguageModelMemory: max_length is {max_length}; expected at "
                "least 0"
            )
        self.max_length = max_length
        #: The stored inputs of each layer; empty before the first segment.
        self.layers: list[Tensor] = []
        self.tokens = TokenCache()

    def length(self) -> int:
        """Returns the number of tokens in the memory."""
        return self.layers[0].shape[1] if self.layers else 0

    def reset(self) -> None:
        """Clears all segments."""
        self.layers = []
        self.tokens.reset()

    def _draft(self) -> LanguageModelMemory:
        """Returns a copy for one call, committed by _keep after all steps that can fail."""
        draft = copy.copy(self)
        draft.tokens = copy.copy(self.tokens)
        draft.layers = list(self.layers)
        return draft

    def _keep(self, draft: LanguageModelMemory) -> None:
        self.tokens.__dict__.update(draft.tokens.__dict__)
        self.layers = draft.layers

    def _batch(self) -> int | None:
        """Returns the batch size of the segments, or None before the first one."""
        return self.layers[0].shape[0] if self.layers else None

    def _remember(self, layer: int, x: Tensor) -> Tensor | None:
        """Appends x to the stored inputs of a layer, and returns the inputs stored before."""
        if layer == len(self.layers):
            before, kept = None, x.detach()
            self.layers.append(kept)
        else:
            before = self.layers[layer]
            kept = torch.cat([before, x.detach()], 1)
        self.layers[layer] = kept[:, max(kept.shape[1] - self.max_length, 0) :].contiguous()
        return before
