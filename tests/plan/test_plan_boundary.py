from hypothesis import given, settings
from hypothesis import strategies as st
from plan_stand_ins import plans

from shoal.spec.plan import Boundary, Mesh


@given(plans(), st.data())
def test_a_rank_sends_to_the_one_that_differs_along_the_pipeline_alone(plan, data):
    mesh = Mesh.of(plan)
    sender, receiver = (data.draw(st.integers(0, plan.pp - 1)) for _ in range(2))
    expected = {(line[sender], line[receiver]) for line in mesh.groups("pp")}
    assert sorted(Boundary.of(plan, sender, receiver).pairs()) == sorted(expected)


@settings(max_examples=300)
@given(plans(), st.data())
def test_a_boundary_crosses_groups_of_devices_if_one_of_its_pairs_does(plan, data):
    sender, receiver = (data.draw(st.integers(0, plan.pp - 1)) for _ in range(2))
    boundary, devices = Boundary.of(plan, sender, receiver), data.draw(st.integers(1, plan.ranks + 1))
    crossing = (one // devices != other // devices for one, other in boundary.pairs())
    assert boundary.crosses(devices) == any(crossing)
