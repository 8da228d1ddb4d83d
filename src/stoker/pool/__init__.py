"""The pool: other people's machines, lent by the hour, paid from escrow, checked by replay."""
