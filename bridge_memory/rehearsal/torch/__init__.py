"""DDP, FSDP and ZeRO themselves, run without data."""
