"""The year of a row's program, and the attention that follows."""

from dataclasses import replace

import pytest

from shoal.predict.validate.cells import FLASH1, attention_of, with_attention, year_of
from shoal.spec.cluster import Device


@pytest.mark.parametrize(
    ("source", "note", "year"),
    [
        ("arXiv:2104.04473 table 1", "", 2021),
        ("dgxc-benchmarking v25.02.02", "", 2025),
        ("torchtitan benchmarks, December 2024", "", 2024),
        ("https://docs.nvidia.com/nemo-framework/user-guide/24.12/performance", "", 2024),
        ("llm-foundry benchmarking tables", "", 2023),
        ("a blog", "measured in 2026", 2026),
        ("https://example.org/blob/20241234deadbeef/README.md", "", None),
        ("a blog", "", None),
    ],
)
def test_words_tell_the_year(source, note, year):
    row = {"year": None, "source": source, "note": note}
    assert year_of(row) == year
    assert year_of({**row, "year": 2019}) == 2019


def test_programs_have_the_attention_of_their_time():
    assert attention_of(2022, is_torch=False) == "flash1"
    assert (attention_of(2024, is_torch=True), attention_of(2024, is_torch=False)) == ("flash2", "newest")
    assert attention_of(2026, is_torch=True) == attention_of(None, is_torch=True) == "newest"


def test_older_attention_has_less_of_the_rate():
    device = replace(Device.preset("h100"), flash2_share=0.5)
    shares = [with_attention(device, each).attention_share for each in ("newest", "flash2", "flash1")]
    assert shares == pytest.approx([device.attention_share * each for each in (1.0, 0.5, 0.5 * FLASH1)])
