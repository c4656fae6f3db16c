"""What a diffusion model has in place of tokens and a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bridge_memory.spec.errors import SpecError, show
from bridge_memory.spec.fields import MOST


@dataclass(frozen=True, slots=True)
class DiffusionSpec:
    """What a diffusion model has in place of tokens: patches of latents, which attend to a text (Megatron Bridge
    ``diffusion/models/wan/wan_provider.py: WanModelProvider``).

    Example:
        >>> from bridge_memory import DiffusionSpec
        >>> DiffusionSpec(text_width=1536, head_dim=128).patch_elements
        64
    """

    #: Width of the embedded text, and of a head.
    text_width: int
    head_dim: int
    #: Tokens of text that a microbatch has, and their width before they are embedded.
    text_tokens: int = 512
    text_dim: int = 4096
    in_channels: int = 16
    out_channels: int = 16
    #: Frames of a patch, and latents along each of its sides.
    patch_temporal: int = 1
    patch_spatial: int = 2
    #: Channels of the timestep's sinusoids.
    freq_dim: int = 256

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is not int or not 0 < value < MOST:
                raise SpecError(f"{f.name} of a diffusion model ({show(value)}) is not an integer from 1 on; give one")

    @property
    def patch_elements(self) -> int:
        """Latents of a patch."""
        return self.in_channels * self.patch_temporal * self.patch_spatial**2

    @property
    def out_elements(self) -> int:
        """Predicted latents of a patch."""
        return self.out_channels * self.patch_temporal * self.patch_spatial**2
