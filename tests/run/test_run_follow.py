"""Files that are read while they are written."""

import os

from hypothesis import given
from hypothesis import strategies as st

from shoal.run.follow import FollowedFile, sampled_lines

TEXT = "".join(f"line {number} of the file äöü\n" for number in range(50))


@given(st.lists(st.integers(1, 200), max_size=30), st.integers(30, 300))
def test_every_line_comes_once_and_whole_however_it_is_written(tmp_path_factory, cuts, at_once):
    path = tmp_path_factory.mktemp("follow") / "file"
    followed = FollowedFile(path, at_once=max(at_once, 200))
    found, data = [], TEXT.encode()
    for cut in [*cuts, len(data)]:
        with path.open("ab") as file:
            file.write(data[:cut])
        data = data[cut:]
        if cut <= 200:
            found += followed.lines()
    rest = followed.lines()
    lines = TEXT.splitlines()
    assert found == lines[: len(found)]
    assert rest == lines[len(lines) - len(rest) :]  # passed over, where more came than is read at once


def test_a_file_that_is_not_there_or_is_replaced_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "file"
    followed = FollowedFile(path)
    assert followed.lines() == []
    path.write_text("one\ntwo\ntor")
    assert followed.lines() == ["one", "two"]
    (tmp_path / "new").write_text("three\nfour\nfive\nsix\n")
    os.replace(tmp_path / "new", path)
    assert followed.lines() == ["three", "four", "five", "six"]


def test_a_line_without_an_end_takes_no_memory(tmp_path):
    path = tmp_path / "file"
    followed = FollowedFile(path)
    path.write_bytes(b"x" * (3 << 20))
    assert followed.lines() == []
    assert len(followed._torn) == 0


def test_sampled_lines_are_whole_and_evenly_spread(tmp_path):
    path = tmp_path / "file"
    path.write_text("".join(f"{number:07d}\n" for number in range(100_000)) + "torn")
    numbers = [int(line) for line in sampled_lines(path, 101)]
    assert len(numbers) == 101
    assert max(abs(number - 100_000 * at / 101) for at, number in enumerate(numbers)) < 3
    path.write_text("1\n2\n3\n")
    assert [line.strip() for line in sampled_lines(path, 100)] == ["1", "2", "3"]
