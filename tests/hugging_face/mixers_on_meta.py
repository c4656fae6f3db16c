"""Kernels of mixers that transformers calls where causal_conv1d, flash-linear-attention or mamba_ssm are installed:
functions that make and keep what theirs do (read in fla-core 0.4.2 and, of Kimi delta attention, 0.6.0; mamba_ssm
2.2.5).

What megatron-core calls of them is ``bridge_memory/rehearsal/scan_kernels.py``'s; here is what it does not call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers

from bridge_memory.rehearsal import scan_kernels
from bridge_memory.rehearsal.scan_kernels import _convolved, _fp32, _Mamba2, _rows
from bridge_memory.releases import FAMILIES_OF_5
from bridge_memory.spec.transformers import TransformersSpec

SMS = 132
INSTALLED = tuple(map(int, transformers.__version__.split(".")[:2]))


class _GatedNorm(torch.autograd.Function):
    """``modules/fused_norm_gate.py: LayerNormGatedFunction``: keeps input, gate and deviations."""

    @staticmethod
    def forward(ctx: Any, x: Any, gate: Any, weight: Any) -> Any:
        y, rstd = torch.empty_like(x), _fp32(x, x.shape[0])
        ctx.save_for_backward(x, gate, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gate, weight, _ = ctx.saved_tensors
        dx, dgate = torch.empty_like(x), torch.empty_like(gate)
        return dx, dgate, _fp32(x, SMS, *weight.shape).sum(0).to(weight.dtype)


class FusedRMSNormGated(torch.nn.Module):
    def __init__(self, hidden_size: int, eps: float, activation: str, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Any, gate: Any) -> Any:
        return _GatedNorm.apply(x, gate, self.weight)


def chunk_gated_delta_rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **_: object) -> tuple[Any, None]:
    """``ChunkGatedDeltaRuleFunction`` with ``use_qk_l2norm_in_kernel``, of contiguous copies (``utils.py:
    input_guard``)."""
    query, key, value, g, beta = (x.contiguous() for x in (query, key, value, g, beta))
    out, _none = scan_kernels.chunk_gated_delta_rule(
        scan_kernels.l2norm(query), scan_kernels.l2norm(key), value, g, beta
    )
    return out, None


class _KimiRule(torch.autograd.Function):
    """``ops/kda/chunk.py: ChunkKDAFunction``, with ``use_qk_l2norm_in_kernel``, of tensors [b, s, n, d]."""

    @staticmethod
    def _states(k: Any) -> Any:
        b, s, heads, d = k.shape
        return k.new_empty(b, -(-s // 64), heads, d, d)

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        heads = k.shape[:3]
        q, q_rstd = torch.empty_like(q), _fp32(q, *heads)
        k, k_rstd = torch.empty_like(k), _fp32(k, *heads)
        summed = torch.empty_like(g)
        attended, inverse = (k.new_empty(*heads, 64) for _ in range(2))
        diagonal = _fp32(k, *heads, 16)
        w, u, decayed = torch.empty_like(k), torch.empty_like(v), torch.empty_like(k)
        del diagonal
        states, fresh = _KimiRule._states(k), torch.empty_like(v)
        out = torch.empty_like(v)
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, summed, g, beta, attended, inverse)
        del w, u, decayed, states, fresh
        return out

    @staticmethod
    def backward(ctx: Any, do: Any) -> Any:
        q, _, k, _, v, _, g, beta, _, _ = ctx.saved_tensors
        do = do.contiguous()
        again = [torch.empty_like(k) for _ in range(4)]
        states, fresh = _KimiRule._states(k), torch.empty_like(v)
        of_products, dv = _fp32(k, *k.shape[:3], 64), torch.empty_like(do)
        of_states, dv = _KimiRule._states(k), torch.empty_like(dv)
        dq, dk, dv = _fp32(q, *q.shape), _fp32(k, *k.shape), torch.empty_like(v)
        dg, db, of_inverse = _fp32(g, *g.shape), _fp32(beta, *beta.shape), _fp32(k, *k.shape[:3], 64)
        dq2, dk2, dg2 = torch.empty_like(dq), torch.empty_like(dk), torch.empty_like(dg)
        dq, dk, dg = dq2, dk2, dg2
        del dq2, dk2, dg2
        dg = torch.empty_like(dg)
        del again, states, fresh, of_products, of_states, of_inverse
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        return dq, dk, dv, dg, db.to(beta.dtype)


def chunk_kda(query: Any, key: Any, value: Any, g: Any, beta: Any, **_: object) -> tuple[Any, None]:
    return _KimiRule.apply(query, key, value, g, beta), None


class _SelectiveScan(torch.autograd.Function):
    """mamba_ssm ``ops/selective_scan_interface.py: SelectiveScanFn`` and ``csrc/selective_scan/selective_scan.cpp``: u,
    delta and z [b, d, s], B and C [b, n, s]."""

    @staticmethod
    def forward(ctx: Any, u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any, z: Any) -> Any:
        u, delta, b, c, z = (x.contiguous() for x in (u, delta, b, c, z))
        out_z, out = torch.empty_like(z), torch.empty_like(delta)
        states = _fp32(u, *u.shape[:2], -(-u.shape[2] // 2048), 2 * a.shape[1])
        ctx.save_for_backward(u, delta, a, b, c, d, z, states, out)
        return out_z, states[:, :, -1, 1::2]

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        u, delta, a, b, c, d, z, _, _ = ctx.saved_tensors
        grad = grad.contiguous()
        made = [torch.empty_like(x) for x in (u, delta, a)]
        wide = [_fp32(x, *x.shape) for x in (b, c)]
        of_d, of_z = torch.empty_like(d), torch.empty_like(z)
        return *made, *(x.to(b.dtype) for x in wide), of_d, of_z


def selective_scan_fn(u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any, z: Any, *_: object, **__: object) -> Any:
    return _SelectiveScan.apply(u, delta, a, b, c, d, z)


class _WholeMamba(torch.autograd.Function):
    """``MambaSplitConv1dScanCombinedFn`` with norm and output projection: keeps zxBCdt and the scan's output; the
    normed one is made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, zxbcdt: Any, conv_weight: Any, conv_bias: Any, dt_bias: Any, a: Any, d: Any, chunk: int,
        head_dim: int, groups: int, norm_weight: Any, out_weight: Any, finals: bool,
    ) -> Any:  # fmt: skip
        b, s, _ = zxbcdt.shape
        heads = a.shape[0]
        inner, width = heads * head_dim, conv_weight.shape[0]
        state = (width - inner) // groups // 2
        chunks = -(-s // chunk)
        x = _convolved(zxbcdt[..., inner : inner + width])
        rows = [_rows(part) for part in x[..., inner:].split(groups * state, -1)]
        dt, cumulated = (_fp32(x, b, heads, chunks, chunk) for _ in range(2))
        states = _fp32(x, b, chunks, heads, head_dim, state)
        states, final = x.new_empty(states.shape), _fp32(x, b, heads, head_dim, state)
        products = _fp32(x, b, chunks, groups, chunk, chunk)
        out = x.new_empty(b, s, heads, head_dim)
        del products
        normed, rstd = torch.empty_like(out).view(b, s, inner), _fp32(x, groups * b * s)
        y = torch.nn.functional.linear(normed, out_weight)
        ctx.save_for_backward(zxbcdt, conv_weight, conv_bias, out, a, d, dt_bias, norm_weight, rstd, out_weight)
        ctx.sizes = b, s, heads, head_dim, groups, state, chunk
        del dt, cumulated, rows, states
        return (y, final) if finals else y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zxbcdt, conv_weight, conv_bias, out, a, d, dt_bias, norm_weight, _rstd, out_weight = ctx.saved_tensors
        b, s, heads, head_dim, *_ = ctx.sizes
        again = torch.empty(b, s, heads * head_dim, dtype=out.dtype, device=out.device)
        dy = torch.nn.functional.linear(grads[0], out_weight.t())
        # ``_layer_norm_bwd`` makes the gradient of the scan's output, which ``_Mamba2`` counts as that before the gate.
        of_norm = _fp32(out, SMS, *norm_weight.shape).sum(0).to(norm_weight.dtype)
        fake = SimpleNamespace(
            saved_tensors=(zxbcdt, conv_weight, conv_bias, out, a, d, dt_bias), sizes=ctx.sizes
        )
        found = _Mamba2.backward(fake, grads[0])[:6]
        of_out = torch.empty_like(out_weight)
        del dy, again
        return *found, None, None, None, of_norm, of_out, None


def mamba_split_conv1d_scan_combined(
    zxbcdt: Any, weight: Any, bias: Any, dt_bias: Any, A: Any, D: Any, chunk_size: int, rmsnorm_weight: Any,
    outproj_weight: Any, headdim: int, ngroups: int, return_final_states: bool = False, **_: object,
) -> Any:  # fmt: skip
    return _WholeMamba.apply(
        zxbcdt, weight, bias, dt_bias, A, D, chunk_size, headdim, ngroups, rmsnorm_weight, outproj_weight,
        return_final_states,
    )


class _Conv1d(torch.autograd.Function):
    """causal_conv1d ``CausalConv1dFn`` without an activation: keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, bias = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None if bias is None else torch.empty_like(bias)


def plain_conv1d(x: Any, weight: Any, bias: Any, activation: Any = None, **_: object) -> Any:
    return _Conv1d.apply(x, weight, bias)


@contextmanager
def mixers_on_meta(kind: str) -> Iterator[None]:
    """transformers as it is where the packages are installed, for building a model of this type and running it."""
    module: Any = import_module(f"transformers.models.{kind}.modeling_{kind}")
    with ExitStack() as stack:
        if kind == "qwen3_next":
            stack.enter_context(patch.object(module, "causal_conv1d_fn", scan_kernels.causal_conv1d_fn))
            stack.enter_context(patch.object(module, "chunk_gated_delta_rule", chunk_gated_delta_rule))
            stack.enter_context(patch.object(module, "FusedRMSNormGated", FusedRMSNormGated))
            stack.enter_context(patch.object(torch.cuda, "current_device", lambda: "meta"))
            # Which 4.57 asks for where the config says no dtype, and torch does not have.
            stack.enter_context(patch.object(torch, "get_current_dtype", torch.get_default_dtype, create=True))
        elif kind == "jamba":

            def scan(self: Any, hidden_states: Any, cache: Any = None, attention_mask: Any = None, **_: object) -> Any:
                with (
                    patch.object(module, "causal_conv1d_fn", scan_kernels.causal_conv1d_fn),
                    patch.object(module, "selective_scan_fn", selective_scan_fn),
                ):
                    return self.cuda_kernels_forward(hidden_states, cache, attention_mask)

            stack.enter_context(patch.object(module.JambaMambaMixer, "forward", scan))
        elif kind == "kimi_linear":
            stack.enter_context(patch.object(module, "causal_conv1d_fn", scan_kernels.causal_conv1d_fn))
            stack.enter_context(patch.object(module, "chunk_kimi_delta_attention", chunk_kda))
        elif kind.startswith("lfm2"):
            conv = module.Lfm2ShortConv if kind == "lfm2" else module.Lfm2MoeShortConv
            mask = FAMILIES_OF_5(TransformersSpec(transformers_version=INSTALLED))

            def convolve(self: Any, hidden_states: Any, *a: Any, attention_mask: Any = None, **_: object) -> Any:
                with patch.object(module, "causal_conv1d_fn", plain_conv1d):
                    return self.cuda_kernels_forward(hidden_states, attention_mask=attention_mask if mask else None)

            stack.enter_context(patch.object(conv, "forward", convolve))
        else:
            names = {"bamba": "BambaMixer", "granitemoehybrid": "GraniteMoeHybridMambaLayer"}
            mixer = getattr(module, names.get(kind, "NemotronHMamba2Mixer"))

            def forward(self: Any, hidden_states: Any, cache_params: Any = None, **_: object) -> Any:
                name = "mamba_split_conv1d_scan_combined"
                with patch.object(module, name, mamba_split_conv1d_scan_combined, create=True):
                    return self.cuda_kernels_forward(hidden_states, cache_params)

            stack.enter_context(patch.object(mixer, "forward", forward))
        yield
