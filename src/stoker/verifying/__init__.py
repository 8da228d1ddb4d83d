"""The exactness contract of one job: separable, exact on resume, equal under every legal plan."""
