"""Days, money, failures and jitter, as the commands say them."""

import json

import pytest

from shoal.cli.main import main
from shoal.predict.cost.outlook.long_run import long_run
from shoal.spec.cluster import Cluster, Power, Prices
from shoal.spec.workload import shape, workload_of
from shoal.units import parse_count

MODEL = ("--model", "125m", "--cluster", "dgx-a100:8")
PLAN = ["plan", *MODEL, "--batch", "64"]
SIMULATE = ["simulate", *MODEL, "--batch", "64", "--plan", "dp=8,precision=bf16"]
SCALE = ["scale", *MODEL, "--batch", "64", "--devices", "8,16"]


def asked(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", [PLAN, SIMULATE])
def test_a_long_run_is_told_as_the_library_tells_it(capsys, command):
    found = asked(capsys, *command, "--tokens", "300B", "--storage", "2G", "--restart", "60")
    seconds = found["plans"][0]["step_seconds"] if "plans" in found else found["step_seconds"]
    workload, cluster = workload_of(shape("125m")), Cluster.parse("dgx-a100:8")
    run = long_run(workload, cluster, seconds, 64 * 2048, tokens=3e11, storage=2e9, restart=60.0)
    assert found["long_run"]["days"] == pytest.approx(run.days)
    assert found["long_run"]["dollars"] == pytest.approx(run.dollars)
    assert found["long_run"]["failures"] == pytest.approx(run.failures)
    assert found["long_run"]["steps_between_checkpoints"] == run.goodput.interval
    assert sum(found["long_run"]["shares"].values()) == pytest.approx(1)


def test_every_number_of_devices_has_its_days(capsys):
    points = asked(capsys, *SCALE, "--steps", "1000")["points"]
    assert all(point["long_run"]["steps"] == 1000 for point in points)
    assert main([*SCALE, "--steps", "1000"]) == 0
    assert "days  dollars" in capsys.readouterr().out


@pytest.mark.parametrize("command", [PLAN, SIMULATE, SCALE])
def test_what_is_not_asked_for_is_not_told(capsys, command):
    assert "long_run" not in json.dumps(asked(capsys, *command))


@pytest.mark.parametrize("command", [PLAN, SIMULATE])
def test_the_text_names_days_checkpoints_and_goodput(capsys, command):
    assert main([*command, "--tokens", "15T"]) == 0
    printed = capsys.readouterr().out
    for word in (" days, $", "A device fails every", "best to save one every", "Goodput"):
        assert word in printed


def test_a_cluster_without_price_or_failures_still_has_days(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    Cluster.parse("dgx-a100:8").replace(price=0.0, failures=0.0).write(path)
    words = [str(path) if word == "dgx-a100:8" else word for word in PLAN]
    run = asked(capsys, *words, "--steps", "100")["long_run"]
    assert run["days"] > 0
    assert run["dollars"] is run["failures"] is run["goodput"] is None
    assert main([*words, "--steps", "100", "--restart", "60"]) == 2
    assert "does not say how often devices fail" in capsys.readouterr().err


def test_a_machine_that_fails_before_it_saves_never_ends(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    Cluster.parse("dgx-a100:8").replace(failures=1e4).write(path)
    words = [str(path) if word == "dgx-a100:8" else word for word in SIMULATE]
    assert asked(capsys, *words, "--steps", "100")["long_run"]["days"] is None
    assert main([*words, "--steps", "100"]) == 0
    assert "never end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tokens", "lots"), "--tokens lots"),
        (("--tokens", "0"), "--tokens 0"),
        (("--steps", "0"), "steps=0"),
        (("--steps", "9", "--storage", "fast"), "--storage fast"),
        (("--steps", "9", "--restart", "-1"), "restart=-1"),
        (("--restart", "60"), "without the length of a run"),
        (("--jitter", "1.5"), "jitter"),
    ],
)
@pytest.mark.parametrize("command", [PLAN, SIMULATE])
def test_what_cannot_be_is_refused_by_name(capsys, command, words, said):
    assert main([*command, *words]) == 2
    assert said in capsys.readouterr().err


def test_jitter_is_a_part_of_the_step_and_makes_it_longer(capsys):
    still, varying = (asked(capsys, *PLAN, "--jitter", share)["plans"][0] for share in ("0", "0.05"))
    assert varying["plan"] == still["plan"]
    added = varying["step_seconds"] - still["step_seconds"]
    assert added > 0
    assert varying["parts"]["control"] - still["parts"]["control"] == pytest.approx(added)


@pytest.mark.parametrize("command", [PLAN, SIMULATE])
def test_exchanges_name_their_links_and_algorithm(capsys, command):
    for each in asked(capsys, *command)["exchanges"]:
        assert each["level"] in ("nvlink", "network")
        assert each["algorithm"]
        assert each["exposed_share"] is None or 0 <= each["exposed_share"] <= 1


@pytest.mark.parametrize("command", [PLAN, SCALE])
def test_tables_are_read_in_a_hundred_columns(capsys, command):
    assert main([*command, "--tokens", "15T"]) == 0
    prose = [line for line in capsys.readouterr().out.splitlines() if "shard=" not in line]
    assert max(map(len, prose)) <= 100


def test_counts_are_read_with_their_scale():
    assert [parse_count(text) for text in ("15T", "300 B", "1.5M", "1e12", "7")] == [
        15e12, 3e11, 1.5e6, 1e12, 7.0,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not a count"):
        parse_count("T")


@pytest.fixture
def priced_file(tmp_path):
    """A Cluster with all kinds of prices, whose spot devices are often interrupted."""
    path = tmp_path / "mine.toml"
    prices = Prices(reserved=1.0, spot=0.5, interruptions=1e-2)
    power = Power(device=400.0, overhead=100.0, pue=1.2)
    Cluster.parse("dgx-a100:8").replace(price=2.0, prices=prices, power=power).write(path)
    return path


@pytest.mark.parametrize("command", [PLAN, SIMULATE])
def test_a_run_costs_by_kind_of_price_and_spot_devices_are_interrupted(capsys, priced_file, command):
    words = [str(priced_file) if word == "dgx-a100:8" else word for word in command]
    runs = {
        kind: asked(capsys, *words, "--tokens", "300B", "--price", kind)["long_run"]
        for kind in ("on-demand", "reserved", "spot")
    }
    assert runs["reserved"]["dollars"] == pytest.approx(runs["on-demand"]["dollars"] / 2)
    assert runs["spot"]["failures"] > 100 * runs["reserved"]["failures"]
    assert runs["spot"]["days"] > runs["reserved"]["days"]
    for run, price in zip(runs.values(), (2.0, 1.0, 0.5), strict=True):
        assert run["dollars"] == pytest.approx(8 * price * 24 * run["days"])
        assert run["kilowatt_hours"] == pytest.approx(8 * 0.6 * 24 * run["days"])
    assert asked(capsys, *words, "--tokens", "300B")["long_run"] == runs["on-demand"]


@pytest.mark.parametrize("command", [PLAN, SIMULATE, SCALE])
def test_a_price_that_is_not_known_is_refused(capsys, command):
    assert main([*command, "--price", "spot"]) == 2
    assert "has no price spot" in capsys.readouterr().err
    assert main([*command, "--price", "sopt"]) == 2
    assert "did you mean 'spot'" in capsys.readouterr().err
