"""Failures of memory in the text of a job: what failed, where, and the figures that were printed with it.

Sources of the wordings: torch ``c10/cuda/CUDACachingAllocator.cpp: DeviceCachingAllocator::malloc`` (2.0; 2.1 and
later; private pools since 2.4), ``c10/cuda/CUDAMallocAsyncAllocator.cpp``, ``c10/core/impl/alloc_cpu.cpp``,
``torch/distributed/elastic/multiprocessing``; NCCL ``src/include/alloc.h``; DeepSpeed ``runtime/zero/stage3.py: step``;
torchtitan ``components/metrics.py``; Ray's memory monitor; vLLM ``v1/core/kv_cache_utils.py``; SGLang
``srt/model_executor/pool_configurator.py``, ``srt/mem_cache/allocation.py``; torch_memory_saver ``csrc``; bitsandbytes
``csrc/pythonInterface.cpp``; torch ``libshm``; NCCL ``misc/shmutils.cc``; Slurm, LSF, PBS, systemd-oomd and the kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from bridge_memory.outside.phase import Phase


class Kind(str, Enum):
    """What failed, by who says so."""

    TORCH = "torch's allocator"
    DRIVER = "a CUDA call outside of torch's allocator"
    NCCL = "NCCL"
    LIBRARY = "cuBLAS or cuDNN"
    INFERENCE = "the inference engine"
    KILLED = "the host ran out of memory and the process was killed"
    HOST = "an allocation in host memory"
    SHARED = "shared memory of the host (/dev/shm)"
    SIGKILL = "the process was killed with signal 9"
    OTHER = "not memory"

    def __str__(self) -> str:
        return self.value


#: Kinds that are about a GPU.
OF_GPU = (Kind.TORCH, Kind.DRIVER, Kind.NCCL, Kind.LIBRARY, Kind.INFERENCE)
#: Kinds that are about the host, for certain.
OF_HOST = (Kind.KILLED, Kind.HOST, Kind.SHARED)

#: A text that only a failure of this kind has -> its kind. Looked for as they are: a log can be large.
_NEEDLES: tuple[tuple[str, Kind], ...] = (
    ("Tried to allocate", Kind.TORCH),
    ("would exceed allowed memory", Kind.TORCH),
    ("CUDA error: out of memory", Kind.DRIVER),
    ("CUDA Error: out of memory", Kind.DRIVER),
    ("CUDA driver error: out of memory", Kind.DRIVER),
    ("HIP error: out of memory", Kind.DRIVER),
    ("cudaErrorMemoryAllocation", Kind.DRIVER),
    ("Triton Error [CUDA]: out of memory", Kind.DRIVER),
    ("Error out of memory at line", Kind.DRIVER),
    ("CUresult error", Kind.DRIVER),
    ("Failed: CUDA error", Kind.DRIVER),
    ("hipErrorOutOfMemory", Kind.DRIVER),
    ("CUDA_ERROR_OUT_OF_MEMORY", Kind.DRIVER),
    ("Failed to CUDA calloc", Kind.NCCL),
    ("Failed to CUDA malloc", Kind.NCCL),
    ("Cuda failure 'out of memory'", Kind.NCCL),
    ("Cuda failure 2 'out of memory'", Kind.NCCL),
    ("CUBLAS_STATUS_ALLOC_FAILED", Kind.LIBRARY),
    ("CUBLAS_STATUS_NOT_INITIALIZED", Kind.LIBRARY),
    ("CUDNN_STATUS_ALLOC_FAILED", Kind.LIBRARY),
    ("cuBLAS Error: the resource allocation failed", Kind.LIBRARY),
    ("DEVICE_ALLOCATION_FAILED", Kind.LIBRARY),
    ("CUSOLVER_STATUS_ALLOC_FAILED", Kind.LIBRARY),
    ("No available memory for the cache blocks", Kind.INFERENCE),
    ("is less than desired GPU memory utilization", Kind.INFERENCE),
    ("larger than the available KV cache memory", Kind.INFERENCE),
    ("Please try to increase --mem-fraction-static", Kind.INFERENCE),
    ("Prefill out of memory. Try to lower", Kind.INFERENCE),
    ("Decode out of memory. Try to lower", Kind.INFERENCE),
    ("out of memory occurred when warming up sampler", Kind.INFERENCE),
    ("oom_kill event", Kind.KILLED),
    ("oom-kill event", Kind.KILLED),
    ("Out of memory: Kill", Kind.KILLED),
    ("Memory cgroup out of memory", Kind.KILLED),
    ("OOMKilled", Kind.KILLED),
    ("OOM Killed", Kind.KILLED),
    ("node running low on memory", Kind.KILLED),
    ("killed due to memory pressure", Kind.KILLED),
    ("TERM_MEMLIMIT", Kind.KILLED),
    ("PBS: job killed: mem", Kind.KILLED),
    ("due to memory used (", Kind.KILLED),
    ("can't allocate memory: you tried", Kind.HOST),
    ("not enough memory: you tried", Kind.HOST),
    ("Cannot allocate memory", Kind.HOST),
    ("MemoryError", Kind.HOST),
    ("out of shared memory", Kind.SHARED),
    ("insufficient shared memory", Kind.SHARED),
    ("unable to allocate shared memory(shm)", Kind.SHARED),
    ("unable to write to file </torch_", Kind.SHARED),
    ("failed to extend /dev/shm/", Kind.SHARED),
    ("Bus error", Kind.SHARED),
    ("killed by signal: Killed", Kind.SIGKILL),
    ("SIGKILL", Kind.SIGKILL),
    ("exitcode: -9", Kind.SIGKILL),
    ("exitcode  : -9", Kind.SIGKILL),
    ("exit code 137", Kind.SIGKILL),
    ("exited with code 137", Kind.SIGKILL),
    ("exit status 137", Kind.SIGKILL),
    ("Killed", Kind.SIGKILL),
    ("out of resource: shared memory", Kind.OTHER),
    ("illegal memory access", Kind.OTHER),
    ("device-side assert", Kind.OTHER),
    ("collective operation timeout", Kind.OTHER),
    ("Cuda failure", Kind.OTHER),
)  # fmt: skip
#: "Killed" as a shell prints it, and not within a sentence.
_KILLED = re.compile(r"(?:^|\s)(?:\d+ )?Killed(?:\s*$|\s{2,})")
#: Places of one text that are looked at.
_MOST_PLACES = 2_000
#: Failures that are read: those of every rank of a large job.
_MOST_EVENTS = 256
#: Characters after its start in which the figures of a failure stand, and before it its traceback.
_AFTER, _BEFORE = 4_000, 60_000

_NUMBER = r"(\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|TiB|KB|MB|GB)"
_UNITS = {
    "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9,
}  # fmt: skip
#: Bytes: torch prints figures below zero as if they were 2**64 and more.
_MOST = 1 << 60
_TRIED = re.compile(rf"Tried to allocate (?:{_NUMBER}|(more than 1EB))")
_OLD = re.compile(
    rf"\(GPU (\d+); {_NUMBER} total capacity; {_NUMBER} already allocated; {_NUMBER} free; (?:{_NUMBER} allowed; )?"
    rf"{_NUMBER} (?:reserved in total by PyTorch|cached)"
)
_CARD = re.compile(rf"GPU (\d+) has a total capaci?ty of {_NUMBER} of which {_NUMBER} is free")
_OTHERS = re.compile(rf"Process (\d+) has {_NUMBER} memory in use")
_OWN = re.compile(rf"this process has {_NUMBER} memory in use")
_ALLOWED = re.compile(rf"{_NUMBER} allowed;")
_ALLOCATED = re.compile(rf"Of the allocated memory {_NUMBER} is allocated by PyTorch")
_PRIVATE = re.compile(rf"with {_NUMBER} allocated in private pools")
_UNALLOCATED = re.compile(rf"and {_NUMBER} is reserved by PyTorch but unallocated")
_ASYNC = {
    "allocated": re.compile(rf"Currently allocated\s*: {_NUMBER}"), "tried": re.compile(rf"Requested\s*: {_NUMBER}"),
    "total": re.compile(rf"Device limit\s*: {_NUMBER}"),
    "free": re.compile(rf"Free \(according to CUDA\)\s*: {_NUMBER}"),
}  # fmt: skip
_CALLOC = re.compile(r"Failed to CUDA [cm]alloc(?: async)? (\d{1,18}) bytes")
_CPU = re.compile(r"you tried to allocate (\d{1,18}) bytes")

_RANK = re.compile(r"\[rank(\d{1,9})\]|\[Rank (\d{1,9})\]|\brank[=:]\s?(\d{1,9})\b|^(\d{1,6}): ")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: What launchers put before a line.
_PREFIX = re.compile(
    r"^(?:\[(?:rank|default)\d+\]: ?|\d{1,6}: |\((?:\w+ )?(?:rank=\d+ )?pid=\d+(?:, ip=[\d.]+)?\) ?)"
)

#: The place of an allocation of pinned host memory, which fails as a CUDA call.
PINNING = "pinning of host memory"
#: (what runs, a phase of the job or None for the step's, a pattern of a traceback): the first that matches decides.
#: Innermost frames do not: a forward pass is inside evaluation, recomputation inside backward.
_PLACES: tuple[tuple[str, Phase | None, re.Pattern[str]], ...] = tuple(
    (name, phase, re.compile(pattern))
    for name, phase, pattern in (
        (PINNING, None, r"in pin_memory|\.pin_memory\(|/pin_memory\.py"),
        ("rollout", None, r"rollout|vllm/|sglang/|generate_sequences|wake_up|resume_memory_occupation"),
        ("save", Phase.SAVE,
         r"save_checkpoint|save_model|save_pretrained|_save_checkpoint|dcp\.save|checkpoint\.save\("),
        ("load", Phase.LOAD,
         r"load_checkpoint|from_pretrained|load_state_dict|load_hf_weights|load_weights|dcp\.load|load_model"),
        ("evaluation", Phase.EVALUATION, r"in evaluate|evaluation_loop|in validate|evaluate_and_print|in eval_step"),
        ("capture of CUDA graphs", None, r"capture_begin|cuda_graphs\.py|capture_model|CUDAGraph|graph_capture"),
        ("optimizer step", None,
         r"optimizer\.step\(|in step\n.*optimizer|fused_adam|/adamw?\.py|in step_with_ready_grads|_init_group"),
        ("gradient clipping", None, r"clip_grad"),
        ("backward", None, r"backward\(|run_backward|in backward|backward_step"),
        ("forward", None, r"forward_step|in forward\b|_call_impl|training_step|compute_loss"),
        ("build", Phase.BUILD,
         r"get_model|setup_model|param_and_grad_buffer|build_model|__init__|initialize_model|model_provider|\.to\(|\.cuda\("),
    )
)  # fmt: skip
_STEP = re.compile(
    r"iteration\s+(\d{1,9})\s*/\s*\d+|\bstep:\s*(\d{1,9})\b|\bstep=(\d{1,9})\b|\bstep (\d{1,9})\b|"
    r"\|\s*(\d{1,9})/\d{1,9} \[\d\d:\d\d|Training Step:?\s*(\d{1,9})"
)


class Figures(NamedTuple):
    """What torch's message says of one GPU, bytes; None where it does not."""

    tried: int | None = None
    device: int | None = None
    total: int | None = None
    free: int | None = None
    #: Of PyTorch; with what free blocks of private pools hold.
    allocated: int | None = None
    private: int | None = None
    #: Free blocks inside of torch's segments.
    unallocated: int | None = None
    #: All that the driver counts for this process.
    in_use: int | None = None
    #: torch.cuda.set_per_process_memory_fraction.
    allowed: int | None = None
    #: (process, bytes) of the others on this GPU.
    others: tuple[tuple[int, int], ...] = ()
    #: It asked for more than any machine has.
    absurd: bool = False

    @property
    def needed(self) -> int | None:
        """The least that the run needed: allocated, and what it asked for."""
        return None if self.allocated is None or self.tried is None else self.allocated + self.tried

    @property
    def reserved(self) -> int | None:
        return None if self.allocated is None or self.unallocated is None else self.allocated + self.unallocated

    @property
    def of_others(self) -> int:
        return sum(nbytes for _, nbytes in self.others)

    @property
    def outside(self) -> int | None:
        """Of this process outside of torch's allocator; where the message does not say, of the whole GPU."""
        if self.reserved is None:
            return None
        if self.in_use is not None:
            return max(0, self.in_use - self.reserved)
        if self.total is None or self.free is None:
            return None
        return max(0, self.total - self.free - self.reserved - self.of_others)

    @property
    def missing(self) -> int | None:
        """What would have had to be free, beyond what was."""
        return None if self.tried is None or self.free is None else max(0, self.tried - self.free)


class Event(NamedTuple):
    """One failure in a text."""

    kind: Kind
    #: The line that says so, without what launchers put before it.
    line: str
    #: Its number, from 1.
    number: int
    rank: int | None
    figures: Figures
    #: What ran, by the traceback: "forward", "optimizer step"; "" where there is none.
    place: str = ""
    phase: Phase | None = None
    #: The last step that was printed before; None: none was.
    step: int | None = None
    #: Where its line begins in the text.
    start: int = 0


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of a text, in its order. ``retries``: how often torch's allocator is said to have emptied its cache
    for an allocation; ``counts``: events by kind."""

    events: tuple[Event, ...]
    counts: dict[Kind, int]
    retries: int

    @property
    def root(self) -> Event | None:
        """The failure that the others follow from: the first that is about memory for certain, preferring what has
        figures; a kill by signal 9 only where nothing else is said."""
        wrong = [e for e in self.events if e.figures.absurd]
        others = [e for e in self.events if e.kind is Kind.OTHER]
        if wrong and others and others[0].number < wrong[0].number:
            return others[0]
        certain = [e for e in self.events if e.kind in (*OF_GPU, *OF_HOST)]
        if certain:
            first = certain[0]
            # A rank's call outside of torch fails where another's allocator does: that one's figures say more.
            torch = [e for e in certain if e.kind is Kind.TORCH]
            return torch[0] if torch and first.kind in OF_GPU else first
        return next(iter([e for e in self.events if e.kind is Kind.SIGKILL] or others), None)


def failures(text: str) -> Failures:
    """Every failure in ``text``. Takes linear time, whatever it holds."""
    found: dict[int, tuple[int, Kind]] = {}
    counts: Counter[Kind] = Counter()
    for needle, kind in _NEEDLES:
        for at in _places(text, needle):
            start = max(text.rfind("\n", 0, at) + 1, at - _AFTER)
            line = text[start : _end(text, at)]
            if start in found or not _meant(needle, kind, line, text[max(0, at - 80) : at]):
                continue
            found[start] = (at, kind)
            counts[kind] += 1
    events, number, last = [], 1, 0
    for start, (at, kind) in sorted(found.items())[:_MOST_EVENTS]:
        number += text.count("\n", last, start)
        last = start
        events.append(_event(text, start, at, kind, number))
    return Failures(tuple(_once(events)), dict(counts), _retries(text))


def _places(text: str, needle: str) -> Iterator[int]:
    at, number = text.find(needle), 0
    while at >= 0 and number < _MOST_PLACES:
        yield at
        number += 1
        at = text.find(needle, at + len(needle))


def _end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else min(end, at + _AFTER)


def _meant(needle: str, kind: Kind, line: str, before: str) -> bool:
    """Whether the line is a failure, and no sentence with the same words; ``before``: what is right before it."""
    if needle == "Tried to allocate":
        return "out of memory" in before.lower() or "OutOfMemory" in before
    if needle == "Killed":
        return _KILLED.search(line) is not None and "OOM" not in line
    if needle == "SIGKILL":
        return "closing signal" not in line and "Setting" not in line
    if needle == "MemoryError":
        return re.search(r"(?:^|\s)MemoryError\b", line) is not None and "OutOfMemoryError" not in line
    if needle in ("Failed: CUDA error", "CUresult error"):
        return "out of memory" in line
    if needle == "Cuda failure":
        return "out of memory" not in line
    return not (kind is Kind.OTHER and needle == "illegal memory access" and line.lstrip().startswith("#"))


def _once(events: list[Event]) -> Iterator[Event]:
    """Without those that a chained exception, or a logger beside the traceback, prints again."""
    known: set[tuple[Kind, int | None, Figures, str]] = set()
    for event in events:
        key = (event.kind, event.rank, event.figures, event.line if event.figures == Figures() else "")
        if key not in known:
            known.add(key)
            yield event


def _event(text: str, start: int, at: int, kind: Kind, number: int) -> Event:
    line = text[start : _end(text, at)]
    after = " ".join(" ".join(bare(part) for part in text[at : at + _AFTER].split("\n")).split())
    return Event(kind, bare(line).strip()[:_LINE], number, _rank(line), _figures(after, kind), start=start)


def located(text: str, event: Event) -> Event:
    """``event`` with its place, phase and step, which take a look back at what is before it."""
    trace = _traceback(text[max(0, event.start - _BEFORE) : event.start], event.rank)
    found = (one for one in _PLACES if trace and one[2].search(trace))
    place, phase = next(((name, phase) for name, phase, _ in found), ("", None))
    return event._replace(place=place, phase=phase, step=_last_step(text, event.start))


#: Characters of a line that are kept.
_LINE = 1_000


def bare(line: str) -> str:
    """A line without colours and what launchers put before it."""
    return _PREFIX.sub("", _ANSI.sub("", line))


def _rank(line: str) -> int | None:
    match = _RANK.search(line[:400])
    return None if match is None else int(next(group for group in match.groups() if group is not None))


def _traceback(before: str, rank: int | None) -> str:
    """The last traceback of ``before``, of ``rank`` where lines name ranks."""
    start = before.rfind("Traceback (most recent call last)")
    lines = before[start if start >= 0 else max(0, len(before) - 6_000) :].split("\n")
    if rank is not None:
        lines = [line for line in lines if _rank(line) in (None, rank)]
    kept = [bare(line) for line in lines]
    return "\n".join(kept) if start >= 0 or any(line.lstrip().startswith("File ") for line in kept) else ""


def _last_step(text: str, start: int) -> int | None:
    """The last step before ``start``, looked for backwards in growing stretches."""
    for reach in (_BEFORE, 16 * _BEFORE):
        found = list(_STEP.finditer(_ANSI.sub("", text[max(0, start - reach) : start])))
        if found:
            return int(next(group for group in found[-1].groups() if group is not None))
    return None


def _bytes(number: str | None, unit: str | None) -> int | None:
    if number is None or unit is None:
        return None
    value = float(number) * _UNITS[unit]
    return round(value) if value < _MOST else None


def _search(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return None if match is None else _bytes(match[1], match[2])


def _figures(text: str, kind: Kind) -> Figures:
    if kind is Kind.NCCL:
        match = _CALLOC.search(text[:1_500])
        return Figures() if match is None else Figures(tried=int(match[1]))
    if kind is Kind.HOST:
        match = _CPU.search(text[:1_500])
        return Figures() if match is None else Figures(tried=int(match[1]))
    if kind is not Kind.TORCH:
        return Figures()
    if "would exceed allowed memory" in text[:200]:
        read: dict[str, Any] = {name: _search(pattern, text[:1_500]) for name, pattern in _ASYNC.items()}
        return Figures(**read)
    again = text.find("Tried to allocate", 10)
    text = text[: again if again > 0 else None]
    tried = _TRIED.search(text)
    size = None if tried is None else _bytes(tried[1], tried[2])
    absurd = tried is not None and tried[3] is not None
    old = _OLD.search(text)
    if old is not None:
        g = old.groups()
        total, allocated, free, allowed, reserved = (_bytes(g[i], g[i + 1]) for i in (1, 3, 5, 7, 9))
        left = None if reserved is None or allocated is None else max(0, reserved - allocated)
        return Figures(size, int(g[0]), total, free, allocated, None, left, None, allowed, (), absurd)
    card = _CARD.search(text)
    found = Figures(
        size, None if card is None else int(card[1]), None if card is None else _bytes(card[2], card[3]),
        None if card is None else _bytes(card[4], card[5]), _search(_ALLOCATED, text), _search(_PRIVATE, text),
        _search(_UNALLOCATED, text), _search(_OWN, text), _search(_ALLOWED, text),
        tuple((int(m[1]), nbytes) for m in _OTHERS.finditer(text) if (nbytes := _bytes(m[2], m[3])) is not None),
        absurd,
    )  # fmt: skip
    return _this_process(found)


def _this_process(found: Figures) -> Figures:
    """In a container the driver counts this process under a number that it does not know as its own: that is the one
    which holds what torch reserved."""
    if found.in_use is not None or found.reserved is None or not found.others:
        return found
    # Figures have two digits after the point.
    holds = [(pid, nbytes) for pid, nbytes in found.others if nbytes >= found.reserved * 0.999 - (16 << 20)]
    if not holds:
        return found
    own = min(holds, key=lambda one: one[1])
    return found._replace(in_use=own[1], others=tuple(one for one in found.others if one != own))


#: The allocator emptied its cache to serve an allocation.
_RETRIES = (
    re.compile(r"(\d{1,9}) (?:CUDA|HIP|XPU) memory allocation retries"),
    re.compile(r"(\d{1,9}) pytorch allocator cache flushes since last step"),
    re.compile(r"num_alloc_retries\W{1,4}(\d{1,9})"),
)


def _retries(text: str) -> int:
    """The most that a line says."""
    needles = ("memory allocation retries", "allocator cache flushes", "num_alloc_retries")
    if not any(needle in text for needle in needles):
        return 0
    return max((int(m[1]) for pattern in _RETRIES for m in pattern.finditer(text)), default=0)
