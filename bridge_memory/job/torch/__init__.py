"""torch's engines and DeepSpeed's in the phases of a job, as Trainer, accelerate, torchtitan and torchtune run them."""

#: Engines whose phases are modelled here.
ENGINES = ("single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
