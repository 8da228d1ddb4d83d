"""Data with pixels: what is kept of each sample, and what is told by comparing that."""
