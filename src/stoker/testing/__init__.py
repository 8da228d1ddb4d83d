"""Public fakes: a clock, a device, a disk that fails, and power that is cut at any operation on the disk."""

from stoker.testing.disk_faults import FaultyDisk, Loses, PowerCut, PowerCutAt, operations_of
from stoker.testing.fakes import FakeClock, fake_device

__all__ = ["FakeClock", "FaultyDisk", "Loses", "PowerCut", "PowerCutAt", "fake_device", "operations_of"]
