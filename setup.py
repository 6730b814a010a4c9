"""Builds the native core; everything else about the package stands in pyproject.toml.

The core is a plain shared library in C++20, which `shoal.collectives.core` loads. Where it cannot be compiled
the package installs without it, and trains over gloo.
"""

import platform
from glob import glob

from setuptools import Extension, setup

FOLDERS = ("csrc", "csrc/common", "csrc/transport", "csrc/algorithms")

core = Extension(
    "shoal.collectives._core",
    sources=sorted(source for folder in FOLDERS for source in glob(f"{folder}/*.cc")),
    depends=sorted(glob("csrc/**/*.h", recursive=True)),
    include_dirs=["csrc"],
    language="c++",
    extra_compile_args=["-std=c++20", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(ext_modules=[core] if platform.system() == "Linux" else [])
