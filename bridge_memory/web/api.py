"""Questions and answers of the page as plain data, described by ``openapi``; independent of HTTP.

Computations run one at a time (traces of blocks have one cache). Estimates go before the changes of a what-if, which
are tried one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from bridge_memory.cards.gpu import Gpu
from bridge_memory.cards.rows import GPUS, common_gpus
from bridge_memory.emit.formats import texts_of
from bridge_memory.emit.megatron import estimate_command
from bridge_memory.estimation import Estimate, estimate
from bridge_memory.job.job import Job, job_steps, jobs_of, judged
from bridge_memory.plan.changes import Effect, WhatIf, changes, makes_it_fit, to_try_first
from bridge_memory.readers import list_presets, resolve_model
from bridge_memory.report.answer import answer_of
from bridge_memory.report.json import estimate_to_json
from bridge_memory.report.page.data import timeline_data, treemap_data
from bridge_memory.report.page.one_file import estimate_page
from bridge_memory.report.phases import phases_data, whole_answer
from bridge_memory.report.summary import media_of
from bridge_memory.report.units import format_bytes
from bridge_memory.spec import RunSpec, SpecError, show
from bridge_memory.spec.parts import ENGINE_OPTIONS, ENGINES, WITH_MEGATRON_LAYOUTS
from bridge_memory.speed.hardware import HARDWARE, Hardware
from bridge_memory.speed.megatron.step_time import not_timed, step_time
from bridge_memory.speed.step_time import tokens_per_second_per_gpu
from bridge_memory.verdict import fits, margin_words
from bridge_memory.web.fixes import Refuses, label, refusal, untried
from bridge_memory.web.options import (
    DEFAULT_GPU,
    KEYS,
    PASTED,
    Asked,
    asked,
    option_values,
    options,
    post_training_of,
    search_axes,
)
from bridge_memory.web.words import title

_Answer = TypeVar("_Answer")

Question = Mapping[str, Any]
#: ``transformer_impl`` values that the time model covers.
_TIMED = ("transformer_engine", "local")


#: What is said where there is too much to do, and seconds that a question waits for its turn.
BUSY = "the server has too much to do; ask again in some seconds"
WAIT = 60.0


class Refused(Exception):
    """A question that cannot be answered; ``document`` is {field, fields, message, fix, changes}."""

    def __init__(self, document: dict[str, Any], status: int = 422) -> None:
        super().__init__(document["message"])
        self.document, self.status = document, status


class Desk:
    """A lock: one computation at a time, urgent ones first. Who waits too long is refused."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._busy = False
        self._urgent = 0

    @contextmanager
    def turn(self, *, urgent: bool = False) -> Iterator[None]:
        with self._free:
            self._urgent += urgent
            mine = self._free.wait_for(lambda: not self._busy and (urgent or not self._urgent), WAIT)
            self._urgent -= urgent
            if not mine:
                self._free.notify_all()
                raise Refused(plain_refusal(BUSY), 503)
            self._busy = True
        try:
            yield
        finally:
            with self._free:
                self._busy = False
                self._free.notify_all()


class Api:
    """The answers of one server."""

    def __init__(self, *, hub: bool = False) -> None:
        self.hub = hub
        self._desk = Desk()
        #: The job of the last run that was asked for, which estimate, phases and report share.
        self._last: tuple[RunSpec, Gpu, Job] | None = None

    # ---- options and models ----

    def options(self) -> dict[str, Any]:
        """Data of the page's form: options, GPUs, engines."""
        from bridge_memory import __version__

        return {
            "version": __version__, "hub": self.hub, "default_gpu": DEFAULT_GPU, "engines": dict(ENGINES),
            "megatron_engines": list(WITH_MEGATRON_LAYOUTS), "engine_options": dict(ENGINE_OPTIONS),
            "gpus": [
                {"name": g.name, "description": g.description, "capacity_bytes": g.capacity_bytes, "common": g.common}
                for g in GPUS.values()
            ],
            "options": [option.as_json() for option in options().values()],
            "varied": {whose: list(usual) for whose, (_, usual) in search_axes().items()},
        }  # fmt: skip

    def models(self) -> list[dict[str, Any]]:
        """The embedded models."""
        with self._desk.turn():
            return _models()

    # ---- a run ----

    def asked(self, question: object) -> Asked:
        """The parsed question. Raises Refused."""
        return _answered(question, lambda q: asked(q, hub=self.hub))

    def estimate(self, question: object) -> dict[str, Any]:
        """One run: every stage, the verdict, and its commands. Raises Refused."""
        def answer(q: Question) -> dict[str, Any]:
            one = asked(q, hub=self.hub)
            found, job = _estimate(one, q.get("stage"), self._known(one))
            self._last = None if job is None else (one.run, one.gpu, job)
            return found

        with self._desk.turn(urgent=True):
            return _answered(question, answer, self._refuses)

    def report(self, question: object) -> dict[str, Any]:
        """The one-file HTML report of a run and its Markdown, with its phases. Raises Refused."""
        from bridge_memory.report.markdown import markdown
        from bridge_memory.report.phases import job_blocks
        from bridge_memory.report.table import estimate_blocks

        one, job = self._job(question)

        def page(_: Question) -> dict[str, Any]:
            result = estimate(one.run)
            command = _command(one)
            flags = f"{command} --phases" if command else ""
            judge = judged(fits(result, [one.gpu]), [job])
            blocks = [*estimate_blocks(result, judge, jobs=[job]), *job_blocks(job, step=judge[0].verdict)]
            return {
                "html": estimate_page(result, judge, flags=flags, jobs=[job]), "markdown": markdown(blocks),
            }  # fmt: skip

        with self._desk.turn():
            return _answered(question, page, self._refuses)

    def rollout(self, question: object) -> dict[str, Any]:
        """A pasted post-training job, phase by phase, and what would fit. Raises Refused."""
        from bridge_memory.report.rollout import rollout_data
        from bridge_memory.rollout.answer import answer, limits

        def found(q: Question) -> dict[str, Any]:
            job = post_training_of(q)
            if job is None:
                raise SpecError("config is no configuration of verl, NeMo-RL, slime, TRL or ms-swift; paste one")
            named = next((name for name in q.get("options") or () if options()[name].group == "batch"), None)
            if named is not None:
                raise SpecError(f"{options()[named].called} is set by {PASTED}; change it there")
            result = answer(*job)
            return rollout_data(result, limits(result))

        with self._desk.turn():
            return _answered(question, found, self._refuses)

    def phases(self, question: object) -> dict[str, Any]:
        """The whole job on the GPU of the question, phase by phase. Raises Refused."""
        one, job = self._job(question)
        with self._desk.turn():
            return _answered(
                question, lambda _: phases_data(job, judged(fits(estimate(one.run), [one.gpu]), [job])), self._refuses
            )

    def _known(self, one: Asked) -> Job | None:
        last = self._last
        return last[2] if last is not None and last[:2] == (one.run, one.gpu) else None

    def _job(self, question: object) -> tuple[Asked, Job]:
        """In several turns, so that an estimate need not wait for the whole of it."""
        with self._desk.turn():
            one = _answered(question, lambda q: asked(q, hub=self.hub), self._refuses)
            known = self._known(one)
            if known is not None:
                return one, known
            steps = job_steps(_answered(question, lambda _: estimate(one.run), self._refuses), one.gpu)
        while True:
            with self._desk.turn():
                try:
                    _answered(question, lambda _: next(steps), self._refuses)
                except StopIteration as done:
                    self._last = one.run, one.gpu, done.value
                    return one, done.value

    def whatif(self, question: object) -> dict[str, Any]:
        """Memory freed by changing one option, largest first, and the fastest change that makes the run fit. Raises
        Refused."""
        with self._desk.turn():
            run, gpu, _ = self.asked(question)
            whatif = _answered(question, lambda _: WhatIf(run, HARDWARE.get(gpu.name)))
        effects: list[Effect] = []
        fitting: set[object] = set()
        for change in dict.fromkeys(changes(run)):
            with self._desk.turn():
                effect = whatif.effect((change,))
                if effect is None or effect.freed <= 0:
                    continue
                effects.append(effect)
                if makes_it_fit(effect, gpu):
                    fitting.add(effect.changes)
        given = question["options"] if isinstance(question, Mapping) and question.get("options") else {}
        effects.sort(key=lambda e: -e.freed)
        cheapest = to_try_first(e for e in effects if e.changes in fitting)
        cards = [card for card in common_gpus() if card.name != gpu.name]
        with self._desk.turn():
            result = estimate(run)
            others = [fit for fit in fits(result, cards) if not fit.lacks]
            verdicts = {fit.gpu: fit.verdict for fit in others}
            verdicts |= {job.gpu.name: job.verdict for job in jobs_of(result, others)}
        return {
            "peak_bytes": whatif.before,
            "other_gpus": [{"gpu": name, "verdict": str(verdict)} for name, verdict in verdicts.items()],
            "changes": [_effect(e, e.changes in fitting, given) for e in effects],
            "cheapest": None if cheapest is None else _effect(cheapest, True, given),
        }

    def _refuses(self, question: Question) -> SpecError | None:
        try:
            asked(question)
        except SpecError as error:
            return error
        return None


def _answered(question: object, answer: Callable[[Question], _Answer], refuses: Refuses = untried) -> _Answer:
    if not isinstance(question, Mapping):
        raise Refused(plain_refusal(f"the question ({show(question)}) is not an object; give {', '.join(KEYS)}"), 400)
    try:
        return answer(question)
    except SpecError as error:
        raise Refused(refusal(error, question, refuses)) from None


def plain_refusal(message: str, field: str | None = None) -> dict[str, Any]:
    """{field, fields, message, fix, changes} of a refusal without suggested changes."""
    _, semicolon, fix = message.rpartition("; ")
    return {
        "field": field, "fields": [field] if field else [], "message": message, "fix": fix if semicolon else "",
        "changes": [],
    }  # fmt: skip


@cache
def _models() -> list[dict[str, Any]]:
    from bridge_memory.inventory.counts import model_parameters

    rows = []
    for name in list_presets():
        model = resolve_model(name)
        parameters, _ = model_parameters(model)
        rows.append(
            {
                "name": name, "model_type": model.model_type, "num_layers": model.num_layers,
                "hidden_size": model.hidden_size, "parameters": parameters, "experts": model.has_experts,
            }
        )  # fmt: skip
    return rows


def _estimate(one: Asked, stage: object, known: Job | None) -> tuple[dict[str, Any], Job | None]:
    """The answer, and the job by which it judges; ``known``: that one."""
    run, gpu, _ = one
    if stage is not None and (type(stage) is not int or stage < 0):
        raise SpecError(f"{show(stage)} is no stage of the pipeline; give a number of 0 or more")
    result = estimate(run)
    fitting = fits(result, [gpu])
    jobs = jobs_of(result, fitting) if known is None else [known]
    fitting = judged(fitting, jobs)
    document = estimate_to_json(result, fitting, jobs=jobs)
    document.pop("job", None)  # that is ``Api.phases``
    answer = answer_of(result, fitting)
    found = {
        "estimate": document, "fit": fitting[0].step_json(), "experts": run.model.has_experts,
        "encoders": _encoders(run), "media": ". ".join(media_of(run)),
        "answer": answer.words, "evidence": answer.evidence, "band": answer.band_words,
        "whole": whole_answer(jobs[0], fitting) if jobs else None,
        "margin": list(margin_words(run, fitting, format_bytes)),
        "rollout": hasattr(one.args, "post_training"),
        "effective": _effective(run), "step": _step(one), "drawn": _drawn(result, stage),
        "exports": {"command": _command(one), "texts": _texts(one)},
    }  # fmt: skip
    return found, jobs[0] if jobs else None


def _encoders(run: RunSpec) -> list[str]:
    """Kinds of encoders whose activations are known: "vision", "audio"."""
    encoders = () if run.implementation.torch_layers else run.model.encoders
    known = [encoder.structure for encoder in encoders if encoder.structure is not None]
    return sorted({"audio" if structure.audio else "vision" for structure in known})


def _command(one: Asked) -> str:
    """The equivalent ``estimate`` command; "" where the run is given as Megatron's arguments or another trainer's
    configuration."""
    run, gpu, args = one
    if args.megatron_args is not None or hasattr(args, "pasted"):
        return ""
    return estimate_command(run, args, gpu.name)


def _texts(one: Asked) -> list[dict[str, str]]:
    """The run in the words of those trainers that can say it."""
    run, gpu, args = one
    return [
        {"format": how, "title": title, "text": found.commented, "note": found.note}
        for how, title, found in ([] if hasattr(args, "pasted") and run.implementation.torch_layers
                                  else texts_of(run, args, gpu.name))
    ]


def _drawn(result: Estimate, stage: int | None) -> dict[str, Any]:
    """Timeline and treemap of one stage for ``report/page/charts.js``; default: the stage with the highest peak."""
    if stage is None or stage >= len(result.stages):
        stage = result.peak_stage.stage
    return {"stage": stage, "timeline": timeline_data(result, stage), "treemap": treemap_data(result, stage)}


def _effective(run: RunSpec) -> dict[str, Any]:
    """Option -> its value in this run, given or by default."""
    found: dict[str, Any] = {}
    for option in options().values():
        group, dot, field = option.field.partition(".")
        if dot:
            value = getattr(getattr(run, group), field)
            found[option.name] = option.plain(value)
    p, m = run.parallel, run.model
    found |= {
        "etp": p.etp, "sequence-parallel": p.sp, "dp": p.data_parallel_size, "microbatches": run.num_microbatches,
        "global-batch-size": run.sequences_per_step,
        "vpp": p.vpp, "num-layers": m.num_layers, "mtp-num-layers": m.mtp_num_layers,
        "hidden-dropout": m.hidden_dropout, "attention-dropout": m.attention_dropout,
    }  # fmt: skip
    return found


def hardware_for(run: RunSpec, gpu: Gpu) -> Hardware | None:
    """The GPU's figures for the time model; None where it does not cover the GPU or the implementation."""
    return HARDWARE.get(gpu.name) if run.implementation.transformer_impl in _TIMED else None


def _step(one: Asked) -> dict[str, Any] | None:
    """Predicted seconds per step and tokens/s/GPU; None for a GPU without figures."""
    run, gpu, _ = one
    hardware = hardware_for(run, gpu)
    if hardware is None:
        return None
    try:
        seconds = step_time(run, hardware).seconds
    except SpecError:
        return None
    return {
        "seconds": seconds, "tokens_per_second_per_gpu": tokens_per_second_per_gpu(run, seconds),
        "not_timed": list(not_timed(run)),
    }  # fmt: skip


def _effect(effect: Effect, fitting: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    changed = option_values({name: value for change in effect.changes for name, value in change.fields})
    # A default is expressed by dropping the option.
    changed = {name: None if value == options()[name].default else value for name, value in changed.items()}
    changed = {name: value for name, value in changed.items() if value is not None or name in given}
    return {
        "title": title(effect.changes[0]), "options": changed, "words": label(changed), "freed_bytes": effect.freed,
        "peak_bytes": effect.peak, "step_time_factor": effect.slowdown, "fits": fitting,
    }  # fmt: skip
