"""Snapshots in the form that torch documents: replayed to the peak, attributed by frames, never executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.comparison.snapshot import Frame, Group, at_peak, attribute, group_of, read_snapshot
from bridge_memory.components import Component, Part, Provenance, Role, State
from bridge_memory.spec import SpecError

MIB = 1 << 20
CORE = "/opt/venv/lib/python3.12/site-packages/megatron/core/"


def frames(*calls: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"filename": f, "name": n, "line": 10 + i} for i, (f, n) in enumerate(calls)]


WEIGHT = frames((CORE + "distributed/param_and_grad_buffer.py", "__init__"), ("pretrain_gpt.py", "<module>"))
MOMENT = frames(("/x/transformer_engine/pytorch/optimizers/fused_adam.py", "initialize_state"))
MLP = frames(
    ("/x/site-packages/torch/nn/functional.py", "silu"), (CORE + "transformer/mlp.py", "forward"),
    (CORE + "transformer/transformer_layer.py", "_forward_mlp"),
)  # fmt: skip
ATTENTION = frames((CORE + "tensor_parallel/layers.py", "forward"), (CORE + "transformer/attention.py", "forward"))
UNKNOWN = frames(("/home/me/my_layer.py", "mystery"), ("pretrain.py", "step"))


def snapshot() -> dict[str, Any]:
    """Weights of 100 MiB and moments of 200 stay; activations of 30 + 50 + 20 come, 50 go, 10 come, all go.

    Two forward events, the peak (400 MiB) after the third, and a last allocation below it.
    """
    sizes = [("w", 100, WEIGHT), ("m", 200, MOMENT)]
    blocks, address = [], 0
    for _, size, where in sizes:
        blocks.append({"address": address, "size": size * MIB, "requested_size": size * MIB,
                       "state": "active_allocated", "frames": where})  # fmt: skip
        address += size * MIB
    blocks.append({"address": address, "size": 500 * MIB, "state": "inactive", "frames": []})
    base = 1 << 40
    trace = [
        {"action": "alloc", "addr": base + 1, "size": 30 * MIB - 100, "frames": MLP, "stream": 0},
        {"action": "alloc", "addr": base + 2, "size": 50 * MIB, "frames": ATTENTION, "stream": 0},
        {"action": "segment_alloc", "addr": base, "size": 999 * MIB, "frames": [], "stream": 0},
        {"action": "alloc", "addr": base + 3, "size": 20 * MIB, "frames": UNKNOWN, "stream": 0},
        {"action": "free_requested", "addr": base + 2, "size": 50 * MIB, "frames": [], "stream": 0},
        {"action": "free_completed", "addr": base + 2, "size": 50 * MIB, "frames": [], "stream": 0},
        {"action": "alloc", "addr": base + 2, "size": 10 * MIB, "frames": MLP, "stream": 0},
        {"action": "free_requested", "addr": base + 2, "size": 10 * MIB, "frames": [], "stream": 0},
        {"action": "free_requested", "addr": base + 3, "size": 20 * MIB, "frames": [], "stream": 0},
        {"action": "free_requested", "addr": base + 1, "size": 30 * MIB - 100, "frames": [], "stream": 0},
    ]
    return {"segments": [{"device": 0, "address": 0, "total_size": 0, "blocks": blocks}], "device_traces": [trace]}


def test_the_trace_is_undone_to_the_peak() -> None:
    alive = at_peak(snapshot())
    assert alive.end_bytes == 300 * MIB
    assert alive.peak_bytes == 400 * MIB  # sizes in a trace are what was asked for: rounded up to 512
    assert sorted(b.size for b in alive.blocks) == [20 * MIB, 30 * MIB, 50 * MIB, 100 * MIB, 200 * MIB]
    assert (alive.events, alive.events_after_peak) == (10, 6)


def test_blocks_go_to_components_by_their_frames_and_the_rest_is_shown() -> None:
    components = [
        Component("weights", 60 * MIB, Role.WEIGHTS, Provenance.EXACT),
        Component("gradients", 40 * MIB, Role.GRADIENTS, Provenance.EXACT),
        Component("exp_avg", 200 * MIB, Role.OPTIMIZER, Provenance.EXACT, state=State.EXP_AVG),
        Component("whatever people call it", 45 * MIB, Role.ACTIVATION, Provenance.FORMULA, part=Part.ATTENTION),
        Component("rotary embedding tables", MIB, Role.BUFFERS, Provenance.EXACT, part=Part.ROTARY),
    ]  # fmt: skip
    result = attribute(at_peak(snapshot()), components)
    measured = {g.group: (g.measured // MIB, g.predicted // MIB) for g in result.groups}
    assert measured == {
        Group.STATES: (200, 200), Group.WEIGHTS: (100, 100), Part.ATTENTION: (50, 45), Part.MLP: (30, 0),
        Group.UNATTRIBUTED: (20, 0), Part.ROTARY: (0, 1),
    }  # fmt: skip
    assert result.attributed_share == pytest.approx(0.95)
    ((where, size),) = result.unattributed
    assert size == 20 * MIB and "my_layer.py:10 mystery" in where
    assert sum(g.measured for g in result.groups) == result.alive.peak_bytes


def test_a_trace_that_begins_late_still_has_its_blocks() -> None:
    """The ring buffer lost the allocation: the block is there, its frames are not."""
    late = snapshot()
    late["device_traces"][0] = late["device_traces"][0][4:]
    alive = at_peak(late)
    assert alive.peak_bytes == 400 * MIB
    assert {b.size for b in alive.blocks if not b.frames} == {20 * MIB, 30 * MIB, 50 * MIB}


def test_without_a_trace_the_end_is_the_peak() -> None:
    bare = {"segments": snapshot()["segments"], "device_traces": []}
    alive = at_peak(bare)
    assert alive.peak_bytes == alive.end_bytes == 300 * MIB


@pytest.mark.parametrize(
    ("calls", "group"),
    [
        ([("te/pytorch/module/base.py", "get_workspace")], Part.WORKSPACE),
        ([(CORE + "pipeline_parallel/p2p_communication.py", "_communicate")], Part.PIPELINE),
        ([(CORE + "fusions/fused_cross_entropy.py", "forward")], Part.LOSS),
        ([(CORE + "tensor_parallel/layers.py", "forward"), (CORE + "models/gpt/gpt_model.py", "_postprocess")],
         Part.LOSS),
        ([(CORE + "transformer/moe/experts.py", "forward")], Part.MOE_EXPERTS),
        ([(CORE + "transformer/moe/token_dispatcher.py", "token_permutation")], Part.MOE_ROUTER),
        ([(CORE + "transformer/moe/shared_experts.py", "forward")], Part.MOE_SHARED_EXPERTS),
        ([(CORE + "tensor_parallel/layers.py", "__init__"), (CORE + "transformer/mlp.py", "__init__")],
         Group.WEIGHTS),
        ([(CORE + "optimizer/optimizer.py", "step")], Group.STATES),
        ([(CORE + "transformer/mlp.py", "forward"), (CORE + "transformer/moe/shared_experts.py", "forward")],
         Part.MOE_SHARED_EXPERTS),
        ([("te/pytorch/attention/dot_product_attention/backends.py", "forward"),
          (CORE + "transformer/multi_latent_attention.py", "forward")], Part.MLA),
        ([(CORE + "transformer/multi_latent_attention.py", "qkv_up_proj_and_rope_apply")], Part.MLA),
        ([(CORE + "ssm/mamba_mixer.py", "forward")], Part.MAMBA),
        ([(CORE + "ssm/gated_delta_net.py", "forward")], Part.GATED_DELTA_NET),
        ([("/x/transformer_engine/pytorch/module/layernorm_linear.py", "backward")], Group.TEMPORARIES),
        ([("??", "at::empty")], Group.UNATTRIBUTED),
    ],
)  # fmt: skip
def test_frames_say_whose_allocation_it_is(calls: list[tuple[str, str]], group: Part | Group) -> None:
    assert group_of([Frame(file, name, 1) for file, name in calls]) is group


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch EXECUTED",)


def test_a_snapshot_is_read_without_executing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({**snapshot(), "device_traces": Evil()}))
    with pytest.raises(SpecError, match="holds code"):
        read_snapshot(path.read_bytes(), path)
    assert not (tmp_path / "EXECUTED").exists()
    path.write_bytes(pickle.dumps(snapshot()))
    assert read_snapshot(path.read_bytes(), path) == snapshot()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not a pickle", "not a pickle"),
        (pickle.dumps([1]), "not a memory snapshot"),
        (pickle.dumps(snapshot())[:-40], "not a pickle"),
        (b"", "not a pickle"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    with pytest.raises(SpecError, match=message):
        read_snapshot(path.read_bytes(), path)


def test_malformed_snapshots_and_missing_devices_are_refused() -> None:
    with pytest.raises(SpecError, match="malformed"):
        at_peak({"segments": [{"address": 0, "blocks": [{"size": "x"}]}]})
    with pytest.raises(SpecError, match="device 3 is not in the snapshot"):
        at_peak(snapshot(), 3)
