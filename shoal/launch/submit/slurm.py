"""A training as a batch job of Slurm, which requeues itself.

The exit code of the training decides what becomes of the job:

    0     all steps are made                        the job ends
    2     wrong input                               the job ends
    75    a signal came, the state is saved         the job is requeued: time limit, or preemption
    else  a rank or a node failed                   the job is requeued after a pause, a number of times

Slurm sends SIGUSR1 to the ranks some seconds before the time limit, the grace. So a job of any length is
made of jobs of the length that Slurm grants.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.errors import ConfigError, ShoalError, UserError

EXIT_STOPPED = 75
"""Exit code of a run that a signal stopped and that saved its state to be resumed; BSD's EX_TEMPFAIL."""

EXIT_WRONG_INPUT = 2
"""Exit code of a run that was given what cannot work, however often it is started."""


_NAME = re.compile(r"[a-z][a-z-]*")
_OWN = ("job-name", "nodes", "ntasks-per-node", "signal", "requeue", "open-mode", "output", "chdir", "time")
_WAIT = 60  # seconds that srun waits for the other ranks once one has ended
_LONGEST_PAUSE = 300  # seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """A batch job.

    Attributes:
        words: Arguments of the program `shoal`, which go on where an earlier start ended.
        nodes: Number of nodes.
        ranks: Number of ranks on each node.
        gpus: Whether each rank has a GPU, the only one that it sees.
        time: Time limit, as sbatch takes it; empty for the partition's.
        grace: Seconds before the time limit at which the ranks are told to save.
        restarts: Number of times that the job is requeued after a failure.
        pause: Seconds before that; doubled each time.
        name: Name of the job.
        folder: Working directory.
        python: The Python with Shoal on the nodes, as words.
        options: Other options of sbatch, by their long names, such as partition.
    """

    words: Sequence[str]
    nodes: int
    ranks: int
    gpus: bool
    time: str
    grace: int
    restarts: int
    pause: float
    name: str
    folder: str
    python: Sequence[str]
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option in self.options:
            if not _NAME.fullmatch(option) or option in _OWN:
                raise ConfigError(
                    f"--sbatch {option} was given",
                    possible="long names of sbatch's options, but "
                    + ", ".join(_OWN)
                    + ", which Shoal writes itself",
                    change="correct the name, or use the option of shoal launch slurm",
                )
        values = [self.name, self.time, self.folder, *self.options.values()]
        if any("\n" in value for value in values):
            raise ConfigError(
                "a line break was given within an option of the job",
                possible="values of one line",
                change="leave the line break out",
            )

    @property
    def text(self) -> str:
        """The script for sbatch."""
        lines = {
            "job-name": self.name,
            "nodes": str(self.nodes),
            "ntasks-per-node": str(self.ranks),
            "gpus-per-task": "1" if self.gpus else "",
            "time": self.time,
            "signal": f"USR1@{self.grace}",
            "open-mode": "append",
            "output": "%x-%j.log",
            "chdir": self.folder,
            **self.options,
        }
        directives = "\n".join(
            f"#SBATCH --{name}={shlex.quote(value)}" for name, value in lines.items() if value
        )
        command = shlex.join([*self.python, "-m", "shoal", *self.words])
        return _SCRIPT.format(
            directives=directives,
            wait=_WAIT,
            command=command,
            stopped=EXIT_STOPPED,
            wrong=EXIT_WRONG_INPUT,
            restarts=self.restarts,
            pause=max(1, round(self.pause)),
            longest=_LONGEST_PAUSE,
        )


_SCRIPT = """\
#!/bin/bash
{directives}
#SBATCH --requeue

# Counts failures over all requeues of this job.
failures="shoal-$SLURM_JOB_ID.failures"

srun --label --kill-on-bad-exit=0 --wait={wait} {command}
code=$?

case $code in
0 | {wrong})
  rm -f "$failures"
  exit $code
  ;;
{stopped})
  echo "shoal: the state is saved; the job is requeued" >&2
  scontrol requeue "$SLURM_JOB_ID"
  exit $code
  ;;
esac

echo >>"$failures"
count=$(wc -l <"$failures")
if [ "$count" -gt {restarts} ]; then
  echo "shoal: exit code $code, failure $count: the job ends" >&2
  rm -f "$failures"
  exit $code
fi
pause=$(({pause} << (count - 1)))
if [ "$pause" -gt {longest} ]; then
  pause={longest}
fi
echo "shoal: exit code $code, failure $count of {restarts} that are allowed: requeued in $pause s" >&2
sleep "$pause"
scontrol requeue "$SLURM_JOB_ID"
exit $code
"""


def submit(job: SlurmJob) -> str:
    """Submit a job, and return its number.

    Raises:
        UserError: There is no sbatch on this host.
        ShoalError: Slurm refused the job.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "shoal launch slurm submits with sbatch, which is not on this host",
            possible="a host of the cluster with Slurm's commands",
            change="run it there, or print the script with --dry-run",
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], input=job.text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ShoalError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
