"""Mixtures of experts of transformers with their auxiliary loss: in the Trainer, and in a loop of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from shoal.models import Transformer, TransformerConfig
from shoal.train import OptimizerConfig, Trainer

STEPS, BATCH, MICRO, SEQ, RATE = 2, 8, 2, 16, 0.5
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "output_router_logits": True,
    "router_aux_loss_coef": 3.0,
    "router_jitter_noise": 0.0,
    "attn_layer_period": 2,  # the next lines are Jamba's
    "attn_layer_offset": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "use_mamba_kernels": False,
    "moe_num_experts": 4,  # and these Ernie's
    "moe_k": 2,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


OWN = {"layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "expert_ffn": 12, "experts": 4}


def model_of(kind: str) -> Any:
    if kind == "shoal":
        weights = {"experts_per_token": 2, "balance_weight": 3.0, "z_weight": 0.1}
        model = Transformer(TransformerConfig(**OWN, **weights, vocab_size=SHAPE["vocab_size"], seq=SEQ))
        model.initialize(0)
        return model.train()
    transformers = __import__("transformers")
    config = transformers.AutoConfig.for_model(kind, **SHAPE)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # the routers choose unevenly
    return model.train()


def samples(masked: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets; if masked, some micro-batches and parts of sequences have hardly any target."""
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for number in range(BATCH * STEPS):
        tokens = torch.randint(SHAPE["vocab_size"], (SEQ + 1,), generator=generator)
        targets = tokens[1:].clone()
        if masked:
            targets[(0, 2, SEQ // 2, 1)[number % 4] :] = -100
        pairs.append((tokens[:-1], targets))
    return pairs


def train(kind: str, plan: str, masked: bool, form: str = "pairs") -> dict[str, Any]:
    """Train under a Plan; return what the steps reported, and the whole weights on rank 0."""
    data: Any = samples(masked)
    if form == "labels":  # shifted by the model: the target of a token stands one place later
        data = [{"input_ids": one, "labels": F.pad(other, (1, -1), value=-100)} for one, other in data]
    trainer = Trainer(
        model_of(kind),
        data,
        f"{plan},microbatch={MICRO}",
        batch=BATCH,
        steps=STEPS,
        optimizer=OptimizerConfig(
            name="sgd", learning_rate=RATE, warmup=0, final=1.0, clip=None, weight_decay=0.0
        ),
    )
    results = [trainer.step() for _ in range(STEPS)]
    validated = trainer.validate(data, BATCH)
    weights = trainer.parallel.full_state_dict()
    order = trainer._loader.indices(0, BATCH * STEPS).tolist()
    trainer.close()
    told = {"loss": [each.loss for each in results], "norm": [each.gradient_norm for each in results]}
    return {**told, "validated": validated, "weights": weights, "order": order}


def reference(kind: str, masked: bool, order: list[int], form: str = "pairs") -> dict[str, Any]:
    """Each micro-batch's mean loss and auxiliary loss, weighted by its targets, in a loop of torch."""
    model, data = model_of(kind), samples(masked)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, norms = [], []

    def parts_of_loss(indices: list[int]) -> Iterator[torch.Tensor]:
        tokens, targets = (torch.stack(each) for each in zip(*(data[i] for i in indices), strict=True))
        if form == "labels":
            targets = F.pad(targets[:, :-1], (0, 1), value=-100)
        for part, wanted in zip(tokens.split(MICRO), targets.split(MICRO), strict=True):
            share = (wanted != -100).sum() / (targets != -100).sum()
            if share:
                output = model(input_ids=part)
                own = F.cross_entropy(output.logits.flatten(0, 1), wanted.flatten())
                yield share * (own + SHAPE["router_aux_loss_coef"] * output.aux_loss)

    for step in range(STEPS):
        losses.append(0.0)
        for part in parts_of_loss(order[step * BATCH : (step + 1) * BATCH]):
            part.backward()
            losses[-1] += part.item()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        validated = sum(part.item() for part in parts_of_loss(list(range(BATCH))))
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    return {"loss": losses, "norm": norms, "validated": validated, "weights": weights}
