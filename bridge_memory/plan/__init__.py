"""What to run: layouts that fit, the fastest first."""
