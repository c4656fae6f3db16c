"""Step time under DDP, FSDP and ZeRO."""
