"""Sphinx settings. `make docs` renders the pages of this folder and the docstrings."""

import inspect
import pathlib
import re
import subprocess
import sys

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.utils.math import latex2mathml
from sphinx.pycode import ModuleAnalyzer

import gnomon
import gnomon.lab.models

project = "gnomon"
author = "the gnomon developers"
copyright = author
release = gnomon.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# Quoted words are values, so quotation marks must stay straight.
smartquotes = False
html_theme = "furo"
html_title = f"gnomon {release}"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"
exclude_patterns = ["figures/*.py"]

autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "ignore-module-all": True,
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Puts each parameter on its own line if the signature does not fit on one.
maximum_signature_line_length = 76
napoleon_use_ivar = True
# Other projects' objects and private objects have no pages here.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|collections|os|transformers)\..*|Tensor|gnomon\.(.*\.)?_.*")
]


def escape_formulas(app, what, name, obj, options, lines):
    """Treats docstrings as plain text, so that |x|^2, a * b and d_ are not markup."""
    for n, line in enumerate(lines):
        parts = re.split(r"(``.*?``)", line)
        parts[::2] = [re.sub(r"([|*\\]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
        lines[n] = "".join(parts)


def hide_private_bases(app, name, obj, options, bases):
    """Links to the nearest public base classes instead of private ones, which have no page."""

    def is_private(base):
        module = base.__module__
        hidden = module.startswith("gnomon.") and "._" in module
        return hidden or base.__name__.startswith("_")

    while any(map(is_private, bases)):
        public = [base.__bases__ if is_private(base) else (base,) for base in bases]
        bases[:] = [base for group in public for base in group]
    bases[:] = [base for base in bases if base is not object] or [object]


def write_mathml(translator, node):
    """Renders formulas as MathML, which browsers support without scripts or downloads."""
    block = isinstance(node, nodes.math_block)
    mathml = latex2mathml.tex2mathml(node.astext(), as_block=block)
    mathml = mathml.replace("<mtable", '<mtable displaystyle="true"')
    translator.body.append(f'<div class="math">{mathml}</div>' if block else mathml)
    raise nodes.SkipNode


def break_long_names(app, doctree, docname):
    """Lets long names in tables break after punctuation, so that tables fit."""
    for entry in doctree.findall(nodes.entry):
        for literal in list(entry.findall(nodes.literal)):
            parts = re.split(r"(?<=[_:/.+=,\[])(?=\w)", literal.astext())
            if len(literal.astext()) < 20 or len(parts) == 1:
                continue
            del literal[:]
            for part in parts:
                literal += [nodes.Text(part), nodes.raw("", "<wbr>", format="html")]


#: Functions whose overloads or types make the generated signatures unreadable.
WITHOUT_TYPES = (
    "gnomon.attention",
    "gnomon.attention_weights",
    "gnomon.graph_attention",
    "gnomon.varlen_attention",
    "gnomon.distributed.context_parallel_attention",
)


def write_signature(app, what, name, obj, options, signature, return_annotation):
    """Omits the types of the functions above, and shortens numbers in all signatures."""
    if name in WITHOUT_TYPES:
        own = inspect.signature(obj)
        plain = [p.replace(annotation=p.empty) for p in own.parameters.values()]
        signature, return_annotation = str(inspect.Signature(plain)), ""
    short = (signature or "").replace("5.960464477539063e-08", "2**-24")
    return short or signature, return_annotation


class ProgramHelp(Directive):
    """``.. program-help:: train --task images`` shows the command's own help, with its options as
    tables."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        command = [sys.executable, "-m", "gnomon", *self.arguments[0].split(), "--help"]
        text = subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
        if "\nUsage: " not in text:  # commands written in Python
            return [nodes.literal_block(text, text, language="text")]
        # If an option is too long, its description is on the next line.
        text = re.sub(r"^(  \S.*)\n {20,}(?=\S)", r"\1  ", text, flags=re.MULTILINE)
        heading, rows, found = "", [], []
        for line in [*text.splitlines(), ":"]:
            if row := re.match(r"  (-\S.*?) {2,}(\S.*)", line):
                rows.append(row.groups())
            elif re.fullmatch(r"[\w ]*:", line):
                found += [option_table(heading, rows)] if rows else []
                heading, rows = line.rstrip(":"), []
        return [nodes.paragraph("", text.partition("\n")[0]), *found]


def option_table(heading, rows):
    group = nodes.tgroup(cols=2)
    group += [nodes.colspec(colwidth=width) for width in (35, 65)]
    head, body = nodes.thead(), nodes.tbody()
    group += [head, body]
    for section, left, right in [
        (head, nodes.Text(heading), "meaning"),
        *((body, nodes.literal("", option), meaning) for option, meaning in rows),
    ]:
        row = nodes.row()
        row += [
            nodes.entry("", nodes.paragraph("", "", left)),
            nodes.entry("", nodes.paragraph("", right)),
        ]
        section += row
    table = nodes.table(classes=["colwidths-given"])
    table += group
    return table


def analyze_without_overloads(self, analyze=ModuleAnalyzer.analyze):
    """Analyzes a module without its overloads, so that each function has one signature."""
    analyze(self)
    self.overloads = {}


ModuleAnalyzer.analyze = analyze_without_overloads

# Users see a package with private files as a single module, so its page treats the files as one.
for package in (gnomon.nn, gnomon.lab.models):
    name, path = package.__name__, inspect.getfile(package)
    sources = [file.read_text() for file in sorted(pathlib.Path(path).parent.glob("*.py"))]
    ModuleAnalyzer.cache["module", name] = ModuleAnalyzer.for_string("\n".join(sources), name, path)


def setup(app):
    app.connect("doctree-resolved", break_long_names)
    app.add_html_math_renderer("mathml", (write_mathml, None), (write_mathml, None))
    app.add_directive("program-help", ProgramHelp)
    app.connect("autodoc-process-docstring", escape_formulas, priority=400)
    app.connect("autodoc-process-signature", write_signature)
    app.connect("autodoc-process-bases", hide_private_bases)
