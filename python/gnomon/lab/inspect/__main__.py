"""Draws the figures of ``gnomon inspect``: ``python -m gnomon.inspect``."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import NoReturn

try:
    import matplotlib
except ImportError as error:
    sys.exit(f"gnomon: inspect requires matplotlib: {error}")

from gnomon._catalogue import load_terms
from gnomon._command_line import Parser
from gnomon._output import checked_output
from gnomon.lab._plots import STYLE
from gnomon.lab.inspect import cones, decay, encodings, model_pictures, rank
from gnomon.lab.inspect._pictures import Picture, path, unknown

PICTURES: dict[
    str,
    tuple[
        str,
        Callable[[argparse.ArgumentParser], None],
        Callable[[argparse.Namespace], Picture],
    ],
] = {
    "encoding": (
        "inner products between the positions of an encoding that is added to embeddings",
        encodings.add_encoding_arguments,
        encodings.draw_encoding,
    ),
    "decay": (
        "how a position changes scores with distance; with --model, as learned by each layer",
        decay.add_arguments,
        decay.draw,
    ),
    "tables": (
        "similarity between the rows of a checkpoint's learned position tables; biases are "
        "shown directly",
        model_pictures.add_tables_arguments,
        model_pictures.draw_tables,
    ),
    "attention": (
        "attention weights of a trained model for one text, or for two texts side by side",
        model_pictures.add_attention_arguments,
        model_pictures.draw_attention,
    ),
    "cones": (
        "penumbral and umbral cones in the half-plane: shadows and lowest common ancestors",
        cones.add_arguments,
        cones.draw,
    ),
    "rotation": (
        "the matrix that shifts sinusoids by k positions: a rotation of each sine-cosine pair",
        encodings.add_rotation_arguments,
        encodings.draw_rotation,
    ),
    "terms": (
        "the four terms of a score when positions are added to tokens",
        encodings.add_terms_arguments,
        encodings.draw_terms,
    ),
    "rank": (
        "the margin by which a similarity separates descendants from other nodes of a tree, by "
        "dimension",
        rank.add_arguments,
        rank.draw,
    ),
}


def _fail(message: str) -> NoReturn:
    print(f"gnomon: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        fail=lambda message: _fail(f"inspect: {message}"),
        prog="gnomon inspect",
        description="Draws a figure as a PNG file, and writes its values to a JSON file.",
    )
    pictures = parser.add_subparsers(dest="picture", metavar="PICTURE", required=True)
    for name, (text, add_arguments, _) in PICTURES.items():
        command = pictures.add_parser(name, help=text, description=f"Draws {text}.")
        add_arguments(command)
        command.add_argument(
            "--terms", type=path, action="append", default=[], metavar="LIBRARY",
            help=("a term library with additional similarities, positions and encodings; "
                 "repeatable"),
        )  # fmt: skip
        command.add_argument(
            "--out", type=path, default=pathlib.Path(f"{name}.png"),
            help="output file NAME.png; the figure's values go to NAME.json (default %(default)s)",
        )  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure that the arguments describe; exits with status 2 on failure."""
    with checked_output(_fail):
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(words: list[str]) -> int:
    try:
        if words and not words[0].startswith("-") and words[0] not in PICTURES:
            raise unknown("picture", words[0], PICTURES)
        options = _parser().parse_args(words)
        if options.out.suffix != ".png":
            raise ValueError(f"--out is {options.out}; expected a file NAME.png")
        for library in options.terms:
            load_terms(library)
        with matplotlib.rc_context(STYLE):
            PICTURES[options.picture][2](options).save(options.out)
    except OSError as error:
        _fail(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
    except (ValueError, TypeError, NotImplementedError) as error:
        _fail(str(error).removeprefix("gnomon: "))
    except MemoryError:
        _fail(f"inspect {options.picture}: not enough memory")
    except RuntimeError as error:
        # PyTorch's allocator raises a plain RuntimeError.
        if "allocate" not in str(error):
            raise
        _fail(f"inspect {options.picture}: not enough memory: {error}")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
