"""Loads the operator library for the installed PyTorch release."""

import functools
import json
import pathlib
import re
import sys
from typing import Any

import torch

from gnomon import _build, _release

if _release.is_building():
    # Runs before the code below, which needs the libraries that are about to be built.
    from gnomon import build

    sys.exit(build.main(sys.argv[1:]))

#: The folder of the libraries for this PyTorch release.
LIBRARIES: pathlib.Path = _release.libraries()
#: The symbol that term libraries for this build refer to.
TERMS_SYMBOL = _build.TERMS_SYMBOL.replace(
    "{release}", re.sub(r"\W", "_", _release.release_of(torch.__version__))
)

try:
    torch.ops.load_library(LIBRARIES / _release.OPERATORS)
except OSError as error:
    remedy = "; run: python -m gnomon.build" if _release.SOURCES is not None else ""
    raise ImportError(
        f"gnomon's libraries do not load in this PyTorch ({torch.__version__}): {error}{remedy}"
    ) from None

ops = torch.ops.gnomon
VERSION: str = _build.VERSION


@functools.lru_cache
def answer(question: str, *arguments: object) -> str:
    """Returns the answer to a query as JSON; load_terms() clears the cache."""
    text: str = ops.query(question, json.dumps(arguments))
    return text


def query(question: str, *arguments: object) -> Any:
    """Answers a question about specifications; src/ops/library.cc lists the questions."""
    return json.loads(answer(question, *arguments))
