"""`shoal compare`."""

import argparse
import json
import random

import pytest

from shoal.cli.commands import add_command
from shoal.errors import RunError
from shoal.spec.run import Run, metrics_line
from shoal.spec.timeline import Kind, Lane, Span, Timeline

STEPS = 400


def spans(draw: random.Random, slower: float, ranks: int = 2):
    """Steps of about 10 ms: forward, backward with an all-reduce beside it, and a wait for its end."""
    group = tuple(range(ranks))
    for index in range(STEPS):
        start, noise = 0.02 * index, draw.gauss(1, 0.01)
        forward, backward, wait = 0.003 * noise, 0.005 * noise * (1 + slower), 0.002 * noise
        end = start + forward + backward + wait
        for rank in group:
            yield Span(rank, Lane.COMPUTE, Kind.STEP, str(index), start, end - start)
            yield Span(rank, Lane.COMPUTE, Kind.FORWARD, "", start, forward)
            yield Span(rank, Lane.COMPUTE, Kind.BACKWARD, "", start + forward, backward + wait)
            begun = start + forward + backward - 0.001
            name, size = "all_reduce:bucket 0", 1 << 20
            yield Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, name, begun, end - begun, size, group)
            yield Span(rank, Lane.COMPUTE, Kind.WAIT, name, end - wait, wait, size, group, "", "data")


@pytest.fixture
def make(tmp_path):
    def made(name: str, slower: float = 0.0, seed: int = 0, ranks: int = 2, rate: float = 1e6) -> str:
        run = Run.create(tmp_path / name, {"plan": f"dp={ranks}", "world_size": ranks})
        Timeline(spans(random.Random(seed), slower, ranks)).write(run.timeline)
        draw = random.Random(seed + 1)
        lines = [
            metrics_line(step, {"tokens_per_second": rate * draw.gauss(1, 0.01) / (1 + slower / 2)})
            for step in range(STEPS)
        ]
        run.metrics_file.write_text("".join(lines))
        return str(run.path)

    return made


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "compare")
    args = parser.parse_args(["compare", *words])
    return args.run(args)


def test_a_slower_backward_is_named_with_its_size(make, capsys):
    code = call(make("a"), make("b", slower=0.06, seed=9), "--json", "--check")
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)["differences"]}
    assert code == 1
    assert told["backward"]["verdict"] == "higher"
    assert told["backward"]["change"] == pytest.approx(0.06, abs=0.01)
    assert told["step"]["change"] == pytest.approx(0.03, abs=0.005)
    assert told["tokens/s"]["verdict"] == "lower"
    for equal in ("forward", "data", "all_reduce:bucket 0"):
        assert told[equal]["verdict"] == "no difference shown", equal


def test_equal_runs_show_no_difference(make, capsys):
    assert call(make("a"), make("b", seed=9), "--check") == 0
    text = capsys.readouterr().out
    assert "No difference is shown." in text
    assert "dp=2, 2 ranks, 398 steps compared" in text


def test_scaling_fits_a_law_and_looks_further(make, capsys):
    paths = [make(f"of-{n}", ranks=n, rate=100 * n / (1 + 0.1 * (n - 1)), seed=n) for n in (1, 2, 4)]
    assert call("--scaling", *paths, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [point["ranks"] for point in told["points"]] == [1, 2, 4]
    assert told["law"]["contention"] == pytest.approx(0.1, abs=0.02)
    assert told["law"]["further"]["8"] == pytest.approx(800 / 1.7, rel=0.1)
    assert told["points"][1]["communication"] == pytest.approx(0.2, abs=0.01)
    assert call("--scaling", *paths) == 0
    assert "By this law" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(make, tmp_path):
    with pytest.raises(RunError, match="1 run was given"):
        call(make("a"))
    empty = Run.create(tmp_path / "empty", {})
    with pytest.raises(RunError, match="no values in common"):
        call(str(empty.path), make("b"))
    with pytest.raises(RunError, match="number of ranks"):
        call("--scaling", str(empty.path))
