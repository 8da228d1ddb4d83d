"""Benchmarks of `stoker compress`."""
