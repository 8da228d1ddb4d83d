"""Trainers that people come from, beside Stoker: the same training before and after the move."""
