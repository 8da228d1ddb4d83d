"""Tables and text: rows from files, profiles of columns, and what is told by both."""
