"""torch's engines and DeepSpeed's in the phases of a job, as Trainer, accelerate, torchtitan and torchtune run them."""
