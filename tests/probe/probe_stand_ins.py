"""The clock of a simulated device and its host."""

LAUNCH = 1e-6  # from one kernel's end to the next one's start


class Simulated:
    """A host that takes `host` seconds to start a kernel, and a device that runs kernels in order.

    A hold lasts `exactness` times as long as was asked for.
    """

    def __init__(self, host, exactness=1.0):
        self.host = host
        self.exactness = exactness
        self.time = self.free = 0.0

    def now(self):
        return self.time

    def hold(self, seconds):
        self.start(self.exactness * seconds, gap=0.0)

    def start(self, seconds, gap=LAUNCH):
        self.time += self.host
        self.free = max(self.time, self.free + gap) + seconds

    def mark(self):
        self.time += self.host / 4
        self.free = max(self.time, self.free)
        return self.free

    def between(self, first, second):
        return second - first

    def finish(self):
        self.time = max(self.time, self.free)


class LazyCuda:
    """The part of `torch.cuda` that holds a device, whose kernel the host loads when it is first started.

    Args:
        loading: Seconds to load the kernel.
        rates: Cycles in a second at the first hold, the second one, and so on; the last rate stays.
    """

    def __init__(self, loading, rates):
        self.simulated = Simulated(5e-6)
        self.loading = loading
        self.rates = list(rates)
        self.holds = []

    def _sleep(self, cycles):
        self.simulated.time += self.loading
        self.loading = 0.0
        rate = self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]
        self.holds.append(cycles / rate)
        self.simulated.hold(cycles / rate)

    def Event(self, enable_timing):  # noqa: N802
        return _Event(self.simulated)

    def synchronize(self, device):
        self.simulated.finish()


class _Event:
    def __init__(self, simulated):
        self.simulated = simulated

    def record(self):
        self.at = self.simulated.mark()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)
