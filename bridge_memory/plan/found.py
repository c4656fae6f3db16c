"""What a search takes and finds, whichever trainer runs the layouts: the rows that fit, the fastest first."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from bridge_memory.job.job import whole_fit
from bridge_memory.outside.amount import Range
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.speed.step_time import tokens_per_second_per_gpu
from bridge_memory.verdict import MemoryLimit, Verdict

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu

#: Step times that differ by less are a tie: the spread of measured over predicted time inside of a group of layouts
#: (``references/search.md``).
TIE = 0.05


class Time(Protocol):
    """What every step time says."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""

    @property
    def recomputation(self) -> float:
        """Of ``seconds``, forward passes that run again in backward."""

    @property
    def exposed_communication(self) -> float:
        """Of ``seconds``, communication that no computation hides."""

    @property
    def optimizer(self) -> float:
        """Of ``seconds``, the optimizer's step."""


TimeT = TypeVar("TimeT", bound=Time)
FoundT = TypeVar("FoundT", bound="Found")


@dataclass(frozen=True)
class Row(Generic[TimeT]):
    """One configuration that fits.

    Example:
        >>> from bridge_memory import peaks, search
        >>> found = search("meta-llama/Llama-3.2-1B", gpu="H100", num_gpus=2, global_batch_size=8, vary=["tp", "pp"])
        >>> row = found.rows[0]
        >>> row.peak == peaks(row.run)[row.stage].peak_bytes
        True
    """

    run: RunSpec
    #: Of the stage with the highest peak, bytes.
    peak: int
    #: That stage's number; 0 where layers are not split over stages.
    stage: int
    #: Bytes of the GPU that are free beside the peak and its margin, at least.
    headroom: int
    time: TimeT

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """By the time model."""
        return tokens_per_second_per_gpu(self.run, self.time.seconds)


class Refused(Counter[str]):
    """How many configurations were refused, by the field that the refusal begins with."""

    def add(self, error: SpecError, number: int = 1) -> None:
        text = str(error)
        field = text.split(" ", 1)[0].rstrip(":,")
        words, value, _ = text.partition(" (")
        self[words if value and "_" not in field and words.count(" ") < 4 else field] += number


class Rows(Sequence[Row[TimeT]]):
    """Configurations that fit, the fastest first."""

    @abstractmethod
    def choice(self, number: int) -> object:
        """What row ``number`` shares with the rows that are no other choice to a reader."""

    @abstractmethod
    def peaks(self) -> Iterable[int]:
        """The highest peak of each row, bytes."""

    def candidates(self) -> Iterator[tuple[object, int]]:
        """(choice, number of a row), the fastest first: of each choice the fastest row, and of the others those that
        need less memory than every faster one of it."""
        least: dict[object, int] = {}
        for i, peak in enumerate(self.peaks()):
            choice = self.choice(i)
            if peak < least.get(choice, peak + 1):
                least[choice] = peak
                yield choice, i

    def best(self, number: int | None = None) -> tuple[Row[TimeT], ...]:
        """The fastest row of each choice: all of them, or the first ``number``."""
        out: dict[object, int] = {}
        for i in range(len(self)):
            out.setdefault(self.choice(i), i)
            if len(out) == number:
                break
        return tuple([self[i] for i in out.values()])


class Listed(Rows[TimeT]):
    """Rows that were made one by one."""

    def __init__(self, rows: Iterable[Row[TimeT]]) -> None:
        self._rows = tuple(sorted(rows, key=lambda row: (row.time.seconds, row.peak)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        return self._rows[number]

    def peaks(self) -> Iterable[int]:
        return [row.peak for row in self._rows]


class Limit(NamedTuple):
    """What the configurations of a search have to fit."""

    #: Bytes of the GPU.
    capacity: int
    #: Of a run, what lies outside of torch's allocator.
    outside: Callable[[RunSpec], Range]

    @property
    def alone(self) -> MemoryLimit:
        """Of torch's memory alone."""
        return MemoryLimit(self.capacity)

    def headroom(self, run: RunSpec, peak: int) -> Range:
        """Bytes that are left beside a peak and its margin: at least, and at most."""
        least, most = self.outside(run)
        return Range(*(self.alone._replace(outside=nbytes).headroom(peak) for nbytes in (most, least)))


class OneByOne(Enum):
    """Why a search evaluated its configurations one by one."""

    ASKED = "as asked"
    NUMPY = "numpy is not installed, and without it this takes 20 to 400 times longer; pip install numpy"
    LARGE = "sizes of 2**53 bytes and more are not counted as arrays; lower seq_length or micro_batch_size"
    TORCH = "the engines outside of megatron-core are not counted as arrays"

    @property
    def words(self) -> str:
        """A sentence."""
        return f"searched one by one: {self.value}"


#: Choices beyond those shown that are asked whether they keep the reserve; and where none of them does.
LOOKED_FOR, LOOKED_FOR_ONE = 100, 1000
#: Of the fastest choices, as many are improved (``Found.improves``) and may stand first, however many are asked for.
CANDIDATES = 12
#: Of the step time what every mechanism has to save (``Found.mechanisms``): each is something to set up, to tune and
#: to fail. Of rows within ``TIE`` of the fastest, on no more GPUs a replica than that one, the one stands first that is
#: the fastest with this added for each; of as many mechanisms and within this, the one whose experts stay inside of an
#: NVLink domain, and that cuts the model into the fewest parts.
SIMPLER = 0.02


class Ranked(NamedTuple):
    """Rows of which the first ``keeping`` keep the reserve, and the others are tight. ``refused``: why faster choices
    were passed over, and how many."""

    rows: tuple[Row[Any], ...]
    keeping: int
    refused: Mapping[str, int] = {}


class Found(NamedTuple):
    """What a search found.

    Example:
        >>> from bridge_memory import search
        >>> found = search("meta-llama/Llama-3.2-1B", gpu="H100", num_gpus=2, global_batch_size=8, vary=["tp", "pp"])
        >>> found.looked_at == len(found.rows) + found.too_large
        True
        >>> found.front(1)[0] == found.rows[0]
        True
    """

    #: The fastest first.
    rows: Rows[Any]
    #: Configurations that were estimated.
    looked_at: int
    #: Of those looked at, those that do not fit for sure.
    too_large: int
    #: Field -> configurations that it refused.
    refused: Refused
    #: Whether the search was ended before it was through.
    stopped: bool = False
    #: Of ``too_large``, those whose weights, gradients and optimizer state alone do not fit, as far as that was asked.
    without_activations: int = 0
    #: Of ``too_large``, those that fit with the least that may lie outside of torch: an estimate calls them tight.
    tight: int = 0
    #: Why configurations were evaluated one by one; None: they were as arrays.
    one_by_one: OneByOne | None = None
    #: Whether a row leaves the reserve (``plan.reserve``); None: none is asked for.
    keeps: Callable[[Row[Any]], bool] | None = None
    #: Why nobody would queue a row, in view of the others; None where that is not so.
    refuses: Callable[[Row[Any], Found], str | None] | None = None
    #: A row made faster in what the grid has few values of, or itself.
    improves: Callable[[Row[Any]], Row[Any]] | None = None
    #: The verdict of the whole job of a row, as an estimate of it says; None: that is not asked.
    whole: Callable[[Row[Any]], Verdict] | None = None
    #: (how many mechanisms a row needs, such as a pipeline or recomputation; whether experts exchange tokens over the
    #: network; GPUs of a replica; other parts into which it cuts the model).
    mechanisms: Callable[[Row[Any]], tuple[int, ...]] | None = None
    #: (what a row shares with those that differ in recomputation alone, its recomputation): of rows that share the one
    #: and not the other, those that are not faster have to leave more memory.
    alike: Callable[[Row[Any]], tuple[object, object]] | None = None
    #: Seconds that a row may take less, as far as measured runs do not determine a constant of its time.
    doubt: Callable[[Row[Any]], float] | None = None
    #: Values of settings that were asked for and that no layout can have, and why.
    left_out: tuple[str, ...] = ()

    def ranked(self, number: int) -> Ranked:
        """The first ``number`` choices: those that keep the reserve, then the others, both sorted by time.

        Evaluates at most ``LOOKED_FOR`` choices more, or ``LOOKED_FOR_ONE`` until one keeps the reserve, and then those
        that need less memory than every faster one. The fastest
        ``CANDIDATES`` are improved. Choices that ``refuses`` refuses are skipped, unless it refuses all, and those that
        leave no more memory than a faster one that is ``alike``. Of a choice whose fastest row is tight, a slower one
        that keeps the reserve counts (fewer virtual stages, say). Row 1 is the
        fastest, or a simpler one (``SIMPLER``). A candidate for row 1 whose whole job is not ``certain`` to fit is
        listed after the rows that keep the reserve, if one of the first ``CANDIDATES`` is certain; or one of the front,
        if the jobs of all of these do not fit for sure.
        """
        if self.keeps is None:
            rows, uncertain = self._with_the_first(list(self.best(max(number, CANDIDATES))))
            return Ranked((*rows, *uncertain)[:number], min(len(rows), number))
        keeping: list[Row[Any]] = []
        tight: list[Row[Any]] = []
        refused: Counter[str] = Counter()
        wanted = max(number, CANDIDATES)
        free: dict[object, dict[object, int]] = {}
        #: Choices that were looked at, and whether a row of them keeps the reserve or was passed over.
        settled: dict[object, bool] = {}
        for choice, at in self.rows.candidates():
            looked_at = len(settled)
            if len(keeping) == wanted or looked_at >= (wanted + LOOKED_FOR if keeping else wanted + LOOKED_FOR_ONE):
                break
            if settled.get(choice):
                continue
            fastest, row = choice not in settled, self.rows[at]
            settled[choice] = True
            kind, variant = self.alike(row) if self.alike else (looked_at, None)
            others = free.setdefault(kind, {})
            if any(variant != other and row.headroom <= left for other, left in others.items()):
                continue
            reason = self.refuses(row, self) if self.refuses else None
            if reason is not None:
                refused[reason] += 1
            elif self.keeps(row):
                others[variant] = row.headroom
                keeping.append(row)
            else:
                settled[choice] = False
                if fastest:
                    others[variant] = row.headroom
                    tight.append(row)
        if refused and not (keeping or tight):
            return self._replace(refuses=None).ranked(number)
        if not keeping:
            keeping = list(islice(filter(self._may_lead, self.front()), 1))
            tight = [row for row in tight if row not in keeping]
        if self.improves is not None and not self.stopped:
            first = [self.improves(row) for row in keeping[:CANDIDATES]]
            keeping = sorted([*first, *keeping[CANDIDATES:]], key=lambda row: row.time.seconds)
        keeping, uncertain = self._with_the_first(keeping)
        if not keeping:
            sure, may_not = self._with_the_first(tight)
            tight = [*sure, *may_not]
        return Ranked((*keeping, *uncertain, *tight)[:number], min(len(keeping), number), refused)

    def _with_the_first(self, keeping: list[Row[Any]]) -> tuple[list[Row[Any]], list[Row[Any]]]:
        """(rows with the one that stands first, faster ones whose whole job may not fit)."""
        rest, uncertain = keeping[:CANDIDATES], list[Row[Any]]()
        while rest:
            first = self._simplest(rest)
            rest.remove(first)
            if self.certain(first):
                return [first, *rest, *keeping[CANDIDATES:]], uncertain
            uncertain.append(first)
        return self.led(keeping, uncertain) if uncertain else (keeping, [])

    def led(
        self, rows: Sequence[Row[Any]], candidates: Sequence[Row[Any]]
    ) -> tuple[list[Row[Any]], list[Row[Any]]]:
        """As ``_with_the_first`` where no job of ``candidates`` fits for sure: the first of them whose job may fit
        leads; else the fastest row of the Pareto front whose job fits, before all ``rows``; else the first."""
        may_fit = (row for row in candidates if self.whole is None or self.whole(row) is not Verdict.DOES_NOT_FIT)
        lead = next(may_fit, None) or self._fastest_of_the_front() or candidates[0]
        others = [row for row in rows if row != lead]
        return ([lead, *others], []) if lead in candidates else ([lead], others)

    def certain(self, row: Row[Any]) -> bool:
        """Whether the whole job of a row fits for sure, where that is asked."""
        return self.whole is None or self.whole(row) is Verdict.FITS

    def _fastest_of_the_front(self) -> Row[Any] | None:
        """Of the Pareto front the fastest row that may stand first, by bisection: if a row may, those that need less
        memory may. None if the smallest may not."""
        rows = self.front()
        if not rows or not self._sure(rows[-1]):
            return None
        at, last = 0, len(rows) - 1
        while at < last:
            middle = (at + last) // 2
            at, last = (at, middle) if self._sure(rows[middle]) else (middle + 1, last)
        return rows[at]

    def _sure(self, row: Row[Any]) -> bool:
        return self._may_lead(row) and self.certain(row)

    def _simplest(self, rows: Sequence[Row[Any]]) -> Row[Any]:
        """Of rows by time the one that ``SIMPLER`` puts first."""
        if self.mechanisms is None:
            return rows[0]
        _, _, replica, *_ = self.mechanisms(rows[0])
        near = []
        for row in rows:
            number, beyond, gpus, *parts = self.mechanisms(row)
            if self.slower(row, rows[0]) <= TIE and gpus <= replica:
                near.append((row.time.seconds * (1 + SIMPLER * number), row, (number, beyond, gpus, *parts)))
        _, lead, (most, *_) = min(near, key=lambda one: one[0])
        simple = [one for one in near if self.slower(one[1], lead) <= SIMPLER and one[2][0] <= most]
        return min(simple, key=lambda one: one[2])[1]

    def slower(self, row: Row[Any], than: Row[Any]) -> float:
        """By what share ``row`` takes longer at least, with what is in ``doubt`` or without it."""
        own, other = float(row.time.seconds), float(than.time.seconds)
        longer = own / other - 1
        if self.doubt is None:
            return longer
        return min(longer, (own - self.doubt(row)) / (other - self.doubt(than)) - 1)

    def _may_lead(self, row: Row[Any]) -> bool:
        return (self.keeps is None or self.keeps(row)) and (self.refuses is None or self.refuses(row, self) is None)

    def surest(self) -> Row[Any] | None:
        """The fastest row or the smallest one, if it keeps the reserve and its whole job fits; None if neither does."""
        fastest = self._replace(whole=None).ranked(1).rows  # a job is judged twice at most
        for row in (*fastest, *self.front()[-1:]):
            if (self.keeps is None or self.keeps(row)) and self.certain(row):
                return row
        return None

    def on(self: FoundT, gpu: Gpu) -> FoundT:
        """With the whole job of what stands first judged on ``gpu``."""
        return self._replace(whole=partial(_whole, gpu=gpu))

    def best(self, number: int | None = None) -> tuple[Row[Any], ...]:
        """The fastest row of each choice: all of them, or the first ``number``."""
        return self.rows.best(number)

    def front(self, most: int | None = None) -> tuple[Row[Any], ...]:
        """Rows than which no other is both faster and smaller, the fastest first, and no more than ``most``."""
        out: list[int] = []
        least = None
        for i, peak in enumerate(self.rows.peaks()):
            if least is None or peak < least:
                out.append(i)
                least = peak
                if len(out) == most:
                    break
        return tuple([self.rows[i] for i in out])


def _whole(row: Row[Any], gpu: Gpu) -> Verdict:
    return whole_fit(row.run, gpu).verdict


def front_with(found: Found, rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    """The front of what was found and of ``rows``, some of which were improved (``Found.improves``)."""
    out: list[Row[Any]] = []
    for row in sorted([*found.front(), *rows], key=lambda row: (row.time.seconds, row.peak)):
        if not out or row.peak < out[-1].peak:
            out.append(row)
    return out


def ties(rows: Sequence[Row[Any]]) -> int:
    """How many of the first rows are as fast as the first, as far as the time model can tell."""
    return sum(row.time.seconds <= rows[0].time.seconds * (1 + TIE) for row in rows) if rows else 0
