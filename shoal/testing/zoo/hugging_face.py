"""Entries from transformers, made from small configurations without a download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import MissingExtraError
from shoal.models.task import Task
from shoal.testing.zoo.vectors import BATCH, words

VOCABULARY = 31
_TEXT = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}


def hf_llama() -> Task:
    """LlamaForCausalLM: grouped queries, rotary positions in a buffer that is not saved."""
    return _causal(
        "llama",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
    )


def hf_gpt2() -> Task:
    """GPT2LMHeadModel: tied embeddings, Conv1D layers."""
    return _causal(
        "gpt2",
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def hf_mixtral() -> Task:
    """MixtralForCausalLM: experts in one weight, and the router's own loss in the model's."""
    return _causal(
        "mixtral",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )


def hf_deepseek_v3() -> Task:
    """DeepseekV3ForCausalLM: latent attention, shared experts beside routed ones."""
    return _causal(
        "deepseek_v3",
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        max_position_embeddings=8,
    )


def hf_opt() -> Task:
    """OPTForCausalLM: positions are a running count of the attention mask, from 2."""
    return _causal(
        "opt",
        hidden_size=16,
        ffn_dim=24,
        word_embed_proj_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        dropout=0.0,
        layerdrop=0.0,
    )


def hf_distilbert() -> Task:
    """DistilBertForSequenceClassification: a dict of tokens, mask and labels, and a head without use."""
    config = _config(
        "distilbert",
        vocab_size=VOCABULARY,
        dim=16,
        hidden_dim=24,
        n_layers=2,
        n_heads=2,
        max_position_embeddings=8,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        num_labels=3,
    )

    def batch(number: int) -> dict[str, Tensor]:
        tokens = words(number, VOCABULARY)["x"]
        lengths = torch.arange(BATCH) % 3 + 4
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens[:, 0] % 3}

    return Task(
        build=lambda: _built("AutoModelForSequenceClassification", config), batch=batch, loss=_own_loss
    )


def hf_t5() -> Task:
    """T5ForConditionalGeneration: encoder and decoder share the embedding."""
    config = _config(
        "t5",
        **_TEXT,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )

    def batch(number: int) -> dict[str, Tensor]:
        made = words(number, VOCABULARY)
        return {"input_ids": made["x"], "labels": made["y"].contiguous()}

    return Task(build=lambda: _built("AutoModelForSeq2SeqLM", config), batch=batch, loss=_own_loss)


def hf_vit() -> Task:
    """ViTForImageClassification: a convolution cuts images into patches."""
    config = _config(
        "vit",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )

    def batch(number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(BATCH, 3, 8, 8, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(3, (BATCH,), generator=generator)}

    return Task(build=lambda: _built("AutoModelForImageClassification", config), batch=batch, loss=_own_loss)


def _causal(kind: str, **shape: Any) -> Task:
    config = _config(kind, **_TEXT, **shape)

    def batch(number: int) -> dict[str, Tensor]:
        tokens = words(number, VOCABULARY)["x"]
        return {"input_ids": tokens, "labels": tokens}

    return Task(build=lambda: _built("AutoModelForCausalLM", config), batch=batch, loss=_own_loss)


def _config(kind: str, **shape: Any) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(f"the model hf_{kind}", package="transformers", extra="hf") from error
    return transformers.AutoConfig.for_model(kind, **shape)


def _built(kind: str, config: Any) -> nn.Module:
    import transformers

    model: nn.Module = getattr(transformers, kind).from_config(config).float().train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # they begin at zero, which would hide one that is added twice
            nn.init.normal_(parameter, std=0.1)
    return model


def _own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that the model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss.float()
