"""The machine that a row of a table names, as far as it is named.

Published programs compute in fp8 with degrees that a Plan in fp8 refuses. So these rows have Plans in bf16,
and their device has the rates of products in fp8: these run at that type's peak, and a tile takes as many
seconds to begin and end as in 16 bit. Attention and passes over memory take as long as in bf16.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.cluster import Cluster, Device
from shoal.errors import ClusterError
from shoal.validate.ages import with_attention
from shoal.validate.steps import Measured


def machine_of(row: Measured, measured: Cluster | None = None) -> Cluster:
    """Return the Cluster that a row was measured on.

    Args:
        row: A row of a table.
        measured: The machines of all rows, in place of those that the row names.

    Raises:
        ClusterError: Its device is unknown, does not compute in the row's type, or its nodes are not whole.
    """
    if measured is not None:
        return measured.with_devices(row.plans[0].ranks)
    cluster = published_cluster(row.line, row.device, row.plans[0].ranks, row.devices_per_node, row.network)
    if row.products not in cluster.device.peak:
        raise ClusterError(
            f"line {row.line}: {cluster.device.name} has no known FLOP rate in {row.products}",
            possible=", ".join(cluster.device.peak),
            change="correct the device or the precision",
        )
    device = with_attention(cluster.device, row.attention)
    return cluster.replace(device=_in_fp8(device) if row.products == "fp8" else device)


def _in_fp8(device: Device) -> Device:
    """Return the device with the rates of products in fp8 in place of those in bf16."""
    faster = device.peak["fp8"] / device.peak["bf16"]
    return replace(
        device,
        peak={**device.peak, "bf16": device.peak["fp8"]},
        product_share=device.fp8_share or device.product_share,
        tile_bandwidth=2 * device.fp8_tile_bandwidth,
        product_depth=device.product_depth * faster,
        attention_share=device.attention_share / faster,
        attention_backward_share=device.attention_backward_share / faster,
    )


def published_cluster(
    line: int, device: str, devices: int, devices_per_node: int | None, network: float | None
) -> Cluster:
    """Return a Cluster as `Cluster.assemble` does, with errors that name a line of a table."""
    try:
        return Cluster.assemble(device, devices, devices_per_node, network)
    except ClusterError as error:
        raise ClusterError(
            f"line {line}: {error.given}", possible=error.possible, change=error.change
        ) from None
