"""Profiles of one step: its trace, trials on the device, and the device's measured ceilings."""
