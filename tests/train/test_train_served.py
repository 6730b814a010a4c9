"""Parameter servers under the Trainer: rounds report and train what ranks in step do."""

import pytest
import torch
from served_stand_ins import train, train_served


def test_workers_draw_what_ranks_in_step_draw(ranks):
    """A model with torch's dropout has in each worker the masks of the rank with its data."""
    expected = ranks.run(train, 2, "dp=2", None, None)[0]
    told = train_served("dp=2,exchange=server,servers=2", 2, 2)
    for worker in told:
        assert worker["loss"] == pytest.approx(expected["loss"], rel=1e-5)  # the mean of all workers
        torch.testing.assert_close(worker["weights"], expected["weights"], rtol=1e-5, atol=1e-6)
