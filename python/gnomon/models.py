"""The language model of the command line, and its checkpoints.

What ``gnomon train`` has written is loaded here, and what is saved here is read by ``gnomon eval``,
``generate`` and ``inspect``, and with its training by ``gnomon train --resume``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pathlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnomon import _safetensors
from gnomon._adaptive import AdaptiveEmbedding, table_sizes
from gnomon._attention import Integers
from gnomon._checks import (
    check_integer,
    check_optional_integers,
    check_string,
    check_tensors,
    wrong_type,
)
from gnomon._position import Position, Sum, to_positions
from gnomon._program import options as program_options
from gnomon._similarity import Similarity, to_similarity
from gnomon.nn import (
    KVCache,
    LearnedValue,
    MultiheadAttention,
    TokenCache,
    TokenPosition,
    attention_position,
)

__all__ = [
    "Checkpoint",
    "LanguageModel",
    "LanguageModelCache",
    "LanguageModelMemory",
    "Tokenizer",
    "TrainingState",
    "load_checkpoint",
    "save_checkpoint",
]

CHECKPOINT_NAME = "checkpoint.safetensors"
TOKEN_KINDS = ("bytes", "words", "subwords")

# What the program takes to be a space inside a line: ASCII's.
_SPACES = b" \t\r\v\f"
_FIRST_WORDS = [b"<unk>", b"<eos>"]

# The layout of the file: training/checkpoint.cc.
_FORMAT = 1
_CONFIG = "gnomon"
_MODEL = "model."
_OPTIMIZER = "optimizer."
_MEMORY = "memory."
_VOCABULARY = "tokens.vocabulary"
# The fields of a TrainingState that are no tensors, and their names in the file.
_TRAINING_FIELDS = {
    "step": "step",
    "options": "training",
    "memory_tokens": "memory_tokens",
    "data": "data",
}


class LanguageModelCache:
    """What a model remembers of the tokens so far, of a depth."""

    def __init__(self, depth: int) -> None:
        depth = check_integer("models.LanguageModelCache", "depth", depth)
        if depth < 1:
            raise ValueError(
                f"gnomon.models.LanguageModelCache: depth is {depth}; expected at least 1"
            )
        self.tokens = TokenCache()
        self.layers = [KVCache() for _ in range(depth)]

    def _draft(self) -> LanguageModelCache:
        """A copy for one call, which _keep takes over once nothing can be refused any more."""
        draft = copy.copy(self)
        draft.tokens = copy.copy(self.tokens)
        draft.layers = [copy.copy(layer) for layer in self.layers]
        return draft

    def _keep(self, draft: LanguageModelCache) -> None:
        self.tokens.__dict__.update(draft.tokens.__dict__)
        for layer, changed in zip(self.layers, draft.layers, strict=True):
            layer.__dict__.update(changed.__dict__)

    def _batch(self) -> int | None:
        """Of the tokens that it holds."""
        k = self.layers[0].k if self.layers else None
        return None if k is None else k.shape[0]


class LanguageModelMemory:
    """The memory of Transformer-XL (Dai et al. 2019, section 3.2), of max_length tokens.

    What each layer read for the last tokens of the segments before this one, (B, length, dim). No
    gradient flows into it.
    """

    def __init__(self, max_length: int) -> None:
        max_length = check_integer("models.LanguageModelMemory", "max_length", max_length)
        if max_length < 0:
            raise ValueError(
                f"gnomon.models.LanguageModelMemory: max_length is {max_length}; expected at "
                "least 0"
            )
        self.max_length = max_length
        #: One per layer; none before the first segment.
        self.layers: list[Tensor] = []
        self.tokens = TokenCache()

    def length(self) -> int:
        """How many tokens it holds."""
        return self.layers[0].shape[1] if self.layers else 0

    def reset(self) -> None:
        """Forgets all segments."""
        self.layers = []
        self.tokens.reset()

    def _draft(self) -> LanguageModelMemory:
        """A copy for one call, which _keep takes over once nothing can be refused any more."""
        draft = copy.copy(self)
        draft.tokens = copy.copy(self.tokens)
        draft.layers = list(self.layers)
        return draft

    def _keep(self, draft: LanguageModelMemory) -> None:
        self.tokens.__dict__.update(draft.tokens.__dict__)
        self.layers = draft.layers

    def _batch(self) -> int | None:
        """Of the segments that it holds."""
        return self.layers[0].shape[0] if self.layers else None

    def _remember(self, layer: int, x: Tensor) -> Tensor | None:
        """What the layer read before; keeps x with it."""
        if layer == len(self.layers):
            before, kept = None, x.detach()
            self.layers.append(kept)
        else:
            before = self.layers[layer]
            kept = torch.cat([before, x.detach()], 1)
        self.layers[layer] = kept[:, max(kept.shape[1] - self.max_length, 0) :].contiguous()
        return before


class _TransformerBlock(torch.nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), of the options of a LanguageModel."""

    def __init__(self, options: Mapping[str, Any], position: str) -> None:
        super().__init__()
        dim, mlp, bias = options["dim"], options["mlp"], not options["no_bias"]
        self.activation: str = options["activation"]
        self.attention_norm = _norm(options)
        self.attention = MultiheadAttention(
            dim,
            options["heads"],
            similarity=options["similarity"],
            position=attention_position(position),
            bias=bias,
            max_length=options["max_length"],
        )
        self.mlp_norm = _norm(options)
        hidden = 2 * mlp if self.activation in _GATES else mlp
        self.mlp_in = torch.nn.Linear(dim, hidden, bias=bias)
        self.mlp_out = torch.nn.Linear(mlp, dim, bias=bias)
        self.dropout = torch.nn.Dropout(options["dropout"])
        # Each of the 2 * depth residual branches adds its share of the stream's variance.
        residual = (2 * options["depth"]) ** -0.5
        _initialize(self.attention.out_proj, residual)
        _initialize(self.mlp_in, 1.0)
        _initialize(self.mlp_out, residual)

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None,
        memory: Tensor | None,
        positions: Tensor | None,
        segments: Tensor | None,
    ) -> Tensor:
        """Keys and values are those of memory (B, M, dim) and of x (B, L, dim)."""
        queries = self.attention_norm(x)
        keys, offset = queries, None
        if memory is not None:
            keys, offset = torch.cat([self.attention_norm(memory), queries], 1), memory.shape[1]
        attended = self.attention(
            queries,
            keys,
            causal=True,
            query_offset=offset,
            positions=positions,
            query_segments=segments,
            key_segments=segments,
            cache=cache,
        )
        x = x + self.dropout(attended)
        hidden = self.mlp_in(self.mlp_norm(x))
        if gate := _GATES.get(self.activation):
            gates, units = hidden.chunk(2, -1)
            hidden = gate(gates) * units
        else:
            hidden = getattr(torch.nn.functional, self.activation)(hidden)
        mixed: Tensor = self.dropout(self.mlp_out(hidden))
        return x + mixed


# The activations that gate the hidden units of an MLP by as many others (Shazeer 2020).
_GATES = {"swiglu": torch.nn.functional.silu, "geglu": torch.nn.functional.gelu}


def _norm(options: Mapping[str, Any]) -> torch.nn.Module:
    if options["norm"] == "rms":
        return torch.nn.RMSNorm(options["dim"], eps=1e-6)
    return torch.nn.LayerNorm(options["dim"])


def _pattern(position: str) -> list[str]:
    """The parts of a position that is a pattern of layers."""
    return re.split("[;,]", position)


def _initialize(linear: torch.nn.Linear, gain: float) -> None:
    """Weights of variance gain^2 / fan_in keep the variance of unit inputs at gain^2."""
    torch.nn.init.normal_(linear.weight, 0, gain * linear.in_features**-0.5)
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)


class LanguageModel(torch.nn.Module):
    """A decoder-only Transformer over tokens, that of ``gnomon train``.

    Pre-norm (Vaswani et al. 2017; Radford et al. 2019), tied embeddings, GELU. The parameters have
    the names and the starting distributions of the program's (models/language_model.h).

    Args:
        vocabulary: number of different tokens.
        dim: columns of the embeddings, a multiple of heads.
        depth: layers.
        heads: attention heads.
        mlp: columns inside the MLP.
        similarity: a specification, or one of gnomon.similarity, as for
            gnomon.nn.MultiheadAttention; of numbers, which a checkpoint can hold, not tensors.
        position: likewise; components that are added to embeddings are. "rope;rope;none" is a
            pattern that layers repeat, each part the position of one.
        dropout: dropout probability on each residual branch, in training; [0, 1).
        max_length: rows of a learned table of absolute positions.
        norm: "layer", or "rms" (Zhang and Sennrich 2019).
        activation: of the MLP, "gelu" or "relu"; "swiglu" and "geglu" gate its hidden units by as
            many others (Shazeer 2020).
        no_bias: whether the projections of attention and of the MLP have no biases.
        adaptive: where bands of rarer tokens begin, rising: each has a quarter of the columns of
            the one before, in embeddings and softmax (Baevski and Auli 2019; Grave et al. 2017).
            Tokens are then expected by falling frequency. Without, all have dim columns.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        dim: int = 128,
        depth: int = 4,
        heads: int = 4,
        mlp: int = 512,
        similarity: Similarity | str = "dot",
        position: Position | Sequence[Position | str] | str = "none",
        dropout: float = 0.0,
        max_length: int = 512,
        norm: str = "layer",
        activation: str = "gelu",
        no_bias: bool = False,
        adaptive: Sequence[int] = (),
    ) -> None:
        super().__init__()
        similarity, position = _to_specs(similarity, position)
        #: As given; see options.
        self._options = _check_options(
            {
                "vocabulary": vocabulary,
                "dim": dim,
                "depth": depth,
                "heads": heads,
                "mlp": mlp,
                "max_length": max_length,
                "similarity": similarity,
                "position": position,
                "dropout": dropout,
                "norm": norm,
                "activation": activation,
                "no_bias": no_bias,
                "adaptive": adaptive,
            }
        )
        self.embedding: torch.nn.Embedding | AdaptiveEmbedding
        # Unit logits from a normalised stream; forward() brings the inputs to unit variance.
        if adaptive:
            self.embedding = AdaptiveEmbedding(vocabulary, dim, self._options["adaptive"])
        else:
            self.embedding = torch.nn.Embedding(vocabulary, dim)
            torch.nn.init.normal_(self.embedding.weight, 0, dim**-0.5)
        parts = _pattern(position)
        self.blocks = torch.nn.ModuleList(
            _TransformerBlock(self._options, parts[layer % len(parts)]) for layer in range(depth)
        )
        self.norm = _norm(self._options)
        self.token_position = TokenPosition("+".join(parts), dim, max_length, causal=True)

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments. They are read only, since what was built of them does not change."""
        return types.MappingProxyType(self._options)

    @property
    def max_length(self) -> int | None:
        """The longest text at which the encodings are defined; None if any length will do."""
        return self.token_position.max_length

    def learned_values(self) -> dict[str, LearnedValue]:
        """What the attention of all layers has learned, "blocks.0.attention.gamma" and so on.

        See gnomon.nn.MultiheadAttention.learned_values.
        """
        return {
            f"{name}.{learned}": value
            for name, module in self.named_modules()
            if isinstance(module, MultiheadAttention)
            for learned, value in module.learned_values().items()
        }

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"LanguageModel({given})"

    def layer_inputs(
        self,
        tokens: Tensor,
        cache: LanguageModelCache | None = None,
        memory: LanguageModelMemory | None = None,
        *,
        positions: Integers | None = None,
        segments: Integers | None = None,
    ) -> list[Tensor]:
        """What enters each block, and what leaves the last; (B, L, dim). As forward otherwise."""
        states, keep = self._states(tokens, cache, memory, positions, segments)
        keep()
        return states

    def _states(
        self,
        tokens: Tensor,
        given_cache: LanguageModelCache | None,
        given_memory: LanguageModelMemory | None,
        positions: Integers | None,
        segments: Integers | None,
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """The layer_inputs, and what to call once nothing can be refused any more.

        Until then the cache and the memory are as they were.
        """
        self._check_call(tokens, given_cache, given_memory, positions is not None)
        operator = "models.LanguageModel"
        for name, given, refused in (
            ("positions", positions, (("memory", given_memory),)),
            ("segments", segments, (("cache", given_cache), ("memory", given_memory))),
        ):
            for other, known in refused:
                if given is not None and known is not None:
                    raise ValueError(
                        f"gnomon.{operator}: {name} and a {other} are both given; expected one of "
                        "them"
                    )
        positions = check_optional_integers(operator, "positions", positions, tokens)
        segments = check_optional_integers(operator, "segments", segments, tokens)
        cache = None if given_cache is None else given_cache._draft()
        memory = None if given_memory is None else given_memory._draft()
        try:
            x = self.embedding(tokens) * self._options["dim"] ** 0.5
        except IndexError as error:
            raise ValueError(
                "gnomon.models.LanguageModel: tokens reach beyond the vocabulary; expected 0 to "
                f"{self._options['vocabulary'] - 1}"
            ) from error
        known = cache if cache is not None else memory
        x = self.token_position(
            x, cache=None if known is None else known.tokens, positions=positions
        )
        if memory is not None and memory.tokens.embeddings is not None:
            memory.tokens.embeddings = memory.tokens.embeddings.detach()
        states = [x]
        for layer, block in enumerate(self.blocks):
            before = None if memory is None else memory._remember(layer, x)
            layer_cache = None if cache is None else cache.layers[layer]
            x = block(x, layer_cache, before, positions, segments)
            states.append(x)

        def keep() -> None:
            if given_cache is not None and cache is not None:
                given_cache._keep(cache)
            if given_memory is not None and memory is not None:
                given_memory._keep(memory)

        return states, keep

    def forward(
        self,
        tokens: Tensor,
        cache: LanguageModelCache | None = None,
        memory: LanguageModelMemory | None = None,
        *,
        positions: Integers | None = None,
        segments: Integers | None = None,
    ) -> Tensor:
        """Logits (B, L, vocabulary) of the token after each of tokens (B, L), integers.

        With adaptive embeddings they are logarithms of probabilities.

        With a cache, the tokens follow those already in it; with a memory, they are the segment
        after those that it holds, and it then holds theirs. A call that raises leaves both as they
        were. positions (B, L), or (L,) for all, are integers: where the tokens stand, without a
        memory; a token sees those up to its position. segments likewise: a token sees those of its
        own alone, without a cache and a memory. Packed documents are both, positions from 0 on in
        each of them.

        Raises:
            ValueError: shapes, tokens beyond the vocabulary or beyond max_length, a cache or a
                memory of another batch or depth, or both of them.
            TypeError: tokens that are no tensor of integers, a memory of another dtype, another
                device than the model's.
        """
        states, keep = self._states(tokens, cache, memory, positions, segments)
        x = self.norm(states[-1])
        if isinstance(self.embedding, AdaptiveEmbedding):
            logits = self.embedding.log_probabilities(x)
        else:
            logits = torch.nn.functional.linear(x, self.embedding.weight)
        keep()
        return logits

    def losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        memory: LanguageModelMemory | None = None,
        positions: Integers | None = None,
        segments: Integers | None = None,
    ) -> Tensor:
        """Losses (B, L) in nats of the targets (B, L), integers, that come after the tokens.

        What forward tells of them, but with adaptive embeddings without the logits of all others;
        the other arguments are forward's.

        Raises:
            ValueError: as forward; targets of another shape than tokens, or beyond the vocabulary.
            TypeError: as forward.
        """
        operator = "models.LanguageModel"
        check_tensors(operator, targets=targets)
        if targets.shape != tokens.shape:
            raise ValueError(
                f"gnomon.{operator}: targets have shape {tuple(targets.shape)} and tokens "
                f"{tuple(tokens.shape)}; expected the same"
            )
        vocabulary = self._options["vocabulary"]
        if targets.numel() > 0 and not 0 <= targets.min() <= targets.max() < vocabulary:
            raise ValueError(
                f"gnomon.{operator}: targets reach beyond the vocabulary; expected 0 to "
                f"{vocabulary - 1}"
            )
        states, keep = self._states(tokens, None, memory, positions, segments)
        x = self.norm(states[-1])
        targets = targets.long()
        if isinstance(self.embedding, AdaptiveEmbedding):
            losses = self.embedding.losses(x, targets)
        else:
            logits = torch.nn.functional.linear(x, self.embedding.weight)
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="none"
            ).view(targets.shape)
        keep()
        return losses

    def _check_call(
        self,
        tokens: Tensor,
        cache: LanguageModelCache | None,
        memory: LanguageModelMemory | None,
        placed: bool,
    ) -> None:
        """All that can be seen before any work."""
        operator = "models.LanguageModel"
        check_tensors(operator, tokens=tokens)
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"gnomon.{operator}: tokens have dtype {tokens.dtype}; expected int64 or int32"
            )
        if tokens.dim() != 2:
            raise ValueError(
                f"gnomon.{operator}: tokens have shape {tuple(tokens.shape)}; expected (B, L)"
            )
        weight = self.embedding.weight
        if tokens.device != weight.device:
            raise TypeError(
                f"gnomon.{operator}: tokens are on {tokens.device} and the model on "
                f"{weight.device}; expected the same"
            )
        if cache is not None and not isinstance(cache, LanguageModelCache):
            raise wrong_type(operator, "cache", cache, "a LanguageModelCache, or None")
        if memory is not None and not isinstance(memory, LanguageModelMemory):
            raise wrong_type(operator, "memory", memory, "a LanguageModelMemory, or None")
        if cache is not None and memory is not None:
            raise ValueError(
                f"gnomon.{operator}: a cache and a memory are both given; expected at most one"
            )
        for name, known in (("cache", cache), ("memory", memory)):
            if known is None:
                continue
            # A memory has no layer before its first segment.
            if known.layers and len(known.layers) != len(self.blocks):
                raise ValueError(
                    f"gnomon.{operator}: the {name} has a depth of {len(known.layers)} and the "
                    f"model {len(self.blocks)}; expected the same"
                )
            batch = known._batch()
            if batch is not None and batch != len(tokens):
                raise ValueError(
                    f"gnomon.{operator}: the {name} has a batch of {batch} and the tokens "
                    f"{len(tokens)}; expected the same"
                )
        if cache is not None and self.max_length is not None and not placed:
            length = cache.tokens.length() + tokens.shape[1]
            if length > self.max_length:
                raise ValueError(
                    f"gnomon.{operator}: the cache and the tokens have a length of {length}; "
                    f"expected at most max_length = {self.max_length}"
                )
        if memory is not None and memory.layers:
            held = memory.layers[0]
            if held.device != weight.device:
                raise TypeError(
                    f"gnomon.{operator}: the memory is on {held.device} and the model on "
                    f"{weight.device}; expected the same"
                )
            if held.dtype != weight.dtype and not torch.is_autocast_enabled(held.device.type):
                raise TypeError(
                    f"gnomon.{operator}: the memory has dtype {held.dtype} and the model "
                    f"{weight.dtype}; expected the same"
                )

    def extra_repr(self) -> str:
        """The arguments, for print()."""
        return ", ".join(f"{name}={value!r}" for name, value in self._options.items())


def _to_specs(similarity: object, position: object) -> tuple[str, str]:
    """Both as the specifications that a checkpoint holds."""
    operator = "models.LanguageModel"
    if isinstance(position, str) and len(parts := _pattern(position)) > 1:
        specs = [_to_specs(similarity, part) for part in parts]
        for _, part in specs[1:]:
            if attention_position(part) != part:
                raise ValueError(
                    f"gnomon.{operator}: position is {position!r}, of which {part!r} is added to "
                    "embeddings, before all layers; expected it in the first part alone"
                )
        return specs[0][0], ";".join(part for _, part in specs)
    terms: dict[str, Similarity | Position] = {
        "similarity": to_similarity(operator, similarity),
        "position": Sum(to_positions(operator, position)),
    }
    lowered = []
    for name, term in terms.items():
        spec, tensors = term._lower()
        if tensors:
            raise ValueError(
                f"gnomon.{operator}: {name} has tensors; expected numbers, or a specification, "
                "of which the model makes its own"
            )
        lowered.append(spec)
    return lowered[0], lowered[1]


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a LanguageModel, as numbers that JSON holds."""
    operator = "models.LanguageModel"
    checked = {
        name: option.check(operator, options[name])
        for name, option in program_options("model").items()
    }
    if checked["dropout"] == 1:
        raise ValueError(f"gnomon.{operator}: dropout is 1; expected [0, 1)")
    dim, heads = checked["dim"], checked["heads"]
    if dim % heads != 0:
        raise ValueError(f"gnomon.{operator}: dim is {dim} and heads {heads}; expected a multiple")
    return checked


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """What a model reads: "bytes", "words" or "subwords", and their vocabulary as a file.

    Of words, the file has one a line, the first of them <unk> and <eos>; of subwords, it is a model
    of SentencePiece; of bytes, it is empty.
    """

    kind: str = "bytes"
    vocabulary: bytes = b""

    def __repr__(self) -> str:
        size = "" if self.kind == "bytes" else f", {len(self.vocabulary)} bytes"
        return f"Tokenizer({self.kind!r}{size})"

    def __post_init__(self) -> None:
        if self.kind not in TOKEN_KINDS:
            raise ValueError(
                f"gnomon.models.Tokenizer: kind is {self.kind!r}; expected one of "
                f"{', '.join(TOKEN_KINDS)}"
            )
        if not isinstance(self.vocabulary, bytes):
            raise wrong_type("models.Tokenizer", "vocabulary", self.vocabulary, "bytes")
        if (self.kind == "bytes") != (self.vocabulary == b""):
            raise ValueError(
                f"gnomon.models.Tokenizer: the vocabulary of {self.kind} has "
                f"{len(self.vocabulary)} bytes; expected "
                f"{'none' if self.kind == 'bytes' else 'a file'}"
            )
        if self.kind == "words":
            self._check_words()

    def _check_words(self) -> None:
        """As the program does: text/tokens.cc."""
        *lines, rest = self.vocabulary.split(b"\n")
        seen = set()
        for number, word in enumerate([*lines, rest] if rest else lines, 1):
            fault = (
                "is not one word"
                if not word or any(space in word for space in _SPACES)
                else "comes twice"
                if word in seen
                else "has no end"
                if number > len(lines)
                else None
            )
            if fault is not None:
                raise ValueError(
                    f"gnomon.models.Tokenizer: line {number} of the vocabulary of words {fault}; "
                    "expected one word a line, each once"
                )
            seen.add(word)
        if lines[:2] != _FIRST_WORDS or len(lines) < 3:
            raise ValueError(
                "gnomon.models.Tokenizer: the vocabulary of words begins with "
                f"{b', '.join(lines[:3])!r}; expected <unk>, <eos> and a word"
            )


@dataclasses.dataclass
class TrainingState:
    """What ``gnomon train --resume`` needs beside the model.

    Attributes:
        options: those of the training, by the names of training/training_options.h and of the
            windows in tasks/text.h.
        step: steps done.
        optimizer: the moments of AdamW, "exp_avg.<parameter>" and "exp_avg_sq.<parameter>".
        memory: "layers.<n>" and "embeddings" of what the model remembers, if it does.
        memory_tokens: tokens that the memory has seen.
        data: "path" and "sha256" of the text.
        run: "checkpoint_every" and "evaluation_bytes" as ``gnomon train`` was given them, its
            defaults if they are left out.

    Raises:
        ValueError: a field of options or data that is missing, a number out of its range, a field
            of run that is not known.
        TypeError: a field of another class.
    """

    options: dict[str, Any]
    step: int
    optimizer: dict[str, Tensor]
    memory: dict[str, Tensor]
    memory_tokens: int
    data: dict[str, str]
    run: dict[str, int] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        steps = self.options.get("steps", "?")
        return f"TrainingState(step {self.step} of {steps}, data {self.data.get('path')!r})"

    def __post_init__(self) -> None:
        operator = "models.TrainingState"
        for field in ("options", "optimizer", "memory", "data", "run"):
            if not isinstance(getattr(self, field), dict):
                raise wrong_type(operator, field, getattr(self, field), "a dict")
        for field in ("step", "memory_tokens"):
            count = check_integer(operator, field, getattr(self, field))
            if count < 0:
                raise ValueError(f"gnomon.{operator}: {field} is {count}; expected at least 0")
            setattr(self, field, count)
        for field, names in (
            ("options", tuple(program_options("training"))),
            ("data", ("path", "sha256")),
        ):
            for name in names:
                if name not in getattr(self, field):
                    raise ValueError(f"gnomon.{operator}: {field} lacks {name!r}")
        self.options = self.options | {
            name: option.check(operator, self.options[name], "options")
            for name, option in program_options("training").items()
        }
        for name in ("path", "sha256"):
            check_string(operator, f"{name} of data", self.data[name])
        for field in ("optimizer", "memory"):
            check_tensors(operator, **getattr(self, field))
        known = program_options("run")
        for name in self.run:
            if name not in known:
                raise ValueError(
                    f"gnomon.{operator}: run has {name!r}; expected {' and '.join(known)}"
                )
        self.run = {
            name: option.check(operator, self.run.get(name, option.default), "run")
            for name, option in known.items()
        }


@dataclasses.dataclass
class Checkpoint:
    """What a file holds; training is None where it holds a model alone."""

    model: LanguageModel
    tokenizer: Tokenizer
    training: TrainingState | None = None


def save_checkpoint(
    path: str | os.PathLike[str],
    model: LanguageModel,
    tokenizer: Tokenizer | None = None,
    training: TrainingState | None = None,
) -> None:
    """Writes a file that load_checkpoint and the command line read, weights in float32.

    tokenizer is that of bytes by default. Without its training a model can be evaluated, can
    generate and be inspected; ``gnomon train --resume`` needs it. An existing file is replaced once
    the new one is whole.

    Raises:
        ValueError: a vocabulary of another size than the model's; a model with other tensors than
            one of its options has (a module put in the place of another, or parametrized).
        TypeError: an argument of another class.
        OSError: the file cannot be written.
    """
    target = _to_path("save_checkpoint", path)
    if not isinstance(model, LanguageModel):
        raise wrong_type("models.save_checkpoint", "model", model, "a LanguageModel")
    tokenizer = Tokenizer() if tokenizer is None else tokenizer
    if not isinstance(tokenizer, Tokenizer):
        raise wrong_type("models.save_checkpoint", "tokenizer", tokenizer, "a Tokenizer, or None")
    if training is not None and not isinstance(training, TrainingState):
        raise wrong_type("models.save_checkpoint", "training", training, "a TrainingState, or None")
    if training is not None:
        # Its fields are checked again: they may have changed since it was made.
        training = dataclasses.replace(training)
    _check_vocabulary("gnomon.models.save_checkpoint: ", tokenizer, model.options["vocabulary"])
    state = model.state_dict()
    _check_state(model.options, state)
    tensors = {_MODEL + name: tensor.float() for name, tensor in state.items()}
    if tokenizer.vocabulary:
        tensors[_VOCABULARY] = torch.frombuffer(bytearray(tokenizer.vocabulary), dtype=torch.uint8)
    config: dict[str, Any] = {
        "format": _FORMAT,
        "model": dict(model.options),
        "tokens": {"kind": tokenizer.kind},
    }
    if training is not None:
        tensors |= {_OPTIMIZER + name: tensor for name, tensor in training.optimizer.items()}
        tensors |= {_MEMORY + name: tensor for name, tensor in training.memory.items()}
        config |= {name: getattr(training, field) for field, name in _TRAINING_FIELDS.items()}
        config["run"] = training.run
    metadata = {"format": "pt", _CONFIG: json.dumps(config, allow_nan=False)}
    _safetensors.write(target, tensors, metadata)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """What is in a checkpoint file, or in the folder of a run; the model in evaluation mode.

    Tensors are in float32 on the CPU, and can be trained, whatever torch.device and
    torch.inference_mode it is called under. Nothing that a file holds is executed.

    Raises:
        ValueError: there is no sound checkpoint; it names the path.
        TypeError: path is none.
    """
    path = _to_path("load_checkpoint", path)
    if not path.exists():
        raise ValueError(f"no such checkpoint file or run folder: {path}")
    if path.is_dir():
        if not (path / CHECKPOINT_NAME).exists():
            raise ValueError(f"the folder {path} holds no {CHECKPOINT_NAME}")
        path = path / CHECKPOINT_NAME
    with torch.inference_mode(False), torch.device("cpu"):
        tensors, metadata = _safetensors.read(path)
        try:
            return _build(tensors, metadata)
        except KeyError as error:
            raise ValueError(
                f"{path} is not a checkpoint of a language model: {error} is missing"
            ) from error
        except (ValueError, TypeError, RuntimeError, RecursionError) as error:
            message = " ".join(str(error).split())
            raise ValueError(
                f"{path} is not a checkpoint of a language model: {message}"
            ) from error


def _to_path(function: str, path: object) -> pathlib.Path:
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type(f"models.{function}", "path", path, "a str or an os.PathLike")
    return pathlib.Path(path)


def _object(what: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a {type(value).__name__}, expected an object")
    return value


def _build(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Checkpoint:
    config = _object("its configuration", json.loads(metadata[_CONFIG]))
    file_format = config["format"]
    if type(file_format) is not int or file_format != _FORMAT:
        raise ValueError(f"its format is {file_format!r}, expected {_FORMAT}")
    task = config.get("task", "text")
    if task != "text":
        raise ValueError(f"it is of the task {task!r}, expected 'text'")
    named = _object("the field 'model'", config["model"])
    options = {
        name: named.get(name, option.default) if option.may_lack else named[name]
        for name, option in program_options("model").items()
    }
    _check_options(options)
    # Vocabulary, dim, mlp and depth are compared with tensors that the file does hold before a
    # model of them is built; max_length and the numbers in `position` are not.
    dim = options["dim"]
    hidden = options["mlp"] * (2 if options["activation"] in _GATES else 1)
    embeddings = {"embedding.weight": (options["vocabulary"], dim)}
    if options["adaptive"]:
        sizes = table_sizes(options["vocabulary"], dim, options["adaptive"])
        embeddings = {f"embedding.table_{band}": size for band, size in enumerate(sizes)}
    for name, shape in [
        *((name, list(size)) for name, size in embeddings.items()),
        ("blocks.0.mlp_in.weight", [hidden, dim]),
    ]:
        if list(tensors[_MODEL + name].shape) != shape:
            raise ValueError(f"the tensor '{_MODEL + name}' is not of the shape {shape}")
    if options["depth"] > len(tensors):
        raise ValueError(f"it holds fewer tensors than {options['depth']} layers")
    vocabulary = tensors.get(_VOCABULARY, torch.empty(0, dtype=torch.uint8))
    if vocabulary.dtype != torch.uint8 or vocabulary.dim() != 1:
        raise ValueError(
            f"the tensor '{_VOCABULARY}' is {vocabulary.dtype} and has {vocabulary.dim()} axes, "
            "expected uint8 and one"
        )
    kind = _object("the field 'tokens'", config["tokens"])["kind"]
    tokenizer = Tokenizer(kind, bytes(vocabulary.tolist()))
    _check_vocabulary("", tokenizer, options["vocabulary"])
    state = _below(tensors, _MODEL)
    for name, tensor in state.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"the tensor '{_MODEL + name}' is {tensor.dtype}, expected float32")
    # What it draws is overwritten: the generator shall not show it.
    with torch.random.fork_rng(devices=[]):
        model = LanguageModel(**options).float()
    model.load_state_dict(state)
    training = None
    used = len(state) + (_VOCABULARY in tensors)
    if any(name in config for name in _TRAINING_FIELDS.values()):
        fields = {field: config[name] for field, name in _TRAINING_FIELDS.items()}
        fields["run"] = _object("the field 'run'", config.get("run", {}))
        training = TrainingState(
            **fields, optimizer=_below(tensors, _OPTIMIZER), memory=_below(tensors, _MEMORY)
        )
        used += len(training.optimizer) + len(training.memory)
    if used != len(tensors):
        raise ValueError(f"it holds {len(tensors)} tensors, of which its model has {used}")
    return Checkpoint(model.eval(), tokenizer, training)


def _check_state(options: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """That the tensors of a model are those that its options lead to."""
    where = "gnomon.models.save_checkpoint: model"
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        expected = {name: t.shape for name, t in LanguageModel(**options).state_dict().items()}
    for name in sorted(expected.keys() | state.keys()):
        if name not in expected or name not in state:
            fault = "has the tensor" if name in state else "lacks the tensor"
            raise ValueError(
                f"{where} {fault} {name!r}; expected the tensors of a LanguageModel of its options"
            )
        if state[name].shape != expected[name]:
            raise ValueError(
                f"{where} has {name!r} of shape {list(state[name].shape)}; expected "
                f"{list(expected[name])} by its options"
            )


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _check_vocabulary(where: str, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Of what can be counted without SentencePiece."""
    size = {"bytes": 256, "words": tokenizer.vocabulary.count(b"\n")}.get(tokenizer.kind)
    if size is not None and size != vocabulary:
        raise ValueError(
            f"{where}the vocabulary of {tokenizer.kind} has {size} tokens, the model {vocabulary}"
        )
