"""What is trained and how, with Megatron's field names. Imports only ``cards`` and ``releases`` of the package.

``errors`` <- ``release``, ``fields`` <- ``model``, ``engine_options`` <- ``parts`` <- ``limits``, ``layout`` <-
``validation`` <- ``run`` <- ``unmodelled``.
"""

from bridge_memory.spec.checkpoint import CheckpointSpec
from bridge_memory.spec.diffusion import DiffusionSpec
from bridge_memory.spec.dtypes import DTYPE_BYTES
from bridge_memory.spec.encoders import EncoderStructure
from bridge_memory.spec.engine_options import DDPOptions, DeepSpeedOptions, FSDPOptions
from bridge_memory.spec.errors import SpecError, divide, show
from bridge_memory.spec.model import (
    AttentionSpec,
    CompressedAttentionSpec,
    EncoderSpec,
    FeedForward,
    GatedDeltaNetSpec,
    IndexerSpec,
    KimiDeltaSpec,
    LayerSpec,
    Mamba1Spec,
    MambaSpec,
    Mixer,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ShortConvSpec,
    SideBySideSpec,
    SparseSpec,
)
from bridge_memory.spec.parts import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RecomputeSpec,
)
from bridge_memory.spec.run import RunSpec

__all__ = [
    "DTYPE_BYTES",
    "AttentionSpec",
    "BatchSpec",
    "CheckpointSpec",
    "CompressedAttentionSpec",
    "DDPOptions",
    "DataParallelSpec",
    "DeepSpeedOptions",
    "DiffusionSpec",
    "EncoderSpec",
    "EncoderStructure",
    "FSDPOptions",
    "FeedForward",
    "GatedDeltaNetSpec",
    "ImplementationSpec",
    "IndexerSpec",
    "KimiDeltaSpec",
    "LayerSpec",
    "MLASpec",
    "MLPSpec",
    "Mamba1Spec",
    "MambaSpec",
    "Mixer",
    "MoESpec",
    "ModelSpec",
    "OptimizerSpec",
    "ParallelSpec",
    "PeftSpec",
    "PrecisionSpec",
    "RecomputeSpec",
    "RunSpec",
    "ShortConvSpec",
    "SideBySideSpec",
    "SparseSpec",
    "SpecError",
    "divide",
    "show",
]
