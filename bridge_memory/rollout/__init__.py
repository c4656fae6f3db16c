"""Reinforcement learning on shared GPUs: the inference engine, and the phases of a step."""
