"""The language model of the gnomon command."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnomon._attention import Integers
from gnomon._checks import Device, check_optional_integers, check_tensors, wrong_type
from gnomon._library import query
from gnomon._position import Position, Sum, to_positions
from gnomon._similarity import Similarity, to_similarity
from gnomon.lab._program import options as program_options
from gnomon.lab.models._adaptive import AdaptiveEmbedding
from gnomon.lab.models._memory import LanguageModelCache, LanguageModelMemory
from gnomon.nn import (
    KVCache,
    LearnedValue,
    MultiheadAttention,
    TokenPosition,
    attention_position,
)
from gnomon.nn._checks import check_factory
from gnomon.nn._held_terms import Projection, reset_children


class _TransformerBlock(torch.nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, options: Mapping[str, Any], position: str, made: dict[str, Any]) -> None:
        super().__init__()
        dim, mlp, bias = options["dim"], options["mlp"], not options["no_bias"]
        self.activation: str = options["activation"]
        self.attention_norm = _norm(options, made)
        self.attention = MultiheadAttention(
            dim,
            options["heads"],
            options["kv_heads"],
            options["qk_dim"],
            similarity=options["similarity"],
            position=attention_position(position),
            bias=bias,
            max_length=options["max_length"],
            **made,
        )
        self.mlp_norm = _norm(options, made)
        hidden = 2 * mlp if self.activation in GATES else mlp
        # Scale the 2 * depth residual branches so that the variances that they add sum to 1.
        residual = (2 * options["depth"]) ** -0.5
        self.attention.out_proj.with_gain(residual)
        self.mlp_in = Projection(dim, hidden, bias=bias, **made)
        self.mlp_out = Projection(mlp, dim, bias=bias, **made).with_gain(residual)
        self.dropout = torch.nn.Dropout(options["dropout"])

    def reset_parameters(self) -> None:
        """Reinitialises all parameters and buffers."""
        reset_children(self)

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None,
        memory: Tensor | None,
        positions: Tensor | None,
        segments: Tensor | None,
    ) -> Tensor:
        """Applies the block to x (B, L, dim); keys and values also come from memory (B, M, dim)."""
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
        if gate := GATES.get(self.activation):
            gates, units = hidden.chunk(2, -1)
            hidden = gate(gates) * units
        else:
            hidden = getattr(torch.nn.functional, self.activation)(hidden)
        mixed: Tensor = self.dropout(self.mlp_out(hidden))
        return x + mixed


# Gate activations of gated MLPs (Shazeer 2020).
GATES = {"swiglu": torch.nn.functional.silu, "geglu": torch.nn.functional.gelu}


def _norm(options: Mapping[str, Any], made: dict[str, Any]) -> torch.nn.Module:
    if options["norm"] == "rms":
        return torch.nn.RMSNorm(options["dim"], eps=query("rms_norm_epsilon"), **made)
    return torch.nn.LayerNorm(options["dim"], **made)


class _Embedding(torch.nn.Embedding):
    """An embedding with rows from N(0, 1 / dim), so that the logits have unit variance."""

    def reset_parameters(self) -> None:
        """Reinitialises the rows."""
        torch.nn.init.normal_(self.weight, 0, self.embedding_dim**-0.5)


class LanguageModel(torch.nn.Module):
    """The decoder-only Transformer of ``gnomon train``.

    It is a pre-norm model (Vaswani et al. 2017; Radford et al. 2019) with tied embeddings and, by
    default, GELU. Parameter names and initial distributions match those of the gnomon command
    (lab/models/language_model.h).

    Args:
        vocabulary: vocabulary size.
        dim: embedding dimension, a multiple of heads.
        depth: number of layers.
        heads: number of attention heads.
        mlp: hidden dimension of the MLP.
        similarity: a specification or a gnomon.similarity object, as in
            gnomon.nn.MultiheadAttention. An object must contain numbers, not tensors, so that a
            checkpoint can store it.
        position: a specification or an object, like similarity. It may include components that are
            added to embeddings. "rope;rope;none" is a pattern of one position per layer, which
            repeats over the layers.
        dropout: dropout probability on each residual branch during training, in [0, 1).
        max_length: number of rows of a learned absolute position table.
        norm: "layer", or "rms" (Zhang and Sennrich 2019).
        activation: the MLP's activation: "gelu", "relu", or the gated "swiglu" and "geglu" (Shazeer
            2020).
        no_bias: whether to omit the biases of the attention and MLP projections.
        adaptive: the index of the first token in each band of rarer tokens, in ascending order. In
            embeddings and softmax, each band has a quarter of the previous band's dimension
            (Baevski and Auli 2019; Grave et al. 2017). Tokens must be sorted by descending
            frequency. By default, all tokens have dimension dim.
        kv_heads: number of key-value heads, a divisor of heads; defaults to heads.
        qk_dim: head dimension of queries and keys. The default is the head dimension of the values
            (dim / heads), or the only dimension that the similarity supports.
        device: device of parameters and buffers; the default device if None.
        dtype: floating-point dtype of parameters and buffers; the default dtype if None.

    Example:
        >>> model = gnomon.models.LanguageModel(dim=32, depth=2, position="rope")
        >>> logits = model(torch.randint(256, (2, 16)))  # (B, L, vocabulary)
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
        kv_heads: int | None = None,
        qk_dim: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = check_factory("models.LanguageModel", device, dtype)
        similarity, position = _to_specs(similarity, position)
        #: The constructor arguments; see options.
        self._options = check_options(
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
                "kv_heads": kv_heads,
                "qk_dim": qk_dim,
            }
        )
        self.embedding: torch.nn.Embedding | AdaptiveEmbedding
        # forward() scales the embeddings to unit variance.
        if adaptive:
            self.embedding = AdaptiveEmbedding(vocabulary, dim, self._options["adaptive"], **made)
        else:
            self.embedding = _Embedding(vocabulary, dim, **made)
        parts = query("layer_positions", position)
        self.blocks = torch.nn.ModuleList(
            _TransformerBlock(self._options, parts[layer % len(parts)], made)
            for layer in range(depth)
        )
        self.norm = _norm(self._options, made)
        self.token_position = TokenPosition("+".join(parts), dim, max_length, True, **made)

    def reset_parameters(self) -> None:
        """Reinitialises all parameters and buffers."""
        reset_children(self)

    @property
    def options(self) -> Mapping[str, Any]:
        """The constructor arguments; read-only, because modules were built from them."""
        return types.MappingProxyType(self._options)

    @property
    def max_length(self) -> int | None:
        """The maximum length that the encodings support, or None if it is unlimited."""
        return self.token_position.max_length

    def learned_values(self) -> dict[str, LearnedValue]:
        """Returns all layers' learned values by name, such as "blocks.0.attention.gamma".

        See gnomon.nn.MultiheadAttention.learned_values.
        """
        return {
            f"{name}.{learned}": value
            for name, module in self.named_modules()
            if isinstance(module, MultiheadAttention)
            for learned, value in module.learned_values().items()
        }

    def __repr__(self) -> str:
        return f"LanguageModel({self.extra_repr()})"

    def layer_inputs(
        self,
        tokens: Tensor,
        cache: LanguageModelCache | None = None,
        memory: LanguageModelMemory | None = None,
        *,
        positions: Integers | None = None,
        segments: Integers | None = None,
    ) -> list[Tensor]:
        """Returns the inputs (B, L, dim) of all blocks and the last block's output; see forward."""
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
        """Returns layer_inputs() and a function that updates the cache and the memory.

        The caller must call this function after all steps that can fail.
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
                        f"gnomon.{operator}: {name} and a {other} are both given; pass only one of "
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
                "gnomon.models.LanguageModel: tokens are outside the vocabulary; expected values "
                f"from 0 to {self._options['vocabulary'] - 1}"
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
        """Returns next-token logits (B, L, vocabulary) for integer tokens (B, L).

        With adaptive embeddings, the results are log-probabilities.

        With a cache, the tokens follow the tokens in the cache. With a memory, the tokens are the
        next part of the text and are appended to the memory. If a call raises an error, both remain
        unchanged.

        positions, integers of shape (B, L), or (L,) if shared across the batch, are the positions
        of the tokens; a token attends to positions up to its own. They cannot be combined with a
        memory. segments, of the same shape, restrict each token to its own segment; they cannot be
        combined with a cache or a memory. For packed documents, pass both, with positions that
        restart at 0 in each document.

        Raises:
            ValueError: a shape is wrong; tokens are outside the vocabulary or beyond max_length; a
                cache or memory has a different batch size or depth; or a cache and a memory are
                both given.
            TypeError: tokens are not an integer tensor, a memory has a different dtype, or a
                tensor is not on the model's device.
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
        """Returns the next-token losses (B, L), in nats, for integer targets (B, L).

        The losses agree with forward, but with adaptive embeddings, only the log-probabilities of
        the targets are computed. The other arguments are those of forward.

        Raises:
            ValueError: as in forward, or if targets differ in shape from tokens or are outside the
                vocabulary.
            TypeError: as in forward.
        """
        operator = "models.LanguageModel"
        check_tensors(operator, targets=targets)
        if targets.shape != tokens.shape:
            raise ValueError(
                f"gnomon.{operator}: targets have shape {tuple(targets.shape)} and tokens "
                f"have shape {tuple(tokens.shape)}; expected the same shape"
            )
        vocabulary = self._options["vocabulary"]
        if targets.numel() > 0 and not 0 <= targets.min() <= targets.max() < vocabulary:
            raise ValueError(
                f"gnomon.{operator}: targets are outside the vocabulary; expected values from 0 to "
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
        """Checks all arguments before any computation."""
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
                f"gnomon.{operator}: tokens are on {tokens.device} and the model is on "
                f"{weight.device}; expected the same device"
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
            # A memory has no layers before its first segment.
            if known.layers and len(known.layers) != len(self.blocks):
                raise ValueError(
                    f"gnomon.{operator}: the {name} has {len(known.layers)} layers and the "
                    f"model has {len(self.blocks)}; expected the same number"
                )
            batch = known._batch()
            if batch is not None and batch != len(tokens):
                raise ValueError(
                    f"gnomon.{operator}: the {name} has batch size {batch} and the tokens "
                    f"have batch size {len(tokens)}; expected the same batch size"
                )
        if cache is not None and self.max_length is not None and not placed:
            length = cache.tokens.length() + tokens.shape[1]
            if length > self.max_length:
                raise ValueError(
                    f"gnomon.{operator}: the cache and the tokens have a total length of {length}; "
                    f"expected at most max_length = {self.max_length}"
                )
        if memory is not None and memory.layers:
            held = memory.layers[0]
            if held.device != weight.device:
                raise TypeError(
                    f"gnomon.{operator}: the memory is on {held.device} and the model is on "
                    f"{weight.device}; expected the same device"
                )
            if held.dtype != weight.dtype and not torch.is_autocast_enabled(held.device.type):
                raise TypeError(
                    f"gnomon.{operator}: the memory has dtype {held.dtype} and the model "
                    f"has dtype {weight.dtype}; expected the same dtype"
                )

    def extra_repr(self) -> str:
        """Returns the arguments, for print()."""
        return ", ".join(
            f"{name}={value!r}" for name, value in self._options.items() if value is not None
        )


def _to_specs(similarity: object, position: object) -> tuple[str, str]:
    """Converts a similarity and a position to specifications, which a checkpoint can store."""
    operator = "models.LanguageModel"
    if isinstance(position, str) and len(parts := query("layer_positions", position)) > 1:
        specs = [_to_specs(similarity, part) for part in parts]
        for _, part in specs[1:]:
            if attention_position(part) != part:
                raise ValueError(
                    f"gnomon.{operator}: position is {position!r}, where {part!r} is added to "
                    "embeddings, before all layers; pass it only in the first part"
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
                f"gnomon.{operator}: {name} contains tensors; expected numbers or a "
                "specification, from which the model creates its own tensors"
            )
        lowered.append(spec)
    return lowered[0], lowered[1]


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the checked options of a LanguageModel, as values that JSON can store."""
    operator = "models.LanguageModel"
    checked = {
        name: option.check(operator, options[name])
        for name, option in program_options("model").items()
    }
    if checked["dropout"] == 1:
        raise ValueError(f"gnomon.{operator}: dropout is 1; expected [0, 1)")
    dim, heads = checked["dim"], checked["heads"]
    if dim % heads != 0:
        raise ValueError(f"gnomon.{operator}: dim is {dim}; expected a multiple of heads, {heads}")
    return checked
