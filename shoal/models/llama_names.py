"""A Shoal transformer as Hugging Face's LlamaForCausalLM, or with experts as MixtralForCausalLM.

Both compute the same as the Transformer. Mixtral's shares of a token's experts always add up to 1, and its
experts take all tokens.
"""

from __future__ import annotations

import re
from typing import Any

from shoal.errors import ModelError
from shoal.models.config import TransformerConfig
from shoal.models.hugging_face import StoredTensor

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
    "feed_forward.router": "block_sparse_moe.gate",
}
_OF_EXPERT = {"feed_forward.gate": "w1", "feed_forward.up": "w3", "feed_forward.down": "w2"}
_OF_MODEL = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def llama_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the entries of a `config.json`.

    Raises:
        ModelError: The model has experts that Mixtral has not.
    """
    shape = {
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
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if not config.experts:
        return {**shape, "attention_bias": False, "mlp_bias": False}
    _require_mixtral(config)
    return {
        **shape,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": config.expert_ffn or config.ffn,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_weight,
        "sliding_window": None,
    }


def llama_name(name: str) -> str:
    """Return the name that LlamaForCausalLM has for a parameter of a Transformer without experts."""
    module = name.removesuffix(".weight")
    block = _BLOCK.fullmatch(module)
    called = _OF_MODEL[module] if block is None else f"model.layers.{block[1]}.{_OF_BLOCK[block[2]]}"
    return f"{called}.weight"


def stored_as_llama(name: str, shape: tuple[int, ...]) -> list[StoredTensor]:
    """Return the tensors as which files have a parameter of a Transformer: one for each expert in a stack."""
    block = _BLOCK.fullmatch(name)
    if block is None or len(shape) < 3:
        return [StoredTensor(llama_name(name), shape)]
    experts = f"model.layers.{block[1]}.block_sparse_moe.experts"
    return [
        StoredTensor(f"{experts}.{expert}.{_OF_EXPERT[block[2]]}.weight", shape[1:], expert)
        for expert in range(shape[0])
    ]


def _require_mixtral(config: TransformerConfig) -> None:
    """Refuse experts that Mixtral would compute otherwise."""
    if config.renormalize and config.capacity is None:
        return
    given = "renormalize=false" if not config.renormalize else f"capacity={config.capacity}"
    reason = (
        "Mixtral divides the shares of a token's experts by their sum"
        if not config.renormalize
        else "Mixtral's experts take all tokens"
    )
    raise ModelError(
        f"a model with experts and {given} has no form in Hugging Face's layout: {reason}",
        possible="models without experts, and those with renormalize=true and without a capacity",
        change="export such a model, or load this one with shoal.train.load_model",
    )
