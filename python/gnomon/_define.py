"""gnomon.similarity.define: similarities compiled from a formula."""

from __future__ import annotations

import dataclasses
import hashlib
import keyword
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import torch

from gnomon import _build
from gnomon._catalogue import entry_of, load_terms
from gnomon._checks import wrong_type
from gnomon._files import cache_folder
from gnomon._formula import FUNCTIONS, definition_of
from gnomon._library import LIBRARIES, TERMS_SYMBOL
from gnomon._release import COMPILER_REMEDY, OPERATORS, compiler_command, library_name
from gnomon._similarity import Similarity

_LONGEST = 60
#: Names reserved in formulas or specifications.
_TAKEN = ("g", "scale", "shape", "prefix", "axis", "length", "formula", "library")
_LOCK = threading.Lock()
_INPUTS = {"squared_distance": "|q - k|^2", "inner_product": "q.k"}

#: Source of a single-file term library: the definition's function table and its registration.
_SOURCE = """\
#define GNOMON_DEFINITION {struct}
#define GNOMON_DEFINITION_FILE "{struct}-inl.h"
#define GNOMON_DEFINITION_NAME "{name}"
#include "core/kernel_template.cc"
#include "core/definition_source.h"
#include "ops/similarities/definition.h"

namespace gnomon {{
namespace {{

[[maybe_unused]] const bool registered = [] {{
  static const DefinitionSource kSource = {{"{struct}", "{struct}-inl.h", R"GNOMON({text})GNOMON"}};
  const RegisterPairFunction function(PairFunctionOf{struct}());
  AddDefinitionSource(PairFunctionOf{struct}(), kSource);
  RegisterDefinition<reference::{struct}>("{name}", "{class_name}");
  return true;
}}();

}}  // namespace
}}  // namespace gnomon

extern "C" {{
extern const char {symbol};
extern const char* const gnomon_terms;
const char* const gnomon_terms = &{symbol};
}}
"""

#: Source of the function table for float64, which is compiled separately.
_DOUBLES = """\
#define GNOMON_DEFINITION {struct}
#define GNOMON_DEFINITION_FILE "{struct}-inl.h"
#include "core/double_template.cc"
"""


class DefinedSimilarity(Similarity):
    """Base class of the similarities that define() creates."""

    #: The formula f, as passed.
    formula: ClassVar[str]
    #: The shared library with the similarity's kernels, for ``gnomon compare --terms`` and
    #: load_terms().
    library: ClassVar[str]
    #: Argument names, in order.
    _arguments: ClassVar[tuple[str, ...]]


#: Each defined similarity's source text and class, by name.
_DEFINED: dict[str, tuple[str, type[DefinedSimilarity]]] = {}


def define(
    name: str,
    formula: str,
    *,
    input: str = "squared_distance",
    heads: Sequence[str] = ("gamma",),
    factor: str = "-gamma",
    title: str | None = None,
    source: str = "",
) -> type[DefinedSimilarity]:
    """Defines a similarity by a formula, registers its specification name and returns its class.

    The score is ``factor * f(g, ...)``, where g is the squared distance or the inner product of a
    query and a key. define() compiles the kernels with a C++20 compiler in a few seconds, and
    caches them for later processes. Gradients are derived from the formula. At a kink, such as abs
    at 0, the gradient is the mean of the left and right derivatives; the gradient of the distance
    between identical tokens is 0. ::

        StudentT = gnomon.similarity.define("student_t", "log1p(g)", factor="-gamma")
        gnomon.attention(q, k, v, similarity=StudentT(gamma))
        gnomon.nn.MultiheadAttention(512, 8, similarity="student_t")

    Args:
        name: the name in specifications and in the catalogue, such as "student_t": lowercase
            letters, digits and underscores. The class has the same name in CamelCase, StudentT.
        formula: f, an expression in ``g`` and ``heads`` with numbers, + - * / ** and the functions
            abs, exp, log, log1p, max, min, sigmoid, softplus, sqrt and tanh. It is computed in
            float32, or in float64 for float64 tokens. The argument of exp is clamped to at most 88,
            and that of log to at least 1.2e-38, the smallest normal float.
        input: the meaning of g: "squared_distance" or "inner_product".
        heads: names of the per-head parameters in the formula and in the factor. They become the
            arguments of the class, and modules train them. Parameters in the formula are
            initialised to 1.
        factor: the multiplier of f: one of ``heads``, such as "gamma", or its negative, "-gamma". A
            module initialises it so that scores of N(0, 1) tokens have a standard deviation of 1.
            "scale" means the argument ``scale`` of a call, 1 / sqrt(D) by default.
        title: the name in tables and figures; by default, name.
        source: the citation in the catalogue.

    Returns:
        The class. Its arguments have the names in ``heads`` and are numbers or tensors of shape
        (H,) or (). To use the class in ``gnomon compare``, pass its attribute ``library`` to
        --terms. Calling define() again with the same arguments returns the same class.

    Raises:
        ValueError: an argument is invalid, the formula cannot be parsed, or the name belongs to
            another similarity or position.
        RuntimeError: the compiler is missing or fails. The environment variable ``CXX`` selects
            the compiler (c++ by default), and ``GNOMON_CACHE`` selects the cache folder.

    Example:
        >>> Cauchy = gnomon.similarity.define("cauchy", "log1p(g)")  # doctest: +SKIP
        >>> o = gnomon.attention(q, k, v, similarity=Cauchy(0.5))  # doctest: +SKIP
    """
    title = name if title is None else title
    for argument, value in (("name", name), ("formula", formula), ("input", input),
                            ("factor", factor), ("title", title), ("source", source)):  # fmt: skip
        if not isinstance(value, str):
            raise wrong_type("similarity.define", argument, value, "a string")
    if isinstance(heads, str) or not (
        isinstance(heads, Sequence) and all(isinstance(head, str) for head in heads)
    ):
        raise TypeError(
            f"gnomon.similarity.define: heads is {heads!r}; expected a sequence of names"
        )
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z][a-z0-9]*)*", name) or len(name) > _LONGEST:
        raise _wrong(
            "name",
            name,
            "lowercase letters, digits and single underscores, at most 60 characters, with a "
            "letter at the start and after each underscore",
        )
    if input not in _INPUTS:
        raise _wrong("input", input, " or ".join(map(repr, _INPUTS)))
    for n, head in enumerate(heads):
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", head) or keyword.iskeyword(head):
            raise _wrong(
                "heads",
                tuple(heads),
                "names of letters, digits and underscores that start with a letter and are not "
                "Python keywords",
            )
        if head in (*_TAKEN, *FUNCTIONS, *heads[:n]) or hasattr(DefinedSimilarity, head):
            raise _wrong(
                "heads", tuple(heads), f"names other than {head}, which is reserved or repeated"
            )
    multiplier = factor.removeprefix("-")
    if (multiplier != "scale" and multiplier not in heads) or factor == "-scale":
        expected = ["scale", *(sign + head for head in heads for sign in ("", "-"))]
        raise _wrong("factor", factor, " or ".join(map(repr, expected)))
    scalars = [head for head in heads if head != multiplier]
    if len(scalars) > 3:
        raise _wrong("heads", tuple(heads), "at most three names in the formula")

    class_name = "".join(part.capitalize() for part in name.split("_"))
    # The suffix prevents conflicts with names in the kernels.
    struct = f"{class_name}OfFormula"
    g = _INPUTS[input]
    told = f"{factor} f, f = {formula.strip()}, g = {g}"
    try:
        text = definition_of(
            struct, formula, scalars, input == "squared_distance",
            {"kTitle": title, "kFormula": told, "kSource": source, "kFactor": factor},
        )  # fmt: skip
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"gnomon.similarity.define: formula is {formula!r}: {reason}") from None
    with _LOCK:
        known = _DEFINED.get(name)
        if known is not None and known[0] == text and known[1]._arguments == tuple(heads):
            return known[1]
        source_of = _SOURCE.format(
            struct=struct,
            name=name,
            class_name=class_name,
            text=text,
            symbol=TERMS_SYMBOL,
        )
        library = _library_of(name, source_of)
        entry = entry_of(name)
        if known is not None or (entry is not None and entry["library"] != str(library)):
            raise ValueError(
                f"gnomon.similarity.define: a term named {name} already exists; choose a different "
                "name, because names must be unique within a process"
            )
        if not os.path.exists(library):  # also False if the cache folder cannot be read
            _compile(name, struct, text, source_of, library)
        try:
            load_terms(library)
        except ValueError as error:
            raise ValueError(f"gnomon.similarity.define: name is {name!r}: {error}") from None
        made = _make_class(
            class_name,
            heads,
            {
                "__doc__": f"{title}: {told}.\n\n{source}".rstrip(),
                "_name": name,
                # The catalogue lists the factor first.
                "_tensors": (*(() if multiplier == "scale" else (multiplier,)), *scalars),
                "_arguments": tuple(heads),
                "formula": formula,
                "library": str(library),
            },
        )
        # Pickle looks the class up in the calling module, as if it were defined there.
        made.__module__ = sys._getframe(1).f_globals.get("__name__", "__main__")
        _DEFINED[name] = (text, made)
    return made


def _make_class(
    class_name: str, heads: Sequence[str], members: dict[str, object]
) -> type[DefinedSimilarity]:
    return dataclasses.make_dataclass(
        class_name,
        [(head, "float | Tensor") for head in heads],
        bases=(DefinedSimilarity,),
        frozen=True,
        eq=False,
        namespace=members,
    )


def _wrong(argument: str, value: object, expected: str) -> ValueError:
    return ValueError(f"gnomon.similarity.define: {argument} is {value!r}; expected {expected}")


def _command() -> list[str]:
    """Returns the command that compiles or links, without file names."""
    here = pathlib.Path(__file__).parent
    headers = [here / folder for folder in _build.HEADERS]
    try:
        compiler = compiler_command()
    except RuntimeError as error:
        raise RuntimeError(f"gnomon.similarity.define: {error}") from None
    return [
        *compiler,
        *("-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-w"),
        *_build.FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-D{definition}" for definition in _build.DEFINITIONS),
        *(f"-I{folder}" for folder in headers),
        f"-L{LIBRARIES}",
    ]


def _link_options() -> list[str]:
    """Returns the linker options; on macOS, every library that defines a symbol must be listed."""
    options = ["-lgnomon_torch"]
    if sys.platform == "darwin":
        core = LIBRARIES.parent / library_name("gnomon_core")
        if core.exists():
            options += [f"-L{core.parent}", "-lgnomon_core", f"-Wl,-rpath,{core.parent}"]
        options += [f"-Wl,-rpath,{LIBRARIES}", "-undefined", "dynamic_lookup"]
    return options


def _library_of(name: str, source: str) -> pathlib.Path:
    """Returns the path of the compiled library, which is specific to one build of gnomon."""
    build = (LIBRARIES / OPERATORS).stat()
    key = repr((source, _DOUBLES, _command(), build.st_size, build.st_mtime_ns))
    return (
        cache_folder() / "terms" / f"lib{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace")


def _compile(name: str, struct: str, text: str, source: str, library: pathlib.Path) -> None:
    command = _command()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{name}-") as work:
            place = pathlib.Path(work)
            (place / f"{struct}-inl.h").write_text(text, encoding="utf-8")
            (place / "terms.cc").write_text(source, encoding="utf-8")
            (place / "doubles.cc").write_text(_DOUBLES.format(struct=struct), encoding="utf-8")
            command.append(f"-I{place}")
            objects = [str(place / file) for file in ("terms.o", "doubles.o")]
            # The two files are compiled at the same time.
            with ThreadPoolExecutor(len(objects)) as threads:
                compile_of = [[*command, "-c", f"{o[:-1]}cc", "-o", o] for o in objects]
                runs = list(threads.map(_run, compile_of))
            if all(run.returncode == 0 for run in runs):
                output = ["-shared", *objects, "-o", str(place / library.name)]
                runs = [_run([*command, *output, *_link_options()])]
            for run in runs:
                if run.returncode != 0:
                    told = "\n".join(run.stderr.strip().splitlines()[:20])
                    raise RuntimeError(
                        f"gnomon.similarity.define: {command[0]} cannot compile {name} (exit code "
                        f"{run.returncode}):\n{told}"
                    )
            # Renaming is atomic, so other processes never see a partial file.
            os.replace(place / library.name, library)
    except OSError as error:
        if error.filename == command[0]:
            raise RuntimeError(
                f"gnomon.similarity.define: cannot run {command[0]}: {error.strerror}; "
                f"{COMPILER_REMEDY}"
            ) from None
        raise RuntimeError(
            f"gnomon.similarity.define: cannot write to {library.parent}: {error.strerror}; set "
            "the environment variable GNOMON_CACHE to choose another folder"
        ) from None


# Error messages and pickles should name the public module.
for _member in (DefinedSimilarity, define):
    _member.__module__ = "gnomon.similarity"
