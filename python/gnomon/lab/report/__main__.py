"""Draws the report of a comparison: ``python -m gnomon.report RUN``.

``RUN`` is the output folder of ``gnomon compare``. The report is a self-contained HTML file that
includes the plots. It depends only on results.json (docs/results.md) and the pictures in RUN.
"""

from __future__ import annotations

import json
import pathlib
import sys

import matplotlib

from gnomon._command_line import Parser, failure
from gnomon._files import replacing
from gnomon._output import checked_output
from gnomon.lab._plots import STYLE
from gnomon.lab.report import PLOTS, counts, has_verdicts, load, render, undecided

_fail = failure("gnomon.report")


def main(arguments: list[str] | None = None) -> int:
    with checked_output(_fail):
        return _main(arguments)


def _main(arguments: list[str] | None) -> int:
    parser = Parser(fail=_fail, prog="python -m gnomon.report", description=__doc__)
    parser.add_argument("run", type=pathlib.Path, help="the output folder of a comparison")
    parser.add_argument("--png", action="store_true", help="also write each plot as a PNG file")
    parser.add_argument(
        "--undecided",
        action="store_true",
        help="draw nothing; print the indices of the combinations that need more seeds, as JSON",
    )
    options = parser.parse_args(arguments)
    try:
        results = load(options.run)
        if options.undecided:
            print(json.dumps(undecided(results)))
            return 0
        page = render(results, options.run)
        with replacing(options.run / "report.html") as part:
            part.write_text(page, encoding="utf-8")
        if has_verdicts(results):
            print(*counts(results), sep="\n")
        if options.png:
            with matplotlib.rc_context(STYLE):
                for name, (_, _, draw) in PLOTS.items():
                    with replacing(options.run / f"{name}.png") as part:
                        draw(results).savefig(part, dpi=150, format="png")
    except OSError as error:
        _fail(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
    except (ValueError, KeyError, TypeError) as error:
        _fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
