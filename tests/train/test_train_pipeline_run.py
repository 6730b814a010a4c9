"""`shoal train --plan pp=...` as one sees it: what is printed and kept, whichever rank knows it."""

from __future__ import annotations

import json

import pytest
from port_stand_ins import free_port
from run_stand_ins import shoal, shoal_as_rank

from shoal.spec.plan import Plan
from shoal.spec.run import Run


@pytest.fixture
def train(ranks, tiny_run, tmp_path):
    """Trains under a Plan in `tmp_path`, on as many ranks as it is for; gives what the first one printed."""

    def call(plan, *arguments, options="model_options.layers=4"):
        words = ["train", *tiny_run, "--set", options, "--plan", plan, *arguments]
        size = Plan.parse(plan).ranks
        if size == 1:
            ended = ranks.run(shoal, 1, [*words, "--nproc", "1"], tmp_path)
        else:
            ended = ranks.run(shoal_as_rank, size, words, tmp_path, free_port())
        assert [code for code, _, _ in ended] == [0] * size, ended[0][2]
        assert all(out == err == "" for _, out, err in ended[1:])
        return ended[0]

    return call


def settings(**values):
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def figures(path):
    """Each figure that does not depend on the clock, by step."""
    found = {}
    for values in Run.open(path).metrics():
        for name in ("loss", "gradient_norm", "learning_rate", "tokens", "validation_loss"):
            if name in values:
                found[values["step"], name] = values[name]
    return found


@pytest.mark.parametrize(
    "plan", ["pp=2", "pp=2,schedule=zb-v,recompute=full", "pp=2,dp=2,shard=zero1,schedule=zb-h1", "pp=4"]
)
def test_losses_norms_and_validation_are_those_of_one_rank(train, tmp_path, plan):
    # Ten samples of validation do not divide into what two replicas take at a time.
    common = settings(
        steps=4, batch=8, validation__every=2, validation__samples=10, optimizer__clip=0.5, record__live=1
    )
    train("dp=1", "--run", "alone", *common)
    _, out, err = train(plan, "--run", "stages", *common)
    found, wanted = figures(tmp_path / "stages"), figures(tmp_path / "alone")
    assert found == pytest.approx(wanted, rel=1e-4)  # fp32 sums in another order
    norms = [value for (_, name), value in wanted.items() if name == "gradient_norm"]
    assert max(norms) > 0.5  # some are clipped
    for step in range(1, 5):
        assert f"step {step}/4  loss {found[step, 'loss']:.3f}" in err
    assert f"validation  {found[4, 'validation_loss']:.3f}" in out
    assert "bubble" in out


def test_a_report_explains_the_steps_under_the_last_plan(train, tmp_path, ranks):
    train("pp=2,dp=2", "--run", "run", *settings(steps=4))
    run = Run.open(tmp_path / "run")
    created = run.description["created"]

    def report():
        code, out, _ = ranks.run(shoal, 1, ["report", "run", "--json"], tmp_path)[0]
        assert code == 0
        return json.loads(out)

    whole = report()
    assert whole["since_step"] is None
    assert [stage["ranks"] for stage in whole["stages"]] == [[0, 1], [2, 3]]

    train("pp=2", "--resume", "run", *settings(steps=8))
    changed = report()
    assert changed["plan"] == "dp=1,pp=2,split=2-2,microbatch=1"  # as many blocks as each stage got
    assert (changed["steps"], changed["since_step"]) == (8, 5)
    assert sorted(changed["breakdown"]["ranks"]) == ["0", "1"]
    assert all(each["steps"] == 4 for each in changed["breakdown"]["ranks"].values())
    assert changed["breakdown"]["parts"]["bubble"] > 0
    assert [stage["ranks"] for stage in changed["stages"]] == [[0], [1]]

    train("pp=2", "--resume", "run", *settings(steps=10))  # the same Plan: its steps count together
    assert report()["since_step"] == 5
    assert all(each["steps"] == 6 for each in report()["breakdown"]["ranks"].values())

    train("dp=1", "--resume", "run", *settings(steps=11))
    alone = report()
    assert (alone["since_step"], alone["stages"]) == (11, None)
    assert Run.open(run.path).description["created"] == created


@pytest.fixture
def llama(tmp_path):
    """The folder of a small Hugging Face model, with its weights."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**shape, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return "hf:llama"


def test_a_hugging_face_model_is_trained_saved_and_sampled_in_stages(train, ranks, tmp_path, llama):
    common = ["--set", f"model={llama}", *settings(steps=3)]
    train("dp=1", "--run", "alone", *common, options="model_options={}")
    _, _, err = train("pp=2", "--run", "stages", *common, options="model_options={}")
    wanted = figures(tmp_path / "alone")
    assert figures(tmp_path / "stages") == pytest.approx(wanted, rel=1e-4)  # fp32 sums in another order
    assert "\r" not in err  # no rank draws a progress bar

    def sample(run):
        code, out, _ = ranks.run(
            shoal, 1, ["sample", run, "--prompt", "fish", "--tokens", "5", "--temperature", "0"], tmp_path
        )[0]
        assert code == 0
        return out

    assert sample("stages") == sample("alone")


@pytest.mark.parametrize(
    ("option", "sequence", "told"),
    [("vocab_size=100", 32, "vocabulary of 100"), ("num_hidden_layers=2", 64, "longer than the context")],
)
def test_what_a_hugging_face_model_does_not_take_is_refused_before_a_run_is_made(
    ranks, tiny_run, tmp_path, llama, option, sequence, told
):
    words = [*tiny_run, *settings(model=llama + "/config.json", sequence=sequence), "--nproc", "1"]
    words += ["--set", "model_options={}", "--set", f"model_options.{option}", "--run", "run"]
    code, _, err = ranks.run(shoal, 1, ["train", *words], tmp_path)[0]
    assert code == 2
    assert told in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()
