"""The pages keep up with the code, and their links lead somewhere."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import shoal
import shoal.errors
from shoal.spec.plan import Plan
from shoal.train import load_config

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))
_SPEC = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generate)

PAGES = [*generate.pages(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def name(path):
    return str(path.relative_to(ROOT))


def parts_of(example):
    """What pages include of an example: all of it, or the parts that it names."""
    if "__pycache__" in example.parts or (example.parent / "README.md").is_file():
        return []  # a folder with a README of its own explains itself
    titles = re.findall(r"^# part: (.+)$", example.read_text(), re.MULTILINE)
    return [f"{name(example)}: {title}" for title in titles] or [name(example)]


@pytest.mark.parametrize("path", generate.pages(), ids=name)
def test_generated_parts_are_what_the_code_says(path):
    page = path.read_text()
    assert page == generate.render(page), "run: python docs/generate.py"


def test_every_key_setting_layer_and_example_is_on_a_page():
    parts = [
        part for path in generate.pages() for part in re.findall("generated: (.+?) -->", path.read_text())
    ]
    examples = [part for path in (ROOT / "examples").rglob("*.*") for part in parts_of(path)]
    api = {part for part in parts if part.startswith("api: ")}
    tables = {
        "algorithms in shared memory",
        "algorithms over the network",
        "configuration",
        "constants of devices",
        "constants of links",
        "errors",
        *(f"fields of {kind.__name__}" for kind in generate._DESCRIBED),
        "goodput of many",
        "kinds and reasons",
        "kinds counted",
        "kinds under Plans",
        "layers",
        "listeners beside strangers",
        "lost hosts",
        "options of a group",
        "plan",
        "policy of verdicts",
        "presets",
        "runs of the tests",
        "schedules compared",
        "signals",
        "shoal cluster export dgx-h100:64",
        "shoal cluster show examples/12_cluster.toml",
        "shoal memory dp=8,tp=4,shard=zero1,precision=bf16,microbatch=1 --model llama3-8b --cluster dgx-h100 "
        "--batch 64",
        "shoal plan --model 1b --cluster examples/13_parts.toml --batch 256 --top 3",
        "shoal plan --model llama3-8b --cluster dgx-h100:64 --batch 256 --top 3",
        "shoal scale --model 1b --cluster dgx-a100 --batch 256 --devices 8..256",
        "slowest of many",
        "status of the GPU run",
        "the zoo",
        "what a rank sends",
        *(f"choosing: {name}" for name in generate.CHOOSING),
        *(f"model of shoal.predict.cost.{name}" for name in generate.MODELLED),
    }
    assert set(parts) == {*tables, *examples, *api}
    names = [name for part in api for name in part.split()[1:]]
    assert len(names) == len(set(names))
    assert {f"shoal.{name}" for name in shoal.__all__} <= set(names)
    assert {f"shoal.errors.{name}" for name in shoal.errors.__all__ if name != "nearest"} <= set(names)


def test_a_generated_part_that_is_behind_is_written_anew():
    page = "before\n<!-- generated: examples/04_config.toml -->\nold\n<!-- end -->\nafter\n"
    written = generate.render(page)
    assert (ROOT / "examples" / "04_config.toml").read_text() in written
    assert "old" not in written
    assert written.startswith("before\n")
    assert written.endswith("<!-- end -->\nafter\n")


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_within_the_repository_lead_somewhere(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_files_of_the_library_that_a_page_names_are_there(path):
    for named in re.findall(r"`((?:shoal|docs|tests|examples|benchmarks)/[\w/.]+)`", path.read_text()):
        assert (ROOT / named).exists(), named


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_keys_that_a_page_sets_exist(path):
    for setting in re.findall(r"(?:--set |`)([a-z_]+\.[a-z_]+=[\w.:\"-]+|steps=\d+)", path.read_text()):
        load_config(settings=[setting])


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_plans_that_a_page_writes_are_plans(path):
    plans = r"\b(?:dp=\d+|shard=[a-z]+\d?|exchange=\w+)(?:,\w+=\w+(?:[-:.]\w+)*)*"
    for text in re.findall(plans, path.read_text()):
        Plan.parse(text)
