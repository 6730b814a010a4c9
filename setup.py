"""Builds the native core; everything else about the package stands in pyproject.toml.

The core is a plain shared library in C++20, which `shoal.collectives.core` loads. Where it cannot be compiled
the package installs without it, and trains over gloo.
"""

import hashlib
import platform
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

FOLDERS = ("csrc", "csrc/common", "csrc/transport", "csrc/algorithms")
SOURCES = sorted(source for folder in FOLDERS for source in glob(f"{folder}/*.cc"))
HEADERS = sorted(header for folder in FOLDERS for header in glob(f"{folder}/*.h"))


def build() -> str:
    """A hash of the sources: ranks whose cores were built from others do not form a group."""
    digest = hashlib.sha256()
    for path in (*SOURCES, *HEADERS):
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()[:12]


core = Extension(
    "shoal.collectives._core",
    sources=SOURCES,
    depends=HEADERS,
    include_dirs=["csrc"],
    define_macros=[("SHOAL_BUILD", f'"{build()}"')],
    language="c++",
    extra_compile_args=["-std=c++20", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(ext_modules=[core] if platform.system() == "Linux" else [])
