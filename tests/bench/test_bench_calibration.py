"""`shoal bench --calibrate`: a table that the backend can use."""

from __future__ import annotations

from shoal.cli.main import main
from shoal.collectives import load_table
from shoal.collectives.table import Call


def test_a_calibrated_table_chooses_among_what_was_measured(tmp_path):
    file = tmp_path / "table.toml"
    arguments = ["--calibrate", str(file), "--collective", "all_reduce,broadcast", "--sizes", "1KiB,64KiB"]
    assert main(["bench", *arguments]) == 0
    assert file.read_text().startswith("# shoal bench --calibrate: 2 ranks on 1 host")
    table = load_table(file)
    wanted = {"all_reduce": {"one-shot", "two-shot"}, "broadcast": {"one-shot", "direct"}}
    for collective, names in wanted.items():
        call = Call(collective, "shared-memory", ranks=2)
        assert set(table.candidates(call)) == names
        assert table.choices(call).choose(1024) in names
