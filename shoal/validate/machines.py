"""The machine that a row of a table names, as far as it is named.

A Plan's precision is that of weights and of communication. Products may compute in another type: in tf32 with
weights in fp32, in fp8 with weights in bf16. They then run at that type's peak, and a tile takes as many
seconds to begin and end as in 16 bit. Attention and passes over memory take as long as in the Plan's
precision.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.cluster import Cluster, Device
from shoal.errors import ClusterError
from shoal.validate.steps import Measured

__all__ = ["machine_of", "published_cluster"]

_FP8_REACHED = 0.94
"""The share of their peak that products in fp8 reach, relative to the share in bf16: the median of H100,
H200, GH200, B200, B300 and GB200 (stas00/ml-engineering, compute/accelerator).
"""


def machine_of(row: Measured) -> Cluster:
    """Return the Cluster that a row was measured on.

    Raises:
        ClusterError: Its device is unknown, does not compute in the row's type, or its nodes are not whole.
    """
    cluster = published_cluster(row.line, row.device, row.plans[0].ranks, row.devices_per_node, row.network)
    return cluster.replace(device=_computing(cluster.device, row.products, row.line))


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


def _computing(device: Device, products: str, line: int) -> Device:
    """Return the device with the rates of this type of products in place of the Plan's precision."""
    if products not in device.peak:
        raise ClusterError(
            f"line {line}: {device.name} has no known FLOP rate in {products}",
            possible=", ".join(device.peak),
            change="correct the device or the precision",
        )
    if products == "tf32":
        return replace(device, peak={**device.peak, "fp32": device.peak["tf32"]})
    if products != "fp8":
        return device
    faster = device.peak["fp8"] / device.peak["bf16"]
    return replace(
        device,
        peak={**device.peak, "bf16": device.peak["fp8"]},
        product_share=device.product_share * _FP8_REACHED,
        product_depth=device.product_depth * faster,
        attention_share=device.attention_share / faster,
        attention_backward_share=device.attention_backward_share / faster,
    )
