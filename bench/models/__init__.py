"""Models of other libraries: what Stoker learns with them, beside their own loops."""
