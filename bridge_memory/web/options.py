"""The page's question as a RunSpec. Its options are the command line's flags, by their first spelling.

    {"model": "Qwen/Qwen3-30B-A3B", "gpu": "H100", "options": {"num-gpus": 64, "tp": 2, "recompute-modules": ["mlp"]}}

Instead of ``model``: ``config``, the text of a config.json, with a ``name``; or ``megatron_args``, the text of
Megatron-LM's arguments or of a launch script. The page never reads a file, and uses the network only for a Hub id
where the server was started with ``--hub``.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from typing import Any, NamedTuple

from bridge_memory.arguments.flags import FLAGS, MODEL_FLAGS, PACKAGES, SPECS, add_run_arguments
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.cards.gpu import Gpu
from bridge_memory.files import read_text
from bridge_memory.readers.presets import find_presets
from bridge_memory.rollout.reading import kind_of
from bridge_memory.rollout.setup import PostTraining
from bridge_memory.rollout.trainer import UPDATE_ALONE
from bridge_memory.spec import RunSpec, SpecError, show
from bridge_memory.spec.fields import called, rules_of
from bridge_memory.spec.gpus import check_computes, find_gpu
from bridge_memory.spec.release import read_release

_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
#: Keys of a question.
KEYS = ("model", "config", "name", "megatron_args", "gpu", "options", "stage")
DEFAULT_GPU = "H100"
#: What a refusal calls a pasted configuration.
PASTED = "the pasted configuration"


class Option(NamedTuple):
    """One flag as the page offers it."""

    #: The first spelling without its dashes: "tp".
    name: str
    #: argparse's: "parallel.tensor_model_parallel_size", or that of what changes the model.
    field: str
    #: Megatron's name of the field.
    called: str
    group: str
    #: "integer", "number", "switch", "choice", "names", "text" or "release".
    kind: str
    choices: tuple[str, ...]
    help: str
    #: The value in use where the option is not given, if any.
    default: Any

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "choices": list(self.choices), "default": self.plain(self.default)}

    def plain(self, value: Any) -> Any:
        """A value as JSON: a release becomes text."""
        if isinstance(value, tuple):
            return ".".join(map(str, value)) if self.kind == "release" else list(value)
        return value


@cache
def options() -> dict[str, Option]:
    """Name -> every option of a run, in the order of the help."""
    found: list[Option] = []
    for name, spelled in MODEL_FLAGS.items():
        kind, text = _OF_THE_MODEL.get(name, ("integer", ""))
        found.append(Option(spelled[2:], name, name, "model", kind, (), text, None))
    rules = {name: rules_of(spec) for name, spec in SPECS.items()}
    defaults = {name: {f.name: f.default for f in fields(spec) if f.default is not MISSING}
                for name, spec in SPECS.items()}  # fmt: skip
    for flag in FLAGS:
        group, _, field = flag.field.partition(".")
        rule = rules[group][field]
        found.append(
            Option(
                flag.names.split()[0][2:], flag.field, called(SPECS[group], field), group, _kind(rule), rule.names,
                flag.help, defaults[group].get(field),
            )
        )  # fmt: skip
    for flag_name, package in PACKAGES.items():
        name = flag_name[2:]
        found.append(Option(name, name.replace("-", "_"), name.replace("-", "_"), "model", "release", (),
                            f"{package} release whose rules apply", None))  # fmt: skip
    return {option.name: option for option in found}


#: Options that change the model itself: kind and help.
_OF_THE_MODEL = {
    "mtp_num_layers": ("integer", "number of MTP depths; 0: none"),
    "num_layers": ("integer", "train only the first N decoder layers"),
    "make_vocab_size_divisible_by": ("integer", "pad the vocabulary to a multiple of N x TP"),
    "hidden_dropout": ("number", "dropout of the residual stream"),
    "attention_dropout": ("number", "dropout of attention probabilities"),
}  # fmt: skip


def _kind(rule: Any) -> str:
    if bool in rule.types:
        return "switch"
    if tuple in rule.types:
        return "release" if rule.release else "names"
    if float in rule.types:
        return "number"
    if int in rule.types:
        return "integer"
    return "choice" if rule.names else "text"


@cache
def search_axes() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Whose layers -> (axes that a search of the page may vary, those that it varies where nobody says)."""
    from bridge_memory.plan.megatron.asked import USUAL
    from bridge_memory.plan.torch.space import AXES
    from bridge_memory.plan.torch.space import USUAL as OF_TORCH

    return {"megatron": (USUAL, USUAL), "torch": (tuple(AXES), OF_TORCH)}


@cache
def by_called() -> dict[str, str]:
    """Megatron's name of a field -> the option's name. Fields of the model come last: they are rarely meant."""
    named = options().values()
    return {option.called: option.name for option in sorted(named, key=lambda o: o.group != "model")}


def option_values(changed: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's names and values (``Change.fields``) as options; None drops one. Names without a flag are left out."""
    found: dict[str, Any] = {}
    for name, value in changed.items():
        option = by_called().get(name.rpartition(".")[2])
        if option is not None:
            found[option] = options()[option].plain(value)
    return found


class Asked(NamedTuple):
    """A parsed question."""

    run: RunSpec
    gpu: Gpu
    #: The flags as the command line would parse them.
    args: argparse.Namespace


@cache
def _unset() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    return parser.parse_args([])


def asked(question: Mapping[str, Any], *, hub: bool = False) -> Asked:
    """The run, the GPU and the flags of a question. Raises SpecError."""
    args, gpu = arguments(question, hub=hub)
    run = _of_pasted(question, args, gpu) if _kind_of(question) else run_on_gpus(args, [gpu])
    name = question.get("name")
    if args.custom_config is not None and question.get("model"):  # of the Hub: the command line takes its id
        args.model, args.custom_config = question["model"].strip(), None
        run = replace(run, model=replace(run.model, name=args.model))
    elif args.custom_config is not None and isinstance(name, str) and name.strip():
        run = replace(run, model=replace(run.model, name=name.strip()[:100]))
    return Asked(run, gpu, args)


def arguments(question: Mapping[str, Any], *, hub: bool = False) -> tuple[argparse.Namespace, Gpu]:
    """The flags of a question as argparse would return them, and its GPU. Raises SpecError."""
    unknown = [key for key in question if key not in KEYS]
    if unknown:
        raise SpecError(f"{show(unknown[0])} is no part of a question; give some of {', '.join(KEYS)}")
    args = copy.copy(_unset())
    sources = [key for key in ("model", "config", "megatron_args") if question.get(key) not in (None, "")]
    if len(sources) != 1:
        raise SpecError("the model is missing; choose one, or paste its config.json" if not sources else
                        f"{' and '.join(sources)} both say what runs; give one of them")
    for key in (*sources, *(k for k in ("name", "gpu") if question.get(k) is not None)):
        if not isinstance(question[key], str):
            raise SpecError(f"{key} ({show(question[key])}) is not a text; give one")
    if sources == ["model"]:
        _model(args, question["model"], hub)
    elif sources == ["config"] and (kind := _kind_of(question)):
        if kind == "megatron":
            args.megatron_args = "\n" + question["config"]
    elif sources == ["config"]:
        args.custom_config = question["config"]
    else:
        # A leading line break: it is never taken for a file's name.
        args.megatron_args = "\n" + question["megatron_args"]
    given = question.get("options")
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise SpecError(f"options ({show(given)}) is not an object; give names and values")
    for name, value in given.items():
        option = options().get(name)
        if option is None:
            raise SpecError(f"{show(name)} is no option; /api/options lists them")
        if value is not None:
            setattr(args, option.field, _value(option, value))
    return args, find_gpu(question.get("gpu") or DEFAULT_GPU)


def _kind_of(question: Mapping[str, Any]) -> str:
    """What a pasted configuration is where it is the whole run and no config.json: "megatron" for Megatron-LM's
    arguments, "container", "rollout" for a job of ``post_training_of``; "" for a config.json, and where nothing was
    pasted."""
    text = question.get("config")
    if not isinstance(text, str):
        return ""
    if kind_of(text):
        return "rollout"
    if text.lstrip().startswith(("{", "[")):
        return ""
    if re.search(r"^\s*_target_:", text, re.MULTILINE):
        return "container"
    return "megatron" if "--num-layers" in text or "--hidden-size" in text else ""


def post_training_of(question: Mapping[str, Any], *, alone: bool = False) -> tuple[PostTraining, Gpu] | None:
    """The job of a pasted configuration of verl, NeMo-RL, slime, TRL or ms-swift, with the trainer's options that were
    given beside it but for those of a batch, and its GPU; None where none is pasted. ``alone``: without a critic.
    Raises SpecError."""
    from bridge_memory.rollout.reading import STATES_GPUS, on_card, read

    args, gpu = arguments(question)
    if _kind_of(question) != "rollout":
        return None
    text, name = question["config"], question.get("name")
    kind, world = kind_of(text), getattr(args, "parallel.world_size", None)
    setup = read(kind, PASTED, text=text, model=name.strip() or None if isinstance(name, str) else None,
                 alone=alone, world_size=None if kind in STATES_GPUS else world)  # fmt: skip
    beside = ("parallel.world_size", "batch.")
    given = {field: value for field, value in _given(args).items() if not field.startswith(beside)}
    if kind in STATES_GPUS and world not in (None, setup.trainer.parallel.world_size):
        raise SpecError(f"world_size ({world}) is set by {PASTED}; change it there")
    if given:
        setup = setup.with_trainer(setup.trainer.with_fields(**given))
    return on_card(setup, gpu), gpu


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {o.field: getattr(args, o.field) for o in options().values() if "." in o.field and hasattr(args, o.field)}


def _of_pasted(question: Mapping[str, Any], args: argparse.Namespace, gpu: Gpu) -> RunSpec:
    """The run of such a configuration, with what was given beside it in its place. Raises SpecError."""
    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.readers.container_file import container_of_table
    from bridge_memory.readers.engines.files import table_of

    if args.megatron_args is not None:
        return run_on_gpus(args, [gpu])
    args.pasted = True
    job = post_training_of(question, alone=True)
    if job is not None:
        args.post_training = True
        setup, _ = job
        left_out = [f"not modelled: {', '.join(setup.not_modelled)}"] * bool(setup.not_modelled)
        run = setup.update_run()
        batch = {field: value for field, value in _given(args).items() if field.startswith("batch.")}
        return run.with_fields(**batch).with_(assumptions=(UPDATE_ALONE, *setup.assumptions, *left_out))
    world = getattr(args, "parallel.world_size", None)
    run = run_from_config_container(container_of_table(table_of(question["config"], PASTED), PASTED), world_size=world)
    run = run.with_fields(**_given(args))
    check_computes(gpu, run.precision)
    arch = gpu.arch or run.implementation.gpu_arch
    return run.with_(implementation=replace(run.implementation, gpu_arch=arch))


def _model(args: argparse.Namespace, name: str, hub: bool) -> None:
    """Sets a preset, or a Hub id where the network is allowed; never a path."""
    presets = find_presets(name.strip())
    if len(presets) == 1:
        args.model = presets[0]
        return
    if presets:
        raise SpecError(f"model ({show(name)}) names several presets: {', '.join(presets)}; write one in full")
    if not _HUB_ID.fullmatch(name.strip()):
        from bridge_memory.readers.resolve import suggestions

        near = suggestions(name) if len(name) < 200 else ""
        raise SpecError(f"model ({show(name)}) is no preset{near if 'near' in near else '; paste its config.json'}")
    if not hub:
        raise SpecError(
            f"model ({show(name)}) is no preset, and this server does not ask the Hub; paste its config.json, or start "
            "`bridge-memory serve --hub`"
        )
    from bridge_memory.readers.hub import fetch_config

    args.custom_config = read_text(fetch_config(name.strip()), "give a Hub id that has a config.json")


#: Kind -> JSON types of its values, and what to give.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "integer": ((int,), "an integer"), "number": ((int, float), "a number"), "switch": ((bool,), "true or false"),
    "choice": ((str,), "a name"), "text": ((str,), "a text"), "release": ((str,), 'a release as text, "X.Y"'),
    "names": ((list,), "a list of names"),
}  # fmt: skip


def _value(option: Option, value: Any) -> Any:
    """A JSON value as a flag's value. Raises SpecError for a wrong type."""
    types, give = _KINDS[option.kind]
    fine = type(value) in types
    if fine and option.kind == "names":
        fine = all(type(name) is str for name in value)
    if not fine:
        raise SpecError(f"{option.called} ({show(value)}) is not {give}; give {give}")
    if option.kind == "release":
        release = read_release(value, option.called)
        return release if "." in option.field else value  # those of packages are read with the other flags
    return tuple(value) if option.kind == "names" else value
