"""Files that are read while they are written."""

import os

from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.run.metrics_tail import FileTail

TEXT = "".join(f"line {number} of the file äöü\n" for number in range(50))


def lines_of(tail):
    return [line.decode() for lines in tail.chunks() for line in lines]


@given(st.lists(st.integers(1, 200), max_size=30), st.integers(1, 300))
def test_every_line_comes_once_and_whole_however_it_is_written(tmp_path_factory, cuts, at_once):
    path = tmp_path_factory.mktemp("tail") / "file"
    tail = FileTail(path, at_once=at_once)
    found, data = [], TEXT.encode()
    for cut in [*cuts, len(data)]:
        with path.open("ab") as file:
            file.write(data[:cut])
        data = data[cut:]
        found += lines_of(tail)
    assert found == TEXT.splitlines()


def test_a_file_that_is_not_there_or_is_replaced_is_read_from_its_beginning(tmp_path):
    path, forgotten = tmp_path / "file", []
    tail = FileTail(path, lambda: forgotten.append(tail.position))
    assert lines_of(tail) == []
    path.write_text("one\ntwo\ntor")
    assert lines_of(tail) == ["one", "two"]
    (tmp_path / "new").write_text("three\nfour\nfive\nsix\n")
    os.replace(tmp_path / "new", path)
    assert lines_of(tail) == ["three", "four", "five", "six"]
    path.write_text("7\n")  # shorter
    assert lines_of(tail) == ["7"]
    assert forgotten == [0, 0, 0]


def test_a_line_without_an_end_is_dropped(tmp_path):
    path = tmp_path / "file"
    tail = FileTail(path)
    path.write_bytes(b"x" * (3 << 20))
    assert lines_of(tail) == []
    assert tail.position == 3 << 20
