"""Routing: up to which overload every stage still fits a card.

The overload factor is the tokens of the fullest rank over the balanced number (``moe_imbalance``). The answer is
evaluated: every stage fits at the factor, and a hundredth above it one does not.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import count, pairwise
from math import ceil
from typing import NamedTuple

from bridge_memory.estimation import peaks
from bridge_memory.spec import MoESpec, RunSpec
from bridge_memory.tapes.context import context_of
from bridge_memory.verdict import MemoryLimit

#: Factors are multiples of one over this.
PER_UNIT = 100


class Seen(NamedTuple):
    """Overload factors that a training run reported."""

    least: float
    most: float
    source: str


#: A bound by what happened, not by what can: other runs may route worse.
FROM_SCRATCH = Seen(
    1.36, 2.76,
    "Nemotron-3-Nano-30B from scratch in geodesic-megatron, the fullest rank in the first 8 steps; trained routers are "
    "more even",
)  # fmt: skip


class Overload(NamedTuple):
    """Overload factors up to which stages fit. None in place of a factor: balanced routing does not fit either."""

    #: The largest factor at which every stage fits, and the stage that does not fit above it: the fullest one there.
    factor: float | None
    stage: int
    #: The largest factor there can be: every token to one rank, or its experts' capacity.
    most: float
    #: Of each stage alone.
    stages: tuple[float | None, ...]

    @property
    def any(self) -> bool:
        """Whether every routing fits."""
        return self.factor is not None and self.factor >= self.most


def most_overload(run: RunSpec) -> float:
    """The largest overload factor that routing can bring; 1 where routing does not change a rank's memory.

    A token goes to different experts, at most to all of a rank. Experts with a capacity receive no more than that
    (``moe_utils.py: get_capacity``); padded to it they always receive the same.
    """
    impl, ep = run.implementation, run.parallel.ep
    if impl.torch_layers or impl.moe_pad_expert_input_to_capacity:
        return 1.0
    return max([_most_of(experts, run, ep) for experts in _routed(run)], default=1.0)


def likely_overload(run: RunSpec) -> float:
    """The overload factor that some layers of a run reach while nothing balances their router yet, beyond what it has
    by ``moe_imbalance``; 1: none. What a run reserves is the most of all its steps: the most that was seen."""
    return max(1.0, min(FROM_SCRATCH.most, most_overload(run)) / run.implementation.moe_imbalance)


def _routed(run: RunSpec) -> list[MoESpec]:
    """The kinds of experts in the model's layers and MTP depths."""
    kinds = [kind for kind, _, _ in run.model.layer_runs]
    if run.model.mtp_layer is not None and run.model.mtp_num_layers:
        kinds.append(run.model.mtp_layer)
    return [kind.ffn for kind in kinds if isinstance(kind.ffn, MoESpec)]


def _tokens(run: RunSpec) -> int:
    """Tokens of a microbatch that enter a rank's experts."""
    tokens: int = context_of(run).tokens_sp
    return tokens


def _most_of(experts: MoESpec, run: RunSpec, ep: int) -> float:
    most = max(1.0, ep * min(1.0, experts.num_experts / ep / experts.topk))
    factor = run.implementation.moe_expert_capacity_factor
    if factor is None:
        return most
    tokens = _tokens(run)
    chosen = tokens * experts.topk
    capacity = min(ceil(chosen / experts.num_experts * factor), tokens) * experts.num_experts
    return max(1.0, min(most, capacity / chosen))


def overload(run: RunSpec, card: MemoryLimit) -> Overload | None:
    """The overload factor up to which every stage of ``run`` fits a card, whatever ``moe_imbalance`` it has.

    Args:
        run: The run.
        card: What each stage has to fit.

    Returns:
        None where routing does not change memory: dense models, one expert-parallel rank, experts padded to capacity.

    Raises:
        SpecError: The layers do not go onto the stages.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec
        >>> parallel = ParallelSpec(world_size=8, expert_model_parallel_size=8)
        >>> run = RunSpec(model="Qwen/Qwen3-30B-A3B", parallel=parallel)
        >>> overload(run, MemoryLimit(140 << 30, 2 << 30)).factor
        4.2
    """
    most = most_overload(run)
    if most <= 1.0:
        return None
    return _Solver(run, card, most).solved()


#: In place of a stage: the highest peak of all.
_ALL = -1
#: How far rounded rows may put a peak off a line, in rows; and at least, in points (blocks of quantized rows).
_ROWS, _POINTS = 2, 0.01


class _Solver:
    """Peaks of every stage at points of a grid: point i is the factor 1 + i / PER_UNIT, the last one the most."""

    def __init__(self, run: RunSpec, card: MemoryLimit, most: float) -> None:
        self.run, self.card, self.most = run, card, most
        self.last = ceil(round((most - 1) * PER_UNIT, 6))
        self._known: dict[int, tuple[int, ...]] = {}
        rows = min(_tokens(run) * experts.topk for experts in _routed(run))
        self._slack = max(_POINTS, _ROWS * PER_UNIT / rows)

    def factor(self, point: int) -> float:
        return self.most if point == self.last else (PER_UNIT + point) / PER_UNIT

    def solved(self) -> Overload:
        point = self._largest(_ALL)
        above = 0 if point is None else min(self.last, point + 1)
        highest = self._evaluate(above)
        found = [self._largest(stage) for stage in range(len(highest))]
        return Overload(
            None if point is None else self.factor(point), highest.index(max(highest)), self.most,
            tuple([None if one is None else self.factor(one) for one in found]),
        )  # fmt: skip

    def _evaluate(self, point: int) -> tuple[int, ...]:
        found = self._known.get(point)
        if found is None:
            run = self.run.with_fields(moe_imbalance=self.factor(point))
            found = self._known[point] = tuple([stage.peak_bytes for stage in peaks(run)])
        return found

    def _largest(self, stage: int) -> int | None:
        """The last point at which the stage fits; None: there is none.

        Both it and the next point are evaluated, but for a single stage where convexity leaves no other answer.
        """
        self._evaluate(0)
        self._evaluate(self.last)
        for turn in count(1):
            at = {i: max(found) if stage == _ALL else found[stage] for i, found in sorted(self._known.items())}
            low = max([i for i in at if self.card.holds(at[i])], default=None)
            if low is None or low == self.last:
                return low
            high = min([i for i in at if not self.card.holds(at[i])])
            if high - low == 1:
                return low
            point = _by_line(at, low, high, self.card)
            if stage != _ALL and self._certain(at, low, high, point):
                return point
            if turn % 4 == 0:
                point = (low + high) // 2
            self._evaluate(point if point > low else point + 1)
        raise AssertionError

    def _certain(self, at: dict[int, int], low: int, high: int, point: int) -> bool:
        """Whether a stage fits at ``point`` and not at the next, by two of its bounds.

        A peak is the highest of many sums of tensors. Each is affine in the factor, but for rounding: so a peak is
        convex, between two points at most the line through them, and outside of them at least.
        """
        if self.run.implementation.moe_expert_capacity_factor is not None:  # rows stop to grow at the capacity
            return False
        slack = self._slack * (at[high] - at[low]) / (high - low)
        fits = point == low or self.card.holds(ceil(_line(at, low, high, point) + slack))
        if not fits or point + 1 == high:
            return fits
        known = [i for i in at if i <= low]
        outside = [(a, b) for a, b in pairwise(known)] + [(known[0], known[-1])] * (len(known) > 1)
        outside += [(a, b) for a, b in pairwise([i for i in at if i >= high])]
        for a, b in outside:
            away = min(abs(point + 1 - a), abs(point + 1 - b)) / (b - a)
            if not self.card.holds(int(_line(at, a, b, point + 1) - slack * (1 + 2 * away))):
                return True
        return False


def _line(at: dict[int, int], a: int, b: int, point: int) -> float:
    return at[a] + (at[b] - at[a]) * (point - a) / (b - a)


def _by_line(at: dict[int, int], low: int, high: int, card: MemoryLimit) -> int:
    """The last point from ``low`` on and below ``high`` that fits if peaks lie on the line between the two."""
    inside = range(low + 1, high)
    return low + bisect_left(inside, True, key=lambda i: not card.holds(int(_line(at, low, high, i))))
