"""Named shapes of each family of operations, with their floors and their inputs for every framework."""
