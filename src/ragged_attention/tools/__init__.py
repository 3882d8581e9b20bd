"""The command line: its commands, their arguments and their output."""
