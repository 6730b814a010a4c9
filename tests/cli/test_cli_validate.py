"""`shoal validate`, as a user calls it."""

import json
import subprocess
import sys

import pytest

from shoal.cli.main import main

HEAD = (
    "family,model,layers,hidden,ffn,heads,kv_heads,vocab,seq,gated_mlp,device,devices_per_node,"
    "network_gbps_per_node,num_devices,tp,pp,dp,cp,virtual_stages,microbatch,global_batch,sharding,recompute,"
    "sequence_parallel,precision,attention,step_s,memory_gib\n"
)
ROW = (
    "{family},small,{layers},1024,4096,16,16,51200,1024,0,A100-80GB,8,1600,8,1,1,8,1,1,4,64,zero1,none,0,bf16,flash,"
    "{seconds},\n"
)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    lines = [ROW.format(family="ab"[n % 2], layers=n, seconds=0.02 * n) for n in range(2, 12)]
    path.write_text(HEAD + "".join(lines))
    return path


def test_few_rows_are_printed_with_their_errors_and_those_of_each_family(table, capsys):
    assert main(["validate", str(table)]) == 0
    rows, errors = capsys.readouterr().out.split("\n\n")
    assert rows.split("\n")[0].split()[:4] == ["line", "family", "row", "what"]
    assert len(rows.splitlines()) == 11
    assert [line.split("  ")[0] for line in errors.splitlines()] == [
        "error of",
        "step, a",
        "step, b",
        "step, all",
    ]


def test_many_rows_are_printed_only_if_asked_for(table, capsys):
    table.write_text(HEAD + "".join(ROW.format(family="a", layers=n, seconds=1) for n in range(2, 40)))
    assert main(["validate", str(table)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["validate", str(table), "--rows"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 38 + 1 + 1 + 2


def test_both_halves_stand_side_by_side(table, capsys):
    assert main(["validate", str(table), "--held-out"]) == 0
    errors = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert "fitted: rows" in errors[0]
    assert "held out: rows" in errors[0]
    cells = [cell for cell in errors[-1].split("  ") if cell]
    assert int(cells[1]) + int(cells[6]) == 10


def test_json_has_every_row_and_the_errors_that_follow_from_them(table, capsys):
    assert main(["validate", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["line"] for row in found["rows"]] == list(range(2, 12))
    every = next(each for each in found["errors"] if each["family"] is None and each["half"] == "all")
    errors = [row["predicted"] / row["measured"] - 1 for row in found["rows"]]
    assert every["rows"] == 10
    assert every["mean"] == pytest.approx(sum(map(abs, errors)) / 10)
    assert every["bias"] == pytest.approx(sum(errors) / 10)
    halves = [each["rows"] for each in found["errors"] if each["family"] is None and each["half"] != "all"]
    assert sum(halves) == 10


def test_rows_that_cannot_be_predicted_are_told_after_the_others_and_end_with_2(table, capsys):
    table.write_text(table.read_text().replace(",small,2,", ",small,two,"))
    assert main(["validate", str(table)]) == 2
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].split()[:3] == ["step,", "all", "9"]
    assert captured.err.startswith("shoal: 1 of 10 rows cannot be predicted\nshoal: line 2 of ")
    assert "has layers='two'" in captured.err
    assert main(["validate", str(table), "--json"]) == 2
    (refused,) = json.loads(capsys.readouterr().out)["refused"]
    assert "layers='two'" in refused["given"]
    assert refused["possible"] == "a whole number of at least 1"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("step_s", "seconds"), "step_s"),
        (("A100-80GB", "Z9000"), "Z9000"),
        ((",8,1,1,8,", ",8,1,1,7,"), "line 2"),
    ],
)
def test_what_cannot_be_predicted_ends_with_2_and_says_why(table, capsys, change, named):
    table.write_text(table.read_text().replace(*change))
    assert main(["validate", str(table)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert "change:" in captured.err
    assert "Traceback" not in captured.err


def test_a_table_that_is_not_there_ends_with_2(tmp_path, capsys):
    assert main(["validate", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_torch_is_not_imported(table):
    code = (
        "import sys\nfrom shoal.cli.main import main\n"
        f"main(['validate', {str(table)!r}])\nsys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=120).returncode == 0
    )
