"""Writes the files generated from the catalogue: `make facades`, after a change of a term.

From gnomon.catalogue() it generates:

- for similarities and positions, the classes of python/gnomon/similarity.py and position.py, and
  the functions of include/gnomon/torch/terms.h with their definitions;
- for encodings, the classes of python/gnomon/nn/_encodings.py, their lines in docs/api/nn.md, and
  the functions of include/gnomon/torch/encodings.h.

docs/catalogue.md is the output of `gnomon list --markdown`. docs/figures/gallery.py writes
docs/gallery.md. All are committed. With --check nothing is written, and the exit status
reports whether a file is stale.

clang-format and ruff of requirements-test.txt must be in the folder of this interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import keyword
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gnomon

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH = 100
NOTICE = "Written by `make facades` from the catalogue, that is the files of the terms."
#: A C++ function with more optional arguments takes them in a struct with named fields.
MOST_OPTIONS = 4
#: The page that lists the classes of gnomon.nn, and the comments that enclose the encodings.
PAGE_OF_MODULES = "docs/api/nn.md"
START = ".. Written by `make facades`:"
END = ".. End of what is written."

#: The docstring of each Python module, and the names that it imports from other modules.
MODULES = {
    "similarity": (
        """Similarities: the score s_ij of a query and a key before the softmax.

gamma and beta are real numbers, or tensors, which may require grad: (H,), one for each query head,
or (), one for all.

A specification may be given wherever a similarity is expected: "penumbral:score=height2". Where it
leaves out gamma or beta, they are those that a module starts with, which give the scores of N(0, 1)
tokens a standard deviation of 1. One that is not here can be made of its formula by define().
""",
        {
            "gnomon._define": ["DefinedSimilarity", "define"],
            "gnomon._similarity": ["Similarity", "Specified"],
        },
    ),
    "position": (
        """Positions: how the positions p_i of a query and p_j of a key change the scores.

``RoPE() + ALiBi(slopes)`` is their sum, as is a list of them: at most one rotation, one content
term ({content}), which reads q as it was passed, one QK-norm, one
sink and one gate, and any number of biases. Each is learned if its tensor requires grad. Where
(H,) is expected, one for each query head, a number or a tensor () without axes stands for all
heads.

A specification may be given wherever a position is expected, "rope+alibi", also in a sum:
``"rope" + ALiBi(slopes)``. What it leaves out is as a module has it at its start.
""",
        {
            "gnomon._grid": ["Grid"],
            "gnomon._position": ["Position", "Specified", "Sum"],
        },
    ),
}

#: C++ keywords that a parameter could be named, except those that are also Python keywords.
CPP_KEYWORDS = {
    *("auto", "bool", "case", "catch", "char", "const", "default", "delete", "do", "double"),
    *("enum", "explicit", "export", "extern", "float", "friend", "goto", "inline", "int", "long"),
    *("mutable", "namespace", "new", "operator", "private", "protected", "public", "register"),
    *("short", "signed", "sizeof", "static", "struct", "switch", "template", "this", "throw"),
    *("typename", "union", "unsigned", "using", "virtual", "void", "volatile"),
}


@dataclass(frozen=True)
class Argument:
    """An argument of a Python class and of a C++ function."""

    name: str
    kind: str  # number, integer, flag, choice, shape, heads or table
    meaning: str
    required: bool
    default: str | None
    index: str | None = None
    axis: bool = False  # whether it is the length of an axis of the option `shape`
    details: tuple[str, ...] = ()  # the options that may follow the word
    key: str = ""  # in the specification, if the name differs
    choices: tuple[str, ...] = ()

    @property
    def option(self) -> bool:
        return self.kind not in ("heads", "table") and not self.axis and not self.details

    @property
    def method(self) -> str:
        """The method of TermBuilder."""
        return "WithDetails" if self.details else "With"

    @property
    def python(self) -> str:
        """The annotation and the default."""
        kind = {
            "number": "float",
            "integer": "int",
            "flag": "bool",
            "choice": f"Literal[{', '.join(map(repr, self.choices))}]".replace("'", '"'),
            "shape": "Sequence[int]",
            "heads": "float | Tensor",
            "table": "Tensor",
        }[self.kind]
        if self.details:
            kind = "str"
        if self.required:
            return f"{self.name}: {kind}"
        if self.default is None:
            return f"{self.name}: {kind} | None = None"
        return f"{self.name}: {kind} = {self._literal('True', 'False')}"

    @property
    def cpp_type(self) -> str:
        """The type as a struct member; as an argument it may be a const reference."""
        kind = {
            "number": "double",
            "integer": "int64_t",
            "flag": "bool",
            "choice": "std::string",
            "shape": "std::vector<int64_t>",
            "heads": "HeadValue",
            "table": "torch::Tensor",
        }[self.kind]
        is_optional = not self.required and self.default is None and self.kind != "shape"
        return f"std::optional<{kind}>" if is_optional else kind

    @property
    def cpp_default(self) -> str:
        """The default; empty if there is none."""
        if self.required:
            return ""
        if self.default is not None:
            return self._literal("true", "false")
        return "{}" if self.kind == "shape" else "std::nullopt"

    @property
    def cpp(self) -> str:
        """The type, the name and the default."""
        kind = self.cpp_type
        if self.kind in ("choice", "shape"):
            kind = f"const {kind}&"
        return f"{kind} {self.name}" + (f" = {self.cpp_default}" if self.cpp_default else "")

    def _literal(self, true: str, false: str) -> str:
        default = self.default or ""
        if self.kind in ("number", "heads"):
            return repr(float(default))
        if self.kind == "flag":
            return true if default == "true" else false
        return f'"{default}"' if self.kind == "choice" else default


def arguments_of(entry: dict[str, Any]) -> list[Argument]:
    """The arguments of a term, the required ones first, in the order of its entry."""
    arguments: list[Argument] = []
    for parameter in entry["parameters"]:
        if parameter["argument"] is None:
            continue
        required = parameter["argument"] == "required"
        kind = {"per_head": "heads"}.get(parameter["kind"], parameter["kind"])
        default = parameter["default"]
        meaning = parameter["meaning"]
        what = f"{entry['name']}: {parameter['name']}"
        if not meaning:
            raise SystemExit(f"{what} has no meaning")
        name = parameter["argument_name"] or parameter["name"]
        if keyword.iskeyword(name) or name in CPP_KEYWORDS:
            raise SystemExit(
                f"{what} is an argument of a class, and {name} a word of Python or C++; expected "
                "another name"
            )
        if kind == "numbers" and not parameter.get("detail_of"):
            raise SystemExit(
                f"{what} is an argument of a class, which takes no numbers joined by x; expected "
                ".NoArgument()"
            )
        if parameter["takes_tensor"] and kind != "heads":
            # A word in a module is a table in a call.
            kind, default = "table", None
        details = tuple(
            p["name"] for p in entry["parameters"] if p.get("detail_of") == parameter["name"]
        )
        if details:
            default = None
        for axis in parameter["axes"]:
            meaning = f"{axis} of the grid"
            arguments.append(Argument(axis, "integer", meaning, required, None, axis=True))
        if not parameter["axes"]:
            arguments.append(
                Argument(
                    name,
                    kind,
                    meaning,
                    required,
                    default,
                    index=parameter["index"],
                    details=details,
                    key=parameter["name"],
                    choices=tuple(parameter.get("choices") or ()),
                )
            )
    for before, after in itertools.pairwise(arguments):
        if after.required and not before.required:
            raise SystemExit(f"{entry['name']}: {after.name} is required and {before.name} is not")
    return arguments


def encoding_arguments(entry: dict[str, Any]) -> list[Argument]:
    """The arguments of an encoding and, after the required ones, those of all modules."""
    own = arguments_of(entry)
    if not all(argument.option for argument in own):
        raise SystemExit(f"{entry['name']}: an encoding has numbers, words, flags and shapes alone")
    arguments = [argument for argument in own if argument.required]
    arguments.append(Argument("dim", "integer", "E, the columns of the embeddings", True, None))
    arguments += [argument for argument in own if not argument.required]
    if entry["takes_causal"]:
        meaning = "whether no token may see a later one"
        arguments.append(Argument("causal", "flag", meaning, False, "false"))
    return arguments


def paragraphs_of(entry: dict[str, Any]) -> list[str]:
    """The description of a term: its formula, details and source."""
    details = entry["details"].split("\n\n") if entry["details"] else []
    return [entry["formula"] + ".", *details, entry["source"] + "."]


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def wrap_paragraph(text: str, width: int) -> list[str]:
    """Wraps a paragraph or a list of items."""
    if not text.startswith("- "):
        return wrap(text, width)
    lines: list[str] = []
    for item in text.split("\n"):
        lines += wrap(item.removeprefix("- "), width, "- ", "  ")
    return lines


def terms_of(catalogue: dict[str, list[dict[str, Any]]], kind: str) -> list[dict[str, Any]]:
    """The library's own similarities, attention positions or encodings."""
    entries = catalogue["similarities" if kind == "similarity" else "positions"]
    return [
        entry
        for entry in entries
        if entry["class_name"]
        and not entry["library"]
        and (entry["role"] == "embedding") == (kind == "encoding")
    ]


def docstring(lines: list[str], indent: str) -> list[str]:
    if len(lines) == 1:
        return [f'{indent}"""{lines[0]}"""']
    return [
        f'{indent}"""{lines[0]}',
        *(indent + line if line else "" for line in lines[1:]),
        f'{indent}"""',
    ]


#: The last arguments of a module, as in torch.nn, and their descriptions.
FACTORY = "device: Device = None, dtype: torch.dtype | None = None"
FACTORY_MEANING = (
    "device: where parameters are, the default device if None.",
    "dtype: theirs, a floating-point one; the default dtype if None.",
)


def class_docstring(
    entry: dict[str, Any], arguments: list[Argument], others: Sequence[str] = ()
) -> list[str]:
    text: list[str] = []
    for paragraph in paragraphs_of(entry):
        text += ([""] if text else []) + wrap_paragraph(paragraph, WIDTH - 7)
    if arguments:
        text += ["", "Args:"]
    for argument in arguments:
        text += wrap(f"{argument.name}: {argument.meaning}.", WIDTH - 4, " " * 4, " " * 8)
    text += [" " * 4 + line for line in others]
    return docstring(text, "    ")


def python_class(entry: dict[str, Any], base: str) -> Iterator[str]:
    arguments = arguments_of(entry)
    yield "@dataclass(frozen=True, eq=False)"
    yield f"class {entry['class_name']}({base}):"
    yield from class_docstring(entry, arguments)
    yield ""
    for argument in arguments:
        yield f"    {argument.python}"
    if arguments:
        yield ""
    yield f'    _name: ClassVar[str] = "{entry["name"]}"'
    groups = {
        "_tensors": [a.name for a in arguments if a.kind in ("heads", "table")],
        "_tables": [a.name for a in arguments if a.kind == "table"],
        "_options": [a.name for a in arguments if a.option],
        "_shapes": [a.name for a in arguments if a.kind == "shape"],
        "_axes": [a.name for a in arguments if a.axis],
    }
    for name, fields in groups.items():
        if fields:
            words = ", ".join(f'"{field}"' for field in fields) + "," * (len(fields) == 1)
            yield f"    {name}: ClassVar[tuple[str, ...]] = ({words})"
    if details := {a.name: a.details for a in arguments if a.details}:
        written = repr(details).replace("'", '"')
        yield f"    _details: ClassVar[Mapping[str, tuple[str, ...]]] = {written}"
    tables = [a for a in arguments if a.index == "near_offsets"]
    if tables:
        yield ""
        yield from future_first(entry["class_name"], arguments, tables)
    if any(a.index == "grid" for a in arguments):
        yield ""
        yield from query_minus_key(entry["class_name"], arguments)


def future_first(
    class_name: str, arguments: list[Argument], tables: list[Argument]
) -> Iterator[str]:
    """The second constructor of a term whose rows are offsets."""
    fields = ", ".join(argument.python for argument in arguments)
    yield "    @classmethod"
    yield f"    def from_future_first(cls, {fields}) -> {class_name}:"
    yield '        """Of tables whose row n is for the offset p_j - p_i = max_offset - n."""'
    for table in tables:
        inner = "        "
        if not table.required:
            yield f"        if {table.name} is not None:"
            inner += "    "
        operator = f"position.{class_name}"
        yield f'{inner}{table.name} = reversed_rows("{operator}", "{table.name}", {table.name})'
    yield f"        return cls({', '.join(a.name for a in arguments)})"


def query_minus_key(class_name: str, arguments: list[Argument]) -> Iterator[str]:
    """The second constructor of a term whose table is over the offsets on a grid."""
    fields = ", ".join(argument.python for argument in arguments)
    names = ", ".join(argument.name for argument in arguments)
    (table,) = (argument.name for argument in arguments if argument.index == "grid")
    yield "    @classmethod"
    yield f"    def from_query_minus_key(cls, {fields}) -> {class_name}:"
    yield '        """Of a table indexed by y_i - y_j + height - 1 and so on, as in Swin.'
    yield ""
    yield "        Example:"
    yield "            >>> table = torch.zeros(13 * 13, 4)  # Swin's, windows of 7x7, 4 heads"
    yield "            >>> table = table.t().view(4, 13, 13)"
    yield "            >>> bias = gnomon.position.GridBias.from_query_minus_key(table)"
    yield '        """'
    yield f'        {table} = flipped_grid("position.{class_name}", "{table}", {table})'
    yield f"        return cls({names})"


def python_module(catalogue: dict[str, list[dict[str, Any]]], module: str) -> str:
    head, others = MODULES[module]
    entries = terms_of(catalogue, module)
    base = module.capitalize()
    content = ", ".join(entry["class_name"] for entry in entries if entry["role"] == "content")
    paragraphs = [
        "\n".join(wrap(paragraph, WIDTH))
        for paragraph in head.format(content=content).strip().split("\n\n")
    ]
    classes = [list(python_class(entry, base)) for entry in entries]
    body = "\n\n\n".join("\n".join(lines) for lines in classes)
    imports = {name: sorted(names) for name, names in others.items()}
    helpers = ("flipped_grid", "reversed_rows")
    for name in helpers:
        if f"{name}(" in body:
            imports["gnomon._position"].append(name)
    names = [name for names in others.values() for name in names]
    names = sorted([*names, *(entry["class_name"] for entry in entries)])
    lines = ['"""' + "\n\n".join(paragraphs), '"""', "", f"# {NOTICE}", ""]
    lines += ["from __future__ import annotations", ""]
    containers = [name for name in ("Mapping", "Sequence") if f"{name}[" in body]
    if containers:
        lines.append(f"from collections.abc import {', '.join(containers)}")
    types = ["ClassVar", "Literal"] if "Literal[" in body else ["ClassVar"]
    lines += ["from dataclasses import dataclass", f"from typing import {', '.join(types)}", ""]
    lines += ["from torch import Tensor", ""]
    for name, imported in imports.items():
        lines.append(f"from {name} import {', '.join(imported)}")
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in names), "]", "", "", body, ""]
    return "\n".join(lines)


def encoding_class(entry: dict[str, Any]) -> Iterator[str]:
    arguments = encoding_arguments(entry)
    name = entry["class_name"]
    yield f"class {name}(TokenEncoding):"
    yield from class_docstring(entry, arguments, FACTORY_MEANING)
    yield ""
    fields = ", ".join(argument.python for argument in arguments)
    yield f"    def __init__(self, {fields}, {FACTORY}) -> None:"
    own = [argument for argument in arguments if argument.key]
    for argument in own:
        if argument.kind == "integer":
            may_be_none = not argument.required and argument.default is None
            check = "check_optional_integer" if may_be_none else "check_integer"
            words = f'"nn.{name}", "{argument.name}"'
            yield f"        {argument.name} = {check}({words}, {argument.name})"
    options = "".join(f", {argument.key}={argument.name}" for argument in own)
    causal = "causal" if entry["takes_causal"] else "False"
    spec = f'to_spec("{entry["name"]}"{options})'
    yield f"        super().__init__({spec}, dim, {causal}, device, dtype)"


def encodings_module(catalogue: dict[str, list[dict[str, Any]]]) -> str:
    entries = terms_of(catalogue, "encoding")
    lines = ['"""The classes of what is added to embeddings."""', "", f"# {NOTICE}", ""]
    lines += ["from __future__ import annotations", ""]
    classes = ["\n".join(encoding_class(entry)) for entry in entries]
    body = "\n\n\n".join(classes)
    if "Sequence[" in body:
        lines += ["from collections.abc import Sequence", ""]
    if "Literal[" in body:
        lines += ["from typing import Literal", ""]
    lines += ["import torch", ""]
    checks = [name for name in ("check_integer", "check_optional_integer") if f"{name}(" in body]
    lines.append(f"from gnomon._checks import {', '.join(['Device', *checks])}")
    lines.append("from gnomon._terms import to_spec")
    lines += ["from gnomon.nn._token_encodings import TokenEncoding", ""]
    names = sorted(entry["class_name"] for entry in entries)
    lines += ["__all__ = [", *(f'    "{name}",' for name in names), "]", "", "", body, ""]
    return "\n".join(lines)


def page_of_modules(catalogue: dict[str, list[dict[str, Any]]]) -> str:
    """docs/api/nn.md with the current encodings between its two comments."""
    before, start, rest = (ROOT / PAGE_OF_MODULES).read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE_OF_MODULES}: expected the comments {START!r} and {END!r}")
    names = [entry["class_name"] for entry in terms_of(catalogue, "encoding")]
    listed = "".join(f".. autoclass:: {name}\n" for name in names)
    return f"{before}{start}\n{listed}{end}{after}"


def cpp_comment(entry: dict[str, Any], arguments: list[Argument]) -> Iterator[str]:
    first = True
    for paragraph in paragraphs_of(entry):
        if not first:
            yield "//"
        first = False
        for line in wrap_paragraph(paragraph, WIDTH - 3):
            yield f"// {line}"
    if arguments:
        yield "//"
    for argument in arguments:
        yield from wrap(f"{argument.name}: {argument.meaning}.", WIDTH, "// ", "//   ")


def cpp_header(catalogue: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "// The similarities and positions of attention, as functions.",
        "//",
        f"// {NOTICE}",
        "#ifndef GNOMON_TORCH_TERMS_H_",
        "#define GNOMON_TORCH_TERMS_H_",
        "",
        "#include <gnomon/torch/term.h>",
        "#include <torch/types.h>",
        "",
        "#include <cstdint>",
        "#include <optional>",
        "#include <string>",
        "#include <vector>",
        "",
        "namespace gnomon {",
    ]
    for module in MODULES:
        lines += ["", f"namespace {module} {{"]
        for entry in terms_of(catalogue, module):
            arguments = arguments_of(entry)
            declared = ", ".join(argument.cpp for argument in arguments)
            lines += ["", *cpp_comment(entry, arguments)]
            lines.append(f"{module.capitalize()} {entry['class_name']}({declared});")
        lines += ["", f"}}  // namespace {module}"]
    lines += ["", "}  // namespace gnomon", "", "#endif  // GNOMON_TORCH_TERMS_H_", ""]
    return "\n".join(lines)


def setters(values: Iterable[tuple[Argument, str]]) -> str:
    """The TermBuilder calls that set a term's arguments."""
    return "".join(f'.{argument.method}("{argument.key}", {value})' for argument, value in values)


def cpp_source(catalogue: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        f"// {NOTICE}",
        "#include <gnomon/torch/terms.h>",
        "",
        "#include <utility>",
        "",
        '#include "ops/catalogue/term_builder.h"',
        "",
        "namespace gnomon {",
    ]
    for module in MODULES:
        lines += ["", f"namespace {module} {{"]
        for entry in terms_of(catalogue, module):
            arguments = arguments_of(entry)
            declared = ", ".join(argument.cpp.split(" = ")[0] for argument in arguments)
            kind = module.capitalize()
            chain = setters((a, value_of(a)) for a in arguments if not a.axis)
            axes = ", ".join(argument.name for argument in arguments if argument.axis)
            if axes:
                chain += f'.With("shape", std::vector<int64_t>{{{axes}}})'
            lines += ["", f"{kind} {entry['class_name']}({declared}) {{"]
            lines.append(f'return TermBuilder("{entry["name"]}"){chain}.Build<{kind}>();')
            lines.append("}")
        lines += ["", f"}}  // namespace {module}"]
    lines += ["", "}  // namespace gnomon", ""]
    return "\n".join(lines)


def in_struct(arguments: list[Argument]) -> list[Argument]:
    """The arguments that an encoding's function takes in its options struct."""
    options = [argument for argument in arguments if not argument.required]
    return options if len(options) > MOST_OPTIONS else []


def encoding_signature(entry: dict[str, Any]) -> list[str]:
    """The arguments in C++, with their defaults."""
    arguments = encoding_arguments(entry)
    if not in_struct(arguments):
        return [argument.cpp for argument in arguments]
    options = f"const {entry['class_name']}Options& options = {{}}"
    return [*(argument.cpp for argument in arguments if argument.required), options]


def options_struct(entry: dict[str, Any], options: list[Argument]) -> Iterator[str]:
    yield f"struct {entry['class_name']}Options {{"
    for option in options:
        yield from wrap(f"{option.name}: {option.meaning}.", WIDTH - 2, "  // ", "  //   ")
        has_value = option.cpp_default not in ("{}", "std::nullopt")
        default = f" = {option.cpp_default}" if has_value else ""
        yield f"  TORCH_ARG({option.cpp_type}, {option.name}){default};"
    yield "};"
    yield ""


def encodings_header(catalogue: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "// What is added to embeddings, as functions that make the modules.",
        "//",
        f"// {NOTICE}",
        "#ifndef GNOMON_TORCH_ENCODINGS_H_",
        "#define GNOMON_TORCH_ENCODINGS_H_",
        "",
        "#include <gnomon/torch/token_encoding.h>",
        "",
        "#include <cstdint>",
        "#include <optional>",
        "#include <string>",
        "#include <vector>",
        "",
        "namespace gnomon::nn {",
        "",
    ]
    for entry in terms_of(catalogue, "encoding"):
        arguments = encoding_arguments(entry)
        options = in_struct(arguments)
        if options:
            lines += options_struct(entry, options)
        lines += cpp_comment(entry, [a for a in arguments if a not in options])
        declared = ", ".join(encoding_signature(entry))
        lines += [f"TokenEncoding {entry['class_name']}({declared});", ""]
    lines += ["}  // namespace gnomon::nn", "", "#endif  // GNOMON_TORCH_ENCODINGS_H_", ""]
    return "\n".join(lines)


def encodings_source(catalogue: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        f"// {NOTICE}",
        "#include <gnomon/torch/encodings.h>",
        "",
        '#include "ops/catalogue/term_builder.h"',
        "",
        "namespace gnomon::nn {",
        "",
    ]
    for entry in terms_of(catalogue, "encoding"):
        arguments = encoding_arguments(entry)
        options = in_struct(arguments)
        value = {a.name: f"options.{a.name}()" if a in options else a.name for a in arguments}
        chain = setters((a, value[a.name]) for a in arguments if a.key)
        spec = f'TermBuilder("{entry["name"]}"){chain}.Build<Term>().spec'
        made = f"{spec}, dim"
        if entry["takes_causal"]:
            made = f"TokenEncodingOptions({made}).causal({value['causal']})"
        declared = ", ".join(part.split(" = ")[0] for part in encoding_signature(entry))
        lines.append(f"TokenEncoding {entry['class_name']}({declared}) {{")
        lines += [f"return TokenEncoding({made});", "}", ""]
    lines += ["}  // namespace gnomon::nn", ""]
    return "\n".join(lines)


def value_of(argument: Argument) -> str:
    return f"std::move({argument.name})" if argument.kind == "table" else argument.name


def run(*command: object, given: str | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        input=given,
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(str(word) for word in command)}: {done.stderr or done.stdout}")
    return done.stdout


def formatted(path: str, text: str) -> str:
    tools = pathlib.Path(sys.executable).parent
    if path.endswith(".py"):
        ruff = tools / "ruff"
        text = run(ruff, "format", "--stdin-filename", path, "-", given=text)
        return run(ruff, "check", "--quiet", "--fix", "--stdin-filename", path, "-", given=text)
    if path.endswith((".h", ".cc")):
        return run(tools / "clang-format", f"--assume-filename={path}", given=text)
    return text


def facades() -> dict[str, str]:
    """The expected contents of each file."""
    catalogue = gnomon.catalogue()
    files = {
        "python/gnomon/similarity.py": python_module(catalogue, "similarity"),
        "python/gnomon/position.py": python_module(catalogue, "position"),
        "include/gnomon/torch/terms.h": cpp_header(catalogue),
        "src/ops/catalogue/terms.cc": cpp_source(catalogue),
        "python/gnomon/nn/_encodings.py": encodings_module(catalogue),
        "include/gnomon/torch/encodings.h": encodings_header(catalogue),
        "src/ops/nn/encodings.cc": encodings_source(catalogue),
        PAGE_OF_MODULES: page_of_modules(catalogue),
        "docs/catalogue.md": run(sys.executable, "-m", "gnomon", "list", "--markdown"),
        "docs/gallery.md": run(sys.executable, "docs/figures/gallery.py", "--page"),
    }
    return {path: formatted(path, text) for path, text in files.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what is stale")
    check = parser.parse_args().check
    stale = []
    for path, text in facades().items():
        file = ROOT / path
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not check:
            file.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path} is stale; run: make facades" if check else f"wrote {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
