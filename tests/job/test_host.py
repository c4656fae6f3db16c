"""Host memory of ranks and nodes: hand counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bridge_memory import BatchSpec, ModelSpec, ParallelSpec, RunSpec, SpecError, explain
from bridge_memory.components import Part, Provenance, Role
from bridge_memory.job.host import PROCESS, WORKER, Moment, host_memory
from bridge_memory.job.torch.host import host_moments
from bridge_memory.outside.amount import Amount, Range, total
from bridge_memory.outside.phase import Phase
from bridge_memory.readers import resolve_model
from bridge_memory.verdict import Verdict, within

LLAMA = "meta-llama/Llama-3.1-8B"
#: As transformers counts Llama-3.1-8B.
PARAMETERS = 8_030_261_248
SEQ = 4096
OWN = PROCESS.least + 2 * WORKER.least
OWN_MOST = PROCESS.most + 2 * WORKER.most


def model_of(layers: int | None = None) -> ModelSpec:
    model = resolve_model(LLAMA)
    return model if layers is None else replace(model, layers=model.layers[:layers])


def run_of(layers: int | None = None, *, world: int = 8, pp: int = 1, batch: int = 64, **fields: Any) -> RunSpec:
    parallel = ParallelSpec(world_size=world, pipeline_model_parallel_size=pp)
    run = RunSpec(
        model=model_of(layers), parallel=parallel, batch=BatchSpec(seq_length=SEQ, global_batch_size=batch)
    )  # fmt: skip
    return run.with_fields(**fields)


def named(run: RunSpec, **more: Any) -> dict[str, tuple[int, int]]:
    return {amount.name: (amount.least, amount.most) for amount in host_memory(run, **more).rank}


def test_a_job_that_offloads_nothing_has_its_processes() -> None:
    """Eight ranks of a node, each with two workers of the data loader; all of it assumed."""
    found = host_memory(run_of())
    assert found.node == Range(8 * OWN, 8 * OWN_MOST)
    assert found.ranks == 8
    assert {amount.provenance for amount in found.rank} == {Provenance.ASSUMED}
    assert host_memory(run_of(), workers=0).node == Range(8 * PROCESS.least, 8 * PROCESS.most)


@pytest.mark.parametrize("aware", [False, True], ids=["plain", "precision-aware"])
def test_an_offloaded_optimizer(aware: bool) -> None:
    """16 bytes for each parameter, over all ranks: it, its gradient, two moments in fp32. The first two are pinned."""
    run = run_of(optimizer_cpu_offload=True, use_precision_aware_optimizer=aware)
    node = host_memory(run).node
    assert node.least - 8 * OWN == 16 * PARAMETERS
    assert node.most - 8 * OWN_MOST == (2 * 8 + 8) * PARAMETERS


def test_a_part_of_the_optimizer_is_offloaded() -> None:
    whole, half = (
        named(run_of(optimizer_cpu_offload=True, optimizer_offload_fraction=share))["offloaded optimizer states"]
        for share in (1.0, 0.5)
    )
    assert whole == (8 * PARAMETERS // 8,) * 2
    assert half == (8 * PARAMETERS // 16,) * 2


@pytest.mark.parametrize(("momentum", "states"), [(0.9, 1), (0.0, 0)], ids=["momentum", "no momentum"])
def test_states_of_sgd(momentum: float, states: int) -> None:
    fields = {"optimizer.optimizer": "sgd", "optimizer.sgd_momentum": momentum, "optimizer_cpu_offload": True}
    node = host_memory(run_of(**fields)).node
    assert node.least - 8 * OWN == (8 + 4 * states) * PARAMETERS


def test_offloaded_activations_of_microbatches_in_flight() -> None:
    """The inputs of core attention, q [s, h] and k, v [s, h / 4] in bf16: on the first of four stages of two layers for
    four microbatches. Where the backward pass is next the last layer's stay: without a pipeline one of two goes."""
    fields = {"offload_modules": ("core_attn",), "megatron_core": (0, 19)}
    layer = SEQ * 4096 * 2 * 3 // 2
    assert named(run_of(2, **fields))["offloaded activations"] == (layer, 2 * layer)
    run = run_of(8, pp=4, **fields)
    assert host_memory(run).stage == 0
    assert named(run)["offloaded activations"] == (8 * layer, 16 * layer)


def test_whole_layers_offloaded() -> None:
    """Three of eight layers: what these save."""
    run = run_of(8)
    saved = sum(
        c.bytes for c in explain(run, 0).components
        if c.role is Role.ACTIVATION and c.part in (Part.ATTENTION, Part.MLP, Part.LAYER_INPUT)
    )  # fmt: skip
    assert saved % 8 == 0
    found = named(run.with_fields(cpu_offloading_num_layers=3))["offloaded activations"]
    assert found == (saved // 8 * 3, saved // 8 * 6)


def test_engines_of_torch_count_their_own() -> None:
    """ZeRO-3 with its optimizer on the host: what the estimate says of it."""
    run = RunSpec(model=model_of(), parallel=ParallelSpec(world_size=8)).with_fields(
        engine="zero3", transformer_impl="transformers", offload_optimizer_device="cpu"
    )
    (expected,) = (sum(n for _, n in explain(run, 0).host),)
    assert expected > PARAMETERS
    assert host_memory(run).node.least == 8 * (expected + OWN)


def test_what_saving_holds_is_added_to_each_rank() -> None:
    staged = Amount("staged checkpoint", 10, 30, Provenance.FORMULA)
    plain, saving = host_memory(run_of()), host_memory(run_of(), moments=(Moment(Phase.SAVE, every=(staged,)),))
    assert staged in saving.rank
    assert saving.node == Range(plain.node.least + 80, plain.node.most + 240)


#: World size, pipeline stages, GPUs of a node -> the stages of the ranks of the fullest node.
NODES: dict[str, tuple[tuple[int, int, int], tuple[int, ...]]] = {
    "one node": ((8, 1, 8), (0,) * 8),
    "less than a node": ((4, 1, 8), (0,) * 4),
    "two stages a node": ((16, 4, 8), (0, 0, 0, 0, 1, 1, 1, 1)),
    "two nodes a stage": ((16, 2, 4), (0,) * 4),
    "a stage ends inside of a node": ((12, 2, 5), (0,) * 5),
    "the last node is not full": ((12, 4, 8), (0, 0, 0, 1, 1, 1, 2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("case", NODES)
def test_the_fullest_node(case: str) -> None:
    """Ranks of a stage are consecutive. Its stages hold as many microbatches as there are stages from it on."""
    (world, pp, gpus), stages = NODES[case]
    run = run_of(8, world=world, pp=pp, offload_modules=("core_attn",), megatron_core=(0, 19), batch=192)
    layer = SEQ * 4096 * 2 * 3 // 2
    of_stage = [
        OWN + (pp - stage) * 8 // pp * layer - (layer if stage == pp - 1 else 0) for stage in range(pp)
    ]  # fmt: skip
    found = host_memory(run, gpus)
    assert found.ranks == len(stages)
    assert found.node.least == sum(of_stage[stage] for stage in stages)


def test_the_verdict() -> None:
    needed = host_memory(run_of()).node
    sizes = {needed.most: Verdict.FITS, needed.most - 1: Verdict.TIGHT, needed.least: Verdict.TIGHT,
             needed.least - 1: Verdict.DOES_NOT_FIT}  # fmt: skip
    assert {size: within(needed, size) for size in sizes} == sizes


@pytest.mark.parametrize(
    "wrong", [{"gpus_per_node": 0}, {"gpus_per_node": 1.5}, {"gpus_per_node": True}, {"workers": -1}],
    ids=["no GPU", "half a GPU", "a flag", "fewer than no workers"],
)  # fmt: skip
def test_numbers_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        host_memory(run_of(), **wrong)


# ---- loads and saves of torch's engines ----


def of_torch(engine: str, **fields: Any) -> RunSpec:
    return run_of(**{"data_parallel.engine": engine, "params_dtype": "bf16"}, **fields)


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "zero1"])
def test_ranks_read_the_model_at_most_once_each(engine: str) -> None:
    """Eight ranks times 2 bytes for each parameter, before workers of the data loader run; mapped files need none."""
    load, _ = host_moments(of_torch(engine))
    assert [total(load.every), load.first] == [Range(0, 2 * PARAMETERS), ()]
    node = host_memory(of_torch(engine), moments=(load,))
    assert node.phase is Phase.LOAD
    assert node.node == Range(8 * PROCESS.least, 8 * (PROCESS.most + 2 * PARAMETERS))


def test_zero3_reads_a_file_at_a_time_and_gathers_weights_if_told_to() -> None:
    load, save = host_moments(of_torch("zero3"))
    assert total(load.every).most == 5 * 10**9
    assert save.first == ()
    _, gathered = host_moments(of_torch("zero3", stage3_gather_16bit_weights_on_model_save=True))
    assert total(gathered.first).most == 2 * PARAMETERS


def test_a_full_state_dict_is_on_the_first_rank_alone() -> None:
    """Weights, and two moments in bf16, as the parameters are: shards of eight ranks, each padded to a block."""
    _, save = host_moments(of_torch("fsdp2"))
    whole = total(save.first).most
    assert 0 <= whole - 6 * PARAMETERS < 1e-3 * 6 * PARAMETERS
    node = host_memory(of_torch("fsdp2"), moments=(save,))
    assert node.node.most == 8 * OWN_MOST + whole
    assert [amount.name for amount in node.rank][:2] == [amount.name for amount in save.first]
