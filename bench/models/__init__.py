"""Models of other libraries: what Stoker learns with them, against their own loops."""
