"""Our operations under the names and conventions of other projects."""
