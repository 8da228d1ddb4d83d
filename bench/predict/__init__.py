"""Offline batches: what survives being killed, and how fast they are."""
