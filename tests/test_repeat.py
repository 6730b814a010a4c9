"""What `make test-repeat` keeps of a run."""

import repeat

OUTPUT = """\
........F                                                                [100%]
=========================== short test summary info ============================
FAILED tests/a/test_a.py::test_one[dp=2] - AssertionError: 1 is not 2
ERROR tests/b/test_b.py
1 failed, 11807 passed, 16 skipped, 2 warnings, 1 error in 823.12s (0:13:43)
"""


def test_a_line_has_the_counts_and_names_what_failed():
    line = repeat.line_of(OUTPUT, 1, 840.4, 4)
    assert (line["passed"], line["skipped"], line["seconds"], line["busy"]) == (11807, 16, 840, 4)
    assert line["failed"] == ["tests/a/test_a.py::test_one[dp=2]", "tests/b/test_b.py"]


def test_a_run_that_ends_before_its_tests_is_not_taken_for_a_green_one():
    assert repeat.line_of("ruff: wrong\n", 2, 3.0, 0)["failed"] == ["make test ended with 2"]
    assert repeat.line_of("11807 passed in 800.00s\n", 0, 840.0, 0)["failed"] == []
