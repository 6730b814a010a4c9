"""Texts with which other systems start a training: Slurm's script, Kubernetes' manifests, a Containerfile.

Nouns: SlurmJob, KubernetesJob, Container. Each is a description; its text is what the system reads. Pure
functions of what is given, without torch. `shoal launch` prints or submits them.
"""

from shoal.launch.submit.kubernetes import FORMS, Container, KubernetesJob
from shoal.launch.submit.slurm import EXIT_STOPPED, EXIT_WRONG_INPUT, SlurmJob, submit

__all__ = ["EXIT_STOPPED", "EXIT_WRONG_INPUT", "FORMS", "Container", "KubernetesJob", "SlurmJob", "submit"]
