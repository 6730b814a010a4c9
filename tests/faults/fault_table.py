"""The table of planted faults: small edits of the code, each with the tests that have to notice it.

A fault names no file: the text that it replaces is found wherever it stands in `shoal/` or `csrc/`, and it
has to stand there once. So files may move, and a fault whose text is gone is noticed.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Fault", "read_table", "sources_of"]

TABLES = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One edit that makes the code wrong.

    Attributes:
        name: Unique, says what is wrong.
        old: Text that stands in the sources once.
        new: What replaces it.
        tests: Files or folders of tests, or `file::test`, of which one has to fail.
        missed: Why no test notices it; empty where one has to.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    missed: str = ""

    def find(self, sources: dict[Path, str]) -> Path:
        """The file that holds the old text.

        Raises:
            ValueError: It stands nowhere, or more than once.
        """
        places = [path for path, text in sources.items() for _ in range(text.count(self.old))]
        if len(places) != 1:
            told = ", ".join(map(str, places)) or "nowhere"
            raise ValueError(f"the old text of {self.name} has to stand once, and stands in: {told}")
        return places[0]

    def change(self, text: str) -> str:
        """The text of its file with the fault in it."""
        return text.replace(self.old, self.new)


def read_table() -> list[Fault]:
    """All faults, in the order of the tables."""
    faults = []
    for path in sorted(TABLES.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text(encoding="utf-8")).items():
            fields["tests"] = tuple(fields["tests"])
            faults.append(Fault(name=name, **fields))
    return faults


def sources_of(root: Path) -> dict[Path, str]:
    """The text of every source, by its path within the repository."""
    paths = [*root.glob("shoal/**/*.py"), *root.glob("shoal/**/*.toml"), *root.glob("csrc/**/*.[hc]*")]
    return {
        path.relative_to(root): path.read_text(encoding="utf-8")
        for path in sorted(paths)
        if path.suffix in {".py", ".toml", ".h", ".cc"} and "build" not in path.relative_to(root).parts
    }
