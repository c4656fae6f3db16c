"""Kernels of state-space mixers that allocate and save the same tensors as the real ones, and compute nothing.

mamba_ssm, causal_conv1d and flash-linear-attention cannot be called without Triton and CUDA. Their autograd functions
are Python: each function here allocates the same tensors in the same order and saves the same ones for backward.
Sources: mamba_ssm 2.2.5 (``ops/triton/ssd_combined.py, ssd_chunk_state.py, ssd_state_passing.py, ssd_chunk_scan.py,
ssd_bmm.py, layernorm_gated.py``), causal_conv1d 1.7.0 (``cpp_functions.py``) and fla-core 0.4.2 and 0.6.0
(``ops/gated_delta_rule/chunk.py, modules/l2norm.py, modules/conv/causal_conv1d.py``).

Shapes: b sequences of s tokens, h heads of p, g groups with states of n, c tokens per chunk, C = s / c chunks.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch

from bridge_memory.inventory.megatron.ssm import MULTIPROCESSORS

#: Tokens per chunk of flash-linear-attention's gated delta rule.
DELTA_CHUNK = 64


def _fp32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _channels_first(x: torch.Tensor) -> torch.Tensor:
    """``rearrange_and_update_stride``: [b, s, d] as [b, d, s], copied where a token's stride is no multiple of 8."""
    turned = x.transpose(1, 2)
    return turned.contiguous() if turned.stride(2) % 8 else turned


def _convolved(x: torch.Tensor) -> torch.Tensor:
    """``causal_conv1d_fwd_function``'s output for x [b, s, d]."""
    return torch.empty_like(_channels_first(x)).transpose(1, 2)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy where its last dimension is not the contiguous one."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Mamba2(torch.autograd.Function):
    """``MambaSplitConv1dScanCombinedFn`` without norm and output projection, which megatron-core does not pass."""

    @staticmethod
    def forward(
        ctx: Any, zxbcdt: torch.Tensor, conv_weight: torch.Tensor, conv_bias: Any, dt_bias: torch.Tensor,
        a: torch.Tensor, d: torch.Tensor, chunk: int, head_dim: int, groups: int,
    ) -> torch.Tensor:  # fmt: skip
        b, s, _ = zxbcdt.shape
        heads = a.shape[0]
        inner, width = heads * head_dim, conv_weight.shape[0]
        state = (width - inner) // groups // 2
        chunks = ceil(s / chunk)
        x = _convolved(zxbcdt[..., inner : inner + width])
        rows = [_rows(part) for part in x[..., inner:].split(groups * state, -1)]
        dt, cumulated = (_fp32(x, b, heads, chunks, chunk) for _ in range(2))
        states = _fp32(x, b, chunks, heads, head_dim, state)
        states, final = x.new_empty(states.shape), _fp32(x, b, heads, head_dim * state)
        products = _fp32(x, b, chunks, groups, chunk, chunk)
        out, ungated = (x.new_empty(b, s, heads, head_dim) for _ in range(2))
        ctx.save_for_backward(zxbcdt, conv_weight, conv_bias, ungated, a, d, dt_bias)
        ctx.sizes = b, s, heads, head_dim, groups, state, chunk
        del dt, cumulated, final, products, rows
        return out.view(b, s, inner)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zxbcdt, conv_weight, conv_bias, ungated, a, d, dt_bias = ctx.saved_tensors
        b, s, heads, head_dim, groups, state, chunk = ctx.sizes
        inner, width = heads * head_dim, conv_weight.shape[0]
        source = zxbcdt[..., inner : inner + width]
        x = _convolved(source)
        gradient = torch.empty_like(zxbcdt)
        inside = torch.empty_like(source)
        given = zxbcdt.new_empty(b, s, heads)
        scanned = _scan_backward(ungated, heads, chunk, groups, state)
        del scanned
        of_a, of_d, of_dt_bias = torch.empty_like(a), torch.empty_like(d), torch.empty_like(dt_bias)
        # The convolution's backward writes its input's gradient into a slice of dzxbcdt.
        _channels_first(source)
        weight = torch.zeros_like(conv_weight, dtype=torch.float32).type_as(conv_weight)
        bias = None if conv_bias is None else torch.zeros_like(conv_bias, dtype=torch.float32).type_as(conv_bias)
        del x, inside, given
        return gradient, weight, bias, of_dt_bias, of_a, of_d, None, None, None


def _scan_backward(x: torch.Tensor, heads: int, chunk: int, groups: int, state: int) -> torch.Tensor:
    """``_mamba_chunk_scan_combined_bwd``: dx, of x [b, s, h, p]; the caller makes the other gradients."""
    b, s, head_dim = x.shape[0], x.shape[1], x.shape[3]
    chunks = ceil(s / chunk)
    dt, cumulated = (_fp32(x, b, heads, chunks, chunk) for _ in range(2))
    products = _fp32(x, b, chunks, groups, chunk, chunk)
    states = _fp32(x, b, chunks, heads, head_dim, state)
    states, final = _fp32(x, *states.shape), _fp32(x, b, heads, head_dim * state)
    scanned = torch.empty_like(x)
    of_states = _fp32(x, *states.shape)
    blocks = ceil(head_dim * state / 64)
    of_states, states, passed = (
        x.new_empty(states.shape), x.new_empty(states.shape), _fp32(x, b, heads, chunks, blocks).sum(-1)
    )  # fmt: skip
    of_dt = _fp32(x, b, heads, chunks, chunk)
    of_b, next_ = _summed_over_heads(x, b, s, heads, groups, chunks, state), _fp32(x, b, heads, chunks, chunk)
    of_c, previous = _summed_over_heads(x, b, s, heads, groups, chunks, state), _fp32(x, b, heads, chunks, chunk)
    splits = _splits(b, heads, groups, chunks)
    of_products = _fp32(x, b, chunks, splits, groups, chunk, chunk).sum(2)
    sums = previous.flip([-1]).cumsum(dim=-1).flip([-1])
    stable = _fp32(x, b, heads, chunks, ceil(chunk / 32), chunk).sum(3)
    del dt, cumulated, products, final, passed, of_states, states
    del of_dt, of_b, of_c, of_products, sums, stable, next_, previous
    return scanned


class _Scan(torch.autograd.Function):
    """``MambaChunkScanCombinedFn`` without a gate and initial states: x [b, s, h, p], dt [b, s, h], B, C [b, s, g, n].
    It saves the sum that its backward makes again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b_: torch.Tensor, c_: torch.Tensor, chunk: int,
        d: torch.Tensor, dt_bias: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        b, s, heads, head_dim = x.shape
        groups, state = b_.shape[2:]
        chunks = ceil(s / chunk)
        steps, cumulated = (_fp32(x, b, heads, chunks, chunk) for _ in range(2))
        states = _fp32(x, b, chunks, heads, head_dim, state)
        states, final = x.new_empty(states.shape), _fp32(x, b, heads, head_dim * state)
        products = _fp32(x, b, chunks, groups, chunk, chunk)
        out = x.new_empty(b, s, heads, head_dim)
        ctx.save_for_backward(out, x, dt, cumulated, a, b_, c_, d, dt_bias)
        ctx.chunk = chunk
        del steps, states, final, products
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, x, dt, _, a, b_, c_, d, dt_bias = ctx.saved_tensors
        given = [torch.empty_like(part) for part in (dt, b_, c_)]
        scanned = _scan_backward(x, dt.shape[-1], ctx.chunk, b_.shape[2], b_.shape[3])
        of = [torch.empty_like(part) for part in (a, d, dt_bias)]
        return scanned, given[0], of[0], given[1], given[2], None, of[1], of[2]


def mamba_chunk_scan_combined(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunk_size: int,
    D: torch.Tensor, z: Any = None, dt_bias: Any = None, **_: object,
) -> torch.Tensor:  # fmt: skip
    """mamba_ssm's function, as called by ``ssm/mamba_mixer.py: MambaMixer._ssm_prefill`` with a gated norm after it."""
    assert z is None
    out: torch.Tensor = _Scan.apply(x, dt, A, B, C, chunk_size, D, dt_bias)
    return out


def _splits(b: int, heads: int, groups: int, chunks: int) -> int:
    together = max(min(ceil(b * chunks * heads / MULTIPROCESSORS), heads // groups), 1)
    return ceil(heads // groups / together)


def _summed_over_heads(x: torch.Tensor, b: int, s: int, heads: int, groups: int, chunks: int, n: int) -> torch.Tensor:
    """Gradient of B or C: fp32, the sum of several parts (``_chunk_state_bwd_db, _chunk_scan_bwd_dC``)."""
    return _fp32(x, b, s, _splits(b, heads, groups, chunks), groups, n).sum(2)


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor, conv1d_weight: torch.Tensor, conv1d_bias: Any, dt_bias: torch.Tensor, A: torch.Tensor,
    D: torch.Tensor, chunk_size: int, headdim: int | None = None, ngroups: int = 1, **_: object,
) -> torch.Tensor:  # fmt: skip
    """mamba_ssm's function, as called by ``ssm/mamba_mixer.py`` in training."""
    out: torch.Tensor = _Mamba2.apply(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, headdim or D.shape[1], ngroups
    )
    return out


class _GroupNorm(torch.autograd.Function):
    """``layernorm_gated.py: LayerNormFn`` as RMSNorm of each group, with or without a gate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, groups: int, z: Any) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        gate = None if z is None else z.reshape(-1, z.shape[-1])
        y, rstd = torch.empty_like(flat), _fp32(x, groups * flat.shape[0])
        ctx.save_for_backward(flat, weight, rstd, gate)
        ctx.shape = x.shape
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat, weight, _, gate = ctx.saved_tensors
        dx = torch.empty_like(flat)
        dz = None if gate is None else torch.empty_like(gate).view(ctx.shape)
        return dx.view(ctx.shape), torch.empty_like(weight), None, dz


class ExtendedRMSNorm(torch.nn.Module):
    """mamba_ssm's RMSNorm of groups (``ops/triton/layernorm_gated.py: RMSNorm``)."""

    def __init__(
        self, hidden_size: int, group_size: int | None = None, device: Any = None, dtype: Any = None, **_: object
    ) -> None:
        super().__init__()
        self.groups = hidden_size // (group_size or hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = _GroupNorm.apply(x, self.weight, self.groups, z)
        return out


class _Convolution(torch.autograd.Function):
    """``CausalConv1dFn``: saves its input and parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        grad = grads[0]
        if x.stride(2) == 1 and grad.stride(2) != 1:
            grad = grad.contiguous()
        return torch.empty_like(x), torch.empty_like(weight), None if bias is None else torch.empty_like(bias)


def causal_conv1d_fn(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, **_: object) -> torch.Tensor:
    """causal_conv1d's function: x [b, d, s]."""
    out: torch.Tensor = _Convolution.apply(x, weight, bias)
    return out


class _TokensFirst(torch.autograd.Function):
    """``CausalConv1dFunction``: saves x [b, s, d] with its strides; the output and x's gradient are contiguous."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
        parts = x.shape[0] * ceil(x.shape[1] / DELTA_CHUNK)
        _fp32(x, parts, *weight.shape)
        return gradient, torch.empty_like(weight), None if bias is None else torch.empty_like(bias)


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, **_: object) -> tuple[torch.Tensor, None]:
    """flash-linear-attention's function, without a final state: x [b, s, d]."""
    out: torch.Tensor = _TokensFirst.apply(x, weight, bias)
    return out, None


class _Unit(torch.autograd.Function):
    """``L2NormFunction``: saves its output and one fp32 value per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y, rstd = torch.empty_like(x), _fp32(x, *x.shape[:-1])
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grads[0].contiguous()
        return torch.empty_like(ctx.saved_tensors[0])


def l2norm(x: torch.Tensor, **_: object) -> torch.Tensor:
    """flash-linear-attention's function."""
    out: torch.Tensor = _Unit.apply(x)
    return out


class _DeltaRule(torch.autograd.Function):
    """``ChunkGatedDeltaRuleFunction``: q, k [b, s, h, k], v [b, s, h, v], g and beta [b, s, h]."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        b, s, heads, _ = k.shape
        g = torch.empty_like(g)
        inverse = k.new_empty(b, s, heads, DELTA_CHUNK)
        w, u = torch.empty_like(k), torch.empty_like(v)
        states, fresh = k.new_empty(_states(k, v)), torch.empty_like(u)
        out = torch.empty_like(v)
        ctx.save_for_backward(q, k, v, g, beta, inverse)
        del w, u, states, fresh
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, g, beta, _ = ctx.saved_tensors
        w, u = torch.empty_like(k), torch.empty_like(v)
        states, fresh = k.new_empty(_states(k, v)), torch.empty_like(u)
        of_fresh = torch.empty_like(v)
        of_states = k.new_empty(_states(k, v))
        of_fresh = torch.empty_like(of_fresh)
        dq, dk, dg, dw = torch.empty_like(q), torch.empty_like(k), _fp32(g, *g.shape), torch.empty_like(w)
        again, dv, dg2, db = torch.empty_like(k), torch.empty_like(v), torch.empty_like(g), torch.empty_like(beta)
        del w, u, states, fresh, of_fresh, of_states, dw, again, dg2
        return dq, dk, dv, torch.empty_like(dg), db


def _states(k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    b, s, heads, width = k.shape
    return b, ceil(s / DELTA_CHUNK), heads, width, v.shape[-1]


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: object
) -> tuple[torch.Tensor, None]:
    """flash-linear-attention's function, without initial and final states."""
    out: torch.Tensor = _DeltaRule.apply(q, k, v, g, beta)
    return out, None
