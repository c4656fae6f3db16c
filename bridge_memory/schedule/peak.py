"""The peak of a schedule in closed form: the few moments of which one is the peak, whatever chunks cost.

They are cached per schedule, so that a search pays only a few multiplications. Tested against ``events.walk``; source
as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import ge, sub
from typing import TypeVar

from bridge_memory.schedule.events import ChunkCost, Moment, PeakMoment, highest, num_warmup

Cost = TypeVar("Cost")
#: The fields of a ``Moment`` as a plain tuple.
_Fields = tuple[str, int, tuple[int, ...], int, int, tuple[int, ...]]

#: Up to so many chunks ``kinds_of`` counts each separately.
FEW_CHUNKS = 4


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
    keeps_outputs: bool = False,
    phase: str | None = None,
) -> PeakMoment:
    """The most activation bytes alive on one pipeline rank during forward and backward passes, and when.

    ``chunks``: the cost of each virtual stage of this rank, in order. ``group_size``:
    microbatch_group_size_per_vp_stage (None: ``pp``, megatron-core's default). ``hidden_bytes``: bytes of one hidden
    state that is sent between stages, 2 s b h / cp, over tp too under sequence parallelism (bf16). ``keeps_outputs``:
    chunks count the outputs that they send (no ``deallocate_pipeline_outputs``). ``phase``: "forward" or "backward":
    consider only these passes, and overlapped ones.
    """
    v, group, carries = len(chunks), group_size or pp, any([chunk.carried_over for chunk in chunks])
    m = few_microbatches(pp, num_microbatches, v, group, overlap_moe_expert_parallel_comm)
    moments = peak_moments(
        pp, rank, m, v, group, overlap_moe_expert_parallel_comm, overlap_p2p_comm, keeps_outputs, carries=carries
    )
    if phase is not None:
        moments = tuple(moment for moment in moments if moment.phase in (phase, "overlapped"))
    return highest(moments, chunks, hidden_bytes)


def peak_bytes(
    pp: int,
    rank: int,
    num_microbatches: int,
    chunks: Sequence[ChunkCost],
    group_size: int | None = None,
    *,
    hidden_bytes: int = 0,
    overlap_moe_expert_parallel_comm: bool = False,
    overlap_p2p_comm: bool = True,
    keeps_outputs: bool = False,
) -> int:
    """Only ``dynamic_peak(...).bytes``, faster: virtual stages with equal costs are counted together."""
    kinds, which = kinds_of(chunks)
    v, group, carries = len(chunks), group_size or pp, any([chunk.carried_over for chunk in kinds])
    m = few_microbatches(pp, num_microbatches, v, group, overlap_moe_expert_parallel_comm)
    moments = peak_moments(
        pp, rank, m, v, group, overlap_moe_expert_parallel_comm, overlap_p2p_comm, keeps_outputs, which, carries
    )
    return highest(moments, kinds, hidden_bytes).bytes


def kinds_of(chunks: Sequence[Cost]) -> tuple[Sequence[Cost], tuple[int, ...] | None]:
    """(distinct costs, which of these each chunk has), if of many chunks at most two differ from all others, as the
    first and the last mostly do. Else (``chunks``, None): each is counted separately."""
    kinds = list(dict.fromkeys(chunks))
    if (len(kinds) > 1 and len(chunks) <= FEW_CHUNKS) or len(kinds) > 3:
        return chunks, None
    which = tuple(map(kinds.index, chunks))
    if max(map(which.count, range(len(kinds)))) < len(which) - 2:
        return chunks, None
    return kinds, which


def few_microbatches(pp: int, m: int, v: int, group: int, extra: bool = False) -> int:
    """A small number of microbatches with which the schedule has the same moments as with ``m``.

    More groups repeat the same round: warm-up and cool-down each end within two groups, and the rounds between them are
    equal; if chunks are overlapped one more round differs (``tests/test_schedule.py``).
    """
    if v == 1 or pp == 1:
        return min(m, pp + 2)
    few = 4 + extra
    return few * group + m % group if m >= (few + 1) * group else m


@lru_cache(maxsize=8192)
def peak_moments(
    pp: int, rank: int, m: int, v: int, group: int, extra: bool = False, overlap_p2p_comm: bool = True,
    keeps_outputs: bool = False, which: tuple[int, ...] | None = None, carries: bool = False,
) -> tuple[Moment, ...]:  # fmt: skip
    """The moments of a schedule of which one is the peak, whatever chunks cost.

    ``which``: the kind of each chunk, from 0 on; chunks of one kind have equal costs. Moments then count ``alive`` by
    kind, and their chunks are numbers of kinds. ``carries``: what chunks carry over counts; else no moment says which
    of them do.
    """
    if pp == 1 or v == 1:
        moments: Sequence[_Fields] = _moments_of_1f1b(pp, rank, m, v, extra, keeps_outputs)
    else:
        interleaved = _Interleaved(pp, rank, m, v, group, extra, overlap_p2p_comm, keeps_outputs, which, carries)
        moments = interleaved.moments()
    return _undominated(moments)


def _undominated(moments: Sequence[_Fields]) -> tuple[Moment, ...]:
    """Moments without those that another with the same phase and chunks dominates in every count."""
    #: Phase and chunks -> what is alive and carries over -> (the most hidden states with it, position of that moment).
    kinds: dict[tuple[str, int, int], dict[tuple[int, ...], tuple[int, int]]] = {}
    for i, (phase, chunk, alive, hidden, forward_chunk, carrying) in enumerate(moments):
        same = kinds.get((phase, chunk, forward_chunk))
        if same is None:
            same = kinds[phase, chunk, forward_chunk] = {}
        counts = alive + carrying
        known = same.get(counts)
        if known is None or known[0] < hidden:
            same[counts] = hidden, i
    out = []
    for same in kinds.values():
        if len(same) == 1:
            out += [Moment(*moments[i]) for _, i in same.values()]
            continue
        ordered = sorted([(-sum(counts), -hidden, i, counts) for counts, (hidden, i) in same.items()])
        kept: list[tuple[int, tuple[int, ...]]] = []
        more: list[tuple[int, tuple[int, ...]]] = []  # of these, the moments with more alive than the current one
        before = 0
        for number, less, i, counts in ordered:
            if number != before:
                more, before = kept[:], number
            if not any([most <= less and all(map(ge, those, counts)) for most, those in more]):
                kept.append((less, counts))
                out.append(Moment(*moments[i]))
    return tuple(out)


def _moments_of_1f1b(pp: int, rank: int, m: int, v: int, extra: bool, keeps_outputs: bool) -> list[Moment]:
    """No pipelining, and 1F1B: the number of microbatches alive rises to warm-up + 1, stays there, and falls."""
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
                out.append(Moment("forward", 0, (warmup + 1,), held + k * (received + sent * (1 + keeps_outputs))))
                out.append(Moment("backward", 0, (warmup + 1,), held))
    for k in (steady, steady + 1):
        if k < m:
            out.append(Moment("backward", 0, (m - k,), received if k else 0))
    return out


class _Interleaved:
    """An interleaved schedule as counts: how many of the first x passes are of chunk c.

    Between two passes at which a chunk begins or ends its turn (in forward or in backward, or p - 1 passes earlier,
    which matters for early arrivals) all counts, and so the bytes, change by the same amount with every pass: the peak
    of such a stretch is at one of its ends. In the steady state every round of a whole group is like the one before.
    """

    def __init__(
        self, pp: int, rank: int, m: int, v: int, group: int, extra: bool, overlap_p2p: bool, keeps_outputs: bool,
        which: tuple[int, ...] | None = None, carries: bool = False,
    ) -> None:
        self.keeps_outputs, self.carries = keeps_outputs, carries
        self.pp, self.v, self.group, self.m = pp, v, group, m
        self.extra, self.overlap_p2p = extra, overlap_p2p
        self.first, self.last = rank == 0, rank == pp - 1
        whole, self.remainder = divmod(m, group)
        self.span = group * v
        self.whole = whole * group * v  # passes in whole groups
        self.whole_microbatches = whole * group
        self.total = m * v
        self.warmup = num_warmup(pp, rank, m, v, group, extra)
        self._counts: dict[int, tuple[int, ...]] = {}
        self.which = which or tuple(range(v))
        self.kinds = max(self.which) + 1
        #: The most frequent kind, and the chunks of other kinds with their kinds.
        self.most = max(range(self.kinds), key=self.which.count)
        self.others = [(chunk, kind) for chunk, kind in enumerate(self.which) if kind != self.most]
        self.kept_inputs, self.kept_grads = self._kept()

    def done(self, x: int, chunk: int) -> int:
        """How many of the first x forward passes are of ``chunk``; of backward passes, of chunk ``v - 1 - chunk``."""
        size = self.group
        if x <= self.whole:
            groups, x = divmod(x, self.span)
            before = groups * size
        else:
            x -= self.whole
            before, size = self.whole_microbatches, self.remainder
        x -= chunk * size
        return before if x <= 0 else before + size if x >= size else before + x

    def chunk(self, x: int) -> int:
        """The chunk of forward pass x."""
        if x < self.whole:
            return x % (self.group * self.v) // self.group
        return (x - self.whole) // self.remainder

    def counts(self, x: int) -> tuple[int, ...]:
        """``done(x, chunk)`` of every chunk."""
        known = self._counts.get(x)
        if known is None:
            if x <= self.whole:
                groups, i = divmod(x, self.group * self.v)
                begun, size = groups * self.group, self.group
            else:
                begun, size, i = self.whole_microbatches, self.remainder, x - self.whole
            full, part = divmod(i, size)
            known = (begun + size,) * full
            if full < self.v:
                known += (begun + part, *(begun,) * (self.v - full - 1))
            self._counts[x] = known
        return known

    def alive(self, forwards: int, backwards: int) -> tuple[int, ...]:
        """How many microbatches are alive, by kind of chunk."""
        if self.kinds == self.v:
            return tuple(map(sub, self.counts(forwards), self.counts(backwards)[::-1]))
        out, remainder = [0] * self.kinds, forwards - backwards
        for chunk, kind in self.others:
            n = self.done(forwards, chunk) - self.done(backwards, self.v - 1 - chunk)
            out[kind] += n
            remainder -= n
        out[self.most] = remainder
        return tuple(out)

    def carrying(self, forwards: int, backwards: int, *running: int) -> tuple[int, ...]:
        """After so many passes, how many chunks that do not run ran backward last, by kind; empty unless chunks
        carry over."""
        if not self.carries:
            return ()
        out = [0] * self.kinds
        for chunk, kind in enumerate(self.which):
            if chunk in running:
                continue
            n, back = self.done(forwards, chunk), self.v - 1 - chunk
            done = self.done(backwards, back)
            # Backward pass k comes after forward pass warmup + k, and before the next one.
            out[kind] += not n or (done > 0 and self._at(done - 1, back) + self.warmup >= self._at(n - 1, chunk))
        return tuple(out)

    def waiting(self, received: int, used: int) -> int:
        """Number of early arrivals that wait at the leading rank, after ``received`` and ``used`` passes.

        Every pass, except of the last chunk, sends something that arrives p - 1 passes later; every pass, except of the
        first chunk, uses one.
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
        """The number of the forward pass of (microbatch, chunk), or of the backward pass of (microbatch, v - 1 -
        chunk).
        """
        if microbatch < self.whole_microbatches:
            groups, i = divmod(microbatch, self.group)
            return (groups * self.v + chunk) * self.group + i
        return self.whole + chunk * self.remainder + microbatch - self.whole_microbatches

    def _microbatch(self, x: int) -> int:
        if x < self.whole:
            return x // (self.group * self.v) * self.group + x % self.group
        return self.whole_microbatches + (x - self.whole) % self.remainder

    def _kept(self) -> tuple[list[int], list[int]]:
        """(backward passes after which a variable keeps an input and its gradient, those for an output gradient)."""
        steady, behind = self.total - self.warmup, self.pp - 1

        def next_chunk(x: int) -> tuple[int, int] | None:
            """The (microbatch, chunk) for which something is received after pass x; chunks in pass order."""
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
        """Hidden states that variables keep during backward pass k and the forward pass before it."""
        n = 0
        for i in self.kept_inputs:
            n += (k > i) + (k > i + 1)
        for i in self.kept_grads:
            n += k > i
        if self.keeps_outputs and not self.last:
            n += k > self._at(self.m - 1, 0)
        return n

    def _like_a_round_before(self) -> list[range]:
        """Steady passes at which everything is as one whole round earlier: no pass since has changed what variables
        keep, and both rounds are whole and after the first passes, which differ."""
        span, first = self.group * self.v, self.pp - 2
        if self.carries:
            first += span  # by then every chunk has run backward
        beyond = min(self.whole, self.total - 1) - self.warmup
        ends = sorted({beyond, *[i for i in (*self.kept_inputs, *self.kept_grads) if first < i < beyond]})
        # What variables keep changes in the two passes after one of these.
        return [range(start + 2 + span, end) for start, end in zip([first, *ends], ends, strict=False)]

    def _turns(self) -> list[int]:
        """Chunks, in pass order, at whose turn the change per pass differs: where another kind begins, in forward or in
        backward, and where a leading rank begins or ends to receive early for its first and last chunk."""
        if self.kinds == self.v or self.carries:
            return list(range(self.v))
        w, ends = self.which, (0, 1, self.v - 1) if self.first or self.last else ()
        return [c for c in range(self.v) if c in ends or w[c - 1] != w[c] or w[-c] != w[-1 - c]]

    def moments(self) -> list[_Fields]:
        out: list[_Fields] = []
        which = self.which
        span = self.group * self.v
        steady = self.total - self.warmup
        turns = {c * self.group + g for g in range(0, self.whole, span) for c in self._turns()}
        turns |= {self.whole + c * self.remainder for c in range(self.v + 1)}
        if self.group > self.pp:
            turns |= {t + self.pp - 1 for t in turns}
        ends = {t + d for t in turns for d in (-1, 0, 1)}
        kept = {i + d for i in (*self.kept_inputs, *self.kept_grads) for d in (0, 1, 2)}
        alike = self._like_a_round_before()

        for x in sorted(ends | {self.warmup - 1}):
            if max(0, self.warmup - span - 1) <= x < self.warmup:
                hidden, c = self.inputs(x, after=False), self.chunk(x)
                out.append(("forward", which[c], self.alive(x + 1, 0), hidden, -1, self.carrying(x, 0, c)))
        # After the last forward pass nothing more is received.
        within = {k for k in ends | {x - self.warmup for x in ends} if not any([k in few for few in alike])}
        for k in sorted(within | kept | {0, steady - 2, steady - 1}):
            if 0 <= k < steady:
                self._steady(k, out)
        for k in sorted(ends | kept | {steady, steady + 1}):
            if steady <= k < self.total:
                hidden = self.grads(k, during_forward=False) + self.held_input_grad(k) + self.kept(k)
                c = self.v - 1 - self.chunk(k)
                carrying = self.carrying(self.total, k, c)
                out.append(("backward", which[c], self.alive(self.total, k), hidden, -1, carrying))
        return out

    def _steady(self, k: int, out: list[_Fields]) -> None:
        x = self.warmup + k
        forward_chunk, chunk = self.chunk(x), self.v - 1 - self.chunk(k)
        kind, forward_kind = self.which[chunk], self.which[forward_chunk]
        alive = self.alive(x + 1, k)
        held = self.held_input_grad(k) + self.kept(k)
        if not self.extra:
            hidden = self.inputs(x, after=False) + self.grads(k, during_forward=True) + held
            out.append(("forward", forward_kind, alive, hidden, -1, self.carrying(x, k, forward_chunk)))
        hidden = self.inputs(x, after=self.overlap_p2p) + self.grads(k, during_forward=False) + held
        hidden += not (self.keeps_outputs or (self.last and forward_chunk == self.v - 1))
        if self.extra:
            out.append(("overlapped", kind, alive, hidden, forward_kind, self.carrying(x, k, chunk, forward_chunk)))
        else:
            out.append(("backward", kind, alive, hidden, -1, self.carrying(x + 1, k, chunk)))
