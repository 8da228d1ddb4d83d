"""Is this job separable, exact on resume, equal under its plan? The exactness contract, examined for one job."""
