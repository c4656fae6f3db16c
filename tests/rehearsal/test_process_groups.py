"""The process groups of a layout against those that the installed megatron-core makes: names and ranks, every rank."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from bridge_memory.job.communicators import groups
from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.rehearsal.world import fake_world, quiet
from bridge_memory.spec import ParallelSpec, SpecError
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
