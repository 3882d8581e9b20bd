"""Drop-in names and conventions of other projects, over the same operations."""
