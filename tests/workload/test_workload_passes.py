"""The bytes of passes, beside those of every operator that a transformer runs on a CPU."""

import pytest

from shoal.models import Transformer, TransformerConfig
from shoal.spec.workload import Pass, transformer_shape, workload_of

SIZES = {"vocab_size": 512, "layers": 3, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 384, "seq": 64}
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn": 192}
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")
"""What is no pass, by the beginning of its name."""
ALLOCATIONS = (
    "_unsafe_view",
    "_reshape_alias",
    "new_empty",
    "empty",
    "zeros",
    "new_zeros",
    "ones_like",
    "arange",
    "unbind",
    "sort",
)
"""What moves nothing of the stream, or no more than a fill that the next operator writes over."""


def moved(config, samples, width, *, norms=True):
    """Bytes that operators of forward, and of backward, read and write, with weights of so many bytes."""
    import torch
    import torch.nn.functional as F
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Count(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, operator, types, given=(), named=None):
            result = operator(*given, **(named or {}))
            name = operator._schema.name.split("::")[1]
            is_view = any(
                each.alias_info and not each.alias_info.is_write for each in operator._schema.returns
            )
            if not (is_view or name.startswith(PRODUCTS) or name in ALLOCATIONS):
                tensors = [each for each in tree_leaves((given, named, result)) if torch.is_tensor(each)]
                self.nbytes += sum(each.numel() * each.element_size() for each in tensors)
            return result

    model = Transformer(config)
    model.initialize(0)
    model.to(torch.float32 if width == 4 else torch.bfloat16)
    if not norms:
        model.norm = torch.nn.Identity()
        for block in model.blocks:
            block.attention_norm, block.feed_forward_norm = torch.nn.Identity(), torch.nn.Identity()
    tokens = torch.randint(config.vocab_size, (samples, config.seq))
    with Count() as forward:
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    with Count() as backward:
        loss.backward()
    return forward.nbytes, backward.nbytes


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({}, 0.03), ({"ffn": 1024}, 0.03), (EXPERTS, 0.12)],
    ids=["dense", "wide", "experts"],
)
def test_passes_on_cores_move_what_the_operators_of_a_step_move(changes, tolerance):
    """Within what operators on a number for each token move; of experts, also sorting and statistics."""
    config = TransformerConfig(**{**SIZES, **changes})
    shape = transformer_shape(config.model_dump()).replace(fused_passes=False)
    operations = [each for piece in workload_of(shape).pieces for each in piece.operations]
    passes = [each for each in operations if isinstance(each, Pass)]
    samples, width = 16, 4
    found = [samples * sum(each) for each in zip(*(one.nbytes(width) for one in passes), strict=True)]
    assert found == [pytest.approx(each, rel=tolerance) for each in moved(config, samples, width)]


def test_in_16_bits_rotary_embedding_and_loss_compute_in_fp32_and_cast():
    """Beside what the operators of a model without norms move: on cores these compute otherwise."""
    config = TransformerConfig(**SIZES)
    shape = transformer_shape(config.model_dump()).replace(fused_passes=False)
    operations = [each for piece in workload_of(shape).pieces for each in piece.operations]
    passes = [each for each in operations if isinstance(each, Pass) and each.name != "norm"]
    found = [16 * sum(each) for each in zip(*(one.nbytes(2) for one in passes), strict=True)]
    assert found == [pytest.approx(each, rel=0.05) for each in moved(config, 16, 2, norms=False)]
