"""Public fakes: a clock, a device, a failing disk, and a power cut at any disk operation."""

from stoker.testing.fakes import FakeClock, FaultyDisk, Loses, PowerCut, PowerCutAt, fake_device, operations_of

__all__ = ["FakeClock", "FaultyDisk", "Loses", "PowerCut", "PowerCutAt", "fake_device", "operations_of"]
