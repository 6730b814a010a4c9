"""Runs PyTorch's own tests of `torch.distributed` against a backend, beside another that is the measure.

    python tests/collectives/pytorch_suite.py --backend shoal --ranks 2
    python tests/collectives/pytorch_suite.py --backend shoal --ranks 3 --gate mpi --only all_to_all

The tests are those of the module `torch.testing._internal.distributed.distributed_test`, as installed. By
the name of the backend each decides whether and how it applies, most of them when the module is imported;
of an unknown backend nearly all would be skipped. So the module is imported with a name that it knows, the
gate, and then gets the real one, as a name that compares equal to the gate's as well. With the gate gloo,
all-to-all is skipped, which gloo could not do when these tests were written; with the gate mpi it is not.
`dist.monitored_barrier` has such a gate too: it asks for gloo by name, and is told here that this is
gloo's.

Each rank of each test is a process of its own, forked from this one, which has torch loaded and does no work
in it: starting a rank takes milliseconds, where a spawned one loads torch for seconds.

Exit code: 0 if the backend passes every test that the measure passes, 1 if not, 2 for a wrong argument. A
backend that is its own measure has to pass every test that does not skip itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import pathlib
import re
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

PLUGINS = {"shoal": "shoal.collectives"}
"""Backends that a module registers when it is imported."""


class Result(NamedTuple):
    """How a test ended.

    Attributes:
        verdict: passed, failed or skipped.
        seconds: How long it took.
        detail: The errors and output of a test that failed.
    """

    verdict: str
    seconds: float
    detail: str


class GatedName(str):
    """The name of a backend that compares equal to that of its gate as well."""

    def __new__(cls, name: str, gate: str) -> GatedName:
        gated = super().__new__(cls, name)
        gated._gate = gate
        return gated

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self._gate

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__
    _gate: str


class Suite:
    """PyTorch's tests, imported once and run against any backend.

    Args:
        gate: The backend whose tests are run.
        ranks: Number of ranks of each test.
        timeout: Seconds after which a test has failed.
    """

    def __init__(self, gate: str, ranks: int, timeout: int) -> None:
        os.environ.update(
            BACKEND=gate,
            WORLD_SIZE=str(ranks),
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(timeout),
            MASTER_ADDR="127.0.0.1",
        )
        self._gate = gate
        self._tests = importlib.import_module("torch.testing._internal.distributed.distributed_test")
        logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.CRITICAL)
        self._case = _forking_case(self._tests)

    def names(self, pattern: str) -> list[str]:
        """The tests whose names the pattern is found in, in their order."""
        names = unittest.TestLoader().getTestCaseNames(self._case)
        return [name for name in names if re.search(pattern, name)]

    def run(self, name: str, backend: str) -> Result:
        """Runs one test on a backend, in processes that end with it."""
        result = unittest.TestResult()
        began = time.monotonic()
        with tempfile.TemporaryFile() as output, self._known_as(backend):
            case = self._case(name)
            case.output = output
            with contextlib.redirect_stdout(io.StringIO()):  # who ends whom, which the errors say as well
                case.run(result)
            output.seek(0)
            printed = output.read().decode(errors="replace")
        seconds = time.monotonic() - began
        errors = "\n".join(text for _, text in result.failures + result.errors)
        if errors:
            return Result("failed", seconds, errors + printed)
        return Result("skipped" if result.skipped else "passed", seconds, "")

    @contextlib.contextmanager
    def _known_as(self, backend: str) -> Iterator[None]:
        """The tests, and processes forked meanwhile, use this backend."""
        distributed = importlib.import_module("torch.distributed")
        gated = distributed.monitored_barrier

        def monitored_barrier(*arguments: Any, **options: Any) -> Any:
            with mock.patch.object(distributed.Backend, "GLOO", backend):
                return gated(*arguments, **options)

        with (
            mock.patch.object(self._tests, "BACKEND", GatedName(backend, self._gate)),
            mock.patch.object(distributed, "monitored_barrier", monitored_barrier),
        ):
            yield


def _forking_case(tests: Any) -> type[Any]:
    """The tests as a test case that forks its ranks. What these print goes to the file `output`."""
    multiprocessing = importlib.import_module("torch.multiprocessing")

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        output: Any = None

        def setUp(self) -> None:
            super().setUp()
            sys.stdout.flush()
            self._start_processes(self._rank_process)

        def tearDown(self) -> None:
            processes = self.processes
            super().tearDown()
            for process in processes:
                process.join()
            pathlib.Path(self.file_name).unlink(missing_ok=True)

        def _rank_process(self, target: Any, args: tuple[Any, ...], **rest: Any) -> Any:
            output = self.output.fileno()
            return multiprocessing.get_context("fork").Process(
                target=_run_rank, args=(target, output, *args), **rest
            )

    return Case


def _run_rank(run: Any, output: int, *arguments: Any, **options: Any) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    run(*arguments, **options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run PyTorch's own distributed tests against a backend.")
    parser.add_argument("--backend", default="shoal", help="the backend under test")
    parser.add_argument("--against", default="gloo", help="the backend whose passes are asked for")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", metavar="PATTERN", help="tests whose names this is found in")
    parser.add_argument("--gate", default="gloo", choices=("gloo", "mpi"), help="whose tests are run")
    parser.add_argument("--timeout", type=int, default=60, help="seconds after which a test has failed")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(arguments)
    suite = Suite(options.gate, options.ranks, options.timeout)
    backends = list(dict.fromkeys((options.backend, options.against)))
    for backend in backends:
        if backend in PLUGINS:
            importlib.import_module(PLUGINS[backend])

    names = suite.names(options.only)
    if not names:
        print(f"no test has {options.only!r} in its name", file=sys.stderr)
        return 2
    outcomes = {}
    for name in names:
        outcomes[name] = {backend: suite.run(name, backend) for backend in backends}
        columns = [f"{each.verdict:<8}{each.seconds:5.1f} s" for each in outcomes[name].values()]
        print(*columns, name, sep="  ", flush=True)
        if outcomes[name][options.backend].verdict == "failed":
            print(f"{options.backend}, {name}:\n{outcomes[name][options.backend].detail}", file=sys.stderr)

    for backend in backends:
        count = Counter(each[backend].verdict for each in outcomes.values())
        print(f"{backend}: " + ", ".join(f"{count[each]} {each}" for each in ("passed", "failed", "skipped")))
    lacking = [
        name for name, each in outcomes.items() if lacks(*(each[backend].verdict for backend in backends))
    ]
    for name in lacking:
        print(f"{options.backend} should pass {name}")
    return 1 if lacking else 0


def lacks(verdict: str, measure: str | None = None) -> bool:
    """Whether a backend with this verdict should have passed, where its measure has the other."""
    return verdict == "failed" if measure is None else verdict != "passed" and measure == "passed"


if __name__ == "__main__":
    sys.exit(main())
