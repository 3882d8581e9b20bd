"""Named shapes by family: what they need at least, and their inputs for every framework."""
