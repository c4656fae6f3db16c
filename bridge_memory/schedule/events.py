"""Pipeline schedules followed event by event: which microbatches are alive when.

A schedule does not depend on layers: a chunk (virtual stage) is three numbers of bytes. ``peak`` examines only moments
that can be the peak, and is tested against ``walk`` here.

Source: megatron-core ``pipeline_parallel/schedules.py``: ``get_pp_rank_microbatches`` (warm-up),
``get_schedule_table`` (order of an interleaved schedule), ``forward_backward_no_pipelining``,
``forward_backward_pipelining_without_interleaving`` (1F1B),
``forward_backward_pipelining_with_interleaving``, and ``combined_1f1b.py`` for
``overlap_moe_expert_parallel_comm`` (0.14 and later). The order of events is the same in 0.12 to 0.16.

In addition to what chunks save, the schedules hold hidden states of [s / cp (/ tp under SP), b, h]: received inputs and
output gradients that wait for their turn, an output that waits to be sent, gradients that a Python variable still
refers to. ``Moment.hidden`` counts them.

The list below is of the same functions with ``deallocate_pipeline_outputs``, which Megatron-LM sets, and most recipes
of Megatron Bridge. Without it outputs stay until their backward pass is over, the newest included, and chunks count
them themselves; in addition a variable holds the output used last in 1F1B's forward passes, and with interleaving that
of the last forward pass until the end of the step.

* 1F1B: the sent input gradient of the last backward pass is held until the end of the next one; the received output
  gradient until the next is received; the input until the next forward pass has ended, by the graph of the output to
  which ``output_tensor`` refers.
* Interleaved: the received output gradient waits during the forward pass before its backward pass; the new output of a
  forward pass is freed only after the backward pass that follows; the sent input gradient is held as in 1F1B. With
  ``overlap_p2p_comm`` the next input is received during the backward pass, and ``input_tensor`` holds the last input
  received in warm-up, with its gradient, until the end of the step. Except on the last rank, the graph of
  ``output_tensor`` likewise holds the input of the last forward pass.
* Interleaved with a microbatch group larger than the pipeline: the first rank's inputs, and the last rank's
  output gradients, arrive early and wait.

Not counted here but in a chunk's own cost: the chunk's input (``input_tensors`` holds it, as the saved input of the
chunk's first operation does) and the gradient of its output during its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import add, mul
from typing import Any, NamedTuple

#: The larger, or the smaller, of two numbers.
OfTwo = Callable[[Any, Any], Any]


class LayerTurns(NamedTuple):
    """Equal layers in a row, which an overlapped schedule runs node by node, in bytes of one microbatch."""

    number: int
    saved: int
    forward_peak: int
    backward_peak: int
    #: The most alive of one of them at each turn of two layers, if it runs forward, and if it runs backward.
    forward: tuple[int, ...]
    backward: tuple[int, ...]


class OverlapCost(NamedTuple):
    """The parts of a chunk that run separately when two chunks are overlapped, in bytes of one microbatch."""

    #: Saved by the blocks before its layers.
    before: int
    #: Alive when these have run forward, and when everything after them has run backward.
    entering: int
    leaving: int
    #: The most alive while they run, with what they saved: forward, and backward.
    forward_before: int
    backward_before: int
    layers: tuple[LayerTurns, ...]
    #: Held by layers that have run backward, until the chunk's forward and backward are over.
    held: int = 0


class ChunkCost(NamedTuple):
    """One virtual chunk of one stage, for one microbatch, in bytes.

    ``saved`` is alive from its forward to its backward. ``forward_peak`` and ``backward_peak`` are the most alive
    during each pass of this chunk and microbatch, its saved tensors included.

    ``saved`` includes an input that was received from another stage. ``backward_peak`` includes the gradient of the
    chunk's output; one that was received is alive until the end of the pass, since ``backward_step`` holds it. Without
    ``deallocate_pipeline_outputs``, ``saved`` includes the output too.
    """

    saved: int
    forward_peak: int
    backward_peak: int
    #: Used if chunks are overlapped. None: assume that the peak of either pass can coincide with that of the other.
    overlap: OverlapCost | None = None
    #: Alive from its backward pass until its next forward pass, of any microbatch; while it runs itself the peaks count
    #: it. Recomputed MoE layers leave this many (``token_dispatcher.py``: the graph of ``self.probs``).
    carried_over: int = 0


class Moment(NamedTuple):
    """What is alive on a rank while a pass runs.

    ``phase``: "forward", "backward" or, under ``overlap_moe_expert_parallel_comm``, "overlapped": ``chunk`` runs
    backward while ``forward_chunk`` runs forward, layer by layer. ``alive[c]``: number of microbatches of chunk c whose
    saved tensors are alive, the running ones included. ``hidden``: number of hidden states that the schedule holds in
    addition. ``carrying[c]``: 1 if chunk c does not run and its last pass, in this step or the one before, was
    backward.
    """

    phase: str
    chunk: int
    alive: tuple[int, ...]
    hidden: int = 0
    forward_chunk: int = -1
    carrying: tuple[int, ...] = ()


class PeakMoment(NamedTuple):
    """The peak of a rank: ``bytes`` in total, of which the schedule holds ``hidden_bytes``.

    The remainder of ``bytes``, after ``hidden_bytes`` and ``alive`` times what the chunks save, is temporary memory of
    the running pass, and what other chunks carry over. In phase "overlapped", while one chunk's saved tensors replace
    the other's layer by layer, ``alive`` counts only the chunk that saves more.
    """

    phase: str
    chunk: int
    bytes: int
    alive: tuple[int, ...]
    hidden_bytes: int = 0
    #: In phase "overlapped": the chunk that runs forward at the same time.
    forward_chunk: int = -1


def num_warmup(
    pp: int, rank: int, num_microbatches: int, v: int = 1, group: int | None = None, extra: bool = False
) -> int:
    """Number of warm-up forward passes (microbatch, chunk): those before the first pair of forward and backward.

    ``group``: microbatch_group_size_per_vp_stage (None: ``pp``); ``extra``: overlap_moe_expert_parallel_comm.
    Source: ``get_pp_rank_microbatches``; ``combined_1f1b_schedule_for_no_pipelining`` for ``pp`` 1.
    """
    if pp == 1:
        warmup = 1 if extra else 0
    elif v == 1:
        warmup = pp - rank - 1
    else:
        warmup = (pp - rank - 1) * 2 + (v - 1) * (group or pp) + (1 if extra else 0)
    return min(warmup, num_microbatches * v)


def schedule_table(num_microbatches: int, v: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of every forward pass, in order: a group through chunk 0, then through chunk 1, ...

    Source: ``get_schedule_table``.
    """
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group)
        for chunk in range(v)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]


def walk(
    pp: int,
    rank: int,
    num_microbatches: int,
    v: int = 1,
    group: int | None = None,
    extra: bool = False,
    overlap_p2p_comm: bool = True,
    keeps_outputs: bool = False,
) -> Iterator[Moment]:
    """What is alive during every pass of one rank, in order. ``keeps_outputs``: chunks count the outputs that they
    send.

    ``overlap_p2p_comm`` only affects interleaved schedules, for which Megatron-LM and Megatron Bridge switch it on;
    ``overlap_p2p_comm_warmup_flush`` is not modelled.
    """
    group = group or pp
    first, last = rank == 0, rank == pp - 1
    interleaved = pp > 1 and v > 1
    order = schedule_table(num_microbatches, v, group)
    table = [chunk for _, chunk in order]
    total = len(table)
    warmup = num_warmup(pp, rank, num_microbatches, v, group, extra)
    steady_passes = total - warmup
    alive = [0] * v
    carries = [1] * v
    inputs = 0  # received, waiting for their forward pass
    grads = 0  # received, waiting for their backward pass
    held_input_grad = 0  # sent, held by a variable
    held_in_forward = 0  # 1F1B: the used output gradient, and the used input that the used output's graph holds
    # Pairs whose input a variable keeps to the end, with its gradient, and how many of the two are kept by now.
    named: dict[tuple[int, int], int] = {}
    if interleaved and not last:
        named[order[-1]] = 0  # the graph of ``output_tensor``
    held_output = False  # the last forward pass's output, which ``output_tensor`` refers to
    # Likewise, pairs whose output gradient is kept.
    named_grads: dict[tuple[int, int], int] = {}
    slots = group - pp + 1 if overlap_p2p_comm else 1
    input_buffer: list[tuple[int, int] | None] = [None] * (slots if first else 1)
    grad_buffer: list[tuple[int, int] | None] = [None] * (slots if last else 1)

    def carrying(*running: int) -> tuple[int, ...]:
        return tuple([0 if c in running else n for c, n in enumerate(carries)])

    def receives_input(x: int) -> bool:
        """Whether an input is received after forward pass x (``recv_tensor_from_previous_stage``)."""
        if x == total - 1:
            return False
        return not first or (x >= pp - 1 and table[x - (pp - 1)] != v - 1)

    def receives_grad(k: int) -> bool:
        """Whether an output gradient is received after backward pass k; chunks are counted from the last."""
        if k == total - 1:
            return False
        return not last or (k >= pp - 1 and table[k - (pp - 1)] != v - 1)

    def next_chunk(x: int) -> tuple[int, int]:
        """The (microbatch, chunk) for which the leading rank receives something after pass x; chunks in pass order."""
        microbatch, chunk = order[x - (pp - 1)]
        return microbatch, chunk + 1

    if interleaved and not first:
        inputs = 1
    for x in range(warmup):
        chunk = table[x]
        alive[chunk] += 1
        if interleaved and not (first and chunk == 0):
            inputs -= 1
        yield Moment("forward", chunk, tuple(alive), inputs, carrying=carrying(chunk))
        carries[chunk] = 0
        if interleaved and receives_input(x):
            inputs += 1
            if overlap_p2p_comm and x == warmup - 1:
                named[next_chunk(x) if first else order[warmup]] = 0  # ``input_tensor``
    if interleaved and not last:
        # With all microbatches in warm-up it is received later, but still before the first backward pass.
        grads = 1
    for k in range(total):
        x = warmup + k
        steady = x < total
        chunk = v - 1 - table[k]
        forward_chunk, fresh_output = -1, 0
        kept = sum(named.values()) + sum(named_grads.values()) + held_output
        if steady:
            forward_chunk = table[x]
            alive[forward_chunk] += 1
            if interleaved and not (first and forward_chunk == 0):
                inputs -= 1
            if not extra:
                hidden = inputs + grads + held_input_grad + held_in_forward + kept
                yield Moment("forward", forward_chunk, tuple(alive), hidden, carrying=carrying(forward_chunk))
                carries[forward_chunk] = 0
            if interleaved:
                fresh_output = int(not keeps_outputs and not (last and forward_chunk == v - 1))
                if overlap_p2p_comm and receives_input(x):
                    inputs += 1
        if interleaved and not (last and chunk == v - 1):
            grads -= 1
        # 1F1B: receiving the new output gradient frees the last one; the chunk counts the new one.
        hidden = inputs + grads + held_input_grad + fresh_output + kept
        if extra and steady:
            yield Moment("overlapped", chunk, tuple(alive), hidden, forward_chunk, carrying(chunk, forward_chunk))
            carries[forward_chunk] = 0
        else:
            yield Moment("backward", chunk, tuple(alive), hidden, carrying=carrying(chunk))
        alive[chunk] -= 1
        carries[chunk] = 1
        held_input_grad = 0 if first and chunk == 0 else 1
        done = (order[k][0], chunk)
        for pair, n in named.items():
            if n or pair == done:
                named[pair] = min(2, n + 1)  # at first the gradient is still counted as the sent one
        if done in named_grads:
            named_grads[done] = 1
        held_output = held_output or (keeps_outputs and interleaved and not last and done == order[-1])
        if interleaved:
            if steady and not overlap_p2p_comm and receives_input(x):
                inputs += 1
            if receives_grad(k):
                grads += 1
            if steady and overlap_p2p_comm:
                # The receive buffers: a tensor that is still in a slot when the steady state ends stays there.
                for buffer, i, received, leads in (
                    (input_buffer, x, receives_input(x), first),
                    (grad_buffer, k, receives_grad(k), last),
                ):
                    buffer[i % len(buffer)] = next_chunk(i) if received and leads else None
                    if received:
                        buffer[(i + 1) % len(buffer)] = None
            if k == steady_passes - 1:
                named.update({pair: 0 for pair in input_buffer if pair and pair not in named})
                named_grads = {(n, v - 1 - c): 0 for n, c in filter(None, grad_buffer)}
        else:
            held_in_forward = (not last) * (1 + keeps_outputs) + (not first)


def overlapped(f: ChunkCost, b: ChunkCost, most: OfTwo = max, least: OfTwo = min) -> Any:
    """The most bytes of both chunks while ``f`` runs forward and ``b`` backward, overlapped. ``most``, ``least``: of
    two; for arrays those of numpy.

    Blocks after the layers run backward before the layers, and forward after them; of the other chunk only what enters
    or leaves its layers is alive then. Blocks before the layers run forward first and backward last: all that the
    other chunk saved is alive then (``model_chunk_schedule_plan.py: TransformerModelChunkSchedulePlan.run``).
    """
    if f.overlap is None or b.overlap is None:
        return f.forward_peak + b.backward_peak - least(f.saved, b.saved)
    last = most(f.forward_peak + b.overlap.leaving, f.saved + b.overlap.backward_before)
    first = most(f.overlap.forward_before + b.saved, f.overlap.entering + b.backward_peak)
    layers = f.overlap.before + b.overlap.before + _in_turns(f.overlap.layers, b.overlap.layers, most)
    return most(first, most(layers, last) + b.overlap.held)


def _in_turns(f: Sequence[LayerTurns], b: Sequence[LayerTurns], most: OfTwo) -> Any:
    """The most bytes of two chunks' layers, while those of ``f`` run forward, from the first on, and those of ``b``
    backward, from the last on, two at a time. Of equal layers in a row it is the first or the last."""
    forward, backward = list(f), list(b)[::-1]
    saved, left, highest = 0, sum([layers.number * layers.saved for layers in b]), 0
    while forward and backward:
        one, other = forward[0], backward[0]
        number = min(one.number, other.number)
        both = reduce(most, map(add, one.forward, other.backward)) - other.saved
        highest = most(highest, saved + left + both)
        saved, left = saved + number * one.saved, left - number * other.saved
        highest = most(highest, saved - one.saved + left + other.saved + both)
        for layers, rest in ((forward, one), (backward, other)):
            layers[:1] = [rest._replace(number=rest.number - number)] if rest.number > number else []
    for other in backward:
        highest = most(highest, saved + left - other.saved + other.backward_peak)
        left = left - other.number * other.saved
    for one in forward:
        saved = saved + one.number * one.saved
        highest = most(highest, saved - one.saved + one.forward_peak)
    return highest


def highest(moments: Iterable[Moment], chunks: Sequence[ChunkCost], hidden_bytes: int) -> PeakMoment:
    """The moment with the most bytes, the first of equals."""
    saved, forward, backward, _, carried = zip(*chunks, strict=True)
    largest = max(saved)
    most, peak = -1, None
    pairs: dict[tuple[int, int], int] = {}
    for moment in moments:
        phase, chunk, alive, hidden, forward_chunk, carrying = moment
        n = hidden * hidden_bytes + sum(map(mul, carrying, carried))
        if phase == "backward":
            n += backward[chunk] - saved[chunk]
        elif phase == "forward":
            n += forward[chunk] - saved[chunk]
        else:
            both = pairs.get((forward_chunk, chunk))
            if both is None:
                both = pairs[forward_chunk, chunk] = overlapped(chunks[forward_chunk], chunks[chunk])
            n += both - saved[forward_chunk] - saved[chunk]
        if n + sum(alive) * largest <= most:
            continue  # even if every chunk saved as much as the largest
        n += sum(map(mul, alive, saved))
        if n > most:
            most, peak = n, moment
    assert peak is not None, "a schedule without events"
    counted = peak.alive
    if peak.phase == "overlapped":
        less = min(peak.chunk, peak.forward_chunk, key=lambda c: saved[c])
        counted = tuple([n - (c == less) for c, n in enumerate(counted)])
    return PeakMoment(peak.phase, peak.chunk, most, counted, peak.hidden * hidden_bytes, peak.forward_chunk)
