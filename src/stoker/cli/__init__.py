"""The command line: it starts flows and renders records."""
