"""The result of one optimizer step, the way of its numbers to the host, and who is told of it."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, final

import torch

from shoal.launch.local import TERMINAL
from shoal.predict.simulate import measured_timeline
from shoal.spec.run import Decision, Run, shown, tokens_per_second
from shoal.spec.timeline import explain
from shoal.units import format_count, format_seconds


@final
class ToHost:
    """Numbers on their way from a device to the host, which need not wait for them until it reads them.

    Args:
        values: The numbers, scalars on one device.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        held = torch.stack([value.detach().double() for value in values])
        self._arrived: torch.cuda.Event | None = None
        if held.is_cuda:
            # A few bytes a step, which torch's allocator keeps until the copy is made, and uses again.
            pinned = torch.empty(held.shape, dtype=held.dtype, pin_memory=True)
            held = pinned.copy_(held, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._held = held

    def read(self) -> list[float]:
        """Return the numbers; wait for them if they have not arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._held.tolist()
        return numbers


@final
class StepResult:
    """The result of one optimizer step.

    On a GPU the device may still compute the step. Reading `loss`, `gradient_norm`, `stop` or `skipped` then
    waits for it; a later step's result, or the Trainer's `on_step`, gives the values without a wait.

    Args:
        loss: Mean over the batch, before the step.
        gradient_norm: Norm of the whole gradient, before clipping.
        stop: Number of ranks that asked to stop.

    Attributes:
        step: Number of the step, from 1.
        learning_rate: Learning rate of the step.
        tokens: Elements of the inputs, over all ranks.
        seconds: Wall time of the call that made the step.
    """

    def __init__(
        self,
        step: int,
        loss: torch.Tensor,
        gradient_norm: torch.Tensor,
        stop: torch.Tensor,
        *,
        learning_rate: float,
        tokens: int,
        seconds: float = 0.0,
    ) -> None:
        self.step = step
        self.learning_rate = learning_rate
        self.tokens = tokens
        self.seconds = seconds
        self._coming: ToHost | None = ToHost((loss, gradient_norm, stop))
        self._values: list[float] = []
        self._reason: str | None = None

    @property
    def loss(self) -> float:
        """Mean loss over the batch, before the step."""
        return self._read()[0]

    @property
    def gradient_norm(self) -> float:
        """Norm of the whole gradient, before clipping."""
        return self._read()[1]

    @property
    def stop(self) -> bool:
        """Whether a rank asked to stop."""
        return self._read()[2] > 0

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient were finite, so that the step was made."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    @property
    def skipped(self) -> str:
        """Why the step was left out, so that weights stay unchanged; empty if it was made."""
        if self._reason is None and not self.is_finite:  # the ranks have not looked for the reason yet
            return f"a loss of {self.loss} and a gradient of norm {self.gradient_norm}"
        return self._reason or ""

    def explain(self, reason: str) -> None:
        """Note why the step was left out; empty if it was made."""
        self._reason = reason

    def values(self) -> dict[str, float]:
        """Return the values that a run's metrics keep."""
        return {
            "loss": self.loss,
            "gradient_norm": self.gradient_norm,
            "learning_rate": self.learning_rate,
            "tokens": self.tokens,
            "step_seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "skipped": int(bool(self.skipped)),
        }

    def _read(self) -> list[float]:
        if self._coming is not None:
            self._values, self._coming = self._coming.read(), None
        return self._values


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """The user's functions that a Trainer calls on every rank.

    Attributes:
        on_step: Called with each step's result.
        on_validation: Called with the steps made and the values of each validation.
        on_save: Called with the path of each checkpoint.
        on_decision: Called with each decision about the exchange.
    """

    on_step: Callable[[StepResult], object] = lambda result: None
    on_validation: Callable[[int, Mapping[str, float]], object] = lambda step, values: None
    on_save: Callable[[Path], object] = lambda path: None
    on_decision: Callable[[Decision], object] = lambda decision: None


_BAR = 20  # columns of the bar
_COLUMNS = 100  # of a terminal whose width is not known
_PAUSE = 0.1  # seconds for which a live line stays at least: short steps would pay for each


class LiveLine:
    """Show progress: on a terminal one line with a bar that is overwritten, else a new line every few steps.

    On a terminal a step that ends within 0.1 s of the one shown before is left out, except the last.

    The line has no colours. It is cut to the width of the terminal: a wrapped line could not be overwritten.

    Args:
        steps: Total number of steps.
        every: Steps between two lines if there is no terminal.
        stream: Stream to write to; by default stderr, as for messages.
    """

    def __init__(self, steps: int, every: int, stream: TextIO | None = None) -> None:
        self._steps = steps
        self._every = every
        self._stream = sys.stderr if stream is None else stream
        self._passed_on = os.environ.get(TERMINAL) if stream is None else None
        is_terminal = self._stream.isatty() or self._passed_on is not None
        self._overwrite = is_terminal and os.environ.get("TERM") != "dumb"
        is_unicode = (self._stream.encoding or "").lower().replace("-", "") == "utf8"
        self._full, self._empty = ("━", "╌") if is_unicode else ("#", "-")
        self._begin: tuple[int, float] | None = None
        self._shown = False
        self._next = 0.0  # when a live line may be overwritten

    def show(self, result: StepResult) -> None:
        """Show a step."""
        now = time.monotonic()
        if self._begin is None:
            self._begin = (result.step, now)
        is_due = now >= self._next if self._overwrite else result.step % self._every == 0
        if not is_due and result.step != self._steps:
            return
        self._next = now + _PAUSE
        first, since = self._begin
        made, to_make = result.step - first, self._steps - result.step
        text = (
            f"step {result.step}/{self._steps}  loss {result.loss:.3f}  lr {result.learning_rate:.2e}  "
            f"{result.tokens / result.seconds:,.0f} tokens/s"
        )
        if made and to_make:
            text += f"  {format_seconds(to_make * (now - since) / made)} left"
        if self._overwrite:
            text = f"{self._bar(result.step)}  {text}"[: self._columns() - 1]
        self._write(f"\r\x1b[K{text}" if self._overwrite else f"{text}\n")
        self._shown = self._overwrite

    def _bar(self, step: int) -> str:
        done = _BAR * step // self._steps
        return f"{self._full * done}{self._empty * (_BAR - done)} {step / self._steps:4.0%}"

    def _columns(self) -> int:
        if self._passed_on is not None:
            return int(self._passed_on)
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        return _COLUMNS

    def say(self, text: str) -> None:
        """Write a line of its own, without tearing the live one."""
        self._write(("\r\x1b[K" if self._shown else "") + f"{text}\n")
        self._shown = False

    def _write(self, text: str) -> None:
        """Write text; a terminal that is gone, or a full disk behind a redirection, does not stop the run."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def summary(run: Run, saves: str = "") -> str:
    """Return a summary of a run, for its end.

    Args:
        run: The run.
        saves: What became of its checkpoints, in one line; "" for nothing.
    """
    metrics = run.metrics()
    trained = [values for values in metrics if "loss" in values]
    validated = [values for values in metrics if values.get("validation_loss") is not None]
    described = run.description
    model = described["model"]
    seconds = sum(values["step_seconds"] for values in trained)
    tokens = sum(values["tokens"] for values in trained)
    parameters = format_count(model["parameters"])
    lines = [
        f"run         {shown(run.path)}",
        f"model       {model['name']}, {parameters} parameters, Plan {described['plan']}",
        f"steps       {len(trained)}, {format_count(tokens)} tokens in {format_seconds(seconds)}",
    ]
    if (rate := tokens_per_second(metrics, described.get("since_step"))) is not None:
        lines.append(f"tokens/s    {rate:,.0f} in the median step")
    if trained:
        lines.append(f"loss        {trained[0]['loss']:.3f} at first, {trained[-1]['loss']:.3f} at last")
    if skipped := sum(bool(values.get("skipped")) for values in trained):
        lines.append(f"skipped     {skipped} steps, whose loss or gradient was not finite")
    if saves:
        lines.append(f"saves       {saves}")
    if validated:
        loss, unit = validated[-1]["validation_loss"], described["loss_unit"]
        accuracy = validated[-1].get("validation_accuracy")
        lines.append(
            f"validation  {loss:.3f} {unit}" + (f", accuracy {accuracy:.3f}" if accuracy is not None else "")
        )
    timeline = measured_timeline(run)
    if timeline.steps():
        parts = explain(timeline).parts
        shares = [
            f"{name.replace('_', ' ')} {share:.0%}"
            for name, part in parts.disjoint().items()
            if (share := part / parts.wall) >= 0.005
        ]
        lines.append(f"step        {format_seconds(parts.wall)}: {', '.join(shares)}")
    is_classifier = bool(described.get("config", {}).get("data", {}).get("label"))
    path = shlex.quote(shown(run.path))
    then = f"shoal export {path} DIR" if is_classifier else f"shoal sample {path} --prompt 'def '"
    lines.append(f"next        shoal report {path}    {then}")
    return "\n".join(lines)
