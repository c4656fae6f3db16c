"""Schedule events -> what is alive when -> the peak, and in which phase.

The timeline knows pipeline schedules and nothing of layers: a chunk (virtual stage) is three numbers.

Two methods with one answer: ``walk`` follows megatron-core's schedule event by event, ``dynamic_peak`` looks
only at the moments that can be the peak and keeps them per schedule, so that a search pays a few
multiplications.

Source: megatron-core ``pipeline_parallel/schedules.py``: ``get_pp_rank_microbatches`` (warm-up),
``get_schedule_table`` (order of an interleaved schedule), ``forward_backward_no_pipelining``,
``forward_backward_pipelining_without_interleaving`` (1F1B),
``forward_backward_pipelining_with_interleaving``, and ``combined_1f1b.py`` for
``overlap_moe_expert_parallel_comm`` (0.14 and later). The order of events is the same in 0.12 to 0.16.

Beside what chunks save, the schedules themselves hold hidden states of [s / cp (/ tp under SP), b, h]:
received inputs and output gradients that wait for their turn, an output that waits to be sent, gradients that
a Python name still holds. ``Moment.hidden`` counts them. What each schedule holds, read off the same
functions with ``deallocate_pipeline_outputs`` (which Megatron-LM and Megatron Bridge both set):

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
from functools import lru_cache
from operator import mul, sub
from typing import NamedTuple


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


class Event(NamedTuple):
    """One pass of one microbatch through one chunk. ``phase`` is "forward" or "backward"."""

    phase: str
    microbatch: int
    chunk: int


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


def in_flight(
    pp: int, rank: int, num_microbatches: int, v: int = 1, group: int | None = None, extra: bool = False
) -> int:
    """The most (microbatch, chunk) pairs alive at once on a rank: min(p - r, m) under 1F1B."""
    return min(num_warmup(pp, rank, num_microbatches, v, group, extra) + 1, num_microbatches * v)


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


def schedule_events(
    pp: int, rank: int, num_microbatches: int, v: int = 1, group: int | None = None, extra: bool = False
) -> list[Event]:
    """Every pass of one rank in order: warm-up, one forward and one backward in turn, cool-down."""
    table = schedule_table(num_microbatches, v, group or pp)
    warmup = num_warmup(pp, rank, num_microbatches, v, group, extra)
    forward = [Event("forward", m, c) for m, c in table]
    # Backward passes take chunks in reverse; within a chunk, microbatches come in order (a queue).
    backward = [Event("backward", m, v - 1 - c) for m, c in table]
    events = forward[:warmup]
    for f, b in zip(forward[warmup:], backward, strict=False):
        events += (f, b)
    return events + backward[len(forward) - warmup :]


# --------------------------------------------------------------------------------------------------
# Event by event
# --------------------------------------------------------------------------------------------------


def walk(
    pp: int,
    rank: int,
    num_microbatches: int,
    v: int = 1,
    group: int | None = None,
    extra: bool = False,
    overlap_p2p_comm: bool = True,
) -> Iterator[Moment]:
    """What is alive during every pass of one rank, in order.

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
        kept = sum(named.values()) + sum(named_grads.values())
        if steady:
            forward_chunk = table[x]
            alive[forward_chunk] += 1
            if interleaved and not (first and forward_chunk == 0):
                inputs -= 1
            if not extra:
                hidden = inputs + grads + held_input_grad + held_in_forward + kept
                yield Moment("forward", forward_chunk, tuple(alive), hidden)
            if interleaved:
                fresh_output = 0 if last and forward_chunk == v - 1 else 1
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
            held_in_forward = (not last) + (not first)


def walked_peak(
    pp: int,
    rank: int,
    num_microbatches: int,
    chunks: Sequence[ChunkCost],
    group_size: int | None = None,
    *,
    hidden_bytes: int = 0,
    overlap_moe_expert_parallel_comm: bool = False,
    overlap_p2p_comm: bool = True,
) -> PeakMoment:
    """``dynamic_peak`` by the walk over every event: slow, and the truth that the closed form is held to."""
    moments = walk(
        pp,
        rank,
        num_microbatches,
        len(chunks),
        group_size,
        overlap_moe_expert_parallel_comm,
        overlap_p2p_comm,
    )
    return _most(moments, chunks, hidden_bytes)


def _most(moments: Iterable[Moment], chunks: Sequence[ChunkCost], hidden_bytes: int) -> PeakMoment:
    """The moment of most bytes; of equal ones the first."""
    saved = [c.saved for c in chunks]
    forward = [c.forward_peak - c.saved for c in chunks]
    backward = [c.backward_peak - c.saved for c in chunks]
    most, peak = -1, None
    for moment in moments:
        phase, chunk, alive, hidden, forward_chunk = moment
        n = sum(map(mul, alive, saved)) + hidden * hidden_bytes
        if phase == "backward":
            n += backward[chunk]
        elif phase == "forward":
            n += forward[chunk]
        else:
            # Layer by layer one chunk's saved tensors come as the other's go: the larger of the two is there.
            n += forward[forward_chunk] + backward[chunk] - min(saved[forward_chunk], saved[chunk])
        if n > most:
            most, peak = n, moment
    assert peak is not None, "a schedule without events"
    counted = list(peak.alive)
    if peak.phase == "overlapped":
        counted[min(peak.chunk, peak.forward_chunk, key=lambda c: saved[c])] -= 1
    return PeakMoment(peak.phase, peak.chunk, most, tuple(counted), peak.hidden * hidden_bytes, peak.forward_chunk)


# --------------------------------------------------------------------------------------------------
# Closed form
# --------------------------------------------------------------------------------------------------


def dynamic_peak(
    pp: int,
    rank: int,
    num_microbatches: int,
    chunks: Sequence[ChunkCost],
    group_size: int | None = None,
    *,
    hidden_bytes: int = 0,
    overlap_moe_expert_parallel_comm: bool = False,
    overlap_p2p_comm: bool = True,
) -> PeakMoment:
    """The most activation bytes alive on one pipeline rank during forward and backward passes, and when.

    ``chunks``: one cost a virtual stage of this rank, in order. ``group_size``:
    microbatch_group_size_per_vp_stage (None: ``pp``, megatron-core's default). ``hidden_bytes``: one hidden
    state as it travels between stages, 2 s b h / cp, over tp too under sequence parallelism (bf16).
    """
    v, m, group = len(chunks), num_microbatches, group_size or pp
    # More groups repeat the same round: warm-up and cool-down are over within two each, and between them every round
    # is like the last.
    if v == 1 or pp == 1:
        m = min(m, pp + 2)
    elif m >= 7 * group:
        m = 6 * group + m % group
    moments = _moments(pp, rank, m, v, group, overlap_moe_expert_parallel_comm, overlap_p2p_comm)
    return _most(moments, chunks, hidden_bytes)


@lru_cache(maxsize=8192)
def _moments(pp: int, rank: int, m: int, v: int, group: int, extra: bool, overlap_p2p_comm: bool) -> tuple[Moment, ...]:
    """The moments of a schedule of which one is the peak, whatever chunks cost."""
    if pp == 1 or v == 1:
        moments = _moments_of_1f1b(pp, rank, m, v, extra)
    else:
        moments = _Interleaved(pp, rank, m, v, group, extra, overlap_p2p_comm).moments()
    return _undominated(moments)


def _undominated(moments: list[Moment]) -> tuple[Moment, ...]:
    """Without those that another of the same kind holds at least as much of everything as."""
    kinds: dict[tuple[str, int, int], list[Moment]] = {}
    for moment in dict.fromkeys(moments):
        kinds.setdefault((moment.phase, moment.chunk, moment.forward_chunk), []).append(moment)
    out = []
    for same in kinds.values():
        same.sort(key=lambda n: (-sum(n.alive), -n.hidden))
        kept: list[Moment] = []
        for n in same:
            if not any(
                k.hidden >= n.hidden and all(a >= b for a, b in zip(k.alive, n.alive, strict=True)) for k in kept
            ):
                kept.append(n)
        out += kept
    return tuple(out)


def _moments_of_1f1b(pp: int, rank: int, m: int, v: int, extra: bool) -> list[Moment]:
    """No pipelining, and 1F1B: the number alive rises to warm-up + 1, stays, and falls."""
    if v > 1:
        raise ValueError("virtual stages need a pipeline")
    warmup = num_warmup(pp, rank, m, 1, None, extra)
    steady = m - warmup
    received, sent = int(rank > 0), int(rank < pp - 1)
    out = []
    if warmup:
        out.append(Moment("forward", 0, (warmup,)))
    for k in (0, 1):
        if k < steady:
            held = k * received
            if extra:
                out.append(Moment("overlapped", 0, (warmup + 1,), held, 0))
            else:
                out.append(Moment("forward", 0, (warmup + 1,), held + k * (received + sent)))
                out.append(Moment("backward", 0, (warmup + 1,), held))
    for k in (steady, steady + 1):
        if k < m:
            out.append(Moment("backward", 0, (m - k,), received if k else 0))
    return out


class _Interleaved:
    """An interleaved schedule as counts: how many of the first x passes are of chunk c.

    Between two passes at which a chunk begins or ends its turn (in forward or in backward, or p - 1 passes
    earlier, where early arrivals come from) all counts grow by the same step a pass, and bytes with them: the
    peak is at either end of such a stretch. Once warm, a round of one whole group is like the last.
    """

    def __init__(self, pp: int, rank: int, m: int, v: int, group: int, extra: bool, overlap_p2p: bool) -> None:
        self.pp, self.v, self.group, self.m = pp, v, group, m
        self.extra, self.overlap_p2p = extra, overlap_p2p
        self.first, self.last = rank == 0, rank == pp - 1
        whole, self.rest = divmod(m, group)
        self.whole = whole * group * v  # passes in whole groups
        self.whole_microbatches = whole * group
        self.total = m * v
        self.warmup = num_warmup(pp, rank, m, v, group, extra)
        self._counts: dict[int, tuple[int, ...]] = {}
        self.kept_inputs, self.kept_grads = self._kept()

    def done(self, x: int, chunk: int) -> int:
        """Of the first x forward passes, those of ``chunk``; of x backward ones, of ``v - 1 - chunk``."""
        if x <= self.whole:
            groups, i = divmod(x, self.group * self.v)
            return groups * self.group + min(max(i - chunk * self.group, 0), self.group)
        return self.whole_microbatches + min(max(x - self.whole - chunk * self.rest, 0), self.rest)

    def chunk(self, x: int) -> int:
        """The chunk of forward pass x."""
        if x < self.whole:
            return x % (self.group * self.v) // self.group
        return (x - self.whole) // self.rest

    def counts(self, x: int) -> tuple[int, ...]:
        """``done(x, chunk)`` of every chunk."""
        known = self._counts.get(x)
        if known is None:
            if x <= self.whole:
                groups, i = divmod(x, self.group * self.v)
                begun, size = groups * self.group, self.group
            else:
                begun, size, i = self.whole_microbatches, self.rest, x - self.whole
            full, part = divmod(i, size)
            known = (begun + size,) * full
            if full < self.v:
                known += (begun + part, *(begun,) * (self.v - full - 1))
            self._counts[x] = known
        return known

    def alive(self, forwards: int, backwards: int) -> tuple[int, ...]:
        return tuple(map(sub, self.counts(forwards), self.counts(backwards)[::-1]))

    def waiting(self, received: int, used: int) -> int:
        """Early arrivals at the leading rank, after ``received`` and ``used`` passes.

        Every pass but those of the last chunk sends something that arrives p - 1 passes later; every pass but
        those of the first chunk uses one.
        """
        sent = max(0, received - (self.pp - 1))
        return sent - self.done(sent, self.v - 1) - (used - self.done(used, 0))

    def inputs(self, x: int, *, after: bool) -> int:
        """Inputs that wait during forward pass x, or after it and its receive."""
        if self.first:
            return self.waiting(x + after, x + 1)
        return int(after and x < self.total - 1)

    def grads(self, k: int, *, during_forward: bool) -> int:
        """Output gradients that wait before backward pass k, or during it."""
        if self.last:
            return self.waiting(k, k + (not during_forward))
        return int(during_forward)

    def held_input_grad(self, k: int) -> int:
        return int(k > 0 and not (self.first and self.chunk(k - 1) == self.v - 1))

    def _at(self, microbatch: int, chunk: int) -> int:
        """Which forward pass (microbatch, chunk) is; which backward pass (microbatch, v - 1 - chunk) is."""
        if microbatch < self.whole_microbatches:
            groups, i = divmod(microbatch, self.group)
            return (groups * self.v + chunk) * self.group + i
        return self.whole + chunk * self.rest + microbatch - self.whole_microbatches

    def _microbatch(self, x: int) -> int:
        if x < self.whole:
            return x // (self.group * self.v) * self.group + x % self.group
        return self.whole_microbatches + (x - self.whole) % self.rest

    def _kept(self) -> tuple[list[int], list[int]]:
        """The backward passes after which a name keeps an input and its gradient, or an output gradient."""
        steady, behind = self.total - self.warmup, self.pp - 1

        def next_chunk(x: int) -> tuple[int, int] | None:
            """The pair, chunks counted in pass order, that what arrives after pass x is for."""
            if x < behind or x == self.total - 1 or self.chunk(x - behind) == self.v - 1:
                return None
            return self._microbatch(x - behind), self.chunk(x - behind) + 1

        inputs: set[tuple[int, int] | None] = set()
        grads: list[tuple[int, int] | None] = []
        if not self.last:
            inputs.add((self.m - 1, self.v - 1))
        if self.overlap_p2p and steady:
            slots = self.group - behind
            if self.first:
                inputs |= {next_chunk(x) for x in range(max(self.warmup, self.total - slots), self.total)}
                inputs.add(next_chunk(self.warmup - 1))
            else:
                inputs.add((self._microbatch(self.warmup), self.chunk(self.warmup)))
            if self.last and slots > 1:
                grads = [next_chunk(k) for k in range(max(0, steady - slots), steady)]
                if grads[-1] and len(grads) == slots:
                    grads[0] = None  # receiving clears the next slot
        return (
            [self._at(n, self.v - 1 - c) for n, c in filter(None, inputs)],
            [self._at(n, c) for n, c in filter(None, grads)],
        )

    def kept(self, k: int) -> int:
        """Hidden states that names keep during backward pass k and the forward pass before it."""
        return sum(min(2, max(0, k - i)) for i in self.kept_inputs) + sum(k > i for i in self.kept_grads)

    def moments(self) -> list[Moment]:
        out = []
        span = self.group * self.v
        steady = self.total - self.warmup
        turns = {c * self.group + g for g in range(0, self.whole, span) for c in range(self.v)}
        turns |= {self.whole + c * self.rest for c in range(self.v + 1)}
        if self.group > self.pp:
            turns |= {t + self.pp - 1 for t in turns}
        ends = {t + d for t in turns for d in (-1, 0, 1)}
        kept = {i + d for i in (*self.kept_inputs, *self.kept_grads) for d in (0, 1, 2)}

        for x in sorted(ends | {self.warmup - 1}):
            if max(0, self.warmup - span - 1) <= x < self.warmup:
                hidden = self.inputs(x, after=False)
                out.append(Moment("forward", self.chunk(x), self.alive(x + 1, 0), hidden))
        # The last forward pass receives nothing more.
        for k in sorted(ends | kept | {x - self.warmup for x in ends} | {0, steady - 2, steady - 1}):
            if 0 <= k < steady:
                self._steady(k, out)
        for k in sorted(ends | kept | {steady, steady + 1}):
            if steady <= k < self.total:
                hidden = self.grads(k, during_forward=False) + self.held_input_grad(k) + self.kept(k)
                out.append(Moment("backward", self.v - 1 - self.chunk(k), self.alive(self.total, k), hidden))
        return out

    def _steady(self, k: int, out: list[Moment]) -> None:
        x = self.warmup + k
        forward_chunk, chunk = self.chunk(x), self.v - 1 - self.chunk(k)
        alive = self.alive(x + 1, k)
        held = self.held_input_grad(k) + self.kept(k)
        if not self.extra:
            hidden = self.inputs(x, after=False) + self.grads(k, during_forward=True) + held
            out.append(Moment("forward", forward_chunk, alive, hidden))
        hidden = self.inputs(x, after=self.overlap_p2p) + self.grads(k, during_forward=False) + held
        hidden += not (self.last and forward_chunk == self.v - 1)
        if self.extra:
            out.append(Moment("overlapped", chunk, alive, hidden, forward_chunk))
        else:
            out.append(Moment("backward", chunk, alive, hidden))
