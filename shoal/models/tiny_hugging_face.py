"""Small models with random weights, of every kind of transformers' causal and masked language models.

A kind is a `model_type` of transformers, such as `llama`. Its own configuration class gives the settings, and
each that is a size is made small by its name. What differs from layer to layer is kept: every type of layer
that the kind has stands once among the first layers. Dropout is 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.errors import MissingExtraError, ModelError, nearest

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, EXPERTS = 32, 4, 2, 8, 48, 2, 4
_MOST_LAYERS = 4
_SPREAD = (
    HIDDEN**-0.5
)  # attention and experts of so few features do little with the small values of large models
VOCABULARY, CONTEXT, WINDOW = 96, 64, 8
INDEX_HEADS = (
    32  # with few, scores of tokens are 0 in all heads, and the length of a sample breaks their ties
)

_SIZES: tuple[tuple[int, str], ...] = (
    (
        HIDDEN,
        "hidden_size d_model n_embd dim emb_dim embedding_dim embedding_size word_embed_proj_dim "
        "attention_hidden_size cross_attention_hidden_size lru_width pooler_hidden_size input_embedding_size "
        "output_embedding_size true_hidden_size intra_bottleneck_size pronunciation_embed_dim "
        "shape_embed_dim d_latents backbone_hidden_size entity_emb_size ple_embed_dim prediction_head_size "
        "projection_dim embed_dim adapter_in_dim out_hidden_size mm_embed_dim hidden_size_global",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "attention_heads num_encoder_attention_heads num_decoder_attention_heads num_self_attention_heads "
        "num_cross_attention_heads swa_num_attention_heads linear_num_heads linear_num_key_heads "
        "linear_num_value_heads mamba_num_heads index_n_heads indexer_n_heads num_query_groups "
        "conf_num_attention_heads",
    ),
    (INDEX_HEADS, "index_n_heads"),
    (
        KV_HEADS,
        "num_key_value_heads swa_num_key_value_heads kv_n_heads num_kv_heads n_groups "
        "n_mamba_heads o_groups encoder_num_key_value_heads decoder_num_key_value_heads heads_per_ngram",
    ),
    (
        HEAD_DIM,
        "head_dim swa_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim dim_head d_head "
        "attention_head_size linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim "
        "mamba_d_head mamba_head_dim global_head_dim d_kv kv_channels hidden_size_per_layer_input "
        "d_rel kv_lora_rank q_lora_rank o_lora_rank gated_norm_rank laurel_rank adapter_rank hc_lowrank "
        "moe_latent_size router_hidden_size mamba_d_state ssm_state_size state_size time_step_rank "
        "mamba_dt_rank rotary_dim embedding_rank indexer_head_dim query_pre_attn_scalar dim_model_base",
    ),
    (
        FFN,
        "intermediate_size moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner "
        "ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size dff dim_ff hidden_dim "
        "d_inner intermediate_size_mlp expert_ffn_hidden_size feed_forward_size "
        "moe_shared_expert_intermediate_size dense_intermediate_size prefix_dense_intermediate_size "
        "shared_experts_intermediate_size d_ff "
        "prompt_mid_dim",
    ),
    (EXPERTS, "num_experts n_routed_experts num_local_experts moe_num_experts moe_num_primary_experts"),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts num_random_blocks "
        "hc_mult hc_count altup_num_inputs hc_sinkhorn_iters mamba_n_groups zero_expert_num num_codebooks "
        "num_hidden_groups index_topk_blocks number_of_conv_states interleave_moe_layer_step",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
        "num_decoder_layers num_blocks num_self_attends_per_block num_layers_per_stack",
    ),
    (
        1,
        "num_nextn_predict_layers first_k_dense_replace num_dense_layers n_group topk_group num_expert_group "
        "n_shared_experts num_shared_experts moe_num_shared_experts moe_layer_start_index "
        "encoder_hash_byte_group_nb_functions num_mem_blocks num_kv_shared_layers",
    ),
    (
        VOCABULARY,
        "vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input "
        "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab entity_vocab_size "
        "ngram_vocab_size_base audio_vocab_size max_2d_position_embeddings",
    ),
    (
        CONTEXT,
        "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions context_length "
        "max_source_positions model_max_length num_latents keep_window_size rel_extent",
    ),
    (
        WINDOW,
        "sliding_window window_size attention_window_size local_attention attention_window block_size "
        "sliding_window_size local_attention_window_len attention_chunk_size prompt_length "
        "segment_means_seq_len local_attn_chunk_length lsh_attn_chunk_length index_topk index_block_size "
        "chunk_size mamba_chunk_size num_landmarks indexer_budget",
    ),
)
_SIZE = {name: value for value, names in _SIZES for name in names.split()}
_ZERO = ("dropout", "pdrop", "jitter", "jitter_noise", "layerdrop", "dropout_prob", "dropout_p")
_HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_KIND: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**_MAMBA_HEADS, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "num_key_value_heads": HEADS,
        "head_dim": 2 * HEAD_DIM,
        "per_layer_config": {2: {"kv_lora_rank": 16}},
    },
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {**_MAMBA_HEADS, "mamba_d_ssm": 64},
    "flint": {"mlp_only_layers": [0]},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [FFN] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "granitemoehybrid": _MAMBA_HEADS,
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": HEAD_DIM},
    "mobilebert": {"embedding_size": HIDDEN // 2},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "neomme": {"head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "hash_seed": 0,
        "num_buckets": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": _HYBRID,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": _HYBRID,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 32,
    },
}
"""Settings of kinds whose sizes depend on one another, or that do not have them by default."""


_SUCH_AS = {"CAUSAL": ("gpt2", "llama"), "MASKED": ("bert", "roberta")}


def kinds() -> dict[str, str]:
    """Return the kinds of language models, each with "causal", "masked" or "both".

    Raises:
        MissingExtraError: transformers is not installed.
    """
    of_causal, of_masked = _names("CAUSAL"), _names("MASKED")
    return {
        kind: "both"
        if kind in of_causal and kind in of_masked
        else "causal"
        if kind in of_causal
        else "masked"
        for kind in sorted({*of_causal, *of_masked})
    }


def kind_of(model: str) -> str | None:
    """Return the kind that `hf:KIND` names; None if it is no such text, or names a path that exists."""
    name = model.removeprefix("hf:")
    return None if name == model or Path(name).exists() or os.sep in name else name


def causal(kind: str, **changes: Any) -> nn.Module:
    """Return a small causal language model.

    Args:
        kind: A `model_type` of transformers.
        changes: Entries of its configuration.

    Raises:
        ModelError: There is no such kind, or it cannot be made small.
        MissingExtraError: transformers is not installed.
    """
    return _built(kind, "CAUSAL", changes)


def masked(kind: str, **changes: Any) -> nn.Module:
    """Return a small model that predicts masked tokens; see `causal`."""
    return _built(kind, "MASKED", changes)


def _names(head: str) -> Mapping[str, str]:
    try:
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        raise MissingExtraError("a Hugging Face model", package="transformers", extra="hf") from error
    names: Mapping[str, str] = getattr(modeling_auto, f"MODEL_FOR_{head}_LM_MAPPING_NAMES")
    return names


def _built(kind: str, head: str, changes: Mapping[str, Any]) -> nn.Module:
    if kind not in _names(head):
        raise ModelError(
            f"transformers has no {head.lower()} language model of the kind {kind!r}"
            f"{nearest(kind, _names(head))}",
            possible=f"the kinds in transformers' MODEL_FOR_{head}_LM_MAPPING_NAMES, such as "
            f"{', '.join(_SUCH_AS[head])}",
            change="name one of these, or a folder that holds config.json",
        )
    try:
        return _from_configuration(kind, head, changes)
    except ImportError as error:
        raise ModelError(
            f"a small {kind} needs a package that is not installed: {' '.join(str(error).split())[:300]}",
            possible="kinds whose packages are installed",
            change="install the package, or name another kind",
        ) from error
    except Exception as error:
        raise ModelError(
            f"transformers cannot build a small {kind}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}",
            possible="kinds whose default configuration can be built, and changes that fit its sizes",
            change="write a config.json with sizes that fit each other, and name its folder: hf:PATH",
        ) from error


def _from_configuration(kind: str, head: str, changes: Mapping[str, Any]) -> nn.Module:
    import transformers

    config = small_configuration(kind, changes)
    if head == "CAUSAL" and hasattr(config, "is_decoder"):
        config.is_decoder = True  # encoders see later tokens without it
    auto = transformers.AutoModelForCausalLM if head == "CAUSAL" else transformers.AutoModelForMaskedLM
    model: nn.Module = auto.from_config(config, dtype=torch.float32).float().train()
    return model


def small_configuration(kind: str, changes: Mapping[str, Any]) -> Any:
    """Return the configuration of a kind with small sizes."""
    import transformers

    described = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    config = described(**{**_small(described()), **changes})
    config.use_cache = False
    return config


def _small(config: Any) -> dict[str, Any]:
    """Return the settings of a configuration that are to be small, with their values."""
    import transformers

    own = {**config.to_dict(), **{name: getattr(config, name, None) for name in config.sub_configs}}
    settings: dict[str, Any] = {}
    for name, value in own.items():
        if isinstance(value, transformers.PretrainedConfig):
            settings[name] = {**value.to_dict(), **_small(value)}
        elif name in _SIZE and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            settings[name] = min(_SIZE[name], value)
        elif isinstance(value, float) and name.endswith(_ZERO):
            settings[name] = 0.0
        elif name in ("initializer_range", "init_std"):
            settings[name] = _SPREAD
    if "kv_lora_rank" in own and "num_key_value_heads" in own:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return settings | _special_tokens(own) | _layers(own) | dict(_KIND.get(config.model_type, {}))


def _special_tokens(own: Mapping[str, Any]) -> dict[str, int]:
    """Return numbers within the vocabulary for the tokens that a configuration names: 0 and on."""
    names = {
        name
        for name, value in own.items()
        if name.endswith(("_token_id", "_token_index"))
        and isinstance(value, int | list)
        and not isinstance(value, bool)
    }
    first = ["pad_token_id", "bos_token_id", "eos_token_id"]
    ordered = [*first, *sorted(names - set(first))]
    return {name: number for number, name in enumerate(ordered) if name in names}


def _layers(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of each layer, for so few layers that each kind of layer stands there once."""
    name = next(
        (n for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(own.get(n), int)), ""
    )
    count = own.get(name, 0)
    lists = {
        key: list(value)
        for key, value in own.items()
        if isinstance(value, list | tuple) and len(value) == count > 1
    }
    changed = {int(place): value for place, value in (own.get("per_layer_config") or {}).items()}
    words = [values for values in lists.values() if all(isinstance(value, str) for value in values)]
    rows = [(*(values[layer] for values in words), str(changed.get(layer))) for layer in range(count)]
    chosen = [rows.index(row) for row in dict.fromkeys(rows)][:_MOST_LAYERS]
    if len(chosen) < LAYERS:
        chosen = list(range(min(LAYERS, count)))
    made: dict[str, Any] = {key: [values[layer] for layer in chosen] for key, values in lists.items()}
    if changed:
        made["per_layer_config"] = {
            place: {key: _of_layer(key, value, own) for key, value in changed[layer].items()}
            for place, layer in enumerate(chosen)
            if layer in changed
        }
    return made | ({name: len(chosen)} if name else {})


def _of_layer(name: str, value: Any, own: Mapping[str, Any]) -> Any:
    """Return a setting of one layer, which stays larger than that of the others if it is."""
    if name not in _SIZE or not isinstance(value, int):
        return value
    return _SIZE[name] * (2 if value > (own.get(name) or value) else 1)
