"""Draw the cases of ``differential.py``: models, parallel sizes and options at random, as lines of ``rehearse``.

Presets are drawn, and configs like one with other heads, groups, widths, vocabularies, experts or hybrid patterns.
Equal seeds and stacks give equal cases. A case has few layers: time goes with modules, not with sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from math import lcm
from pathlib import Path
from random import Random
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge_memory.arguments.flags import FLAGS, SPECS, Flag  # noqa: E402
from bridge_memory.arguments.run import run_on_gpus  # noqa: E402
from bridge_memory.cli import rehearse as command  # noqa: E402
from bridge_memory.readers import model_from_json_text, resolve_model  # noqa: E402
from bridge_memory.readers.presets import list_presets, preset_path  # noqa: E402
from bridge_memory.rehearsal.refusals import refuse_what_is_ignored  # noqa: E402
from bridge_memory.spec import ModelSpec, SpecError  # noqa: E402
from bridge_memory.spec.fields import rules_of  # noqa: E402
from bridge_memory.spec.gpus import find_gpu  # noqa: E402
from bridge_memory.spec.parts import OPTIMIZERS  # noqa: E402


@dataclass(frozen=True, slots=True)
class Case:
    """A command line of ``bridge-memory rehearse``; an option with the value "" is a switch."""

    #: A preset, or a config.json as text.
    model: str
    options: tuple[tuple[str, str], ...]

    def argv(self) -> list[str]:
        model = ["--custom-config", self.model] if self.model.startswith("{") else [self.model]
        return [*model, *(word for option in self.options for word in option if word)]

    def text(self) -> str:
        return "bridge-memory rehearse " + shlex.join(self.argv())


class Parser(argparse.ArgumentParser):
    """Raises SpecError for wrong arguments."""

    def error(self, message: str) -> NoReturn:
        raise SpecError(message)


def parse(case: Case) -> argparse.Namespace:
    """The flags of ``bridge-memory rehearse``. Raises SpecError."""
    parser = Parser(allow_abbrev=False)
    command.add_arguments(parser)
    return parser.parse_args(case.argv())


@dataclass(frozen=True, slots=True)
class Stack:
    """The folders of megatron-core and Transformer Engine that come first on the path; None: installed, or local."""

    core: str | None
    transformer_engine: str | None

    @property
    def impl(self) -> str:
        return "local" if self.transformer_engine is None else "transformer_engine"

    def title(self) -> str:
        core = "megatron-core installed here" if self.core is None else f"megatron-core of {self.core}"
        return f"{core}, " + ("local" if self.transformer_engine is None else f"{self.transformer_engine}")

    def environment(self) -> dict[str, str]:
        path = [p for p in (self.transformer_engine, self.core) if p is not None]
        rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT), *rest]), "HF_HUB_OFFLINE": "1"}

    def releases(self) -> dict[str, str | None]:
        """The releases of the packages, by the names of their flags; None: not known, or not used."""
        te = None if self.transformer_engine is None else _release(self.transformer_engine, "transformer_engine")
        return {"megatron_core": _release(self.core, "megatron_core"), "transformer_engine": te}


@lru_cache
def _release(folder: str | None, package: str) -> str | None:
    """"0.16" of what ``pip install --target`` wrote into ``folder``, or of what is installed."""
    if folder is None:
        try:
            found: str | None = version(package)
        except PackageNotFoundError:
            found = None
    else:
        names = [path.name for path in sorted(Path(folder).glob(f"{package}-*.dist-info"))]
        found = names[0].removeprefix(f"{package}-") if names else None
    match = re.match(r"\d+\.\d+", found or "")
    return match[0] if match else None


#: Values to draw of numeric flags.
NUMBERS = {
    "--micro-batch-size": (1, 2, 3, 4, 8),
    "--seq-length": (256, 512, 1000, 1024, 1024, 2048, 2048, 4096, 6144, 8192, 16384, 32768, 65536, 131072),
    "--ddp-bucket-size": (1_000_000, 40_000_000), "--num-distributed-optimizer-instances": (2,),
    "--optimizer-offload-fraction": (0.5, 1.0), "--recompute-num-layers": (1, 2, 3),
    "--moe-expert-capacity-factor": (0.5, 1.0, 1.25, 2.0), "--moe-z-loss-coeff": (0.001,), "--lora-dim": (8, 32, 60),
    "--num-layers-at-start-in-bf16": (1, 2), "--num-layers-at-end-in-bf16": (1, 2),
}  # fmt: skip
#: Values to draw of flags with names.
NAMES = {"--lora-target-modules": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "*linear_fc2")}
_BF16_ENDS = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
#: Flags that have an effect only with the first of their group, or another one there: with it some of the others are
#: drawn.
TOGETHER: tuple[tuple[str, ...], ...] = (
    ("--fp8", "--fp8-recipe", "--fp8-param-gather", *_BF16_ENDS, "--moe-router-padding-for-quantization"),
    ("--fp4", "--fp4-param-gather", *_BF16_ENDS, "--moe-router-padding-for-quantization"),
    ("--use-precision-aware-optimizer", "--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype",
     "--exp-avg-sq-dtype", "--store-param-remainders"),
    ("--overlap-grad-reduce", "--ddp-bucket-size", "--overlap-param-gather"),
    ("--optimizer-cpu-offload", "--optimizer-offload-fraction"),
    ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"),
    ("--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity"),
    ("--packed-sequences", "--attention-backend"),
    ("--peft", "--lora-dim", "--lora-target-modules"),
)
#: Drawn with the sizes, see ``sample``.
WITH_SIZES = frozenset({
    "--tp", "--pp", "--vpp", "--cp", "--ep", "--etp", "--num-gpus", "--global-batch-size", "--transformer-impl",
    "--num-layers-in-first-pipeline-stage", "--num-layers-in-last-pipeline-stage", "--pipeline-model-parallel-layout",
    "--microbatch-group-size-per-vp-stage", "--recompute-granularity", "--recompute-method", "--recompute-num-layers",
    "--recompute-modules", "--distribute-saved-activations",
})  # fmt: skip
#: Not drawn: the rehearsal accepts only the default (``rehearsal/refusals.py``).
NOT_DRAWN = frozenset({
    "--fsdp-double-buffer", "--fsdp-db-use-persist-buf-on-alloc-fail", "--megatron-fsdp-max-pool-double-buffer",
    "--engine", "--data-parallel-sharding-strategy", "--suggested-communication-unit-size", "--grad-comm-dtype",
    "--fp8-dot-product-attention", "--moe-imbalance",
    "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", "--cpu-offloading-num-layers", "--offload-modules",
    "--min-offloaded-tensor-size",
    "--torch-implementation", "--paged", "--clip-grad", "--sync-each-batch", "--use-dora",
    # Dispatchers that need kernels of a GPU, and their options; buffers outside of torch's allocator.
    "--moe-flex-dispatcher-backend", "--moe-flex-dispatcher-num-sms", "--moe-hybridep-ranks-per-nvlink-domain",
    "--moe-expert-rank-capacity-factor", "--moe-paged-stash", "--moe-paged-stash-buffer-size-factor-cuda",
    "--tp-comm-overlap",
    # Tested against the real code by separate tests (tests/te/test_options.py, tests/inventory/test_expert_budget.py).
    "--use-transformer-engine-op-fuser", "--moe-mlp-glu-interleave-size",
    # Inputs of an encoder, which the rehearsed models do not have.
    "--images-per-sample", "--image-size", "--patches", "--video-frames", "--audio-seconds",
    # Options of engines outside of megatron-core.
    *(
        flag.names.split()[0] for flag in FLAGS
        if flag.field.partition(".")[0] in ("ddp", "fsdp", "deepspeed", "transformers")
    ),
})  # fmt: skip
_FLAG = {flag.names.split()[0]: flag for flag in FLAGS}


def _values(flag: Flag, rng: Random) -> tuple[str, str]:
    """A random option of this flag."""
    name = flag.names.split()[0]
    group, _, member = flag.field.partition(".")
    rule = rules_of(SPECS[group])[member]
    if bool in rule.types:
        return (name if rng.random() < 0.6 else "--no-" + name.removeprefix("--"), "")
    if tuple in rule.types:
        names = NAMES.get(name) or rule.names
        return name, ",".join(rng.sample(names, rng.randint(1, min(3, len(names)))))
    words = OPTIMIZERS if name == "--optimizer" else rule.names
    return name, str(rng.choice(NUMBERS.get(name) or words))


def drawn_alone() -> list[str]:
    """Flags that are drawn independently."""
    dependent = {name for names in TOGETHER for name in names[1:]} - {"--attention-backend"}
    return [name for name in _FLAG if name not in WITH_SIZES | NOT_DRAWN | dependent]


# ---- models --------------------------------------------------------------------------------------

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOPK = ("num_experts_per_tok",)


def odd_config(rng: Random, preset: str) -> str:
    """The config of ``preset`` as JSON with other sizes, such as no public model may have."""
    config: dict[str, Any] = json.loads(Path(preset_path(preset)).read_text(encoding="utf-8"))
    config["_name_or_path"] = preset
    groups = (_attention, _vocabulary, _widths, _experts, _hybrid)
    for change in rng.sample(groups, rng.randint(1, len(groups))):
        config.update({name: value for name, value in change(rng, config).items() if name in config})
    return json.dumps(config)


def _attention(rng: Random, config: dict[str, Any]) -> dict[str, Any]:
    heads = rng.choice((2, 3, 6, 8, 10, 12, 14, 20, 24, 40, 48, 56))
    groups = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    if "kv_lora_rank" in config:
        return {
            "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": rng.choice((None, 768, 1024)),
            "kv_lora_rank": rng.choice((256, 384, 512)), "qk_nope_head_dim": rng.choice((64, 96, 128, 192)),
            "qk_rope_head_dim": rng.choice((32, 64)), "v_head_dim": rng.choice((64, 96, 128, 192)),
        }  # fmt: skip
    width = rng.choice((64, 80, 96, 112, 128, 192, 256))
    return {
        "num_attention_heads": heads, "n_head": heads, "num_key_value_heads": groups, "head_dim": width,
        # Where no head_dim is, it follows from the hidden size.
        **({} if "head_dim" in config else {"hidden_size": heads * width, "n_embd": heads * width}),
    }  # fmt: skip


def _vocabulary(rng: Random, config: dict[str, Any]) -> dict[str, Any]:
    size = rng.choice((32003, 49155, 50257, 99999, 129280, 151646, 200019, 262145))
    return {"vocab_size": size, "tie_word_embeddings": rng.random() < 0.5}


def _widths(rng: Random, config: dict[str, Any]) -> dict[str, Any]:
    hidden = rng.choice((768, 1152, 1536, 2304, 2880, 3584, 5120))
    return {
        **({"hidden_size": hidden} if "head_dim" in config or "kv_lora_rank" in config else {}),
        "intermediate_size": rng.choice((1024, 2560, 4864, 8960, 13696, 18944)),
        "moe_intermediate_size": rng.choice((384, 640, 704, 1408, 1792)),
        "shared_expert_intermediate_size": rng.choice((512, 1408, 2816)),
    }  # fmt: skip


def _experts(rng: Random, config: dict[str, Any]) -> dict[str, Any]:
    number = rng.choice((6, 12, 18, 24, 36, 48, 60, 72, 96))
    return {
        **dict.fromkeys(_EXPERTS, number), **dict.fromkeys(_TOPK, rng.choice((1, 2, 3, 4, 6))),
        "n_shared_experts": rng.choice((1, 2)), "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": rng.choice((0, 1, 2)),
    }  # fmt: skip


def _hybrid(rng: Random, config: dict[str, Any]) -> dict[str, Any]:
    if "hybrid_override_pattern" not in config:
        return {}
    letters = "MMM*" + ("E" if "n_routed_experts" in config else "-") * 2
    pattern = "".join(rng.choice(letters) for _ in range(16))
    return {
        "hybrid_override_pattern": pattern, "num_hidden_layers": 16,
        "mamba_num_heads": rng.choice((16, 48, 64, 96)), "mamba_head_dim": rng.choice((64, 80, 128)),
        "ssm_state_size": rng.choice((64, 128, 256)), "n_groups": rng.choice((1, 2, 8)),
    }  # fmt: skip


def _model(rng: Random, models: Sequence[str]) -> tuple[str, ModelSpec]:
    """A preset or an odd config, as the command line has it, and the model."""
    while True:
        preset = rng.choice(models)
        if rng.random() < 0.6:
            return preset, resolve_model(preset)
        text = odd_config(rng, preset)
        try:
            return text, model_from_json_text(text)
        except SpecError:  # No model has these sizes; others are drawn.
            continue


# ---- cases ---------------------------------------------------------------------------------------


def sample(rng: Random, impl: str, models: Sequence[str]) -> Case:
    """A layout of a few layers, with sizes that mostly fit together and up to six options."""
    name, model = _model(rng, models)
    options = [("--transformer-impl", "local")] if impl == "local" else []
    tp, pp = rng.choice((1, 1, 2, 2, 3, 4, 8)), rng.choice((1, 1, 1, 2, 2, 3, 4))
    cp = rng.choice((1, 1, 1, 2, 4)) if impl != "local" else 1
    vpp = rng.choice((1, 1, 1, 2, 2, 3, 4, 8)) if pp > 1 else 1
    ep, etp = 1, tp
    if model.has_experts:
        ep = rng.choice((1, 2, 3, 4, 6, 8, 8, 12, 16))
        if rng.random() < 0.5:
            etp = rng.choice((1, 1, 2, tp))
            options.append(("--etp", str(etp)))
    for flag, size in (("--tp", tp), ("--pp", pp), ("--cp", cp), ("--ep", ep)):
        if size > 1:
            options.append((flag, str(size)))
    world = lcm(tp * pp * cp, etp * ep * pp) * rng.choice((1, 1, 2, 4))
    options.append(("--num-gpus", str(world)))
    options += _layers(rng, model, pp, vpp)
    options += _place(rng, world, tp, cp, pp)
    if rng.random() < 0.7:
        options.append(("--seq-length", str(rng.choice(NUMBERS["--seq-length"]))))
    micro = rng.choice((1, 1, 1, *NUMBERS["--micro-batch-size"]))
    if micro > 1:
        options.append(("--micro-batch-size", str(micro)))
    if rng.random() < 0.3:
        options.append(("--global-batch-size", str(micro * (world // (tp * pp * cp)) * pp * rng.choice((1, 2, 3)))))
    options += _recomputation(rng)
    options += _others(rng)
    given = dict.fromkeys(flag for flag, _ in options)
    return Case(name, tuple((flag, next(v for f, v in reversed(options) if f == flag)) for flag in given))


def _place(rng: Random, world: int, tp: int, cp: int, pp: int) -> list[tuple[str, str]]:
    """The stage or the rank to rehearse. In a ring the estimate is of the last rank (``rank_in_stage``)."""
    if rng.random() < 0.25:
        rank = rng.randrange(world // (tp * cp)) * tp * cp + (cp - 1) * tp + rng.randrange(tp)
        return [("--rank", str(rank))]
    return [("--stage", str(rng.randrange(pp)))] if pp > 1 else []


def _layers(rng: Random, model: ModelSpec, pp: int, vpp: int) -> list[tuple[str, str]]:
    """Options for layers, virtual stages and their distribution over stages."""
    a_chunk = rng.choice((1, 1, 2, 3, 4) if pp * vpp == 1 else (1,) if vpp > 2 else (1, 1, 2))
    layers = a_chunk * pp * vpp
    options = []
    how = rng.random() if pp > 1 else 1.0
    depths = model.mtp_num_layers
    if rng.random() < 0.2:
        depths = rng.choice((0, 1, 2))
        options.append(("--mtp-num-layers", str(depths)))
    if how < 0.25:
        layout, layers = _layout(rng, pp * vpp, depths)
        options.append(("--pipeline-model-parallel-layout", layout))
        if vpp > 1 and rng.random() < 0.5:
            options.append(("--vpp", str(vpp)))
    else:
        if vpp > 1:
            options.append(("--vpp", str(vpp)))
            if rng.random() < 0.3:
                options.append(("--microbatch-group-size-per-vp-stage", str(pp * rng.choice((1, 2)))))
        if how < 0.45:
            for where in rng.choice((("first",), ("last",), ("first", "last"))):
                held = rng.choice((1, 2) if vpp > 1 else (1, 2, 3)) * vpp
                options.append((f"--num-layers-in-{where}-pipeline-stage", str(held)))
                layers += held - a_chunk * vpp
    return [("--num-layers", str(max(1, min(layers, model.num_layers)))), *options]


def _layout(rng: Random, chunks: int, depths: int) -> tuple[str, int]:
    """A layout string, chunks in the order of stages, and its layers: the embedding in the first chunk, or alone there;
    the loss in the last, or alone; MTP depths after all layers, with the loss or before it."""
    counts = [rng.choice((0, 1, 1, 2)) for _ in range(chunks)]
    counts[0] = rng.choice((0, 1, 2))
    if rng.random() < 0.3:
        counts[-1] = 0
    counts[rng.randrange(chunks)] += not any(counts)
    text = ["t" * n for n in counts]
    text[0] = "E" + text[0]
    after = max(i for i, n in enumerate(counts) if n)
    text[rng.randint(after, chunks - 1)] += "m" * depths
    text[-1] += "L"
    return "|".join(text), sum(counts)


def _recomputation(rng: Random) -> list[tuple[str, str]]:
    how = rng.random()
    if how < 0.65:
        return []
    if how < 0.85:
        return [("--recompute-granularity", "selective"), _values(_FLAG["--recompute-modules"], rng)]
    options = [
        ("--recompute-granularity", "full"), ("--recompute-method", rng.choice(("uniform", "block"))),
        ("--recompute-num-layers", str(rng.choice(NUMBERS["--recompute-num-layers"]))),
    ]  # fmt: skip
    if rng.random() < 0.2:
        options.append(("--distribute-saved-activations", ""))
    return options


def _others(rng: Random) -> list[tuple[str, str]]:
    options: list[tuple[str, str]] = []
    leads = {names[0]: names[1:] for names in TOGETHER}
    for name in rng.sample(drawn_alone(), rng.choice((0, 1, 1, 2, 2, 3, 4))):
        option = _values(_FLAG[name], rng)
        options.append(option)
        if option[0] == name:
            options += [_values(_FLAG[n], rng) for n in leads.get(name, ()) if rng.random() < 0.5]
    for flag, value in (("--hidden-dropout", "0.1"), ("--attention-dropout", "0.1")):
        if rng.random() < 0.06:
            options.append((flag, value))
    if rng.random() < 0.1:
        options.append(("--make-vocab-size-divisible-by", rng.choice(("1", "128", "768"))))
    if rng.random() < 0.15 or any(flag == "--fp4" for flag, _ in options):
        options.append(("--gpu", rng.choice(("A100-80GB", "B200", "B200"))))
    return options


def is_accepted(case: Case, stack: Stack) -> bool:
    """Whether the estimate accepts the case by the rules of the stack's releases, and the rehearsal runs all its
    options."""
    try:
        args = parse(case)
        for name, release in stack.releases().items():
            setattr(args, name, release)
        refuse_what_is_ignored(run_on_gpus(args, [find_gpu(args.gpu)] if args.gpu else []))
    except SpecError:
        return False
    return True


def cases_of(seed: int, number: int, stacks: Sequence[Stack], models: Sequence[str]) -> list[tuple[Stack, Case]]:
    """The cases of a campaign. One in 25 may be refused by the estimate, to test the refusal against the real stack."""
    out = []
    for i in range(number):
        rng, stack = Random(f"{seed}/{i}"), stacks[i % len(stacks)]
        any_will_do = rng.random() < 0.04
        case = sample(rng, stack.impl, models)
        while not (any_will_do or is_accepted(case, stack)):
            case = sample(rng, stack.impl, models)
        out.append((stack, case))
    return out


def models_of(text: str | None) -> list[str]:
    """The presets named in ``text``, separated by commas; all for None. Raises SpecError."""
    if text is None:
        return list_presets()
    for name in text.split(","):
        resolve_model(name)
    return text.split(",")
