"""The commands as Python functions with typed results; ``bridge_memory`` exports them."""
