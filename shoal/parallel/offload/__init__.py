"""State outside of the device: segments in files or in the host's memory, and the optimizer over them."""
