"""An inference engine on a training GPU: its weights, KV cache, graphs and activations, awake and asleep.

    >>> from bridge_memory import find_gpu, resolve_model
    >>> from bridge_memory.rollout.inference import InferenceSpec, inference_memory
    >>> spec = InferenceSpec(model=resolve_model("Qwen/Qwen3-8B"), gpu_memory_utilization=0.6)
    >>> inference_memory(spec, find_gpu("H100")).kv_bytes_per_token
    147456
"""

from bridge_memory.rollout.inference.memory import (
    TAGS,
    Asleep,
    Held,
    InferenceMemory,
    KvCapacity,
    inference_memory,
    kv_capacity,
)
from bridge_memory.rollout.inference.rules import DEFAULT_RELEASES, FRAMEWORKS
from bridge_memory.rollout.inference.spec import NOT_MODELLED, InferenceSpec, NotModelled

__all__ = [
    "DEFAULT_RELEASES", "FRAMEWORKS", "NOT_MODELLED", "TAGS", "Asleep", "Held", "InferenceMemory", "InferenceSpec",
    "KvCapacity", "NotModelled", "inference_memory", "kv_capacity",
]  # fmt: skip
