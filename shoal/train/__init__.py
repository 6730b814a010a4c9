"""Training: the Trainer, and the job that `shoal train` runs with it.

Nouns: Trainer (one optimizer step after another), TrainConfig (a run's configuration), Job (a configuration
and the run it becomes). The command line calls `check` and `execute`; users with data and a model of their
own call the Trainer.
"""

from shoal.train.absolute_paths import located
from shoal.train.classes import with_classes
from shoal.train.config import (
    CheckpointConfig,
    OptimizerConfig,
    RecordConfig,
    TrainConfig,
    ValidationConfig,
    load_config,
    settings_of,
    table_of,
)
from shoal.train.entry import execute
from shoal.train.evaluate import HeldOut
from shoal.train.export import load_model
from shoal.train.job import (
    Job,
    Resume,
    check,
    choose_path,
    choose_ranks,
    find_resume,
    nothing_left_to_do,
    resolve,
    servers_of,
)
from shoal.train.learning_rate import learning_rate
from shoal.train.micro_batch import TrainingData
from shoal.train.optimizer import Optimization
from shoal.train.peer_checkpoints import FOLDER, memory_folder
from shoal.train.result import Callbacks, StepResult
from shoal.train.save_load import BackgroundSaves, load, save
from shoal.train.trainer import Runtime, Trainer

__all__ = [
    "FOLDER",
    "BackgroundSaves",
    "Callbacks",
    "CheckpointConfig",
    "HeldOut",
    "Job",
    "Optimization",
    "OptimizerConfig",
    "RecordConfig",
    "Resume",
    "Runtime",
    "StepResult",
    "TrainConfig",
    "Trainer",
    "TrainingData",
    "ValidationConfig",
    "check",
    "choose_path",
    "choose_ranks",
    "execute",
    "find_resume",
    "learning_rate",
    "load",
    "load_config",
    "load_model",
    "located",
    "memory_folder",
    "nothing_left_to_do",
    "resolve",
    "save",
    "servers_of",
    "settings_of",
    "table_of",
    "with_classes",
]
