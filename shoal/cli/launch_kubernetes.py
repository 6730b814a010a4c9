"""`shoal launch kubernetes`: prints the manifests of a training."""

from __future__ import annotations

import argparse

from shoal.cli.launched_train import TrainWords, add_words
from shoal.cli.local import positive_whole, whole
from shoal.errors import ConfigError
from shoal.submit import FORMS, KubernetesJob


def add_target(targets: argparse._SubParsersAction) -> None:
    """Add the target to `shoal launch`."""
    parser = targets.add_parser(
        "kubernetes",
        help="as manifests of Kubernetes, which this prints",
        description="Prints manifests: ... | kubectl apply -f -. A pod is a host. SIGTERM, as on eviction, "
        "makes the ranks save, and the pods are made again; after a failure too, --restarts times.",
    )
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="jobset",
        help="JobSet, Indexed Job with a headless Service, or TrainJob of Kubeflow; by default a JobSet",
    )
    parser.add_argument("--image", metavar="IMAGE", required=True, help="an image with Shoal")
    parser.add_argument("--name", metavar="NAME", default="shoal", help="name of the job")
    parser.add_argument("--nodes", metavar="N", type=positive_whole, default=1, help="pods")
    parser.add_argument("--nproc", metavar="N", type=positive_whole, default=1, help="ranks in each pod")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument(
        "--grace", metavar="SECONDS", type=positive_whole, default=120, help="from SIGTERM to the kill"
    )
    parser.add_argument(
        "--restarts", metavar="N", type=whole, default=3, help="how often it is started again after a failure"
    )
    parser.add_argument("--port", metavar="PORT", type=int, default=29500, help="where the ranks meet")
    parser.add_argument("--folder", metavar="DIR", default="/work", help="working directory")
    parser.add_argument(
        "--claim",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="mount a PersistentVolumeClaim there, for the run's directory; all pods write to it",
    )
    parser.add_argument(
        "--secret",
        metavar="NAME",
        action="append",
        default=[],
        help="a Secret whose entries become variables",
    )
    parser.add_argument(
        "--request",
        metavar="RESOURCE=AMOUNT",
        action="append",
        default=[],
        help="a resource of each pod, such as cpu=8 or memory=64Gi",
    )
    parser.add_argument(
        "--runtime", metavar="NAME", default="torch-distributed", help="ClusterTrainingRuntime of a TrainJob"
    )
    add_words(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    claims, requests = (dict(map(_pair, given)) for given in (args.claim, args.request))
    if args.form == "trainjob" and (claims or args.secret):
        raise ConfigError(
            "--claim or --secret was given with --form trainjob",
            possible="volumes and secrets in the ClusterTrainingRuntime, or --form jobset",
            change="leave them out, or choose another form",
        )
    words = TrainWords.of(args.words).without("--nproc", "--nodes", "--rendezvous", "--grace").resumable()
    job = KubernetesJob(
        words=words.with_grace(args.grace).words,
        name=args.name,
        image=args.image,
        nodes=args.nodes,
        ranks=args.nproc,
        gpus=args.gpus,
        grace=args.grace,
        restarts=args.restarts,
        port=args.port,
        folder=args.folder,
        claims=claims,
        secrets=args.secret,
        requests=requests,
        runtime=args.runtime,
    )
    print(job.text(args.form), end="")
    return 0


def _pair(given: str) -> tuple[str, str]:
    name, _, value = given.partition("=")
    if not name or not value:
        raise ConfigError(
            f"{given} has no value",
            possible="NAME=VALUE, such as memory=64Gi",
            change="write the name with its value",
        )
    return name, value
