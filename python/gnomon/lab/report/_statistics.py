"""Paired statistical tests across the seeds of a comparison."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from gnomon.lab.report._record import measured_at, metrics

#: The significance level of all tests, and the minimum number of pairs.
SIGNIFICANT = 0.05
FEWEST_SEEDS = 3

#: Verdicts on a difference.
BETTER, WORSE, EQUIVALENT = "better", "worse", "equivalent"
UNDECIDED, FEW_SEEDS = "not distinguishable", "too few seeds"


def p_value(differences: Sequence[float]) -> float:
    """Returns the two-sided p-value of Student's paired t-test.

    Returns 1 for fewer than two differences.
    """
    n = len(differences)
    if n < 2:
        return 1.0
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1)
    if variance == 0:
        return 0.0 if mean else 1.0
    # The CDF for integer degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4).
    freedom = n - 1
    theta = math.atan(abs(mean) / math.sqrt(variance / n) / math.sqrt(freedom))
    term = math.cos(theta) if freedom % 2 else 1.0
    total = 0.0
    for k in range(1 + freedom % 2, freedom, 2):
        total += term
        term *= math.cos(theta) ** 2 * k / (k + 1)
    inside = math.sin(theta) * total
    if freedom % 2:
        inside = 2 / math.pi * (theta + inside)
    return max(0.0, 1 - inside)


def confidence_interval(differences: Sequence[float]) -> float:
    """Returns the half-width of the mean's 95% confidence interval (Student's t).

    `differences` must contain at least two values.
    """
    n = len(differences)
    mean = sum(differences) / n
    deviations = [d - mean for d in differences]
    error = math.sqrt(sum(d * d for d in deviations) / (n - 1) / n)
    if error == 0:
        return 0.0
    # Search for the mean whose p-value is 0.05, given these deviations.
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        if p_value([d + middle * error for d in deviations]) > SIGNIFICANT:
            low = middle
        else:
            high = middle
    return high * error


def _one_sided(differences: Sequence[float]) -> float:
    """Returns the one-sided p-value for the null hypothesis that the mean is at least 0."""
    p = p_value(differences)
    return p / 2 if sum(differences) < 0 else 1 - p / 2


def equivalence_p_value(differences: Sequence[float], margin: float) -> float:
    """Returns the p-value of two one-sided tests (TOST): small if the mean lies within ±`margin`.

    Returns 1 for fewer than two differences.
    """
    if len(differences) < 2:
        return 1.0
    return max(
        _one_sided([d - margin for d in differences]),
        _one_sided([-d - margin for d in differences]),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values adjusted for multiple comparisons by Holm's method (1979), in input order.

    Each adjusted p-value can be compared directly with the family-wise significance level.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def verdicts(
    differences: Sequence[Sequence[float]],
    margins: Sequence[float],
    higher_is_better: Sequence[bool],
    looks: int = 1,
) -> list[tuple[str, float]]:
    """Returns a verdict on the left combination for each list of differences (left minus right).

    The verdict is *better* or *worse* if the mean differs significantly from 0 and its absolute
    value is at least the margin. It is *equivalent* if the mean lies significantly within the
    margin, and *not distinguishable* otherwise. With fewer than three pairs, it is *too few seeds*.
    The difference test and the equivalence test each have a family-wise significance level of 0.05
    over all lists. If the tests are repeated as seeds are added, this level holds over all `looks`
    repetitions (Bonferroni).

    Returns:
        For each list, the verdict and the adjusted p-value of the difference test.
    """
    tested = [n for n, pairs in enumerate(differences) if len(pairs) >= FEWEST_SEEDS]

    def adjusted(p_values: list[float]) -> list[float]:
        return [min(1.0, looks * p) for p in holm(p_values)]

    of_difference = adjusted([p_value(differences[n]) for n in tested])
    of_equivalence = adjusted([equivalence_p_value(differences[n], margins[n]) for n in tested])
    found = [(FEW_SEEDS, 1.0)] * len(differences)
    for n, differs, agrees in zip(tested, of_difference, of_equivalence, strict=True):
        mean = sum(differences[n]) / len(differences[n])
        verdict = UNDECIDED
        if agrees < SIGNIFICANT:
            verdict = EQUIVALENT
        elif differs < SIGNIFICANT and abs(mean) >= margins[n]:
            verdict = BETTER if (mean > 0) == higher_is_better[n] else WORSE
        found[n] = (verdict, differs)
    return found


def _values(results: dict[str, Any], key: str, condition: int) -> dict[int, dict[int, float]]:
    """Returns the measured values of the metric `key` by combination and seed."""
    by_seed: dict[int, dict[int, float]] = {}
    for run in results["runs"]:
        if run["losses"] and run["losses"][condition][key] is not None:
            value = run["losses"][condition][key]
            by_seed.setdefault(run["combination"], {})[run["seed"]] = value
    return by_seed


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two combinations under one condition, and the verdict on the left one."""

    left: int
    right: int
    differences: list[float]  # left minus right, one per common seed
    verdict: str
    p: float  # p-value of the difference, adjusted for all pairs and repeated tests

    @property
    def mean(self) -> float:
        return sum(self.differences) / len(self.differences)


def pairs(results: dict[str, Any], condition: int) -> list[Pair]:
    """Compares all pairs of combinations that have seeds in common by the task's first metric.

    `condition` is an index into the task's conditions; all pairs under one condition form one
    family of tests. The margin and the number of looks come from the settings in `results`.
    """
    metric = metrics(results)[0]
    values = _values(results, metric["key"], condition)
    found = []
    for left, right in itertools.combinations(sorted(values), 2):
        seeds = sorted(values[left].keys() & values[right].keys())
        if seeds:
            differences = [values[left][seed] - values[right][seed] for seed in seeds]
            found.append((left, right, differences))
    settings = results["settings"]
    fewest, most = settings.get("seed_range") or (1, 1)
    outcomes = verdicts(
        [differences for *_, differences in found],
        [settings.get("margin") or 0.0] * len(found),
        [metric["higher_is_better"]] * len(found),
        looks=most - fewest + 1,
    )
    return [
        Pair(left, right, differences, verdict, p)
        for (left, right, differences), (verdict, p) in zip(found, outcomes, strict=True)
    ]


def undecided(results: dict[str, Any]) -> list[int]:
    """Returns the combinations that belong to a pair still undecided under some condition."""
    found: set[int] = set()
    for condition in measured_at(results, metrics(results)[0]["key"]):
        for pair in pairs(results, condition):
            if pair.verdict in {UNDECIDED, FEW_SEEDS}:
                found |= {pair.left, pair.right}
    return sorted(found)


def best(
    results: dict[str, Any], key: str, condition: int, *, higher_is_better: bool = False
) -> int | None:
    """Returns the combination that is significantly better than every other, or None.

    `condition` is an index into the task's conditions. Runs with the same seed are paired, because
    they start from the same initial weights and use the same data in the same order. The p-values
    are adjusted for the number of other combinations (Holm).
    """
    sign = -1 if higher_is_better else 1
    by_seed = {
        combination: {seed: sign * value for seed, value in values.items()}
        for combination, values in _values(results, key, condition).items()
    }
    if len(by_seed) < 2:
        return None
    first = min(by_seed, key=lambda c: sum(by_seed[c].values()) / len(by_seed[c]))
    leads = []
    for other in by_seed.keys() - {first}:
        seeds = by_seed[first].keys() & by_seed[other].keys()
        leads.append([by_seed[other][seed] - by_seed[first][seed] for seed in seeds])
    if any(len(lead) < FEWEST_SEEDS or sum(lead) <= 0 for lead in leads):
        return None
    return first if max(holm([p_value(lead) for lead in leads])) < SIGNIFICANT else None
