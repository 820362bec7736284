"""Tests in folders that mirror the packages or name what a test needs."""

import os

# Test processes side by side have more threads than there are cores. A thread that waits for the others of a product
# must not spin then, because spinning would take ten times the product's time. OpenMP reads this when torch is
# imported; children inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
