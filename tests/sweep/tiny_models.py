"""Tiny models with random weights of every model type of transformers, and inputs for them.

Configurations are shrunk by the names of their fields, since transformers has no list of small
ones. Where that leaves no model that runs, less is shrunk; what remains is not buildable.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

#: Ids of tokens that are drawn; those below are special ones.
FIRST_ID, VOCABULARY = 40, 99
BATCH, LENGTH = 2, 13
#: Beyond it a model is not tiny.
MOST_PARAMETERS = 80_000_000

# What a type is for; the first class that runs is taken.
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
    """Why there is no tiny model of a type, in one line."""


def model_types() -> list[str]:
    """All of them."""
    return sorted(CONFIG_MAPPING.keys())


def build(model_type: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model in evaluation mode whose eager attention runs on the inputs, and these.

    Raises:
        NotBuildableError: with the reason of the first attempt that came as far as any.
    """
    reasons: list[str] = []
    # Of models that are made, and do not run on the likeliest inputs.
    closer: list[str] = []
    for shrink in (_tiny, _narrow, _short):
        try:
            config = shrink(CONFIG_MAPPING[model_type])
        except Exception as error:
            reasons.append(f"no configuration: {_in_short(error)}")
            continue
        classes = list(_classes_of(model_type, type(config)))
        if not classes:
            raise NotBuildableError("no model class")
        for model_class in classes[:4]:
            try:
                model = _model_of(model_class, config)
            except Exception as error:
                reasons.append(f"no {model_class.__name__}: {_in_short(error)}")
                continue
            for inputs in _inputs_of(model):
                try:
                    with torch.no_grad():
                        torch.manual_seed(0)
                        out = model(**inputs)
                    if any(leaf.isfinite().all() for leaf in floats_of(out)):
                        return model, inputs
                    closer.append(f"{model_class.__name__} gives nothing that is finite")
                except Exception as error:
                    closer.append(f"{model_class.__name__} does not run: {_in_short(error)}")
    raise NotBuildableError([*closer, *reasons, "no inputs"][0])


def floats_of(out: Any) -> list[Tensor]:
    """The arrays of floating point that a model returns, caches aside."""
    leaves: list[Tensor] = []
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() else []
    if isinstance(out, dict):
        for name, value in out.items():
            if "past_key_values" not in name and "cache" not in name:
                leaves += floats_of(value)
    elif isinstance(out, (tuple, list)):
        for value in out:
            leaves += floats_of(value)
    return leaves


def _in_short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines)[:160] if lines else ''}"


# Models.


def _classes_of(model_type: str, config_class: type) -> Iterator[type[PreTrainedModel]]:
    seen = set()
    for mapping_name in _MAPPINGS:
        names = getattr(modeling_auto, f"{mapping_name}_NAMES").get(model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            found = getattr(transformers, name, None)
            if found is not None and name not in seen:
                seen.add(name)
                yield found
    # A part of a larger model, which no mapping names.
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
            and name not in seen
        ):
            seen.add(name)
            yield found


def _model_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        empty = model_class._from_config(config, attn_implementation="eager")
    count = sum(parameter.numel() for parameter in empty.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters, however small its configuration")
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights so small as they start make all attention uniform, and some start at zero.
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


# Fields that have no default to run with, or whose default leaves no attention in two layers.
_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 4],
    "num_time_features": 1,
}
_GIVEN: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES | {"moving_average": 3, "label_length": 2},
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 20},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0},
}


def _shrunk(config_class: type[PreTrainedConfig], rule: Any, **given: Any) -> PreTrainedConfig:
    given = _GIVEN.get(config_class.model_type, {}) | given
    default = config_class(**given)
    changes: dict[str, Any] = {}
    names = {field.name for field in dataclasses.fields(config_class)}
    ids = iter(range(3, FIRST_ID))
    for name, value in vars(default).items():
        if name not in names or name.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig):
            changes[name] = _shrunk(type(value), rule)
            continue
        new = _common(name, value, ids)
        if new is None:
            new = rule(name, value, default)
        if new is not None:
            changes[name] = new
    kinds = getattr(default, "layer_types", None)
    if isinstance(kinds, (list, tuple)) and kinds and isinstance(kinds[0], str):
        # One layer of each kind, and two at least.
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
    try:
        config = config_class(**changes)
    except Exception:
        config = config_class(**given)
        for name, value in changes.items():
            setattr(config, name, value)
    _mend(config)
    return config


def _modeling_source(config_class: type) -> str:
    """Of the module with its models; empty where there is none."""
    try:
        name = config_class.__module__.replace("configuration_", "modeling_")
        return inspect.getsource(importlib.import_module(name))
    except (ImportError, OSError):
        return ""


def _mend(config: PreTrainedConfig) -> None:
    """What transformers computes of other fields, or reads without having it."""
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if not hasattr(config, name):
            setattr(config, name, None)
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    if "mrope_section" in _modeling_source(type(config)):
        rope.setdefault("mrope_section", [2, 3, 3])
    width = getattr(config, "head_dim", None)
    if not isinstance(width, int):
        if not isinstance(getattr(config, "hidden_size", None), int):
            return
        width = config.hidden_size // config.num_attention_heads
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        sections = part.get("mrope_section")
        if sections:
            # Of angles, a pair of coordinates each.
            total = int(width * part.get("partial_rotary_factor", 1)) // 2
            each = [max(1, n * total // sum(sections)) for n in sections]
            part["mrope_section"] = [total - sum(each[1:]), *each[1:]]


def _common(name: str, value: Any, ids: Iterator[int]) -> Any:
    """What is small in every attempt; None leaves it to the others."""
    if value is None:
        return VOCABULARY if name == "vocab_size" else None
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        # Nothing is dropped, by chance or by the layer.
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
        if re.fullmatch(r"\w*(experts_per_tok\w*|top_?k\w*|moe_k|n_group|topk_group)", name):
            return min(value, 2) if "group" not in name else 1
        if name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
            return min(value, 512)
    if name == "depths" and isinstance(value, (list, tuple)):
        return [min(depth, 2) for depth in value]
    return None


def _tiny(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Heads of 16 coordinates, four of them."""

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

    return _shrunk(config_class, rule)


def _narrow(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """All widths divided by the same power of two."""
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

    return _shrunk(config_class, rule)


def _short(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """As wide as it is, with few layers."""
    return _shrunk(config_class, lambda name, value, config: None)


# Inputs.


def _find(config: PreTrainedConfig, *names: str) -> Any:
    """The first of these fields, of a configuration or of one in it."""
    for name in names:
        value = getattr(config, name, None)
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
        return (size[0], size[-1])
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
    # Of convolutions there is a list.
    shape = [channels if isinstance(channels, int) else 3, height or 64, width or 64]
    return torch.randn(BATCH, *([frames] if frames else []), *shape)


def _patches(config: PreTrainedConfig) -> tuple[Tensor, Tensor]:
    """Flattened patches of two images, of 4 x 4 and 4 x 8, and their grids."""
    patch = _find(config, "patch_size")
    channels = _find(config, "in_channels", "in_chans", "num_channels") or 3
    times = _find(config, "temporal_patch_size") or 1
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    columns = channels * times * (patch if isinstance(patch, int) else 8) ** 2
    return torch.randn(int(grid.prod(1).sum()), columns), grid


def _candidates(model: PreTrainedModel) -> dict[str, list[Any]]:
    """Values for the arguments of a model's forward, by name, the likeliest first."""
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
    return found


def _inputs_of(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Inputs that the signature of a model's forward asks for, the likeliest first."""
    torch.manual_seed(1)
    parameters = inspect.signature(model.forward).parameters
    candidates = {name: values for name, values in _candidates(model).items() if name in parameters}
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    wanted = [name for name in (model.main_input_name, *needed) if name in candidates]
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
    ):
        if name in candidates:
            wanted.append(name)
    more = [name for name in ("input_ids", "pixel_values", "input_features") if name in candidates]
    attempts = [wanted, [*wanted, *more]]
    if {"input_ids", "pixel_values"} <= set(candidates) and hasattr(model, "get_text_features"):
        # Two towers: one score for each pair.
        attempts.reverse()
    for names in attempts:
        names = list(dict.fromkeys(names))
        for count in range(max((len(candidates[name]) for name in names), default=0)):
            yield {name: candidates[name][min(count, len(candidates[name]) - 1)] for name in names}
    try:
        yield dict(model.dummy_inputs)
    except Exception:
        return
