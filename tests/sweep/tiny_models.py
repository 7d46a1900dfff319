"""Tiny models with random weights for every model type of transformers, and their inputs.

Configurations are shrunk by field name, because transformers has no list of small configurations.
If the model then fails to run, fewer fields are shrunk. Types that still fail are not buildable.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import linecache
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_module_registration_hook,
)
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

#: Range of generated token ids; lower ids are special tokens.
FIRST_ID, VOCABULARY = 40, 99
BATCH, LENGTH = 2, 13
#: The maximum number of parameters of a tiny model.
MOST_PARAMETERS = 80_000_000
#: CPU time for trying changes other than those by field name.
PATIENCE_S = 20

# The tasks that a type may have, in order; the first class that runs is used.
_MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING",
    "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
)


class NotBuildableError(Exception):
    """The reason why a type has no tiny model, in one line."""


def model_types() -> list[str]:
    """All model types."""
    return sorted(CONFIG_MAPPING.keys())


def build(model_type: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model in evaluation mode and inputs on which its eager attention runs.

    Raises:
        NotBuildableError: with the error of the most advanced attempt.
    """
    end = time.process_time() + PATIENCE_S
    attempts: list[_Attempt] = []
    # The attempt with a class other than the most likely one, which may be a part of the model.
    part: _Attempt | None = None
    reasons: list[str] = []
    for shrink in (_tiny, _narrow, _short):
        if attempts and time.process_time() > end:
            break
        try:
            config = shrink(CONFIG_MAPPING[model_type], _AS_IT_IS)
        except Exception as error:
            reasons.append(f"no configuration: {_in_short(error)}")
            continue
        classes = list(_classes_of(model_type, type(config)))[:4]
        if not classes:
            raise NotBuildableError("no model class")
        for model_class in classes:
            attempt = _Attempt(model_type, model_class, shrink, _Changes())
            for inputs in attempt.likely_inputs():
                attempt.run(inputs)
                if attempt.error is None:
                    break
            if attempt.error is None and attempt.model is not None:
                if model_class is classes[0]:
                    return attempt.result()
                part = part or attempt
                continue
            if isinstance(attempt.error, ImportError) and not _is_of_timm(attempt.error):
                raise NotBuildableError(_in_short(attempt.error).split(" You can")[0])
            attempts.append(attempt)
    if not attempts and part is None:
        raise NotBuildableError([*reasons, "no inputs"][0])
    # Try the most likely class and the class that got furthest; within a class, the smaller model
    # comes first.
    farthest = max(attempts, key=lambda attempt: attempt.reached)
    first = max(
        (attempt for attempt in attempts if attempt.model_class is attempts[0].model_class),
        key=lambda attempt: attempt.reached,
    )
    for attempt in [first] if part is not None else dict.fromkeys((first, farthest)):
        mended = _mended(attempt, (end + time.process_time()) / 2)
        if mended.error is None:
            return mended.result()
    if part is not None:
        return part.result()
    assert mended.error is not None
    raise NotBuildableError(f"{mended.model_class.__name__}: {_in_short(mended.error)}")


def floats_of(out: Any) -> list[Tensor]:
    """The floating-point arrays that a model returns, except caches and weights."""
    leaves: list[Tensor] = []
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() else []
    if isinstance(out, dict):
        for name, value in out.items():
            if not re.search("past_key_values|cache|attentions", name):
                leaves += floats_of(value)
    elif isinstance(out, (tuple, list)):
        for value in out:
            leaves += floats_of(value)
    return leaves


def _in_short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines)[:160] if lines else ''}"


# Attempts. If names of fields and arguments are not sufficient, errors guide the search. Each step
# keeps the change with which the most modules are constructed, or run, before the next error.


@dataclasses.dataclass(frozen=True)
class _Changes:
    """Changes to a shrunk configuration, by field name at any depth."""

    kept: frozenset[str] = frozenset()
    given: tuple[tuple[str, Any], ...] = ()


_AS_IT_IS = _Changes()


class _Attempt:
    """A model class with a configuration: its progress, its inputs, and the error that ended it."""

    def __init__(
        self,
        model_type: str,
        model_class: type[PreTrainedModel],
        shrink: Callable[..., Any],
        changes: _Changes,
    ) -> None:
        self.model_type, self.model_class = model_type, model_class
        self.shrink, self.changes = shrink, changes
        self.model: PreTrainedModel | None = None
        self.inputs: dict[str, Any] = {}
        self.error: Exception | None = None
        #: The numbers of modules that were constructed and that returned, and the last line reached
        #: in the model's forward.
        self.reached = (0, 0, 0)
        made = 0

        def count(*_: object) -> None:
            nonlocal made
            made += 1

        handle = register_module_module_registration_hook(count)
        try:
            self.config = shrink(CONFIG_MAPPING[model_type], changes)
            self.model = _model_of(model_class, self.config)
        except Exception as error:
            self.error = error
        finally:
            handle.remove()
        self.reached = (made if self.model is None else 1 << 30, 0, 0)

    def likely_inputs(self) -> Iterator[dict[str, Any]]:
        if self.model is not None:
            yield from _inputs_of(self.model)

    def run(self, inputs: dict[str, Any]) -> bool:
        """Whether the model runs on these inputs, or gets further than with the previous inputs."""
        assert self.model is not None
        returned = 0

        def count(*_: object) -> None:
            nonlocal returned
            returned += 1

        handle = register_module_forward_hook(count)
        found: Exception | None = None
        try:
            with torch.no_grad():
                torch.manual_seed(0)
                out = self.model(**inputs)
            if not any(leaf.isfinite().all() for leaf in floats_of(out)):
                found = ValueError("returns no finite values")
        except Exception as error:
            found = error
        finally:
            handle.remove()
        reached = (self.reached[0], returned, self._line_of(found))
        if found is not None and self.inputs and reached <= self.reached:
            return False
        self.inputs, self.error, self.reached = inputs, found, reached
        return True

    def _line_of(self, error: Exception | None) -> int:
        """The line that failed in the innermost forward of the model or its submodels."""
        line = 0
        trace = None if error is None else error.__traceback__
        while trace is not None:
            local = trace.tb_frame.f_locals
            if isinstance(local.get("self"), PreTrainedModel):
                line = trace.tb_lineno
            trace = trace.tb_next
        return line

    def result(self) -> tuple[PreTrainedModel, dict[str, Any]]:
        assert self.model is not None
        return self.model, self.inputs


def _mended(attempt: _Attempt, end: float) -> _Attempt:
    """An attempt that runs, or the most advanced one when the time is up."""
    tried = {repr(attempt.changes)}
    while attempt.error is not None and time.process_time() < end:
        if attempt.model is not None:
            _mend_inputs(attempt, end)
            if attempt.error is None:
                break
        better = None
        for changes in _changes_to_try(attempt):
            if repr(changes) in tried or time.process_time() > end:
                continue
            tried.add(repr(changes))
            other = _Attempt(attempt.model_type, attempt.model_class, attempt.shrink, changes)
            candidates = [attempt.inputs] if attempt.inputs else []
            if other.model is not None:
                for inputs in itertools.islice(
                    itertools.chain(other.likely_inputs(), candidates), 4
                ):
                    other.run(inputs)
                    if other.error is None:
                        return other
            if other.reached > attempt.reached:
                better = other
                break
        if better is None:
            break
        attempt = better
    return attempt


def _is_of_timm(error: BaseException) -> bool:
    """Whether the error is a missing timm backbone, for which there are alternatives."""
    return isinstance(error, ImportError) and "timm" in str(error)


def _lines_of(error: BaseException) -> list[tuple[str, dict[str, Any]]]:
    """The transformers lines in an error's traceback, last first, and their local variables."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if "transformers" in frame.f_code.co_filename:
            first, last, _, _ = list(frame.f_code.co_positions())[trace.tb_lasti // 2]
            text = "".join(
                linecache.getline(frame.f_code.co_filename, n)
                for n in range(first or 0, (last or 0) + 1)
            )
            lines.append((text, frame.f_locals))
        trace = trace.tb_next
    return lines[::-1]


def _mend_inputs(attempt: _Attempt, end: float) -> None:
    """Adds arguments and changes shapes while the model gets further."""
    while attempt.error is not None and time.process_time() < end:
        for inputs in _inputs_to_try(attempt):
            if time.process_time() > end or attempt.run(inputs):
                break
        else:
            return


def _inputs_to_try(attempt: _Attempt) -> Iterator[dict[str, Any]]:
    model, error, inputs = attempt.model, attempt.error, attempt.inputs
    assert model is not None
    assert error is not None
    parameters = inspect.signature(model.forward).parameters
    said = str(error) + " ".join(text for text, _ in _lines_of(error))
    words = set(re.findall(r"\w+", said))
    candidates = _candidates(model)
    missing = [name for name in parameters if name not in inputs and name in words]
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name not in inputs
    ]
    for name in dict.fromkeys([*needed, *missing]):
        for value in candidates.get(name, _guesses(name, parameters[name], model, inputs)):
            yield inputs | {name: value}
            if isinstance(value, Tensor) and value.is_floating_point():
                for n in itertools.islice(dict.fromkeys([1, *_numbers_of(model.config)]), 12):
                    if 1 <= n <= 512:
                        yield inputs | {name: torch.randn(*value.shape[:-1], n)}
    for name, values in candidates.items():
        for value in values if name in inputs else ():
            yield inputs | {name: value}
    # Try sizes from the error message, from layers in its traceback, and from the configuration.
    numbers = [int(n) for n in re.findall(r"\d+", str(error))]
    for _, local in _lines_of(error):
        for value in vars(local.get("self", object)).values() if "self" in local else ():
            if isinstance(value, int) and not isinstance(value, bool):
                numbers.append(value)
    numbers += list(_numbers_of(model.config))
    for n in dict.fromkeys(n for n in numbers if 1 <= n <= 4096):
        for name, value in inputs.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            for axis in (-1, 1, -2):
                if value.dim() > 1 and value.shape[axis] != n:
                    shape = list(value.shape)
                    shape[axis] = n
                    if math.prod(shape) <= 1 << 22:
                        yield inputs | {name: torch.randn(shape)}


def _numbers_of(config: PreTrainedConfig) -> Iterator[int]:
    for value in vars(config).values():
        if isinstance(value, int) and not isinstance(value, bool):
            yield value
        elif isinstance(value, PreTrainedConfig):
            yield from _numbers_of(value)


def _guesses(
    name: str, parameter: inspect.Parameter, model: PreTrainedModel, inputs: dict[str, Any]
) -> list[Any]:
    """Guesses for an argument without a list of candidates."""
    hint = str(parameter.annotation)
    width = _find(model.config, "hidden_size", "d_model", "embed_dim", "dim") or 64
    width = width if isinstance(width, int) else 64
    length = LENGTH
    for value in inputs.values():
        if isinstance(value, Tensor) and value.dim() > 1:
            length = value.shape[1]
            break
    if "bool" in hint and "Tensor" not in hint:
        return [True, False]
    if "int" in hint and "Tensor" not in hint and "list" not in hint:
        return [length, 2, 1, 4]
    if re.search(r"mask", name):
        ones = torch.ones(BATCH, length, dtype=torch.int64)
        return [ones, ones.bool(), torch.ones(BATCH, 1, length, length), None]
    if re.search(r"lens|lengths|seqlen", name):
        return [torch.tensor([length] * BATCH), torch.tensor([0, length])]
    if re.search(r"position", name):
        places = torch.arange(length).expand(BATCH, length)
        return [places, places[0], torch.randn(BATCH, length, width)]
    if re.search(r"ids|labels|tokens|index|type", name) and "embed" not in name:
        ids = torch.randint(FIRST_ID, VOCABULARY, (BATCH, length))
        return [ids, torch.zeros_like(ids), torch.zeros(BATCH, dtype=torch.int64)]
    if re.search(r"time|sigma|noise", name):
        return [torch.rand(BATCH), torch.rand(BATCH, 1)]
    if re.search(r"thw|grid|shapes", name):
        return [torch.tensor([[1, 4, 4], [1, 4, 8]]), torch.tensor([[4, 4]]), [(4, 4)]]
    states = torch.randn(BATCH, length, width)
    return [states, torch.randn(length, width), states[:, 0], torch.randn(BATCH, width, 8, 8)]


def _changes_to_try(attempt: _Attempt) -> Iterator[_Changes]:
    """Changes to a configuration to try: original field values, and missing fields."""
    changes, error = attempt.changes, attempt.error
    assert error is not None
    lines = _lines_of(error)
    said = str(error) + " ".join(text for text, _ in lines)
    words = set(re.findall(r"\w+", said))
    given = dict(changes.given)

    def give(name: str, value: Any) -> _Changes:
        return dataclasses.replace(
            changes, given=tuple(sorted((given | {name: value}).items(), key=lambda x: x[0]))
        )

    if _is_of_timm(error):
        names = ["stage2", "stage3", "stage4"]
        sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1] * 4}
        for features in (names, names[-1:]):
            backbone = transformers.ResNetConfig(layer_type="basic", out_features=features, **sizes)
            for more in ({}, {"use_timm_backbone": False, "backbone": None}):
                pairs = given | {"backbone_config": backbone} | more
                yield dataclasses.replace(changes, given=tuple(sorted(pairs.items())))
    if (missed := re.search(r"has no attribute '(\w+)'", str(error))) is not None:
        for value in (_USUAL.get(missed[1], 2), None):
            yield give(missed[1], value)
    defaults = CONFIG_MAPPING[attempt.model_type]()
    changed = _changed_names(defaults, getattr(attempt, "config", defaults))
    # First, the fields that the error or its lines name.
    for name in sorted(changed, key=lambda name: (name not in words, name)):
        yield dataclasses.replace(changes, kept=changes.kept | {name})
    kinds = _find(attempt.config, "layer_types") if hasattr(attempt, "config") else None
    if "rope_parameters" in words:
        plain = {"rope_type": "default", "rope_theta": 1e4}
        yield give("rope_parameters", plain)
        if isinstance(kinds, list):
            yield give("rope_parameters", {kind: plain for kind in dict.fromkeys(kinds)})
    guesses: tuple[Any, ...] = (4, 0, [0, 1], {}, True, "none")
    for name in sorted(_names_of_none(defaults) & words):
        for guess in guesses:
            yield give(name, guess)
    for name in sorted(name for name in changed if _KV_HEADS.fullmatch(name)):
        yield give(name, 4)
    for name in sorted(_names_of_none(defaults)):
        if "int" in str(_annotations(defaults).get(name)):
            yield give(name, 4 if "expert" in name else 1)
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        yield give(name, 1)
    for kind in (_WIDTHS, _INNER, _HEAD_WIDTHS, _HEADS, _KV_HEADS, _LAYERS, _EXPERTS):
        alike = frozenset(name for name in changed if kind.fullmatch(name))
        if len(alike) > 1:
            yield dataclasses.replace(changes, kept=changes.kept | alike)


#: Default values of fields that models read but configurations lack.
_USUAL = {
    "rope_theta": 1e4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
    "initializer_range": 0.02,
}


def _annotations(config: PreTrainedConfig) -> dict[str, Any]:
    """The types of the fields of a configuration and its subconfigurations."""
    found = {field.name: field.type for field in dataclasses.fields(config)}
    for part in _sub_configs(config).values():
        found = _annotations(part) | found
    return found


def _changed_names(default: PreTrainedConfig, config: PreTrainedConfig) -> set[str]:
    names = set()
    for name, value in vars(default).items():
        other = vars(config).get(name)
        if isinstance(value, PreTrainedConfig) and isinstance(other, PreTrainedConfig):
            names |= _changed_names(value, other)
        elif isinstance(value, (int, float, list, tuple)) and other != value:
            names.add(name)
    return names


def _names_of_none(config: PreTrainedConfig) -> set[str]:
    names = {name for name, value in vars(config).items() if value is None}
    return names.union(*(_names_of_none(part) for part in _sub_configs(config).values()))


# Models.


def _classes_of(model_type: str, config_class: type) -> Iterator[type[PreTrainedModel]]:
    seen = set()
    for mapping_name in _MAPPINGS:
        names = getattr(modeling_auto, f"{mapping_name}_NAMES").get(model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            found = getattr(transformers, name, None)
            if found is not None and name not in seen and _has_forward(found):
                seen.add(name)
                yield found
    # A type that is a part of a larger model is in no mapping.
    module = config_class.__module__.replace("configuration_", "modeling_")
    try:
        modeling = importlib.import_module(module)
    except ImportError:
        return
    for name, found in vars(modeling).items():
        if (
            inspect.isclass(found)
            and issubclass(found, PreTrainedModel)
            and not name.endswith("PreTrainedModel")
            and getattr(found, "config_class", None) is config_class
            and _has_forward(found)
            and name not in seen
        ):
            seen.add(name)
            yield found


def _has_forward(model_class: type[PreTrainedModel]) -> bool:
    """Whether the class defines forward itself, and not only its submodels do."""
    return model_class.forward is not torch.nn.Module.forward


def _model_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    # Grouped matrix products of experts require widths that are not tiny.
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with torch.device("meta"):
        empty = model_class._from_config(config, **options)
    count = sum(parameter.numel() for parameter in empty.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"the model has {count} parameters even in its smallest configuration")
    torch.manual_seed(0)
    model = model_class._from_config(config, **options).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Some initial weights are zero, or so small that attention would be uniform.
            if parameter.is_floating_point():
                noise = torch.randn_like(parameter)
                parameter.add_(noise, alpha=0.1 if parameter.dim() > 1 else 0.02)
    return model


# Configurations.

_LAYERS = re.compile(
    r"(num_)?((hidden|encoder|decoder|transformer|attention|text|vision|audio|block|backbone)_?)*"
    r"(n_)?(layers?|depth|blocks)|n_layers?|num_\w*_layers|\w+_layers|\w*depth|num_blocks|L_blocks"
)
_HEADS = re.compile(r"\w*heads|n_head|\w*num_head")
_KV_HEADS = re.compile(r"\w*(kv|key_value)_heads|num_key_value_groups|multi_query_group_num")
_WIDTHS = re.compile(
    r"(hidden|d)_?(size|dim|model)|n_embd|\w*embed(ding)?_(dim|size)|\w*hidden_(size|dim)|dim|width|"
    r"d_model|emb_dim|\w*proj(ection)?_(dim|size)|\w*_width|embed_dim|out_dim|decoder_dim|"
    r"encoder_dim|output_dim|\w*d_model|\w*_hidden_size"
)
_INNER = re.compile(
    r"\w*(intermediate|ffn|ff|mlp|feed_?forward|inner)_?(\w*_)?(size|dim)|d_ff|n_inner"
)
_HEAD_WIDTHS = re.compile(
    r"\w*head_(dim|size)|d_kv|kv_channels|qk_nope_head_dim|v_head_dim|head_size"
)
_EXPERTS = re.compile(r"(num|n|moe_num)_?\w*experts|moe_num_experts")
_TOKEN = re.compile(r"\w*token_(id|index)|\w*_(bos|eos|pad)_id|\w*_token")


def _sub_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    return {
        name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)
    }


# Fields without a usable default, or whose default leaves two layers without attention.
_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 4],
    "num_time_features": 1,
}
_NETWORK = {"width_coefficient": 0.125, "depth_coefficient": 0.1, "hidden_dim": 160}
_GIVEN: dict[str, dict[str, Any]] = {
    "align_vision_model": _NETWORK,
    "efficientnet": _NETWORK,
    "autoformer": _SERIES | {"moving_average": 3, "label_length": 2},
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    # In this model, a patch is a pixel.
    "swin2sr": {"image_size": 16},
    "patchtsmixer": {"context_length": 12, "patch_length": 4, "patch_stride": 4},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 20},
    # Its cache requires a number of layers that its configuration lacks.
    "blt": {"use_cache": False},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0},
}


def _shrunk(
    config_class: type[PreTrainedConfig],
    rule: Any,
    except_for: _Changes,
    held: PreTrainedConfig | None = None,
) -> PreTrainedConfig:
    """A configuration of a class, or a subconfiguration, with small values."""
    given = _GIVEN.get(config_class.model_type, {})
    default = config_class(**given) if held is None else held
    changes: dict[str, Any] = {}
    names = {field.name for field in dataclasses.fields(config_class)}
    ids = iter(range(3, FIRST_ID))
    for name, value in vars(default).items():
        if name not in names or name.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig):
            changes[name] = _shrunk(type(value), rule, except_for, value)
            continue
        if name in except_for.kept:
            continue
        new = _common(name, value, ids)
        if new is None:
            new = rule(name, value, default)
        if new is not None:
            changes[name] = new
    kinds = getattr(default, "layer_types", None)
    if isinstance(kinds, (list, tuple)) and kinds and isinstance(kinds[0], str):
        # The model has one layer of each kind, and at least two layers.
        distinct = list(dict.fromkeys(kinds))
        count = max(2, len(distinct))
        changes["layer_types"] = (distinct + [kinds[-1]])[:count] if len(distinct) < 2 else distinct
        for name in ("num_hidden_layers", "num_layers", "n_layers"):
            if name in changes:
                changes[name] = count
        for name, value in vars(default).items():
            if name != "layer_types" and isinstance(value, list) and len(value) == len(kinds):
                changes[name] = [value[kinds.index(kind)] for kind in changes["layer_types"]]
    changes = {name: value for name, value in changes.items() if name in names} | given
    more = dict(except_for.given)
    changes |= {name: value for name, value in more.items() if name in names}
    try:
        config = config_class(**_fields_of(held) | changes)
    except Exception:
        config = config_class(**given)
        for name, value in changes.items():
            setattr(config, name, value)
    for name, value in more.items():
        # Add fields that a model reads, but that its configuration lacks.
        if not hasattr(config, name):
            setattr(config, name, value)
    _mend(config)
    return config


def _fields_of(held: PreTrainedConfig | None) -> dict[str, Any]:
    """The fields of a subconfiguration that differ from its class's defaults."""
    if held is None:
        return {}
    names = {field.name for field in dataclasses.fields(held)} | {"out_features", "out_indices"}
    return {
        name: value
        for name, value in held.to_diff_dict().items()
        if name in names and not isinstance(vars(held).get(name), PreTrainedConfig)
    }


def _modeling_source(config_class: type) -> str:
    """The source of the module that defines the models; empty if there is none."""
    try:
        name = config_class.__module__.replace("configuration_", "modeling_")
        return inspect.getsource(importlib.import_module(name))
    except (ImportError, OSError):
        return ""


def _mend(config: PreTrainedConfig) -> None:
    """Sets fields that transformers derives from others, or reads although they are missing."""
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if not hasattr(config, name):
            setattr(config, name, None)
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    if "mrope_section" in _modeling_source(type(config)):
        rope.setdefault("mrope_section", [2, 3, 3])
    # In some models, layers have their own head dimension.
    width = vars(config).get("head_dim")
    if not isinstance(width, int):
        if not isinstance(getattr(config, "hidden_size", None), int):
            return
        width = config.hidden_size // config.num_attention_heads
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        sections = part.get("mrope_section")
        if sections:
            # Sections are numbers of angles, one per pair of coordinates.
            total = int(width * part.get("partial_rotary_factor", 1)) // 2
            each = [max(1, n * total // sum(sections)) for n in sections]
            part["mrope_section"] = [total - sum(each[1:]), *each[1:]]


def _common(name: str, value: Any, ids: Iterator[int]) -> Any:
    """A value that is small in every attempt, or None if other rules apply to the field."""
    if value is None:
        return VOCABULARY if name == "vocab_size" else None
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        # Disable dropout and layer dropout.
        return 0.0 if re.search(r"drop|layerdrop|mask_(time|feature)_prob", name) else None
    if isinstance(value, int):
        if "vocab" in name or name == "num_embeddings":
            return min(value, VOCABULARY)
        if _TOKEN.fullmatch(name) and value >= FIRST_ID:
            return next(ids)
        if _KV_HEADS.fullmatch(name) or _HEADS.fullmatch(name):
            return None
        if _LAYERS.fullmatch(name):
            return min(value, 2)
        if _EXPERTS.fullmatch(name) and value > 4:
            return 4
        if name == "num_queries":
            return min(value, 16)
        if re.fullmatch(r"\w*(experts_per_tok\w*|top_?k\w*|moe_k|n_group|topk_group)", name):
            return min(value, 2) if "group" not in name else 1
        if name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
            return min(value, 512)
    if name == "depths" and isinstance(value, (list, tuple)):
        return [min(depth, 2) for depth in value]
    return None


def _tiny(
    config_class: type[PreTrainedConfig], except_for: _Changes = _AS_IT_IS
) -> PreTrainedConfig:
    """Shrinks a configuration to four heads with a head dimension of 16."""

    def rule(name: str, value: Any, config: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            if re.fullmatch(r"\w*heads", name):
                return [2 << n for n in range(len(value))]
            if re.fullmatch(r"\w*(hidden_sizes|embed_dims?|dims?|channels|widths?)", name):
                return (
                    [32 << n for n in range(len(value))]
                    if len(set(value)) > 1
                    else [32] * len(value)
                )
            return None
        if name == "head_dim" and value is None and not config.attribute_map.get(name):
            return 16
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        if _KV_HEADS.fullmatch(name):
            return min(value, 2)
        if _HEADS.fullmatch(name):
            return min(value, 4)
        if _HEAD_WIDTHS.fullmatch(name):
            return min(value, 16)
        if name in ("qk_rope_head_dim", "rotary_dim", "rope_dim"):
            return min(value, 8)
        if _INNER.fullmatch(name):
            return min(value, 96)
        if name.endswith("lora_rank"):
            return min(value, 24)
        if _WIDTHS.fullmatch(name):
            return min(value, 64)
        if re.fullmatch(r"\w*image_size|\w*img_size|input_size", name):
            return min(value, 64)
        if re.fullmatch(r"\w*patch_size", name):
            return min(value, 8)
        return None

    return _shrunk(config_class, rule, except_for)


def _narrow(
    config_class: type[PreTrainedConfig], except_for: _Changes = _AS_IT_IS
) -> PreTrainedConfig:
    """Divides all widths by the same power of two."""
    default = config_class()
    width = max(
        (
            value
            for config in (default, *_sub_configs(default).values())
            for name, value in vars(config).items()
            if isinstance(value, int) and _WIDTHS.fullmatch(name)
        ),
        default=64,
    )
    factor = 1
    while width // factor > 256:
        factor *= 2

    def rule(name: str, value: Any, config: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        if _KV_HEADS.fullmatch(name) or _HEADS.fullmatch(name):
            return None
        narrows = (_HEAD_WIDTHS, _INNER, _WIDTHS)
        if any(pattern.fullmatch(name) for pattern in narrows) or name.endswith("lora_rank"):
            return value // factor if value % factor == 0 and value > factor else None
        return None

    return _shrunk(config_class, rule, except_for)


def _short(
    config_class: type[PreTrainedConfig], except_for: _Changes = _AS_IT_IS
) -> PreTrainedConfig:
    """Keeps the original widths, with few layers."""
    return _shrunk(config_class, lambda name, value, config: None, except_for)


# Inputs.


def _find(config: PreTrainedConfig, *names: str) -> Any:
    """The first of these fields in a configuration or its subconfigurations."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:
            # The value differs between layers.
            continue
        if value is not None:
            return value
    for part in _sub_configs(config).values():
        value = _find(part, *names)
        if value is not None:
            return value
    return None


def _pair(size: Any, otherwise: int) -> tuple[int, int]:
    if isinstance(size, dict):
        size = (size.get("height", otherwise), size.get("width", otherwise))
    if isinstance(size, (list, tuple)):
        size = [n if isinstance(n, int) else otherwise for n in size]
        return (size[0], size[-1]) if size else (otherwise, otherwise)
    return (size, size) if isinstance(size, int) else (otherwise, otherwise)


def _mel_bins(config: PreTrainedConfig) -> int:
    names = (
        "num_mel_bins",
        "n_mels",
        "mel_bins",
        "input_feat_per_channel",
        "feature_size",
        "feature_projection_input_dim",
        "input_dim",
        "input_feat_size",
    )
    found = _find(config, *names)
    return found if isinstance(found, int) else 80


def _images(config: PreTrainedConfig, frames: int = 0) -> Tensor:
    height, width = _pair(_find(config, "image_size", "img_size", "input_size"), 64)
    channels = _find(config, "num_channels", "in_channels", "in_chans", "num_input_channels")
    # In convolutional models, the number of channels may be a list.
    shape = [channels if isinstance(channels, int) else 3, height or 64, width or 64]
    return torch.randn(BATCH, *([frames] if frames else []), *shape)


def _patches(config: PreTrainedConfig) -> tuple[Tensor, Tensor]:
    """Flattened patches of two images, of 4 x 4 and 4 x 8, and their grids."""
    patch = _find(config, "patch_size")
    channels = _find(config, "in_channels", "in_chans", "num_channels")
    channels = channels if isinstance(channels, int) else 3
    times = _find(config, "temporal_patch_size") or 1
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    columns = channels * times * (patch if isinstance(patch, int) else 8) ** 2
    return torch.randn(int(grid.prod(1).sum()), columns), grid


def _candidates(model: PreTrainedModel) -> dict[str, list[Any]]:
    """Values for the arguments of a model's forward by name, the most likely one first."""
    config = model.config

    def ids(*shape: int) -> Tensor:
        return torch.randint(FIRST_ID, VOCABULARY, (BATCH, *shape))

    frames = _find(config, "num_frames", "frames_per_clip") or 2
    frames = frames if isinstance(frames, int) else 2
    mel = _mel_bins(config)
    span = _find(config, "max_source_positions")
    span = 2 * span if isinstance(span, int) else 64
    books = _find(config, "num_codebooks") or 2
    width = _find(config, "hidden_size", "d_model", "embed_dim", "dim") or 64
    states = torch.randn(BATCH, LENGTH, width if isinstance(width, int) else 64)
    audio = torch.randn(BATCH, 4000)
    patches, grid = _patches(config)
    images = _images(config)
    spectra = [
        torch.randn(BATCH, mel, span),
        torch.randn(BATCH, 64, mel),
        torch.randn(BATCH, 64, 2 * mel),
        torch.randn(BATCH, 1, 64, mel),
    ]
    found: dict[str, list[Any]] = {
        "input_ids": [
            ids(LENGTH),
            ids(LENGTH, books),
            ids(LENGTH, books + 1),
            ids(LENGTH).repeat(books, 1),
            ids(books),
        ],
        "decoder_input_ids": [ids(7), ids(7, books), ids(7).repeat(books, 1)],
        "pixel_values": [images, _images(config, frames), _images(config, 1)],
        "pixel_values_videos": [_images(config, frames)],
        "image": [images],
        "input_features": spectra,
        "input_values": [
            audio,
            audio[:, None],
            torch.randn(BATCH, _find(config, "max_length") or 64, mel),
        ],
        "audio_values": [audio[:, None], audio],
        "spectrogram": spectra[1:2],
        "attention_mask": [torch.ones(BATCH, LENGTH, dtype=torch.int64)],
        "bbox": [torch.randint(0, 30, (BATCH, LENGTH, 4)).sort(-1).values],
        "past_values": [torch.randn(BATCH, 12), torch.randn(BATCH, 12, 1)],
        "past_observed_mask": [torch.ones(BATCH, 12)],
        "past_time_features": [torch.randn(BATCH, 12, 1)],
        "future_values": [torch.randn(BATCH, 4)],
        "future_time_features": [torch.randn(BATCH, 4, 1)],
        "visual_feats": [torch.randn(BATCH, 5, _find(config, "visual_feat_dim") or 64)],
        "visual_pos": [torch.rand(BATCH, 5, 4)],
        "qformer_input_ids": [ids(LENGTH)],
    }
    states_names = (
        "inputs_embeds",
        "query_embeds",
        "hidden_states",
        "encoder_hidden_states",
        "context",
    )
    found |= {name: [states] for name in states_names}
    parameters = inspect.signature(model.forward).parameters
    for name in ("grid_thw", "image_grid_thw"):
        if name in parameters and "input_ids" not in parameters:
            found |= {name: [grid], "hidden_states": [patches], "pixel_values": [patches]}
    if "spatial_shapes" in parameters:
        # Patches of images of different sizes (SigLIP 2).
        found["pixel_values"] = [torch.randn(BATCH, 16, patches.shape[-1])]
        found["pixel_attention_mask"] = [torch.ones(BATCH, 16, dtype=torch.int64)]
        found["spatial_shapes"] = [torch.tensor([[4, 4]] * BATCH)]
    return found


#: Without an image, GIT's padding masks are shifted from the second token on.
_OF_IMAGES = {"git"}


def _inputs_of(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Inputs for the signature of a model's forward, the most likely ones first."""
    torch.manual_seed(1)
    parameters = inspect.signature(model.forward).parameters
    candidates = {name: values for name, values in _candidates(model).items() if name in parameters}
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    main = model.main_input_name
    mains = [main] if isinstance(main, str) else list(main)
    wanted = [name for name in (*mains, *needed) if name in candidates]
    if not wanted:
        likely = ("input_ids", "pixel_values", "input_features", "input_values", "inputs_embeds")
        wanted = [name for name in likely if name in candidates][:1]
    if "decoder_input_ids" in candidates and (
        model.config.is_encoder_decoder or "input_ids" not in candidates
    ):
        wanted.append("decoder_input_ids")
    for name in (
        "bbox",
        "past_time_features",
        "past_observed_mask",
        "future_values",
        "future_time_features",
        "visual_feats",
        "visual_pos",
        "qformer_input_ids",
        "pixel_attention_mask",
        "spatial_shapes",
    ):
        if name in candidates:
            wanted.append(name)
    more = [name for name in ("input_ids", "pixel_values", "input_features") if name in candidates]
    attempts = [wanted, [*wanted, *more]]
    if {"input_ids", "pixel_values"} <= set(candidates) and (
        hasattr(model, "get_text_features") or model.config.model_type in _OF_IMAGES
    ):
        # The model has two towers and returns one score per pair.
        attempts.reverse()
    for names in attempts:
        names = list(dict.fromkeys(names))
        for count in range(max((len(candidates[name]) for name in names), default=0)):
            yield {name: candidates[name][min(count, len(candidates[name]) - 1)] for name in names}
    try:
        yield dict(model.dummy_inputs)
    except Exception:
        return
