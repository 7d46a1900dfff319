"""Loads the operator library for the installed PyTorch release."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import sys
from typing import Any

import torch

from gnomon import _build, _release

VERSION: str = _build.VERSION
#: Why the libraries do not load; only ``gnomon.info`` runs then.
failure: str | None = None

_program = _release.program()
if _program == "gnomon.build":
    # Runs before the code below, which needs the libraries that are about to be built.
    from gnomon import build

    sys.exit(build.main(sys.argv[1:]))

try:
    #: The folder of the libraries for this PyTorch release.
    LIBRARIES: pathlib.Path = _release.libraries()
    _release.load(LIBRARIES)
except ImportError as error:
    # A program ends with the message only, without a traceback.
    if _program == "gnomon.info":
        failure = str(error)
        from gnomon import info

        sys.exit(info.main(sys.argv[1:]))
    if _program:
        print(f"{_program}: {error}", file=sys.stderr)
        sys.exit(1)
    raise

#: The symbol that term libraries for this build refer to.
TERMS_SYMBOL = _build.TERMS_SYMBOL.replace(
    "{release}", re.sub(r"\W", "_", _release.release_of(torch.__version__))
)

ops = torch.ops.gnomon
#: How often load_terms() has changed the answers to queries.
loads = 0


@functools.lru_cache
def _answer(loads: int, question: str, arguments: tuple[object, ...]) -> str:
    text: str = ops.query(question, json.dumps(arguments))
    return text


def query(question: str, *arguments: object) -> Any:
    """Answers a question about specifications; src/ops/library.cc lists the questions."""
    return json.loads(_answer(loads, question, arguments))
