"""What a service tells of itself: metrics, statistics, and a line for every request."""
