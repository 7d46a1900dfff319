"""Loads the models to plot."""

from __future__ import annotations

import pathlib

from gnomon.lab.models import Checkpoint, load_checkpoint


def load_model(path: pathlib.Path) -> Checkpoint:
    """Loads the checkpoint in a file or a run folder, with its model in float64."""
    checkpoint = load_checkpoint(path)
    checkpoint.model.double()
    return checkpoint
