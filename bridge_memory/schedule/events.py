"""Schedule events -> what is alive when: pipeline schedules followed event by event.

A schedule knows nothing of layers: a chunk (virtual stage) is three numbers. ``peak`` looks only at the moments that
can be the highest, and is held to the walk here.

Source: megatron-core ``pipeline_parallel/schedules.py``: ``get_pp_rank_microbatches`` (warm-up),
``get_schedule_table`` (order of an interleaved schedule), ``forward_backward_no_pipelining``,
``forward_backward_pipelining_without_interleaving`` (1F1B),
``forward_backward_pipelining_with_interleaving``, and ``combined_1f1b.py`` for
``overlap_moe_expert_parallel_comm`` (0.14 and later). The order of events is the same in 0.12 to 0.16.

Beside what chunks save, the schedules themselves hold hidden states of [s / cp (/ tp under SP), b, h]:
received inputs and output gradients that wait for their turn, an output that waits to be sent, gradients that
a Python name still holds. ``Moment.hidden`` counts them. What each schedule holds, read off the same
functions with ``deallocate_pipeline_outputs`` (which Megatron-LM sets, and most recipes of Megatron Bridge; without it
outputs are there until their backward pass is over, the fresh one among them, and chunks count them themselves; a name
holds the one that was used last in 1F1B's forward passes, and interleaved that of the last forward pass to the end):

* 1F1B: the sent input gradient of the last backward pass is held until the end of the next one, the received
  output gradient until the next is received; the input until the next forward pass has ended, by the graph of
  the output that ``output_tensor`` names.
* Interleaved: the received output gradient waits during the forward pass before its backward pass; the fresh
  output of a forward pass is freed only after the backward pass that follows; the sent input gradient is held
  as in 1F1B; with ``overlap_p2p_comm`` the next input is received during the backward pass, and the last input
  received in warm-up, with its gradient, is held by ``input_tensor`` to the end of the step. So is, but on the
  last rank, that of the last forward pass, by the graph of ``output_tensor``.
* Interleaved with a microbatch group larger than the pipeline: the first rank's inputs, and the last rank's
  output gradients, arrive early and wait.

Not in here, because a chunk's own cost holds them: the chunk's input (``input_tensors`` keeps it, as the
saved input of the chunk's first operation does) and the gradient of its output during its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import mul
from typing import NamedTuple


class Apart(NamedTuple):
    """A chunk in the parts that run one by one where two chunks are overlapped, in bytes of one microbatch."""

    #: Saved by what runs before its layers, and by what runs after them.
    before: int
    after: int
    #: The most that one layer needs in passing, beyond what it saves: forward, and backward.
    forward: int
    backward: int
    #: What layers that have run backward still hold until the chunk's forward and backward are over.
    held: int = 0


class ChunkCost(NamedTuple):
    """One virtual chunk of one stage, for one microbatch, in bytes.

    ``saved`` lives from its forward to its backward. ``forward_peak`` and ``backward_peak`` are the most
    alive during either pass of this chunk and microbatch, its own saved tensors included.

    ``saved`` includes the chunk's input where it came from another stage. ``backward_peak`` includes the
    gradient of the chunk's output, where it came from another stage to the end of the pass: ``backward_step``
    holds it. Without ``deallocate_pipeline_outputs``, ``saved`` includes the output too.
    """

    saved: int
    forward_peak: int
    backward_peak: int
    #: Asked for where chunks are overlapped; None: as if all of either pass may meet all of the other.
    apart: Apart | None = None


class Moment(NamedTuple):
    """What is alive on a rank while a pass runs.

    ``phase``: "forward", "backward" or, under ``overlap_moe_expert_parallel_comm``, "overlapped": ``chunk``
    runs backward while ``forward_chunk`` runs forward, layer by layer. ``alive[c]``: microbatches of chunk c
    whose saved tensors are alive, those that run included. ``hidden``: hidden states that the schedule holds
    beside them.
    """

    phase: str
    chunk: int
    alive: tuple[int, ...]
    hidden: int = 0
    forward_chunk: int = -1


class PeakMoment(NamedTuple):
    """The moment of most bytes, in bytes: ``bytes`` in all, of them ``hidden_bytes`` held by the schedule.

    ``alive`` times what the chunks save, and ``hidden_bytes``, leave what the running pass needs in passing. Under
    "overlapped", where two chunks trade places layer by layer, ``alive`` counts the one of the two that saves more.
    """

    phase: str
    chunk: int
    bytes: int
    alive: tuple[int, ...]
    hidden_bytes: int = 0
    #: Under "overlapped": the chunk that runs forward at the same time.
    forward_chunk: int = -1


def num_warmup(
    pp: int, rank: int, num_microbatches: int, v: int = 1, group: int | None = None, extra: bool = False
) -> int:
    """Forward passes (microbatch, chunk) before the first backward pass, less the one beside it.

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
    """(microbatch, chunk) of every forward pass in order: a group through chunk 0, then through chunk 1, ...

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
    """What is alive during every pass of one rank, in order. ``keeps_outputs``: chunks count theirs.

    ``overlap_p2p_comm`` says something only for interleaved schedules, where Megatron-LM and Megatron Bridge
    switch it on; ``overlap_p2p_comm_warmup_flush`` is not followed.
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
    inputs = 0  # received, waiting for their forward pass
    grads = 0  # received, waiting for their backward pass
    held_input_grad = 0  # sent, held by a name
    held_in_forward = 0  # 1F1B: the used output gradient, and the used input that the used output's graph holds
    # Pairs whose input a name keeps to the end, with its gradient, and how many of the two are kept by now.
    named: dict[tuple[int, int], int] = {}
    if interleaved and not last:
        named[order[-1]] = 0  # the graph of ``output_tensor``
    held_output = False  # that of the last forward pass, by ``output_tensor``
    # Likewise, pairs whose output gradient is kept.
    named_grads: dict[tuple[int, int], int] = {}
    slots = group - pp + 1 if overlap_p2p_comm else 1
    input_buffer: list[tuple[int, int] | None] = [None] * (slots if first else 1)
    grad_buffer: list[tuple[int, int] | None] = [None] * (slots if last else 1)

    def receives_input(x: int) -> bool:
        """``recv_tensor_from_previous_stage`` after forward pass x."""
        if x == total - 1:
            return False
        return not first or (x >= pp - 1 and table[x - (pp - 1)] != v - 1)

    def receives_grad(k: int) -> bool:
        """The same after backward pass k; the table tells the chunk from the other end."""
        if k == total - 1:
            return False
        return not last or (k >= pp - 1 and table[k - (pp - 1)] != v - 1)

    def next_chunk(x: int) -> tuple[int, int]:
        """The pair that what arrives after pass x at the leading rank is for, chunks counted in pass order."""
        microbatch, chunk = order[x - (pp - 1)]
        return microbatch, chunk + 1

    if interleaved and not first:
        inputs = 1
    for x in range(warmup):
        chunk = table[x]
        alive[chunk] += 1
        if interleaved and not (first and chunk == 0):
            inputs -= 1
        yield Moment("forward", chunk, tuple(alive), inputs)
        if interleaved and receives_input(x):
            inputs += 1
            if overlap_p2p_comm and x == warmup - 1:
                named[next_chunk(x) if first else order[warmup]] = 0  # ``input_tensor``
    if interleaved and not last:
        # With all microbatches in warm-up it is received later, but before the first backward pass all the
        # same.
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
                yield Moment("forward", forward_chunk, tuple(alive), hidden)
            if interleaved:
                fresh_output = int(not keeps_outputs and not (last and forward_chunk == v - 1))
                if overlap_p2p_comm and receives_input(x):
                    inputs += 1
        if interleaved and not (last and chunk == v - 1):
            grads -= 1
        # 1F1B: receiving the new output gradient lets go of the last one; the new one is the chunk's own.
        hidden = inputs + grads + held_input_grad + fresh_output + kept
        if extra and steady:
            yield Moment("overlapped", chunk, tuple(alive), hidden, forward_chunk)
        else:
            yield Moment("backward", chunk, tuple(alive), hidden)
        alive[chunk] -= 1
        held_input_grad = 0 if first and chunk == 0 else 1
        done = (order[k][0], chunk)
        for pair, n in named.items():
            if n or pair == done:
                named[pair] = min(2, n + 1)  # at first the gradient still counts as the sent one
        if done in named_grads:
            named_grads[done] = 1
        held_output = held_output or (keeps_outputs and interleaved and not last and done == order[-1])
        if interleaved:
            if steady and not overlap_p2p_comm and receives_input(x):
                inputs += 1
            if receives_grad(k):
                grads += 1
            if steady and overlap_p2p_comm:
                # The receive buffers: what is still in a slot when the steady state ends stays there.
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


def overlapped(f: ChunkCost, b: ChunkCost) -> int:
    """The most bytes that a forward pass of ``f`` and a backward pass of ``b`` beside it have of both.

    Layer by layer the saved tensors of one come as the other's go: the larger of the two is there. What comes after
    the layers runs backward before them, and forward after them, beside nothing of the other chunk but what came before
    its layers (``model_chunk_schedule_plan.py: TransformerModelChunkSchedulePlan.run``).
    """
    if f.apart is None or b.apart is None:
        return f.forward_peak + b.backward_peak - min(f.saved, b.saved)
    layers = max(f.saved - f.apart.after, b.saved - b.apart.after) + f.apart.forward + b.apart.backward
    return max(
        b.backward_peak + f.apart.before, layers + b.apart.held, f.forward_peak + b.apart.before + b.apart.held
    )


def highest(moments: Iterable[Moment], chunks: Sequence[ChunkCost], hidden_bytes: int) -> PeakMoment:
    """The moment of most bytes; of equal ones the first."""
    saved, forward, backward, _ = zip(*chunks, strict=True)
    largest = max(saved)
    most, peak = -1, None
    for moment in moments:
        phase, chunk, alive, hidden, forward_chunk = moment
        n = hidden * hidden_bytes
        if phase == "backward":
            n += backward[chunk] - saved[chunk]
        elif phase == "forward":
            n += forward[chunk] - saved[chunk]
        else:
            n += overlapped(chunks[forward_chunk], chunks[chunk]) - saved[forward_chunk] - saved[chunk]
        if n + sum(alive) * largest <= most:
            continue  # Not even where every chunk saves the most that one does.
        n += sum(map(mul, alive, saved))
        if n > most:
            most, peak = n, moment
    assert peak is not None, "a schedule without events"
    counted = peak.alive
    if peak.phase == "overlapped":
        less = min(peak.chunk, peak.forward_chunk, key=lambda c: saved[c])
        counted = tuple([n - (c == less) for c, n in enumerate(counted)])
    return PeakMoment(peak.phase, peak.chunk, most, counted, peak.hidden * hidden_bytes, peak.forward_chunk)
