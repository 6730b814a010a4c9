"""Parameter servers under the Trainer: rounds report and train what ranks in step do."""

import pytest
import torch
from served_stand_ins import STEPS, train, train_served


def test_workers_draw_what_ranks_in_step_draw(ranks):
    """A model with torch's dropout has in each worker the masks of the rank with its data."""
    expected = ranks.run(train, 2, "dp=2", None, None)[0]
    told = train_served("dp=2,exchange=server,servers=2", 2, 2)
    losses = [sum(each["loss"][step] for each in told) / 2 for step in range(STEPS)]
    assert losses == pytest.approx(expected["loss"], rel=1e-5)
    for worker in told:
        torch.testing.assert_close(worker["weights"], expected["weights"], rtol=1e-5, atol=1e-6)
