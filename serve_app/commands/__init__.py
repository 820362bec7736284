"""The commands of `callboard`, a module each: `add_parser(commands)` declares the flags, `run(args)` does the work."""
