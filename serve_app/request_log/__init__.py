"""One line for each request: what it holds, how a front writes it, and how `callboard serve` shows it."""
