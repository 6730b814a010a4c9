"""Runs for the pages."""

import pytest
from web_stand_ins import DESCRIPTION, write_metrics, write_timeline

from shoal.spec.run import Run


@pytest.fixture
def run(tmp_path):
    made = Run.create(tmp_path / "runs" / "tiny", DESCRIPTION)
    write_timeline(made, range(1, 31))
    write_metrics(made, range(1, 31))
    return made


@pytest.fixture
def hostile(tmp_path):
    """A run of which each text is markup that runs a script, if a page reads it as HTML."""
    text = "</script><script>window.taken=1</script><img src=x onerror=window.taken=1>"
    description = {**DESCRIPTION, "name": text, "plan": text, "created": text}
    description |= {"model": {"name": text, "parameters": 1}, "device": {"name": text}}
    made = Run.create(tmp_path / "hostile" / "<img src=x onerror=window.taken=1>", description)
    write_timeline(made, range(1, 31), name=text)
    write_metrics(made, range(1, 31))
    (made.log / "rank-00000.log").write_text(f"RuntimeError: {text}\n")
    with made.metrics_file.open("a") as file:
        file.write('{"step":"<script>"}\nnull\n{"step":31,"loss":"<b>"}\n{"step":32,"lo')
    return made
