"""The models of a directory: discovered, checked, loaded, replaced by newer versions, and drained."""
