"""A job that ran out of memory: what its text proves, beside its prediction, and what to do first."""
