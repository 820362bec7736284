"""The request log: one line for each request, from the front to the terminal and the file of `callboard serve`."""
