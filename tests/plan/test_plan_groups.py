"""Which ranks communicate, held to the mesh."""

from hypothesis import given
from plan_stand_ins import plans

from shoal.spec.plan import Groups, Mesh


@given(plans())
def test_groups_are_those_of_the_mesh(plan):
    mesh, groups = Mesh.of(plan), Groups.of(plan)
    is_cut = plan.sharding.cuts_optimizer
    cut, copied = (("shard", "cp"), ("replicate",)) if is_cut else ((), ("replicate", "cp"))
    split = ("cp",) if plan.tensor == "plain" else ("cp", "tp")
    for pattern, axes in (
        (groups.world, ("pp", "dp", "cp", "tp")),
        (groups.dp, ("dp",)),
        (groups.data, ("dp", "cp")),
        (groups.cp, ("cp",)),
        (groups.tp, ("tp",)),
        (groups.sequence, split),
        (groups.pp, ("pp",)),
        (groups.stage, ("dp", "cp", "tp")),
        (groups.dense.shards, cut),
        (groups.dense.replicas, copied),
        (groups.whole.replicas, (*copied, "tp")),
    ):
        assert sorted(pattern.tile(plan.ranks)) == sorted(mesh.groups(*axes)), axes
    if is_cut or plan.ep == 1:
        assert sorted(groups.parts.tile(plan.ranks)) == sorted(mesh.groups(*cut, "pp", "tp"))


@given(plans())
def test_ranks_with_the_same_experts_keep_them_together_and_all_experts_are_in_a_group(plan):
    mesh, groups = Mesh.of(plan), Groups.of(plan)

    within = ("shard", "cp") if plan.sharding.cuts_optimizer else ("dp", "cp")

    def experts(rank):
        return mesh.coordinate(rank, *within) % plan.ep

    for members in groups.ep.tile(plan.ranks):
        assert sorted(map(experts, members)) == list(range(plan.ep))
    shards = {rank: group for group in groups.experts.shards.tile(plan.ranks) for rank in group}
    for members in groups.experts.replicas.tile(plan.ranks):
        together = [rank for member in members for rank in shards[member]]
        assert len(set(together)) == len(together)
        first = members[0]
        assert {experts(rank) for rank in together} == {experts(first)}
        stage = {
            rank for rank in range(plan.ranks) if mesh.coordinate(rank, "pp") == mesh.coordinate(first, "pp")
        }
        assert len(together) == len(stage) // plan.ep
    for members in groups.parts.tile(plan.ranks):
        of_first_stage = [rank for rank in members if mesh.coordinate(rank, "pp") == 0]
        assert {experts(rank) for rank in of_first_stage} == set(range(plan.ep))
