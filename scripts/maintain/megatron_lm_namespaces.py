"""Record what Megatron-LM makes of command lines, for the tests: ``parse_args`` and ``validate_args`` of a release.

    pip download --no-deps megatron-core==0.19.2 && unzip megatron_core-0.19.2-*.whl -d megatron-core-0.19.2
    PYTHONPATH=megatron-core-0.19.2 \\
        python scripts/maintain/megatron_lm_namespaces.py tests/data/megatron_lm_arguments.json

Needs a wheel from 0.17 on, which holds ``megatron/training/arguments.py``; no GPU: queries are answered as on an H100,
and placeholders replace Triton where it is not installed. Writes the parser's defaults, the options that it can switch
off, the fields of the configs that it fills, and of each command line the values that differ from the defaults, as JSON
or as Megatron-LM prints them. ``--parser`` omits the command lines; ``--lines FILE`` takes others in their place, as
JSON {name: [command line, ranks]}, and records what Megatron-LM refuses of them in its own words.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import shlex
import sys
import types
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bridge_memory.rehearsal.imports import missing, placeholder_packages, supply_typing_override

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
    # Of Megatron-LM's examples/: gpt3/train_gpt3_175b_distributed.sh, llama/train_llama3_8b_h100_fp8.sh and, in its
    # real size, mixtral/train_mixtral_8x7b_distributed.sh.
    "example: GPT-3 175B": (
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
        "--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 "
        "--train-samples 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 "
        "--clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 "
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --vocab-size 50257 --split 949,50,1 "
        "--data-path text_document --log-interval 100 --save-interval 10000 --eval-interval 1000 --save here "
        "--load here --eval-iters 10 --tensorboard-dir logs", 1024),
    "example: Llama 3 8B in fp8": (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 "
        "--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p "
        "--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 "
        "--train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 "
        "--min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 "
        "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 "
        "--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 "
        "--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
        "--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 "
        "--split 99,1,0 --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 "
        "--eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 "
        "--profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save here --load here", 8),
    "example: Mixtral 8x7B": (
        "--disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096 "
        "--ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion "
        "--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce "
        "--tokenizer-type NullTokenizer --vocab-size 32000 --mock-data --split 99990,8,2 --micro-batch-size 1 "
        "--global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine "
        "--min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
        "--use-distributed-optimizer --sequence-parallel --no-load-optim --no-load-rng --eval-iters 10", 32),
    "nothing of this is modelled": (
        f"{LLAMA} --tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel --disable-jit-fuser "
        "--eval-micro-batch-size 4 --eval-global-batch-size 64 --no-clone-scatter-output-in-embedding --use-mup "
        "--dist-ckpt-optim-fully-reshardable --global-batch-size 64", 8),
    "GELU without biases": (f"{LLAMA.replace('--swiglu', '')} --global-batch-size 64", 8),
}  # fmt: skip


def _prepare() -> None:
    """Make this process look as Megatron-LM expects: Python 3.12's names, an H100, one rank."""
    warnings.simplefilter("ignore")
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", RANK="1")  # rank 0 would print
    supply_typing_override()
    import torch

    torch.compile = lambda function=None, **_: function if function else lambda f: f
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _namespace(arguments: Any, line: str, ranks: int) -> dict[str, Any]:
    sys.argv = ["pretrain_gpt.py", *shlex.split(line)]
    os.environ["WORLD_SIZE"] = str(ranks)
    if "fsdp" in line:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    else:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    args = arguments.parse_args()
    arguments.validate_args(args)
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    # Set when the tokenizer is built (``megatron/core/tokenizers/utils/build_tokenizer.py``).
    if args.padded_vocab_size is None:
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
    parser.add_argument("--parser", action="store_true", help="only the parser, no command lines")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="other command lines, as JSON")
    given = parser.parse_args()
    _prepare()
    with placeholder_packages(*missing("triton")):
        from megatron.training import arguments

    document = _parser(arguments)
    if not given.parser:
        lines = RUNS if given.lines is None else json.loads(given.lines.read_text(encoding="utf-8"))
        document["runs"] = _runs(arguments, lines, document["defaults"], refusals=given.lines is not None)
    given.output.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _runs(
    arguments: Any, lines: dict[str, tuple[str, int]], defaults: dict[str, Any], *, refusals: bool
) -> dict[str, Any]:
    """Name -> what becomes of its line. ``refusals``: what Megatron-LM refuses is recorded, not raised."""
    runs = {}
    for name, (line, ranks) in lines.items():
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said) if refusals else contextlib.nullcontext():
                made = _namespace(arguments, line, ranks)
        except (SystemExit, AssertionError, ValueError, RuntimeError) as error:
            if not refusals:
                raise
            parsed = not isinstance(error, SystemExit)
            last = str(error) if parsed else said.getvalue().strip().splitlines()[-1]
            runs[name] = {"arguments": line, "world_size": ranks, "parsed": parsed, "refused": last}
            continue
        runs[name] = {
            "arguments": line, "world_size": ranks,
            "namespace": {k: v for k, v in made.items() if k not in defaults or defaults[k] != v},
            "removed": sorted(defaults.keys() - made.keys()),
        }  # fmt: skip
    return runs


if __name__ == "__main__":
    main()
