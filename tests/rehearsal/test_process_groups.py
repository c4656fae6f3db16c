"""The process groups of a layout against those that the installed megatron-core makes: names and ranks, every rank."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch

from bridge_memory.outside.communicators import communicators, groups
from bridge_memory.outside.phase import Phase
from bridge_memory.rehearsal import gpu
from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.rehearsal.world import fake_world, quiet
from bridge_memory.spec import ParallelSpec, SpecError
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.spec.ranks import rank_of_stage

#: Of one rank each, from 0.19 on: weights that are gathered again.
REMAT = "GTP_WEIGHT_REMAT"
#: The same ranks as without these, from 0.19 on.
WITH_REMAT = "_WITH_EGTP"


def layout(seed: int) -> ParallelSpec:
    """A layout that megatron-core takes."""
    random = Random(seed)
    while True:
        tp, pp, cp, dp = (random.choice((1, 1, 2, 3, 4)) for _ in range(4))
        world = tp * pp * cp * dp
        etp, ep, instances = random.choice((1, tp)), random.choice((1, 2, 3, 4, 8)), random.choice((1, 1, 2))
        in_stage = world // pp
        if in_stage % (etp * ep) or dp * cp % instances or in_stage // (etp * ep) % instances or world > 96:
            continue
        try:
            return ParallelSpec(
                world_size=world, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
                context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
                num_distributed_optimizer_instances=instances,
            )  # fmt: skip
        except SpecError:
            continue


def made(sizes: ParallelSpec, rank: int) -> dict[str, tuple[int, ...]]:
    """What ``initialize_model_parallel`` makes with ``rank`` in it, by description."""
    from megatron.core import parallel_state

    found: dict[str, tuple[int, ...]] = {}
    create = parallel_state.create_group

    def recorded(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = kwargs["group_desc"].removesuffix("_GROUP")
        if kwargs.get("backend") != "gloo" and rank in ranks:
            assert name not in found, name
            found[name] = tuple(ranks)
        return create(ranks, *args, **kwargs)

    with quiet(), replaced(parallel_state, "create_group", recorded), fake_world(sizes, rank):
        pass
    return found


@pytest.mark.parametrize("seed", range(16))
def test_groups_are_those_of_megatron(seed: int) -> None:
    sizes = layout(seed)
    random = Random(seed)
    ranks = {rank_of_stage(sizes, stage) for stage in range(sizes.pp)} | {random.randrange(sizes.world_size)}
    for rank in sorted(ranks):
        theirs = made(sizes, rank)
        ours = {name: group.members(rank) for name, group in groups(sizes).items() if name != "WORLD"}
        stage = rank * sizes.pp // sizes.world_size
        if stage not in (0, sizes.pp - 1):
            del ours["EMBEDDING"]
        if stage:
            del ours["POSITION_EMBEDDING"]
        for name in [name for name in theirs if REMAT in name]:
            assert theirs.pop(name) == (rank,)
        for name in [name for name in theirs if name.endswith(WITH_REMAT)]:
            assert theirs.pop(name) == theirs[name.removesuffix(WITH_REMAT).removesuffix("_GROUP")]
        assert {name: sorted(members) for name, members in theirs.items()} == {
            name: sorted(members) for name, members in ours.items()
        }, (seed, sizes, rank)


#: As ``ProcessGroup`` has them.
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "_allgather_base", "allgather", "allgather_into_tensor_coalesced",
    "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced", "alltoall_base", "alltoall",
    "broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier", "all_gather_single",
    "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single",
)  # fmt: skip
FIRST = (Phase.BUILD, Phase.FIRST_STEP)
#: Numbers of tokens: the rehearsal makes them up (``patches/routing.py: balanced_routing``).
COUNTED = {"EXPERT_TENSOR_AND_MODEL_PARALLEL"}
#: Used by a training loop around the step, not by the step that runs here: start, training.py's all-reduces.
AROUND = {"WORLD", "MODEL_PARALLEL"}


def used(run: Any, stage: int) -> set[str]:
    """Descriptions of the groups on which two real steps communicate, with values, on this machine."""
    from test_gpu_loop import measure

    group = torch.distributed.ProcessGroup
    seen: set[str] = set()

    def recording(name: str) -> Any:
        call = getattr(group, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.add("WORLD" if self.group_desc == "default_pg" else self.group_desc.removesuffix("_GROUP"))
            return call(self, *args, **kwargs)

        return method

    def train(*args: Any) -> None:
        with ExitStack() as stack:
            for name in filter(partial(hasattr, group), COLLECTIVES):
                stack.enter_context(replaced(group, name, recording(name)))
            step(*args)

    step = gpu._train
    with replaced(gpu, "_train", train):  # Inside of what stands in for communication.
        measure(run, stage)
    return seen


@pytest.mark.parametrize(
    "name", ["one stage", "first of four", "middle of four", "last of four", "tensor parallel, last", "experts",
             "experts, allgather", "interleaved, first"],
)  # fmt: skip
def test_a_step_communicates_on_these(name: str) -> None:
    """Two steps of megatron-core's own schedule, buffers and optimizer use what is said to be used, and no more."""
    from test_gpu_loop import CASES

    run, stage = CASES[name]
    listed = [one for one in communicators(run, find_gpu("H100"), stage) if Phase.SAVE is not one.first]
    possible = {one.name.partition(" ")[0] for one in listed}
    sure = {one.name.partition(" ")[0] for one in listed if one.first in FIRST and not one.optional}
    if run.implementation.moe_token_dispatcher_type == "alltoall":
        sure -= COUNTED
    seen = used(run, stage)
    assert sure - AROUND <= seen - AROUND <= possible
