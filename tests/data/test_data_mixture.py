"""Mixtures: sources give their shares of the samples, in an order that the position alone decides."""

import numpy as np
import pytest
import torch
from run_stand_ins import train

from shoal.cli.main import main
from shoal.data import DataConfig, Loader, MixedSamples, Packed, PackedSamples, TokenSamples, prepare
from shoal.errors import DataError
from shoal.spec.run import Run
from shoal.train.config import load_config


def source(first, count, sequence=4):
    """Samples whose tokens say which sample of which source they are: `first` to `first + count - 1`."""
    return TokenSamples(
        np.repeat(np.arange(first, first + count + 1), sequence)[: count * sequence + 1], sequence
    )


@pytest.mark.parametrize(
    ("counts", "weights", "expected"),
    [
        ((100, 10), (1, 1), (100, 100)),
        ((100, 10), (10, 1), (100, 10)),
        ((30, 40, 7), (0.2, 0.5, 0.3), (30, 75, 45)),
    ],
)
def test_an_epoch_has_the_shares_and_each_sample_as_often_as_others_of_its_source(counts, weights, expected):
    parts = [source(1000 * number, count) for number, count in enumerate(counts)]
    mixed = MixedSamples(parts, weights)
    assert mixed.counts == expected
    tokens, targets = mixed.batch(np.arange(len(mixed)))
    seen = tokens[:, 0].numpy()
    for number, (count, times) in enumerate(zip(counts, expected, strict=True)):
        of_source = seen[(seen >= 1000 * number) & (seen < 1000 * number + 1000)] - 1000 * number
        assert len(of_source) == times
        repeats = np.bincount(of_source, minlength=count)
        assert repeats.min() >= times // count
        assert repeats.max() <= -(-times // count)
    half = seen[: len(seen) // 2] // 1000
    shares = np.bincount(half, minlength=len(counts)) / len(half)
    assert shares == pytest.approx(np.array(weights) / sum(weights), abs=0.15)
    assert torch.equal(targets[:, :3], tokens[:, 1:])


def test_any_rows_are_those_of_the_whole_and_positions_of_documents_come_with_them():
    parts = [PackedSamples(source(0, 20), 7), PackedSamples(source(1000, 9), 1003)]
    mixed = MixedSamples(parts, (3, 1))
    assert not mixed.all_targets_count
    whole, targets = mixed.batch(np.arange(len(mixed)))
    assert isinstance(whole, Packed)
    chosen = np.array([5, 2, 17, 2, len(mixed) - 1])
    some, wanted = mixed.batch(chosen)
    assert torch.equal(some.tokens, whole.tokens[chosen])
    assert torch.equal(some.position_ids, whole.position_ids[chosen])
    assert torch.equal(wanted, targets[chosen])


def test_a_run_that_goes_on_sees_what_it_would_have_seen():
    mixed = MixedSamples([source(0, 20), source(1000, 9)], (1, 2))
    loader = Loader(mixed, seed=3, batch_size=6)
    every = [loader.fetch(position, 6)[0] for position in range(0, 120, 6)]
    again = [
        torch.cat([loader.fetch(position + 3 * rank, 3)[0] for rank in range(2)]) for position in (48, 54)
    ]
    assert torch.equal(every[8], again[0])
    assert torch.equal(every[9], again[1])


@pytest.fixture
def texts(tmp_path):
    for name, word in (("a", "shoal "), ("b", "tern ")):
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{number}.txt").write_text(word * 40)
    return tmp_path


def test_a_table_of_sources_is_a_mixture_that_its_weights_identify(texts):
    def corpus(weights):
        source = {str(texts / name): weight for name, weight in zip("ab", weights, strict=True)}
        return prepare(DataConfig(source=source, cache=texts / "cache"))

    mixed = corpus((3, 1))
    assert mixed.fingerprint == corpus((3, 1)).fingerprint
    assert mixed.fingerprint != corpus((1, 3)).fingerprint
    for split in ("train", "validation"):
        tokens, _ = mixed.samples(split, 32).batch(np.arange(len(mixed.samples(split, 32))))
        share = np.mean([b"shoal" in bytes(row.tolist()) for row in tokens])
        assert share == pytest.approx(0.75, abs=0.02)
    with pytest.raises(DataError, match="of the source"):
        mixed.samples("train", 100_000)


@pytest.mark.parametrize("weight", ["0", "-1", "inf", "'much'"])
def test_a_weight_that_is_no_positive_number_is_refused(texts, weight, capsys, monkeypatch):
    monkeypatch.chdir(texts)
    words = ["--set", f"data.source={{a = {weight}, b = 1}}", "--nproc", "1", "--run", "run"]
    assert main(["train", *words]) == 2
    assert "data.source" in capsys.readouterr().err


def test_a_mixture_is_set_on_the_command_line_and_kept_with_the_run():
    config = load_config(None, ["data.source={'a/' = 3, b = 1}"])
    assert config.data.source == {"a/": 3.0, "b": 1.0}
    assert load_config(base=config.model_dump(mode="json")) == config


def test_sources_of_a_mixture_are_found_from_any_folder(ranks, tiny_run, texts):
    mixture = ["--set", "data.source={a = 3, b = 1}", "--set", "steps=2", "--set", "data.boundaries=true"]
    train(ranks, [*tiny_run, *mixture, "--run", "run"], texts)
    assert list(Run.open(texts / "run").description["config"]["data"]["source"]) == [
        str(texts / name) for name in "ab"
    ]
    (texts / "elsewhere").mkdir()
    train(ranks, ["--resume", "../run", "--set", "steps=3", "--plan", "dp=2"], texts / "elsewhere", on=2)
