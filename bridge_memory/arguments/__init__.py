"""Flags of the command line that describe a run, and the RunSpec that they make."""
