"""The language model and its checkpoints; an alias of ``gnomon.lab.models``."""

from typing import TYPE_CHECKING

from gnomon import _lab

if TYPE_CHECKING:
    from gnomon.lab.models import *  # noqa: F403
else:
    _lab.alias(__name__)
