"""Sphinx's settings: make docs renders the pages of this folder and the docstrings."""

import re

import gnomon

project = "gnomon"
author = "the gnomon developers"
release = gnomon.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
# Quoted words are values.
smartquotes = False
html_theme = "furo"
html_title = f"gnomon {release}"

autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "ignore-module-all": True,
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
# Other projects' objects: their pages are not looked up.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(torch|collections|os|transformers)\..*")]


def escape_formulas(app, what, name, obj, options, lines):
    """Docstrings are plain text: |x|^2 is no substitution, a * b no emphasis, d_ no target."""
    for n, line in enumerate(lines):
        parts = re.split(r"(``.*?``)", line)
        parts[::2] = [re.sub(r"([|*\\]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
        lines[n] = "".join(parts)


def hide_private_bases(app, name, obj, options, bases):
    """Names the next public classes instead of those that have no page."""

    def is_private(base):
        return base.__module__.startswith("gnomon._") or base.__name__.startswith("_")

    while any(map(is_private, bases)):
        public = [base.__bases__ if is_private(base) else (base,) for base in bases]
        bases[:] = [base for group in public for base in group]


def setup(app):
    app.connect("autodoc-process-docstring", escape_formulas, priority=400)
    app.connect("autodoc-process-bases", hide_private_bases)
