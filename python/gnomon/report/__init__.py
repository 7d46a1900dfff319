"""The report of a comparison, report.html, generated from results.json (docs/results.md)."""

from gnomon.report._page import busy, render
from gnomon.report._plots import PLOTS, draw_conditions, draw_cost, draw_training, smooth
from gnomon.report._record import in_common, labels, load, measured_at, metrics, text_task
from gnomon.report._statistics import (
    best,
    confidence_interval,
    equivalence_p_value,
    holm,
    p_value,
    verdicts,
)

__all__ = [
    "PLOTS",
    "best",
    "busy",
    "confidence_interval",
    "draw_conditions",
    "draw_cost",
    "draw_training",
    "equivalence_p_value",
    "holm",
    "in_common",
    "labels",
    "load",
    "measured_at",
    "metrics",
    "p_value",
    "render",
    "smooth",
    "text_task",
    "verdicts",
]
