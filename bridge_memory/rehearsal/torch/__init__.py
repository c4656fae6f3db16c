"""Run torch's DDP and FSDP and DeepSpeed's ZeRO themselves, without data."""
