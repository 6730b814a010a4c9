"""`shoal cluster`: lists, shows, checks, exports and imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.spec.cluster import PRESETS, Calibrated, Cluster, Device, Host, Level, Power, Prices
from shoal.spec.cluster.tables import keys_of
from shoal.spec.plan import Plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cluster"))
from topologies import matrix, nccl_xml, switched


def printed(capsys, *words):
    assert main(["cluster", *map(str, words)]) == 0
    return capsys.readouterr()


def test_the_list_has_every_preset_with_its_figures(capsys):
    rows = json.loads(printed(capsys, "ls", "--json").out)
    assert [row["name"] for row in rows] == list(PRESETS)
    for row in rows:
        preset = Cluster.preset(row["name"])
        assert (row["devices"], row["memory"]) == (preset.devices_per_node, preset.device.memory)
        assert [link["bandwidth"] for link in row["links"]] == [level.bandwidth for level in preset.levels]
        assert row["price"] == (preset.price or None)
    text = printed(capsys, "ls").out
    assert all(f"\n{name} " in text for name in PRESETS)


@pytest.mark.parametrize("name", ["dgx-h100:64", "meta-24k:16384", "laptop", "mi300x-node"])
def test_every_key_of_a_cluster_is_shown_and_every_source(capsys, name):
    text, cluster = printed(capsys, "show", name).out, Cluster.parse(name)
    for kind in (Calibrated, Cluster, Device, Host, Level, Power, Prices):
        for key in keys_of(kind).keys() - {"levels", "parts", "peak"}:
            assert key in text, (kind, key)
    shown = " ".join(text.split())
    sources = [cluster, cluster.device, *cluster.levels, cluster.power, cluster.prices]
    assert all(" ".join(each.source.split()) in shown for each in sources)
    found = json.loads(printed(capsys, "show", name, "--json").out)
    assert Cluster.of(found["cluster"], "json") == cluster
    assert found["derived"]["devices"] == cluster.devices


def test_failed_spare_and_slow_nodes_are_shown(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    text = printed(capsys, "export", "dgx-h100:64").out
    text = text.replace("failed = 0", "failed = 1").replace("spare = 0", "spare = 2")
    path.write_text(f"{text}\n[[parts]]\nnodes = 3\n[[parts]]\nnodes = 2\ndevice = 'a100-80'\npace = 0.9\n")
    shown = printed(capsys, "show", path).out
    for told in ("40: 5 x 8", "1 failed, 2 spare", "16 x A100-SXM-80GB, at 0.9", "device of part 2"):
        assert told in shown


def test_a_step_is_simulated_on_the_devices_of_its_parts(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    text = printed(capsys, "export", "dgx-a100:16").out
    told = {}
    for pace in (1, 0.5):
        path.write_text(f"{text}\n[[parts]]\nnodes = 1\n[[parts]]\nnodes = 1\npace = {pace}\n")
        words = ["--model", "gpt3-125m", "--cluster", str(path), "--batch", "16", "--json"]
        assert main(["simulate", "--plan", "dp=16,precision=bf16", *words]) == 0
        told[pace] = json.loads(capsys.readouterr().out)
    assert told[0.5]["step_seconds"] > 1.5 * told[1]["step_seconds"]
    assert "kinds" not in told[1]
    assert list(told[0.5]["kinds"].values()) == [8, 8]
    assert "devices that differ" in str(told[0.5])


def test_an_exported_file_is_checked_read_and_planned_with(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    captured = printed(capsys, "export", "dgx-h100:64", "--out", path)
    assert (captured.out, captured.err) == ("", f"description written to {path}\n")
    assert Cluster.read(path) == Cluster.preset("dgx-h100", 64)
    assert path.read_text() == printed(capsys, "export", "dgx-h100:64").out
    checked = printed(capsys, "check", path)
    assert f"{path}: dgx-h100, sound" in checked.out
    assert checked.err == ""
    assert main(["simulate", "--plan", "dp=64,precision=bf16", "--model", "gpt3-125m", "--cluster", str(path),
                 "--batch", "64", "--json"]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["devices"] == 64


def test_a_file_is_replaced_only_if_that_was_asked_for_and_never_half_written(capsys, tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text("mine")
    assert main(["cluster", "export", "dgx-h100", "--out", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert main(["cluster", "export", "dgx-h100", "--out", str(path), "--overwrite"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["mine.toml"]
    assert path.read_text() == "mine"
    monkeypatch.undo()
    printed(capsys, "export", "dgx-h100", "--out", path, "--overwrite")
    assert Cluster.read(path) == Cluster.preset("dgx-h100")
    assert main(["cluster", "export", "dgx-h100", "--out", str(tmp_path), "--overwrite"]) == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("price =", "pirce ="), "unknown key 'pirce' (did you mean 'price'?)"),
        (("bandwidth = 50e9", "bandwidth = 50"), "looks like giga"),
        (("share = 0.97", "share = 9.7"), "share=9.7"),
        (("memory = 85", "memory = 80 #"), "looks like giga"),
        (("price = 2.99", "price = '2.99 dollars'"), "dollars for a device and hour"),
        (("latency =", "#"), None),
        (("devices = 8 ", "# devices = 8"), "such as devices = 8"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_what_to_change(capsys, tmp_path, change, told):
    path = tmp_path / "mine.toml"
    path.write_text(printed(capsys, "export", "dgx-h100:64").out.replace(*change, 1))
    assert main(["cluster", "check", str(path)]) == (0 if told is None else 2)
    captured = capsys.readouterr()
    if told is not None:
        assert captured.out == ""
        assert told in captured.err
        assert "change:" in captured.err


def test_unlikely_figures_are_warnings_on_stderr_and_in_json(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    text = printed(capsys, "export", "dgx-h100:64").out
    path.write_text(text.replace("bandwidth = 50e9", "bandwidth = 400e9"))
    captured = printed(capsys, "check", path)
    assert "1 warning" in captured.out
    assert captured.err.startswith("warning: the level network")
    (warning,) = json.loads(printed(capsys, "check", path, "--json").out)["warnings"]
    assert "400 Gbit/s are 5e+10" in warning


@pytest.mark.parametrize("kind", ["xml", "matrix"])
def test_a_topology_becomes_a_file_of_as_many_nodes_as_asked(capsys, tmp_path, kind):
    dump, out = tmp_path / "node.txt", tmp_path / "mine.toml"
    if kind == "xml":
        dump.write_text(nccl_xml([{"switch": 18}] * 8, nets=[[(f"mlx5_{i}", 400_000)] for i in range(8)]))
        words = ()
    else:
        dump.write_text(
            matrix(switched(8, 18), [["PIX" if a == b else "SYS" for b in range(8)] for a in range(8)])
        )
        words = ("--device", "h100", "--nic-gbits", "400")
    captured = printed(
        capsys, "import", "--topology", dump, "--devices", 64, "--name", "mine", "--out", out, *words
    )
    found, preset = Cluster.read(out), Cluster.preset("dgx-h100", 64)
    assert (found.name, found.levels, found.device) == ("mine", preset.levels, preset.device)
    assert "note: 8 network interfaces count" in captured.err
    assert "sound" in printed(capsys, "check", out).out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("show", "dgx-h10"), "did you mean 'dgx-h100'"),
        (("show", "dgx-h100:12"), "such as 8 or 16"),
        (("show", "meta-24k:3076"), "such as 3072 or 3080"),
        (("check", "absent.toml"), "cannot be read"),
        (("export", "absent.toml"), "cannot be read"),
        (("import", "--topology", "absent.xml"), "cannot be read"),
        (("import", "--topology", "absent.xml", "--nic-gbits", "-1"), "--nic-gbits -1 is out of range"),
    ],
)
def test_what_is_not_there_is_refused(capsys, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert list(tmp_path.iterdir()) == []


def test_the_command_needs_no_torch():
    program = (
        "import sys; from shoal.cli.main import main; main(['cluster', 'show', 'dgx-h100']); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("devices", ["meta-24k:3080", "meta-24k:16384", "spare"])
def test_plans_are_made_for_parts_of_pods_and_beside_spare_nodes(capsys, tmp_path, devices):
    if devices == "spare":
        path = tmp_path / "mine.toml"
        Cluster.parse("dgx-h100:64").replace(failed=1, spare=2).write(path)
        devices, count = str(path), 40
    else:
        count = int(devices.partition(":")[2])
    words = ["--model", "llama3-8b", "--cluster", devices, "--batch", str(count), "--top", "1", "--json"]
    assert main(["plan", *words]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert Plan.parse(best["plan"]).ranks == count
