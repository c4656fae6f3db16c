"""A container without Megatron Bridge: what is missing is derived or refused, never guessed in silence."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory.estimation import estimate
from bridge_memory.readers.config_container import images_of_packs, run_from_config_container, run_of_container
from bridge_memory.releases import Running
from bridge_memory.spec import SpecError
from bridge_memory.spec.unmodelled import Effect, as_feature


def namespace(**changes: Any) -> SimpleNamespace:
    """A small Llama; ``part__field`` changes a field of a part."""

    def silu() -> None: ...

    config = SimpleNamespace(
        model=SimpleNamespace(
            num_layers=4, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8, num_query_groups=8,
            gated_linear_unit=True, activation_func=silu, add_bias_linear=False, normalization="RMSNorm",
            position_embedding_type="rope", seq_length=2048, vocab_size=32000, bf16=True, hidden_dropout=0.0,
            attention_dropout=0.0, share_embeddings_and_output_weights=False, tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2, context_parallel_size=1,
        ),
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=16),
        optimizer=SimpleNamespace(use_distributed_optimizer=True, optimizer="adam"),
        ddp=SimpleNamespace(grad_reduce_in_fp32=True, use_distributed_optimizer=False),
        data_parallel_size=4,
    )  # fmt: skip
    for key, value in changes.items():
        part, _, field = key.partition("__")
        setattr(getattr(config, part) if field else config, field or part, value)
    return config


def test_world_size_follows_from_the_data_parallel_size() -> None:
    run = run_from_config_container(namespace())
    assert (run.parallel.world_size, run.parallel.data_parallel_size) == (16, 4)
    assert run.num_microbatches == 4


def test_a_container_that_was_not_validated_never_has_one_replica_in_silence(monkeypatch: Any) -> None:
    config = namespace()
    del config.data_parallel_size
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SpecError, match="data_parallel_size is not set"):
        run_from_config_container(config)
    monkeypatch.setenv("WORLD_SIZE", "32")
    assert run_from_config_container(config).parallel.data_parallel_size == 8
    assert run_from_config_container(config, world_size=8).parallel.data_parallel_size == 2
    config.world_size = 4
    assert run_from_config_container(config).parallel.data_parallel_size == 1


@pytest.mark.parametrize(
    ("bridge", "core", "te"), [("0.3.1", (0, 16), (2, 12)), ("0.6.2", None, None)], ids=["0.3.1", "0.6.2"]
)
def test_a_release_of_bridge_brings_what_its_wheel_pins(
    bridge: str, core: object, te: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Requires-Dist`` of megatron-bridge 0.3.1: megatron-core<0.17.0, transformer-engine<2.13.0; 0.6.2 pins none."""
    monkeypatch.setitem(sys.modules, "megatron.bridge", SimpleNamespace(__version__=bridge))  # type: ignore[arg-type]
    for package in ("megatron.core", "transformer_engine"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    impl = run_from_config_container(namespace(), world_size=8).implementation
    assert (impl.megatron_core, impl.transformer_engine) == (core, te)


def test_gradients_of_two_bytes_halve_the_gradient_buffer() -> None:
    wide = estimate(run_from_config_container(namespace())).stages[0]
    narrow = estimate(run_from_config_container(namespace(ddp__grad_reduce_in_fp32=False))).stages[0]
    assert wide.gradients_bytes == 2 * narrow.gradients_bytes


def test_mixed_precision_by_name_lies_over_the_model() -> None:
    """fp16_mixed: half-precision parameters whose gradients are reduced in fp16; the container is left alone."""
    config = namespace(mixed_precision="fp16_mixed", model__fp16=False)
    run = run_from_config_container(config)
    assert run.precision.params_dtype == "fp16"
    assert not run.data_parallel.grad_reduce_in_fp32
    assert config.model.bf16 and config.ddp.grad_reduce_in_fp32


@pytest.mark.parametrize(
    ("dataset", "packed"),
    [
        ({}, False),
        ({"packed_sequence_specs": SimpleNamespace(packed_sequence_size=2048)}, True),
        ({"packed_sequence_specs": SimpleNamespace(packed_sequence_size=-1)}, False),
        ({"enable_offline_packing": True, "offline_packing_specs": SimpleNamespace(packed_sequence_size=2048)}, True),
        ({"enable_in_batch_packing": True}, True),
    ],
)
def test_a_dataset_says_whether_sequences_are_packed(dataset: dict[str, Any], packed: bool) -> None:
    run = run_from_config_container(namespace(dataset=SimpleNamespace(seq_length=2048, **dataset)))
    assert run.batch.packed_sequences is packed


def test_a_microbatch_of_packs_has_their_tokens() -> None:
    """Bridge's ``prepare_finetuning_batch`` takes the length of the rows; so do Step-3.7's packs. Images of these: each
    sample has one, of 169 tokens and three others, padded to 192."""
    specs = {"enable_offline_packing": True, "offline_packing_specs": SimpleNamespace(packed_sequence_size=2048)}
    dataset = SimpleNamespace(seq_length=32768, **specs)
    run = run_from_config_container(namespace(model__seq_length=32768, dataset=dataset))
    assert (run.batch.seq_length, run.batch.packed_sequences) == (2048, True)
    assert any("2048 tokens of a pack, not the 32768" in one for one in run.assumptions)
    step = SimpleNamespace(image_token_count=169, max_packing_seqlen=2048, seqlen_divisible_by=64, sample_count=None)
    assert images_of_packs(step) == 10
    assert images_of_packs(SimpleNamespace()) == 0


def test_what_changes_memory_and_is_not_modelled_is_listed_by_name() -> None:
    run = run_from_config_container(
        namespace(model__fp8_output_proj=True, ddp__megatron_fsdp_cuda_graph_mode=True, peft=SimpleNamespace(dim=16))
    )
    listed = " ".join(run.not_modelled)
    for name in ("model.fp8_output_proj", "ddp.megatron_fsdp_cuda_graph_mode", "peft"):
        assert name in listed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__vocab_size": None}, r"model\.vocab_size is not set"),
        ({"train__micro_batch_size": None}, r"train\.micro_batch_size is not set"),
        ({"model__fp16": True}, r"model\.bf16 and model\.fp16 are both True"),
        ({"mixed_precision": "int4_mixed"}, "mixed_precision"),
        ({"optimizer__exp_avg_dtype": "int3"}, r"optimizer\.exp_avg_dtype"),
        ({"dataset": SimpleNamespace(seq_length=4096)}, r"model\.seq_length \(2048\) differs"),
        ({"dist": SimpleNamespace(use_torch_fsdp2=True)}, "use_torch_fsdp2"),
        ({"model": None}, "the container has no model"),
        ({"data_parallel_size": 0}, r"data_parallel_size \(0\)"),
    ],
)
def test_wrong_fields_are_named_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        run_from_config_container(namespace(**changes))
    assert "\n" not in str(error.value)


def test_neither_torch_nor_megatron_is_imported() -> None:
    code = (
        "import sys; import bridge_memory.theoretical_memory_utils, bridge_memory.readers.config_container\n"
        "bad = {'torch', 'megatron', 'transformers', 'rich', 'pydantic'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("fields", "modules"),
    [
        ({}, ()), ({"cuda_graph_modules": "full"}, ()),
        ({"cuda_graph_modules": "attn,moe_router"}, ("attn", "moe_router")),
        ({"cuda_graph_scope": [SimpleNamespace(name="mlp")]}, ("mlp",)), ({"cuda_graph_scope": "attn"}, ("attn",)),
        # As Megatron Bridge's recipes set it: the newer name has its default.
        ({"cuda_graph_scope": ["moe_router"], "cuda_graph_modules": "full"}, ("moe_router",)),
        ({"cuda_graph_scope": ["moe_router"], "cuda_graph_impl": "none"}, ()),
    ],
)  # fmt: skip
def test_the_modules_that_graphs_cover_are_read(fields: dict[str, object], modules: tuple[str, ...]) -> None:
    """Words or members of an enum, under the name of either release."""
    fields = {"cuda_graph_impl": "transformer_engine", **fields}
    config = namespace(**{f"model__{name}": value for name, value in fields.items()})
    assert run_from_config_container(config, world_size=8).implementation.cuda_graph_modules == modules


def test_the_order_of_a_teacher_is_that_of_its_weights_and_logits() -> None:
    """Llama 3.1 8B, without its norms 8.03 B parameters (4 KiB of keys' and values' width count as whole heads: 8.8 B):
    over 2 x 2 ranks 4.1 GiB in bf16; 8192 x 128,256 / 2 fp32 logits are 1.96 GiB."""
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "seq_length": 8192}
    teacher = SimpleNamespace(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, vocab_size=128_256, gated_linear_unit=True, **sizes
    )
    config = namespace(model__teacher=teacher, **{f"model__{name}": value for name, value in sizes.items()})
    run = run_from_config_container(config, world_size=8)
    (found,) = (feature for feature in map(as_feature, run.not_modelled) if feature.startswith("model.teacher"))
    assert found.effect is Effect.UP
    weights = (32 * (4 * 4096**2 + 3 * 4096 * 14336) + 2 * 128_256 * 4096) * 2 / 4
    assert f"{weights / 2**30:.1f} GiB of its weights" in found.order
    assert "2.0 GiB each time" in found.order


@pytest.mark.parametrize(("bridge", "fused"), [((0, 3), False), ((0, 6), True)], ids=["0.3", "0.6"])
def test_bridge_switches_fused_weight_gradients_off_with_megatron_fsdp(bridge: tuple[int, int], fused: bool) -> None:
    """``ConfigContainer.validate`` of 0.3.1 sets the field; that of 0.6.2 leaves it."""
    config = namespace(
        model__gradient_accumulation_fusion=True, model__tensor_model_parallel_size=1,
        model__pipeline_model_parallel_size=1, ddp__use_megatron_fsdp=True,
        ddp__data_parallel_sharding_strategy="optim_grads",
    )  # fmt: skip
    run = run_of_container(config, Running(), world_size=4, bridge=bridge)
    assert run.data_parallel.engine == "megatron_fsdp"
    assert run.implementation.gradient_accumulation_fusion is fused
    plain = namespace(model__gradient_accumulation_fusion=True)
    assert run_of_container(plain, Running(), bridge=bridge).implementation.gradient_accumulation_fusion


@pytest.mark.parametrize(("kind", "fused"), [("rope", True), ("yarn", False), ("mrope", False)])
def test_bridge_fuses_plain_rotary_embeddings_alone(kind: str, fused: bool) -> None:
    """``utils/fusions.py: validate_rope_fusion_compatibility``, of every GPT provider."""
    config = namespace(model__apply_rope_fusion=True, model__position_embedding_type=kind)
    assert run_of_container(config, Running()).fuses_rotation is fused
