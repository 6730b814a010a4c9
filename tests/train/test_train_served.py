"""Parameter servers under the Trainer: rounds report and train what ranks in step do."""

import pytest
import torch
from served_stand_ins import train, train_masked, train_served


@pytest.mark.parametrize("clip", [None, 0.3])
def test_workers_in_rounds_train_as_ranks_in_step(ranks, clip):
    """A model with torch's dropout has in each worker the masks of the rank with its data.

    The mean of all gradients is clipped: a worker's own gradients are longer than that.
    """
    expected = ranks.run(train, 2, "dp=2", None, clip)[0]
    told = train_served("dp=2,exchange=server,servers=2", 2, 2, clip)
    if clip is not None:
        assert min(expected["gradient_norm"]) > clip
    for worker in told:
        if clip is not None:
            assert worker["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-5)
        assert worker["loss"] == pytest.approx(expected["loss"], rel=1e-5)  # the mean of all workers
        torch.testing.assert_close(worker["weights"], expected["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [False, True])
def test_workers_with_few_or_no_targets_train_as_ranks_in_step(ranks, classes):
    """The mean is over the targets of all workers; who has none follows, and leaves no step out."""
    expected = ranks.run(train_masked, 2, "dp=2", None, classes)[0]
    told = train_served("dp=2,exchange=server,servers=2", 2, 2, classes, job=train_masked)
    for worker in told:
        assert worker["skipped"] == expected["skipped"] == 0
        for name in ("loss", "gradient_norm"):
            assert worker[name] == pytest.approx(expected[name], rel=1e-5)
        torch.testing.assert_close(worker["weights"], expected["weights"], rtol=1e-5, atol=1e-6)
