"""Every rank's parameters, name by name and shape by shape, are those that megatron-core itself builds.

megatron-core builds the rank's real model chunks on the meta device in a fake world of the job's full size
(see ``bridge_memory.rehearsal``); the inventory must list the same names with the same local shapes, no more,
no less.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from parameters_of import stage_parameters

from bridge_memory.readers import resolve_model
from bridge_memory.rehearsal.model import build_chunks, parameter_shapes
from bridge_memory.rehearsal.patches import building
from bridge_memory.rehearsal.te_shapes import parameter_shapes_with_te
from bridge_memory.rehearsal.world import fake_world, installed_release
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    GatedDeltaNetSpec,
    ImplementationSpec,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    RunSpec,
)
from bridge_memory.spec.ranks import rank_of_stage

HERE = installed_release()
LOCAL = ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False, megatron_core=HERE)

DENSE = {
    "gpt2 (learned positions, biases, tied)": "openai-community/gpt2",
    "GPT-3 175B": "openai/GPT-3-175B",
    "Llama 2 7B": "meta-llama/Llama-2-7b-hf",
    "Llama 3 8B": "meta-llama/Meta-Llama-3-8B",
    "Llama 3.2 1B (tied)": "meta-llama/Llama-3.2-1B",
    "Qwen2 7B (QKV bias)": "Qwen/Qwen2-7B",
    "Qwen3 8B (q/k norm)": "Qwen/Qwen3-8B",
    "Mistral 7B": "mistralai/Mistral-7B-v0.1",
    "Llama 3.2 3B (tied)": "meta-llama/Llama-3.2-3B",
    "Llama 3 70B": "meta-llama/Meta-Llama-3-70B",
    "Qwen3 32B": "Qwen/Qwen3-32B",
}
EXPERTS = {
    "Mixtral 8x7B": "mistralai/Mixtral-8x7B-v0.1",
    "Qwen3 30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen1.5 MoE (shared-expert gate)": "Qwen/Qwen1.5-MoE-A2.7B",
    "gpt-oss 20B (sinks, biases)": "openai/gpt-oss-20b",
    "GLM-4.5 Air (MTP)": "zai-org/GLM-4.5-Air",
    "DeepSeek-V2-Lite (MLA, no q_lora_rank)": "deepseek-ai/DeepSeek-V2-Lite",
    "DeepSeek-V3 (MLA, q_lora_rank, MTP)": "deepseek-ai/DeepSeek-V3",
    "Moonlight 16B": "moonshotai/Moonlight-16B-A3B",
    "Qwen3-Next (gated delta net, MTP)": "Qwen/Qwen3-Next-80B-A3B-Instruct",
}
HYBRID = {
    "Nemotron-H 56B": "nvidia/Nemotron-H-56B-Base-8K",
    "Nemotron-3 Nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
}


def layouts(model: ModelSpec, *, te: bool) -> dict[str, ParallelSpec]:
    """Eight kinds of layout or more for a GPT model: even, uneven, interleaved, by string, with experts spread; three
    for a hybrid, whose stack takes no layout string.
    """
    n = model.num_layers
    moe = next((x.ffn for x in model.layers if isinstance(x.ffn, MoESpec)), None)
    biased_experts = moe is not None and moe.add_bias
    etp = 1 if biased_experts else None
    ep = 1 if moe is None else next(e for e in (16, 10, 8, 6, 5, 4, 2) if moe.num_experts % e == 0)
    experts = {"expert_model_parallel_size": ep}
    alone = {**experts, "expert_tensor_parallel_size": 1}
    # The gated delta net has no context parallelism yet, sinks and sliding windows have none of the ring kind.
    without = any(
        isinstance(x.mixer, GatedDeltaNetSpec)
        or (isinstance(x.mixer, AttentionSpec) and (x.mixer.learnable_softmax_sink or x.mixer.window_size))
        for x in model.layers
    )
    cp = 2 if te and not without else 1  # megatron-core's own attention has none at all
    # A gate over attention's output has no replicated groups before megatron-core 0.17.
    gates = [x.mixer.num_query_groups for x in model.layers
             if isinstance(x.mixer, AttentionSpec) and x.mixer.attention_output_gate]  # fmt: skip
    four = min(4, *gates) if gates else 4
    pp = next((p for p in (8, 7, 6, 5, 4, 3, 2) if n % p == 0), 1)
    # (tp, stages, more)
    found: dict[str, tuple[int, int, dict[str, Any]]] = {
        "even stages": (2, pp, {**experts, "expert_tensor_parallel_size": etp}),
        "even stages, tp 1": (1, pp, {**experts, "context_parallel_size": cp}),
        "uneven ends": (
            2, 4,
            {
                **alone, "num_layers_in_first_pipeline_stage": 2 + (n - 4) % 2,
                "num_layers_in_last_pipeline_stage": 2,
            },
        ),
    }  # fmt: skip
    if not model.hybrid:
        mtp, q, r = "m" * model.mtp_num_layers, n // 4, (n - 3) // 6
        found |= {
            "embedding and loss alone": (
                four if etp is None else 2, 6,
                {**alone, "pipeline_model_parallel_layout": f"E|t*{q}|t*{q}|t*{q}|t*{n - 3 * q}|{mtp}L"},
            ),
            "layout string with virtual stages": (
                2, 4,
                {
                    **alone, "virtual_pipeline_model_parallel_size": 2,
                    "pipeline_model_parallel_layout": f"Ett|{f't*{r}|' * 5}t*{n - 3 - 5 * r}|t{mtp}L",
                },
            ),
            "even stages, experts over tp and ep": (four if etp is None else 1, pp, {
                "expert_model_parallel_size": min(ep, 4) if ep % 4 == 0 else ep,
                "expert_tensor_parallel_size": 2 if moe is not None and etp is None else 1,
            }),
            "a first stage of its own": (1, 4, {**alone, "num_layers_in_first_pipeline_stage": 3 + n % 3}),
            "a last stage of its own": (2, 3, {**alone, "num_layers_in_last_pipeline_stage": 2 + n % 2}),
        }  # fmt: skip
        if n % 4 == 0:
            found["even stages, interleaved"] = (
                2, 2, {**alone, "virtual_pipeline_model_parallel_size": 2}
            )  # fmt: skip
        if (n + 2) % 4 == 0:
            found["embedding and loss count as layers"] = (
                1, 4,
                {
                    **experts, "account_for_embedding_in_pipeline_split": True,
                    "account_for_loss_in_pipeline_split": True,
                },
            )  # fmt: skip
    out = {}
    for name, (tp, stages, more) in found.items():
        wide = tp * (more.get("expert_model_parallel_size") or 1) * 2
        out[name] = ParallelSpec(
            world_size=stages * wide, tensor_model_parallel_size=tp, pipeline_model_parallel_size=stages, **more
        )
    return out


Shapes = list[dict[str, tuple[int, ...]]]


def stages(name: str, parallel: ParallelSpec) -> list[int]:
    """The first and the last stage; one between them where stages are not all alike."""
    middle = () if name.startswith("even") else (parallel.pp // 2,)
    return sorted({0, *middle, parallel.pp - 1})


def differences(run: RunSpec, stage: int, built: Shapes) -> list[str]:
    """One line for every name or shape in which the inventory and megatron-core differ."""
    ours = [{p.name: tuple(p.shape) for p in chunk} for chunk in stage_parameters(run, stage)]
    lines = [] if len(ours) == len(built) else [f"{len(ours)} chunks, megatron-core {len(built)}"]
    for i, (mine, real) in enumerate(zip(ours, built, strict=False)):
        for name in sorted(mine.keys() | real.keys()):
            if mine.get(name) != real.get(name):
                lines.append(f"chunk {i} {name}: {mine.get(name)}, megatron-core {real.get(name)}")
    return lines


@pytest.mark.parametrize("preset", [*DENSE.values(), *EXPERTS.values()])
def test_a_rank_owns_exactly_what_megatron_core_builds_locally(preset: str) -> None:
    model = resolve_model(preset)
    kinds = layouts(model, te=False)
    assert len(kinds) >= 8
    logging.disable(logging.WARNING)
    for name, parallel in kinds.items():
        run = RunSpec(model=model, parallel=parallel, batch=BatchSpec(seq_length=1024), implementation=LOCAL)
        for stage in stages(name, parallel):
            with fake_world(parallel, rank_of_stage(parallel, stage)), building():
                built = parameter_shapes(build_chunks(run))
            found = differences(run, stage, built)
            assert not found, f"{preset}, {name}, stage {stage}: {len(found)}\n" + "\n".join(found[:20])


def test_a_rank_owns_exactly_what_megatron_core_builds_with_transformer_engine() -> None:
    """megatron-core's own TE specs and wrappers, over constructors that only make TE's weights."""
    jobs, labels = [], []
    for preset in [*DENSE.values(), *EXPERTS.values(), *HYBRID.values()]:
        model = resolve_model(preset)
        for name, parallel in layouts(model, te=True).items():
            if name.endswith("of its own"):  # as "uneven ends"
                continue
            run = RunSpec(
                model=model, parallel=parallel, batch=BatchSpec(seq_length=1024),
                implementation=ImplementationSpec(megatron_core=HERE),
            )
            for stage in stages(name, parallel):
                jobs.append((run, stage))
                labels.append(f"{preset}, {name}, stage {stage}")
    failed = []
    for (run, stage), label, built in zip(jobs, labels, parameter_shapes_with_te(jobs), strict=True):
        assert not isinstance(built, str), f"{label}: {built}"
        failed += [f"{label}: {line}" for line in differences(run, stage, built)]
    assert not failed, f"{len(failed)} differences\n" + "\n".join(failed[:20])
    assert len(jobs) > 250


def test_latent_attention_has_its_one_bias_on_linear_proj() -> None:
    """``--multi-latent-attention`` without ``--disable-bias-linear`` (multi_latent_attention.py), in both kinds of
    modules."""
    model = resolve_model("deepseek-ai/DeepSeek-V2-Lite")
    dense = model.layers[0]
    assert isinstance(dense.mixer, MLASpec) and isinstance(dense.ffn, MLPSpec)
    biased = LayerSpec(replace(dense.mixer, add_output_bias=True), replace(dense.ffn, add_bias=True))
    parallel = ParallelSpec(world_size=2, tensor_model_parallel_size=2)
    run = RunSpec(model=replace(model, layers=(biased,) * 2), parallel=parallel, implementation=LOCAL)
    logging.disable(logging.WARNING)
    with fake_world(parallel, 0), building():
        built = parameter_shapes(build_chunks(run))
    assert built[0]["decoder.layers.1.self_attention.linear_proj.bias"] == (model.hidden_size,)
    assert not differences(run, 0, built)
    te = run.with_fields(transformer_impl="transformer_engine")
    (with_te,) = parameter_shapes_with_te([(te, 0)])
    assert not isinstance(with_te, str) and not differences(te, 0, with_te)


def test_the_world_leaves_no_trace() -> None:
    import torch

    before = torch.cuda.current_device, torch.nn.functional.linear
    parallel = ParallelSpec(world_size=64, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    for rank in (0, 63):
        with fake_world(parallel, rank), building():
            assert torch.distributed.get_world_size() == 64
            assert torch.distributed.get_rank() == rank
    assert not torch.distributed.is_initialized()
    assert before == (torch.cuda.current_device, torch.nn.functional.linear)
