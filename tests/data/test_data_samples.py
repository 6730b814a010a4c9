from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shoal.data import Loader, MapSamples, TokenSamples, as_samples
from shoal.errors import ConfigError, DataError


@given(length=st.integers(2, 200), sequence=st.integers(1, 20), dtype=st.sampled_from(["u1", "u2", "u4"]))
def test_a_sample_is_a_window_of_the_stream(length: int, sequence: int, dtype: str) -> None:
    tokens = (np.arange(length) * 7 % 251).astype(dtype)
    if length <= sequence:
        with pytest.raises(DataError):
            TokenSamples(tokens, sequence)
        return
    samples = TokenSamples(tokens, sequence)
    assert len(samples) == (length - 1) // sequence
    for index in range(len(samples)):
        inputs, targets = samples[index]
        window = tokens[index * sequence : index * sequence + sequence + 1].tolist()
        assert inputs.tolist() == window[:-1]
        assert targets.tolist() == window[1:]


def test_a_batch_stacks_its_samples() -> None:
    samples = TokenSamples(np.arange(1000, dtype=np.uint16), 9)
    indices = np.array([5, 0, 110, 5])
    inputs, targets = samples.batch(indices)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (4, 9)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs, torch.stack([samples[int(i)][0] for i in indices]))
    assert torch.equal(targets, torch.stack([samples[int(i)][1] for i in indices]))


def test_every_token_but_the_first_is_a_target_once() -> None:
    samples = TokenSamples(np.arange(101), 10)
    _, targets = samples.batch(np.arange(len(samples)))
    assert targets.flatten().tolist() == list(range(1, 101))


@pytest.mark.parametrize("index", [-1, 10, 11])
def test_an_index_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=r"range\(10\)"):
        TokenSamples(np.arange(101), 10)[index]


def test_too_few_tokens_are_refused_with_their_number_and_the_length_of_a_sample() -> None:
    with pytest.raises(DataError, match=r"there are 64 tokens, and one sample takes 65"):
        TokenSamples(np.zeros(64, dtype=np.uint8), 64)


def test_a_sequence_length_must_be_positive() -> None:
    with pytest.raises(ConfigError):
        TokenSamples(np.arange(10), 0)


def test_a_map_style_dataset_is_collated_as_torch_does() -> None:
    dataset = TensorDataset(torch.arange(12).reshape(6, 2), torch.arange(6) * 0.5)
    batch = MapSamples(dataset).batch(np.arange(6))
    expected = next(iter(DataLoader(dataset, batch_size=6)))
    assert all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True))


def test_a_dataset_of_dictionaries_goes_through_the_loader() -> None:
    dataset = [{"x": torch.tensor([float(i)]), "label": i} for i in range(8)]
    loader = Loader(MapSamples(dataset), seed=0, batch_size=4)
    batches = [batch for start in (0, 4) for batch in loader.microbatches(start, 0, 1, 4)]
    assert sorted(torch.cat([batch["label"] for batch in batches]).tolist()) == list(range(8))
    assert batches[0]["x"].shape == (4, 1)


def test_a_collate_function_may_be_given() -> None:
    samples = MapSamples(["a", "b", "c"], collate="".join)
    assert samples.batch(np.array([2, 0])) == "ca"


def test_a_dataset_without_random_access_or_without_samples_is_refused() -> None:
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(int, 1)

    with pytest.raises(DataError, match="Endless"):
        MapSamples(Endless())
    with pytest.raises(DataError, match="empty"):
        MapSamples([])


def test_any_map_style_dataset_is_data_as_it_is() -> None:
    dataset = TensorDataset(torch.arange(6))
    assert as_samples(dataset).batch(np.array([4, 1]))[0].tolist() == [4, 1]
    samples = TokenSamples(np.arange(100), 9)
    assert as_samples(samples) is samples
    with pytest.raises(DataError, match="a DataLoader was given as data") as caught:
        as_samples(DataLoader(dataset))
    assert "the dataset behind it" in caught.value.change
