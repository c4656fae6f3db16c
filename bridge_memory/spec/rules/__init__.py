"""What groups of a RunSpec, or a group and the model, must agree on."""
