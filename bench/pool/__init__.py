"""Benchmarks of the pool."""
