"""Data with targets that are masked unevenly, batches of many kinds, and plain loops beside the Trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from train_stand_ins import SEQUENCE, SHAPE, weights

from shoal.data import Loader, MapSamples
from shoal.errors import UserError
from shoal.models import build, next_token_loss
from shoal.train import OptimizerConfig, Trainer, learning_rate

BATCH = 8
OPTIMIZER = OptimizerConfig(warmup=0, learning_rate=1e-2, eps=1e-3)  # an update follows its gradient smoothly
MASKED = [0, SEQUENCE, 3, 11, 1, SEQUENCE, 0, 9] * 2  # the first targets of each sample


class MaskedSamples:
    """Tokens of which the first targets of a sample do not count; some samples have none that do."""

    def __len__(self) -> int:
        return len(MASKED)

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for index in indices:
            generator = torch.Generator().manual_seed(int(index))
            row = torch.randint(0, 60, (SEQUENCE + 1,), generator=generator)
            row[1 : 1 + MASKED[index]] = -100
            rows.append(row)
        windows = torch.stack(rows)
        return windows[:, :-1].clamp(min=0), windows[:, 1:]


def mean_by_division(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """A loss whose own gradient is NaN where nothing counts."""
    if not isinstance(output, torch.Tensor):
        return next_token_loss(output, targets)
    each = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    return each / (targets != -100).sum()


def trained_on_masked(plan: str, steps: int = 2) -> dict[str, Any]:
    model = build("tiny", overrides=SHAPE, device="meta")
    trainer = Trainer(
        model,
        MaskedSamples(),
        plan,
        batch=BATCH,
        steps=4,
        seed=3,
        loss=mean_by_division,
        optimizer=OPTIMIZER,
    )
    results = [trainer.step() for _ in range(steps)]
    validated = trainer.validate(MaskedSamples(), 11)
    trainer.close()
    return {
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
        "skipped": [result.skipped for result in results],
        "validated": validated,
        "weights": trainer.parallel.full_state_dict(),
    }


def trained_on_nothing(plan: str) -> tuple[list[float], list[str], bool]:
    """A batch of which no target counts, then others."""

    class Nothing(MaskedSamples):
        def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = super().batch(indices)
            return inputs, torch.full_like(targets, -100)

    trainer = Trainer(
        build("tiny", overrides=SHAPE, device="meta"),
        Nothing(),
        plan,
        batch=BATCH,
        steps=4,
        optimizer=OPTIMIZER,
    )
    before = weights(trainer)
    results = [trainer.step() for _ in range(2)]
    after = weights(trainer)
    trainer.close()
    same = all(torch.equal(before[name], after[name]) for name in before)
    return [result.loss for result in results], [result.skipped for result in results], same


# -- other batches than pairs -----------------------------------------------------------------------


@dataclasses.dataclass
class Inputs:
    """What `OfDataclass` takes."""

    numbers: torch.Tensor
    more: dict[str, tuple[torch.Tensor, str]]


class OfDataclass(nn.Module):
    """Computes from nested inputs, and gives its loss with its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        predicted = self.one(inputs.numbers) + self.other(inputs.more["there"][0])
        return {"loss": predicted.square().mean(), "predicted": predicted}


class Labelled(nn.Module):
    """As a classifier of Hugging Face: it computes its loss if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(32, 8), nn.Linear(8, 5)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> Any:
        mask = attention_mask.unsqueeze(-1)
        hidden = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def labelled_items(count: int = 16) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    items = []
    for _ in range(count):
        label = torch.randint(-1, 5, (), generator=generator)
        items.append(
            {
                "input_ids": torch.randint(0, 32, (7,), generator=generator),
                "attention_mask": (torch.rand(7, generator=generator) > 0.3).float(),
                "labels": torch.where(label < 0, -100, label),  # some do not count
            }
        )
    return items


def dataclass_items(count: int = 16) -> list[Inputs]:
    generator = torch.Generator().manual_seed(0)
    return [
        Inputs(torch.randn(6, generator=generator), {"there": (torch.randn(6, generator=generator), "a")})
        for _ in range(count)
    ]


def collate_dataclass(items: list[Inputs]) -> Inputs:
    more = torch.stack([item.more["there"][0] for item in items])
    return Inputs(torch.stack([item.numbers for item in items]), {"there": (more, "a")})


def accuracy(output: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    labels = batch["labels"] if isinstance(batch, dict) else batch
    counted = labels != -100
    return (output["logits"].argmax(-1) == labels)[counted].float().mean()


def trained_on_mappings(plan: str, *, with_loss: bool) -> dict[str, Any]:
    def loss(output: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output["logits"], labels)

    trainer = Trainer(
        Labelled(),
        labelled_items(),
        plan,
        batch=BATCH,
        steps=4,
        loss=loss if with_loss else None,
        optimizer=OPTIMIZER,
    )
    losses = [trainer.step().loss for _ in range(3)]
    values = trainer.evaluate(labelled_items(13), 13, {"accuracy": accuracy})
    trainer.close()
    return {"losses": losses, "values": values, "weights": trainer.parallel.full_state_dict()}


def trained_on_dataclasses(plan: str) -> list[float]:
    data = MapSamples(dataclass_items(), collate=collate_dataclass)
    trainer = Trainer(OfDataclass(), data, plan, batch=BATCH, steps=4, optimizer=OPTIMIZER)
    losses = [trainer.step().loss for _ in range(3)]
    trainer.close()
    return losses


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def causal_items(count: int = 16, **others: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    items = []
    for index in range(count):
        tokens = torch.randint(0, 64, (SEQUENCE,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: MASKED[index]] = -100
        items.append({"input_ids": tokens, "labels": labels, **others})
    return items


def trained_causally(plan: str, **others: torch.Tensor) -> list[float]:
    """A causal model of Hugging Face on `labels`; on one device all of a batch in one forward."""
    trainer = Trainer(llama(), causal_items(**others), plan, batch=BATCH, steps=4, optimizer=OPTIMIZER)
    losses = [trainer.step().loss for _ in range(3)]
    trainer.close()
    return losses


def causal_by_hand() -> list[float]:
    """The losses of transformers' own model in a plain loop, in the Loader's order of samples."""
    model = llama()
    decayed = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    loader = Loader(MapSamples(causal_items()), seed=0, batch_size=BATCH)
    losses = []
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(OPTIMIZER, step=step, steps=4, batch=BATCH)
        loss = model(**loader.fetch(step * BATCH, BATCH)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def refusal() -> str:
    """What the Trainer says of a batch that the model cannot take."""
    items = causal_items(attention_mask=torch.ones(SEQUENCE))
    trainer = Trainer(nn.Linear(2, 2), items, "dp=1", batch=BATCH, steps=4)
    try:
        trainer.step()
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.close()
    return ""
