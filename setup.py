"""Builds the native core; everything else about the package stands in pyproject.toml.

The core is a plain shared library in C++20, which `shoal.collectives.ctypes_core` loads with ctypes. It
depends on no Python's ABI, so one wheel fits every Python 3. Where the core cannot be compiled the package
installs without it, and trains over gloo; a wheel that is built so is for any platform.
"""

import hashlib
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

CORE = "shoal/collectives/_core.so"
FOLDERS = ("csrc", "csrc/common", "csrc/codecs", "csrc/transport", "csrc/algorithms")
SOURCES = sorted(source for folder in FOLDERS for source in glob(f"{folder}/*.cc"))
HEADERS = sorted(header for folder in FOLDERS for header in glob(f"{folder}/*.h"))


class BuildCore(build_ext):
    """Compiles the core, and leaves none where that fails: not the one of an earlier build either."""

    def get_ext_filename(self, fullname):
        """The path for a dotted name, without the tag of a Python."""
        return f"{fullname.replace('.', '/')}.so"

    def run(self):
        """As `build_ext`."""
        self.failed = False
        super().run()
        if self.failed and self.inplace:
            Path(CORE).unlink(missing_ok=True)

    def build_extension(self, extension):
        """As `build_ext`, which goes on without the core where this raises; all cores compile."""
        compile_all = self.compiler.compile

        def compile_each(sources, **options):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                made = pool.map(lambda source: compile_all([source], **options), sources)
                return [file for files in made for file in files]

        self.compiler.compile = compile_each
        try:
            super().build_extension(extension)
        except (CCompilerError, BaseError):
            self.failed = True
            Path(self.build_lib, CORE).unlink(missing_ok=True)
            self.warn(
                "Shoal is built without its native core, so ranks on CPUs communicate through gloo, which is "
                "slower. For the core, install a C++20 compiler (apt-get install g++), then Shoal again."
            )
            raise


class BuildWheel(bdist_wheel):
    """Tags the wheel for every Python 3, of this platform where the core is in it."""

    def get_tag(self):
        """Interpreter, ABI and platform."""
        has_core = Path(self.bdist_dir, CORE).exists()
        return ("py3", "none", super().get_tag()[2] if has_core else "any")


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

setup(
    ext_modules=[core] if platform.system() == "Linux" else [],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": BuildWheel},
)
