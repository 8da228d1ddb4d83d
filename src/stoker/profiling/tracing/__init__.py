"""Tracing one update on fake tensors of a device that need not be here."""
