"""The site of these pages, which `make docs` builds by Sphinx.

The pages are plain Markdown, and read as well without it. Only the site has the contents at the side, which
are the links of index.md by its headings, and the docstrings of the names that the reference lists.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import shoal
from shoal.web import export

project = "Shoal"
release = shoal.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4
"""Headings down to this level have the anchors that links name, as on a git host."""

html_theme = "furo"
html_title = f"Shoal {release}"
html_copy_source = False

autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

_SECTION = re.compile(r"^## (?P<caption>.+)\n(?P<links>(?:(?!## ).*\n)*)", re.MULTILINE)
_PAGE = re.compile(r"\]\((?!https?:|\.\.)(?P<page>[^)#]+)\.md\)")
_NAMES = re.compile(r"<!-- generated: api: (?P<names>.+?) -->\n.*?<!-- end -->", re.DOTALL)
_OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<file>(?:\.\./)+(?:benchmarks/)?[A-Za-z_]+\.md)\)")


def contents(index: str) -> str:
    """A table of contents for each heading of the index, of the pages that it links to."""
    tables = []
    for section in _SECTION.finditer(index):
        pages = "\n".join(match["page"] for match in _PAGE.finditer(section["links"]))
        tables.append(f"```{{toctree}}\n:hidden:\n:caption: {section['caption']}\n\n{pages}\n```\n")
    return "\n".join(tables)


def documented(names: str) -> str:
    """What has Sphinx write the docstrings of these names."""
    lines = []
    for name in names.split():
        last = name.rpartition(".")[2]
        kind = "exception" if last.endswith("Error") else "class" if last[0].isupper() else "function"
        members = [] if kind == "function" else ["   :members:"]
        lines += [f".. auto{kind}:: {name}", *members, ""]
    return "```{eval-rst}\n" + "\n".join(lines) + "```"


def complete(_: Sphinx, page: str, source: list[str]) -> None:
    """Adds to a page what only the site has, and makes files of links that lead out of docs/."""
    text = _NAMES.sub(lambda match: documented(match["names"]), source[0])
    text = _OUTSIDE.sub(lambda match: f"{{download}}`{match['text']} <{match['file']}>`", text)
    source[0] = text + "\n" + contents(text) if page == "index" else text


def mark_code(_: Sphinx, _kind: str, _name: str, _documented: Any, _options: Any, lines: list[str]) -> None:
    """Makes reStructuredText's literals of a docstring's backticks, also before an s, as of several."""
    lines[:] = re.sub(r"`([^`]+)`", r"``\1``\\ ", "\n".join(lines)).split("\n")


def add_moving_pictures(app: Sphinx, error: Exception | None) -> None:
    """Writes the pages of `shoal web` that need no run beside the others."""
    if error is None and app.builder.format == "html":
        with tempfile.TemporaryDirectory() as without_runs:
            export(Path(without_runs), Path(app.outdir) / "web", ["schedules", "collectives"])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", complete)
    app.connect("build-finished", add_moving_pictures)
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before Napoleon reads it
