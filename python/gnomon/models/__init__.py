"""The language model of the command line, and its checkpoints.

Checkpoints from ``gnomon train`` can be loaded here. ``gnomon eval``, ``generate`` and ``inspect``
read checkpoints saved here. ``gnomon train --resume`` also needs their training state.
"""

from gnomon._names import publish
from gnomon.models._checkpoint import Checkpoint, TrainingState, load_checkpoint, save_checkpoint
from gnomon.models._language_model import LanguageModel
from gnomon.models._memory import LanguageModelCache, LanguageModelMemory
from gnomon.models._tokenizer import Tokenizer

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
