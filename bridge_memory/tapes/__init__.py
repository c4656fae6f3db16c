"""The machinery of traces: operations on a tape, what is alive when, symbolic sizes, blocks put in a chain."""
