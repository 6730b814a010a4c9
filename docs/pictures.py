"""Draws the pictures of the pages: `python docs/pictures.py` writes docs/pictures/*.svg.

Algorithms of collectives are drawn from shoal/predict/cost/collectives/reference_execution.py, what is
parallel inside a layer from what the code of shoal/parallel does when it runs (docs/drawn/watched.py),
pipeline schedules from their tables, packages from their imports. A test holds the files to it.
"""

from __future__ import annotations

from pathlib import Path

from drawn import attention, collectives, packages, products, ranks, schedules

__all__ = ["FOLDER", "pictures"]

FOLDER = Path(__file__).resolve().parent / "pictures"


def pictures() -> dict[str, str]:
    """The text of every picture, by the name of its file."""
    return {
        name: drawn
        for drawn_by in (collectives, products, attention, ranks, schedules, packages)
        for name, drawn in drawn_by.pictures().items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawn in pictures().items():
        (FOLDER / name).write_text(drawn, encoding="utf-8")
