"""The language model of the gnomon command, and its checkpoints.

This package loads checkpoints from ``gnomon train``, and saves checkpoints that ``gnomon eval``,
``generate`` and ``inspect`` can read; ``gnomon train --resume`` also needs the training state.
``gnomon.models`` is an alias of this package.
"""

from gnomon._names import publish
from gnomon.lab.models._checkpoint import (
    Checkpoint,
    TrainingState,
    load_checkpoint,
    save_checkpoint,
)
from gnomon.lab.models._language_model import LanguageModel
from gnomon.lab.models._memory import LanguageModelCache, LanguageModelMemory
from gnomon.lab.models._tokenizer import Tokenizer

__all__ = [
    "Checkpoint",
    "LanguageModel",
    "LanguageModelCache",
    "LanguageModelMemory",
    "Tokenizer",
    "TrainingState",
    "load_checkpoint",
    "save_checkpoint",
]

publish(__name__, __all__)
