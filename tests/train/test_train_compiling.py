"""What a run says of compiling."""

import torch

from shoal.train.compiling import Compiling


def test_compiling_is_told_when_it_is_over_and_when_it_comes_again():
    torch._dynamo.reset()
    told = []
    watch = Compiling(told.append)
    double = torch.compile(lambda tensor: 2 * tensor, backend="eager", dynamic=False)
    for step, size in enumerate((3, 3, 3, 5, 5), start=1):
        double(torch.ones(size))
        watch.stepped(step)
    watch.close()
    double(torch.ones(7))
    watch.stepped(6)
    assert len(told) == 2
    assert told[0].startswith("compiling the model took ")
    assert told[0].endswith(" of step 1")
    assert told[1].startswith("step 4 compiled again, for ")
