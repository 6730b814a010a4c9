"""The output of all ranks in one stream."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.local.output import NamedLines


@given(st.text("ab\n", max_size=40), st.lists(st.integers(1, 5), max_size=10))
def test_lines_of_other_ranks_are_passed_on_whole_with_their_rank(text, cuts):
    lines, data, passed = NamedLines(3, overwrites=False), text.encode(), []
    for cut in [*cuts, len(data)]:
        passed.append(lines.take(data[:cut]))
        data = data[cut:]
    assert all(each == b"" or each.endswith(b"\n") for each in passed)
    whole = b"".join(passed) + lines.end()
    assert whole.decode() == "".join(f"[rank 3] {line}\n" for line in text.split("\n")[:-1]) + (
        f"[rank 3] {text.split(chr(10))[-1]}\n" if not text.endswith("\n") and text else ""
    )


def test_lines_of_rank_0_are_passed_on_whole_without_a_number():
    lines = NamedLines(0, overwrites=False)
    assert [lines.take(data) for data in (b"a", b"b\nc\nd")] == [b"", b"ab\nc\n"]
    assert lines.end() == b"d\n"


def test_on_a_terminal_rank_0_is_passed_on_as_it_comes_and_others_clear_its_unfinished_line():
    assert NamedLines(0, overwrites=True).take(b"\r\x1b[Kstep 1") == b"\r\x1b[Kstep 1"
    assert NamedLines(1, overwrites=True).take(b"a\nb\n") == b"\r\x1b[K[rank 1] a\n\r\x1b[K[rank 1] b\n"


def test_a_line_without_an_end_takes_no_memory():
    lines = NamedLines(1, overwrites=False)
    assert lines.take(b"x" * (1 << 20)) == b""
    assert lines.take(b"xx") == b"[rank 1] " + b"x" * ((1 << 20) + 2) + b"\n"
    assert lines.end() == b""


def test_with_several_hosts_every_line_has_its_host_also_those_of_rank_0():
    assert (
        NamedLines(0, overwrites=False, host="node1").take(b"a\nb\n")
        == b"[node1 rank 0] a\n[node1 rank 0] b\n"
    )
