"""What commands print of DDP, FSDP and ZeRO alone."""
