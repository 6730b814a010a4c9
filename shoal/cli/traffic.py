"""What a rank exchanges in a step: as an object for JSON, and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.cli.table import table_of
from shoal.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shoal.simulate import Traffic


def traffic_summary(traffic: Traffic, exposed: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the exchanges of a rank as objects for JSON.

    Args:
        traffic: Traffic of the rank.
        exposed: Exposed seconds of a step by purpose. All exchanges for a purpose have the same share of its
            seconds; for purposes that are not in it, they are not known.
    """
    totals = {purpose: traffic.seconds(purpose) for purpose in exposed}
    shares = {name: min(1.0, exposed[name] / total) for name, total in totals.items() if total > 0}
    return [
        {
            "exchange": each.name,
            "purpose": each.purpose,
            "bytes": each.bytes,
            "ranks": each.ranks,
            "level": each.level,
            "algorithm": each.algorithm,
            "seconds": each.seconds,
            "times": each.times,
            "exposed_share": shares.get(each.purpose),
        }
        for each in traffic.exchanges
    ]


def traffic_text(exchanges: Sequence[Mapping[str, Any]]) -> str:
    """Return the result of `traffic_summary` as a table."""
    return table_of(
        ["exchanged in a step", "for", "bytes", "ranks", "over", "algorithm", "each", "times", "exposed"],
        [
            [
                each["exchange"],
                each["purpose"],
                format_bytes(round(each["bytes"])),
                str(each["ranks"]),
                each["level"],
                each["algorithm"],
                format_seconds(each["seconds"]),
                f"{each['times']:,}",
                "-" if each["exposed_share"] is None else f"{each['exposed_share']:.0%}",
            ]
            for each in exchanges
        ],
    )
