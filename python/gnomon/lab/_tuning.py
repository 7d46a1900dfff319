"""Selects the option values that ``gnomon compare --tune`` tries: ``python _tuning.py FOLDER``.

This program does not import gnomon, because importing PyTorch would slow down each call.

It reads the results.json of a comparison, uses Optuna to select the trials to run next, and prints
them as JSON. Once all trials have run, it prints the chosen values. The output depends only on
results.json, so the same values are tried after a resumption and with any number of workers. The
studies are stored in FOLDER/tuning.journal, which optuna-dashboard can open.

Each tuned combination gets the same number of trials, unless its grid has fewer points. Trials run
in batches with successive halving: all trials of a batch train for a quarter of the steps, the
better half of them continue to half of the steps, and the better half of those train for all steps.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
import warnings
from typing import Any

#: The default number of trials per combination, unless the grid is smaller.
MOST_TRIALS = 12
#: The number of trials per batch; the sampler uses the results of earlier batches.
BATCH = 4
#: The fractions of the steps at which the trials of a batch stop. The better half of the trials
#: that reach a fraction continues to the next one.
RUNGS = (0.25, 0.5, 1)
JOURNAL = "tuning.journal"


def grid_size(options: list[dict[str, Any]]) -> int | None:
    """Returns the number of grid points if all options have lists of values, otherwise None."""
    if not all("values" in option for option in options):
        return None
    return math.prod(len(option["values"]) for option in options)


def batches(options: list[dict[str, Any]], most: int | None) -> list[range]:
    """Returns the trial numbers of each batch."""
    if not options:
        return []
    size = grid_size(options)
    count = most or MOST_TRIALS
    if size is not None:
        # Grid search does not use the results of earlier trials, so one batch is enough.
        return [range(min(count, size))]
    return [range(first, min(first + BATCH, count)) for first in range(0, count, BATCH)]


def rungs(steps: int) -> list[int]:
    return sorted({max(1, math.ceil(part * steps)) for part in RUNGS})


def value_at(trial: dict[str, Any], step: int) -> float | None:
    """Returns the held-out value at a step: infinity after divergence, None before the step."""
    for at in trial["held_out"]:
        if at["value"] is None:
            return math.inf
        if at["step"] == step:
            return float(at["value"])
    return None


def unfinished(
    batch: list[dict[str, Any]], steps: int, sign: int
) -> list[tuple[dict[str, Any], int]]:
    """Returns the trials of a batch to continue, each with the step at which it stops next.

    sign is -1 if higher values are better.
    """
    alive = batch
    for rung in rungs(steps):
        waiting = [trial for trial in alive if value_at(trial, rung) is None]
        if waiting:
            return [(trial, rung) for trial in waiting]
        ranked = sorted(
            (rank, trial["number"], trial)
            for trial in alive
            if (rank := _rank(trial, rung, sign)) < math.inf
        )
        alive = [trial for _, _, trial in ranked[: math.ceil(len(ranked) / 2)]]
    return []


def _rank(trial: dict[str, Any], step: int, sign: int) -> float:
    value = value_at(trial, step)
    return math.inf if value is None or math.isinf(value) else sign * value


def chosen(trials: list[dict[str, Any]], steps: int, sign: int) -> dict[str, Any] | None:
    """Returns the values of the best trial that trained for all steps."""
    ranked = sorted((_rank(trial, steps, sign), trial["number"]) for trial in trials)
    if not ranked or math.isinf(ranked[0][0]):
        return None
    return next(trial["values"] for trial in trials if trial["number"] == ranked[0][1])


def _distribution(option: dict[str, Any]) -> Any:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    is_integer = option["integer"]
    if "values" in option:
        values = option["values"]
        return CategoricalDistribution([int(value) if is_integer else value for value in values])
    low, high = option["range"]
    if is_integer:
        return IntDistribution(int(low), int(high), log=low > 0)
    return FloatDistribution(low, high, log=low > 0)


class Studies:
    """One Optuna study for each combination, rebuilt from results.json."""

    def __init__(self, folder: pathlib.Path, sign: int) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        path = folder / JOURNAL
        path.unlink(missing_ok=True)
        self.storage = JournalStorage(JournalFileBackend(str(path)))
        directions = optuna.study.StudyDirection
        self.direction = directions.MINIMIZE if sign > 0 else directions.MAXIMIZE

    def ask(
        self,
        name: str,
        options: list[dict[str, Any]],
        tried: list[dict[str, Any]],
        steps: int,
        count: int,
    ) -> Any:
        """Returns the option values of `count` new trials."""
        import optuna
        from optuna.trial import TrialState, create_trial

        space = {option["name"]: _distribution(option) for option in options}
        sampler: Any
        if grid_size(options) is not None:
            sampler = optuna.samplers.GridSampler(
                {name: list(values.choices) for name, values in space.items()}, seed=0
            )
        else:
            # Each batch has its own seed, because a rebuilt study would otherwise draw the same
            # values again.
            sampler = optuna.samplers.TPESampler(
                seed=len(tried), n_startup_trials=BATCH, constant_liar=True
            )
        study = optuna.create_study(
            storage=self.storage, study_name=name, sampler=sampler, direction=self.direction
        )
        for trial in tried:
            known = {at["step"]: at["value"] for at in trial["held_out"] if at["value"] is not None}
            is_complete = steps in known
            study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if is_complete else TrialState.PRUNED,
                    value=known[steps] if is_complete else None,
                    params=trial["values"],
                    distributions=space,
                    intermediate_values=known,
                )
            )
        return [study.ask(space).params for _ in range(count)]


def plan(record: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Returns the trials to run next or, if there are none, the chosen values."""
    settings = record["settings"]
    tuning = settings["tuning"]
    steps = settings["training"]["steps"]
    key = record["held_out"]["metric"]
    metrics = {metric["key"]: metric for metric in record["task"]["metrics"]}
    sign = -1 if metrics[key]["higher_is_better"] else 1
    studies = Studies(folder, sign)
    answer: list[dict[str, Any]] = []
    best = []
    for combination, terms in enumerate(settings["combinations"]):
        tried = sorted(
            (trial for trial in tuning["tried"] if trial["combination"] == combination),
            key=lambda trial: int(trial["number"]),
        )
        options = [o for o in tuning["options"] if combination in o["combinations"]]
        new: Any = []
        for batch in batches(options, tuning["trials"]):
            if batch[-1] >= len(tried):
                new = range(len(tried), batch[-1] + 1)
                break
            waiting = unfinished([tried[number] for number in batch], steps, sign)
            if waiting:
                answer += [{"combination": combination, "number": trial["number"], "steps": rung}
                           for trial, rung in waiting]  # fmt: skip
                break
        name = f"{combination} {terms['label']}"
        asked = studies.ask(name, options, tried, steps, len(new)) if options else []
        answer += [
            {"combination": combination, "number": number, "values": values,
             "steps": rungs(steps)[0]}
            for number, values in zip(new, asked, strict=True)
        ]  # fmt: skip
        best.append(chosen(tried, steps, sign) if options else {})
    return {"next": answer, "chosen": [] if answer else best}


def main() -> int:
    try:
        import optuna  # noqa: F401
    except ImportError:
        print("requires Optuna; run: pip install optuna", file=sys.stderr)
        return 2
    (argument,) = sys.argv[1:]
    if argument == "--check":
        return 0
    folder = pathlib.Path(argument)
    record = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    print(json.dumps(plan(record, folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
