"""Tables of measured steps become Plans and shapes, or named errors."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import DataError
from shoal.predict.validate.cells import ATTENTIONS, PRECISIONS, RECOMPUTES, SHARDING_NAMES, spelled
from shoal.predict.validate.steps import COLUMNS, read_table
from shoal.spec.plan import SettledPlan

ROW = {
    "family": "papers",
    "model": "22B",
    "layers": "48",
    "hidden": "6144",
    "ffn": "24576",
    "heads": "64",
    "kv_heads": "64",
    "vocab": "51200",
    "seq": "2048",
    "gated_mlp": "0",
    "device": "A100-80GB",
    "devices_per_node": "8",
    "network_gbps_per_node": "1600",
    "num_devices": "16",
    "tp": "8",
    "pp": "2",
    "dp": "1",
    "cp": "1",
    "virtual_stages": "1",
    "microbatch": "4",
    "global_batch": "16",
    "sharding": "none",
    "recompute": "full",
    "sequence_parallel": "0",
    "precision": "fp16",
    "attention": "unfused",
    "step_s": "1.42",
    "memory_gib": "",
}


def write(path, *rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue())
    return path


@pytest.fixture
def read(tmp_path):
    """Reads a table of the row above, with changes."""
    return lambda **changes: read_table(write(tmp_path / "table.csv", {**ROW, **changes}))


def test_a_row_says_one_plan_one_shape_and_what_was_measured(read):
    (row,) = read()
    assert row.plans == [
        SettledPlan(
            tp=8,
            pp=2,
            tensor="plain",
            virtual=1,
            split="count",
            microbatch=4,
            recompute="full",
            precision="bf16",
        )
    ]
    assert (row.line, row.family, row.device, row.batch, row.seconds) == (2, "papers", "A100-80GB", 16, 1.42)
    assert row.network == 200e9
    assert row.memory is None
    assert (row.shape.layers, row.shape.ffn, row.shape.keys) == (48, 24576, 64)
    assert not row.shape.fused_attention
    assert row.shape.dropout


def test_memory_is_read_as_bytes(read):
    assert read(memory_gib="40.5")[0].memory == 40.5 * 2**30


def test_a_table_that_a_spreadsheet_wrote_reads_as_well(tmp_path):
    path = write(tmp_path / "table.csv", {**ROW, "model": "GPT, the 22B\none"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_table(path)[0].batch == 16


def test_blank_settings_take_every_legal_value(read):
    plans = read(microbatch="", virtual_stages="")[0].plans
    assert {plan.microbatch for plan in plans} == {1, 2, 4, 8, 16}
    # micro-batches of 16 make one of a batch of 16, which is too few for two stages that interleave
    assert {plan.virtual for plan in plans if plan.microbatch == 16} == {1}
    assert {plan.virtual for plan in plans if plan.microbatch == 8} == {1, 2, 3, 4, 6, 8, 12, 24}
    assert {plan.schedule for plan in plans} == {"1f1b", "interleaved"}


def test_blank_degrees_take_every_layout_of_the_devices(read):
    plans = read(tp="", pp="", dp="", cp="", virtual_stages="1", microbatch="1")[0].plans
    assert {(plan.dp, plan.tp, plan.pp) for plan in plans} == {
        (16 // tp // pp, tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8, 16) if tp * pp <= 16
    }


def test_one_blank_degree_is_what_the_others_leave(read):
    assert {plan.dp for plan in read(dp="")[0].plans} == {1}
    assert {plan.pp for plan in read(pp="")[0].plans} == {2}


def test_blank_choices_that_may_win_are_all_tried(read):
    (row,) = read(recompute="", sharding="", sequence_parallel="", dp="2", num_devices="32")
    assert tuple(row.recomputes) == ("none", "selective", "full")
    assert {plan.recompute for plan in row.plans} == {"none"}
    assert {plan.shard for plan in row.plans} == {"none", "zero1", "zero3"}
    assert {plan.tensor for plan in row.plans} == {"async"}  # never slower than without overlap


def test_a_single_replica_has_nothing_to_shard(read):
    assert {plan.shard for plan in read(sharding="")[0].plans} == {"none"}


def test_samples_are_split_along_the_sequence_only_if_nothing_else_suits_the_devices(read):
    blanks = {"tp": "", "pp": "1", "dp": "", "cp": "", "virtual_stages": "1", "microbatch": "1"}
    assert {plan.cp for plan in read(**blanks)[0].plans} == {1}
    assert {plan.cp for plan in read(**blanks, global_batch="1", devices_per_node="8")[0].plans} == {2}


def test_blank_precision_and_attention_are_16_bit_and_fused(read):
    (row,) = read(precision="", attention="")
    assert {plan.precision for plan in row.plans} == {"bf16"}
    assert row.shape.fused_attention
    assert read(precision="fp32")[0].plans[0].precision == "fp32"


def test_columns_of_experts_describe_the_layers_and_their_degree(read):
    experts = {"experts": "8", "experts_per_token": "3", "expert_ffn": "512", "shared_experts": "1"}
    row = {"tp": "1", "pp": "2", "dp": "8", "ep": "4", "sharding": "zero1", "microbatch": "1"}
    (found,) = read(**row, **experts, dense_layers="0", head_dim="64", recompute="none")
    shape, plan = found.shape, found.plans[0]
    assert (shape.experts, shape.experts_per_token, shape.expert_ffn) == (8, 3, 512)
    assert (shape.shared_experts, shape.dense_layers, shape.head_dim, plan.ep) == (1, 0, 64, 4)
    (dense,) = read(**row | {"ep": ""})
    assert (dense.shape.experts, dense.plans[0].ep) == (0, 1)
    assert read(model="deepseek-v3")[0].shape.latent is not None


def test_notes_of_torchtitan_tell_what_is_compiled_and_whether_products_hide_communication(read):
    titan = {"source": "torchtitan benchmarks", "tp": "8", "pp": "1", "dp": "", "sequence_parallel": "1"}

    def program(note):
        (row, *_) = read(**titan, note=note)
        return row.program.compiled, row.program.is_shoal, row.plans[0].tensor

    assert program("FSDP") == ("none", False, "async")
    assert program("FSDP+compile") == ("layers", False, "async")
    assert program("compile vanillaTP bf16") == ("layers", False, "sequence")
    assert read(**{**titan, "source": "Megatron-LM"})[0].program is None


def test_the_guide_describes_every_column():
    guide = (Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "validate.md").read_text()
    assert [name for name in COLUMNS if f"`{name}`" not in guide] == []


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["1", "2", ""]),
)
def test_every_plan_has_the_rows_devices_and_divides_its_batch(tmp_path_factory, tp, pp, dp, microbatch):
    row = {
        **ROW,
        "num_devices": tp * pp * dp,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "microbatch": microbatch,
        "global_batch": 16 * dp,
    }
    (found,) = read_table(write(tmp_path_factory.mktemp("tables") / "table.csv", row))
    for plan in found.plans:
        assert plan.ranks == tp * pp * dp
        assert plan == SettledPlan.of(plan, found.batch)


def test_settings_do_not_tell_what_was_measured_or_what_the_row_is_called(read):
    (row,) = read()
    (other,) = read(step_s="9", memory_gib="3", family="others", model="x", network_gbps_per_node="1600.0")
    assert row.settings == other.settings
    assert read(microbatch="2")[0].settings != row.settings


@pytest.mark.parametrize("blank", ["", " ", "-", "?", "n/a", "NA", "nan", "null"])
def test_what_was_not_filled_in_may_say_so(read, blank):
    (row,) = read(memory_gib=blank, network_gbps_per_node=blank, virtual_stages=blank)
    assert (row.memory, row.network) == (None, None)
    assert len(row.plans) > 1


def test_numbers_and_words_may_be_written_as_spreadsheets_do(read):
    as_written = {"layers": "48.0", "dp": "1.0", "gated_mlp": "0.0", "sequence_parallel": "False"}
    (row,) = read(**as_written, sharding="None", recompute="Full", precision="BFloat16", attention="Unfused")
    (plain,) = read(precision="bf16")
    assert (row.plans, row.shape) == (plain.plans, plain.shape)


@pytest.mark.parametrize(
    ("column", "ours", "theirs"),
    [
        ("sharding", "none", ["DDP", "no", "0", "NO_SHARD"]),
        ("sharding", "zero1", ["ZeRO-1", "zero_1", "Stage 1", "1", "distributed optimizer"]),
        ("sharding", "zero2", ["ZeRO 2", "SHARD_GRAD_OP"]),
        ("sharding", "zero3", ["ZeRO-3", "FSDP", "fsdp2", "FULL_SHARD", "stage3"]),
        ("recompute", "none", ["no", "False", "0", "off"]),
        ("recompute", "selective", ["SAC", "selective AC", "core_attn"]),
        ("recompute", "per-op SAC", ["Per-Op SAC", "op SAC"]),
        ("recompute", "full", ["yes", "Full AC", "activation checkpointing", "True", "uniform"]),
        ("attention", "flash", ["flash2", "FlashAttention-2", "FA3", "SDPA", "xformers", "cuDNN"]),
        ("attention", "unfused", ["standard", "eager", "math"]),
        ("precision", "bf16", ["BF16", "amp", "mixed", "bf16-mixed"]),
        ("precision", "fp16", ["half", "FP16"]),
        ("precision", "fp32", ["single", "float"]),
        ("precision", "fp8", ["FP8", "float8", "fp8/bf16"]),
        ("sequence_parallel", "1", ["yes", "True", "on"]),
        ("gated_mlp", "0", ["no", "False"]),
        ("virtual_stages", "1", ["0", "none"]),
        ("cp", "1", ["0"]),
    ],
)
def test_settings_may_be_called_what_others_call_them(read, column, ours, theirs):
    (row,) = read(**{column: ours})
    for spelling in theirs:
        assert read(**{column: spelling}) == [row]


def test_no_two_words_have_a_spelling_in_common():
    for words in (SHARDING_NAMES, RECOMPUTES, ATTENTIONS, PRECISIONS):
        reader = spelled(words)
        for word, others in words.items():
            assert [each for each in (word, *others) if reader(each) != word] == []


def test_hybrid_sharding_shares_states_out_within_each_node(read):
    hybrid = {"sharding": "HSDP", "tp": "2", "pp": "1", "devices_per_node": "8", "microbatch": "1"}
    (plan,) = read(**hybrid, num_devices="32", dp="16")[0].plans
    assert (plan.shard, plan.shards, plan.replicate) == ("zero3", 4, 4)
    (single,) = read(**hybrid, num_devices="8", dp="4")[0].plans
    assert (single.shard, single.replicate) == ("zero3", 1)


def test_products_compute_in_what_the_row_says_and_plans_of_fp8_in_bf16(read):
    def told(precision):
        (row,) = read(precision=precision)
        return row.products, row.plans[0].precision

    assert [told(each) for each in ("", "fp16", "bf16")] == [("bf16", "bf16")] * 3
    assert told("fp8") == ("fp8", "bf16")
    assert [told(each) for each in ("tf32", "fp32")] == [("tf32", "tf32"), ("fp32", "fp32")]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {"gated": False, "ffn": 24576, "heads": 48, "vocab": 51200}),
        ({"gated_mlp": "1"}, {"gated": True, "ffn": 16384, "heads": 48, "vocab": 32000}),
        ({"ffn": "24576"}, {"gated": False, "vocab": 51200}),
        ({"ffn": "16384"}, {"gated": True, "vocab": 32000}),  # 8/3 of 6144
        ({"kv_heads": "8"}, {"gated": True, "heads": 48, "keys": 8}),
        ({"hidden": "1024"}, {"heads": 16, "ffn": 4096}),
    ],
    ids=str,
)
def test_what_is_not_said_of_a_model_is_as_in_most_of_its_kind(read, said, expected):
    blank = dict.fromkeys(("ffn", "heads", "kv_heads", "vocab", "gated_mlp"), "")
    shape = read(**{**blank, **said})[0].shape
    assert {name: getattr(shape, name) for name in expected} == expected
    assert shape.rotary == shape.gated != shape.biases


def test_a_row_may_have_memory_alone_but_not_neither(read):
    (row,) = read(step_s="", memory_gib="30")
    assert (row.seconds, row.memory) == (None, 30 * 2**30)
    with pytest.raises(DataError, match="step_s=''"):
        read(step_s="", memory_gib="")


def test_a_single_node_may_have_no_network_and_several_may_not(read):
    single = {"num_devices": "8", "pp": "1", "network_gbps_per_node": "0"}
    assert read(**single)[0].network is None
    assert read(**single, devices_per_node="")[0].devices_per_node is None
    with pytest.raises(DataError, match=r"line 2 .* a network of 0"):
        read(network_gbps_per_node="0")


def test_further_columns_cells_and_blank_lines_are_no_matter(tmp_path):
    path = write(tmp_path / "table.csv", {**ROW, "colour": "red"})
    path.write_text(path.read_text().rstrip("\n") + ",more,and more\n\n\n")
    assert len(read_table(path)) == 1


def test_the_rows_after_one_that_cannot_be_used_are_read(tmp_path):
    rows = [ROW, {**ROW, "layers": "95%"}, {**ROW, "dp": "3"}, {**ROW, "global_batch": "32"}]
    path = write(tmp_path / "table.csv", *rows)
    refused = []
    found = read_table(path, refused.append)
    assert [row.line for row in found] == [2, 5]
    assert [f"line {n} of" in error.given for n, error in zip((3, 4), refused, strict=True)] == [True, True]
    assert "layers='95%'" in refused[0].given
    with pytest.raises(DataError, match="line 3 of"):
        read_table(path)


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(",".join([*ROW, "tp"]) + "\n" + ",".join([*ROW.values(), "1"]) + "\n")
    with pytest.raises(DataError, match="the column 'tp' 2 times"):
        read_table(path)


@pytest.mark.parametrize("column", ["layers", "step_s", "device", "family"])
def test_a_missing_column_is_named(tmp_path, column):
    row = {name: cell for name, cell in ROW.items() if name != column}
    with pytest.raises(DataError, match=f"no column '{column}'") as caught:
        read_table(write(tmp_path / "table.csv", row))
    assert column in caught.value.change


def test_a_column_with_a_slip_in_its_name_is_found(tmp_path):
    row = {("hiden" if name == "hidden" else name): cell for name, cell in ROW.items()}
    with pytest.raises(DataError, match="did you mean 'hiden'"):
        read_table(write(tmp_path / "table.csv", row))


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("layers", "many"),
        ("layers", ""),
        ("layers", "0"),
        ("hidden", "-1"),
        ("heads", "1.5"),
        ("hidden", "1,024"),
        ("gated_mlp", "2.0"),
        ("step_s", "0"),
        ("step_s", "nan"),
        ("step_s", "inf"),
        ("step_s", "fast"),
        ("memory_gib", "-3"),
        ("sharding", "zero4"),
        ("recompute", "some"),
        ("precision", "int4"),
        ("attention", "fast"),
        ("sequence_parallel", "2"),
        ("device", ""),
    ],
)
def test_a_cell_that_cannot_be_is_named_with_its_line(read, column, cell):
    with pytest.raises(DataError, match=f"line 2 of .* has {column}={cell!r}"):
        read(**{column: cell})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_devices": "17"},
        {"dp": "3", "num_devices": "48"},  # a batch of 16
        {"microbatch": "5"},
        {"kv_heads": "63"},
        {"virtual_stages": "48"},
    ],
    ids=str,
)
def test_a_layout_that_no_plan_describes_is_refused_with_its_line(read, changes):
    with pytest.raises(DataError, match="line 2 of "):
        read(**changes)


@pytest.mark.parametrize("content", [None, b"", b"family,model\n", b"\xff\xfe\x00"])
def test_files_that_are_no_tables_are_refused(tmp_path, content):
    path = tmp_path / "table.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"table\.csv"):
        read_table(path)
