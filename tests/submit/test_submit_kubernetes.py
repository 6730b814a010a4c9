"""Manifests of Kubernetes, held to the schemas of Kubernetes, JobSet and Kubeflow's Trainer."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess

import pytest
from kubernetes_stand_ins import kubernetes

from shoal.errors import ConfigError
from shoal.launch.submit import EXIT_STOPPED, FORMS, KubernetesJob

VERSION = "1.31"

JOB = KubernetesJob(
    words=("train", "--run", "runs/one", "--resume", "auto", "--grace", "90"),
    name="fish",
    image="registry.example/shoal:1",
    nodes=3,
    ranks=4,
    gpus=True,
    grace=90,
    restarts=5,
    port=29500,
    folder="/work",
    claims={"runs": "/work"},
    secrets=("hub",),
    requests={"memory": "64Gi", "cpu": "8"},
)
PLAIN = dataclasses.replace(JOB, gpus=False, claims={}, secrets=(), requests={})


def holds(whole, part):
    """Whether a value has all of another one, beside what defaults add."""
    if isinstance(part, dict):
        return all(name in whole and holds(whole[name], each) for name, each in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(holds, whole, part))
    return whole == part


@pytest.mark.parametrize("job", [JOB, PLAIN])
def test_plain_manifests_are_valid(job):
    validator = pytest.importorskip("kubernetes_validate")
    for manifest in job.manifests("job"):
        validator.validate(manifest, VERSION, strict=True)
    (job_set,) = job.manifests("jobset")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}
    validator.validate(inner, VERSION, strict=True)


@pytest.mark.parametrize("job", [JOB, PLAIN])
@pytest.mark.parametrize(
    ("form", "model"), [("jobset", "JobsetV1alpha2JobSet"), ("trainjob", "TrainerV1alpha1TrainJob")]
)
def test_jobset_and_trainjob_have_the_fields_of_their_models(job, form, model):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (manifest,) = job.manifests(form)
    read = getattr(models, model).from_dict(manifest)
    assert holds(read.to_dict(), manifest)  # a field that the model does not know would be lost


@pytest.mark.parametrize("form", FORMS)
def test_the_text_is_what_was_described(form):
    yaml = pytest.importorskip("yaml")
    assert list(yaml.safe_load_all(JOB.text(form))) == JOB.manifests(form)


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_exit_codes_decide_and_pods_have_the_grace_that_ranks_are_told(form):
    spec = JOB.manifests(form)[-1]["spec"]
    if form == "jobset":
        assert spec["failurePolicy"]["maxRestarts"] == JOB.restarts
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    acts = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    assert acts == {2: "FailJob", EXIT_STOPPED: "Ignore"}
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == JOB.grace
    (container,) = pod["containers"]
    assert container["args"][-2:] == ["--grace", "90"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}


def test_pods_meet_at_the_first_one_by_the_name_that_it_gets():
    def master(manifest):
        (container,) = manifest["template"]["spec"]["containers"]
        return container["args"][container["args"].index("--master") + 1]

    service, job = JOB.manifests("job")
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert master(job["spec"]) == "fish-0.fish:29500"
    (job_set,) = JOB.manifests("jobset")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    named = (
        f"{job_set['metadata']['name']}-{replicated['name']}-0-0.{job_set['spec']['network']['subdomain']}"
    )
    assert master(replicated["template"]["spec"]) == f"{named}:29500"


def test_a_name_that_kubernetes_refuses_is_refused():
    with pytest.raises(ConfigError, match="'Fish'"):
        dataclasses.replace(JOB, name="Fish")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("form", FORMS)
def test_kubectl_takes_the_text_in_a_dry_run(form, tmp_path):
    yaml = pytest.importorskip("yaml")
    home = {**os.environ, "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")}
    words = ["create", "--dry-run=client", "--validate=false", "--output", "yaml", "--filename", "-"]
    with kubernetes() as server:
        command = ["kubectl", "--server", server, *words]
        ended = subprocess.run(
            command, input=JOB.text(form), capture_output=True, text=True, env=home, timeout=120
        )
    assert ended.returncode == 0, ended.stderr
    made = list(yaml.safe_load_all(ended.stdout))
    assert holds(made, JOB.manifests(form))
