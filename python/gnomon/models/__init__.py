"""The language model of the command line, and its checkpoints.

What ``gnomon train`` has written is loaded here, and what is saved here is read by ``gnomon eval``,
``generate`` and ``inspect``, and with its training by ``gnomon train --resume``.
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
