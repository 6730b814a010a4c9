"""The acceptance run of a GPU: its control flow with stand-ins of rows, its page, and rows tried on a CPU."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_peers
import gpu_steps
from gpu_outcome import OUTCOMES, Line, newest, read_lines
from gpu_page import NOT_YET, page, status
from gpu_rows import ROWS
from gpu_simulated import SIMULATED

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = gpu_peers.Shape("tiny", 2, 16, 2)


def started(*arguments, **options):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, **options)


def run(*arguments, **options):
    process = started(*arguments, **options)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def is_running(process):
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    code, output, errors = run("--simulated", "--out", folder)
    return code, output, errors, {line.name: line for line in read_lines(folder / "gpu.jsonl")}, folder


def test_each_failure_costs_its_own_row_alone(simulated):
    code, _, _, lines, _ = simulated
    assert code == 1
    assert list(lines) == [row.name for row in SIMULATED]
    outcomes = {name: line.outcome for name, line in lines.items()}
    assert outcomes == {
        "right": "right",
        "wrong": "wrong",
        "short": "short",
        "raises": "failed",
        "hangs": "hung",
        "takes-all": "no memory",
        "device-memory": "no memory",
        "killed": "failed",
        "exits": "failed",
        "leaves": "right",
        "lacks": "lacking",
        "an-extra": "lacking",
        "too-long": "not run",
        "after-all": "right",
    }
    assert set(outcomes.values()) == set(OUTCOMES)
    assert "given 3, wanted 4" in lines["wrong"].reason
    assert "SIGSEGV" in lines["killed"].reason
    assert "exit code 3" in lines["exits"].reason
    assert "no_such_package" in lines["an-extra"].reason


def test_what_a_row_found_before_it_failed_is_kept(simulated):
    lines = simulated[3]
    for name in ("raises", "hangs", "short"):
        assert lines[name].findings
    assert lines["short"].findings[0][1] == {"ms": 30.0}
    assert any("illegal memory access" in text for text in lines["raises"].log)


def test_nothing_of_a_row_is_left_behind(simulated):
    lines = simulated[3]
    told = [text for name in ("hangs", "leaves") for text, _ in lines[name].findings]
    children = [int(match[1]) for text in told if (match := re.fullmatch(r"child (\d+)", text))]
    assert len(children) == 2
    assert not any(is_running(child) for child in children)


def test_a_hang_ends_at_the_budget_of_its_row(simulated):
    line = simulated[3]["hangs"]
    assert line.budget <= line.seconds
    assert f"{line.budget:g} s" in line.reason


def test_the_page_tells_the_worst_first_and_how_to_go_on(simulated):
    _, output, errors, _, folder = simulated
    assert (folder / "gpu.md").read_text("utf-8") == output.removesuffix("\n")
    first = output.partition("## Stand-ins")[0]
    shown = re.findall(r"^\| ([a-z ]+) \| [\w-]+ \| .+ \|$", first, re.MULTILINE)
    order = list(OUTCOMES)
    assert shown[0] == "outcome"
    assert shown[1:] == sorted(shown[1:], key=order.index)
    assert len(shown) == 1 + 11
    assert f"ARGS='--only too-long --simulated --out {folder}'" in errors


def test_paths_of_the_machine_are_in_no_page(simulated):
    assert str(ROOT) not in simulated[1]
    assert sys.prefix not in simulated[1]


def test_lines_are_there_when_a_row_ends_and_a_signal_ends_all_rows(tmp_path):
    process = started("--simulated", "--out", tmp_path, "--logs", tmp_path / "logs", "--from", 5)
    file, until = tmp_path / "logs" / "001.json", time.monotonic() + 120
    while not (file.is_file() and "child" in file.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    child = int(re.search(r"child (\d+)", file.read_text())[1])
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    lines = read_lines(tmp_path / "gpu.jsonl")
    assert [line.number for line in lines] == list(range(5, 15))
    assert {line.outcome for line in lines} == {"not run"}
    assert "stopped by a signal" in lines[0].reason
    assert not is_running(child)
    assert "10 rows were not run" in errors
    assert process.returncode == 1


def test_another_call_goes_on_and_the_page_has_both(tmp_path):
    assert run("--simulated", "--out", tmp_path, "--only", "wrong,right")[0] == 1
    assert run("--simulated", "--out", tmp_path, "--only", "More stand-ins")[0] == 0
    assert [line.number for line in read_lines(tmp_path / "gpu.jsonl")] == [1, 2, 14]
    text = (tmp_path / "gpu.md").read_text("utf-8")
    assert "3 rows: 2 right, 1 wrong" in text


def test_rows_that_do_not_fit_into_the_time_are_not_begun(tmp_path):
    code, *_ = run("--simulated", "--out", tmp_path, "--minutes", 0.1, "--from", 4)
    lines = {line.name: line for line in read_lines(tmp_path / "gpu.jsonl")}
    assert code == 1
    assert lines["hangs"].outcome == "hung"  # its 3 s fit into 6 s
    assert {line.outcome for name, line in lines.items() if line.budget > 6} <= {"not run", "lacking"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--from", 99), "rows have the numbers 1 to"),
        (("--only", "nonsense"), "there is no row or section nonsense"),
        (("--only", "right", "--from", 2), "names no row from number 2 on"),
        (("--only", " , "), "names no row"),
        (("--minutes", 0), "give a time above 0"),
        (("--minutes", "nan"), "give a time above 0"),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(tmp_path, arguments, text):
    code, output, errors = run("--simulated", "--out", tmp_path, *arguments)
    assert code == 2
    assert not output
    assert text in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="a GPU is here")
def test_without_a_gpu_it_says_so(tmp_path):
    code, _, errors = run("--out", tmp_path)
    assert code == 2
    assert "there is no GPU" in errors


def test_a_package_that_every_row_needs_is_named(tmp_path):
    # An interpreter without site-packages has no torch.
    command = [sys.executable, "-S", str(ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path)]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "has no torch" in done.stderr


def line(name, outcome, number=1, commit="abc", date="2026-01-02T03:04:05+00:00", machine="a GPU"):
    told = {"number": number, "name": name, "subject": "S", "outcome": outcome, "seconds": 1.0, "budget": 9.0}
    return Line(**told, commit=commit, date=date, machine=machine)


def test_a_torn_last_line_is_left_out_and_the_newest_line_of_a_row_counts(tmp_path):
    file = tmp_path / "gpu.jsonl"
    lines = [line("a", "failed"), line("b", "wrong", 2), line("a", "right"), line("b", "not run", 2)]
    file.write_text("".join(each.json() + "\n" for each in lines) + lines[0].json()[:40], "utf-8")
    found = newest([*read_lines(file), line("a", "lacking")])
    assert [(each.name, each.outcome) for each in found] == [("a", "right"), ("b", "wrong")]


def test_a_file_with_strange_lines_takes_the_next_run(tmp_path):
    file = tmp_path / "gpu.jsonl"
    good = json.loads(line("a", "right").json())
    strange = [{**good, "more": 1}, {"number": 1}, {**good, "outcome": "slow"}, {**good, "reason": 3}, [], 5]
    text = "\n".join(json.dumps(each) for each in (good, *strange)) + "\n<<<<<<< HEAD\n"
    file.write_bytes(text.encode() + b"\xff\xfe\n" + json.dumps(good)[:30].encode())
    code, _, errors = run("--simulated", "--out", tmp_path, "--only", "right")
    assert code == 0
    assert [each.name for each in read_lines(file)] == ["a", "right"]
    assert "holds no result in line 2, 3, 4, 5, 6, ..." in errors
    assert "2 rows: 2 right" in (tmp_path / "gpu.md").read_text("utf-8")


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    with started("--simulated", "--out", tmp_path, "--only", "hangs") as first:
        until = time.monotonic() + 120
        while not (tmp_path / "gpu.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.02)
        code, _, errors = run("--simulated", "--out", tmp_path, "--only", "right")
        first.communicate(timeout=120)
    assert code == 2
    assert "another run writes" in errors


def test_a_terminal_that_is_closed_ends_nothing(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--simulated", "--out", str(tmp_path)]
    command += ["--from", "5", "--only", "hangs,right,after-all"]

    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does

    read, write = os.pipe()
    os.close(read)
    options = {"stdout": write, "stderr": write, "preexec_fn": ignore}  # nobody reads
    with subprocess.Popen(command, **options) as process:
        until = time.monotonic() + 120
        while not (tmp_path / "gpu.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGHUP)
        process.wait(timeout=120)
    os.close(write)
    assert [each.outcome for each in read_lines(tmp_path / "gpu.jsonl")] == ["hung", "right"]


def test_the_status_says_what_ran_when_and_where():
    assert status([]) == NOT_YET
    told = status([line("a", "right"), line("b", "wrong", 2, commit="old", date="2025-01-01T00:00:00+00:00")])
    assert told.startswith("Run on 2026-01-02 on a GPU, at commit abc. 2 rows: 1 right, 1 wrong.")
    assert told.endswith("Of these 1 row is of another commit or machine: a GPU, at commit old.")
    assert status([line("a", "not run"), line("b", "lacking", 2)]) == NOT_YET


def test_rows_of_another_machine_say_so():
    lines = [
        line("a", "right"),
        line("b", "right", 2, machine="another GPU", date="2025-01-01T00:00:00+00:00"),
    ]
    text = page(lines)
    assert "Run on 2026-01-02 on a GPU" in text
    assert "1 row is of another commit or machine: another GPU, at commit abc." in text
    assert re.search(r"^\| 2 \| b \|.*on another GPU, at commit abc \|$", text, re.MULTILINE)


def test_markup_and_control_characters_in_a_reason_change_no_page():
    text = page([dataclasses.replace(line("a", "wrong"), reason="List<float> a|b `c` *d*\n\x1b[31m")])
    assert r"| wrong | a | List\<float\> a\|b \`c\` \*d\* ?\[31m |" in text


def test_the_committed_page_is_that_of_the_committed_lines():
    lines = read_lines(ROOT / "benchmarks" / "data" / "gpu.jsonl")
    assert (ROOT / "benchmarks" / "gpu.md").read_text("utf-8") == page(lines)


def test_every_row_has_a_function_and_a_budget_that_fits():
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in (*ROWS, *SIMULATED):
        module, _, function = row.function.partition(":")
        source = (ROOT / "benchmarks" / f"{module}.py").read_text("utf-8")
        assert f"def {function}(" in source
        assert json.loads(json.dumps(dict(row.arguments))) is not None
        assert row.seconds > 0
        assert re.fullmatch(r"[\w=.-]+", row.name)


def test_a_trial_on_the_cpu_runs_rows_of_steps(tmp_path):
    names = "125m-1024x1-and-plain-torch,parts-of-125m-none"
    code, output, errors = run("--device", "cpu", "--out", tmp_path, "--only", names)
    assert code == 0, errors
    assert "a trial of the program, no measurement" in output
    assert "tiny, 2 layers, 64 x 2, plain torch" in output


def test_the_profile_has_just_its_own_steps():
    made = []

    def step():
        made.append(torch.ones(256, 256) @ torch.ones(256, 256))

    busy, wall = gpu_steps.profiled(step, CPU, steps=3)
    assert len(made) == 3
    assert 0 < busy <= wall


EAGER = [name for name in gpu_peers.PEERS if name.endswith(("eager", "compile=none"))]


@pytest.mark.parametrize("name", EAGER)
def test_eager_peers_make_steps(name):
    found = gpu_peers.measure(gpu_peers.PEERS[name](SMALL, CPU), CPU, bursts=2, steps=1, warm_up=1)
    assert 0 < found.low <= found.seconds <= found.high
