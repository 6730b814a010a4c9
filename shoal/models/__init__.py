"""Plain single-device models, and how a name becomes one. Nothing here knows of ranks.

`TransformerConfig` is a shape, `preset` names the known ones, `Transformer` is the module. `build` turns
the `model` of a configuration (a preset, a factory, a Hugging Face folder) into a module; the trainer
calls it, then trains on `next_token_loss`. A `Classifier` says which classes a folder's model has. A `Task`
is a module with inputs and a loss of its own. `generate` samples from what was trained. `trace` makes a
Workload of any module, for the planner.
"""

from shoal.models.attention import Documents
from shoal.models.config import TransformerConfig, preset, preset_names
from shoal.models.dropout import Dropout, token_keys
from shoal.models.experts import Mixture, auxiliary_loss, mixtures_of, set_auxiliary_scale
from shoal.models.hugging_face import (
    Classifier,
    StoredTensor,
    can_read_in_parts,
    classifier_of,
    is_classifier,
    new_parameters,
    stored_for,
)
from shoal.models.llama_names import llama_config, llama_name, stored_as_llama
from shoal.models.loading import build, build_or_task, find_factory
from shoal.models.lora import (
    ALL_LINEAR,
    add_adapters,
    base_layer,
    is_adapter,
    is_transposed,
    plain_name,
)
from shoal.models.loss import logits_of, next_token_loss
from shoal.models.precision import SingleDevice, cast_module
from shoal.models.sampling import generate
from shoal.models.task import Task, batch_normalizations, map_tensors, rows, sample_count, tensors_in
from shoal.models.transformer import Block, Transformer

__all__ = [
    "ALL_LINEAR",
    "Block",
    "Classifier",
    "Documents",
    "Dropout",
    "Mixture",
    "SingleDevice",
    "StoredTensor",
    "Task",
    "Transformer",
    "TransformerConfig",
    "add_adapters",
    "auxiliary_loss",
    "base_layer",
    "batch_normalizations",
    "build",
    "build_or_task",
    "can_read_in_parts",
    "cast_module",
    "classifier_of",
    "find_factory",
    "generate",
    "is_adapter",
    "is_classifier",
    "is_transposed",
    "llama_config",
    "llama_name",
    "logits_of",
    "map_tensors",
    "mixtures_of",
    "new_parameters",
    "next_token_loss",
    "plain_name",
    "preset",
    "preset_names",
    "rows",
    "sample_count",
    "set_auxiliary_scale",
    "stored_as_llama",
    "stored_for",
    "tensors_in",
    "token_keys",
]
