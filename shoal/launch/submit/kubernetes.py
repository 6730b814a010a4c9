"""A training as manifests of Kubernetes: a JobSet, a TrainJob, or an Indexed Job with a headless Service.

Each pod is a host: `shoal launch node` starts its ranks, and all meet at the first pod. What exit codes mean:

    0     the pod is done
    2     wrong input: the whole training fails
    75    a signal came, and all ranks saved: all pods end with this, and are made again, which counts nowhere
    else  a failure: the JobSet makes all pods again, at most `restarts` times; a plain Job makes those again
          that ended, which all do once one is lost

The grace that pods get after SIGTERM is passed on to the ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shoal.errors import ConfigError
from shoal.launch.submit.slurm import EXIT_STOPPED, EXIT_WRONG_INPUT

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9._/:-]*")
_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))


def yaml_text(value: Mapping[str, Any]) -> str:
    """Return a mapping as a document of YAML 1.1 or 1.2, which differ in what a plain word means.

    Args:
        value: Strings, numbers, booleans, lists and mappings within each other.
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for name, each in value.items() for line in _entry(f"{_scalar(name)}:", each)]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for each in value for line in _item(each)]
    return [_scalar(value)]


def _entry(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [name, *(f"  {line}" for line in _lines(value))]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [name, *_lines(value)]
    return [f"{name} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: Any) -> str:
    """Return a value on one line; JSON is YAML, and quotes what could be read as something else."""
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not value.endswith(":"):
        return value
    return '"' + "".join(map(_character, value)) + '"'


def _character(character: str) -> str:
    if ord(character) > 0xFFFF:  # for which JSON has a pair, and YAML one escape
        return f"\\U{ord(character):08X}"
    return json.dumps(character)[1:-1]


Form = Literal["jobset", "job", "trainjob"]
FORMS: tuple[Form, ...] = get_args(Form)
"""Kinds of manifests."""

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")  # leaves room for what Kubernetes appends
_CONTAINER = "shoal"


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesJob:
    """A training on pods.

    Attributes:
        words: Arguments of the program `shoal`, which go on where an earlier start ended.
        name: Name of the job, and of its Service.
        image: The image, with Shoal.
        nodes: Number of pods.
        ranks: Number of ranks in each.
        gpus: Whether each rank has a GPU.
        grace: Seconds from SIGTERM to the kill.
        restarts: Number of times that the training is started again after a failure.
        port: Port of the first pod at which the ranks meet.
        folder: Working directory.
        claims: Directories of volumes, by the name of their claim.
        secrets: Secrets whose entries become variables of the environment.
        requests: Resources of a pod, such as cpu and memory.
        runtime: For a TrainJob: the ClusterTrainingRuntime.
    """

    words: Sequence[str]
    name: str
    image: str
    nodes: int
    ranks: int
    gpus: bool
    grace: int
    restarts: int
    port: int
    folder: str
    claims: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    requests: Mapping[str, str] = field(default_factory=dict)
    runtime: str = "torch-distributed"

    def __post_init__(self) -> None:
        for name in (self.name, *self.claims, *self.secrets):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} was given as a name",
                    possible="small letters, digits and -, at most 42, that begin with a letter",
                    change="choose such a name",
                )

    def text(self, form: Form) -> str:
        """Return the manifests, as YAML."""
        return "---\n".join(map(yaml_text, self.manifests(form)))

    def manifests(self, form: Form) -> list[dict[str, Any]]:
        """Return the manifests of a form, in the order in which they are applied."""
        if form == "trainjob":
            return [self._train_job()]
        return [self._job_set()] if form == "jobset" else [self._service(), self._job()]

    def _service(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name},
            "spec": {
                "clusterIP": "None",
                # Pods must find each other while they start.
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": self.name},
                "ports": [{"name": "store", "port": self.port}],
            },
        }

    def _job(self) -> dict[str, Any]:
        pod = self._pod(f"{self.name}-0.{self.name}", {"subdomain": self.name})
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self.name},
            "spec": self._job_spec(pod, backoff=self.restarts * self.nodes),
        }

    def _job_set(self) -> dict[str, Any]:
        pod = self._pod(f"{self.name}-node-0-0.{self.name}", {})
        wrong_input = {
            "name": "wrongInput",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.name},
            "spec": {
                "network": {
                    "enableDNSHostnames": True,
                    "subdomain": self.name,
                    "publishNotReadyAddresses": True,
                },
                "failurePolicy": {"maxRestarts": self.restarts, "rules": [wrong_input]},
                "replicatedJobs": [
                    {"name": "node", "replicas": 1, "template": {"spec": self._job_spec(pod, backoff=0)}}
                ],
            },
        }

    def _train_job(self) -> dict[str, Any]:
        resources = self._resources()
        trainer = {
            "image": self.image,
            "command": ["python", "-m", "shoal", "launch", "node"],
            "args": ["--nproc", str(self.ranks), "--", *self.words],
            "numNodes": self.nodes,
            "numProcPerNode": self.ranks,
            **({"resourcesPerNode": resources} if resources else {}),
        }
        reference = {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": self.runtime,
        }
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": self.name},
            "spec": {"runtimeRef": reference, "trainer": trainer},
        }

    def _job_spec(self, pod: Mapping[str, Any], *, backoff: int) -> dict[str, Any]:
        return {
            "completionMode": "Indexed",
            "completions": self.nodes,
            "parallelism": self.nodes,
            "backoffLimit": backoff,
            "podFailurePolicy": {
                "rules": [
                    _on_exit_code("FailJob", EXIT_WRONG_INPUT),
                    _on_exit_code("Ignore", EXIT_STOPPED),
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": {"spec": pod},
        }

    def _pod(self, first: str, more: Mapping[str, Any]) -> dict[str, Any]:
        resources = self._resources()
        container = {
            "name": _CONTAINER,
            "image": self.image,
            "command": ["python", "-m", "shoal", "launch", "node"],
            "args": [
                *("--nodes", str(self.nodes), "--nproc", str(self.ranks)),
                *("--master", f"{first}:{self.port}", "--", *self.words),
            ],
            "workingDir": self.folder,
            **({"resources": resources} if resources else {}),
            **({"envFrom": [{"secretRef": {"name": name}} for name in self.secrets]} if self.secrets else {}),
            "ports": [{"name": "store", "containerPort": self.port}],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumeMounts": [
                {"name": "shared-memory", "mountPath": "/dev/shm"},
                *({"name": claim, "mountPath": path} for claim, path in self.claims.items()),
            ],
        }
        return {
            **more,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace,
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
                *({"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in self.claims),
            ],
        }

    def _resources(self) -> dict[str, Any]:
        limits = {"nvidia.com/gpu": str(self.ranks)} if self.gpus else {}
        return {
            **({"limits": limits} if limits else {}),
            **({"requests": dict(self.requests)} if self.requests else {}),
        }


def _on_exit_code(action: str, code: int) -> dict[str, Any]:
    condition = {"containerName": _CONTAINER, "operator": "In", "values": [code]}
    return {"action": action, "onExitCodes": condition}


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """An image with Shoal and PyTorch.

    Attributes:
        words: Arguments of the program `shoal` that a container runs by default.
        base: The image that it begins from, with Python 3.11 or newer and its venv, and apt.
        extras: Extras of Shoal that are installed.
    """

    words: Sequence[str]
    base: str
    extras: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.base.strip() or any(character.isspace() for character in self.base):
            raise ConfigError(
                f"--base {self.base!r} is no name of an image",
                possible="a name such as python:3.12-slim",
                change="correct the name",
            )

    @property
    def text(self) -> str:
        """The Containerfile; the folder that it is built in is Shoal's source."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return _CONTAINERFILE.format(base=self.base, extras=extras, command=json.dumps(list(self.words)))


_CONTAINERFILE = """\
# Build it in the folder of Shoal's source: buildah build --file Containerfile --tag shoal .
FROM {base} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-dev
COPY . /source
RUN python3 -m venv /opt/shoal \\
 && /opt/shoal/bin/pip install --no-cache-dir --constraint /source/constraints.txt '/source{extras}'

FROM {base}
COPY --from=build /opt/shoal /opt/shoal
ENV PATH=/opt/shoal/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 shoal
USER 1000
WORKDIR /home/shoal
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "shoal"]
CMD {command}
"""
