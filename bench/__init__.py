"""Benchmarks and slow proofs, run by hand; their last results are in `results/`."""
