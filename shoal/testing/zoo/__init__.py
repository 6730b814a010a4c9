"""A zoo of small models of the kinds that users bring, to test every layout with.

Each entry is a function that returns a `Task`: its name is the entry's name, and the first line of its
docstring says what is special about it. `ENTRIES` has them all; `shoal check --model zoo:NAME` runs one. No
entry draws random numbers in its forward, except `dropout`.
"""

from collections.abc import Callable, Mapping

from shoal.models.task import Task
from shoal.testing.zoo.experts import (
    idle_experts,
)
from shoal.testing.zoo.hugging_face import (
    hf_distilbert,
    hf_gpt2,
    hf_llama,
    hf_t5,
    hf_vit,
)
from shoal.testing.zoo.inputs import (
    dataclasses_in_and_out,
    dict_inputs,
    heads,
    nested_inputs,
)
from shoal.testing.zoo.layers import (
    attention_layers,
    batch_norm,
    batch_norm_2d,
    channels_last,
    convolutions,
    dropout,
    gru,
    lstm,
    positions,
    sparse_embedding,
)
from shoal.testing.zoo.parameters import (
    frozen_parts,
    integer_parameters,
    lora,
    narrow_parameters,
    one_rank_parameters,
    scalar_parameters,
    spectral_norm,
    tied_weights,
    unused_parameters,
    weight_norm,
)
from shoal.testing.zoo.reversible import (
    reversible_layers,
    reversible_layers_last,
    reversible_layers_shared,
)
from shoal.testing.zoo.structure import (
    block_twice,
    blocks_in_reverse,
    children_called,
    nested_lists,
    no_list,
    other_method,
    recompute,
    recompute_reentrant,
    two_forwards,
    weight_penalty,
    weight_read,
)

__all__ = [
    "ENTRIES",
    "attention_layers",
    "batch_norm",
    "batch_norm_2d",
    "block_twice",
    "blocks_in_reverse",
    "channels_last",
    "children_called",
    "convolutions",
    "dataclasses_in_and_out",
    "dict_inputs",
    "dropout",
    "frozen_parts",
    "gru",
    "heads",
    "hf_distilbert",
    "hf_gpt2",
    "hf_llama",
    "hf_t5",
    "hf_vit",
    "idle_experts",
    "integer_parameters",
    "lora",
    "lstm",
    "narrow_parameters",
    "nested_inputs",
    "nested_lists",
    "no_list",
    "one_rank_parameters",
    "other_method",
    "positions",
    "recompute",
    "recompute_reentrant",
    "reversible_layers",
    "reversible_layers_last",
    "reversible_layers_shared",
    "scalar_parameters",
    "sparse_embedding",
    "spectral_norm",
    "tied_weights",
    "two_forwards",
    "unused_parameters",
    "weight_norm",
    "weight_penalty",
    "weight_read",
]

ENTRIES: Mapping[str, Callable[[], Task]] = {
    entry.__name__: entry
    for entry in (
        block_twice,
        blocks_in_reverse,
        children_called,
        nested_lists,
        no_list,
        other_method,
        recompute,
        recompute_reentrant,
        reversible_layers,
        reversible_layers_last,
        reversible_layers_shared,
        two_forwards,
        weight_penalty,
        weight_read,
        frozen_parts,
        integer_parameters,
        lora,
        narrow_parameters,
        one_rank_parameters,
        scalar_parameters,
        spectral_norm,
        tied_weights,
        unused_parameters,
        weight_norm,
        attention_layers,
        batch_norm,
        batch_norm_2d,
        channels_last,
        convolutions,
        dropout,
        gru,
        lstm,
        positions,
        sparse_embedding,
        dataclasses_in_and_out,
        dict_inputs,
        heads,
        nested_inputs,
        idle_experts,
        hf_distilbert,
        hf_gpt2,
        hf_llama,
        hf_t5,
        hf_vit,
    )
}
"""By name, in the order of the documentation."""
