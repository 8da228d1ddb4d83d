"""Several processes: what they survive, and what they cost."""
