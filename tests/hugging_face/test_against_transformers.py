"""Recordings beside the real modules of transformers: saved bytes and both peaks of whole small models."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("transformers")

from hf_families import CONFIGS
from hf_oracle import build
from hf_side_by_side import INSTALLED, both, errors
from hf_sweep import draw, off
from parameters_of import stage_parameters

from bridge_memory import BatchSpec, ImplementationSpec, ParallelSpec, RunSpec, SpecError, estimate
from bridge_memory.caveats.unmodelled import unmodelled_features
from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.spec import PeftSpec, PrecisionSpec
from bridge_memory.spec.transformers import FAMILIES, NOT_IN_MEGATRON, TransformersSpec
from bridge_memory.tapes.context import context_of

CLOSE = 0.005
#: Ways to run a model: fields of a TransformersSpec, or of the batch and the dtype.
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"attn_implementation": "eager"},
    "reentrant checkpoints": {"gradient_checkpointing": True, "use_reentrant": True},
    "checkpoints": {"gradient_checkpointing": True, "use_reentrant": False},
    "padding": {"attention_mask": "padded"},
    "autocast": {"autocast": "bf16", "dtype": "fp32"},
    "autocast, eager": {"autocast": "bf16", "dtype": "fp32", "attn_implementation": "eager"},
    "fp32": {"dtype": "fp32"},
    "held outputs": {"keeps_outputs": True},
    "one sequence": {"batch": 1, "seq": 256},
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def skip_what_does_not_run(name: str) -> None:
    family = FAMILIES[CONFIGS[name]["model_type"]]
    if not family.since <= INSTALLED <= family.until:
        pytest.skip(f"its class was read in transformers {family.since} to {family.until}")
    if name == "deepseek_v2" and INSTALLED >= (5, 0):
        pytest.skip("transformers 5.12.1 fails on topk_method group_limited_greedy: DeepseekV2Moe has no num_experts")


def skip_experts_in_fp32(name: str, way: str) -> None:
    experts = any("experts" in key for key in CONFIGS[name])
    if experts and WAYS[way].get("dtype") == "fp32" and INSTALLED >= (5, 0):
        pytest.skip("transformers 5 groups experts in bf16 alone: not modelled, and said so")


def close(config: dict[str, Any], **options: Any) -> None:
    found = errors(config, **options)
    assert max(map(abs, found)) < CLOSE, found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 640, 20000])
def test_where_the_peak_is_in_a_layer_and_where_it_is_in_the_loss(tied: bool, vocab_size: int) -> None:
    close({**CONFIGS["llama"], "tie_word_embeddings": tied, "vocab_size": vocab_size})


def test_a_tied_table_under_autocast() -> None:
    close({**CONFIGS["llama"], "tie_word_embeddings": True, "vocab_size": 5000}, dtype="fp32", autocast="bf16",
          gradient_checkpointing=True, seq=64)


@pytest.mark.parametrize("name", [n for n in sorted(CONFIGS) if FAMILIES[CONFIGS[n]["model_type"]].wide_logits])
def test_logits_that_the_model_itself_casts(name: str) -> None:
    skip_what_does_not_run(name)
    close({**CONFIGS[name], "vocab_size": 20000})


@pytest.mark.parametrize("name", ["olmoe", "gemma2"])
def test_a_mask_and_repeated_keys_during_attention(name: str) -> None:
    close({**CONFIGS[name], "vocab_size": 64}, dtype="bf16", attention_mask="padded", seq=320,
          gradient_checkpointing=True, use_reentrant=True)


@pytest.mark.parametrize("way", [{"attn_implementation": "eager", "batch": 1}, {"attention_mask": "padded"}])
def test_a_single_group_is_expanded_without_a_copy(way: dict[str, Any]) -> None:
    close({**CONFIGS["llama"], "vocab_size": 64, "num_key_value_heads": 1}, **way)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_families(name: str) -> None:
    skip_what_does_not_run(name)
    close(CONFIGS[name])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_ways_to_run_a_model(name: str, way: str) -> None:
    skip_experts_in_fp32(name, way)
    close({**CONFIGS[name], "vocab_size": 64}, **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_family_in_every_way(name: str, way: str) -> None:
    skip_experts_in_fp32(name, way)
    skip_what_does_not_run(name)
    close({**CONFIGS[name], "vocab_size": 64}, **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_random_ways(number: int) -> None:
    """The first draws of ``hf_sweep.py --seed 2``; a hundred more are in its own command."""
    rng = random.Random(2)
    for _ in range(number + 1):
        name, options = draw(rng)
    assert max(map(abs, off(name, options))) < CLOSE, (name, options)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("way", [{}, {"gradient_checkpointing": True}, {"lora_dropout": 0.1},
                                 {"autocast_adapter_dtype": False}])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt2"])
def test_adapters(name: str, way: dict[str, Any]) -> None:
    targets = ("c_attn", "c_proj", "c_fc") if name == "gpt2" else LINEARS
    close({**CONFIGS[name], "vocab_size": 64}, targets=targets, **way)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "in_proj_qkvz", "in_proj", "out_proj")])
@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_adapters_of_some_layers(name: str, targets: tuple[str, ...]) -> None:
    """Nothing is kept before the first layer that has one: attention is the fourth."""
    skip_what_does_not_run(name)
    if name == "nemotron_h" and "out_proj" in targets:
        targets = targets[:-1]  # which peft refuses beside Mamba's kernel
    close({**CONFIGS[name], "vocab_size": 64}, targets=targets)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("way", [{}, {"gradient_checkpointing": True, "use_reentrant": False}, {"lora_dropout": 0.1},
                                 {"autocast_adapter_dtype": False}])
def test_magnitudes(way: dict[str, Any]) -> None:
    """DoRA: exact, but for forward passes with dropout or checkpoints, and 2.5 % backward under the latter."""
    retained, forward, backward = errors({**CONFIGS["llama"], "vocab_size": 64}, targets=LINEARS, dora=True, **way)
    checkpoints = "gradient_checkpointing" in way
    assert abs(retained) < CLOSE and abs(backward) < (0.025 if checkpoints else CLOSE)
    assert checkpoints or abs(forward) < (0.025 if "lora_dropout" in way else CLOSE)


@pytest.mark.parametrize("way", [{}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize(
    "name", ["qwen3_next", "nemotron_h", "granite hybrid", "bamba", "lfm2", "kimi_linear", "jamba"]
)
def test_mixers_in_kernels(name: str, way: dict[str, Any]) -> None:
    """As where causal_conv1d, flash-linear-attention and mamba_ssm are installed."""
    skip_what_does_not_run(name)
    close({**CONFIGS[name], "vocab_size": 64}, mixer_kernels=True, **way)


@pytest.mark.parametrize("way", [{"gradient_checkpointing": True, "use_reentrant": True}, {"seq": 130},
                                 {"gradient_checkpointing": True, "use_reentrant": False, "seq": 448}])
@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_mixers_chunk_by_chunk(name: str, way: dict[str, Any]) -> None:
    """Of a length that is no multiple of a chunk, and of more chunks than are recorded one by one."""
    skip_what_does_not_run(name)
    close({**CONFIGS[name], "vocab_size": 64}, **way)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parameters_are_called_as_the_model_calls_them(name: str) -> None:
    skip_what_does_not_run(name)
    run = small_run(CONFIGS[name])
    ours = {p.name: p.shape for chunk in stage_parameters(run, 0) for p in chunk}
    real = {n: tuple(p.shape) for n, p in build(CONFIGS[name]).named_parameters()}
    assert ours == real


def small_run(config: dict[str, Any], **groups: Any) -> RunSpec:
    import transformers

    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    return RunSpec(
        model=model_from_hf_config(dict(config), "a small model"), batch=BatchSpec(seq_length=128),
        implementation=ImplementationSpec(transformer_impl="transformers"),
        **{"transformers": TransformersSpec(transformers_version=version), **groups},
    )


def test_every_family_has_its_config() -> None:
    remote = {"kimi_k2"}
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES) - remote


def test_the_vocabulary_is_as_the_model_has_it() -> None:
    run = small_run({**CONFIGS["llama"], "vocab_size": 641})
    assert context_of(run).padded_vocab == 641


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ({"parallel": ParallelSpec(world_size=2, tensor_model_parallel_size=2)}, "tensor_model_parallel_size"),
        ({"parallel": ParallelSpec(world_size=2, pipeline_model_parallel_size=2)}, "pipeline_model_parallel_size"),
        ({"parallel": ParallelSpec(world_size=2, context_parallel_size=2)}, "context_parallel_size"),
        ({"transformers": TransformersSpec(autocast="bf16")}, "autocast"),
        ({"transformers": TransformersSpec(use_reentrant=True)}, "use_reentrant"),
        ({"transformers": TransformersSpec(transformers_version=(4, 40))}, "transformers_version"),
        ({"transformers": TransformersSpec(mixer_kernels=True)}, "mixer_kernels"),
    ],
)
def test_what_it_cannot_do_is_refused(groups: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=field):
        small_run(CONFIGS["llama"], **groups)


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="nemotron-nas"):
        RunSpec(
            model="nvidia/Llama-3_3-Nemotron-Super-49B-v1",
            implementation=ImplementationSpec(transformer_impl="transformers"),
        )


@pytest.mark.parametrize("kind", sorted(NOT_IN_MEGATRON))
def test_what_megatron_does_not_have_is_refused_by_name(kind: str) -> None:
    config = next(config for config in CONFIGS.values() if config["model_type"] == kind)
    with pytest.raises(SpecError, match=f"{kind}.*megatron-core does not have.*--engine fsdp2"):
        RunSpec(model=model_from_hf_config(config, "a small model"))


@pytest.mark.parametrize(
    ("name", "fields", "word"),
    [
        ("minimax_m2", {"transformers_version": (4, 57)}, "transformers_version"),
        ("nemotron_h", {"transformers_version": (4, 57)}, "transformers_version"),
        ("qwen3_next", {"transformers_version": (4, 56)}, "transformers_version"),
        ("bloom", {"attn_implementation": "flash_attention_2"}, "attn_implementation"),
    ],
)
def test_what_a_class_does_not_have_is_refused(name: str, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        small_run(CONFIGS[name], transformers=TransformersSpec(**fields))


def test_which_way_hybrids_run_is_said() -> None:
    found = {kernels: estimate(small_run(
        CONFIGS["qwen3_next"], transformers=TransformersSpec(transformers_version=(4, 57), mixer_kernels=kernels)
    )).assumptions for kernels in (False, True)}
    assert any("--mixer-kernels" in note for note in found[False])
    assert any("in the kernels of causal_conv1d" in note for note in found[True])


def test_a_class_without_sdpa_is_counted_eager_and_said_so() -> None:
    run = small_run(CONFIGS["gpt_oss"], transformers=TransformersSpec(transformers_version=(4, 57)))
    assert any("no sdpa" in note for note in estimate(run).assumptions)


def test_options_of_another_implementation_are_refused() -> None:
    with pytest.raises(SpecError, match="gradient_checkpointing"):
        RunSpec(model="meta-llama/Llama-3.2-1B", transformers=TransformersSpec(gradient_checkpointing=True))


def test_an_estimate_counts_what_the_loss_makes() -> None:
    """128,256 logits of each of 4096 tokens: log-softmax, its gradient and theirs in fp32 at the peak."""
    run = RunSpec(
        model="meta-llama/Llama-3.2-1B", implementation=ImplementationSpec(transformer_impl="transformers"),
        precision=PrecisionSpec(params_dtype="bf16"),
    )
    found = estimate(run).stages[0]
    assert found.activation_bytes + found.transient_bytes > 12 * 128256 * 4096


@pytest.mark.skipif(find_spec("peft") is None or INSTALLED < (5, 0), reason="needs peft and transformers 5")
def test_adapters_of_joined_experts_are_named_by_what_they_keep() -> None:
    """peft adds them to a copy of the experts' weights, which every layer keeps: not counted, and said."""
    targets = ("gate_proj", "up_proj", "down_proj")
    config = {**CONFIGS["qwen3_moe"], "vocab_size": 64}
    ours, real = both(config, targets=targets, lora_dropout=0.0)
    run = small_run(config, peft=PeftSpec(scheme="lora", dim=16, target_modules=targets))
    (said,) = [feature for feature in unmodelled_features(run) if "target_modules" in str(feature)]
    copies = config["num_experts"] * 3 * config["hidden_size"] * config["moe_intermediate_size"] * 2
    assert f"{copies / 2**20:,.1f} MiB" in said.order
    assert real.retained - ours.retained > copies * config["num_hidden_layers"]
