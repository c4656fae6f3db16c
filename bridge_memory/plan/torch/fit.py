"""Which operations of checkpointed layers to keep, so that a run fits a GPU with the least recomputation.

Selective checkpointing (torch ``utils/checkpoint.py: create_selective_checkpoint_contexts``) keeps the outputs of some
operations between forward and backward, and runs all others of a layer again. Candidates are a layer's matrix products
and its attention, which take nearly all of its time; how many layers keep each is an integer program: the most time
saved within the bytes that the GPU has left beside a run that keeps nothing. The last product of a layer is no
candidate where nothing after it saves a tensor: the recomputation stops before it.

What is kept is added to the peak of the run that keeps nothing, wherever that is. The peak is an upper bound: a layer's
own outputs are counted twice while it runs backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import NamedTuple

from bridge_memory.estimation import peaks
from bridge_memory.outside.amount import Range
from bridge_memory.plan.found import Limit, Row
from bridge_memory.plan.reserve import Reserve
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec, RunSpec, SpecError
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.torch.step_time import LayerAgain, StepTime, layers_again, step_time
from bridge_memory.speed.torch.work import layer_products
from bridge_memory.tapes.context import context_of

#: The one operation beside matrix products.
ATTENTION = "attention"


class Operation(NamedTuple):
    """An operation of the layers of one kind."""

    #: ``ATTENTION``, or the name of a matrix in the layer.
    name: str
    #: Of the layer's matrix products, which one it is; None: attention.
    product: int | None
    #: Numbers of the layers that have it.
    layers: tuple[int, ...]
    #: Of its output in one layer, and what running it again there takes for one microbatch.
    nbytes: int
    seconds: float


class Kept(NamedTuple):
    """An operation and in how many of its layers, the last ones, its output is kept."""

    operation: Operation
    number: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of these layers."""
        return self.operation.layers[len(self.operation.layers) - self.number :]


class Policy(NamedTuple):
    """What to keep."""

    #: The run with a checkpoint around every layer.
    run: RunSpec
    kept: tuple[Kept, ...]
    #: Of the run that keeps nothing, and an upper bound with what is kept.
    least: int
    peak: int
    #: Bytes that are free beside the peak and its margin, at least.
    headroom: int
    time: StepTime
    #: Of the run that keeps nothing.
    slowest: StepTime


def fit(run: RunSpec, hardware: Hardware, *, capacity: int, outside: Callable[[RunSpec], Range]) -> Policy | None:
    """The policy with the least recomputation that fits and keeps the reserve; None where no policy fits.

    Arguments as for ``search``. Raises SpecError for another engine or other layers than dense ones of transformers,
    and where scipy is not installed.
    """
    checkpointed = _checkpointed(run)
    limit = Limit(capacity, outside)
    slowest = step_time(checkpointed, hardware)
    (stage,) = peaks(checkpointed)
    keeps = Reserve(limit).kept

    def left(peak: int) -> int | None:
        """Bytes that are free; None where the reserve is not kept."""
        headroom = limit.headroom(checkpointed, peak).least
        return headroom if headroom >= 0 and keeps(Row(checkpointed, peak, 0, headroom, slowest)) else None

    if left(stage.peak_bytes) is None:
        return None
    low, high = stage.peak_bytes, capacity
    while high - low > 1:  # the highest peak that keeps the reserve
        middle = (low + high) // 2
        low, high = (middle, high) if left(middle) is not None else (low, middle)
    again = layers_again(checkpointed, hardware)
    operations = candidates(checkpointed, again)
    numbers = most_saved(operations, low - stage.peak_bytes)
    kept = tuple([Kept(o, n) for o, n in zip(operations, numbers, strict=True) if n])
    peak = stage.peak_bytes + sum(k.number * k.operation.nbytes for k in kept)
    headroom = left(peak)
    assert headroom is not None, "the integer program exceeds its bound"
    time = step_time(checkpointed, hardware, recomputation=_recomputation(checkpointed, again, kept))
    return Policy(checkpointed, kept, stage.peak_bytes, peak, headroom, time, slowest)


def most_saved(operations: Sequence[Operation], budget: int) -> tuple[int, ...]:
    """In how many layers to keep each operation, so that most seconds are saved within ``budget`` bytes."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise SpecError(
            "scipy is not installed, which chooses the operations to keep; pip install bridge-memory[solver]"
        ) from None
    if not operations:
        return ()
    if budget <= 0:
        return (0,) * len(operations)
    # In units that divide all of them, so that the solver's tolerance is less than one.
    unit = gcd(*(o.nbytes for o in operations))
    most = [len(o.layers) for o in operations]
    solved = milp(
        [-o.seconds for o in operations], integrality=[1] * len(operations), bounds=Bounds(0, most),
        constraints=LinearConstraint([[o.nbytes // unit for o in operations]], ub=budget // unit),
        options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    return tuple([round(number) for number in solved.x])


def _checkpointed(run: RunSpec) -> RunSpec:
    """The run with a checkpoint around every layer. Raises SpecError where operations cannot be chosen."""
    if (engine := run.data_parallel.engine) != "fsdp2":
        raise SpecError(
            f"engine ({engine}) has no policy of operations; use fsdp2, or `bridge-memory search --engine {engine} "
            "--vary checkpointing`"
        )
    i, hf = run.implementation, run.transformers
    if i.transformer_impl != "transformers":
        raise SpecError(f"transformer_impl ({i.transformer_impl}) has no policy of operations; use transformers")
    for name in ("torch_compile", "load_in_4bit", "load_in_8bit", "checkpoint_submodules"):
        if getattr(hf, name):
            raise SpecError(f"{name} (True) does not go with a policy of operations; drop it")
    if run.peft.freezes:
        raise SpecError(f"peft ({run.peft.scheme}) does not go with a policy of operations; drop it")
    for layer in dict.fromkeys(run.model.layers):
        if not isinstance(layer.mixer, AttentionSpec) or not isinstance(layer.ffn, MLPSpec):
            raise SpecError(f"model ({run.model.name}) has layers that are not dense; a policy of operations needs it")
    return run.with_fields(gradient_checkpointing=True, use_reentrant=False, selective_ac_option=None)


def candidates(run: RunSpec, again: Mapping[LayerSpec, LayerAgain]) -> list[Operation]:
    """Operations of a checkpointed run whose outputs can be kept."""
    ctx = context_of(run)
    hf = ctx.torch_layers
    assert hf is not None
    found = []
    for kind, seconds in again.items():
        layers = tuple([number for number, layer in enumerate(run.model.layers) if layer == kind])
        products = layer_products(run, kind)
        candidates = products if hf.family.norms[-1] else products[:-1]
        for number, (name, p) in enumerate(candidates):
            nbytes = int(p.rows) * p.columns * hf.compute_width
            found.append(Operation(name, number, layers, nbytes, seconds.products[name]))
        mixer = kind.mixer
        assert isinstance(mixer, AttentionSpec)
        if hf.attention == "sdpa" and hf.spec.sdpa_kernel != "math":
            # Its output, and the logarithm of every row's sum in fp32.
            nbytes = ctx.tokens * mixer.num_attention_heads * (mixer.value_channels * hf.compute_width + 4)
            found.append(Operation(ATTENTION, None, layers, nbytes, seconds.attention))
    return found


def _recomputation(run: RunSpec, again: Mapping[LayerSpec, LayerAgain], kept: Sequence[Kept]) -> float:
    """Seconds of what runs again of one microbatch."""
    there = {(layer, k.operation.name) for k in kept for layer in k.layers}
    total = 0.0
    for number, kind in enumerate(run.model.layers):
        of = again[kind]
        seconds = of.rest + sum(t for name, t in of.products.items() if (number, name) not in there)
        seconds += 0.0 if (number, ATTENTION) in there else of.attention
        total += max(seconds, of.host)
    return total
