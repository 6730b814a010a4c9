"""A configuration for `shoal train`, made from a Plan that was chosen."""

from __future__ import annotations

from typing import Any

from shoal.errors import ModelError
from shoal.planner.candidate import Candidate
from shoal.workload import ModelShape


def configuration(candidate: Candidate, shape: ModelShape) -> str:
    """Return a configuration for `shoal train`, in TOML.

    Args:
        candidate: The Plan, with its batch.
        shape: Shape of the model.

    Raises:
        ModelError: Shoal's transformer cannot have this shape.
    """
    # A published shape is one of Shoal's own shapes with every size changed.
    where = f"{candidate.devices} devices of {candidate.cluster.name}"
    lines = [
        f"# Predicted on {where}: {candidate.seconds:.4g} s a step.",
        f'model = "{shape.name if shape.is_own else "tiny"}"',
        f'plan = "{candidate.plan}"',
        f"batch = {candidate.batch}",
        f"sequence = {candidate.workload.length}",
    ]
    options = [] if shape.is_own else _options(shape)
    return "\n".join([*lines, *options]) + "\n"


def _options(shape: ModelShape) -> list[str]:
    others = {
        "biases": shape.biases,
        "no gate": not shape.gated,
        "no rotary embedding": not shape.rotary,
        "latent attention": shape.latent is not None,
        "heads of a different width": shape.head_dim not in (None, shape.hidden // shape.heads),
        "shared experts": shape.shared_experts > 0,
        "layers without experts": shape.dense_layers > 0,
        "bidirectional attention": not shape.causal,
        "another objective": shape.objective != "next-token",
    }
    found = [name for name, has in others.items() if has]
    if found:
        raise ModelError(
            f"{shape.name} has {', '.join(found)}, which Shoal's transformer does not support",
            possible="models of Llama's and Mixtral's kind",
            change="leave out --write, and give the Plan to shoal train --plan with a model of your own",
        )
    values: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.keys,
        "ffn": shape.ffn,
        "seq": shape.seq,
        "tie_embeddings": str(shape.tied).lower(),
    }
    if shape.experts:
        values |= {
            "experts": shape.experts,
            "experts_per_token": shape.experts_per_token,
            "expert_ffn": shape.expert_ffn or shape.ffn,
            "renormalize": str(shape.renormalize).lower(),
        }
    return ["", "[model_options]", *(f"{name} = {value}" for name, value in values.items())]
