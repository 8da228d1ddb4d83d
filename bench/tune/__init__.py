"""What `stoker tune` finds, and for how much training."""
