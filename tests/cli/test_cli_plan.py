"""`shoal plan`: the table, the explanation, the configuration, and what it refuses."""

import json
import subprocess
import sys

import pytest

from shoal.cli.main import main
from shoal.predict.cost.time import workload_on
from shoal.predict.planner import choose
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.workload import shape, workload_of
from shoal.train import load_config

ASKED = ["plan", "--model", "125m", "--cluster", "dgx-a100:8", "--batch", "64"]


def printed(capsys, *arguments):
    assert main([*ASKED, *arguments]) == 0
    return capsys.readouterr().out


def test_the_first_plan_is_the_one_that_the_library_chooses(capsys):
    summary = json.loads(printed(capsys, "--json", "--top", "3"))
    cluster = Cluster.parse("dgx-a100:8")
    best = choose(workload_on(cluster, shape("125m")), cluster, 64).best
    first, *rest = summary["plans"]
    assert first["plan"] == str(best.plan)
    assert first["step_seconds"] == best.seconds
    assert sum(first["parts"].values()) == pytest.approx(best.seconds)
    assert len(rest) == 2
    assert all(each["step_seconds"] >= first["step_seconds"] for each in rest)


def test_every_plan_that_is_printed_is_one_for_these_devices(capsys):
    for each in json.loads(printed(capsys, "--json"))["plans"]:
        plan = Plan.parse(each["plan"])
        plan.require_ranks(8)
        assert SettledPlan.of(plan, 64) == plan


def test_the_text_says_what_bounds_the_best_and_what_would_gain_most(capsys):
    text = printed(capsys)
    assert "takes the largest share" in text
    assert "best Plan of another kind" in text
    assert "Twice the FLOP/s" in text


def test_the_configuration_is_one_that_train_takes(capsys, tmp_path):
    path = tmp_path / "config.toml"
    summary = json.loads(printed(capsys, "--json", "--write", str(path)))
    config = load_config(path)
    assert (config.model, config.batch, config.sequence) == ("125m", 64, 2048)
    assert config.plan == summary["plans"][0]["plan"]


def test_a_published_model_is_written_with_all_its_sizes(capsys, tmp_path):
    from shoal.models import build

    path = tmp_path / "config.toml"
    asked = ["plan", "--model", "mixtral-8x7b", "--cluster", "dgx-h100:32", "--batch", "64", "--json"]
    assert main([*asked, "--sequence", "2048", "--write", str(path)]) == 0
    config = load_config(path)
    model = build(config.model, overrides=config.model_options, device="meta")
    workload = workload_of(shape("mixtral-8x7b"))
    assert sum(parameter.numel() for parameter in model.parameters()) == workload.parameters


def test_a_model_that_shoal_has_not_is_not_written(capsys, tmp_path):
    path = tmp_path / "config.toml"
    asked = ["plan", "--model", "gpt3-125m", "--cluster", "dgx-a100:8", "--batch", "64"]
    assert main([*asked, "--write", str(path)]) == 2
    assert "biases" in capsys.readouterr().err
    assert not path.exists()


def test_by_money_fewer_devices_may_be_best_and_never_cost_more(capsys):
    by_money = json.loads(printed(capsys, "--json", "--objective", "money"))["plans"][0]
    by_time = json.loads(printed(capsys, "--json"))["plans"][0]
    assert by_money["dollars_per_billion_tokens"] <= by_time["dollars_per_billion_tokens"]
    assert by_money["devices"] <= by_time["devices"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--model", "llama3-80b"), "did you mean 'llama3-8"),
        (("--cluster", "dgx-h10"), "did you mean"),
        (("--batch", "0"), "a batch of 0"),
        (("--margin", "1.5"), "margin=1.5"),
        (("--top", "0"), "limit=0"),
        (("--objective", "money", "--cluster", "laptop"), "no price"),
    ],
)
def test_what_cannot_work_is_refused_by_name(capsys, changed, said):
    assert main([*ASKED, *changed]) == 2
    assert said in capsys.readouterr().err


def test_a_batch_that_no_plan_divides_is_refused(capsys):
    asked = ["plan", "--model", "125m", "--cluster", "dgx-a100:88", "--sequence", "127", "--batch", "1"]
    assert main(asked) == 2
    assert "batch of 1" in capsys.readouterr().err


def test_a_model_that_fits_nowhere_is_told_by_how_much_and_what_would_do(capsys):
    asked = ["plan", "--model", "llama3-70b", "--cluster", "dgx-a100:8", "--batch", "16"]
    assert main(asked) == 2
    error = capsys.readouterr().err
    assert "does not fit 8 devices" in error
    assert "GiB more than" in error
    devices = int(error.partition("possible: ")[2].split()[0])
    assert main([*asked[:3], "--cluster", f"dgx-a100:{devices}", "--batch", "16"]) == 0


def test_help_imports_neither_torch_nor_numpy():
    program = (
        "import sys\nfrom shoal.cli.main import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 0
