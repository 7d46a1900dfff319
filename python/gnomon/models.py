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
from typing import Any

import torch
from torch import Tensor

from gnomon import _safetensors
from gnomon._checks import check_integer, check_number, check_string, check_tensors, wrong_type
from gnomon.nn import KVCache, MultiheadAttention, TokenCache, TokenPosition

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

_SIZES = ("vocabulary", "dim", "depth", "heads", "mlp", "max_length")

# The layout of the file: models/training.cc.
_FORMAT = 1
_CONFIG = "gnomon"
_MODEL = "model."
_OPTIMIZER = "optimizer."
_MEMORY = "memory."
_VOCABULARY = "tokens.vocabulary"
_TRAINING_FIELDS = ("step", "training", "memory_tokens", "data")


class LanguageModelCache:
    """What a model remembers of the tokens so far, of a depth."""

    def __init__(self, depth: int) -> None:
        check_integer("models.LanguageModelCache", "depth", depth)
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
        check_integer("models.LanguageModelMemory", "max_length", max_length)
        if max_length < 0:
            raise ValueError(
                f"gnomon.models.LanguageModelMemory: max_length is {max_length}; expected at "
                "least 0"
            )
        self.max_length = max_length
        #: One a layer; none before the first segment.
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
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        mlp: int,
        similarity: str,
        position: str,
        dropout: float,
        max_length: int,
    ) -> None:
        super().__init__()
        self.attention_norm = torch.nn.LayerNorm(dim)
        self.attention = MultiheadAttention(
            dim, heads, similarity=similarity, position=position, max_length=max_length
        )
        self.mlp_norm = torch.nn.LayerNorm(dim)
        self.mlp_in = torch.nn.Linear(dim, mlp)
        self.mlp_out = torch.nn.Linear(mlp, dim)
        self.dropout = torch.nn.Dropout(dropout)
        # Each of the 2 * depth residual branches adds its share of the stream's variance.
        _initialize(self.attention.out_proj, (2 * depth) ** -0.5)
        _initialize(self.mlp_in, 1.0)
        _initialize(self.mlp_out, (2 * depth) ** -0.5)

    def forward(self, x: Tensor, cache: KVCache | None, memory: Tensor | None) -> Tensor:
        """Keys and values are those of memory (B, M, dim) and of x (B, L, dim)."""
        queries = self.attention_norm(x)
        keys, offset = queries, None
        if memory is not None:
            keys, offset = torch.cat([self.attention_norm(memory), queries], 1), memory.shape[1]
        attended = self.attention(queries, keys, causal=True, query_offset=offset, cache=cache)
        x = x + self.dropout(attended)
        hidden = torch.nn.functional.gelu(self.mlp_in(self.mlp_norm(x)))
        mixed: Tensor = self.dropout(self.mlp_out(hidden))
        return x + mixed


def _initialize(linear: torch.nn.Linear, gain: float) -> None:
    """Weights of variance gain^2 / fan_in keep the variance of unit inputs at gain^2."""
    torch.nn.init.normal_(linear.weight, 0, gain * linear.in_features**-0.5)
    torch.nn.init.zeros_(linear.bias)


class LanguageModel(torch.nn.Module):
    """A decoder-only Transformer over tokens, that of ``gnomon train``.

    Pre-norm (Vaswani et al. 2017; Radford et al. 2019), tied embeddings, GELU. The parameters have
    the names and the starting distributions of the program's (models/language_model.h).

    Args:
        vocabulary: how many tokens there are.
        dim: columns of the embeddings, a multiple of heads.
        depth: layers.
        heads: attention heads.
        mlp: columns inside the MLP.
        similarity: a specification, as for gnomon.nn.MultiheadAttention.
        position: a specification; components that are added to embeddings are.
        dropout: of each residual branch, while training; [0, 1).
        max_length: rows of a learned table of absolute positions.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        dim: int = 128,
        depth: int = 4,
        heads: int = 4,
        mlp: int = 512,
        similarity: str = "dot",
        position: str = "none",
        dropout: float = 0.0,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        sizes = dict(zip(_SIZES, (vocabulary, dim, depth, heads, mlp, max_length), strict=True))
        for name, size in sizes.items():
            sizes[name] = check_integer("models.LanguageModel", name, size)
            if size < 1:
                raise ValueError(
                    f"gnomon.models.LanguageModel: {name} is {size}; expected at least 1"
                )
        for name, spec in (("similarity", similarity), ("position", position)):
            check_string("models.LanguageModel", name, spec, "a specification, a string")
        check_number("models.LanguageModel", "dropout", dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"gnomon.models.LanguageModel: dropout is {dropout}; expected [0, 1)")
        if dim % heads != 0:
            raise ValueError(
                f"gnomon.models.LanguageModel: dim is {dim} and heads {heads}; expected a multiple"
            )
        #: The arguments.
        self.options: dict[str, Any] = {
            **sizes,
            "similarity": similarity,
            "position": position,
            "dropout": float(dropout),
        }
        self.embedding = torch.nn.Embedding(vocabulary, dim)
        # Unit logits from a normalised stream; forward() brings the inputs to unit variance.
        torch.nn.init.normal_(self.embedding.weight, 0, dim**-0.5)
        self.blocks = torch.nn.ModuleList(
            _TransformerBlock(dim, depth, heads, mlp, similarity, position, dropout, max_length)
            for _ in range(depth)
        )
        self.norm = torch.nn.LayerNorm(dim)
        self.token_position = TokenPosition(position, dim, max_length, causal=True)

    @property
    def max_length(self) -> int | None:
        """The longest text at which the encodings are defined; None if any length will do."""
        return self.token_position.max_length

    def layer_inputs(
        self,
        tokens: Tensor,
        cache: LanguageModelCache | None = None,
        memory: LanguageModelMemory | None = None,
    ) -> list[Tensor]:
        """What enters each block, and what leaves the last; (B, L, dim). As forward otherwise."""
        self._check_call(tokens, cache, memory)
        # What a layer refuses leaves the caller's as they were.
        given_cache, cache = cache, None if cache is None else cache._draft()
        given_memory, memory = memory, None if memory is None else memory._draft()
        try:
            x = self.embedding(tokens) * self.options["dim"] ** 0.5
        except IndexError as error:
            raise ValueError(
                "gnomon.models.LanguageModel: tokens reach beyond the vocabulary; expected 0 to "
                f"{self.options['vocabulary'] - 1}"
            ) from error
        known = cache if cache is not None else memory
        x = self.token_position(x, cache=None if known is None else known.tokens)
        if memory is not None and memory.tokens.embeddings is not None:
            memory.tokens.embeddings = memory.tokens.embeddings.detach()
        states = [x]
        for layer, block in enumerate(self.blocks):
            before = None if memory is None else memory._remember(layer, x)
            x = block(x, None if cache is None else cache.layers[layer], before)
            states.append(x)
        if given_cache is not None and cache is not None:
            given_cache._keep(cache)
        if given_memory is not None and memory is not None:
            given_memory._keep(memory)
        return states

    def forward(
        self,
        tokens: Tensor,
        cache: LanguageModelCache | None = None,
        memory: LanguageModelMemory | None = None,
    ) -> Tensor:
        """Logits (B, L, vocabulary) of the token after each of tokens (B, L), integers.

        With a cache, the tokens follow those already in it; with a memory, they are the segment
        after those that it holds, and it then holds theirs. A call that raises leaves both as they
        were.

        Raises:
            ValueError: shapes, tokens beyond the vocabulary or beyond max_length, a cache or a
                memory of another batch or depth, or both of them.
            TypeError: tokens that are no tensor of integers, a memory of another dtype, another
                device than the model's.
        """
        x = self.norm(self.layer_inputs(tokens, cache, memory)[-1])
        return torch.nn.functional.linear(x, self.embedding.weight)

    def _check_call(
        self, tokens: Tensor, cache: LanguageModelCache | None, memory: LanguageModelMemory | None
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
        if cache is not None and self.max_length is not None:
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
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """What a model reads: "bytes", "words" or "subwords", and their vocabulary as a file.

    Of words, the file has one a line, the first of them <unk> and <eos>; of subwords, it is a model
    of SentencePiece; of bytes, it is empty.
    """

    kind: str = "bytes"
    vocabulary: bytes = b""

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


@dataclasses.dataclass
class TrainingState:
    """What ``gnomon train --resume`` needs beside the model.

    Attributes:
        options: those of the training, by the names of models/training.h.
        step: steps done.
        optimizer: the moments of AdamW, "exp_avg.<parameter>" and "exp_avg_sq.<parameter>".
        memory: "layers.<n>" and "embeddings" of what the model remembers, if it does.
        memory_tokens: tokens that the memory has seen.
        data: "path" and "sha256" of the text.
    """

    options: dict[str, Any]
    step: int
    optimizer: dict[str, Tensor]
    memory: dict[str, Tensor]
    memory_tokens: int
    data: dict[str, str]


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
        ValueError: a vocabulary of another size than the model's.
        TypeError: an argument of another class.
        OSError: the file cannot be written.
    """
    if not isinstance(model, LanguageModel):
        raise wrong_type("models.save_checkpoint", "model", model, "a LanguageModel")
    tokenizer = Tokenizer() if tokenizer is None else tokenizer
    if not isinstance(tokenizer, Tokenizer):
        raise wrong_type("models.save_checkpoint", "tokenizer", tokenizer, "a Tokenizer, or None")
    if training is not None and not isinstance(training, TrainingState):
        raise wrong_type("models.save_checkpoint", "training", training, "a TrainingState, or None")
    _check_vocabulary("gnomon.models.save_checkpoint: ", tokenizer, model.options["vocabulary"])
    tensors = {_MODEL + name: tensor.float() for name, tensor in model.state_dict().items()}
    if tokenizer.vocabulary:
        tensors[_VOCABULARY] = torch.frombuffer(bytearray(tokenizer.vocabulary), dtype=torch.uint8)
    config: dict[str, Any] = {
        "format": _FORMAT,
        "model": model.options,
        "tokens": {"kind": tokenizer.kind},
    }
    if training is not None:
        tensors |= {_OPTIMIZER + name: tensor for name, tensor in training.optimizer.items()}
        tensors |= {_MEMORY + name: tensor for name, tensor in training.memory.items()}
        parts = (training.step, training.options, training.memory_tokens, training.data)
        config |= dict(zip(_TRAINING_FIELDS, parts, strict=True))
    metadata = {"format": "pt", _CONFIG: json.dumps(config)}
    _safetensors.write(pathlib.Path(path), tensors, metadata)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """What is in a checkpoint file, or in the folder of a run; the model in evaluation mode.

    Tensors are in float32 on the CPU. Nothing that a file holds is executed. Raises ValueError
    naming the path where there is no sound checkpoint.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(f"no such checkpoint file or run folder: {path}")
    if path.is_dir():
        if not (path / CHECKPOINT_NAME).exists():
            raise ValueError(f"the folder {path} holds no {CHECKPOINT_NAME}")
        path = path / CHECKPOINT_NAME
    tensors, metadata = _safetensors.read(path)
    try:
        return _build(tensors, metadata)
    except KeyError as error:
        raise ValueError(
            f"{path} is not a checkpoint of a language model: {error} is missing"
        ) from error
    except (ValueError, TypeError, RuntimeError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{path} is not a checkpoint of a language model: {message}") from error


def _build(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Checkpoint:
    config = json.loads(metadata[_CONFIG])
    if config["format"] != _FORMAT:
        raise ValueError(f"its format is {config['format']}, expected {_FORMAT}")
    options = {
        name: config["model"][name] for name in (*_SIZES, "similarity", "position", "dropout")
    }
    # Sizes are compared with tensors that the file does hold before a model of them is built.
    dim = options["dim"]
    for name, shape in (
        ("embedding.weight", [options["vocabulary"], dim]),
        ("blocks.0.mlp_in.weight", [options["mlp"], dim]),
    ):
        if list(tensors[_MODEL + name].shape) != shape:
            raise ValueError(f"the tensor '{_MODEL + name}' is not of the shape {shape}")
    if options["depth"] > len(tensors):
        raise ValueError(f"it holds fewer tensors than {options['depth']} layers")
    vocabulary = tensors.get(_VOCABULARY, torch.empty(0, dtype=torch.uint8))
    if vocabulary.dtype != torch.uint8:
        raise ValueError(f"the tensor '{_VOCABULARY}' is {vocabulary.dtype}, expected uint8")
    tokenizer = Tokenizer(config["tokens"]["kind"], bytes(vocabulary.tolist()))
    _check_vocabulary("", tokenizer, options["vocabulary"])
    # What it draws is overwritten: the generator shall not show it.
    with torch.random.fork_rng(devices=[]):
        model = LanguageModel(**options).float()
    state = _below(tensors, _MODEL)
    for name, tensor in state.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"the tensor '{_MODEL + name}' is {tensor.dtype}, expected float32")
    model.load_state_dict(state)
    training = None
    used = len(state) + (_VOCABULARY in tensors)
    if any(field in config for field in _TRAINING_FIELDS):
        step, training_options, memory_tokens, data = (config[name] for name in _TRAINING_FIELDS)
        training = TrainingState(
            options=training_options,
            step=step,
            optimizer=_below(tensors, _OPTIMIZER),
            memory=_below(tensors, _MEMORY),
            memory_tokens=memory_tokens,
            data=data,
        )
        used += len(training.optimizer) + len(training.memory)
    if used != len(tensors):
        raise ValueError(f"it holds {len(tensors)} tensors, of which its model has {used}")
    return Checkpoint(model.eval(), tokenizer, training)


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
