"""Events of runs as text for the terminal, and reports as pages for the browser."""
