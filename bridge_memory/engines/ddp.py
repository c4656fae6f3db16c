"""torch's DistributedDataParallel: weights, gradients and optimizer states replicated on every rank, and buckets with
the total size of all gradients, in which they are reduced.

Buckets persist from wrapping on. A gradient is copied into its bucket once it is made. It stays, and the reduced one is
copied back to it; or, with ``gradient_as_bucket_view``, it is freed and ``.grad`` becomes a view of the bucket.
Microbatches that are not reduced (``no_sync``) leave separate gradients, which the last microbatch copies.

Source: torch ``nn/parallel/distributed.py: DistributedDataParallel._ddp_init_helper``, ``csrc/distributed/c10d/
reducer.cpp: initialize_buckets, mark_variable_ready_dense, finalize_bucket_dense, rebuild_buckets,
compute_bucket_assignment_by_size``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bridge_memory.components import Lifetime, Role, State
from bridge_memory.engines.engine import Line, StageState
from bridge_memory.engines.torch_modules import (
    Model,
    accumulates,
    amounts_of,
    in_step,
    kept_of,
    made_before,
    made_gradients,
    model_of,
    parameter_width,
    rounded,
    trained_width,
)
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import RunSpec
from bridge_memory.tapes.chain import Concurrent

#: Bytes of the first bucket (``csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes``).
FIRST_BUCKET = 1 << 20


class DDP:
    """See the module docstring."""

    def __init__(self, run: RunSpec, *, rank: int | None = None) -> None:
        self.run = run
        self.width = parameter_width(run)

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """What every rank keeps."""
        run = self.run
        model = model_of(run, chunks[0])
        held = kept_of(run, model, self.width)
        in_buckets = run.ddp.gradient_as_bucket_view
        stays = accumulates(run)
        # Views of buckets take no memory, but gradients of microbatches that are not reduced do, until the last is.
        waiting, own = 0, list[int]()
        if in_buckets:
            if stays and not run.data_parallel.sync_each_batch:
                own = [k.gradients for k in held]
                waiting = sum(own)
            held = [k._replace(gradients=0) for k in held]
        by_place = made_gradients(run, model, [k.gradients for k in held])
        if waiting and run.num_microbatches == 2:
            # The last microbatch's backward frees each once it is in its bucket.
            freed = made_before(model, own)
            by_place = [Concurrent(0, -n, -n, freed=n) for n in freed]
        step, name = in_step(run, held)
        amounts = amounts_of(run, held, fresh=not stays, shard_name="")
        buckets = Line(Role.GRADIENTS, State.GRADIENTS, "gradient buckets", False, adapters=run.peft.freezes)
        amounts.insert(2, (buckets, sum(rounded(n) for n in bucket_bytes(run, model, trained_width(run, self.width)))))
        return StageState(
            model.numel, tuple((line, n) for line, n in amounts if n), in_step=step, step_name=name,
            accumulated=waiting, concurrent=(model.engine_bytes(by_place),),
            building=sum(n for line, n in amounts if line.lifetime is Lifetime.MODEL and not line.zeroed), saving=0,
        )


def bucket_bytes(run: RunSpec, model: Model, width: int) -> Iterator[int]:
    """Bytes of every bucket; each ends with the parameter that fills it.

    After the first step buckets are rebuilt in the order in which gradients arrived, here the reverse of the model's.
    With ``find_unused_parameters`` the graph may change, and buckets stay in the model's order.
    """
    cap = FIRST_BUCKET
    filled = 0
    parameters = [(p, times) for module in model.modules for p, times in module.trained_parameters()]
    if run.ddp.static_graph or not run.ddp.find_unused_parameters:
        parameters.reverse()
    for p, times in parameters:
        for _ in range(times):
            filled += p.numel * width
            if filled >= cap:
                yield filled
                filled, cap = 0, int(run.ddp.bucket_cap_mb * (1 << 20))
    if filled:
        yield filled


ENGINE = DDP
