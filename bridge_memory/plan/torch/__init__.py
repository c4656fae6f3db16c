"""Configurations of DDP, FSDP and ZeRO."""
