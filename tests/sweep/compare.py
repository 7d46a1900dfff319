"""Compares gnomon with transformers' eager attention for one model type."""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import tiny_models
import torch
from tiny_models import floats_of
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from gnomon.integrations.transformers import use_gnomon

# Limits relative to the largest value of an output or gradient.
OUTPUT_ERROR, GRADIENT_ERROR = 1e-4, 1e-3
#: Both models round to bfloat16, but at different points, so a router may select a different
#: expert. Therefore, the limit applies to only nine tenths of the values.
AUTOCAST_ERROR, AUTOCAST_SHARE = 0.1, 0.9
PADDINGS = ("none", "left", "right")

Outcome = dict[str, Any]


class _Counter(TorchDispatchMode):
    """Counts calls to gnomon and softmaxes over keys in modules named attention.

    elsewhere: softmaxes of four-dimensional arrays in other modules, which may not be scores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.softmaxes = self.elsewhere = self._depth = 0
        self._handles: list[Any] = []

    def __enter__(self) -> _Counter:
        def enter(module: torch.nn.Module, _args: Any) -> None:
            self._depth += "ttention" in type(module).__name__

        def leave(module: torch.nn.Module, _args: Any, _out: Any) -> None:
            self._depth -= "ttention" in type(module).__name__

        self._handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if name.startswith("gnomon.attention_forward"):
            self.calls += 1
        elif (
            name.startswith("aten._softmax.default")
            and args[0].dim() >= 3
            and args[1] in (-1, args[0].dim() - 1)
            and args[0].shape[-2] > 1
        ):
            self.softmaxes += self._depth > 0
            self.elsewhere += self._depth == 0 and args[0].dim() > 3
        elif re.match(r"aten\._(scaled_dot_product_\w*attention|native_multi_head)", name):
            # torch.nn.MultiheadAttention calls these for every requested implementation.
            self.softmaxes += 1
        return function(*args, **(kwargs or {}))


class _DiffersError(Exception):
    """A difference, described in one line."""


def compare(model_type: str) -> Outcome:
    """Returns a dictionary with "class", "why" and error figures.

    The classes are:

    - equal;
    - differs;
    - refused: NotImplementedError;
    - crashed: another error;
    - ignored: accepted, but never called;
    - in part: some attention stays dense without a warning;
    - dense in part: some attention stays dense with a warning, and all results are equal;
    - dense: all attention stays dense, with a warning;
    - no attention: no softmax over keys in eager mode;
    - not buildable.
    """
    warnings.simplefilter("ignore")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outcome = _compare(model_type)
    words = [str(w.message) for w in said if str(w.message).startswith("gnomon.integrations")]
    said_so = {"ignored": "dense", "in part": "dense in part"}
    if outcome["class"] in said_so and words:
        outcome |= {"class": said_so[outcome["class"]], "why": _line(RuntimeError(words[0]))}
    return outcome


def _compare(model_type: str) -> Outcome:
    try:
        theirs, inputs = tiny_models.build(model_type)
    except tiny_models.NotBuildableError as error:
        return {"class": "not buildable", "why": str(error)}
    outcome: Outcome = {
        "model": type(theirs).__name__,
        "interface": _has_interface(theirs),
        "checks": [],
    }
    with _Counter() as dense, torch.no_grad():
        torch.manual_seed(0)
        theirs(**inputs)
    outcome["softmaxes"] = dense.softmaxes
    if dense.softmaxes + dense.elsewhere == 0:
        return outcome | {"class": "no attention", "why": "no softmax over keys"}
    try:
        ours = use_gnomon(copy.deepcopy(theirs))
        with _Counter() as counter, torch.no_grad():
            torch.manual_seed(0)
            ours(**inputs)
        outcome |= {"calls": counter.calls, "left": counter.softmaxes}
        if counter.calls == 0:
            return outcome | {"class": "ignored", "why": "accepted, but never called"}
        checks, reads_padding = _checks_of(theirs, inputs)
        if reads_padding:
            outcome["reads_padding"] = True
        for name, check in checks:
            outcome["checks"].append(name)
            try:
                outcome[f"{name}_error"] = check(theirs, ours)
            except _DiffersError as error:
                # Eager attention may add a Boolean mask to its scores as 0 or 1 (Grounding DINO).
                outcome[f"{name}_error"] = _check_as_sdpa(check, theirs, ours, error)
                outcome["as_sdpa"] = True
    except NotImplementedError as error:
        return outcome | {"class": "refused", "why": _line(error)}
    except _DiffersError as error:
        return outcome | {"class": "differs", "why": f"{outcome['checks'][-1]}: {error}"}
    except Exception as error:
        where = outcome["checks"][-1] if outcome["checks"] else "forward"
        return outcome | {
            "class": "crashed",
            "why": f"{where}: {type(error).__name__}: {_line(error)}",
        }
    if dense.softmaxes == 0:
        # No module named attention contains a softmax, so softmaxes in other modules count.
        dense.softmaxes, counter.softmaxes = dense.elsewhere, counter.elsewhere
    if counter.calls + counter.softmaxes > dense.softmaxes or counter.softmaxes == 0:
        return outcome | {"class": "equal", "why": ""}
    return outcome | {
        "class": "in part",
        "why": f"{counter.softmaxes} of {dense.softmaxes} softmaxes stay",
    }


def _check_as_sdpa(
    check: Any, theirs: PreTrainedModel, ours: PreTrainedModel, error: _DiffersError
) -> float:
    """The error relative to transformers' default implementation; if it is too large, raises
    `error`."""
    default = copy.deepcopy(theirs)
    switched = 0
    for part in default.modules():
        if isinstance(part, PreTrainedModel) and part._supports_sdpa:
            part.config._attn_implementation = "sdpa"
            switched += 1
    if not switched:
        raise error
    try:
        return float(check(default, ours))
    except Exception:
        raise error from None


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return " ".join(lines)[:300] if lines else type(error).__name__


def _has_interface(model: PreTrainedModel) -> bool:
    """Whether an implementation can be selected, according to the source of its attention."""
    return any(
        "get_interface(" in inspect.getsource(sys.modules[type(part).__module__])
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
    )


def _checks_of(
    model: PreTrainedModel, inputs: dict[str, Any]
) -> tuple[list[tuple[str, Any]], bool]:
    """The checks by name, as functions of (theirs, ours), and whether outputs depend on the content
    of padding."""
    checks: list[tuple[str, Any]] = []
    parameters = inspect.signature(model.forward).parameters
    # With several codebooks, tokens have more rows than a mask.
    ids = inputs.get("input_ids")
    pads = ids is not None and len(ids) == tiny_models.BATCH and "attention_mask" in parameters
    reads = False
    for padding in PADDINGS if pads else PADDINGS[:1]:
        given, rows = _padded(inputs, padding)
        if _runs(model, given):
            if rows is not None and _reads_padding(model, given, rows):
                # Other tokens depend on the outputs of queries without keys (the mean of all
                # values, or 0).
                reads, rows = True, rows & rows.all(1, keepdim=True)
            checks.append(
                (padding, lambda a, b, i=given, r=rows: _forward_and_gradients(a, b, i, r))
            )
    if pads and model.can_generate() and _runs_generation(model, inputs):
        checks.append(("generation", lambda a, b: _generation(a, b, inputs, reads)))
    given, rows = _padded(inputs, "left" if pads else "none")
    if reads and rows is not None:
        rows = rows & rows.all(1, keepdim=True)
    # Some models (Conformers) cache position tensors that autocast has rounded.
    if _runs(copy.deepcopy(model), given, autocast=True):
        checks.append(("autocast", lambda a, b: _autocast(a, b, given, rows)))
    return checks, reads


def _padded(inputs: dict[str, Any], padding: str) -> tuple[dict[str, Any], Tensor | None]:
    """The inputs with a mask, and the rows that are not padding."""
    if padding == "none":
        return inputs, None
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, slice(None, 4) if padding == "left" else slice(-4, None)] = 0
    return inputs | {"attention_mask": mask}, mask.bool()


def _reads_padding(model: PreTrainedModel, inputs: dict[str, Any], rows: Tensor) -> bool:
    """Whether the eager model's output for tokens depends on the content of padding."""
    ids = inputs["input_ids"]
    other = torch.where(rows, ids, tiny_models.FIRST_ID + (ids + 1) % 10)
    with torch.no_grad():
        first = _call(model, inputs, rows)
        second = _call(model, inputs | {"input_ids": other}, rows)
    try:
        _error(first, second, "output", OUTPUT_ERROR)
    except _DiffersError:
        return True
    return False


def _call(model: PreTrainedModel, inputs: dict[str, Any], rows: Tensor | None) -> list[Tensor]:
    torch.manual_seed(0)
    leaves = floats_of(model(**inputs))
    if rows is None:
        return leaves
    # Leave out rows of padding, to which the eager implementation shows all keys. Tokens that the
    # model adds may come before or after the others.
    ends = rows.new_ones(len(rows), 1)
    by_length = {
        rows.shape[1]: rows,
        rows.shape[1] + 1: torch.cat([rows, ends], 1) & torch.cat([ends, rows], 1),
    }
    return [
        leaf[by_length[leaf.shape[1]]]
        for leaf in leaves
        if leaf.dim() > 2 and len(leaf) == len(rows) and leaf.shape[1] in by_length
    ] or leaves


def _runs(model: PreTrainedModel, inputs: dict[str, Any], autocast: bool = False) -> bool:
    """Whether the eager model can run; if it cannot, ours need not run either."""
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            leaves = _call(model, inputs, None)
    except Exception:
        return False
    return all(bool(leaf.isfinite().any()) for leaf in leaves if leaf.numel())


def _error(
    found: list[Tensor], expected: list[Tensor], what: str, most: float, share: float = 1.0
) -> float:
    if len(found) != len(expected):
        raise _DiffersError(f"{what}: {len(found)} arrays instead of {len(expected)}")
    worst = 0.0
    for mine, other in zip(found, expected, strict=True):
        if mine.shape != other.shape:
            raise _DiffersError(f"{what}: shape {list(mine.shape)} instead of {list(other.shape)}")
        if other.numel() == 0:
            continue
        finite = other.isfinite()
        if not torch.equal(finite, mine.isfinite()):
            raise _DiffersError(f"{what}: not finite at other places")
        if not finite.any():
            continue
        mine, other = mine[finite].double(), other[finite].double()
        off = (mine - other).abs().sort().values[max(round(share * len(mine)), 1) - 1]
        worst = max(worst, float(off / other.abs().max().clamp(min=1e-6)))
    if worst > most:
        raise _DiffersError(f"{what} {worst:.1e} off")
    return worst


def _forward_and_gradients(
    theirs: PreTrainedModel, ours: PreTrainedModel, inputs: dict[str, Any], rows: Tensor | None
) -> float:
    expected, found = (_results(model, inputs, rows) for model in (theirs, ours))
    try:
        return _compared(found, expected)
    except _DiffersError:
        if not (
            _is_rounding(theirs, ours, inputs, rows, found, expected)
            or _agree_without_kinks(theirs, ours, inputs, rows)
        ):
            raise
    return _error(found[0], expected[0], "output", float("inf"))


_Results = tuple[list[Tensor], dict[str, Tensor]]


def _results(model: PreTrainedModel, inputs: dict[str, Any], rows: Tensor | None) -> _Results:
    """The outputs, and the gradients of all parameters that have one."""
    model.zero_grad()
    leaves = _call(model, inputs, rows)
    torch.manual_seed(1)
    total = sum(
        (
            # The random direction is the same in every dtype.
            (leaf * torch.randn(leaf.shape).to(leaf.dtype))[leaf.isfinite()].sum()
            for leaf in leaves
            if leaf.requires_grad
        ),
        torch.zeros(()),
    )
    if total.requires_grad:
        total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [leaf.detach() for leaf in leaves], grads


def _compared(found: _Results, expected: _Results, share: float = 1.0) -> float:
    """The error of the outputs; share: a factor for the tolerances."""
    error = _error(found[0], expected[0], "output", share * OUTPUT_ERROR)
    for name, off in _gradient_errors(found, expected):
        if not off <= share * GRADIENT_ERROR:
            raise _DiffersError(f"gradient of {re.sub(r'[0-9]+', 'n', name)} {off:.1e} off")
    return error


def _gradient_errors(found: _Results, expected: _Results) -> Iterator[tuple[str, float]]:
    if expected[1].keys() - found[1].keys():
        raise _DiffersError("a parameter has no gradient")
    largest = max((float(g.abs().max()) for g in expected[1].values() if g.numel()), default=0.0)
    for name, other in expected[1].items():
        if other.numel() == 0 or not other.isfinite().all():
            continue
        # The relative error of a value that is 0 up to rounding is not meaningful.
        scale = max(float(other.abs().max()), 1e-3 * largest, 1e-12)
        yield name, float((found[1][name].double() - other.double()).abs().max()) / scale


class _SmoothRelu(TorchFunctionMode):
    """Replaces ReLU with softplus."""

    _RELU = (torch.relu, torch.relu_, functional.relu, functional.relu_, Tensor.relu, Tensor.relu_)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._RELU:
            return functional.softplus(args[0])
        return func(*args, **(kwargs or {}))


def _agree_without_kinks(
    theirs: PreTrainedModel, ours: PreTrainedModel, inputs: dict[str, Any], rows: Tensor | None
) -> bool:
    """Whether gradients agree if softplus replaces ReLU, so that rounding cannot change
    branches."""
    try:
        with _SmoothRelu():
            expected, found = (_results(model, inputs, rows) for model in (theirs, ours))
        _compared(found, expected)
    except Exception:
        return False
    return True


def _is_rounding(
    theirs: PreTrainedModel,
    ours: PreTrainedModel,
    inputs: dict[str, Any],
    rows: Tensor | None,
    found: _Results,
    expected: _Results,
) -> bool:
    """Whether both agree in float64, and whether their float32 errors are similar.

    Some models amplify rounding errors: they select by a value, or divide by a near-zero value. If
    eager attention itself has an error above 0.1, it cannot be a reference.
    """
    given = {name: _doubled(value) for name, value in inputs.items()}
    try:
        exact, mine = (
            _results(copy.deepcopy(model).double(), given, rows) for model in (theirs, ours)
        )
        _compared(mine, exact, share=0.1)
        errors = []
        for results in (found, expected):
            worst = _error(results[0], exact[0], "output", float("inf"))
            errors.append(max([worst, *(off for _, off in _gradient_errors(results, exact))]))
    except Exception:
        return False
    return errors[0] <= 4 * errors[1] or errors[1] > 0.1


def _doubled(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def _generate(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    given, _ = _padded(inputs, "left")
    given = {name: value for name, value in given.items() if name != "decoder_input_ids"}
    torch.manual_seed(0)
    out = model.generate(
        **given,
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, list(out.logits)


def _runs_generation(model: PreTrainedModel, inputs: dict[str, Any]) -> bool:
    try:
        with torch.no_grad():
            return bool(_generate(model, inputs)[1])
    except Exception:
        return False


def _generation(
    theirs: PreTrainedModel, ours: PreTrainedModel, inputs: dict[str, Any], unpadded: bool
) -> float:
    """The error of generation; `unpadded` selects rows without padding."""
    rows = slice(1, None) if unpadded else slice(None)
    with torch.no_grad():
        (expected, logits), (found, its_logits) = (
            (sequences[rows], [part[rows] for part in parts])
            for sequences, parts in (_generate(m, inputs) for m in (theirs, ours))
        )
    error = _error(its_logits[:1], logits[:1], "first logits", OUTPUT_ERROR)
    if torch.equal(expected, found):
        return _error(its_logits, logits, "logits", OUTPUT_ERROR)
    raise _DiffersError(f"other tokens, first logits {error:.1e} off")


def _autocast(
    theirs: PreTrainedModel, ours: PreTrainedModel, inputs: dict[str, Any], rows: Tensor | None
) -> float | None:
    """The error; None if rounding determines the length of the output."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, found = (_call(model, inputs, rows) for model in (theirs, ours))
    try:
        return _error(found, expected, "output", AUTOCAST_ERROR, AUTOCAST_SHARE)
    except _DiffersError:
        if [leaf.shape for leaf in found] != [leaf.shape for leaf in expected]:
            if _lengths_are_rounded(theirs, inputs, rows):
                return None
            raise
        with torch.no_grad():
            exact = _call(theirs, inputs, rows)
        off, their_off = (
            _error(results, exact, "output", float("inf"), AUTOCAST_SHARE)
            for results in (found, expected)
        )
        if off > 2 * their_off:
            raise
    # Under autocast, the eager model does not agree with its own float32 results, either.
    return off


def _lengths_are_rounded(
    model: PreTrainedModel, inputs: dict[str, Any], rows: Tensor | None
) -> bool:
    """Whether the eager model's output lengths change if weights change by a rounding error.

    Speech models round durations.
    """
    shapes = set()
    for seed in range(4):
        other = copy.deepcopy(model)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1 + 2**-9 * torch.randn_like(parameter))
            with torch.autocast("cpu", torch.bfloat16):
                shapes.add(tuple(leaf.shape for leaf in _call(other, inputs, rows)))
    return len(shapes) > 1
