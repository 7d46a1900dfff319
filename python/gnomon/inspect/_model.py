"""The models that pictures are drawn of."""

from __future__ import annotations

import pathlib

from gnomon.models import Checkpoint, load_checkpoint


def load_model(path: pathlib.Path) -> Checkpoint:
    """The checkpoint in a file, or in the folder of a run, with its model in float64."""
    checkpoint = load_checkpoint(path)
    checkpoint.model.double()
    return checkpoint
