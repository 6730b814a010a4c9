"""Which release of Shoal runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["release"]


def release() -> str:
    """Return the version of the installed package; "not installed" if Shoal runs from its tree alone."""
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "not installed"
