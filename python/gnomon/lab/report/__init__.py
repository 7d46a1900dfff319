"""Generates the report of a comparison, report.html, from results.json (docs/results.md)."""

from gnomon.lab.report._page import busy, counts, render
from gnomon.lab.report._plots import (
    PLOTS,
    draw_conditions,
    draw_cost,
    draw_effects,
    draw_training,
    has_verdicts,
    smooth,
)
from gnomon.lab.report._record import in_common, labels, load, measured_at, metrics, text_task
from gnomon.lab.report._statistics import (
    best,
    confidence_interval,
    equivalence_p_value,
    holm,
    p_value,
    pairs,
    undecided,
    verdicts,
)

__all__ = [
    "PLOTS",
    "best",
    "busy",
    "confidence_interval",
    "counts",
    "draw_conditions",
    "draw_cost",
    "draw_effects",
    "draw_training",
    "equivalence_p_value",
    "has_verdicts",
    "holm",
    "in_common",
    "labels",
    "load",
    "measured_at",
    "metrics",
    "p_value",
    "pairs",
    "render",
    "smooth",
    "text_task",
    "undecided",
    "verdicts",
]
