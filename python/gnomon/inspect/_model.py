"""The language model of a checkpoint that ``gnomon train`` has written."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import torch
from torch import Tensor

from gnomon.nn import MultiheadAttention, TokenPosition

CHECKPOINT_NAME = "checkpoint.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "I64": torch.int64,
    "U8": torch.uint8,
}


def read_safetensors(path: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata; ValueError where it is not of that format."""
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            dtype, shape = _DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
            first, last = (start + int(offset) for offset in entry["data_offsets"])
            count = math.prod(shape)
            if not start <= first <= last <= len(content):
                raise ValueError("data outside the file")
            if last - first != count * dtype.itemsize:
                raise ValueError("a tensor of another size than its shape's")
            tensors[name] = (
                torch.frombuffer(content, dtype=dtype, count=count, offset=first)
                if count > 0
                else torch.empty(0, dtype=dtype)
            ).reshape(shape)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from error
    return tensors, metadata


class _Block(torch.nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        dim = options["dim"]
        self.attention_norm = torch.nn.LayerNorm(dim)
        self.attention = MultiheadAttention(
            dim,
            options["heads"],
            similarity=options["similarity"],
            position=options["position"],
            max_length=options["max_length"],
        )
        self.mlp_norm = torch.nn.LayerNorm(dim)
        self.mlp_in = torch.nn.Linear(dim, options["mlp"])
        self.mlp_out = torch.nn.Linear(options["mlp"], dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), causal=True)
        hidden = torch.nn.functional.gelu(self.mlp_in(self.mlp_norm(x)))
        mixed: Tensor = self.mlp_out(hidden)
        return x + mixed


class LanguageModel(torch.nn.Module):
    """The model of models/language_model.h, with its names of parameters, for evaluation.

    options: those in the checkpoint. tokens: what it reads, "bytes", "words" or "subwords".
    """

    def __init__(self, options: dict[str, Any], tokens: str) -> None:
        super().__init__()
        dim = options["dim"]
        self.options = options
        self.tokens = tokens
        self.embedding = torch.nn.Embedding(options["vocabulary"], dim)
        self.blocks = torch.nn.ModuleList(_Block(options) for _ in range(options["depth"]))
        self.norm = torch.nn.LayerNorm(dim)
        self.token_position = TokenPosition(
            options["position"], dim, options["max_length"], causal=True
        )

    def layer_inputs(self, tokens: Tensor) -> list[Tensor]:
        """What enters each block, and what leaves the last, (1, L, dim) of tokens (L,)."""
        dim = self.options["dim"]
        x = self.token_position(self.embedding(tokens[None]) * dim**0.5)
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (L, vocabulary) of the token after each of tokens (L,)."""
        out: Tensor = self.norm(self.layer_inputs(tokens)[-1]) @ self.embedding.weight.T
        return out[0]


def load_model(path: pathlib.Path) -> LanguageModel:
    """The model in a checkpoint file, or in the folder of a run, in float64.

    Raises ValueError naming the path where there is none.
    """
    if not path.exists():
        raise ValueError(f"no such checkpoint file or run folder: {path}")
    if path.is_dir():
        if not (path / CHECKPOINT_NAME).exists():
            raise ValueError(f"the folder {path} holds no {CHECKPOINT_NAME}")
        path = path / CHECKPOINT_NAME
    tensors, metadata = read_safetensors(path)
    try:
        config = json.loads(metadata["gnomon"])
        if config["format"] != 1:
            raise ValueError(f"its format is {config['format']}, expected 1")
        model = LanguageModel(config["model"], config["tokens"]["kind"])
        state = {
            name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
            if name.startswith("model.")
        }
        model.load_state_dict(state)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{path} is not a checkpoint of a language model: {message}") from error
    return model.double().eval()
