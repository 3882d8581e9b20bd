"""All that a machine with a GPU is good for, in one command."""
