"""What the pages say that need no run, held to the cost model and to formulas; and pages as files."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.analyze.diagnosis.run_follower import RunFollower
from shoal.cli.main import main
from shoal.predict.cost import AlphaBeta, find_algorithm
from shoal.predict.cost.collectives import MOVED, motion
from shoal.spec.run import write_event
from shoal.web.app import STATIC
from shoal.web.export import bundle, export
from shoal.web.live import ddp
from shoal.web.pages import PAGES, collectives, terms_of
from shoal.web.query import Query
from shoal.web.saves import saves
from shoal.web.schedules import schedules

PLAYED = [(collective, name) for collective, names in MOVED.items() for name in names]
PIPELINED = {"double-tree", "chain", "in-network"}  # their counts are the limit for small chunks
SCRIPTS = {
    each.name.removesuffix(".js"): each.read_text(encoding="utf-8")
    for each in STATIC.iterdir()
    if each.name.endswith(".js")
}


@pytest.mark.parametrize(("collective", "name"), PLAYED)
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (5, 1), (8, 1), (2, 2), (3, 3), (7, 2)])
def test_a_collective_that_is_played_gives_every_rank_what_it_has_to_have(collective, name, hosts, per_host):
    played = motion(collective, name, hosts, per_host)
    for state, step in zip(played.states(), played.steps, strict=False):
        for sender, _, slices in step.messages:
            assert all(state[sender][index] for index in slices), "a rank sends what it does not have"
    for slices in played.states()[-1][: hosts * per_host]:
        assert all(len(held) == played.whole for held in slices)


@pytest.mark.parametrize(("collective", "name"), [each for each in PLAYED if each[1] not in PIPELINED])
@pytest.mark.parametrize("hosts", [2, 3, 5, 8])
def test_the_steps_and_bytes_that_are_played_are_those_of_the_cost_model(collective, name, hosts):
    played = motion(collective, name, hosts)
    terms = terms_of(collective, name, hosts, 1)
    assert len(played.steps) == sum(term["steps"] for term in terms)
    longest = [max(len(slices) for _, _, slices in step.messages) for step in played.steps]
    assert sum(longest) / played.slices == pytest.approx(sum(term["path"] for term in terms))


@given(
    st.sampled_from(PLAYED), st.integers(2, 8), st.integers(1, 4), st.integers(0, 1 << 30),
    st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8),
)  # fmt: skip
def test_the_formula_of_the_page_is_the_time_of_the_cost_model(played, hosts, per_host, size, alpha, beta):
    collective, name = played
    terms = terms_of(collective, name, hosts, per_host)
    formula = sum(
        alpha * term["steps"] + beta * term["path"] * size for term in terms if term["level"] == "network"
    )
    if (collective, name) == ("all_reduce", "tree"):
        algorithms = [find_algorithm(half, "tree", "network") for half in ("reduce", "broadcast")]
    else:
        algorithms = [find_algorithm(collective, name, "network")]
    ranks = hosts * per_host
    assert formula == pytest.approx(
        sum(each.time(AlphaBeta(alpha, beta), ranks, size, per_host) for each in algorithms)
    )


def test_the_bubbles_of_the_page_are_those_of_the_papers():
    data = schedules(None, Query({"pp": "4", "microbatches": "12"}))
    bubbles = {each["name"]: each["bubble_over_ideal"] for each in data["schedules"]}
    assert bubbles["gpipe"] == bubbles["1f1b"] == pytest.approx(3 / 12)
    assert bubbles["interleaved"] == pytest.approx(3 / 12 / 2)
    assert bubbles["zb-h1"] == pytest.approx(3 / 12 / 3)
    assert bubbles["search"] <= min(bubbles.values())
    odd = schedules(None, Query({"pp": "4", "microbatches": "5"}))
    assert {each["name"] for each in odd["left_out"]} == {"interleaved", "dualpipe-v"}


def test_the_life_of_a_bucket_is_what_the_timeline_has(run):
    data = ddp(RunFollower(run), Query({"step": "7"}))
    (bucket,) = data["buckets"]
    assert bucket["ready"] == pytest.approx({0: 0.15, 1: 0.17})
    assert (bucket["last"], bucket["bytes"], bucket["algorithm"]) == (1, 1 << 20, "ring")
    assert (bucket["all_ready"], bucket["begins"]) == pytest.approx((0.17, 0.17))
    assert bucket["blocked"] == pytest.approx({0: 0.1, 1: 0.08})
    assert [rank["blocked"] for rank in data["ranks"]] == pytest.approx([0.1, 0.08])


def test_checkpoints_pauses_restarts_and_trouble_are_found(run):
    for name, file in (
        ("step-00000010", "manifest.json"),
        ("step-00000020.tmp", "x"),
        ("step-00000005", "x"),
    ):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / file).write_bytes(b"1234")
    with run.timeline_file(0).open("a") as file:
        file.write('{"kind":"checkpoint","start":9.4,"duration":0.5}\n')
        file.write('{"timeline":1,"rank":0,"origin_unix_ns":1700000060000000000}\n')
    (run.log / "rank-00001.log").write_text("step 1\nRuntimeError: the device is gone\n")
    lost = {"time": 1.7e9, "event": "lost", "members": [1], "present": [0], "reason": "rank 1 was killed"}
    run.members_file.write_text(json.dumps(lost) + '\n[]\n{"time":"x"}\n{"time":1')
    data = saves(RunFollower(run), Query())
    assert data["members"] == [
        {"unix": 1.7e9, "event": "lost", "members": [1], "present": [0], "reason": "rank 1 was killed"}
    ]
    states = {each["name"]: each["state"].split(",")[0] for each in data["checkpoints"]}
    assert states == {
        "step-00000010": "complete",
        "step-00000020.tmp": "being written",
        "step-00000005": "without manifest: not usable",
    }
    assert [each["seconds"] for each in data["pauses"]] == [0.5]
    assert [(each["unix"], each["ranks"]) for each in data["restarts"]] == [(1.7e9, 2), (1.7e9 + 60, 1)]
    assert data["trouble"] == [{"log": "rank-00001.log", "line": "RuntimeError: the device is gone"}]
    best = (2 * 24 * 3600 * 0.5) ** 0.5  # Young
    assert data["interval"]["best_steps"] == round(best / 0.3)
    assert data["account"] is None


def test_the_interval_follows_the_failures_that_were_seen(run):
    with run.timeline_file(0).open("a") as file:
        file.write('{"kind":"checkpoint","start":9.4,"duration":0.5}\n')
    write_event(run.events_file, "began", at=0.0, launched=0.0, ranks=2)
    write_event(run.events_file, "spent", at=7200.0, step=9, seconds={"steps": 7200.0})
    write_event(run.events_file, "failed", at=7200.0)
    data = saves(RunFollower(run), Query())
    assert data["account"]["failures"] == 1
    assert data["interval"]["mtbf_hours"] == (24 + 2) / 2
    assert data["interval"]["best_steps"] == round((2 * 13 * 3600 * 0.5) ** 0.5 / 0.3)


@pytest.mark.parametrize("name", PAGES)
def test_every_page_has_a_script_that_can_be_put_in_one_file(name):
    text = bundle(SCRIPTS, name)
    assert not re.search(r"^\s*(import|export)\b", text, re.MULTILINE)


def test_modules_import_only_what_is_exported():
    for text in SCRIPTS.values():
        imports = re.findall(r'^import \{ ([^}]*) \} from "\./([a-z-]+)\.js";$', text, re.MULTILINE)
        assert len(imports) == len(re.findall(r"^import\b", text, re.MULTILINE)), "only this form is bundled"
        for names, module in imports:
            for name in names.split(", "):
                exported = rf"^export (async )?(function|const) {name}\b"
                assert re.search(exported, SCRIPTS[module], re.MULTILINE), name
                assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} is imported and not used"


def test_pages_as_files_hold_their_data_and_nothing_that_runs(hostile, tmp_path):
    names = [name for name, page in PAGES.items() if page.needs_run]
    written = export(hostile.path, tmp_path / "out", names)
    assert [path.stem for path in written] == names
    for path in written:
        text = path.read_text()
        assert re.findall(r'<a href="(\w+)\.html"', text) == names, (
            "no link leads to a page that is not there"
        )
        scripts = re.findall(r"<script[^>]*>", text)
        assert scripts == [
            f'<script defer src="static/{path.stem}.js">',
            '<script type="application/json" id="inlined">',
        ]
        inlined = re.search(r'id="inlined">(.*?)</script>', text, re.DOTALL)[1]
        assert json.loads(inlined) == json.loads(
            (tmp_path / "out" / "data" / f"{path.stem}.json").read_text()
        )
        assert "Content-Security-Policy".lower() in text
    assert (tmp_path / "out" / "static" / "style.css").stat().st_size > 1000


def test_the_command_writes_pages_and_names_a_page_that_is_not_there(run, tmp_path, capsys):
    assert main(["web", str(run.path), "--export", str(tmp_path / "out"), "--page", "collectives"]) == 0
    data = json.loads((tmp_path / "out" / "data" / "collectives.json").read_text())
    values = {"algorithm": "tree", "collective": "all_reduce", "hosts": "4", "per_host": "2"}
    key = "algorithm=tree&collective=all_reduce&hosts=4&per_host=2"
    assert data[key] == json.loads(json.dumps(collectives(None, Query(values))))
    assert main(["web", str(run.path), "--export", str(tmp_path / "out"), "--page", "none"]) == 2
    assert "live" in capsys.readouterr().err
