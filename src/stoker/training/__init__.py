"""Doing it: the loop, evaluation, checkpoints, recovery, events."""
