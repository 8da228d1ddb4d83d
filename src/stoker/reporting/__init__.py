"""What a run is told by: its events folded into a summary for the terminal and a page for the browser."""
