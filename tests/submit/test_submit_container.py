"""The Containerfile."""

from __future__ import annotations

import json

import pytest

from shoal.errors import ConfigError
from shoal.launch.submit import Container


def test_the_image_has_no_compiler_and_runs_the_words_as_another_user():
    words = ("train", "--set", 'model="tiny"')
    text = Container(words=words, base="python:3.12-slim", extras=("hf", "ray")).text
    build, _, image = text.partition("\n\n")
    assert "'/source[hf,ray]'" in build
    assert "g++" in build
    lines = image.splitlines()
    assert lines[0] == "FROM python:3.12-slim"
    assert not [line for line in lines if "apt-get" in line]
    assert "USER 1000" in lines
    entry, command = (line.partition(" ")[2] for line in lines[-2:])
    assert json.loads(entry) == ["python", "-m", "shoal"]
    assert tuple(json.loads(command)) == words


@pytest.mark.parametrize("base", ["", "a b", "a\nRUN x"])
def test_a_base_that_is_no_image_is_refused(base):
    with pytest.raises(ConfigError, match="no name of an image"):
        Container(words=("train",), base=base)
