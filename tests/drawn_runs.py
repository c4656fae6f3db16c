"""Random runs that can be estimated: any engine, any field, values by the field's own rule. Always the same for a seed.

A run starts from a model and parallel sizes; then fields are drawn one by one and kept where the run stays legal. So
most runs have a dozen options that differ from the defaults, and no field is drawn less for being refused often.
"""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import redirect_stderr
from dataclasses import fields, replace
from io import StringIO
from random import Random
from typing import Any

from scripts_of import load_script

from bridge_memory import ModelSpec, RunSpec, SpecError, estimate, list_presets, resolve_model
from bridge_memory.arguments.flags import FLAGS, SPECS, add_run_arguments
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.spec.fields import Rule, rules_of
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.spec.parts import ENGINES, SHARDING_STRATEGIES
from bridge_memory.spec.run import GROUPS

freeze = load_script("maintain/freeze")
MODELS = (*freeze.MODELS, *list_presets())  # those that differ most twice as often
#: Sizes that mean something for a field; of others a few small numbers within its rule.
NUMBERS = {
    **freeze.NUMBERS,
    "seq_length": (128, 1000, 4096, 8192, 32768), "micro_batch_size": (1, 2, 3, 8),
    "global_batch_size": (None, 8, 64, 96, 512), "recompute_num_layers": (1, 2, 5),
    "megatron_core": ((0, 13), (0, 15), (0, 16), (0, 17), (0, 18), (0, 19)),
    "transformer_engine": (None, (2, 2), (2, 11), (2, 17), (2, 20)), "torch": (None, (2, 6), (2, 10), (2, 12)),
}  # fmt: skip
#: The GPU of command lines: most runs fit it, and its generation is not the default one.
GPU = "B300"
#: Fields that say which run it is; they are drawn first, or are another engine's.
FIRST = {"world_size", "engine", "pipeline_model_parallel_layout"}


def legal(model: ModelSpec, groups: dict[str, dict[str, Any]]) -> RunSpec | None:
    try:
        return RunSpec(model=model, **{name: GROUPS[name](**values) for name, values in groups.items()})
    except SpecError:
        return None


def a_value(name: str, rule: Rule, draw: Random) -> Any:
    """A value within the rule of a field; some that are refused with others."""
    none = (None,) * (type(None) in rule.types)
    if name in NUMBERS:
        return draw.choice(NUMBERS[name])
    if rule.release:
        return draw.choice((*none, (4, 57), (5, 0)))
    if tuple in rule.types:
        return tuple(draw.sample(rule.names, draw.randint(1, min(3, len(rule.names))))) if rule.names else ()
    if bool in rule.types:
        return draw.choice((*none, True, False))
    if rule.names:
        return draw.choice((*none, *rule.names))
    if rule.fraction_below_one is not None:
        return draw.choice((0.0, 0.1, 0.5) if rule.fraction_below_one else (0.0, 0.25, 0.5, 1.0))
    numbers = [n for n in (0, 1, 2, 3, 4, 8, 64, 10**6, 5 * 10**8) if rule.lowest <= n < rule.below]
    return draw.choice((*none, *numbers)) if numbers and int in rule.types else None


def sizes(engine: str, model: ModelSpec, draw: Random) -> dict[str, Any]:
    """Parallel sizes: all of Megatron's, or a number of ranks."""
    if not engine.startswith("megatron"):
        return {"world_size": 1 if engine == "single" else draw.choice((1, 2, 4, 6, 8, 16, 64))}
    tp, pp, cp = (draw.choice(of) for of in ((1, 1, 2, 4, 8), (1, 1, 2, 3, 4, 8), (1, 1, 1, 2, 4)))
    ep = draw.choice((1, 2, 3, 4, 8, 16)) if model.has_experts else 1
    if engine == "megatron_deepspeed":
        cp = ep = 1
    out = {
        "world_size": tp * pp * cp * ep * draw.choice((1, 2, 4)), "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp, "context_parallel_size": cp, "expert_model_parallel_size": ep,
    }  # fmt: skip
    if pp > 1 and draw.random() < 0.4:
        out["virtual_pipeline_model_parallel_size"] = draw.choice((2, 2, 3, 4, 8))
    if draw.random() < 0.15:
        out["pipeline_model_parallel_layout"] = a_layout(model, pp, draw)
        out["virtual_pipeline_model_parallel_size"] = None
    return out


def a_layout(model: ModelSpec, pp: int, draw: Random) -> str:
    """Megatron's layout string, a few virtual stages, some of them empty of layers."""
    chunks = pp * draw.choice((1, 1, 2))
    cuts = sorted(draw.randint(0, model.num_layers) for _ in range(chunks - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, model.num_layers], strict=True)]
    texts = [f"t*{n}" if n else "" for n in counts]
    return "|".join(["E" * (i == 0) + text + ("m" * model.mtp_num_layers + "L") * (i == chunks - 1)
                     for i, text in enumerate(texts)])  # fmt: skip


def a_model(draw: Random, engine: str = "") -> ModelSpec:
    """A preset, half of the time with fewer layers: as many as an odd pipeline divides, say."""
    model = resolve_model(draw.choice(MODELS))
    # Engines outside of megatron-core go through each parameter: experts have thousands.
    few = model.has_experts and not engine.startswith("megatron")
    if few or draw.random() < 0.5:
        most = min(model.num_layers, 2 if few else 24)
        model = replace(model, layers=model.layers[: draw.randint(1, most)])
    return model


def a_run(engine: str, draw: Random) -> RunSpec:
    """One run of an engine that can be estimated."""
    while True:
        try:
            model = a_model(draw, engine)
        except SpecError:  # MTP layers, say, that no longer follow
            continue
        groups: dict[str, dict[str, Any]] = {
            "data_parallel": {"engine": engine}, "parallel": sizes(engine, model, draw),
            "batch": {"seq_length": draw.choice((128, 1000, 4096))},
        }  # fmt: skip
        if engine == "megatron_fsdp":
            groups["data_parallel"]["data_parallel_sharding_strategy"] = draw.choice(SHARDING_STRATEGIES)
        if not engine.startswith("megatron"):
            layers = draw.choice(("transformers",) * 4 + ("torchtitan", "torchtune"))
            groups["implementation"] = {"transformer_impl": layers}
        run = legal(model, groups)
        if run is None:
            continue
        every = [(name, f) for name, cls in GROUPS.items() for f in fields(cls) if f.name not in FIRST]
        for _ in range(draw.choice((0, 4, 12, 40, 120))):
            group, f = draw.choice(every)
            given = groups.get(group, {})
            more = {**groups, group: {**given, f.name: a_value(f.name, f.metadata["rule"], draw)}}
            changed = legal(model, more)
            if changed is not None:
                run, groups = changed, more
        try:
            estimate(run)
        except SpecError:
            continue
        return run


def some_runs(engine: str, number: int, seed: str = "") -> list[RunSpec]:
    draw = Random(f"{engine} {seed}")
    return [a_run(engine, draw) for _ in range(number)]


def as_words(flag: str, value: Any) -> list[str]:
    """A value of a flag as it is typed."""
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, tuple):
        return [flag, (".".join if flag in RELEASES else ",".join)(map(str, value))]
    return [flag, str(value)]


#: Flags whose values are releases.
RELEASES = {"--transformers-version"}


def a_command(engine: str, draw: Random) -> list[str]:
    """MODEL and flags, drawn like ``a_run``: each kept where the run stays one that is estimated."""
    by_field = {flag.field: flag for flag in FLAGS}
    while True:
        model = resolve_model(name := draw.choice(MODELS))
        given = {"data_parallel.engine": engine} | {f"parallel.{k}": v for k, v in sizes(engine, model, draw).items()}
        if engine == "megatron_fsdp":
            given["data_parallel.data_parallel_sharding_strategy"] = draw.choice(SHARDING_STRATEGIES)
        start = [name]
        if draw.random() < 0.5 or (model.has_experts and not engine.startswith("megatron")):
            most = 8 if engine.startswith("megatron") else 2
            start += ["--num-layers", str(draw.randint(1, min(most, model.num_layers)))]
        if legal_words([*start, *typed(given, by_field)]) is None:
            continue
        fields_of = [(flag.field, rules_of(SPECS[flag.field.partition(".")[0]])) for flag in FLAGS]
        for _ in range(draw.choice((0, 4, 12, 24))):
            field, rules = draw.choice(fields_of)
            short = field.partition(".")[2]
            if short in FIRST or field in given:
                continue
            more = given | {field: a_value(short, rules[short], draw)}
            if legal_words([*start, *typed(more, by_field)]) is not None:
                given = more
        return [*start, *typed(given, by_field)]


def typed(given: dict[str, Any], by_field: dict[str, Any]) -> list[str]:
    return [
        word for field, value in given.items() if value is not None and value != ()
        for word in as_words(by_field[field].names.split()[0], value)
    ]  # fmt: skip


def run_of(words: list[str], gpu: str = GPU) -> RunSpec:
    """Raises SpecError, and SystemExit for words that are no flags."""
    parser = ArgumentParser()
    add_run_arguments(parser)
    return run_on_gpus(parser.parse_args(words), [find_gpu(gpu)])


def legal_words(words: list[str]) -> RunSpec | None:
    try:
        with redirect_stderr(StringIO()):
            return run_of(words)
    except (SpecError, SystemExit):
        return None


__all__ = ["ENGINES", "GPU", "a_command", "a_model", "a_run", "run_of", "some_runs"]
