"""The container reader against the installed Megatron Bridge, 0.3.1 or 0.6.2: its recipes, its own update of them, its
precisions."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.estimation import estimate
from bridge_memory.inventory.counts import model_parameters
from bridge_memory.readers.config_container import mixed_precision_fields, run_from_config_container
from bridge_memory.releases import release_in
from bridge_memory.spec import SpecError
from bridge_memory.theoretical_memory_utils import estimate_training_memory_by_stage

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from bridge_stubs import require_bridge  # noqa: E402


@pytest.fixture(scope="module")
def recipes() -> Iterator[Any]:
    require_bridge()
    from bridge_recipes import bridge_on_cpu

    with bridge_on_cpu() as module:
        yield module


def container(recipes: Any, name: str) -> Any:
    from bridge_recipes import build

    return build(getattr(recipes, f"{name}_pretrain_config"))


#: recipe -> Hugging Face config whose parameters were counted by transformers.
COUNTED = {
    "llama3_8b": "meta-llama/Meta-Llama-3-8B",
    "llama3_70b": "meta-llama/Meta-Llama-3-70B",
    "qwen25_7b": "Qwen/Qwen2.5-7B",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3_next_80b_a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    # Not deepseek_v2_lite: Bridge 0.3.1 drops the config's null q_lora_rank and trains with megatron-core's 512.
    "deepseek_v2": "deepseek-ai/DeepSeek-V2",
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
    "moonlight_16b": "moonshotai/Moonlight-16B-A3B",
    "gpt_oss_20b": "openai/gpt-oss-20b",
    "glm45_air_106b": "zai-org/GLM-4.5-Air",
    "gemma2_9b": "google/gemma-2-9b",
    "olmoe_7b": "allenai/OLMoE-1B-7B-0924",
}


@pytest.mark.parametrize("name", sorted(COUNTED))
def test_a_recipes_parameters_are_those_of_its_hugging_face_model(recipes: Any, name: str) -> None:
    """Bridge's providers hold the model: what is read from them has transformers' own count."""
    counts = json.loads((ROOT / "tests" / "data" / "hf_parameter_counts.json").read_text())
    config = container(recipes, name)
    config.model.pipeline_model_parallel_size = 1
    config.model.pipeline_model_parallel_layout = None
    config.model.virtual_pipeline_model_parallel_size = None
    config.model.expert_model_parallel_size = 1
    config.model.tensor_model_parallel_size = 1
    config.model.moe_token_dispatcher_type = "alltoall"
    config.comm_overlap = None
    model = run_from_config_container(config, world_size=16).model
    expected = counts[COUNTED[name]]["parameters"]
    assert model_parameters(model)[0] == expected


#: Recipes of every family, with everything that a container can hold: VPP, layouts, MLA, hybrid, experts.
FAMILIES = (
    "llama3_8b llama3_70b llama31_405b llama3_8b_low_precision qwen3_30b_a3b qwen3_235b_a22b qwen3_next_80b_a3b "
    "deepseek_v2_lite deepseek_v3 moonlight_16b nemotronh_8b nemotronh_56b gpt_oss_120b gemma2_9b gemma3_1b olmoe_7b "
    "qwen25_500m"
)


@pytest.mark.parametrize("name", FAMILIES.split())
def test_an_unvalidated_container_reads_as_bridge_would_update_it(
    recipes: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``runtime_config_update`` is Bridge's own: precision, overlap, synchronised optimizer, megatron-core's
    ``__post_init__``. Reading before and after it must give one run."""
    from bridge_recipes import smallest_world
    from megatron.bridge.training import config as bridge_config

    config = container(recipes, name)
    world = 2 * smallest_world(config)
    batch = config.train.micro_batch_size * world
    config.train.global_batch_size = batch
    if config.model.vocab_size is None:  # pretrain takes it from the tokenizer, which it builds later
        config.model.vocab_size, config.model.should_pad_vocab = config.tokenizer.vocab_size, True
    monkeypatch.setenv("WORLD_SIZE", str(world))
    before = run_from_config_container(copy.deepcopy(config), world_size=world)
    monkeypatch.setattr(bridge_config, "get_world_size_safe", lambda: world)
    monkeypatch.setattr(bridge_config, "validate_flex_dispatcher_backend", lambda model: None)
    bridge_config.runtime_config_update(config)
    assert config.data_parallel_size * before.parallel.tp * before.parallel.pp * before.parallel.cp == world
    after = run_from_config_container(config)
    for group in dataclasses.fields(before):
        assert getattr(after, group.name) == getattr(before, group.name), group.name


def test_every_recipe_reads_before_bridge_validates_it_as_after(recipes: Any) -> None:
    """All that Bridge accepts; its own classes finalize them, on the world that the recipe is for."""
    from bridge_recipes import build, recipe_names, refusal_of_bridge, world_of

    read, different = 0, []
    # Others are the same recipes by a shorter name.
    for name in (n for n in recipe_names(recipes) if "gpu_" in n or not hasattr(recipes, "wan_1_3b_sft_config")):
        try:
            config, validated = (build(getattr(recipes, name)) for _ in range(2))
        except Exception:
            continue
        world = world_of(config, [name])
        for each in (config, validated):  # a tokenizer that is not here would say
            each.model.vocab_size = each.model.vocab_size or 32000
        if refusal_of_bridge(validated, world) is not None:
            continue
        before, after = (run_from_config_container(each, world_size=world) for each in (config, validated))
        read += 1
        different += [
            (name, group.name)
            for group in dataclasses.fields(before)
            if group.compare and getattr(before, group.name) != getattr(after, group.name)
        ]
    assert not different
    assert read > 100


def test_every_precision_recipe_by_name_is_the_one_bridge_makes(recipes: Any) -> None:
    from megatron.bridge.training.mixed_precision import MIXED_PRECISION_RECIPES, get_mixed_precision_config

    assert len(MIXED_PRECISION_RECIPES) > 20
    for name in MIXED_PRECISION_RECIPES:
        try:
            theirs = get_mixed_precision_config(name)
        except ValueError as error:  # nvfp4 asks for the installed Transformer Engine
            assert "fp4" in str(error)
            continue
        theirs.finalize()
        made = mixed_precision_fields(theirs)
        named = mixed_precision_fields(name)
        apart = set() if made["fp8"] else {"num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"}
        if not hasattr(theirs, "fp4_param"):  # A name is read as today's Bridge has it; 0.3 had no such field.
            apart |= {"fp4_param", "fp4_param_gather"}
        for key in set(named) - apart:
            theirs_too = made[key]
            if key == "params_dtype":
                theirs_too = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}[str(theirs_too)]
            assert named[key] == theirs_too, (name, key)


@pytest.mark.parametrize(("fp8_recipe", "expert_bytes", "gib"), [("delayed", 10, 8.51), ("tensorwise", 12, 9.85)])
def test_nvidias_deepseek_v3_recipe_by_its_optimizers_precision(
    recipes: Any, fp8_recipe: str, expert_bytes: int, gib: float
) -> None:
    """TP2 PP16 EP64 on 1024 GPUs, bf16 gradients and moments: a stage of 4 layers has 4 x 4 experts of 44.04 M
    parameters, not sharded, and 4 x 125 M others, sharded over 32 ranks: MLA's down projections whole (15.1 M), the
    rest of attention and the shared expert over TP (86.0 M + 22.0 M), the router (1.8 M).

    With parameter remainders an expert costs 2 + 2 + 2 + 2 + 2 bytes (6.56 GiB). But Bridge 0.3.1 gives the optimizer
    its mixed-precision default fp8_recipe "tensorwise" even in bf16, and megatron-core 0.16 then keeps main parameters
    of 4 bytes (``OptimizerConfig.__post_init__``): 12 bytes an expert's parameter.
    """
    config = container(recipes, "deepseek_v3")
    assert config.mixed_precision.fp8_recipe == "tensorwise"
    config.mixed_precision.fp8_recipe = fp8_recipe
    answer = estimate(run_from_config_container(config, world_size=1024))
    states = [s.weights_bytes + s.gradients_bytes + s.optimizer_bytes for s in answer.stages]
    others = 500e6 * (4 + (expert_bytes - 4) / 32)
    assert max(states) == pytest.approx(16 * 3 * 7168 * 2048 * expert_bytes + others, rel=0.001)
    assert max(states) / 2**30 == pytest.approx(gib, abs=0.02)
    assert {i for i, s in enumerate(states) if s == max(states)} == set(range(1, 15))


def test_a_lora_container_trains_only_its_adapters(recipes: Any) -> None:
    """Llama-3-8B with LoRA: adapters of rank r beside q, k, v (4096 -> 6144), proj, fc1 (4096 -> 28672) and fc2, as
    the recipe targets them: 2 bytes of weight, 4 of gradient or 2, 12 of optimizer over the shard."""
    config = recipes.llama3_8b_peft_config(peft_scheme="lora")
    run = run_from_config_container(config, world_size=8)
    d, peft = run.data_parallel, run.peft
    sizes = {"linear_qkv": 4096 + 6144, "linear_proj": 8192, "linear_fc1": 4096 + 28672, "linear_fc2": 14336 + 4096}
    adapters = 32 * peft.dim * sum(sizes[name] for name in peft.target_modules)
    stage = estimate(run).stages[0]
    lora = {c.name: c.bytes for c in stage.components if c.name.startswith("LoRA")}
    assert run.parallel.tp == 1 and peft.dim == config.peft.dim > 0
    assert lora["LoRA weights"] == pytest.approx(2 * adapters, rel=0.001)
    assert stage.gradients_bytes == lora["LoRA gradients"] == pytest.approx(
        (4 if d.grad_reduce_in_fp32 else 2) * adapters, rel=0.001
    )
    frozen = sum(c.bytes for c in stage.components if c.name == "weights")
    assert frozen == pytest.approx(2 * model_parameters(run.model)[0], rel=0.001)
    assert stage.optimizer_bytes == pytest.approx(12 * adapters / (8 if d.use_distributed_optimizer else 1), rel=0.001)


def test_uneven_layers_without_a_split_are_refused_by_name(recipes: Any) -> None:
    """GLM-4.5 has 92 layers; the recipe's 8 stages cannot hold them evenly, as Megatron would say at launch."""
    config = container(recipes, "glm45_355b")
    config.world_size = 512
    with pytest.raises(SpecError, match=r"num_layers \(92\) is not divisible by pipeline_model_parallel_size \(8\)"):
        estimate_training_memory_by_stage(config)


def test_a_t5_provider_is_refused(recipes: Any) -> None:
    from megatron.bridge.models import T5ModelProvider

    config = container(recipes, "llama3_8b")
    config.model = T5ModelProvider(num_layers=2, hidden_size=64, num_attention_heads=4)
    with pytest.raises(SpecError, match="T5ModelProvider"):
        run_from_config_container(config, world_size=8)


def test_layers_of_different_sizes_are_those_of_the_hugging_face_model(recipes: Any) -> None:
    """Nemotron Super: each layer's own groups and widths come out of a JSON text only when the provider finalizes."""
    from megatron.bridge.models.llama_nemotron import llama_nemotron_provider as providers

    name = "nvidia/Llama-3_3-Nemotron-Super-49B-v1"
    config = container(recipes, "llama3_70b")
    sizes = {"seq_length": 8192, "vocab_size": 128256}
    named = getattr(providers, "Llama33NemotronSuper49BProvider", None)
    if named is None:  # 0.6 has one class, which takes what the others held
        like = config.model
        sizes |= {
            key: getattr(like, key)
            for key in (
                "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
                "ffn_hidden_size", "normalization", "gated_linear_unit", "activation_func", "add_bias_linear",
                "position_embedding_type", "share_embeddings_and_output_weights", "hidden_dropout",
                "attention_dropout",
            )
        }  # fmt: skip
        sizes |= {"transformer_layer_spec": providers.heterogeneous_layer_spec, "heterogeneous_block_specs": True}
        named = providers.LlamaNemotronHeterogeneousProvider
    config.model = named(**sizes)
    with pytest.raises(SpecError, match="per_block_parameters is not set"):
        run_from_config_container(config, world_size=8)
    preset = ROOT / "bridge_memory" / "readers" / "presets" / f"{name.replace('/', '__')}.json"
    config.model.heterogeneous_layers_config_encoded_json = preset.read_text()
    counts = json.loads((ROOT / "tests" / "data" / "hf_parameter_counts.json").read_text())
    assert model_parameters(run_from_config_container(config, world_size=8).model)[0] == counts[name]["parameters"]


#: A recipe of each provider, layer spec and kind of layers of Bridge 0.6.
BUILT = """
llama3_8b_pretrain deepseek_v3_pretrain exaone45_vl_33b_sft exaone4_1p2b_sft exaone_moe_236b_a23b_sft
gemma2_2b_pretrain gemma3_1b_pretrain gemma3_vl_12b_sft gemma4_e4b_pretrain gemma4_vl_26b_sft
glm45_air_106b_pretrain glm52_pretrain_192gpu_gb200_bf16
glm_45v_sft deepseek_v2_lite_pretrain gpt_oss_20b_pretrain minimax_m3_pretrain nemotron_3_super_pretrain
nemotron_3_nano_gb200_pretrain nemotronh_8b_pretrain olmoe_7b_pretrain qwen25_vl_7b_sft qwen2_audio_7b_sft
qwen35_text_9b_pretrain_8gpu_gb200_bf16 qwen35_vl_35b_a3b_sft qwen35_vl_9b_sft qwen3_next_80b_a3b_pretrain
qwen3_omni_30b_a3b_sft qwen3_vl_30b_a3b_sft qwen3_vl_8b_sft step35_196b_a11b_pretrain step37_sft_flickr8k
kimi_k25_vl_sft nemotron_omni_cord_v2_sft nemotron_nano_v2_vl_12b_sft
"""


def test_the_parameters_are_those_of_the_model_that_the_provider_builds(recipes: Any) -> None:
    """megatron-core builds the recipe's text model, all its layers, on the meta device."""
    names = [f"{name}_config" for name in BUILT.split() if hasattr(recipes, f"{name}_config")]
    if len(names) < len(BUILT.split()):
        pytest.skip("recipes of 0.6")
    script = ROOT / "tests" / "readers" / "bridge_parameters.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *names], capture_output=True, text=True, check=True
    )
    answers = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("=")]
    assert [answer["recipe"] for answer in answers] == names
    for answer in answers:
        assert "counts" in answer, answer
        ours, theirs = answer["counts"]
        assert ours == theirs > 10**8, answer


#: What a refusal of a recipe says: what Megatron itself refuses, then what is not known here.
REFUSALS = ("num_layers is 0", "model.vocab_size is not set")
#: Release -> recipes that it ships, and those that must be estimated at least.
SHIPPED = {(0, 3): (152, 125), (0, 6): (561, 547)}


def test_every_recipe_gets_its_numbers_or_a_refusal_that_names_what_is_not_known(recipes: Any) -> None:
    """All recipes, as scripts/bridge_recipes.py writes them to references/generated/bridge_recipes.md."""
    import megatron.bridge
    from bridge_recipes import grouped, recipe_names

    release = release_in(megatron.bridge.__version__)
    names = recipe_names(recipes)
    shipped, least = SHIPPED[release]
    assert len(names) == shipped
    estimated = 0
    for aliases, kind, row in grouped(recipes, names):
        *_, inventory, remarks = (cell.strip() for cell in row.strip("|").split("|"))
        if kind in ("no config", "not built"):
            continue
        # What this project refuses, Megatron refuses too, or it is no language model, or the tokenizer is not here.
        assert kind != "refused" or "model.vocab_size is not set" in remarks, (aliases, remarks)
        if inventory == "refused":
            assert any(re.search(reason, remarks) for reason in REFUSALS), (aliases, remarks)
        else:
            assert min(map(float, inventory.split())) > 0.5, aliases
            estimated += len(aliases)
    assert estimated >= least


def test_experts_are_outside_of_tensor_parallelism_from_0_6_on(recipes: Any) -> None:
    """Bridge 0.6 fills an unset expert tensor parallel size with 1 where experts are divided, megatron-core with TP."""
    import megatron.bridge

    config = container(recipes, "qwen3_30b_a3b")
    m = config.model
    m.tensor_model_parallel_size, m.expert_model_parallel_size, m.expert_tensor_parallel_size = 4, 8, None
    m.pipeline_model_parallel_size, m.virtual_pipeline_model_parallel_size = 1, None
    m.sequence_parallel = True
    run = run_from_config_container(config, world_size=32)
    assert run.parallel.etp == (1 if release_in(megatron.bridge.__version__) >= (0, 6) else 4)


def test_the_containers_environment_is_read_where_the_process_names_no_other(
    recipes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = container(recipes, "llama3_8b")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    object.__setattr__(config, "env_vars", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert run_from_config_container(config, world_size=8).implementation.expandable_segments
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert not run_from_config_container(config, world_size=8).implementation.expandable_segments


def test_a_frozen_language_model_beside_steps_projector_has_weights_alone(recipes: Any) -> None:
    """Step-3.7's smoke recipe trains the projector. The encoder has the parameters of Bridge's own module."""
    stepfun = pytest.importorskip("megatron.bridge.models.stepfun.modelling_step37.vision_model")
    import torch
    from bridge_recipes import build

    config = build(recipes.step37_sft_4gpu_h100_bf16_flickr8k_smoke_config)
    config.world_size = 4
    run = run_from_config_container(config)
    (encoder,) = run.model.encoders
    with torch.device("meta"):
        built = stepfun.Step37VisionModel(config.model.vision_config)
        projector = torch.nn.Linear(4 * config.model.vision_config.width, config.model.hidden_size, bias=False)
    of_projector = sum(p.numel() for p in projector.parameters())
    assert encoder.projector == of_projector
    assert encoder.parameters == sum(p.numel() for p in built.parameters()) + of_projector
    modules = {name.split(".")[0] for name, _ in built.named_parameters()}
    frozen = {name for name in modules if name.startswith(encoder.frozen)}
    assert (run.peft.scheme, frozen) == ("frozen", modules)
    assert run.batch.images_per_sample == 8  # those of the dataset, of the 10 that a pack of 2048 has room for
    found = estimate(run)
    trained = [c.bytes for stage in found.stages for c in stage.components if c.name.endswith("gradients")]
    assert sum(trained) == pytest.approx(4 * of_projector, rel=0.01)


def test_the_encoder_of_a_vision_language_recipe_is_counted(recipes: Any) -> None:
    """Qwen2.5-VL's tower is transformers' own module, whole on each rank. Frozen, its weights stay and nothing else."""
    name = "qwen25_vl_7b_sft_config"
    if not hasattr(recipes, name):
        pytest.skip("a recipe of 0.6")
    from bridge_recipes import build

    config = build(getattr(recipes, name))
    run = run_from_config_container(config, world_size=8)
    (encoder,) = run.model.encoders
    assert encoder.sharded == 0
    assert not [feature for feature in run.not_modelled if feature.startswith("model.vision_config")]
    without = dataclasses.replace(run, model=dataclasses.replace(run.model, encoders=()))
    more = estimate(run).stages[0].parameters - estimate(without).stages[0].parameters
    assert more == encoder.parameters
    config.model.freeze_vision_model = True
    frozen = run_from_config_container(config, world_size=8)
    (stage,) = estimate(frozen).stages
    assert stage.parameters == estimate(run).stages[0].parameters
    size = frozen.model.encoders[0].structure
    assert size is not None
    merged = 4 * size.hidden_size  # four patches joined
    trains = merged * merged + merged + merged * size.out_size + size.out_size + size.hidden_size
    of = {c.name: c.bytes for c in stage.components}
    before = {c.name: c.bytes for c in estimate(without).stages[0].components}
    assert of["gradients"] - before["gradients"] == pytest.approx(4 * trains, rel=1e-3)
    assert of["weights"] - before["weights"] == pytest.approx(2 * encoder.parameters, rel=1e-3)


@pytest.mark.parametrize(("name", "world_size"), [("llama3_8b", 64), ("qwen3_30b_a3b", 16), ("deepseek_v3", 1024)])
def test_the_yaml_that_bridge_writes_is_the_container(recipes: Any, tmp_path: Path, name: str, world_size: int) -> None:
    """``ConfigContainer.to_yaml`` but for its file system; the same run, read without Bridge's classes."""
    import yaml
    from megatron.bridge.utils.yaml_utils import safe_yaml_representers

    from bridge_memory.readers.container_file import container_from_file

    config = container(recipes, name)
    path = tmp_path / "run_config.yaml"
    with safe_yaml_representers():
        path.write_text(yaml.safe_dump(config.to_dict()))
    theirs = run_from_config_container(config, world_size=world_size)
    ours = run_from_config_container(container_from_file(path), world_size=world_size)
    assert estimate(ours).stages == estimate(theirs).stages
    assert ours.not_modelled == theirs.not_modelled
