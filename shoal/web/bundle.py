"""All scripts in one file, for pages that are opened from a disk: browsers load no modules from there.

Modules here import only from each other, by name, in the forms that `_IMPORT` and `_EXPORT` match; a test
holds them to this. Each becomes a function that returns what it exports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
