"""Making an exported model smaller and faster, with proof of accuracy and speed."""
