"""Rows of a corpus from what a run left: the journal of ``MemoryReport``, or a log of Megatron.

A row says what ran as the canonical run (``spec.canonical``: sizes, options and releases), which has no names, and the
figures of torch by rank. What else the file holds (paths, hosts, arguments that move no memory, notes) is not copied.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import FIRST_STEP, STEADY, ReportRecord, RunRecord, StageRecord
from bridge_memory.cards.gpu import Gpu
from bridge_memory.cards.names import gpu_called
from bridge_memory.comparison.compare import MOST_OF_A_LOG, run_printed_in
from bridge_memory.comparison.logs import MeasuredRank, latest_of_each_rank
from bridge_memory.comparison.snapshot import is_snapshot
from bridge_memory.files import read_bytes, text_of
from bridge_memory.readers import list_presets
from bridge_memory.readers.megatron_args.arguments import KNOWN
from bridge_memory.readers.run_spec import run_from_json, run_to_json
from bridge_memory.releases import Release, release_words
from bridge_memory.spec import RunSpec, SpecError, show
from bridge_memory.spec.canonical import canonical
from bridge_memory.spec.ranks import stage_of_rank
from bridge_memory.spec.unmodelled import as_feature

SCHEMA = "bridge-memory/record/1"
_GIVE = "give the journal of MemoryReport, or a log of Megatron-LM or Megatron Bridge"
#: What a string of a row may hold: words of options. No dot, slash, colon or at-sign, of which paths, addresses, hosts
#: and links are made, and no word as long as a token.
_WORDS = re.compile(r"[A-Za-z0-9_+*|(), -]{0,200}")
_TOKEN = re.compile(r"(?=[a-zA-Z_-]*\d)[\w-]{24,}|[\w-]{41,}")
#: Strings that are long and safe: a published model's name, and the layout, which its parser read.
_SAFE = ("run.model.name", "run.parallel.pipeline_model_parallel_layout")
#: The name that a sentence on an unmodelled feature begins with.
_FEATURE = re.compile(r"-{0,2}([A-Za-z][A-Za-z0-9_-]{1,40})")
#: Package, as a journal names it -> in a row.
_PACKAGES = {
    "torch": "torch", "megatron.core": "megatron_core", "transformer_engine": "transformer_engine",
    "megatron.bridge": "megatron_bridge",
}  # fmt: skip
#: "2.9" or "2.9.0", and no address.
_RELEASE = re.compile(r"\d{1,4}\.\d{1,4}(?:\.\d{1,4})?(?!\.?\d)")
_GIB = 1 << 30


class Recorded(NamedTuple):
    """One run as a row of a corpus, and what of its file is not in it, in words."""

    row: dict[str, Any]
    left_out: tuple[str, ...]

    @property
    def line(self) -> str:
        """The row as a line of a file."""
        return json.dumps(self.row, ensure_ascii=True, allow_nan=False) + "\n"


def recorded(
    path: str, run: RunSpec | None = None, gpu: Gpu | None = None, *, releases: Mapping[str, Release] | None = None,
    pp_before_dp: bool = False,
) -> list[Recorded]:  # fmt: skip
    """A row for each run in a file.

    Args:
        path: A journal or a log.
        run: What ran; None: what the file says.
        gpu: The card; None: the one that the journal names.
        releases: Of packages (fields of ImplementationSpec), which the file does not say or says wrongly.
        pp_before_dp: Ranks run through pipeline stages before data-parallel replicas (Megatron's
            ``--use-tp-pp-dp-mapping``).

    Raises:
        SpecError: The file is another, or leaves open what ran, on which GPU, or what was measured.
    """
    data = read_bytes(path, _GIVE, MOST_OF_A_LOG)
    if is_snapshot(data[:16]):
        raise SpecError(f"{path} is a memory snapshot, which is one moment of one rank; {_GIVE}")
    lines = text_of(data, errors="replace").splitlines()
    if any(f'"{journal.SCHEMA}"' in line for line in lines):
        found = _of_journal(path, lines, run, gpu, releases or {}, pp_before_dp)
        return list({one.line: one for one in found}.values())
    for line in lines:
        journal.check_schema(line)
    return [_of_log(path, lines, run, gpu, releases or {}, pp_before_dp)]


def _of_journal(
    path: str, lines: Sequence[str], given: RunSpec | None, gpu: Gpu | None, releases: Mapping[str, Release],
    pp_before_dp: bool,
) -> Iterator[Recorded]:  # fmt: skip
    starts: list[tuple[RunRecord, list[ReportRecord]]] = []
    for record in journal.records(lines):
        if isinstance(record, RunRecord):
            starts.append((record, []))
        else:
            if not starts:
                starts.append((RunRecord(), []))
            starts[-1][1].append(record)
    measured = [(start, figures) for start, reports in starts if (figures := _figures(reports))]
    if not measured:
        raise SpecError(f"{path} holds no report after a step; let the run do two steps")
    for start, figures in measured:
        run = given
        if run is None:
            if not start.run:
                raise SpecError(
                    f"{path} does not say what ran, as an older release wrote it or nothing was predicted; name the "
                    "MODEL and its flags"
                )
            run = _with(run_from_json(start.run), releases)
        card = gpu or _card(path, start.machine["gpu"] if start.machine is not None else "")
        packages = {
            name: start.versions.get(package, "") for package, name in _PACKAGES.items() if name not in releases
        }
        yield _row(
            run, card, figures, _releases(packages, run), "journal", pp_before_dp,
            ("the journal's times, notes and predictions",),
        )


#: Moment of a report -> how many steps are done; None: all that matter to a peak.
_AFTER_STEP = {FIRST_STEP: 1, STEADY: None}


def _figures(reports: Sequence[ReportRecord]) -> list[MeasuredRank]:
    """The last figures of every stage's fullest rank; of reports before the first step none."""
    latest: dict[int, tuple[StageRecord, int | None]] = {}
    for report in reports:
        # Peaks never fall. A steady report comes after two steps that were not skipped, when no later peak is higher.
        if report.moment not in _AFTER_STEP:
            continue
        steps = _AFTER_STEP[report.moment]
        for stage in report.stages:
            if stage.worst_rank is not None and stage.max_allocated:
                latest[stage.stage] = stage, steps
    return [
        MeasuredRank(s.worst_rank or 0, steps, s.allocated, s.max_allocated, s.reserved, stage=number)
        for number, (s, steps) in sorted(latest.items())
    ]


def _of_log(
    path: str, lines: Sequence[str], given: RunSpec | None, gpu: Gpu | None, releases: Mapping[str, Release],
    pp_before_dp: bool,
) -> Recorded:  # fmt: skip
    measured = [rank for rank in latest_of_each_rank(lines) if rank.max_allocated]
    if not measured:
        raise SpecError(f"{path} holds no memory figures of a rank; {_GIVE}")
    if gpu is None:
        raise SpecError(f"{path} is a log, which does not name its GPU; add --gpu NAME")
    run = _with(run_printed_in(path, lines), releases) if given is None else given
    why = ("lines of the log that are not figures of memory", "arguments as typed, with their paths and names")
    return _row(run, gpu, measured, _releases({}, run), "log", pp_before_dp, why)


def _with(run: RunSpec, releases: Mapping[str, Release]) -> RunSpec:
    changes: dict[str, Any] = dict(releases)
    return run.with_(implementation=replace(run.implementation, **changes)) if changes else run


def _card(path: str, device: str) -> Gpu:
    found = gpu_called(device[:100])
    if found is None:
        raise SpecError(f"{path} names no GPU that is known here; add --gpu NAME (`bridge-memory gpus` lists them)")
    return found


def _releases(found: Mapping[str, str], run: RunSpec) -> dict[str, str]:
    """Releases by package, as numbers alone: of the process where it said them, else of the run."""
    told = {name: match[0] for name, text in found.items() if (match := _RELEASE.match(text))}
    implementation = run.implementation
    for name in ("megatron_core", "transformer_engine", "torch"):
        release = getattr(implementation, name)
        if release is not None:
            told.setdefault(name, release_words(release))
    return told


def _row(
    run: RunSpec, gpu: Gpu, measured: Sequence[MeasuredRank], releases: Mapping[str, str], source: str,
    pp_before_dp: bool, left_out: Sequence[str],
) -> Recorded:  # fmt: skip
    if gpu.arch is not None:
        run = run.with_(implementation=replace(run.implementation, gpu_arch=gpu.arch))
    names = _unnamed(run)
    ranks = [_rank(rank, run, pp_before_dp) for rank in measured]
    config: dict[str, Any] = {"kind": "run_spec", "run": run_to_json(names)}
    if pp_before_dp:
        config["args"] = {"--use-tp-pp-dp-mapping": True}
    _check(config["run"], "run")
    peak = max(rank["max_allocated_bytes"] for rank in ranks)
    told = {"gpu": gpu.name, "config": config, "measured": ranks, "framework": dict(releases)}
    row = {
        "id": f"contributed/{_digest(told)}",
        "family": f"contributed/{_digest(config)}",
        "tier": 1 if peak >= 4 * _GIB else 2 if peak >= _GIB else 3,
        "gpu": gpu.name,
        "world_size": run.parallel.world_size,
        "framework": dict(releases),
        "config": config,
        "measured": ranks,
        "provenance": {"kind": source},
    }
    name = () if run.model.name == names.model.name else ("the model's name, which is not a published one",)
    return Recorded(row, (*left_out, *name))


def _unnamed(run: RunSpec) -> RunSpec:
    """The run without a name, note or sentence of anybody; a published model keeps its name. Features that are not
    modelled keep theirs, since a prediction without them is no test of one with."""
    plain = canonical(run)
    sentences = dict.fromkeys((*run.model.not_modelled, *run.not_modelled))
    features = [_feature(sentence) for sentence in sentences if not as_feature(sentence).outside]
    words = tuple(f"{name} is not modelled" for name in dict.fromkeys(features))
    model = replace(
        plain.model, name=run.model.name if run.model.name in list_presets() else "",
        encoders=tuple(replace(encoder, name="encoder") for encoder in plain.model.encoders), not_modelled=words,
    )  # fmt: skip
    return plain.with_(model=model)


def _feature(sentence: str) -> str:
    """The option that a sentence begins with, where it is one of Megatron's."""
    found = _FEATURE.match(sentence)
    name = found[1].replace("-", "_") if found else ""
    return name if name in KNOWN else "a feature"


def _rank(measured: MeasuredRank, run: RunSpec, pp_before_dp: bool) -> dict[str, int]:
    """A rank's figures. Raises SpecError for ranks that the run has not, and for figures that cannot be."""
    world = run.parallel.world_size
    if not 0 <= measured.rank < world:
        raise SpecError(f"rank {measured.rank} is none of the {world} ranks of the run; name what ran")
    stage = stage_of_rank(run.parallel, measured.rank, pp_before_dp=pp_before_dp)
    if measured.stage is not None and measured.stage != stage:
        raise SpecError(
            f"rank {measured.rank} was on stage {measured.stage} and would be on stage {stage} of the run; if its "
            "ranks run through stages before replicas, add --use-tp-pp-dp-mapping"
        )
    assert measured.max_allocated is not None
    figures = {
        "rank": measured.rank, "allocated_bytes": measured.allocated, "max_allocated_bytes": measured.max_allocated,
        "reserved_bytes": measured.reserved, "after_step": measured.iteration,
    }  # fmt: skip
    told = {name: value for name, value in figures.items() if value is not None}
    if min(told.values()) < 0 or told.get("allocated_bytes", 0) > measured.max_allocated:
        raise SpecError(f"rank {measured.rank} has figures that cannot be; give the file as it was written")
    return told


def _check(value: Any, where: str) -> None:
    """Raise SpecError for a string that is no word of a configuration."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            _check(member, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for member in value:
            _check(member, where)
    elif isinstance(value, str) and where not in _SAFE and (
        not _WORDS.fullmatch(value) or _TOKEN.search(value)
    ):
        raise SpecError(f"{where} ({show(value)}) is no word of a configuration, so it is not recorded; correct it")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


