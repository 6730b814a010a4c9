"""`shoal simulate`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.cli.main import main
from shoal.predict.cost.time import workload_on
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan
from shoal.spec.workload import shape, to_json
from shoal.units import format_seconds

H100 = Cluster.parse("dgx-h100:8")
GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "simulate.md"
PLAN = "dp=2,tp=2,pp=2,shard=zero1,precision=bf16"
WORDS = ("--plan", PLAN, "--model", "gpt3-1.3b", "--cluster", "dgx-h100:8", "--batch", "16")


def printed(capsys, *words):
    assert main(["simulate", *map(str, words)]) == 0
    return capsys.readouterr()


def test_json_has_the_figures_of_the_library(capsys):
    found = json.loads(printed(capsys, *WORDS, "--json").out)
    simulated = simulate(workload_on(H100, shape("gpt3-1.3b")), H100, Plan.parse(PLAN), 16)
    assert found["step_seconds"] == simulated.seconds
    assert found["tokens_per_second"] == pytest.approx(16 * found["sequence"] / simulated.seconds)
    assert found["tokens_per_second_per_device"] == pytest.approx(found["tokens_per_second"] / 8)
    assert found["mfu"] == simulated.mfu
    assert found["fits"] is True
    assert sum(found["breakdown"]["parts"].values()) == pytest.approx(found["breakdown"]["wall"])
    assert [each["place"] for each in found["memory"]] == [0, 1]
    for each in found["memory"]:
        assert each["peak_bytes"] == pytest.approx(sum(each["parts"].values()))


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_plan_that_does_not_fit_is_predicted_and_ends_with_exit_code_2(capsys, form):
    words = (
        "--plan",
        "dp=8,precision=bf16",
        "--model",
        "llama3-70b",
        "--cluster",
        "dgx-h100",
        "--batch",
        "16",
    )
    assert main(["simulate", *words, *form]) == 2
    captured = capsys.readouterr()
    if form:
        assert json.loads(captured.out)["fits"] is False
    else:
        assert "DOES NOT FIT" in captured.out
    assert captured.err.startswith("shoal: the Plan does not fit: place 0 needs 1.")
    assert "shoal plan --model llama3-70b --cluster dgx-h100 --batch 16" in captured.err


def test_the_text_says_time_rate_convention_memory_and_where_the_time_goes(capsys):
    out = printed(capsys, *WORDS).out
    for words in ("step ", "tokens/s/device", "MFU counts", "fits", "bubble", "exposed communication"):
        assert words in out
    assert "memory of place" in out


def test_without_a_number_a_cluster_has_as_many_devices_as_the_plan_has_ranks(capsys):
    words = ("--plan", "dp=16,precision=bf16", "--model", "gpt3-125m", "--cluster", "dgx-h100")
    found = json.loads(printed(capsys, *words, "--batch", 16, "--json").out)
    assert found["devices"] == 16


def test_a_trace_and_a_picture_are_written(capsys, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    err = printed(capsys, *WORDS, "--trace", trace, "--svg", picture).err
    assert "trace written" in err
    assert "picture written" in err
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 4}
    assert "rank 1" in "".join(ElementTree.parse(picture).getroot().itertext())


def test_a_traced_model_is_read_from_its_file(capsys, tmp_path):
    path = tmp_path / "model.json"
    path.write_text(to_json(workload_on(H100, shape("gpt3-1.3b"))))
    words = [str(path) if word == "gpt3-1.3b" else word for word in WORDS]
    from_file = json.loads(printed(capsys, *words, "--json").out)
    assert from_file["step_seconds"] == json.loads(printed(capsys, *WORDS, "--json").out)["step_seconds"]


def test_a_longer_sequence_can_be_asked_for(capsys):
    found = json.loads(printed(capsys, *WORDS, "--sequence", 4096, "--json").out)
    assert found["sequence"] == 4096


@pytest.mark.parametrize(
    ("given", "wanted", "said"),
    [
        ("gpt3-1.3b", "gpt3-1.4b", "did you mean 'gpt3-1.3b'"),
        ("gpt3-1.3b", "nowhere.json", "cannot be read"),
        ("dgx-h100:8", "dgx-h200:8", "did you mean"),
        ("dgx-h100:8", "dgx-h100:16", "is for 8 ranks"),
        (PLAN, "dp=2,tb=4", "not one of its settings"),
        (PLAN, "dp=1,pp=8,virtual=9,schedule=interleaved,precision=bf16", "cannot be cut into 72 stages"),
        ("16", "15", "does not divide over"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_what_to_change(capsys, given, wanted, said):
    assert main(["simulate", *(wanted if word == given else word for word in WORDS)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "change:" in err


def test_a_prediction_needs_neither_torch_nor_numpy():
    words = ["simulate", *WORDS, "--json"]
    code = (
        "import sys; from shoal.cli.commands import add_command; import argparse; "
        "parser = argparse.ArgumentParser(); add_command(parser.add_subparsers(), 'simulate'); "
        f"args = parser.parse_args({words!r}); args.run(args); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_commands_of_the_guide_work(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^shoal (simulate .+)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)) == 0


@pytest.mark.parametrize(
    "plan", [PLAN, "dp=2,pp=4,schedule=zb-v,shard=zero1,precision=bf16", "dp=8,shard=zero1"]
)
def test_the_picture_says_the_step_and_the_bubble_of_the_table(capsys, tmp_path, plan):
    path = tmp_path / "picture.svg"
    words = [plan if word == PLAN else word for word in WORDS]
    found = json.loads(printed(capsys, *words, "--svg", path, "--json").out)["breakdown"]
    text = "".join(ElementTree.parse(path).getroot().itertext())
    assert f"bubble {found['parts']['bubble'] / found['wall']:.1%}," in text
    assert f"a step of {format_seconds(found['wall'])}," in text


def test_a_step_has_a_band_that_says_what_it_stands_on(capsys):
    found = json.loads(printed(capsys, *WORDS, "--json").out)
    assert found["step_seconds_low"] < found["step_seconds"] < found["step_seconds_high"]
    assert "held-out rows" in found["validated"]
    low, high = (format_seconds(found[f"step_seconds_{end}"]) for end in ("low", "high"))
    assert f"90 % within {low} to {high}" in printed(capsys, *WORDS).out
