"""`callboard chat` and `callboard generate`: what a terminal shows."""
