"""Megatron-LM's arguments beside a model, and the ranks that a launch script starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge_memory.cli import main
from bridge_memory.estimation import peaks
from bridge_memory.readers import resolve_model
from bridge_memory.readers.megatron_args import read_arguments, run_from_megatron_args
from bridge_memory.readers.megatron_args.model_override import _OF_THE_MODEL
from bridge_memory.readers.megatron_args.parsing import _LAUNCHER, argument_name
from bridge_memory.spec import SpecError

TRAINED = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 "
    "--seq-length 2048 --bf16 --use-distributed-optimizer --sequence-parallel --hidden-dropout 0 --attention-dropout 0"
)
#: The models as a script of Megatron-LM's says them, from their config.json.
MODELS = {
    "meta-llama/Llama-3.1-8B": (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--max-position-embeddings 8192 --untie-embeddings-and-output-weights --vocab-size 128256"
    ),
    "Qwen/Qwen3-30B-A3B": (
        "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 4 --kv-channels 128 --swiglu --normalization RMSNorm --disable-bias-linear "
        "--position-embedding-type rope --max-position-embeddings 8192 --untie-embeddings-and-output-weights "
        "--vocab-size 151936 --qk-layernorm --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768"
    ),
}
OF_EXPERTS = (
    "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("said_too", [False, True], ids=["the model alone", "both"])
def test_the_model_may_be_named_instead_of_written_out(name: str, said_too: bool) -> None:
    """The same run, told in Megatron-LM's words alone and with the architecture of a preset: to the byte."""
    how = f"{TRAINED} {OF_EXPERTS}" if "--num-experts" in MODELS[name] else TRAINED
    written = run_from_megatron_args(f"{how} {MODELS[name]}", world_size=8)
    model = resolve_model(name, make_vocab_size_divisible_by=128)
    named = run_from_megatron_args(f"{how} {MODELS[name] if said_too else ''}", world_size=8, model=model)
    assert [(s.peak_bytes, s.static_bytes) for s in peaks(named)] == [
        (s.peak_bytes, s.static_bytes) for s in peaks(written)
    ]
    assert any("--swiglu" in a for a in named.assumptions) == said_too


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "nvidia/Nemotron-H-56B-Base-8K", "google/gemma-2-9b"])
def test_any_architecture(name: str) -> None:
    """Latent attention, Mamba, norms after the blocks: the layers of the preset, whole."""
    model = resolve_model(name, make_vocab_size_divisible_by=128)
    how = TRAINED.replace("--pipeline-model-parallel-size 2", "")
    run = run_from_megatron_args(how, world_size=8, model=model)
    assert run.model.layers[0].mixer == model.layers[0].mixer and run.model.num_layers == model.num_layers
    assert run.parallel.tp == 2 and len(peaks(run)) == 1
    if model.mtp_num_layers:
        without = run_from_megatron_args(f"{how} --mtp-num-layers 0", world_size=8, model=model)
        assert run.model.mtp_num_layers == model.mtp_num_layers and without.model.mtp_num_layers == 0


def test_dropout_is_megatrons_own() -> None:
    without = TRAINED.replace("--hidden-dropout 0 --attention-dropout 0", "")
    run = run_from_megatron_args(without, world_size=8, model=resolve_model("meta-llama/Llama-3.1-8B"))
    assert (run.model.hidden_dropout, run.model.attention_dropout) == (0.1, 0.1)
    assert any("dropout 0.1" in a for a in run.assumptions)


@pytest.mark.parametrize(
    "wrong", ["--hidden-size 5120", "--num-layers 30", "--num-query-groups 4", "--ffn-hidden-size x"]
)
def test_what_both_say_has_to_agree(wrong: str) -> None:
    with pytest.raises(SpecError, match=wrong.split()[0]):
        run_from_megatron_args(f"{TRAINED} {wrong}", world_size=8, model=resolve_model("meta-llama/Llama-3.1-8B"))


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH -N 1\nARGS=(\n{TRAINED}\n)\n"
                      "srun torchrun --nproc-per-node 8 --nnodes $SLURM_NNODES p.py ${ARGS[@]}\n")  # fmt: skip
    assert main(["estimate", "meta-llama/Llama-3.1-8B", "--megatron-args", str(script), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    told = f"{TRAINED} {MODELS['meta-llama/Llama-3.1-8B']}"
    assert main(["estimate", "--megatron-args", told, "--num-gpus", "8", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert found["stages"] == other["stages"]
    assert main(["estimate", "Llama-3.1-8B", "--megatron-args", TRAINED, "--tp", "2", "--num-gpus", "8"]) == 2
    assert "--tp belongs inside --megatron-args" in capsys.readouterr().err


ARRAY = "ARGS=(\n --num-layers 2\n --hidden-size 64\n)\n"
NODES = "--nnodes=$SLURM_NNODES"
BATCH = "#!/bin/bash\n#SBATCH --nodes=4\n"


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        (f"{BATCH}#SBATCH --ntasks-per-node=8\n{ARRAY}srun python pretrain_gpt.py ${{ARGS[@]}}\n", 32),
        (f"{BATCH}#SBATCH --ntasks-per-node=1\n{ARRAY}srun torchrun {NODES} --nproc-per-node 8 p.py\n", 32),
        (f"{BATCH}#SBATCH --gres=gpu:h100:4\n{ARRAY}srun torchrun {NODES} --nproc-per-node=gpu p.py\n", 16),
        (f"{BATCH}{ARRAY}srun -N 2 --ntasks-per-node 4 python p.py\n", 8),
        (f"{BATCH}{ARRAY}NCCL_DEBUG=INFO srun -n 24 python p.py\n", 24),
        (f"{ARRAY}GPUS=8\nNODES=2\ntorchrun --nproc_per_node $GPUS --nnodes ${{NODES}} p.py ${{ARGS[@]}}\n", 16),
        (f"{ARRAY}torchrun --nproc_per_node 8 p.py ${{ARGS[@]}}\n", 8),
        ("torchrun --nproc-per-node 8 --nnodes 2 p.py --num-layers 2 --hidden-size 64", 16),
        ("srun -N 2 --ntasks-per-node 4 python p.py --num-layers 2 --hidden-size 64", 8),
        # Not known: how many GPUs a node has, how many nodes join, how many tasks a node runs.
        (f"{ARRAY}torchrun --nproc-per-node=gpu p.py\n", None),
        (f"{ARRAY}torchrun --nnodes 1:4 --nproc-per-node=8 p.py\n", None),
        (f"{BATCH}{ARRAY}srun python p.py\n", None),
        (f"{ARRAY}python p.py ${{ARGS[@]}}\n", None),
    ],
)
def test_ranks_of_a_launch(script: str, ranks: int | None) -> None:
    found = read_arguments(script)
    assert found.world_size == ranks
    assert found.values == {"num_layers": "2", "hidden_size": "64"}


def test_names_of_launchers_and_models_are_told_from_megatrons() -> None:
    """Every name of the model is one of Megatron-LM's parser's (some release's); no launcher's is."""
    folder = Path(__file__).parents[1] / "data"
    known = set(json.loads((folder / "megatron_lm_arguments.json").read_text())["defaults"])
    assert not {argument_name(name) for name in _LAUNCHER} & known
    destinations = known | {"decoder_num_layers", "disable_bias_linear", "padded_vocab_size", "encoder_num_layers"}
    assert not {name for name in _OF_THE_MODEL if name not in destinations}
