"""The machines: what is known of devices. Imports no torch."""

from shoal.cluster.devices import peak_flops

__all__ = ["peak_flops"]
