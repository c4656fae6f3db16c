"""What somebody may have meant who typed a flag that there is not."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

#: What people type, without the dashes -> what says it here. Shown where the command has every flag that is named.
MEANT = {
    "model": "MODEL stands alone, without a flag", "model-name": "MODEL stands alone, without a flag",
    "model-name-or-path": "MODEL stands alone, without a flag", "model-path": "MODEL stands alone, without a flag",
    "hf-model": "MODEL stands alone, without a flag", "hf-path": "MODEL stands alone, without a flag",
    "config": "MODEL, without a flag, may be a config.json; --custom-config takes its text",
    "lora": "use --peft lora", "qlora": "use --load-in-4bit beside --peft lora", "attention": "use --attention-backend",
    "lora-rank": "use --lora-dim", "lora-r": "use --lora-dim",
    "dp": "the data-parallel size follows from --num-gpus and the other sizes",
    "data-parallel-size": "the data-parallel size follows from --num-gpus and the other sizes",
    "gpus": "use --num-gpus for how many, --gpu for which", "nproc": "use --num-gpus",
    "ngpus": "use --num-gpus", "n-gpus": "use --num-gpus", "nodes": "use --num-gpus, the GPUs of the whole job",
    "num-nodes": "use --num-gpus, the GPUs of the whole job", "nnodes": "use --num-gpus, the GPUs of the whole job",
    "gpu-type": "use --gpu", "gpu-name": "use --gpu", "gpu-arch": "use --gpu",
    "mbs": "use --micro-batch-size", "gbs": "use --global-batch-size",
    "batch-size": "use --micro-batch-size or --global-batch-size", "sp": "use --sequence-parallel",
    "seq": "use --seq-length", "sequence-length": "use --seq-length", "seqlen": "use --seq-length",
    "max-seq-len": "use --seq-length", "context-length": "use --seq-length",
    "dtype": "use --precision", "params-dtype": "use --precision", "bfloat16": "use --bf16", "half": "use --fp16",
    "fsdp": "use --engine fsdp2 (PyTorch's) or --engine megatron_fsdp",
    "zero": "use --engine zero1, zero2 or zero3 (DeepSpeed's)",
    "zero-stage": "use --engine zero1, zero2 or zero3 (DeepSpeed's)",
    "config-file": "use --accelerate FILE, or the file of another tool with --deepspeed, --training-args, --torchtitan",
    "deepspeed-config": "use --deepspeed FILE", "ds-config": "use --deepspeed FILE",
    "deepspeed-config-file": "use --deepspeed FILE", "accelerate-config": "use --accelerate FILE",
    "per-device-train-batch-size": "use --micro-batch-size", "local-batch-size": "use --micro-batch-size",
    "train-micro-batch-size-per-gpu": "use --micro-batch-size", "num-processes": "use --num-gpus",
    "gradient-accumulation-steps": "it follows from --global-batch-size, --micro-batch-size and --num-gpus",
    "optim": "use --optimizer", "mixed-precision": "use --autocast, or --fsdp-param-dtype with FSDP",
    "train-batch-size": "use --global-batch-size", "max-length": "use --seq-length",
    "recompute": "use --recompute-granularity", "recompute-activations": "use --recompute-granularity selective",
    "activation-checkpointing": "use --recompute-granularity", "gradient-checkpointing": "use --recompute-granularity",
    "flash-attn": "use --attention-backend flash", "use-flash-attn": "use --attention-backend flash",
    "layers": "use --num-layers", "offload": "use --optimizer-cpu-offload or --offload-modules",
    "cpu-offload": "use --optimizer-cpu-offload or --offload-modules",
}  # fmt: skip
#: A flag and a value that it does not take -> what says it here.
MEANT_VALUES = {
    ("--precision", "fp8"): "use --fp8 hybrid beside it", ("--precision", "fp4"): "use --fp4 e2m1 beside it",
    ("--precision", "mxfp8"): "use --fp8 e4m3 --fp8-recipe mxfp8", ("--precision", "nvfp4"): "use --fp4 e2m1",
    ("--engine", "fsdp"): "use fsdp2 or fsdp1 (PyTorch's), or megatron_fsdp",
    ("--engine", "deepspeed"): "use zero1, zero2 or zero3", ("--engine", "zero"): "use zero1, zero2 or zero3",
}
#: Of two spellings, how alike they must be: "--seq-len" and "--seq-length", not "--zero" and "--verbose".
ALIKE = 0.8


def suggestion(flag: str, known: Sequence[str], positional: Sequence[str] = ()) -> str:
    """Words of ``MEANT``, what Megatron-LM means by the flag, or "did you mean --x?"; "" where nothing comes close."""
    flag = flag.replace("_", "-").lower()
    for meant in (flag, f"--{flag.strip('-').removesuffix('-size')}"):
        if meant in known:
            return f"did you mean {meant}?"
    meant = MEANT.get(flag.strip("-"), "")
    named = [word.strip(",;") for word in meant.split() if word.startswith("--")]
    if meant and all(name in known for name in named) and ("MODEL" not in meant or "MODEL" in positional):
        return meant
    if "--megatron-args" in known and (words := _of_megatron(flag)):
        return words
    near = _near(flag, [name for name in known if name.startswith("--")])
    return f"did you mean {' or '.join(near)}?" if near else ""


def _of_megatron(flag: str) -> str:
    from bridge_memory.readers.megatron_args.arguments import DESTINATIONS, KNOWN, SWITCHED_OFF_BY
    from bridge_memory.readers.megatron_args.harmless import HARMLESS

    name = flag.strip("-").replace("-", "_")
    name = DESTINATIONS.get(name) or SWITCHED_OFF_BY.get(name, name)
    if name in HARMLESS:
        return "it is Megatron-LM's and changes no memory; drop it"
    return "it is Megatron-LM's; give --megatron-args, with all of them, in place of MODEL" if name in KNOWN else ""


def _likeness(text: str, name: str) -> float:
    """0 where their lengths alone, or their letters, say that it is below ``ALIKE``: a word of 100,000 letters costs
    nothing."""
    match = SequenceMatcher(None, text, name)
    bounds = (match.real_quick_ratio, match.quick_ratio)
    return match.ratio() if all(bound() >= ALIKE for bound in bounds) else 0.0


def _near(flag: str, known: Sequence[str]) -> list[str]:
    """The spelling that is like ``flag``, or several that it is a part of; failing those, up to three
    that have all of its words."""
    text = flag.strip("-")
    longer = [name for name in known if text in name and not name.startswith("--no-")]
    likeness = {name: _likeness(text, name.strip("-")) for name in known}
    best = max(likeness.values(), default=0)
    if best >= ALIKE and len(longer) < 2:
        return [next(name for name, ratio in likeness.items() if ratio == best)]
    words = set(text.split("-"))
    having = [name for name in known if words <= set(name.strip("-").split("-")) and not name.startswith("--no-")]
    return sorted(having, key=len)[:3]
