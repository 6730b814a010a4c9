"""`shoal checkpoint diff`: two checkpoints, tensor by tensor, whoever wrote them."""

import json
import math

import pytest
import torch
from rank_stand_ins import on_ranks

from shoal.checkpoint import Difference, Piece, compare, save
from shoal.cli.main import main


def values():
    chance = torch.Generator().manual_seed(0)
    return {
        "model/matrix": torch.randn(5, 7, generator=chance),
        "model/half": torch.randn(9, generator=chance).to(torch.bfloat16),
        "optimizer/exp_avg/matrix": torch.randn(5, 7, generator=chance),
        "optimizer-tensor/step/matrix": torch.tensor(3.0),
    }


def saved(folder, tensors, ranks=1):
    """A checkpoint of which each rank wrote rows."""

    def write(coordinator):
        pieces = [Piece.whole(f"rank/{coordinator.rank}/random.torch", torch.randn(3))]
        for name, tensor in tensors.items():
            size = tensor.numel()
            start, stop = (size * rank // ranks for rank in (coordinator.rank, coordinator.rank + 1))
            if start < stop:
                part = tensor.flatten()[start:stop].clone()
                pieces.append(Piece(name, tuple(tensor.shape), start, stop, part))
        return save(folder, 1, pieces, {}, coordinator)

    return on_ranks(ranks, write)[0]


def test_equal_tensors_are_equal_whoever_wrote_them(tmp_path, capsys):
    one, three = saved(tmp_path / "one", values()), saved(tmp_path / "three", values(), ranks=3)
    assert list(compare(one, three)) == []
    assert main(["checkpoint", "diff", str(one), str(three)]) == 0
    assert capsys.readouterr().out.startswith("EQUAL: all 4 tensors, between ")


def test_what_differs_is_named_with_the_largest_difference(tmp_path, capsys):
    first, other = values(), values()
    other["model/matrix"][2, 3] += 0.5
    other["model/matrix"][4, 1] -= 0.25
    other["optimizer/exp_avg/matrix"][0, 0] = math.inf
    other["model/new"] = torch.zeros(2)
    other["model/half"] = torch.zeros(3, dtype=torch.bfloat16)
    one, two = saved(tmp_path / "one", first), saved(tmp_path / "two", other, ranks=2)
    largest = first["model/matrix"].abs().max().item()
    found = {each.name: each for each in compare(one, two)}
    assert found["model/matrix"] == Difference(
        "model/matrix",
        elements=35,
        differing=2,
        largest=pytest.approx(0.5, rel=1e-6),
        magnitude=pytest.approx(largest),
    )
    assert found["optimizer/exp_avg/matrix"].largest == math.inf
    assert found["model/new"].problem == "only in the second"
    assert found["model/half"].problem == "shape [9] and [3]"
    assert len(found) == 4
    assert main(["checkpoint", "diff", str(one), str(two)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [
        "model/half",
        "model/new",
        "optimizer/exp_avg/matrix",
        "model/matrix",
    ]
    assert lines[-1].startswith("4 of 5 tensors differ, between ")
    assert main(["checkpoint", "diff", str(one), str(two), "--weights", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told] == ["model/half", "model/new", "model/matrix"]
    assert main(["checkpoint", "diff", str(one), str(two), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[2]["largest"] is None


def test_nan_is_equal_to_nan_alone(tmp_path):
    first, same, other = values(), values(), values()
    for each in (first, same):
        each["model/matrix"][1, 1] = math.nan
    paths = [saved(tmp_path / str(number), each) for number, each in enumerate((first, same, other))]
    assert list(compare(paths[0], paths[1])) == []
    (found,) = compare(paths[0], paths[2])
    assert (found.differing, found.largest) == (1, math.inf)


def test_a_path_that_is_wrong_is_named(tmp_path, capsys):
    one = saved(tmp_path / "one", values())
    assert main(["checkpoint", "diff", str(one), str(tmp_path / "onee")]) == 2
    assert "'one'" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["checkpoint", "diff", str(tmp_path / "empty"), str(one)]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err


def test_a_difference_between_dtypes_is_one_of_values(tmp_path):
    first, other = values(), values()
    other["model/half"] = first["model/half"].float()
    paths = [saved(tmp_path / str(number), each) for number, each in enumerate((first, other))]
    assert list(compare(*paths)) == []
