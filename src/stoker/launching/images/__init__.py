"""Container images of a job, written without a daemon."""
