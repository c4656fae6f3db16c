"""LoRA adapters: the parameters that Megatron Bridge's own LoRA makes trainable."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge_memory import BatchSpec, ImplementationSpec, ParallelSpec, PeftSpec, RunSpec, SpecError
from bridge_memory.engines.peft import adapter_units, lora_parameters
from bridge_memory.estimation import estimate
from bridge_memory.inventory.layer import layer_block
from bridge_memory.inventory.stack import chunk_units, named_parameters
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of
from bridge_memory.tapes.parameters import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bridge_stubs import require_bridge

TP2, TP4 = (ParallelSpec(world_size=n, tensor_model_parallel_size=n) for n in (2, 4))


def lora(dim: int, *targets: str) -> PeftSpec:
    return PeftSpec(scheme="lora", dim=dim, target_modules=targets or PeftSpec().target_modules)


@pytest.mark.parametrize("targets", [None, ["linear_qkv"], ["*.layers.0.*.linear_fc2", "linear_proj"]])
def test_the_adapters_are_those_that_bridge_adds_to_a_real_model(
    targets: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core's GPTModel on a CPU, transformed by Bridge's LoRA: every trainable name and shape."""
    require_bridge()
    import torch
    import torch.nn.functional as F
    from megatron.bridge.peft.lora import LoRA
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig, transformer_block

    started = not torch.distributed.is_initialized()
    if started:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    offload = contextlib.nullcontext()
    monkeypatch.setattr(transformer_block, "get_cpu_offload_context", lambda *a, **k: (offload, None))
    config = TransformerConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, num_query_groups=2,
        use_cpu_initialization=True, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=512, max_sequence_length=64,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    params = [Parameter(name, tuple(p.shape)) for name, p in model.named_parameters()]
    kwargs: dict[str, Any] = {} if targets is None else {"target_modules": targets}
    ours = lora_parameters(params, peft=lora(8, *(targets or ())))
    LoRA(dim=8, **kwargs)(model, training=True)
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    if started:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    assert theirs
    assert {p.name: p.shape for p in ours} == theirs


def test_tensor_parallelism_splits_the_rank_or_the_features() -> None:
    """h 4096, q+k+v 6144, f 14336 gated, TP 2, rank 16: by hand, elements on one rank.

    qkv: 8 x 4096 + 3072 x 16; proj: 16 x 2048 + 2048 x 16; fc1: 8 x 4096 + 14336 x 16; fc2: 16 x 7168 + 2048 x 16.
    """
    shapes = {"linear_qkv": (3072, 4096), "linear_proj": (4096, 2048), "linear_fc1": (14336, 4096),
              "linear_fc2": (4096, 7168)}  # fmt: skip
    params = [Parameter(f"decoder.layers.0.m.{name}.weight", shape, sharded=True) for name, shape in shapes.items()]
    counts = [p.numel for p in lora_parameters(params, peft=lora(16), parallel=TP2)]
    assert counts == [8 * 4096, 3072 * 16, 16 * 2048, 2048 * 16, 8 * 4096, 14336 * 16, 16 * 7168, 2048 * 16]


def test_a_grouped_linear_has_one_adapter_for_all_its_experts() -> None:
    params = [Parameter(f"mlp.experts.linear_fc1.weight{e}", (1024, 512), expert=True) for e in range(8)]
    assert [p.shape for p in lora_parameters(params, peft=lora(4))] == [(4, 512), (1024, 4)]


@pytest.mark.parametrize("target", [*PeftSpec().target_modules, "linear_q_down_proj", "linear_kv_up_proj", "in_proj",
                                    "out_proj", "router", "eh_proj", "output_layer"])  # fmt: skip
@pytest.mark.parametrize(
    "model",
    ["meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3-30B-A3B",
     "nvidia/Nemotron-H-56B-Base-8K"],
)  # fmt: skip
@pytest.mark.parametrize(("tp", "etp"), [(4, 1), (1, 4), (4, 4)])
def test_a_rank_that_does_not_divide_is_refused_when_the_run_is_built(
    model: str, target: str, tp: int, etp: int
) -> None:
    """Where an adapter of these weights divides its rank of 6 by 4, beside a column-parallel linear; not beside a
    row-parallel one. Where there is no such linear nothing would train."""
    run = RunSpec(
        model=model,
        parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=tp, expert_tensor_parallel_size=etp),
    )
    (shapes,) = layout(run.model, run.parallel).shapes(run.model)
    weights = list(named_parameters(chunk_units(run.model, shapes[0], context_of(run))))
    beside = [p for p in weights if p.name.rpartition(".weight")[0].rpartition(".")[2] == target]
    row_parallel = target in ("linear_proj", "linear_fc2", "out_proj")
    divided = not row_parallel and any((etp if p.expert else tp) == 4 for p in beside)
    peft = PeftSpec(scheme="lora", dim=6, target_modules=(target,))
    if divided:
        with pytest.raises(SpecError, match=r"peft.dim \(6\) is not divisible by \w*tensor_\w*parallel_size \(4\)"):
            run.with_(peft=peft)
    elif not beside:
        with pytest.raises(SpecError, match=rf"peft.target_modules \({target}\) names no linear of this model"):
            run.with_(peft=peft)
    else:
        (stage,) = estimate(run.with_(peft=peft)).stages
        assert any(c.adapters for c in stage.components)


def test_features_that_an_adapter_divides_and_its_linear_does_not() -> None:
    """Every rank holds linear_kv_down_proj of 512 + 64 features whole, and 1/128 of its adapter's output."""
    parallel = ParallelSpec(world_size=128, tensor_model_parallel_size=128, expert_tensor_parallel_size=1)
    peft = PeftSpec(scheme="lora", dim=128, target_modules=("linear_kv_down_proj",))
    with pytest.raises(SpecError, match=r"qk_pos_emb_head_dim \(576\) is not divisible by tensor_model_parallel"):
        RunSpec(model="deepseek-ai/DeepSeek-V3", parallel=parallel, peft=peft)


def test_what_a_full_name_means_is_known_once_layers_have_names() -> None:
    """``*.layers.0.*`` may be any kind of layer."""
    with pytest.raises(SpecError, match=r"peft.dim \(6\) is not divisible by tensor_model_parallel_size \(4\)"):
        qkv = Parameter("x.linear_qkv.weight", (8, 8))
        lora_parameters([qkv], peft=lora(6, "*linear_qkv"), parallel=TP4)


@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V3", "openai-community/gpt2"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("targets", [PeftSpec().target_modules, ("linear_fc1", "linear_kv_up_proj", "eh_proj")])
def test_adapters_by_kind_are_those_beside_every_linear_by_itself(
    model: str, grouped: bool, targets: tuple[str, ...]
) -> None:
    run = RunSpec(
        model=model, peft=PeftSpec(scheme="lora", dim=8, target_modules=targets),
        parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2, expert_tensor_parallel_size=1),
        batch=BatchSpec(seq_length=1024),
        implementation=ImplementationSpec(moe_grouped_gemm=grouped),
    )
    (shapes,) = layout(run.model, run.parallel).shapes(run.model)
    units = chunk_units(run.model, shapes[0], context_of(run))
    one_by_one = lora_parameters(list(named_parameters(units)), peft=run.peft, parallel=run.parallel)
    by_kind = [p for unit in adapter_units(run, units) for _ in range(unit.times) for p in unit.parameters.expanded()]
    assert one_by_one
    assert [(p.shape, p.expert, p.sharded) for p in by_kind] == [(p.shape, p.expert, p.sharded) for p in one_by_one]


def test_adapters_are_counted_by_kind_of_layer() -> None:
    """256 experts a layer, one after the other: 58 layers have three lists of weights with adapters, not 14,848."""
    run = RunSpec(
        model="deepseek-ai/DeepSeek-V3", peft=PeftSpec(scheme="lora", dim=8),
        implementation=ImplementationSpec(moe_grouped_gemm=False),
    )
    (shapes,) = layout(run.model, run.parallel).shapes(run.model)
    units = adapter_units(run, chunk_units(run.model, shapes[0], context_of(run)))
    assert sum(len(unit.parameters.rows) for unit in units) < 30


def test_a_routers_adapter_is_divided_over_tensor_parallel_ranks() -> None:
    """128 experts, h 2048, TP 2, rank 8: linear_in 4 x 2048, linear_out 64 x 8 (``base_linear_is_parallel`` False)."""
    router = Parameter("decoder.layers.0.mlp.router.weight", (128, 2048))
    assert [p.shape for p in lora_parameters([router], peft=lora(8, "router"), parallel=TP2)] == [(4, 2048), (64, 8)]


LLAMA = RunSpec(model="meta-llama/Llama-3.1-8B", peft=lora(16))


def kept(run: RunSpec, *, reached: bool = True) -> int:
    return layer_block(run.model.layers[0], context_of(run), reached=reached).cost.retained


def test_what_a_layer_with_adapters_keeps_by_hand() -> None:
    """s = 4096, h = 4096, 32 heads and 8 groups of 128, f = 14336, rank 16, bf16.

    Adapters: their inputs 2 * 2 s h (norm outputs), 2 s h (attention's output), 2 s f and 4 * 2 s r. The base: the
    residual stream 2 * 2 s h, 4 s a reciprocal, query 2 s h, key and value, log-sum-exp, fc1's output.
    """
    s, h, f, r = 4096, 4096, 14336, 16
    base = 2 * 2 * s * h + 2 * 4 * s + 2 * s * h + 4 * s * 1024 + 4 * 32 * s + 4 * s * f
    assert kept(LLAMA) == base + 2 * 2 * s * h + 2 * s * h + 2 * s * f + 4 * 2 * s * r
    # linear_qkv alone: attention keeps its own output, and no one the other inputs of linears.
    alone = LLAMA.with_(peft=lora(16, "linear_qkv"))
    assert kept(alone) == base + 2 * s * h + 2 * s * h + 2 * s * r
    # Beside a first adapter at linear_fc2 nothing is kept but what is behind its input.
    last = LLAMA.with_(peft=lora(16, "linear_fc2"))
    assert kept(last, reached=False) == 2 * s * f + 2 * s * r


def test_targets_that_name_a_layer_or_nothing_are_said() -> None:
    named = estimate(LLAMA.with_(peft=lora(16, "*.layers.0.*.linear_qkv")))
    assert any("number of a layer" in str(feature) for feature in named.not_modelled)
    nothing = estimate(LLAMA.with_(peft=lora(16, "linear_qkv", "linear_foo")))
    assert any("linear_foo" in sentence for sentence in nothing.assumptions)
    assert not any("peft" in str(feature) for feature in estimate(LLAMA).not_modelled)


def test_packed_sequences_need_transformer_engine() -> None:
    with pytest.raises(SpecError, match="packed_sequences"):
        RunSpec(
            model="meta-llama/Llama-3.1-8B", batch=BatchSpec(packed_sequences=True),
            implementation=ImplementationSpec(transformer_impl="local"),
        )


def test_values_of_packed_latent_attention_by_hand() -> None:
    """DeepSeek-V3, s 4096, 128 heads of 128 + 64, values of 128: from megatron-core 0.18 on values and outputs of
    192 are kept, and the output of 128 for linear_proj, where there were 128 and one output."""
    s, a = 4096, 128
    model = "deepseek-ai/DeepSeek-V3"
    new = ImplementationSpec(megatron_core=(0, 19))
    plain = RunSpec(model=model, implementation=new)
    packed = plain.with_(batch=BatchSpec(packed_sequences=True))
    assert kept(packed) - kept(plain) == 2 * s * a * (64 + 192)
    old = ImplementationSpec(megatron_core=(0, 17))
    assert kept(packed.with_(implementation=old)) == kept(plain.with_(implementation=old))
