"""A Shoal transformer as Hugging Face's LlamaForCausalLM, which computes the same."""

from __future__ import annotations

import re
from typing import Any

from shoal.errors import ModelError
from shoal.models.config import TransformerConfig

__all__ = ["llama_config", "llama_name"]

_OF_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_OF_MODEL = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def llama_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the entries of a `config.json`.

    Raises:
        ModelError: The model has experts, which Llama has not.
    """
    if config.experts:
        raise ModelError(
            f"a model with {config.experts} experts has no form in Hugging Face's layout yet",
            possible="presets without experts, and models that began as hf:PATH",
            change="export a model without experts",
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.seq,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def llama_name(name: str) -> str:
    """Return the name that LlamaForCausalLM has for a parameter of a Transformer without experts."""
    module = name.removesuffix(".weight")
    block = _BLOCK.fullmatch(module)
    called = _OF_MODEL[module] if block is None else f"model.layers.{block[1]}.{_OF_BLOCK[block[2]]}"
    return f"{called}.weight"
