"""What Megatron-LM itself makes of command lines, for the tests: ``parse_args`` and ``validate_args`` of a release.

    pip download --no-deps megatron-core==0.19.2 && unzip megatron_core-0.19.2-*.whl -d megatron-core-0.19.2
    PYTHONPATH=megatron-core-0.19.2 python scripts/megatron_lm_namespaces.py tests/data/megatron_lm_arguments.json

Wheels from 0.17 on hold ``megatron/training/arguments.py``. No GPU: what asks for one is answered as on an H100, and
Triton is stood in for where it is not installed. Written: the parser's defaults, what it can switch off, the fields of
the configs that it fills, and of each command line the namespace where it differs from the defaults. Values are JSON's,
or the text that Megatron-LM would print. ``--parser`` leaves the command lines out.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
import typing
import warnings
from pathlib import Path
from typing import Any

LLAMA = (
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-layers 32 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--rotary-percent 1.0 --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--max-position-embeddings 8192 --seq-length 8192 --tokenizer-type NullTokenizer --vocab-size 128256 "
    "--make-vocab-size-divisible-by 1 --bf16 --micro-batch-size 1 --use-distributed-optimizer "
)
MOE = (
    LLAMA.replace("14336", "6144").replace("--hidden-size 4096", "--hidden-size 2048")
    + "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --kv-channels 128 --qk-layernorm "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-3 "
)
#: Name -> (command line, ranks).
RUNS: dict[str, tuple[str, int]] = {
    "defaults": ("--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
                 "--max-position-embeddings 1024 --micro-batch-size 4", 8),
    "llama": (f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 128", 16),
    "uneven": (f"{LLAMA} --num-layers 78 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 18 "
               "--decoder-last-pipeline-num-layers 20 --global-batch-size 64", 8),
    "virtual": (f"{LLAMA} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 "
                "--overlap-grad-reduce --overlap-param-gather --global-batch-size 64", 8),
    "layout": (f"{LLAMA} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*7|t*8|t*8|t*9L "
               "--global-batch-size 64", 8),
    "full recomputation": (f"{LLAMA} --recompute-granularity full --recompute-method uniform "
                           "--recompute-num-layers 1 --global-batch-size 64", 8),
    "selective recomputation": (f"{LLAMA} --recompute-activations --global-batch-size 64", 8),
    "experts": (f"{MOE} --expert-model-parallel-size 8 --moe-layer-freq ([0]*2+[1]*30) --global-batch-size 64 "
                "--moe-permute-fusion --moe-router-dtype fp32 --recompute-granularity selective "
                "--recompute-modules moe_act layernorm", 8),
    "experts with biases": (f"{MOE.replace('--disable-bias-linear', '')} --expert-model-parallel-size 8 "
                            "--moe-router-load-balancing-type none --softmax-type learnable --window-size 128,0 "
                            "--window-attn-skip-freq 2 --global-batch-size 64", 8),
    "latent attention": (
        "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 "
        "--multi-latent-attention --kv-lora-rank 512 --v-head-dim 128 --qk-layernorm --swiglu --disable-bias-linear "
        "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
        "--max-position-embeddings 4096 --seq-length 4096 --tokenizer-type NullTokenizer --vocab-size 102400 --bf16 "
        "--micro-batch-size 1 --global-batch-size 64 --num-experts 64 --moe-router-topk 6 "
        "--moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 --moe-layer-freq ([0]+[1]*15) "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 8 "
        "--moe-router-group-topk 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 "
        "--mtp-num-layers 1 --use-distributed-optimizer --cross-entropy-loss-fusion", 8),
    "hybrid": (
        "--hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --kv-channels 128 --hybrid-layer-pattern M-M-M-M*-M-M-M-M*- --squared-relu "
        "--disable-bias-linear --normalization RMSNorm --position-embedding-type none "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --mamba-num-heads 128 "
        "--mamba-head-dim 64 --mamba-state-dim 256 --mamba-num-groups 8 --max-position-embeddings 8192 "
        "--seq-length 8192 --tokenizer-type NullTokenizer --vocab-size 131072 --bf16 --micro-batch-size 1 "
        "--global-batch-size 16 --pipeline-model-parallel-size 2 --use-distributed-optimizer", 4),
    "hybrid that splits the pipeline": (
        "--hidden-size 2048 --num-attention-heads 16 --hybrid-layer-pattern M-M*|M-M-|M*M-|M-M- "
        "--max-position-embeddings 4096 --seq-length 4096 --tokenizer-type NullTokenizer --vocab-size 131072 --bf16 "
        "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 2 --position-embedding-type rope",
        4),
    "fp8": (f"{LLAMA} --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --first-last-layers-bf16 "
            "--global-batch-size 64", 8),
    "precision-aware": (f"{LLAMA} --use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16 "
                        "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 --global-batch-size 64", 8),
    "offloaded": (f"{LLAMA} --use-precision-aware-optimizer --optimizer-cpu-offload "
                  "--optimizer-offload-fraction 0.5 --global-batch-size 64", 8),
    "fsdp": (f"{LLAMA} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
             "--ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion --global-batch-size 64", 8),
    "muon": (f"{LLAMA} --optimizer muon --global-batch-size 64", 8),
    "fp16": (f"{LLAMA.replace('--bf16', '--fp16')} --global-batch-size 64", 8),
    "switched off": (
        f"{LLAMA} --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-masked-softmax-fusion "
        "--no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader --transformer-impl local "
        "--attention-softmax-in-fp32 --global-batch-size 64", 8),
    "context parallel": (f"{LLAMA} --context-parallel-size 4 --cp-comm-type a2a --calculate-per-token-loss "
                         "--global-batch-size 64", 8),
    "GELU without biases": (f"{LLAMA.replace('--swiglu', '')} --global-batch-size 64", 8),
}  # fmt: skip


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class _StandIn(types.ModuleType):
    """A module whose names are decorators that change nothing, or classes that take anything."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "3.4.0"
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        return lambda *args, **kwargs: args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda f: f


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)


def _prepare() -> None:
    """This interpreter as Megatron-LM expects one: Python 3.12's names, an H100, one process."""
    warnings.simplefilter("ignore")
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", RANK="1")  # rank 0 would print
    if not hasattr(typing, "override"):
        setattr(typing, "override", lambda method: method)  # noqa: B010
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _Finder())
    import torch

    torch.compile = lambda function=None, **_: function if function else lambda f: f
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _namespace(arguments: Any, line: str, ranks: int) -> dict[str, Any]:
    sys.argv = ["pretrain_gpt.py", *line.split()]
    os.environ["WORLD_SIZE"] = str(ranks)
    if "fsdp" in line:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    args = arguments.parse_args()
    arguments.validate_args(args)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    # What building the tokenizer leaves there (``megatron/training/global_vars.py``).
    args.padded_vocab_size = calculate_padded_vocab_size(
        args.vocab_size or 50257, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, False
    )
    return {k: _plain(v) for k, v in sorted(vars(args).items()) if not k.startswith("_")}


def _parser(arguments: Any) -> dict[str, Any]:
    """The release, its parser's destinations and options, and the fields of the configs that they fill."""
    import megatron.core
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    theirs = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions = [a for a in theirs._actions if a.dest != "help"]
    names = {
        option.lstrip("-").replace("-", "_"): [a.dest, a.const if a.nargs == 0 else None]
        for a in actions for option in a.option_strings
    }  # fmt: skip
    configs = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    return {
        "megatron_core": megatron.core.__version__,
        "defaults": {a.dest: _plain(a.default) for a in actions},
        # Options whose destination has another name, and what they put there if they take no value.
        "options": {option: found for option, found in names.items() if option != found[0]},
        "fields": sorted({f.name for config in configs for f in dataclasses.fields(config)}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("output", type=Path)
    parser.add_argument("--parser", action="store_true", help="the parser alone, no command lines")
    given = parser.parse_args()
    _prepare()
    from megatron.training import arguments

    document = _parser(arguments)
    if not given.parser:
        document["runs"] = _runs(arguments, document["defaults"])
    given.output.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _runs(arguments: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    runs = {}
    for name, (line, ranks) in RUNS.items():
        made = _namespace(arguments, line, ranks)
        runs[name] = {
            "arguments": line, "world_size": ranks,
            "namespace": {k: v for k, v in made.items() if k not in defaults or defaults[k] != v},
            "removed": sorted(defaults.keys() - made.keys()),
        }  # fmt: skip
    return runs


if __name__ == "__main__":
    main()
