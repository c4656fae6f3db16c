"""Bytes and kernels of an unfused rotary embedding against the operations that megatron-core runs."""

from __future__ import annotations

from typing import Any

import pytest

from bridge_memory import BatchSpec, ParallelSpec, RunSpec
from bridge_memory.speed.megatron.kernels import kernels_of
from bridge_memory.speed.megatron.work import Work, layer_work
from bridge_memory.tapes.context import context_of

torch = pytest.importorskip("torch")
rope_utils = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")

S = 256


def counted(heads: int, width: int, turned: int) -> tuple[int, int]:
    """(bytes, kernels) of both passes: operations that return no view read what they take and write what they return; a
    slice's gradient is zeros, and a copy unless the slice is empty."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[int] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            inputs = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            of_slice = func is torch.ops.aten.slice_backward.default
            if not func.is_view and func is not torch.ops.aten.detach.default:
                found.append(sum(x.nbytes for x in (*inputs, out)) + (inputs[0].nbytes if of_slice else 0))
                found.extend([0] if of_slice and inputs[0].numel() else [])  # the copy's kernel
            return out

    x = torch.ones(S, 1, heads, width, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.ones(S, 1, 1, turned)
    gradient = torch.ones_like(x)
    with Operations():
        rope_utils._apply_rotary_pos_emb_bshd(x, angles, mscale=1.3).backward(gradient)
    return sum(found), len(found)


def mixer(name: str, **fields: object) -> Work:
    run = RunSpec(model=name, parallel=ParallelSpec(world_size=8), batch=BatchSpec(seq_length=S)).with_fields(**fields)
    return layer_work(run.model.layers[0], run, context_of(run), kernels_of(run)).mixer


@pytest.mark.parametrize("tp", (1, 4))
@pytest.mark.parametrize(
    ("name", "heads", "groups", "width", "turned"),
    [("meta-llama/Llama-3.1-8B", 32, 8, 128, 128), ("zai-org/GLM-4.5-Air", 96, 8, 128, 64)],
)
def test_query_and_key(name: str, heads: int, groups: int, width: int, turned: int, tp: int) -> None:
    """One kernel would read and write each once forward and once backward; both passes are three times the work."""
    parts = [counted(n // tp, width, turned) for n in (heads, groups)]
    plain, fused = (mixer(name, apply_rope_fusion=on, tensor_model_parallel_size=tp) for on in (False, True))
    once = 2 * S * width * (heads + groups) // tp
    assert 3 * (plain.traffic - fused.traffic) + 6 * once == pytest.approx(sum(nbytes for nbytes, _ in parts))
    if turned == width:
        assert 3 * (plain.launches - fused.launches) + 6 == pytest.approx(sum(kernels for _, kernels in parts))


def test_yarn() -> None:
    """gpt-oss has none of its own."""
    assert mixer("openai/gpt-oss-20b", apply_rope_fusion=True) == mixer("openai/gpt-oss-20b", apply_rope_fusion=False)
