"""Receivers of the values of steps: each gets them, and none holds up a step or ends a run."""

import json
import math
import re
import struct
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from shoal.errors import ConfigError, MissingExtraError
from shoal.record import Destinations, Logger, QueuedLogger
from shoal.record.destinations import opening
from shoal.record.destinations.opening import PrometheusLogger, parse_address
from shoal.spec.run import Run

ROOT = Path(__file__).parents[2]
VALUES = [(step, {"loss": 3.0 - step, "tokens_per_second": 1000.0 * step}) for step in (1, 2, 3)]


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "tiny-run", {"config": {"batch": 4}, "plan": "dp=2"})


def give(destinations, run):
    """Give all values to the only receiver; return what it reported."""
    reports = []
    destinations.check()
    (logger,) = destinations.open(run, reports.append)
    for step, values in VALUES:
        logger.log(step, values)
    logger.close()
    return reports


class Slow(Logger):
    def __init__(self, seconds):
        self.seconds, self.got, self.is_closed = seconds, [], False

    def log(self, step, values):
        time.sleep(self.seconds)
        self.got.append(step)

    def close(self):
        self.is_closed = True


class Failing(Logger):
    def __init__(self, times):
        self.times = times

    def log(self, step, values):
        self.times -= 1
        if self.times >= 0:
            raise ConnectionError("server is gone")

    def close(self):
        pass


def test_a_receiver_gets_all_values_in_order_and_is_closed():
    slow, reports = Slow(0.0), []
    logger = QueuedLogger("one", lambda: slow, reports.append)
    for step in range(500):
        logger.log(step, {})
    logger.close()
    assert slow.got == list(range(500))
    assert slow.is_closed
    assert reports == []


def test_a_receiver_that_hangs_holds_up_neither_steps_nor_the_end_and_its_loss_is_counted():
    reports, forever = [], threading.Event()
    logger = QueuedLogger("one", lambda: forever.wait(), reports.append, closing=0.1)
    for step in range(5_000):
        logger.log(step, {"loss": 1.0})
    logger.close()
    forever.set()
    assert reports == ["one did not take all values within 0.1 s", "one lacks the values of 5000 steps"]


def test_where_only_the_newest_value_counts_what_waits_is_given_as_one():
    slow, reports = Slow(0.0), []
    logger = QueuedLogger("one", lambda: slow, reports.append, newest=True)
    for step in range(500):
        logger.log(step, {"loss": 1.0})
    logger.close()
    assert slow.got[-1] == 499
    assert len(slow.got) < 50
    assert reports == []


def test_errors_are_told_once_and_a_receiver_that_recovers_goes_on():
    reports = []
    logger = QueuedLogger("one", lambda: Failing(3), reports.append)
    for step in range(10):
        logger.log(step, {})
    logger.close()
    assert reports == ["one failed: ConnectionError: server is gone", "one lacks the values of 3 steps"]


def test_a_receiver_that_cannot_be_made_costs_only_its_values():
    reports = []

    def make():
        raise PermissionError("no key")

    logger = QueuedLogger("one", make, reports.append)
    logger.log(1, {})
    logger.close()
    assert reports == ["one failed: PermissionError: no key", "one lacks the values of 1 steps"]


def test_weights_and_biases_keeps_values_offline(run, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(opening, "_CLOSING", 120.0)  # its process may take long to start
    assert give(Destinations(wandb="team/project"), run) == []
    (file,) = run.log.glob("wandb/offline-run-*/*.wandb")
    records, until = [], time.monotonic() + 120
    while not any(record.HasField("exit") for record in records):  # a process of its own writes the file
        assert time.monotonic() < until
        time.sleep(0.05)
        records = [wandb_internal_pb2.Record.FromString(data) for data in records_of(file.read_bytes())]
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(each["_step"], each["loss"]) for each in history] == [(1, 2.0), (2, 1.0), (3, 0.0)]


def records_of(data):
    """The records of a file of Weights & Biases: LevelDB's log, after seven bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32_768 - at % 32_768  # in this block; a header does not cross its end
        if left < 7:
            at += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # a whole record, or its last part
            yield whole
            whole = b""


def test_mlflow_keeps_values_and_the_configuration(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path / 'store'}"
    assert give(Destinations(mlflow=uri), run) == []
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("shoal").experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(1, 2.0), (2, 1.0), (3, 0.0)]
    assert found.data.params == {"config.batch": "4", "plan": "dp=2"}
    assert (found.info.run_name, found.info.status) == ("tiny-run", "FINISHED")


def test_opentelemetry_sends_gauges_to_a_collector(run):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        assert give(Destinations(opentelemetry=endpoint), run) == []
        server.shutdown()
    path, body = bodies[-1]
    request = ExportMetricsServiceRequest.FromString(body)
    (resource,) = request.resource_metrics
    named = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    assert path == "/v1/metrics"
    assert named["shoal.loss"].gauge.data_points[0].as_double == 0.0
    assert named["shoal.step"].gauge.data_points[0].as_double == 3.0
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert attributes["shoal.run"] == "tiny-run"


def read(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_prometheus_reads_the_newest_values_as_its_own_parser_does():
    parser = pytest.importorskip("prometheus_client.parser")
    logger = PrometheusLogger('a "run"', ("127.0.0.1", 0))
    for step, values in VALUES:
        logger.log(step, values)
    logger.log(4, {"loss": math.nan, "validation loss": math.inf})
    kind, text = read(logger.port)
    samples = {
        sample.name: sample
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert kind.startswith("text/plain; version=0.0.4")
    assert samples["shoal_tokens_per_second"].value == 3000
    assert math.isnan(samples["shoal_loss"].value)
    assert samples["shoal_validation_loss"].value == math.inf
    assert samples["shoal_step"].labels == {"run": 'a "run"'}
    with pytest.raises(urllib.error.HTTPError):
        read(logger.port, "/etc/passwd")
    logger.close()
    with pytest.raises(urllib.error.URLError):
        read(logger.port)


def test_a_port_that_is_taken_costs_the_endpoint_only(run):
    logger = PrometheusLogger("first", ("127.0.0.1", 0))
    reports = give(Destinations(prometheus=str(logger.port)), run)
    logger.close()
    assert reports[0].startswith("Prometheus failed: OSError")


def test_an_endpoint_is_on_loopback_unless_told():
    assert parse_address("9400") == ("127.0.0.1", 9400)
    assert parse_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    for wrong in ("host", "host:port", "70000", ""):
        with pytest.raises(ConfigError):
            parse_address(wrong)


def test_the_dashboard_asks_for_values_that_a_run_has():
    logger = PrometheusLogger("run", ("127.0.0.1", 0))
    source = (ROOT / "shoal" / "train" / "result.py").read_text()
    names = re.findall(r'^            "(\w+)": ', source, re.MULTILINE)
    assert "loss" in names
    logger.log(1, dict.fromkeys([*names, "validation_loss"], 1.0))
    served = set(re.findall(r"^(\w+)\{", read(logger.port)[1], re.MULTILINE))
    logger.close()
    dashboard = json.loads((ROOT / "examples" / "grafana" / "dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"shoal_\w+", target["expr"])
    }
    assert asked
    assert asked <= served


@pytest.mark.parametrize(
    ("asked", "extra"),
    [
        ({"wandb": "p"}, "wandb"),
        ({"mlflow": "file:x"}, "mlflow"),
        ({"opentelemetry": "http://x"}, "otel"),
        ({"tensorboard": True}, "tensorboard"),
    ],
)
def test_a_missing_package_is_named_before_the_run_begins(asked, extra, monkeypatch):
    monkeypatch.setattr("shoal.record.destinations.opening.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=rf"shoal\[{extra}\]"):
        Destinations(**asked).check()
