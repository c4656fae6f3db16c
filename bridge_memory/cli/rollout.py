"""``bridge-memory rollout``: a reinforcement-learning job whose trainer and inference engine share GPUs, by phases."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.flags import SPECS, add_run_arguments, integer, number, spelling_or_name
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.spec import SpecError

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.report.document import Grid
    from bridge_memory.rollout.setup import PostTraining

EXIT_DOES_NOT_FIT = 3
#: (sentences of a list, layouts) that are shown, as many as a screen has room for.
_SHOWN = ((99, 99), (8, 99), (6, 99), (4, 99), (3, 99), (2, 99), (2, 6), (1, 6), (1, 4), (1, 2))
#: The card where none is named.
_GPU = "H100"
#: Flag -> where a configuration of a framework is.
_SOURCES = {"--verl": "verl", "--nemo-rl": "nemo_rl", "--slime": "slime", "--trl": "trl", "--ms-swift": "ms_swift"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides of a configuration (--verl, --nemo-rl), as on its command line",
    )
    source = parser.add_argument_group("configuration of a framework, in place of the flags below")
    source.add_argument("--verl", metavar="FILE", help="a configuration (YAML), a launch script, or a release: 0.9")
    source.add_argument("--nemo-rl", metavar="FILE", help="NeMo-RL's YAML")
    source.add_argument("--slime", metavar="ARGS", help="slime's arguments, as text or in a launch script")
    source.add_argument("--trl", metavar="FILE", help="TRL's GRPO arguments (GRPOConfig), in JSON or YAML")
    source.add_argument("--ms-swift", metavar="ARGS", help="arguments of `swift rlhf`, as text, in a script or YAML")
    source.add_argument("--release", metavar="X.Y", help="release of the framework (default: as its options say)")
    group = parser.add_argument_group("post-training")
    group.add_argument("--rollout", choices=("vllm", "sglang"), help="inference engine (vllm)")
    group.add_argument("--rollout-tp", type=integer, metavar="N", help="its tensor parallel size (1)")
    group.add_argument("--rollout-dp", type=integer, metavar="N", help="its data parallel size (1)")
    group.add_argument("--rollout-ep", action="store_const", const=True, help="its experts are divided over its ranks")
    group.add_argument("--rollout-release", metavar="X.Y.Z", help="its release")
    group.add_argument("--gpu-memory-utilization", type=number, metavar="SHARE", help="vLLM's share of the card")
    group.add_argument("--mem-fraction-static", type=number, metavar="SHARE", help="SGLang's share of what is free")
    group.add_argument("--max-num-seqs", type=integer, metavar="N", help="its most sequences at once")
    group.add_argument("--max-num-batched-tokens", type=integer, metavar="N", help="vLLM's most tokens of a step")
    group.add_argument(
        "--max-model-len", type=integer, metavar="N", help="tokens of prompt and response (--seq-length)"
    )
    group.add_argument(
        "--max-tokens-per-gpu",
        type=integer,
        metavar="N",
        help="token limit of a micro batch of the update on a GPU (default: one sequence)",
    )
    group.add_argument(
        "--log-prob-max-tokens-per-gpu",
        type=integer,
        metavar="N",
        help="that of passes for old and reference log-probs (--max-tokens-per-gpu)",
    )
    group.add_argument(
        "--param-offload",
        action="store_const",
        const=True,
        help="parameters and gradients leave the GPU during rollouts",
    )
    group.add_argument(
        "--optimizer-offload",
        action="store_const",
        const=True,
        help="optimizer states leave the GPU outside of the update",
    )
    group.add_argument(
        "--reference",
        choices=("none", "gpu", "loaded", "host"),
        help="the reference policy: none, a model on the GPU, loaded for its pass, or swapped in (none)",
    )
    group.add_argument("--critic", action="store_const", const=True, help="a value model like the policy trains too")
    group.add_argument("--entropy", action="store_const", const=True, help="the update computes the entropy")
    output = add_output_arguments(
        parser, "by the schema bridge-memory/rollout/1", formats=("text", "json", "md", "html")
    )
    output.add_argument("-v", "--verbose", action="count", default=0, help="components of every phase, all assumptions")
    output.add_argument("--unit", default="GiB", metavar="UNIT", help="GiB (default), MiB, GB, MB or bytes")
    output.add_argument("--gpu", metavar="NAME", help=f"the GPU ({_GPU})")
    output.add_argument("--no-limits", action="store_true", help="the phases alone, not what would fit")
    output.add_argument("--search", action="store_true", help="trainer layouts that leave most for the KV cache")
    output.add_argument("--emit", choices=("verl", "nemo-rl", "slime"),
                        help="print the keys of what is safe, in a framework's words")  # fmt: skip
    output.add_argument("--log", metavar="FILE", help="memory lines of a training log beside the phases")
    output.add_argument("--require-fit", action="store_true", help=f"exit code {EXIT_DOES_NOT_FIT} unless it fits")


def run(args: argparse.Namespace) -> int:
    """Print the phases of a job. Returns the exit code."""
    from bridge_memory.report.units import check_unit
    from bridge_memory.rollout.answer import answer, as_json, limits
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.verdict import Verdict

    unit = check_unit(args.unit)
    gpu = find_gpu(args.gpu or _GPU)
    setup = _setup(args, gpu)
    if args.gpu is None:
        setup = setup.with_(assumptions=(f"{_GPU} (--gpu)", *setup.assumptions))
    if args.emit and args.no_limits:
        raise SpecError("--emit prints what fits, which --no-limits does not look for; drop one")
    found = answer(setup, gpu)
    solved = None if args.no_limits else limits(found)
    rows = None
    if args.search:
        from bridge_memory.rollout.layouts import search

        rows = search(found)
    lines = None
    if args.log is not None:
        from bridge_memory.rollout.log import compare, readings

        lines = compare(found, readings(args.log))
    if args.emit:
        from bridge_memory.rollout.emit import emitted

        assert solved is not None
        print(emitted(found, solved, args.emit), end="")
    elif args.json:
        document = as_json(found, solved)
        if rows is not None:
            document["layouts"] = [row.as_json() for row in rows]
        if lines is not None:
            document["log"] = {"lines": [line.as_json() for line in lines[0]], "pool_bytes": lines[1]}
        json.dump(document, sys.stdout, indent=2)
        print()
    else:
        from bridge_memory.report.printing import print_blocks
        from bridge_memory.report.rollout import layout_table, log_table, rollout_blocks
        from bridge_memory.report.screen import first_that_fits

        args.title = f"{setup.model.name} on {setup.trainer.parallel.world_size} {gpu.name}: memory by phase"
        blocks = rollout_blocks(found, solved, unit, verbose=args.verbose)
        layouts = [layout_table(rows, found, unit)] if rows is not None else []
        after = [log_table(*lines, unit)] if lines is not None else []
        if args.verbose or args.format != "text":
            print_blocks([*blocks, *layouts, *after])
        else:
            print_blocks([*first_that_fits(_versions(blocks, layouts), after), *after])
    fits = found.verdict in (Verdict.FITS, Verdict.TIGHT)
    return EXIT_DOES_NOT_FIT if args.require_fit and not fits else 0


def _versions(blocks: Sequence[Any], layouts: Sequence[Grid]) -> Iterator[list[Any]]:
    """The report with fewer and fewer sentences and layouts."""
    from bridge_memory.report.document import Bullets
    from bridge_memory.report.screen import shortened

    for sentences, rows in _SHOWN:
        yield [
            *(shortened(block, sentences, "-v") if isinstance(block, Bullets) else block for block in blocks),
            *(shortened(table, rows, "-v") for table in layouts),
        ]


def _setup(args: argparse.Namespace, gpu: Gpu) -> PostTraining:
    """The job that the arguments describe."""
    from bridge_memory.rollout.reading import on_card, read

    given = {flag: getattr(args, name) for flag, name in _SOURCES.items() if getattr(args, name) is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise SpecError(f"{first} and {second} each say everything; give one of them")
    if not given:
        if args.overrides or args.release:
            what = args.overrides[0] if args.overrides else f"--release {args.release}"
            raise SpecError(f"{what} changes a configuration; give --verl FILE or --nemo-rl FILE, or flags alone")
        from bridge_memory.cli.rollout_flags import setup_of_flags

        return setup_of_flags(args, gpu)
    flag, source = next(iter(given.items()))
    words = list(args.overrides)
    if (
        args.model is not None
        and ("=" in args.model or args.model.startswith("~"))
        and "/" not in args.model.split("=")[0]
    ):
        words, args.model = [args.model, *words], None
    extra = [name for name in _flags(args) if getattr(args, name, None) is not None]
    beside = ("parallel.world_size",) if flag in ("--trl", "--ms-swift") else ()
    of_run = [key for key in vars(args) if key.partition(".")[0] in SPECS and "." in key and key not in beside]
    if of_run:
        group, _, name = of_run[0].partition(".")
        raise SpecError(f"{spelling_or_name(group, name)} is set by {flag}; change it there, or with KEY=VALUE")
    if extra:
        spelled = "--" + extra[0].replace("_", "-")
        raise SpecError(f"{spelled} is set by {flag}; change it there, or with KEY=VALUE")
    setup = read(
        _SOURCES[flag], source, words, release=args.release or "", model=args.model,
        world_size=getattr(args, "parallel.world_size", None), engine_release=args.rollout_release or "",
    )  # fmt: skip
    return on_card(setup, gpu)


def _flags(args: argparse.Namespace) -> list[str]:
    """Flags that describe a job without a configuration."""
    own = ("rollout", "rollout_tp", "rollout_dp", "rollout_ep", "gpu_memory_utilization",
           "mem_fraction_static", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_tokens_per_gpu",
           "log_prob_max_tokens_per_gpu", "param_offload", "optimizer_offload", "reference", "critic", "entropy",
           "custom_config", "megatron_args", "container", "bridge_recipe")  # fmt: skip
    return [name for name in own if name in vars(args)]
