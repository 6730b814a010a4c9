"""Tables of single operations: what is read, and how far predictions of held-out rows are."""

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import ClusterError, DataError
from shoal.predict.validate import accuracy_of, is_fitted, read_operations, validate
from shoal.predict.validate.operations import ATTENTION_COLUMNS, PRODUCT_COLUMNS
from shoal.spec.cluster import Device

DATA = Path(__file__).resolve().parents[2] / "benchmarks" / "data"
PRODUCTS, ATTENTION = DATA / "products.csv", DATA / "attention.csv"
PRODUCT_HEAD = "device,dtype,m,n,k,time_us,tflops,kernel\n"


def written(tmp_path, text):
    path = tmp_path / "operations.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", [PRODUCTS, ATTENTION])
def test_no_constant_is_fitted_to_the_rows_that_are_kept_for_tests(path):
    assert not any(is_fitted(row) for row in read_operations(path))


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.10), ("fp8", 0.15)])
@pytest.mark.parametrize("device", ["A100-80GB", "H100", "H200", "B200"])
def test_products_of_512_rows_and_more_are_predicted(device, precision, bound):
    if (device, precision) == ("A100-80GB", "fp8"):
        return
    name = f"{Device.preset(device).name} {precision}"
    rows = [each for each in validate(PRODUCTS) if (each.quantity, each.family) == ("product", name)]
    assert len(rows) == 24
    assert accuracy_of(rows).mean < bound


@pytest.mark.parametrize("device", ["A100-80GB", "H100", "H200", "B200"])
def test_attention_is_predicted_within_12_percent(device):
    rows = [each for each in validate(ATTENTION) if each.family == f"{Device.preset(device).name} bf16"]
    assert len(rows) == 24
    assert accuracy_of(rows).mean < 0.12


def test_a_rate_tells_the_time_and_half_precision_is_as_quick_as_bf16(tmp_path):
    text = PRODUCT_HEAD + "A100-80GB,bf16,1024,512,256,2.0,,\nA100-80GB,fp16,1024,512,256,,134.217728,\n"
    first, second = read_operations(written(tmp_path, text))
    assert second.seconds == pytest.approx(first.seconds) == 2e-6
    assert first.predicted(first.device) == second.predicted(second.device)


def test_what_a_program_takes_besides_is_the_same_on_any_device_and_not_the_models(tmp_path):
    row = "H100,fp8,1024,512,256,20,,"
    text = f"{PRODUCT_HEAD}{row}CutlassFP8ScaledMMLinearKernel\n{row}\n"
    cast, plain = read_operations(written(tmp_path, text))
    for device in (cast.device, Device.preset("b200")):
        assert cast.predicted(device) - plain.predicted(device) == pytest.approx(cast.beside)
    assert cast.beside > 0 == plain.beside


def test_single_operations_find_the_clock_that_nothing_lowers(tmp_path):
    (row,) = read_operations(written(tmp_path, PRODUCT_HEAD + "H100,bf16,8192,8192,8192,1500,,\n"))
    slower = replace(row.device, sustained=row.device.sustained / 2)
    assert row.predicted(slower) == row.predicted(row.device)


def test_a_row_without_measurement_or_with_an_unknown_device_is_refused(tmp_path):
    refused = []
    text = PRODUCT_HEAD + "H100,bf16,1,1,1,,,\nabacus,bf16,1,1,1,1,,\nA100,bf16,1,1,1,1,,\n"
    (kept,) = validate(written(tmp_path, text), refused.append)
    assert kept.line == 4
    assert [type(each) for each in refused] == [DataError, ClusterError]
    assert all(f"line {line}" in str(each) for line, each in zip((2, 3), refused, strict=True))


def test_the_guide_describes_every_column():
    guide = (DATA.parents[1] / "docs" / "guides" / "validate.md").read_text()
    assert [name for name in (*PRODUCT_COLUMNS, *ATTENTION_COLUMNS) if f"`{name}`" not in guide] == []
