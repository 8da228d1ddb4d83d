"""Readers of files, shared by training, `stoker data check` and `stoker predict`, so that all find the same faults."""
