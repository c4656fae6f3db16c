"""Modality encoders of transformers: what their modules save and allocate, beside Megatron's language model."""
