"""Coverage-guided fuzzing of what comes from outside."""
