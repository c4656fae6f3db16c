"""What to run: layouts that fit, the fastest first; what changing an option frees; how to split the layers."""
