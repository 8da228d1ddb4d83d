"""Models of a directory, kept loaded: found, checked, swapped for newer versions, and drained."""
