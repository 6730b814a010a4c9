"""A server that knows the kinds of the manifests alone: kubectl asks for them before a dry run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KINDS = {
    "v1": ("services", "Service"),
    "batch/v1": ("jobs", "Job"),
    "jobset.x-k8s.io/v1alpha2": ("jobsets", "JobSet"),
    "trainer.kubeflow.org/v1alpha1": ("trainjobs", "TrainJob"),
}


def answers() -> dict[str, object]:
    """Return the answer to each path."""
    groups = []
    found: dict[str, object] = {"/api": {"kind": "APIVersions", "versions": ["v1"]}}
    for version, (plural, kind) in KINDS.items():
        resource = {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind}
        listed = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [{**resource, "verbs": ["create"]}],
        }
        group, _, number = version.rpartition("/")
        found[f"/apis/{version}" if group else f"/api/{version}"] = listed
        if group:
            preferred = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [preferred], "preferredVersion": preferred})
    found["/apis"] = {"kind": "APIGroupList", "groups": groups}
    return found


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = answers().get(self.path.partition("?")[0])
        body = json.dumps(answer or {}).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:
        pass


@contextmanager
def kubernetes() -> Iterator[str]:
    """Serve in a thread; yields the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
