"""Measures OpenAI-compatible servers: the client, the load, and the figures. `benchmarks.serving` uses the same."""
