"""The gated short convolution of LFM2, in torch operations or with the kernel of causal_conv1d.

Source: ``models/lfm2/modeling_lfm2.py: Lfm2ShortConv.slow_forward, cuda_kernels_forward, apply_mask_to_padding_states``
(4.57, 5.12). Shapes: T tokens of width h.
"""

from __future__ import annotations

from bridge_memory.inventory.torch.delta_net import convolution
from bridge_memory.inventory.torch.ops import Array, Torch
from bridge_memory.releases import FAMILIES_OF_5
from bridge_memory.spec.model import ShortConvSpec


def record_short_conv(t: Torch, spec: ShortConvSpec, x: Array) -> Array:
    """[T, h] -> [T, h]."""
    ctx = t.r.ctx
    tokens, h = ctx.tokens, ctx.hidden_size
    # From 5 on every batch with a mask is multiplied by it; before, the mask of attention came, which is skipped but
    # for FlashAttention's.
    masked = t.hf.spec.attention_mask != "none"
    if not FAMILIES_OF_5(t.hf.spec):
        masked = t.hf.spec.attention_mask == "padded" and t.hf.attention == "flash_attention_2"
    entering = t.scale("hidden states without padding", x) if masked and ctx.batch > 1 else x
    both = t.linear("conv.in_proj", entering, tokens, h, 3 * h, bias=spec.bias)
    b, c, values = t.split("B, C and x", both, tokens * h, tokens * h, tokens * h)
    product = t.mul("B times x", b, values)
    if t.hf.spec.mixer_kernels:
        for name, shape in (("weight", (h, 1, spec.kernel)), ("bias", (h,)))[: 1 + spec.bias]:
            t.r.parameter(f"conv.conv.{name}", shape)
        out = t.make(
            "conv.conv output", (product,), tokens * h, product.width, saves=(product.tensor,), trains=t.trains("conv"),
        )
    else:
        out = convolution(t, "conv.conv", product, h, spec.kernel, bias=spec.bias)
    y = t.mul("C times the convolution", c, out)
    t.keep_alive(both, product, out)
    done = t.linear("conv.out_proj", y, tokens, h, h, bias=spec.bias)
    t.keep_alive(x, entering, both, product, out, y)
    return done
