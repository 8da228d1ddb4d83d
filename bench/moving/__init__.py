"""Trainers that people come from, against Stoker: the same training before and after the move."""
