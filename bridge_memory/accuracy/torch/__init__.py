"""Measured runs and speeds of DDP, FSDP and ZeRO."""
