"""What seeds can tell of a comparison."""

from __future__ import annotations

import math
from typing import Any

#: What the lead of the best may be by chance, at most, and how many pairs it takes to tell.
SIGNIFICANT = 0.05
FEWEST_SEEDS = 3


def p_value(differences: list[float]) -> float:
    """Student's t test of paired samples: how probable a mean as far from 0 would be by chance.

    1 of fewer than two differences.
    """
    n = len(differences)
    if n < 2:
        return 1.0
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1)
    if variance == 0:
        return 0.0 if mean else 1.0
    # The distribution function for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4).
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


def best(
    results: dict[str, Any], key: str, condition: int, *, higher_is_better: bool = False
) -> int | None:
    """The combination whose metric is better than that of every other, by more than chance.

    `condition` is an index of the task's conditions. Seeds are paired: runs with the same one began
    alike and saw the same data in the same order.
    """
    sign = -1 if higher_is_better else 1
    by_seed: dict[int, dict[int, float]] = {}
    for run in results["runs"]:
        if run["losses"] and run["losses"][condition][key] is not None:
            value = sign * run["losses"][condition][key]
            by_seed.setdefault(run["combination"], {})[run["seed"]] = value
    if len(by_seed) < 2:
        return None
    first = min(by_seed, key=lambda c: sum(by_seed[c].values()) / len(by_seed[c]))
    for other in by_seed.keys() - {first}:
        seeds = by_seed[first].keys() & by_seed[other].keys()
        leads = [by_seed[other][seed] - by_seed[first][seed] for seed in seeds]
        if len(leads) < FEWEST_SEEDS or p_value(leads) >= SIGNIFICANT or sum(leads) <= 0:
            return None
    return first
