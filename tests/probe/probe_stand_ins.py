"""The clock of a simulated device and its host."""

LAUNCH = 1e-6  # from one kernel's end to the next one's start


class Simulated:
    """A host that takes `host` seconds to start a kernel, and a device that runs kernels in order."""

    def __init__(self, host):
        self.host = host
        self.time = self.free = 0.0

    def now(self):
        return self.time

    def hold(self, seconds):
        self.start(seconds, gap=0.0)

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
