"""The year of a program, and the attention that programs had then.

A program's age counts once: by its fused attention, which became two to four times as quick in four years.
The column `year` says it; where that is blank, the words of `source` and `note` may, by an arXiv number, a
version or date, or the name of a program. A row of which nothing is known is taken for a present one.

- until 2023: Triton's kernels and FlashAttention's first version, at `FLASH1` of FlashAttention 2
  (arXiv:2307.08691, figures 4 to 6: 1.7 to 3.0 times as quick);
- until 2024, torch's programs: FlashAttention 2, at the device's `flash2_share`
  (arXiv:2407.08608, figure 5: 370 and 648 TFLOP/s on H100). Others called cuDNN, about as quick as any;
- since: torch calls cuDNN too (pytorch/pytorch issue 141133; measured with torch 2.11).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from shoal.cluster import Device
from shoal.validate.cells import Row

FLASH1 = 0.66
"""Share of the rate of FlashAttention 2 that attention reached before it."""

_LAST_FLASH1, _LAST_FLASH2 = 2023, 2025

_DATES = (
    r"arXiv:(?P<short>\d\d)\d\d\.",
    r"\b(?P<year>20[12]\d)\b",
    r"\bv?(?P<short>2[1-9])\.(?:0\d|1[0-2])\b",
)
"""An arXiv number, a year, and a version that is a year and a month."""

_PROGRAMS: Mapping[str, int] = {
    "MegatronLMV1": 2019,
    "megatron-turing": 2021,
    "bigscience": 2022,
    "llm-foundry": 2023,
    "vTrain": 2023,
    "TinyLlama": 2023,
    "fms-fsdp": 2024,
    "torchtitan": 2024,
    "FlagPerf": 2024,
    "Megatron-Core 0.8": 2024,
}
"""Years of programs, or of the tables that they published."""


def year_of(row: Row) -> int | None:
    """Return the year of the program of a row; None if nothing tells it."""
    if row["year"]:
        return int(row["year"])
    said = f"{row['source'] or ''} {row['note'] or ''}"
    for pattern in _DATES:
        found = re.search(pattern, said, re.IGNORECASE)
        if found is not None:
            named = found.groupdict()
            return int(named["year"]) if named.get("year") else 2000 + int(named["short"])
    return next((year for name, year in _PROGRAMS.items() if name.lower() in said.lower()), None)


def attention_of(year: int | None, *, is_torch: bool) -> str:
    """Return the fused attention of a program: "flash1", "flash2" or "newest".

    Args:
        year: Year of the program; None if it is not known.
        is_torch: Whether it calls torch's attention, or else a library's.
    """
    if year is None:
        return "newest"
    if year <= _LAST_FLASH1:
        return "flash1"
    return "flash2" if is_torch and year < _LAST_FLASH2 else "newest"


def with_attention(device: Device, attention: str) -> Device:
    """Return the device with the rates of an attention, a result of `attention_of`."""
    if attention == "newest":
        return device
    older = device.with_flash2
    if attention == "flash2":
        return older
    return replace(
        older,
        attention_share=older.attention_share * FLASH1,
        attention_backward_share=older.attention_backward_share * FLASH1,
    )
