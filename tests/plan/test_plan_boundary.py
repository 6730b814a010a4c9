from hypothesis import given
from hypothesis import strategies as st
from plan_stand_ins import plans

from shoal.plan import Boundary, Mesh


@given(plans(), st.data())
def test_a_rank_sends_to_the_one_that_differs_along_the_pipeline_alone(plan, data):
    mesh = Mesh.of(plan)
    sender, receiver = (data.draw(st.integers(0, plan.pp - 1)) for _ in range(2))
    expected = {(line[sender], line[receiver]) for line in mesh.groups("pp")}
    assert sorted(Boundary.of(plan, sender, receiver).pairs()) == sorted(expected)


@given(plans(), st.integers(1, 300), st.data())
def test_a_boundary_crosses_groups_of_devices_if_one_of_its_pairs_does(plan, devices, data):
    sender, receiver = (data.draw(st.integers(0, plan.pp - 1)) for _ in range(2))
    boundary = Boundary.of(plan, sender, receiver)
    assert boundary.crosses(devices) == any(
        one // devices != other // devices for one, other in boundary.pairs()
    )
