"""Pages as files, which a browser opens without a server: each with its data, and the data beside it.

All scripts in one file, for pages that are opened from a disk: browsers load no modules from there.

Modules here import only from each other, by name, in the forms that `_IMPORT` and `_EXPORT` match; a test
holds them to this. Each becomes a function that returns what it exports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from shoal.analyze.diagnosis.run_follower import RunFollower
from shoal.errors import RunError, UserError
from shoal.web.app import Folder
from shoal.web.html import POLICY, page_html
from shoal.web.pages import PAGES, Page
from shoal.web.query import Query, encode

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z-]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) (\w+))", re.MULTILINE)


def bundle(sources: Mapping[str, str], entry: str) -> str:
    """Return one script that does what a module does, with the modules that it imports.

    Args:
        sources: The text of each module, by name.
        entry: Name of the module.
    """
    ordered: list[str] = []
    _visit(entry, sources, ordered)
    parts = ['"use strict";', "const modules = {};"]
    for name in ordered:
        text = sources[name]
        exported = [match[1] for match in _EXPORT.finditer(text)]
        text = _IMPORT.sub(lambda match: f'const {{{match[1]}}} = modules["{match[2]}"];\n', text)
        text = _EXPORT.sub("", text)
        parts.append(f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {", ".join(exported)} }};\n}})();')
    return "(() => {\n" + "\n".join(parts) + "\n})();\n"


def _visit(name: str, sources: Mapping[str, str], ordered: list[str]) -> None:
    """Add a module after those that it imports."""
    if name in ordered:
        return
    for match in _IMPORT.finditer(sources[name]):
        _visit(match[2], sources, ordered)
    ordered.append(name)


_MOST_STEPS = 5  # of a run whose timeline is exported
_HEAD = """<meta http-equiv="content-security-policy" content="{policy}">
<link rel="icon" href="static/fish.svg" type="image/svg+xml">
<link rel="stylesheet" href="static/style.css">
<script defer src="static/{page}.js"></script>"""


def export(path: Path, directory: Path, names: Sequence[str] = ()) -> list[Path]:
    """Write each page as a file into a directory; return their paths.

    Pages of a run show one run: the one that is given, or the newest of a folder. Without a run they are left
    out. `data/` holds what a page shows as JSON.

    Args:
        path: A run, or a folder of runs.
        directory: Directory for the files; made if it does not exist.
        names: Names of the pages; all if there are none.

    Raises:
        RunError: The path is neither a run nor a folder, or there is no such page.
        OSError: A file cannot be written.
        ShoalError: A file of the run is malformed.
    """
    unknown = set(names) - set(PAGES)
    if unknown:
        raise RunError(
            f"there is no page {min(unknown)!r}", possible=", ".join(PAGES), change="choose some of these"
        )
    run = Folder(path).open()
    shown = [
        page
        for page in PAGES.values()
        if (not names or page.name in names) and (run is not None or not page.needs_run)
    ]
    static = files("shoal.web").joinpath("static")
    sources = {
        each.name.removesuffix(".js"): each.read_text(encoding="utf-8")
        for each in static.iterdir()
        if each.name.endswith(".js")
    }
    for folder in ("static", "data"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    for name in ("style.css", "fish.svg"):
        (directory / "static" / name).write_bytes(static.joinpath(name).read_bytes())
    written = []
    for page in shown:
        (directory / "static" / f"{page.name}.js").write_text(bundle(sources, page.name), encoding="utf-8")
        text = encode(_answers(page, run))
        (directory / "data" / f"{page.name}.json").write_text(text, encoding="utf-8")
        target = directory / f"{page.name}.html"
        target.write_text(_html(page, shown, text), encoding="utf-8")
        written.append(target)
    return written


def _html(page: Page, pages: Sequence[Page], data: str) -> str:
    return page_html(
        page,
        address=lambda name: f"{name}.html",
        pages=pages,
        scripts=_HEAD.format(policy=POLICY, page=page.name),
        extra=f'<script type="application/json" id="inlined">{data}</script>',
    )


def _answers(page: Page, run: RunFollower | None) -> dict[str, object]:
    """Return the data of a page by query, each written as `name=value&...` in the order of the names."""
    queries = list(page.exported)
    if page.needs_run and run is not None:
        run.refresh()
        if run.metrics.is_sample:
            run.refresh()
        if page.name in ("timeline", "ddp"):
            queries += _newest_steps(run)
    found: dict[str, object] = {}
    for values in queries:
        try:
            found[_key(values)] = page.data(run if page.needs_run else None, Query(values))
        except UserError as error:
            found[_key(values)] = {
                "error": error.given,
                "possible": error.possible,
                "change": error.change,
            }
    return found


def _newest_steps(run: RunFollower) -> list[Mapping[str, str]]:
    last, first = run.files.last_step(), run.files.first_step()
    if last is None or first is None:
        return []
    return [{"step": str(step)} for step in range(last, max(first, last - _MOST_STEPS + 1) - 1, -1)]


def _key(values: Mapping[str, str]) -> str:
    return "&".join(f"{name}={values[name]}" for name in sorted(values))
