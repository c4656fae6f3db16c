"""What an expert would refuse to queue, as rules about the first row of a search.

They are about layouts, not about predicted times: most hold whatever the time model says. ``refusals`` asks all of them
(``scripts/expert_acceptance.py``). ``PassedOver`` has those that a search applies to every row that it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from bridge_memory.estimation import peaks
from bridge_memory.plan.found import SIMPLER, TIE, Found, Row
from bridge_memory.plan.megatron.settings import SETTINGS, words_of
from bridge_memory.spec import RecomputeSpec, RunSpec, SpecError
from bridge_memory.spec.limits import limits_of
from bridge_memory.speed.constants import EXCHANGE_DOUBT, Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron.step_time import StepTime, step_time
from bridge_memory.verdict import FRAGMENTATION

#: Experts from which on nobody keeps all of them on every rank.
MANY_EXPERTS = 64
#: Step time that an expert gives for a run without full recomputation.
WITHOUT_FULL = 0.05
#: Tokens of a sequence on a rank that context parallelism should leave, and columns of the hidden size that tensor
#: parallelism should.
LEAST_TOKENS, LEAST_COLUMNS = 1024, 256
#: Other choices that are looked at, the fastest first.
LOOKED_FOR = 2000


class Judged(NamedTuple):
    """A first row, and what stands beside it."""

    row: Row[StepTime]
    found: Found
    #: GPUs that reach each other by NVLink.
    domain: int

    def others(self) -> Iterator[Row[StepTime]]:
        """The fastest row of each choice, and slower ones of it that need less memory."""
        return islice((self.found.rows[at] for _, at in self.found.rows.candidates()), LOOKED_FOR)

    def keeps(self, row: Row[StepTime]) -> bool:
        """Whether a row leaves the reserve."""
        return self.found.keeps is None or self.found.keeps(row)


class Rule(NamedTuple):
    """One rule: its name, and why it refuses a row; None where it does not."""

    name: str
    reason: Callable[[Judged], str | None]


def _tensor_parallelism(judged: Judged) -> str | None:
    tp, domain = judged.row.run.parallel.tp, judged.domain
    return f"TP {tp} goes beyond an NVLink domain of {domain} GPUs" if tp > domain else None


def _expert_parallelism(judged: Judged) -> str | None:
    run = judged.row.run
    experts = limits_of(run.model).experts_gcd
    if experts < MANY_EXPERTS or run.parallel.ep > 1:
        return None
    other = next((row for row in judged.others() if row.run.parallel.ep > 1 and judged.keeps(row)), None)
    return None if other is None else f"EP 1 for {experts} experts, where EP {other.run.parallel.ep} fits"


def _full_recomputation(judged: Judged) -> str | None:
    row = judged.row
    if row.run.recompute.granularity != "full":
        return None
    for other in judged.others():
        less = other.time.recomputation < row.time.recomputation
        if other.run.recompute.granularity != "full" and less and judged.keeps(other):
            slower = judged.found.slower(other, row)
            if slower <= WITHOUT_FULL:
                return f"full recomputation, where a layout without it fits at {slower:+.1%}"
            return None
    return None


def _reserve(judged: Judged) -> str | None:
    return None if judged.keeps(judged.row) else "less is left than the reserve"


def _microbatches(judged: Judged) -> str | None:
    run = judged.row.run
    number, pp = run.num_microbatches, run.parallel.pp
    return f"{number} microbatches for {pp} pipeline stages" if number < pp else None


def _short_sequences(judged: Judged) -> str | None:
    run = judged.row.run
    cp, tokens = run.parallel.cp, run.batch.seq_length // run.parallel.cp
    return f"CP {cp} leaves {tokens} tokens of a sequence" if cp > 1 and tokens < LEAST_TOKENS else None


def _narrow_products(judged: Judged) -> str | None:
    run = judged.row.run
    tp, columns = run.parallel.tp, run.model.hidden_size // run.parallel.tp
    return f"TP {tp} leaves {columns} columns of the hidden size" if tp > 1 and columns < LEAST_COLUMNS else None


def _much_recomputation(judged: Judged) -> str | None:
    return None if _full_recomputation(judged) else PassedOver().much(judged.row, judged.found)


RULES = (
    Rule("tensor parallelism stays inside of the NVLink domain", _tensor_parallelism),
    Rule(f"no EP 1 for {MANY_EXPERTS} experts and more where a larger EP fits", _expert_parallelism),
    Rule(f"no full recomputation where less of it fits at {WITHOUT_FULL:.0%} more time", _full_recomputation),
    Rule(f"no recomputation of {TIE:.0%} of the step that {WITHOUT_FULL:.0%} more time spares", _much_recomputation),
    Rule("the reserve is kept", _reserve),
    Rule("as many microbatches as pipeline stages", _microbatches),
    Rule(f"context parallelism leaves {LEAST_TOKENS} tokens of a sequence", _short_sequences),
    Rule(f"tensor parallelism leaves {LEAST_COLUMNS} columns of the hidden size", _narrow_products),
)


class PassedOver:
    """Why a search does not show a row, though it is fast; None where it does.

    Of the rules those about experts and recomputation, and one about context parallelism: several sequences a
    microbatch that are cut in two are as much work and memory for every rank as half as many whole ones, and keys and
    values travel.
    """

    def __init__(self) -> None:
        #: What is found, and of its choices the first that keeps the reserve and has experts on several ranks; those
        #: without full recomputation that keep it, each with less recomputation than all before; and of those about as
        #: fast as the fastest the one with the least.
        self._found: Found | None = None
        self._spread: Row[StepTime] | None = None
        self._partial: list[Row[StepTime]] = []
        self._lightest: Row[StepTime] | None = None

    def __reduce__(self) -> tuple[type[PassedOver], tuple[()]]:
        return PassedOver, ()

    def __call__(self, row: Row[StepTime], found: Found) -> str | None:
        if self._found is not found:
            self._look(Judged(row, found, 0))
        run = row.run
        experts = limits_of(run.model).experts_gcd
        if experts >= MANY_EXPERTS and run.parallel.ep == 1 and self._spread is not None:
            return f"EP 1 for {experts} experts, where EP {self._spread.run.parallel.ep} fits"
        if run.recompute.granularity == "full" and any(_replaces(other, row, found) for other in self._partial):
            return f"full recomputation, where less of it fits at no more than {WITHOUT_FULL:.0%} more time"
        return self.much(row, found) or _cut_sequences(Judged(row, found, 0))

    def much(self, row: Row[StepTime], found: Found) -> str | None:
        """That its recomputation is not worth its time."""
        if self._found is not found:
            self._look(Judged(row, found, 0))
        if self._lightest is not None and _lighter(self._lightest, row) and _replaces(self._lightest, row, found):
            return f"much recomputation, where much less fits at no more than {WITHOUT_FULL:.0%} more time"
        return None

    def _look(self, judged: Judged) -> None:
        self._found, self._spread, self._partial, self._lightest = judged.found, None, [], None
        of_experts = limits_of(judged.row.run.model).experts_gcd >= MANY_EXPERTS
        fastest: Row[StepTime] | None = None
        for other in judged.others():
            one_rank = of_experts and other.run.parallel.ep == 1
            spread = of_experts and self._spread is None and not one_rank
            full = other.run.recompute.granularity == "full"
            again = other.time.recomputation
            partial = not full and (not self._partial or again < self._partial[-1].time.recomputation)
            light = not one_rank and (
                self._lightest is None or fastest is None
                or (_share(other) < _share(self._lightest) and judged.found.slower(other, fastest) <= WITHOUT_FULL)
            )  # fmt: skip
            if (spread or partial or light) and judged.keeps(other):
                self._spread = other if spread else self._spread
                if partial:
                    self._partial.append(other)
                if light:
                    fastest, self._lightest = fastest or other, other
            few = bool(self._partial) and _share(self._partial[-1]) <= TIE
            if few and (self._spread is not None or not of_experts):
                return


def _share(row: Row[StepTime]) -> float:
    return row.time.recomputation / row.time.seconds


def _lighter(row: Row[StepTime], than: Row[StepTime]) -> bool:
    """Whether recomputation takes less of its step, by ``TIE`` of it."""
    return _share(row) < _share(than) - TIE


def _replaces(row: Row[StepTime], other: Row[StepTime], found: Found) -> bool:
    """Whether a row recomputes less, and takes no more than ``WITHOUT_FULL`` more time."""
    return row.time.recomputation < other.time.recomputation and found.slower(row, other) <= WITHOUT_FULL


def held_by_the_host(row: Row[StepTime], hardware: Hardware, constants: Constants) -> tuple[RunSpec, StepTime] | None:
    """The row or its sizes with fewer sequences a microbatch and no recomputation, where that fits and would be the
    fastest if kernels never waited for the host that launches them; None where that is not worth a mechanism
    (``SIMPLER``), or a graph launches kernels."""
    run = row.run
    if run.implementation.cuda_graph_impl != "none":
        return None
    room = row.peak + row.headroom / (1 + FRAGMENTATION)
    found = run, row.time
    for sequences in range(1, run.batch.micro_batch_size + 1):
        with suppress(SpecError):
            other = run.with_fields(**{"batch.micro_batch_size": sequences, "recompute": RecomputeSpec()})
            time = step_time(other, hardware, constants)
            if _unheld(time) < _unheld(found[1]) and max(stage.peak_bytes for stage in peaks(other)) <= room:
                found = other, time
    return found if _unheld(found[1]) < (1 - SIMPLER) * row.time.seconds else None


def _unheld(time: StepTime) -> float:
    return time.seconds - time.passes.host


def exchanges_in_doubt(row: Row[StepTime], domain: int) -> float:
    """Seconds that exchanges between experts on the ranks of one NVLink domain may take less."""
    p = row.run.parallel
    return row.time.passes.expert_parallel * EXCHANGE_DOUBT if 1 < p.ep * p.etp <= domain else 0.0


def mechanisms(row: Row[StepTime], domain: int) -> tuple[int, bool, int, int, int, int]:
    """(how many of these a layout needs: tensor, pipeline and context parallelism, virtual stages, a split of the
    layers by hand, recomputation, recomputation that takes more than ``TIE`` of the step, and experts that exchange
    tokens beyond an NVLink ``domain``; whether they do; GPUs of one replica of the model; parts of a sequence; chunks
    of layers on all stages; EP, the largest first that stays inside of a domain, where it costs no more and leaves more
    memory, then the smallest beyond)."""
    run, p = row.run, row.run.parallel
    again = row.time.recomputation > TIE * row.time.seconds
    by_hand = p.pipeline_model_parallel_layout is not None
    beyond = p.ep * p.etp > domain and run.model.has_experts
    used = p.tp > 1, p.pp > 1, p.cp > 1, p.vpp > 1, by_hand, run.recompute.granularity is not None, again, beyond
    return sum(used), beyond, p.tp * p.pp * p.cp, p.cp, p.pp * p.vpp, p.ep if beyond else -p.ep


def recomputation_apart(row: Row[StepTime]) -> tuple[object, object]:
    """(a layout's sizes and settings, its recomputation; with experts that exchange nothing, its dispatcher too)."""
    run, p = row.run, row.run.parallel
    settings = dict(zip(SETTINGS, words_of(run), strict=True))
    dispatcher = settings.pop("dispatcher") if p.ep * p.etp == 1 else None
    sizes = p.tp, p.pp, p.cp, p.ep, p.etp, run.batch.micro_batch_size
    return (sizes, *settings.values()), (run.recompute, dispatcher)


def _cut_sequences(judged: Judged) -> str | None:
    run = judged.row.run
    p, sequences = run.parallel, run.batch.micro_batch_size
    if p.cp == 1 or sequences % 2:
        return None
    halves = replace(p, context_parallel_size=p.cp // 2), sequences // 2
    for other in judged.others():
        if other.time.seconds > judged.row.time.seconds:
            return None
        there = other.run
        same = there.recompute == run.recompute and there.implementation == run.implementation
        if same and (there.parallel, there.batch.micro_batch_size) == halves:
            return "context parallelism of several sequences, where fewer whole ones are as much"
    return None


def refusals(judged: Judged) -> tuple[str, ...]:
    """Why an expert would refuse a first row; none: he would queue it."""
    return tuple([reason for rule in RULES if (reason := rule.reason(judged))])
