"""Lines of ranks on their way to the host that leads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.local.output import Relay


def lines_of(batches, rank, descriptor=1):
    texts = [text for batch in batches for each, to, text in batch if (each, to) == (rank, descriptor)]
    return [line for text in texts for line in text.split("\n")]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2), st.text("ab\n", max_size=20)), max_size=40))
def test_what_ranks_write_arrives_as_whole_lines_in_their_order(writes):
    relay, batches = Relay(), []
    for rank, descriptor, text in writes:
        relay.add(rank, descriptor, text.encode())
        batches.append(relay.take())
        relay.shown()
    batches.append(relay.take_all())
    for source in {(rank, descriptor) for rank, descriptor, _ in writes}:
        text = "".join(text for *each, text in writes if tuple(each) == source)
        assert "\n".join(lines_of(batches, *source)) == text.removesuffix("\n")


def test_the_next_batch_waits_until_the_last_is_shown():
    relay = Relay()
    relay.add(0, 1, b"one\n")
    assert relay.take() == [(0, 1, "one")]
    relay.add(0, 1, b"two\n")
    assert relay.take() == []
    relay.shown()
    assert relay.take() == [(0, 1, "two")]


@given(st.integers(1, 200), st.integers(0, 3))
def test_a_rank_that_prints_without_end_loses_lines_which_are_counted_and_others_lose_none(length, taken):
    relay, batches = Relay(), []
    for number in range(400):
        relay.add(0, 1, (b"x" * length + b"\n") * 100)
        relay.add(1, 1, f"line {number}\n".encode() if number < 100 else b"")
        if number % 100 < taken:
            batches.append(relay.take())
            relay.shown()
    held = relay.take_all()
    assert sum(len(text) for _, _, text in held) < 200_000
    batches.append(held)
    assert lines_of(batches, 1) == [f"line {number}" for number in range(100)]
    notes = lines_of(batches, 0, descriptor=2)
    lost = sum(int(note.split()[1].replace(",", "")) for note in notes)
    assert lines_of(batches, 0).count("x" * length) + lost == 40_000
    assert "log/rank-00000.log" in notes[0]


def test_a_line_without_an_end_is_passed_on_in_parts():
    relay = Relay()
    for _ in range(10):
        relay.add(0, 1, b"x" * 1000)
    parts = lines_of([relay.take_all()], 0)
    assert "".join(parts) == "x" * 10_000
    assert max(map(len, parts)) <= 4096
