"""Configurations of frameworks, read as a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_memory import SpecError, find_gpu
from bridge_memory.rollout.answer import answer
from bridge_memory.rollout.phases import Phase
from bridge_memory.rollout.reading import read
from bridge_memory.rollout.setup import PostTraining, Reference
from bridge_memory.rollout.sources.hydra import Options, command_of_script, overrides, words_of_script

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/verl_qwen3_30b_a3b.yaml"
SMALL = [
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B", "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
]  # fmt: skip


def verl(*words: str, source: str = "0.9") -> PostTraining:
    return read("verl", source, [*SMALL, *words])


def test_the_example_is_what_it_says() -> None:
    setup = read("verl", str(EXAMPLE))
    p, engine = setup.trainer.parallel, setup.engine
    assert (p.world_size, p.tp, p.ep, p.etp) == (8, 4, 8, 1)
    assert (engine.framework, engine.tensor_parallel_size, engine.gpu_memory_utilization) == ("vllm", 4, 0.6)
    assert (setup.longest, setup.update_tokens, setup.log_prob_tokens) == (10240, 16384, 16384)
    assert setup.param_offload and setup.optimizer_offload and setup.reference is Reference.LOADED
    assert setup.hard_limit and setup.log_prob_entropy and not setup.update_entropy
    assert setup.trainer.optimizer.optimizer_cpu_offload and setup.trainer.recompute.granularity == "full"
    assert setup.update_sequences == 64 * 8 // 2 and setup.not_modelled == ()


def test_defaults_are_those_of_the_release() -> None:
    """``trainer/config/_generated_ppo_trainer.yaml`` of the wheels 0.7.0 and 0.9.1."""
    old, new = verl(source="0.7"), verl(source="0.9")
    assert (old.engine.max_num_seqs, new.engine.max_num_seqs) == (1024, 256)
    assert (old.bucket_bytes, new.bucket_bytes) == (0, 2048 << 20)
    assert old.in_process and not new.in_process
    assert new.trainer.precision.params_dtype == "fp32" and new.trainer.data_parallel.engine == "fsdp1"
    assert new.engine.gpu_memory_utilization == 0.5 and new.engine.tensor_parallel_size == 2
    assert new.engine.release_numbers == (0, 24, 0) and old.engine.release_numbers == (0, 12, 0)


@pytest.mark.parametrize(
    ("words", "release"),
    [
        (["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.megatron.grad_offload=True"], (0, 8)),
        (["trainer.use_v1=True"], (0, 9)),
        ([], (0, 9)),
    ],
)
def test_the_release_is_the_newest_that_knows_the_options(
    tmp_path: Path, words: list[str], release: tuple[int, int]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo " + " ".join([*SMALL, *words]))
    assert read("verl", str(script)).release == release


def test_limits_were_soft_up_to_0_8() -> None:
    """Release -> the most tokens of a micro batch with a limit of 4096 and sequences of 1024."""
    words = ("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096")
    most = {release: verl(*words, source=release).worst(4096) for release in ("0.8", "0.9")}
    assert most == {"0.8": 5120, "0.9": 4096}


def test_interpolations_follow_overrides() -> None:
    words = "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=7000"
    setup = verl(*words, "actor_rollout_ref.actor.use_kl_loss=True")
    assert setup.log_prob_tokens == setup.reference_tokens == setup.update_tokens == 7000
    assert setup.reference is Reference.STREAMED  # FSDP's forward-only model is offloaded whatever it says


def test_a_composed_configuration_says_the_same(tmp_path: Path) -> None:
    """All options written out, as Hydra's outputs/.hydra/config.yaml has them."""
    table = json.loads((ROOT / "bridge_memory/rollout/sources/verl_defaults.json").read_text())["0.9"]
    composed = tmp_path / "config.yaml"
    composed.write_text(json.dumps({**table["shared"], **table["fsdp"]}))
    assert read("verl", str(composed), SMALL).with_(assumptions=()) == verl().with_(assumptions=())


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("actor_rollout_ref.rollout.gpu_memory_utilisation=1", "did you mean actor_rollout_ref.rollout.gpu_memory"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "do not divide the 8 GPUs"),
        ("actor_rollout_ref.rollout.name=trtllm", "give vllm or sglang"),
        ("trainer.nnodes=0", "trainer.nnodes (0)"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=x", "ppo_micro_batch_size_per_gpu ('x')"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=3", "neither True nor False"),
        ("data.max_prompt_length=${data.max_prompt_length}", "refers to itself"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_option(word: str, named: str) -> None:
    with pytest.raises(SpecError) as error:
        verl(word)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_what_is_not_modelled_is_named_and_what_moves_nothing_is_not() -> None:
    setup = verl(
        "actor_rollout_ref.actor.optim.lr=3e-6",
        "trainer.total_epochs=3",
        "reward_model.enable=False",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_speculative_tokens=3",
        "actor_rollout_ref.model.enable_activation_offload=True",
    )
    assert setup.not_modelled == (
        "actor_rollout_ref.model.enable_activation_offload",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.num_speculative_tokens",
    )


def test_a_script_with_variables_and_arithmetic() -> None:
    text = """
        TP=${TP:-2}
        max=$((1024 * 4))
        # python3 -m verl.trainer.main_ppo a.b=9
        python3 -m verl.trainer.main_ppo \\
            a.tp=$TP a.len=${max} \\
            a.name='x y' $@ 2>&1 | tee log
    """
    assert words_of_script(text, "verl.trainer.main_ppo") == ["a.tp=2", "a.len=4096", "a.name=x y"]


def test_arrays_of_a_script() -> None:
    text = "A=(\n  --one 1\n  # --two 2\n  --three\n)\nray job submit -- python3 train.py ${A[@]} --four\n"
    assert command_of_script(text, "train.py") == ["--one", "1", "--three", "--four"]


@given(st.text(max_size=60))
@settings(max_examples=50, deadline=None)
def test_any_text_is_an_override_or_refused_in_one_line(text: str) -> None:
    options = Options({"a.b": 1, "a.c": "${a.b}"}, "a trainer")
    try:
        options.override([text])
        overrides([text])
        options.get("a.c")
    except SpecError as error:
        assert "\n" not in str(error)


def test_nemo_rl(tmp_path: Path) -> None:
    base, config = tmp_path / "base.yaml", tmp_path / "config.yaml"
    base.write_text(json.dumps({"policy": {"model_name": "Qwen/Qwen3-8B", "train_micro_batch_size": 2}}))
    config.write_text(json.dumps({"defaults": "base.yaml", "policy": {
        "max_total_sequence_length": 2048, "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 2},
    }, "cluster": {"gpus_per_node": 8}}))  # fmt: skip
    setup = read("nemo_rl", str(config), ["policy.generation.vllm_cfg.gpu_memory_utilization=0.7"])
    assert setup.update_tokens == setup.log_prob_tokens == 2 * 2048  # mul: of two interpolations
    assert setup.engine.gpu_memory_utilization == 0.7 and setup.sleep_level == 1
    assert setup.trainer.optimizer.use_precision_aware_optimizer and setup.reference is Reference.SWAPPED
    assert setup.passes_keep_optimizer and not setup.trainer.data_parallel.grad_reduce_in_fp32


def test_slime() -> None:
    setup = read("slime", "--colocate --hf-checkpoint /root/Qwen3-4B --actor-num-gpus-per-node 8 "
                 "--rollout-max-prompt-len 1024 --rollout-max-response-len 8192 --max-tokens-per-gpu 9216 "
                 "--use-dynamic-batch-size --context-parallel-size 2 "
                 "--sglang-mem-fraction-static 0.7 --rollout-num-gpus-per-engine 2 --use-kl-loss "
                 "--frobnicate 3")  # fmt: skip
    assert setup.update_tokens == 2 * 9216 and setup.longest == 9216
    assert setup.engine.mem_fraction_static == 0.7 and setup.engine.tensor_parallel_size == 2
    assert any("frobnicate" in str(name) for name in (*setup.not_modelled, *setup.trainer.not_modelled))
    with pytest.raises(SpecError, match="--colocate"):
        read("slime", "--hf-checkpoint Qwen/Qwen3-4B")


def test_trl_and_ms_swift(tmp_path: Path) -> None:
    config = tmp_path / "grpo.json"
    config.write_text(json.dumps({
        "model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 2, "use_vllm": True,
        "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "beta": 0.04, "learning_rate": 1e-6,
    }))  # fmt: skip
    setup = read("trl", str(config), world_size=8)
    assert (setup.longest, setup.update_tokens) == (512 + 512, 2 * (512 + 512))
    assert setup.in_process and setup.sleep_level == 0 and setup.reference is Reference.GPU
    swift = read("ms_swift", "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B --train_type full --use_vllm true "
                 "--vllm_mode colocate --vllm_gpu_memory_utilization 0.5 --max_completion_length 2048 "
                 "--deepspeed zero3 --per_device_train_batch_size 1 --sleep_level 1 --offload_optimizer true",
                 world_size=8)  # fmt: skip
    assert swift.trainer.data_parallel.engine == "zero3" and swift.sleep_level == 1
    assert swift.optimizer_offload and not swift.param_offload


@pytest.mark.parametrize(
    "text",
    [
        "a=(\n" * 50_000, "\n" * 500_000, "${a:-" * 100_000, "a=" + " " * 500_000 + "x",
        "a=xxxxxxxxxx\n" + "".join(f"a=$a$a{n}\n" for n in range(60)), "train.py " + "$(( " * 30_000,
    ],
)  # fmt: skip
def test_a_hostile_script_is_refused_at_once(text: str) -> None:
    with pytest.raises(SpecError):
        command_of_script(text, "train.py")
        raise SpecError("a command without a trainer")


def test_megatron_fsdp_of_verl() -> None:
    """Its passes are counted; its buffers stay on the GPU whatever is offloaded."""
    words = ["actor_rollout_ref.model.path=Qwen/Qwen3-8B", "model_engine=megatron", "algorithm.adv_estimator=grpo",
             "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
             "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
             "actor_rollout_ref.actor.megatron.param_offload=True"]  # fmt: skip
    actor = "actor_rollout_ref.actor"
    sharded, whole = (
        answer(read("verl", "0.9", [*words, f"{actor}.megatron.use_megatron_fsdp={fsdp}"]), find_gpu("H100"))
        for fsdp in (True, False)
    )
    assert sharded.setup.trainer.data_parallel.engine == "megatron_fsdp" and not sharded.setup.param_offload
    passes = [found.phase(Phase.LOG_PROBS) for found in (sharded, whole)]
    assert passes[0] is not None and passes[1] is not None
    own = [next(a.most for a in found.allocated if a.name.startswith("forward pass")) for found in passes if found]
    assert own[0] == own[1]


def test_a_reference_that_is_laid_out_as_the_actor_is() -> None:
    """What launch scripts repeat for it moves nothing; another layout is listed."""
    actor, ref, size = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "megatron.tensor_model_parallel_size"
    words = ["model_engine=megatron", f"{actor}.{size}=2", "actor_rollout_ref.actor.use_kl_loss=True",
             "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8"]  # fmt: skip
    assert verl(*words, f"{ref}.{size}=2").not_modelled == ()
    assert verl(*words, f"{ref}.{size}=4").not_modelled == (f"{ref}.{size}",)


_VALUES = st.sampled_from(
    ["0", "1", "2", "8", "4096", "-1", "0.5", "nan", "1e400", "true", "null", "[]", "{}", "abc", "${policy.x}", "'", ""]
)
_SLIME = ["--actor-num-nodes", "--rollout-temperature", "--max-tokens-per-gpu", "--log-probs-chunk-size", "--kl-coef",
          "--entropy-coef", "--sglang-ep-size", "--sglang-mem-fraction-static", "--sglang-kv-cache-dtype",
          "--tensor-model-parallel-size", "--use-dynamic-batch-size", "--update-weight-buffer-size"]  # fmt: skip
_TRL = ["beta", "max_completion_length", "vllm_gpu_memory_utilization", "vllm_max_model_length", "bf16", "deepspeed",
        "per_device_train_batch_size", "use_peft", "model_init_kwargs", "foo"]  # fmt: skip
_SWIFT = ["--sleep_level", "--offload_model", "--deepspeed", "--vllm_max_num_seqs", "--beta", "--train_type", "--foo",
          "--vllm_gpu_memory_utilization", "--lora_rank", "--max_completion_length"]  # fmt: skip
_NEMO = ["policy.train_micro_batch_size", "policy.logprob_chunk_size", "policy.megatron_cfg.enabled",
         "policy.generation.vllm_cfg.gpu_memory_utilization", "policy.sequence_packing.enabled", "policy.precision",
         "policy.megatron_cfg.pipeline_model_parallel_size", "policy.generation.vllm_cfg.precision"]  # fmt: skip


@given(st.dictionaries(st.integers(0, 11), _VALUES, max_size=4),
       st.sampled_from(["nemo_rl", "slime", "trl", "ms_swift"]))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_argument_is_read_or_refused_in_one_line(chosen: dict[int, str], kind: str) -> None:
    def named(names: list[str]) -> dict[str, str]:
        return {names[i % len(names)]: value for i, value in chosen.items()}

    words: list[str] = []
    if kind == "nemo_rl":
        text = "policy: {model_name: Qwen/Qwen3-0.6B, generation: {}}"
        words = [f"{name}={value}" for name, value in named(_NEMO).items()]
    elif kind == "trl":
        text = json.dumps({"use_vllm": True, "model_name_or_path": "Qwen/Qwen3-0.6B", **named(_TRL)})
    else:
        own = "--colocate --hf-checkpoint" if kind == "slime" else "swift rlhf --rlhf_type grpo --use_vllm true --model"
        said = [f"{name} {value}" for name, value in named(_SLIME if kind == "slime" else _SWIFT).items()]
        text = " ".join([own, "Qwen/Qwen3-0.6B", *said])
    try:
        read(kind, "the job", words, text=text, world_size=8)
    except SpecError as error:
        assert "\n" not in str(error)
