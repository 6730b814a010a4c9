"""The configuration of a training run: frozen models, from TOML and `key=value` settings."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from shoal.data import DataConfig
from shoal.errors import ConfigError
from shoal.limits import CONFIGURATION, read_limited, toml_of
from shoal.models import ALL_LINEAR
from shoal.record import Destinations
from shoal.units import parse_steps


class Section(BaseModel):
    """A section: frozen, without unknown keys, with a docstring for each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


_Text = Annotated[str, BeforeValidator(lambda given: str(given) if isinstance(given, int) else given)]


class RecordConfig(Section):
    """The files that a run writes about itself."""

    timeline: bool = True
    """Whether spans are recorded."""
    memory: bool = True
    """Whether the memory of the second step is measured, which makes that step slower."""
    tensorboard: bool = False
    """Whether scalars are written for TensorBoard too (extra `tensorboard`)."""
    wandb: str = ""
    """Project of Weights & Biases that values are logged to too (extra `wandb`)."""
    mlflow: str = ""
    """Tracking server of MLflow, or file:FOLDER, that values are logged to too (extra `mlflow`)."""
    prometheus: _Text = ""
    """Port of an endpoint for Prometheus, which only this host reaches; or HOST:PORT."""
    opentelemetry: str = ""
    """Collector that values are sent to too, such as http://127.0.0.1:4318 (extra `otel`)."""
    profile: _Text = ""
    """Steps whose trace torch.profiler writes into the run's profile/, such as 100:105."""
    profile_memory: bool = False
    """Whether the history of a GPU's memory is kept in these steps too."""
    nvtx: bool = False
    """Whether spans are NVTX ranges too, for Nsight Systems; on GPUs."""
    live: int = Field(default=20, gt=0)
    """Steps between two lines of progress, if there is no terminal."""

    @field_validator("profile")
    @classmethod
    def _names_steps(cls, profile: str) -> str:
        if profile:
            parse_steps(profile)
        return profile

    def destinations(self) -> Destinations:
        """Return the receivers of values beside the run's own file."""
        return Destinations(
            tensorboard=self.tensorboard,
            wandb=self.wandb,
            mlflow=self.mlflow,
            prometheus=self.prometheus,
            opentelemetry=self.opentelemetry,
        )


# Names that other trainers (transformers, torchtitan, Megatron, nanoGPT) use for the same setting.
_ALSO_KNOWN_AS = {
    "batch": ("batch_size", "global_batch_size", "train_batch_size"),
    "sequence": ("seq", "seq_len", "seq_length", "sequence_length", "max_length", "block_size", "context"),
    "steps": (
        "max_steps",
        "num_steps",
        "train_steps",
        "training_steps",
        "iterations",
        "max_iters",
        "train_iters",
    ),
    "seed": ("random_seed",),
    "optimizer.learning_rate": ("lr", "max_lr", "peak_lr", "base_lr", "rate"),
    "optimizer.schedule": ("lr_schedule", "lr_scheduler", "lr_scheduler_type", "lr_decay_style", "scheduler"),
    "optimizer.warmup": ("warmup_steps", "warmup_iters", "lr_warmup_steps", "num_warmup_steps"),
    "optimizer.final": ("min_lr", "min_lr_ratio", "lr_min", "final_lr"),
    "optimizer.betas": ("beta1", "beta2", "beta_1", "beta_2", "adam_beta1", "adam_beta2", "adam_betas"),
    "optimizer.eps": ("epsilon", "adam_eps", "adam_epsilon"),
    "optimizer.weight_decay": ("wd", "decay_rate", "l2"),
    "optimizer.clip": (
        "grad_clip",
        "clip_grad",
        "max_grad_norm",
        "max_norm",
        "gradient_clipping",
        "clip_norm",
    ),
    "validation.every": ("eval_every", "eval_interval", "eval_steps", "validation_interval"),
    "validation.samples": ("eval_samples", "eval_iters"),
    "checkpoint.every": ("save_every", "save_interval", "save_steps", "checkpoint_interval"),
    "checkpoint.keep": ("save_total_limit", "keep_last", "max_checkpoints"),
    "data.source": ("dataset", "data_path", "path", "files", "file", "text"),
    "record.live": ("log_interval", "logging_steps", "log_every", "log_freq"),
}


def guess_key(given: str, keys: Sequence[str]) -> str:
    """Return the text " (did you mean 'x'?)" for the most likely key, or "" if none is likely.

    The last part of a dotted key decides; the section only says where to look first. Matches are tried in
    this order: names that other trainers use, an equal name elsewhere, similar spelling.

    Args:
        given: The key, dotted.
        keys: All valid keys, dotted, including sections.
    """
    section, _, name = given.rpartition(".")
    known = [key for key, others in _ALSO_KNOWN_AS.items() if name.lower() in others and key in keys]
    same = [key for key in keys if key.rpartition(".")[2] == name.lower()]
    beside = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    alike = [beside[each] for each in difflib.get_close_matches(name, beside, n=1)]
    anywhere = {key.rpartition(".")[2]: key for key in reversed(keys)}
    far = [anywhere[each] for each in difflib.get_close_matches(name, anywhere, n=1)]
    whole = difflib.get_close_matches(given, keys, n=1, cutoff=0.8)
    found = next(iter([*known, *same, *alike, *far, *whole]), None)
    return "" if found is None else f" (did you mean {found!r}?)"


OPTIMIZERS = ("adamw", "sgd", "adafactor", "lion", "muon")
"""Optimizers with a name of their own."""
SCHEDULES = ("cosine", "constant-then-decay")
"""Schedules with a name of their own."""

_Decay = Annotated[float, Field(ge=0, lt=1)]
_Limit = Annotated[
    Annotated[float, Field(gt=0)] | None, BeforeValidator(lambda given: None if given == "off" else given)
]
_Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)
]


class OptimizerConfig(Section):
    """The optimizer, its learning rate, clipping, and the number of steps that may be skipped."""

    name: str = "adamw"
    """adamw, sgd, adafactor, lion or muon, or a factory `package.module:function` that is called with groups
    of parameters, `lr` and `options`, like the classes of `torch.optim`.
    """
    options: dict[str, Any] = {}
    """More arguments of the optimizer, such as { momentum = 0.9 } for sgd."""
    whole: bool = False
    """Whether a factory's optimizer needs whole parameters. If sharding leaves a rank rows of them, one rank
    then makes the step of each parameter. Adafactor and muon always get whole parameters.
    """
    learning_rate: float = Field(default=2e-3, gt=0)
    """The highest learning rate, for a batch of `reference_batch`."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """Growth of the learning rate with batch / reference_batch."""
    reference_batch: int = Field(default=16, gt=0)
    """The batch that `learning_rate` was chosen for."""
    schedule: str = "cosine"
    """The schedule after warm-up: cosine, which is half of one; or constant-then-decay, with a linear decay
    at the end. Or `package.module:function`, which is called with a step from 0 and the number of steps, and
    returns the share of the highest learning rate; then there is no other warm-up.
    """
    warmup: int = Field(default=50, ge=0)
    """Steps in which the learning rate grows linearly from zero."""
    decay: float = Field(default=0.2, ge=0, le=1)
    """Share of all steps in which the rate decays, with constant-then-decay."""
    final: float = Field(default=0.1, ge=0, le=1)
    """The last learning rate, as a share of the highest."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay of adamw's averages of gradients and of their squares."""
    eps: float = Field(default=1e-8, gt=0)
    """Number that adamw adds to the root of the squares."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices, decoupled in adamw and lion; vectors, such as norms and biases, do not decay."""
    clip: _Limit = 1.0
    """Largest norm of the whole gradient; "off" for no limit."""
    outer_rate: float | None = Field(default=None, gt=0)
    """Learning rate of what workers changed between two merges, with exchange=local; 1 is local SGD. It is
    0.7 by default, and 1 with compression that leaves elements out.
    """
    outer_momentum: float | None = Field(default=None, ge=0, lt=1)
    """Nesterov momentum of what workers changed between two merges; 0 is local SGD. It is 0.9 by default, and
    0.5 with compression that leaves elements out.
    """
    outer_warmup: int = Field(default=20, ge=0)
    """First rounds of the training, in which the momentum of what workers changed grows from 0."""
    skip: int = Field(default=10, ge=0)
    """Number of steps in a row that may be left out because the loss or the gradient is not finite; one more
    ends the training. 0 ends it at the first.
    """
    guard: bool = True
    """Whether a training through parameter servers with staleness goes on in rounds for a while when stale
    gradients do harm: when the loss rises, or is not finite, or the learning rate is too large for them.
    """

    @field_validator("schedule")
    @classmethod
    def _is_known_or_named(cls, schedule: str) -> str:
        if schedule not in SCHEDULES and ":" not in schedule:
            raise ValueError(f"{', '.join(SCHEDULES)} or package.module:function")
        return schedule

    @field_validator("name")
    @classmethod
    def _is_an_optimizer(cls, name: str) -> str:
        if name not in OPTIMIZERS and ":" not in name:
            raise ValueError(f"{', '.join(OPTIMIZERS)} or package.module:function")
        return name

    @property
    def outer(self) -> dict[str, Any]:
        """Arguments of `shoal.parallel.outer_settings`."""
        return {"rate": self.outer_rate, "momentum": self.outer_momentum, "warmup": self.outer_warmup}


class LoraConfig(Section):
    """Adapters beside frozen layers, trained instead of the model (extra `lora`)."""

    rank: int | None = Field(default=None, gt=0)
    """Width of the adapters. Without it the whole model is trained."""
    alpha: float = Field(default=16, gt=0)
    """Factor on what the adapters add, times `rank`."""
    targets: _Names = Field(default=(ALL_LINEAR,), min_length=1)
    """Layers that get an adapter, by name or the end of a name, such as "q_proj"; "all-linear" is every
    linear layer of the blocks.
    """
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's input that is zeroed in training."""

    @model_validator(mode="after")
    def _has_a_rank(self) -> LoraConfig:
        given = [
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default
        ]
        if self.rank is None and given:
            raise ValueError(f"a number for lora.rank, since lora.{given[0]} is given")
        return self


class ValidationConfig(Section):
    """When to measure the loss on held-out data; always at the end."""

    every: int = Field(default=100, ge=0)
    """Steps between validations; 0 validates only at the end."""
    samples: int = Field(default=256, gt=0)
    """Number of samples of the validation split, from its beginning."""


class CheckpointConfig(Section):
    """When to save the state; always at the end."""

    every: Annotated[int, Field(ge=0)] | Literal["auto"] = 100
    """Steps between checkpoints; 0 saves only at the end. "auto" chooses them by the measured time of a step,
    the time for which a save stops training, `mtbf`, and the failures that the run has seen.
    """
    mtbf: float = Field(default=24.0, gt=0)
    """Mean time between failures of the whole run, in hours, as expected before it, for every = "auto"."""
    background: bool = True
    """Whether checkpoints are written beside the training, which waits for a copy of the state only. The copy
    takes as much host memory as the state.
    """
    keep: int = Field(default=2, gt=0)
    """Number of checkpoints to keep. The last one that verifies is never deleted."""
    memory: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """With `--nproc MIN:MAX`, steps between two checkpoints in the host's memory, from which ranks go on when
    one is lost; 0 for none. With "auto" they cost half a percent of the time of steps.
    """
    store: str = ""
    """Object store that each checkpoint is copied to behind the training, such as s3://bucket/runs/one (extra
    `store`); it keeps as many.
    """


class TrainConfig(Section):
    """The configuration of a training run."""

    model: str = "tiny"
    """A preset, `package.module:function`, or `hf:PATH`."""
    model_options: dict[str, Any] = {}
    """Changes to the preset, or arguments of the function."""
    model_folder: str = ""
    """Folder in which modules of `package.module:function` are looked for first, for the model, the optimizer
    and the schedule: the folder that the run began in.
    """
    init: str = ""
    """Run, checkpoint or directory of checkpoints whose weights the run begins with: fine-tuning. Steps, data
    and the optimizer begin anew.
    """
    data: DataConfig = DataConfig()
    """The text to train on."""
    plan: str = ""
    """A Plan's text form, or auto for the Plan that is predicted to be quickest. Without `dp` in it, all
    ranks that the other degrees leave are data parallel.
    """
    cluster: str = ""
    """The machines: a preset or a file of `shoal probe`. plan = "auto" is chosen for them (for the nearest
    preset if empty), and `shoal report` predicts the run on them.
    """
    memory: str = ""
    """Memory of a device that plan = "auto" may use, such as 20GiB: all of it if empty; with auto what is
    free on this host when the run starts, divided among its ranks.
    """
    batch: int = Field(default=16, gt=0)
    """Sequences in one optimizer step, over all ranks."""
    sequence: int = Field(default=256, gt=0)
    """Tokens in a sequence."""
    steps: int = Field(default=600, gt=0)
    """Total number of optimizer steps."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the first weights, the order of samples and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks; auto is CUDA if the host has it."""
    deterministic: bool = False
    """Whether a repeated run gives the same bits on GPUs too; slower, and some operators are then refused."""
    offload_folder: str = ""
    """Folder for the files of a Plan with `offload`, best on a fast local disk of each host; by default the
    run's directory. The files have no names there, and their space is free again when the run ends.
    """
    compare_replicas: int = Field(default=100, ge=0)
    """Steps between comparisons of the bits that replicas hold, which find a rank whose memory or device is
    faulty; 0 for none. They are compared before each save too.
    """
    timeout: float = Field(default=600.0, gt=0, le=10_000_000)
    """Seconds after which a collective fails if not all ranks have joined it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its learning rate."""
    lora: LoraConfig = LoraConfig()
    """LoRA."""
    validation: ValidationConfig = ValidationConfig()
    """Held-out loss."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saved states."""
    record: RecordConfig = RecordConfig()
    """Timeline and scalars."""


def load_config(
    file: Path | None = None, settings: Sequence[str] = (), base: dict[str, Any] | None = None
) -> TrainConfig:
    """Build a configuration from its sources; later ones win.

    Args:
        file: A TOML file.
        settings: `key=value`, with dotted keys as in `optimizer.learning_rate=1e-3`. Values are as in TOML;
            what is not TOML is text. A table changes the keys that it holds; `{}` restores the defaults of
            all.
        base: A configuration to start from, such as that of a run that is resumed.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
    """
    content = table_of(file, settings, base)
    try:
        return TrainConfig.model_validate(content)
    except ValidationError as error:
        raise _config_error(error) from None


def table_of(
    file: Path | None = None, settings: Sequence[str] = (), base: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the table from which `load_config` builds a configuration; arguments and errors as there."""
    content: dict[str, Any] = dict(base or {})
    if file is not None:
        content = _merge(content, _read(file))
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"the setting {setting!r} has no value",
                possible="key=value, such as optimizer.learning_rate=1e-3",
                change="add = and a value",
            )
        nested: Any = _value(value)
        for part in reversed(key.strip().split(".")):
            nested = {part: nested}
        content = _merge(content, nested)
    return content


def settings_of(config: TrainConfig, only: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return settings by dotted key, with values of JSON.

    Args:
        config: The configuration.
        only: A table of those that are asked for; None for all.
    """
    return dict(_flat(config.model_dump(mode="json"), only))


def _flat(values: Any, only: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        if not isinstance(only, Mapping) or key in only:
            yield from _flat(value, only and only[key], f"{prefix}.{key}" if prefix else key)


def describe_config(config: TrainConfig) -> str:
    """Return the whole configuration in a few lines, one for each section."""
    values = config.model_dump(mode="json")
    sections = {key: value for key, value in values.items() if isinstance(getattr(config, key), BaseModel)}
    plain = {key: value for key, value in values.items() if key not in sections}
    return "\n".join(
        f"  {name:<11}" + ", ".join(f"{key}={json.dumps(value)}" for key, value in section.items())
        for name, section in {"run": plain, **sections}.items()
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        return toml_of(read_limited(file, CONFIGURATION))
    except OSError as error:
        raise ConfigError(
            f"the configuration {file} cannot be read: {error.strerror}",
            possible="a TOML file",
            change="correct the path",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"the configuration {file} is not TOML: {error}",
            possible='lines such as model = "tiny", and sections such as [optimizer]',
            change="correct that line",
        ) from None


def _value(text: str) -> Any:
    try:
        return toml_of(f"value = {text}".encode())["value"]
    except ValueError:
        return text.strip()


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        # An empty table means "none of these"; merged, it would have no effect.
        both = value != {} and isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _config_error(error: ValidationError) -> ConfigError:
    problem = error.errors()[0]
    path = _path_of(problem["loc"])
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        beside = _keys_beside(path)
        keys = [*TrainConfig.model_fields, *_all_keys(TrainConfig)]
        return ConfigError(
            f"there is no key {key!r}{guess_key(key, keys)}",
            possible=", ".join(beside),
            change=f"correct or remove {key!r}",
        )
    possible = problem["msg"].removeprefix("Value error, ")
    return ConfigError(
        f"{key} cannot be {problem['input']!r}",
        possible=possible[0].lower() + possible[1:],
        change=f"change {key}",
    )


def _path_of(location: Sequence[int | str]) -> list[str]:
    """Return the key that pydantic found wrong, without what it adds to it for alternative types."""
    path: list[str] = []
    model: Any = TrainConfig
    for part in map(str, location):
        path.append(part)
        if part not in model.model_fields:
            break
        model = model.model_fields[part].annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
    return path


def _keys_beside(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = TrainConfig
    for part in path[:-1]:
        inner = model.model_fields[part].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        model = inner
    return list(model.model_fields)


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _all_keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name
