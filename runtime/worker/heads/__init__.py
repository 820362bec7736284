"""Heads that draft tokens within a runner's steps."""
