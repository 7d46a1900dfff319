"""Checkpoints: a model, its tokenizer and its training state."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon._checks import check_integer, check_string, check_tensors, kind_of, wrong_type
from gnomon.lab import _safetensors
from gnomon.lab._program import options as program_options
from gnomon.lab.models._adaptive import table_sizes
from gnomon.lab.models._language_model import GATES, LanguageModel, check_options
from gnomon.lab.models._tokenizer import Tokenizer

CHECKPOINT_NAME = "checkpoint.safetensors"

# The version of the file layout, as in lab/training/checkpoint.cc.
_FORMAT = 1
_CONFIG = "gnomon"
_MODEL = "model."
_OPTIMIZER = "optimizer."
_MEMORY = "memory."
_VOCABULARY = "tokens.vocabulary"
# The non-tensor fields of a TrainingState, and their names in the file.
_TRAINING_FIELDS = {
    "step": "step",
    "options": "training",
    "memory_tokens": "memory_tokens",
    "data": "data",
}


@dataclasses.dataclass
class TrainingState:
    """The training state that ``gnomon train --resume`` needs in addition to the model.

    Attributes:
        options: training options, named as in lab/training/training_options.h, and window options
            from lab/tasks/text.h.
        step: number of completed steps.
        optimizer: AdamW moments, "exp_avg.<parameter>" and "exp_avg_sq.<parameter>".
        memory: "layers.<n>" and "embeddings" of the model's memory, if it has one.
        memory_tokens: number of tokens added to the memory so far.
        data: "path" and "sha256" of the text.
        run: "checkpoint_every" and "evaluation_bytes" as passed to ``gnomon train``; if missing,
            the command's default values.

    Raises:
        ValueError: a field of options or data is missing, a number is out of range, or a field of
            run is unknown.
        TypeError: a field has the wrong type.

    Example:
        >>> checkpoint = gnomon.models.load_checkpoint("runs/text")  # doctest: +SKIP
        >>> checkpoint.training.step  # doctest: +SKIP
        1000
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
        training = program_options("training")
        for field, names in (
            ("options", [name for name, option in training.items() if not option.may_lack]),
            ("data", ("path", "sha256")),
        ):
            for name in names:
                if name not in getattr(self, field):
                    raise ValueError(f"gnomon.{operator}: {field} lacks {name!r}")
        self.options = self.options | {
            name: option.check(operator, self.options.get(name, option.default), "options")
            for name, option in training.items()
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
    """The contents of a checkpoint file; training is None if it contains only a model.

    Example:
        >>> checkpoint = gnomon.models.load_checkpoint("runs/text")  # doctest: +SKIP
        >>> checkpoint.tokenizer.kind  # doctest: +SKIP
        'bytes'
    """

    model: LanguageModel
    tokenizer: Tokenizer
    training: TrainingState | None = None


def save_checkpoint(
    path: str | os.PathLike[str],
    model: LanguageModel,
    tokenizer: Tokenizer | None = None,
    training: TrainingState | None = None,
) -> None:
    """Writes a checkpoint with float32 weights, which load_checkpoint and the command can read.

    By default, tokenizer is the byte tokenizer. If training is None, the model can be evaluated,
    inspected and used for generation, but ``gnomon train --resume`` cannot continue its training.
    An existing file is replaced once the new one is complete.

    Raises:
        ValueError: the vocabulary size differs from the model's, or the model's tensors do not
            match its options (because a module was replaced or parametrized).
        TypeError: an argument has the wrong type.
        OSError: the file cannot be written.

    Example:
        >>> model = gnomon.models.LanguageModel(dim=32, depth=2)
        >>> gnomon.models.save_checkpoint("model.safetensors", model)  # doctest: +SKIP
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
        # Validate again: fields may have changed since construction.
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
    """Loads a checkpoint, with its model in evaluation mode, from a file or a run folder.

    The tensors are on the CPU, float32 and trainable, even under torch.device or
    torch.inference_mode. Nothing in the file is executed.

    Raises:
        ValueError: there is no valid checkpoint at path; the message contains the path.
        TypeError: path is not a path.

    Example:
        >>> checkpoint = gnomon.models.load_checkpoint("runs/text")  # doctest: +SKIP
        >>> logits = checkpoint.model(torch.tensor([[72, 101]]))  # doctest: +SKIP
    """
    path = _to_path("load_checkpoint", path)
    if not path.exists():
        raise ValueError(f"no such checkpoint file or run folder: {path}")
    if path.is_dir():
        if not (path / CHECKPOINT_NAME).exists():
            raise ValueError(f"the folder {path} contains no {CHECKPOINT_NAME}")
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
        raise ValueError(f"{what} is {kind_of(value)}; expected an object")
    return value


def _build(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Checkpoint:
    config = _object("its configuration", json.loads(metadata[_CONFIG]))
    file_format = config["format"]
    if type(file_format) is not int or file_format != _FORMAT:
        raise ValueError(f"its format is {file_format!r}; expected {_FORMAT}")
    task = config.get("task", "text")
    if task != "text":
        raise ValueError(f"it belongs to the task {task!r}; expected 'text'")
    named = _object("the field 'model'", config["model"])
    options = {
        name: named.get(name, option.default) if option.may_lack else named[name]
        for name, option in program_options("model").items()
    }
    check_options(options)
    # Check vocabulary, dim, mlp and depth against the file's tensors before building a model, which
    # could be huge. max_length and the numbers in `position` are not checked.
    dim = options["dim"]
    hidden = options["mlp"] * (2 if options["activation"] in GATES else 1)
    embeddings = {"embedding.weight": (options["vocabulary"], dim)}
    if options["adaptive"]:
        sizes = table_sizes(options["vocabulary"], dim, options["adaptive"])
        embeddings = {f"embedding.table_{band}": size for band, size in enumerate(sizes)}
    for name, shape in [
        *((name, list(size)) for name, size in embeddings.items()),
        ("blocks.0.mlp_in.weight", [hidden, dim]),
    ]:
        if list(tensors[_MODEL + name].shape) != shape:
            raise ValueError(f"the tensor '{_MODEL + name}' does not have the shape {shape}")
    if options["depth"] > len(tensors):
        raise ValueError(f"it contains fewer tensors than {options['depth']} layers need")
    vocabulary = tensors.get(_VOCABULARY, torch.empty(0, dtype=torch.uint8))
    if vocabulary.dtype != torch.uint8 or vocabulary.dim() != 1:
        raise ValueError(
            f"the tensor '{_VOCABULARY}' is {vocabulary.dtype} and has {vocabulary.dim()} axes; "
            "expected uint8 and one axis"
        )
    kind = _object("the field 'tokens'", config["tokens"])["kind"]
    tokenizer = Tokenizer(kind, bytes(vocabulary.tolist()))
    _check_vocabulary("", tokenizer, options["vocabulary"])
    state = _below(tensors, _MODEL)
    for name, tensor in state.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"the tensor '{_MODEL + name}' is {tensor.dtype}; expected float32")
    # The initial weights are overwritten, so leave the generator unchanged.
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
        raise ValueError(f"it contains {len(tensors)} tensors, but its model has {used}")
    return Checkpoint(model.eval(), tokenizer, training)


def _check_state(options: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Checks that a model's tensors match its options."""
    where = "gnomon.models.save_checkpoint: model"
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        expected = {name: t.shape for name, t in LanguageModel(**options).state_dict().items()}
    for name in sorted(expected.keys() | state.keys()):
        if name not in expected or name not in state:
            fault = "has the tensor" if name in state else "lacks the tensor"
            raise ValueError(
                f"{where} {fault} {name!r}; expected the tensors of a LanguageModel with the "
                "given options"
            )
        if state[name].shape != expected[name]:
            raise ValueError(
                f"{where} has {name!r} of shape {list(state[name].shape)}; expected "
                f"{list(expected[name])}, as set by its options"
            )


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _check_vocabulary(where: str, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Checks the vocabulary size if it can be counted without SentencePiece."""
    size = {"bytes": 256, "words": tokenizer.vocabulary.count(b"\n")}.get(tokenizer.kind)
    if size is not None and size != vocabulary:
        raise ValueError(
            f"{where}the vocabulary of {tokenizer.kind} has {size} tokens, but the model has "
            f"{vocabulary}"
        )
