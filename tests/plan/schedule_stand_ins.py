"""Schedules of any size, for property tests."""

from hypothesis import strategies as st

from shoal.spec.plan.schedules import NAMES, kind_of, make

V_SHAPED = ("zb-v", "dualpipe-v")
ONE_STAGE = ("gpipe", "1f1b", "zb-h1")


@st.composite
def made(draw, names=NAMES, most_ranks=8, most_microbatches=24):
    """A named schedule of any size that its constraints allow."""
    name, p = draw(st.sampled_from(names)), draw(st.integers(1, most_ranks))
    if name in ONE_STAGE:
        virtual = 1
    elif name in V_SHAPED:
        virtual = 2
    else:
        virtual = draw(st.integers(kind_of(name).least_virtual, 4))
    if name == "interleaved":
        microbatches = p * draw(st.integers(1, max(1, most_microbatches // p)))
    else:
        microbatches = draw(st.integers(2 * p if name == "dualpipe-v" else 1, most_microbatches))
    return make(name, p, virtual, microbatches)
