"""What a reduction of DeepSpeed's ZeRO-1 and 2 makes, and when: parameter by parameter gradients fill a bucket, and the
one that does not fit any more has it reduced first.

With ``contiguous_gradients`` they are copied into a flat buffer and leave their own tensors, but for one that is larger
than the buffer; without, all stay in tensors of their own. Slices of several partitions are joined anew, cast where the
dtype of communication is another, and what belongs to this rank is copied out.

Source: deepspeed 0.19.8 ``runtime/zero/stage_1_and_2.py: reduce_independent_p_g_buckets_and_remove_grads,
reduce_ipg_grads, average_tensor, gradient_reduction_w_predivide, allreduce_bucket, copy_grads_in_partition,
_add_to_grad_partition_buffer, buffered_reduce_fallback``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bridge_memory.engines.torch_modules import rounded
from bridge_memory.spec import RunSpec


class Flat(NamedTuple):
    """The trained parameters of a model, one after the other, in elements."""

    numel: int
    padded: int
    #: Of one partition. Of the fullest rank's: the parameters that lie in it wholly or in part, and the largest part of
    #: one parameter; and which rank that is.
    partition: int
    touched: int
    largest: int
    fullest: int
    frozen_bytes: int

    def own_part(self, start: int, numel: int) -> int:
        """Elements of a parameter at ``start`` that lie in the fullest rank's partition."""
        low = self.fullest * self.partition
        return max(0, min(start + numel, low + self.partition) - max(start, low))

    def parts(self, start: int, numel: int) -> int:
        """How many partitions share it."""
        return (start + numel - 1) // self.partition - start // self.partition + 1


class Widths(NamedTuple):
    """Bytes of an element."""

    gradient: int
    communicated: int
    #: Gradients of the partition are fp32 though the others are not, and reductions are added to them.
    compact: bool


class Gradient(NamedTuple):
    """One that takes part in a reduction, in elements."""

    place: int
    start: int
    numel: int


class Reduction(NamedTuple):
    """One reduction, in bytes."""

    #: Of the module whose gradient had it happen, and that gradient; -1 once all are there.
    place: int
    trigger: int
    #: Gradients of it that are in tensors of their own.
    waiting: int
    #: What it makes.
    copied: int
    #: Whether some of it is this rank's.
    own: bool
    #: Gradients in tensors of their own that stay after it, since they are this rank's.
    kept: int
    #: Elements that were taken up before it, and by it.
    elements: int


class Replay(NamedTuple):
    """The reductions of one backward pass."""

    reductions: list[Reduction]
    #: Bytes of gradients in tensors of their own that wait for a reduction when a place begins.
    pending: dict[int, int]


def contiguous(run: RunSpec) -> bool:
    """Whether gradients are copied into a buffer; always where the optimizer is on the host
    (``DeepSpeedZeroOptimizer.__init__``)."""
    return run.deepspeed.contiguous_gradients or run.deepspeed.offload_optimizer_device != "none"


def replay(run: RunSpec, flat: Flat, widths: Widths, gradients: Iterable[Gradient]) -> Replay:
    """All of one backward pass, in order; ``gradients`` in the order in which they come."""
    z = run.deepspeed
    found: list[Reduction] = []
    pending: dict[int, int] = {}
    bucket: list[Gradient] = []
    elements = done = 0

    def alone() -> int:
        of_their_own = not contiguous(run) or elements > z.reduce_bucket_size
        return sum(rounded(g.numel * widths.gradient) for g in bucket) if of_their_own else 0

    def reduce(place: int, trigger: int) -> None:
        waiting = alone()
        parts = [flat.own_part(g.start, g.numel) for g in bucket]
        own = z.round_robin_gradients or any(parts)
        kept = 0
        if not contiguous(run) and not widths.compact:
            kept = sum(rounded(g.numel * widths.gradient) for g, n in zip(bucket, parts, strict=True) if n)
        largest = max(parts) if any(parts) or not own else max(min(g.numel, flat.partition) for g in bucket)
        copied = _copied(run, flat, widths, bucket, elements, largest)
        found.append(Reduction(place, trigger, waiting, copied, own, kept, done))

    for g in gradients:
        if g.place not in pending:
            pending[g.place] = alone()
        if elements and elements + g.numel > z.reduce_bucket_size:
            reduce(g.place, rounded(g.numel * widths.gradient))
            bucket, elements = [], 0
        bucket.append(g)
        elements, done = elements + g.numel, done + g.numel
    if elements:
        reduce(-1, 0)
    return Replay(found, pending)


def _copied(
    run: RunSpec, flat: Flat, widths: Widths, bucket: list[Gradient], elements: int, largest: int
) -> int:  # fmt: skip
    """Bytes: the joined gradients and their cast; then, in place of the first, what is added in fp32."""
    z = run.deepspeed
    cast = rounded(elements * widths.communicated) if widths.communicated != widths.gradient else 0
    if not contiguous(run):
        slices = len(bucket)
    elif not z.reduce_scatter:
        slices = 1
    else:
        first, last = bucket[0], bucket[-1]
        low, high = min(first.start, last.start), max(first.start + first.numel, last.start + last.numel)
        slices = flat.parts(low, high - low)
        if widths.compact:
            slices = max(slices, len(bucket))
    joined = rounded(elements * widths.gradient) if slices > 1 else 0
    added = rounded(largest * 4) if widths.compact and widths.communicated != 4 else 0
    return max(joined + cast, (cast or joined) + added)
