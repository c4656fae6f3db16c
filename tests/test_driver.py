"""What libraries allocate beside torch: hand counts of DeepEP's and HybridEP's own formulas."""

from __future__ import annotations

import pytest

from bridge_memory import ParallelSpec, RunSpec, estimate
from bridge_memory.verdict import fits, margin_words
from bridge_memory.workspaces.driver import deepep_bytes, driver_buffers, driver_bytes, hybridep_bytes

MIB = 1 << 20


def run_of(ep: int, backend: str, **fields: object) -> RunSpec:
    run = RunSpec(
        model="deepseek-ai/DeepSeek-V3",
        parallel=ParallelSpec(world_size=512, pipeline_model_parallel_size=8, expert_model_parallel_size=ep,
                              num_layers_in_first_pipeline_stage=4, num_layers_in_last_pipeline_stage=9),
    )  # fmt: skip
    named = {"mtp_num_layers": 0, "mtp_layer": None}
    return run.with_fields(
        **named, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend, **fields
    )  # fmt: skip


def test_deepep_within_a_node() -> None:
    """20 SMs are 10 channels; each has 256 tokens of 8 peers, of 2 x 7168 bytes and 2,056 beside, and 5 integers of
    each peer; a workspace of 32 MiB. (``Config.get_nvl_buffer_size_hint``)"""
    token = 2 * 7168 + 128 * (8 + 4 + 4) + 8
    assert deepep_bytes(2 * 7168, 8) == 80 * (5 * 4 + 256 * token) + 64 + 32 * MIB  # 64: up to a multiple of 128
    assert driver_bytes(run_of(8, "deepep")) == deepep_bytes(2 * 7168, 8)
    assert driver_bytes(run_of(8, "deepep", moe_flex_dispatcher_num_sms=40)) == 160 * (5 * 4 + 256 * token) + 32 * MIB


def test_deepep_over_nodes() -> None:
    """Eight nodes: 288 tokens over NVLink, and over RDMA 128 tokens of each node, sent and received, with 16 bytes
    more: 321 MiB, in a heap that grows by 512."""
    token = 2 * 7168 + 2056
    nvlink = 80 * (19 * 4 + 288 * token) + 64
    rdma = 80 * 2 * (18 * 4 + 128 * (token + 16)) + MIB
    assert 321 * MIB < rdma < 322 * MIB
    assert deepep_bytes(2 * 7168, 64) == nvlink + 512 * MIB + 32 * MIB


def test_hybridep_within_one_domain() -> None:
    """All 64 x 4096 tokens of the group may come to one rank: 14,336 bytes each, 4 x 64 probabilities and 56 scales in
    fp32; the map of 256 experts for each of them."""
    tokens = 64 * 4096
    expected = tokens * (2 * 7168 + 4 * 256 + 4 * 56) + tokens * 256
    assert hybridep_bytes(4096, 7168, 64, 64, 4) == expected
    run = run_of(64, "hybridep", moe_hybridep_ranks_per_nvlink_domain=64)
    (found,) = driver_buffers(run)
    assert (found.nbytes, found.supposed) == (expected, "")


def test_hybridep_over_domains() -> None:
    """Eight domains of eight: probabilities are of 32 experts. Sent: 4096 tokens with 256 probabilities and 56 scales;
    received of seven domains by dispatch with scales, and twice by combine."""
    row = 2 * 7168 + 4 * 32
    within = 64 * 4096 * (row + 4 * 56 + 256)
    between = 4096 * (2 * 7168 + 4 * 256 + 4 * 56) + 7 * 4096 * (row + 4 * 56) + 2 * 7 * 4096 * row
    (found,) = driver_buffers(run_of(64, "hybridep"))
    assert found.nbytes == within + between
    assert found.supposed == "NVLink domains of 8 ranks"


def test_short_sequences_get_room_for_512_tokens() -> None:
    assert hybridep_bytes(64, 1024, 8, 8, 1) == hybridep_bytes(512, 1024, 8, 8, 1)


def test_they_are_in_the_margin_and_in_no_peak() -> None:
    with_buffers, without = (estimate(run_of(8, backend)) for backend in ("hybridep", "deepep"))
    more = driver_bytes(with_buffers.run) - driver_bytes(without.run)
    (a,), (b,) = (fits(result, ["B200"]) for result in (with_buffers, without))
    fragmentation = int(a.peak_bytes * 0.073) - int(b.peak_bytes * 0.073)
    assert a.margin_bytes - b.margin_bytes == more + fragmentation
    assert a.headroom_bytes == a.capacity_bytes - a.peak_bytes - a.margin_bytes
    assert any("HybridEP" in line for line in margin_words(with_buffers.run, [a], str))
    assert any(line.startswith("HybridEP's buffers") for line in with_buffers.assumptions)
    assert not [feature for feature in with_buffers.unmodelled if "flex" in feature]


def test_a_group_that_deepep_refuses_is_listed() -> None:
    """``Buffer.get_dispatch_config`` ends with an assertion for 256 ranks."""
    run = run_of(8, "deepep").with_fields(
        parallel=ParallelSpec(world_size=512, expert_model_parallel_size=256)
    )
    (feature,) = [feature for feature in estimate(run).unmodelled if "flex" in feature]
    assert "a group of 256 ranks" in feature
    assert driver_bytes(run) == 0


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_other_dispatchers_allocate_nothing_beside(dispatcher: str) -> None:
    assert driver_bytes(run_of(8, "deepep").with_fields(moe_token_dispatcher_type=dispatcher)) == 0


def test_user_buffers_of_tensor_parallel_overlap() -> None:
    """Sixteen times 4,096 x 4,096 in bf16, twice that with layers in bf16 beside fp8 ones; none without sequence
    parallelism."""
    run = RunSpec(
        model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=2, tensor_model_parallel_size=2)
    ).with_fields(tp_comm_overlap=True)
    assert driver_bytes(run) == 16 * 2 * 4096 * 4096
    mixed = run.with_fields(
        **{"fp8": "e4m3", "precision.fp8_recipe": "mxfp8", "num_layers_at_end_in_bf16": 1, "gpu_arch": "blackwell"}
    )
    assert driver_bytes(mixed) == 2 * driver_bytes(run)
    assert driver_bytes(run.with_fields(sequence_parallel=False)) == 0
    (said,) = [line for line in estimate(run).assumptions if "outside of torch's allocator" in line]
    assert said.startswith("Transformer Engine's user buffers (0.50 GiB")
