"""Benchmarks of the pool, and agents that cheat."""
