"""Plans of a few ranks, in any order of their axes."""

import itertools

from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.spec.plan import DEFAULT_ORDER, FULLY_SHARDED, UNSHARDED, Plan, divisors

ORDERS = ["-".join(axes) for axes in itertools.permutations(DEFAULT_ORDER.split("-"))]


@st.composite
def plans(draw):
    dp, cp, tp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    shard = draw(st.sampled_from((UNSHARDED.name, FULLY_SHARDED.name)))
    replicate = draw(st.sampled_from(divisors(dp))) if shard != UNSHARDED.name else 1
    tensor, order = draw(st.sampled_from(("sequence", "plain"))), draw(st.sampled_from(ORDERS))
    degrees = {"dp": dp, "cp": cp, "tp": tp, "pp": pp, "replicate": replicate}
    return draw(
        st.sampled_from(list(_legal({**degrees, "shard": shard, "tensor": tensor, "order": order}, cp)))
    )


def _legal(settings, cp):
    """With each number of ranks with other experts that the order allows."""
    for ep in divisors(settings["dp"] // settings["replicate"] * cp):
        try:
            yield Plan(**settings, ep=ep)
        except PlanError:
            assert settings["order"] != DEFAULT_ORDER
