"""The command line: one file per command; each parses, calls and prints. Nothing heavy loads before a command runs."""
