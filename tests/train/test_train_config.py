"""A configuration: what wins, and how what cannot be is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.train import TrainConfig, load_config
from shoal.train.config import _ALSO_KNOWN_AS


def refusal(*settings, file=None):
    with pytest.raises(ConfigError) as caught:
        load_config(file, settings)
    error = caught.value
    assert error.given
    assert error.possible
    assert error.change
    return error


def test_what_comes_later_wins(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("steps = 20\nbatch = 8\n[optimizer]\nclip = 0.5\nwarmup = 3\n")
    base = {"steps": 10, "batch": 4, "sequence": 64, "optimizer": {"clip": 0.1, "eps": 1e-6}}
    config = load_config(file, ["steps=30", "steps=40", "optimizer.warmup=5"], base)
    assert (config.steps, config.batch, config.sequence) == (40, 8, 64)
    optimizer = config.optimizer
    assert (optimizer.clip, optimizer.warmup, optimizer.eps) == (0.5, 5, 1e-6)
    assert config.seed == TrainConfig().seed
    assert load_config() == TrainConfig()


def test_an_empty_table_puts_back_the_defaults():
    base = {"model_options": {"layers": 2}, "optimizer": {"clip": 0.1}, "batch": 4}
    config = load_config(settings=["model_options={}", "optimizer={}", "optimizer.warmup=5"], base=base)
    assert config.model_options == {}
    assert config.optimizer == TrainConfig().optimizer.model_copy(update={"warmup": 5})
    assert config.batch == 4


def test_a_file_may_begin_with_the_mark_of_an_editor(tmp_path):
    (file := tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfsteps = 7\r\n")
    assert load_config(file).steps == 7


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("steps=3", lambda config: config.steps == 3),
        ("optimizer.learning_rate=1e-3", lambda config: config.optimizer.learning_rate == 1e-3),
        ("optimizer.betas=[0.8, 0.9]", lambda config: config.optimizer.betas == (0.8, 0.9)),
        ("record.timeline=false", lambda config: config.record.timeline is False),
        ("model=llama3-8b", lambda config: config.model == "llama3-8b"),
        ('model="tiny"', lambda config: config.model == "tiny"),
        ("model = package.module:function ", lambda config: config.model == "package.module:function"),
        ("plan=dp=2,shard=zero1", lambda config: config.plan == "dp=2,shard=zero1"),
        ("data.source=/some/path.txt", lambda config: config.data.source == "/some/path.txt"),
        ("data.source=['a', 'b']", lambda config: config.data.source == ("a", "b")),
        ("model_options={layers=2, hidden=8}", lambda config: config.model_options["hidden"] == 8),
        ("model_options.layers=2", lambda config: config.model_options == {"layers": 2}),
    ],
)
def test_a_setting_is_read_as_toml_and_else_as_text(setting, read):
    assert read(load_config(settings=[setting]))


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("bacth", "batch"),
        ("optimzer", "optimizer"),
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("data.sorce", "data.source"),
        ("checkpoint.evry", "checkpoint.every"),
        ("record.timelin", "record.timeline"),
        ("learning_rate", "optimizer.learning_rate"),
        ("data.warmup", "optimizer.warmup"),
        # what other trainers call it
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("optimizer.LR", "optimizer.learning_rate"),
        ("optimizer.wd", "optimizer.weight_decay"),
        ("optimizer.grad_clip", "optimizer.clip"),
        ("max_grad_norm", "optimizer.clip"),
        ("optimizer.warmup_steps", "optimizer.warmup"),
        ("batch_size", "batch"),
        ("max_steps", "steps"),
        ("seq_len", "sequence"),
        ("save_every", "checkpoint.every"),
        # the section counts less than the name
        ("optimizer.stps", "steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(wrong, meant):
    error = refusal(f"{wrong}=1")
    assert repr(wrong) in error.given
    assert f"did you mean {meant!r}" in error.given
    assert wrong in error.change


@pytest.mark.parametrize("wrong", ["optimizer.nesterov", "qqq", "data.xyz"])
def test_a_key_that_is_like_none_gets_no_guess(wrong):
    assert "did you mean" not in refusal(f"{wrong}=1").given


def test_every_name_of_other_trainers_leads_to_a_key_that_is_there():
    for meant, names in _ALSO_KNOWN_AS.items():
        for name in names:
            assert f"did you mean {meant!r}" in refusal(f"{name}=1").given


def test_an_unknown_key_of_a_file_is_refused_too(tmp_path):
    (tmp_path / "run.toml").write_text("[optimizer]\nlearning_rat = 1\n")
    assert "'optimizer.learning_rate'" in refusal(file=tmp_path / "run.toml").given


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("steps=many", "steps"),
        ("steps=0", "steps"),
        ("steps=1.5", "steps"),
        ("steps=", "steps"),
        ("steps.more=1", "steps"),
        ("batch=-4", "batch"),
        ("seed=-1", "seed"),
        ("seed=99999999999999999999", "seed"),
        ("device=tpu", "device"),
        ("timeout=0", "timeout"),
        ("timeout=1e300", "timeout"),
        ("optimizer=3", "optimizer"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate"),
        ("optimizer.clip=nan", "optimizer.clip"),
        ("optimizer.betas=[0.9, 2]", "optimizer.betas"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("optimizer.schedule=cosin", "optimizer.schedule"),
        ("optimizer.final=1.5", "optimizer.final"),
        ("data.source=3", "data.source"),
        ("data.source=''", "data.source"),
        ("data.suffixes=['txt']", "data.suffixes"),
        ("data.validation_fraction=1", "data.validation_fraction"),
        ("checkpoint.keep=0", "checkpoint.keep"),
        ("record.timeline=perhaps", "record.timeline"),
        ("model_options=3", "model_options"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_key(setting, key):
    error = refusal(setting)
    assert error.given.startswith(f"{key} cannot be ")
    assert error.change == f"change {key}"
    assert "value error" not in error.possible.lower()


@pytest.mark.parametrize("setting", ["steps", "", "optimizer.learning_rate"])
def test_a_setting_without_a_value_is_refused(setting):
    assert "has no value" in refusal(setting).given


@pytest.mark.parametrize("content", [b"steps 3", b"steps = 3\nsteps = 4", b"[optimizer", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path, content):
    (tmp_path / "run.toml").write_bytes(content)
    assert f"{tmp_path / 'run.toml'} is not TOML" in refusal(file=tmp_path / "run.toml").given


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    assert str(tmp_path / "none.toml") in refusal(file=tmp_path / "none.toml").given
    assert str(tmp_path) in refusal(file=tmp_path).given


@given(st.text(max_size=30))
def test_any_setting_is_taken_or_refused_with_a_named_error(text):
    with contextlib.suppress(ConfigError):
        assert isinstance(load_config(settings=[text]), TrainConfig)


def test_a_configuration_survives_the_run_description():
    config = load_config(settings=["optimizer.betas=[0.8,0.9]", "data.source=['a','b']", "data.cache='c'"])
    assert load_config(base=config.model_dump(mode="json")) == config
