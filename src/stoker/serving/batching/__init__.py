"""Requests that come one by one, computed in batches: who is let in, what goes together, and when."""
