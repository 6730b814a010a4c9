"""Named shapes have the sizes that were published."""

import subprocess
import sys

import pytest

from shoal.errors import ModelError
from shoal.models import TransformerConfig, preset, preset_names
from shoal.spec.workload import ModelShape, shape, shape_names, transformer_shape, workload_of

EXACT = {
    # Parameters of the weights that were published with each model.
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "bert-base": 110_106_428,  # with the heads of pretraining
    "bert-large": 336_226_108,
    "vit-b": 86_567_656,
    "vit-l": 304_326_632,
    "vit-h": 632_045_800,
}
ROUNDED = {
    # As the papers name them, in millions; 2 % is what their rounding leaves.
    "gpt3-125m": 125,
    "gpt3-350m": 350,
    "gpt3-760m": 760,
    "gpt3-1.3b": 1_300,
    "gpt3-2.7b": 2_700,
    "gpt3-6.7b": 6_700,
    "gpt3-13b": 13_000,
    "gpt3-175b": 175_000,
    "deepseek-v3": 671_000,
    "vit-g": 1_011,
}


@pytest.mark.parametrize("name", EXACT)
def test_a_preset_has_as_many_parameters_as_the_published_weights(name):
    assert workload_of(shape(name)).parameters == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_a_preset_has_the_parameters_that_its_paper_names(name):
    assert workload_of(shape(name)).parameters == pytest.approx(ROUNDED[name] * 1e6, rel=0.02)


def test_every_name_gives_a_workload_of_its_layers():
    for name in shape_names():
        each = shape(name)
        workload = workload_of(each)
        assert (each.name, workload.name, len(workload.layers)) == (name, name, each.layers)
        assert workload.flop > 0


@pytest.mark.parametrize("name", preset_names())
def test_shoals_own_presets_have_the_parameters_and_flop_of_their_configuration(name):
    config = preset(name)
    workload = workload_of(shape(name))
    assert workload.parameters == config.parameter_count()
    assert workload.training_flop == config.flops_per_token(config.seq) * config.seq


def test_defaults_of_a_shape_are_those_of_the_configuration():
    fields = {"vocab_size": 64, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": 16}
    for more in ({}, {"experts": 4}):
        given = transformer_shape(fields | more)
        assert given == transformer_shape(TransformerConfig(**fields, **more).model_dump())


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ModelError, match=r"did you mean 'llama3-8b'\?"):
        shape("lama3-8b")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": 0}, "layers=0"),
        ({"kv_heads": 3}, "3 key-value heads"),
        ({"objective": "next token"}, "did you mean 'next-token'"),
        ({"experts": 2, "experts_per_token": 3}, "3 of 2 experts"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(changes, named):
    with pytest.raises(ModelError, match=named):
        ModelShape(**({"layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 64, "seq": 16} | changes))


def test_shapes_are_named_without_importing_torch():
    program = (
        "import sys; from shoal.spec.workload import shape; shape('tiny'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
