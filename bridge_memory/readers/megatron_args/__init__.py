"""Read Megatron-LM arguments: a dict, a command line, a launch script, a functional test's YAML, ``get_args()``."""

from bridge_memory.readers.environment import cublas_workspace_bytes
from bridge_memory.readers.megatron_args.parsing import RawArguments, read_arguments
from bridge_memory.readers.megatron_args.run import (
    container,
    gpu_architecture,
    run_from_megatron_args,
)

__all__ = [
    "RawArguments",
    "container",
    "cublas_workspace_bytes",
    "gpu_architecture",
    "read_arguments",
    "run_from_megatron_args",
]
