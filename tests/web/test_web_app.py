"""What `shoal web` answers."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from starlette.testclient import TestClient
from web_stand_ins import write_metrics

from shoal.cli.main import main
from shoal.errors import ConfigError, MissingExtraError
from shoal.web import serve
from shoal.web.app import Folder, _Answers, make_app
from shoal.web.pages import PAGES
from shoal.web.query import Query

HOST = "127.0.0.1:8000"


def client_of(path):
    app = make_app(Folder(path), "token", frozenset({HOST}))
    return TestClient(app, base_url=f"http://{HOST}", headers={"authorization": "Bearer token"})


@pytest.mark.parametrize("name", [page.name for page in PAGES.values() if page.needs_run])
def test_pages_of_a_run_show_the_run_that_is_named(run, name):
    client = client_of(run.path.parent)
    newest, named = client.get(f"/data/{name}"), client.get(f"/data/{name}?run=tiny")
    assert newest.status_code == named.status_code == 200
    assert client.get(f"/{name}").status_code == 200


def test_a_folder_without_runs_has_the_pages_that_need_none(tmp_path):
    client = client_of(tmp_path)
    assert client.get("/").url.path == "/plans"
    assert client.get("/data/live").status_code == 404
    assert client.get("/data/schedules").status_code == 200


@pytest.mark.parametrize(
    "address",
    [
        "/data/schedules?pp=1000000",
        "/data/schedules?pp=four",
        "/data/schedules?forward=nan",
        "/data/schedules?microbatches=1e99",
        "/data/collectives?hosts=-1",
        "/data/collectives?collective=gather",
        "/data/plans?model=nobody",
        "/data/plans?devices=3&cluster=dgx-h100&batch=0",
        "/data/timeline?step=x",
        "/data/timeline?from=inf",
        "/data/live?measure=none",
    ],
)
def test_what_cannot_be_answered_is_named_with_what_is_possible(run, address):
    answer = client_of(run.path).get(address)
    assert answer.status_code == 400
    assert answer.json().keys() == {"error", "possible", "change"}


def test_a_malformed_file_is_named_and_the_metrics_are_shown_all_the_same(run):
    run.timeline_file(0).write_text("{]\n")
    client = client_of(run.path)
    live = client.get("/data/live").json()
    assert "rank-00000.jsonl" in live["notices"][0]
    assert live["now"]["step"] == 30
    answer = client.get("/data/timeline")
    assert answer.status_code == 422
    assert "rank-00000.jsonl" in answer.json()["error"]


class Reader:
    """A browser that listens until it has heard enough."""

    def __init__(self):
        self.is_gone = False

    async def is_disconnected(self):
        return self.is_gone


def test_a_stream_tells_each_step_and_ends_with_its_reader(run):
    async def listen():
        reader, answers = Reader(), _Answers(Folder(run.path))
        stream = answers._stream(reader, answers.folder.open(), Query())
        heard = [json.loads((await anext(stream)).removeprefix("data: "))["now"]["step"]]
        for step in (31, 32):
            write_metrics(run, [step])
            text = await asyncio.wait_for(anext(stream), 120)
            heard.append(json.loads(text.removeprefix("data: "))["now"]["step"])
        assert answers.streams == 1
        reader.is_gone = True
        assert [text async for text in stream] == []
        assert answers.streams == 0
        return heard

    assert asyncio.run(listen()) == [30, 31, 32]


def test_it_listens_on_this_machine_only_tells_the_token_once_and_ends_with_a_signal(run):
    environment = {**os.environ, "NO_PROXY": "*"}
    command = [sys.executable, "-m", "shoal", "web", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        address = process.stdout.readline().strip()
        base, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/\?token=([\w-]{20,})", address).groups()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{base}/data/live", timeout=120)
        request = urllib.request.Request(f"{base}/data/live", headers={"authorization": f"Bearer {token}"})
        assert json.load(urllib.request.urlopen(request, timeout=120))["run"]["name"] == "tiny"
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_a_port_that_is_taken_is_named(run):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        serve(run.path, port=taken.getsockname()[1])


def test_without_its_packages_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match="uvicorn") as caught:
        serve(run.path)
    assert "shoal[web]" in caught.value.change


@pytest.mark.parametrize("path", ["none", "run.json"])
def test_a_path_that_is_no_folder_is_named(run, capsys, path):
    assert main(["web", str(run.path / path)]) == 2
    assert "possible:" in capsys.readouterr().err


def test_a_listener_that_others_reach_is_told(run, capsys, monkeypatch):
    monkeypatch.setattr("shoal.web.serve", lambda *given, **named: None)
    assert main(["web", str(run.path), "--host", "0.0.0.0"]) == 0
    assert "can be reached from other machines" in capsys.readouterr().err


@pytest.mark.parametrize(
    "description",
    [
        {"world_size": "two", "config": [], "model": {"flops_per_token": "x"}, "device": {"peak_flops": {}}},
        {"plan": 7, "model": 1, "config": {"checkpoint": 1}, "cluster": {"x": 1}, "since_step": "x"},
        {"cluster": {}, "config": {"model": 1, "batch": "x"}, "plan": "dp=2", "world_size": 0},
    ],
)
def test_a_description_that_holds_anything_ends_no_page(run, description):
    run.describe(description)
    client = client_of(run.path)
    for page in PAGES.values():
        if page.needs_run:
            answer = client.get(f"/data/{page.name}")
            assert answer.status_code in (200, 422), (page.name, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]
