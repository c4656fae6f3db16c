"""The machinery of traces: operations on a tape, what is alive when, symbolic sizes, chains of blocks."""
