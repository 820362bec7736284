"""Heads that draft tokens within their target's step."""
