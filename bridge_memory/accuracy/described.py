"""Records of kind ``described``: what a source says in its own words, read where it says enough.

Two forms are understood: a Megatron-Bridge recipe with the name of its Hugging Face model and its overrides, and
one MoE layer run forward and backward on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bridge_memory.components import Component
from bridge_memory.estimate import StageEstimate
from bridge_memory.inventory.context import context_of
from bridge_memory.inventory.moe import _moe_layer as record_moe_layer
from bridge_memory.inventory.recorder import Recorder
from bridge_memory.readers.megatron_args import gpu_architecture
from bridge_memory.readers.resolve import resolve_model
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
)
from bridge_memory.spec.layout import layout
from bridge_memory.workspaces.libraries import lasting_workspaces

#: Release whose rules apply to sources of 2026 that name a commit.
_CORE = (0, 17)


class Description:
    """The words of one record: ``config.args`` and ``config.parallel``."""

    def __init__(self, config: Mapping[str, object], gpu: str, world_size: int) -> None:
        args, parallel = config.get("args"), config.get("parallel")
        self.args: Mapping[str, object] = args if isinstance(args, Mapping) else {}
        self.sizes: Mapping[str, object] = parallel if isinstance(parallel, Mapping) else {}
        self.architecture = gpu_architecture(gpu)
        self.world_size = world_size

    @property
    def is_recipe(self) -> bool:
        return "hf_model" in self.args

    @property
    def is_moe_layer(self) -> bool:
        return "token_dispatcher" in self.args and self.args.get("num_layers") == 1

    def number(self, name: str, default: int = 0) -> int:
        value = self.args.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def text(self, name: str, default: str = "") -> str:
        value = self.args.get(name)
        return value if isinstance(value, str) else default

    def flag(self, name: str) -> bool:
        return self.args.get(name) is True

    def words(self, name: str) -> tuple[str, ...]:
        value = self.args.get(name)
        return tuple(map(str, value)) if isinstance(value, (list, tuple)) else ()

    def size(self, name: str, default: int = 1) -> int:
        value = self.sizes.get(name)
        return value if isinstance(value, int) else default

    def parallel(self) -> ParallelSpec:
        etp = self.sizes.get("ETP")
        return ParallelSpec(
            world_size=self.world_size,
            tensor_model_parallel_size=self.size("TP"),
            pipeline_model_parallel_size=self.size("PP"),
            context_parallel_size=self.size("CP"),
            expert_model_parallel_size=self.size("EP"),
            expert_tensor_parallel_size=etp if isinstance(etp, int) else None,
            sequence_parallel=self.flag("sequence_parallel"),
        )


def recipe_run(d: Description) -> RunSpec:
    """A Megatron-Bridge pretraining recipe: its Hugging Face model with the overrides that the record lists.

    What a recipe leaves alone is Bridge's default: no attention mask from the loader (``GPTDatasetConfig``), no
    RoPE fusion for MLA (``models/mla_provider.py``), Transformer Engine's choice of attention.
    """
    fusion = d.text("cross_entropy_loss_fusion")
    return RunSpec(
        model=resolve_model(d.text("hf_model").split()[0]),
        parallel=d.parallel(),
        batch=BatchSpec(
            seq_length=d.number("seq_length"),
            micro_batch_size=d.number("micro_batch_size", 1),
            global_batch_size=d.number("global_batch_size"),
        ),
        precision=PrecisionSpec(params_dtype=d.text("params_dtype", "bf16")),
        data_parallel=DataParallelSpec(
            use_distributed_optimizer=d.flag("use_distributed_optimizer"),
            grad_reduce_in_fp32=d.flag("grad_reduce_in_fp32"),
            overlap_grad_reduce=d.flag("overlap_grad_reduce"),
            overlap_param_gather=d.flag("overlap_param_gather"),
        ),
        optimizer=OptimizerSpec(
            use_precision_aware_optimizer=d.flag("use_precision_aware_optimizer"),
            main_grads_dtype=d.text("main_grads_dtype", "fp32"),
            main_params_dtype=d.text("main_params_dtype", "fp32"),
            fp8_recipe="tensorwise",
            exp_avg_dtype=d.text("exp_avg_dtype", "fp32"),
            exp_avg_sq_dtype=d.text("exp_avg_sq_dtype", "fp32"),
        ),
        recompute=RecomputeSpec(granularity=d.text("recompute_granularity"), modules=d.words("recompute_modules"))
        if d.words("recompute_modules")
        else RecomputeSpec(),
        implementation=ImplementationSpec(
            transformer_impl=d.text("transformer_impl", "transformer_engine"),
            megatron_core=_CORE,
            gpu_arch=d.architecture,
            apply_rope_fusion=False,
            moe_token_dispatcher_type=d.text("moe_token_dispatcher_type", "alltoall"),
            moe_grouped_gemm=d.flag("moe_grouped_gemm"),
            moe_permute_fusion=d.flag("moe_permute_fusion"),
            moe_shared_expert_overlap=d.flag("moe_shared_expert_overlap"),
            cross_entropy_loss_fusion=bool(fusion),
            cross_entropy_fusion_impl=fusion or "native",
        ),
    )


def moe_layer_run(d: Description) -> RunSpec:
    """One MoE layer and nothing else; gradients are plain ``.grad`` tensors in the parameter dtype."""
    dispatcher, _, backend = d.text("token_dispatcher").partition("/")
    fp8 = d.text("fp8")
    moe = MoESpec(
        num_experts=d.number("num_experts"),
        topk=d.number("router_topk"),
        moe_ffn_hidden_size=d.number("moe_ffn_hidden_size"),
        gated=True,
        shared_expert_intermediate_size=d.number("moe_shared_expert_intermediate_size"),
        router_num_groups=d.number("moe_router_num_groups") or None,
        router_group_topk=d.number("moe_router_group_topk") or None,
        router_enable_expert_bias=d.flag("moe_router_enable_expert_bias"),
        router_score_function=d.text("moe_router_score_function", "softmax"),
        router_load_balancing_type=d.text("moe_router_load_balancing_type", "none"),
    )
    return RunSpec(
        model=ModelSpec(
            name="one MoE layer", model_type="moe_layer", hidden_size=d.number("hidden_size"), vocab_size=128,
            layers=(LayerSpec(None, moe),), position_embedding_type="none",
        ),
        parallel=d.parallel(),
        batch=BatchSpec(seq_length=d.number("seq_length"), micro_batch_size=d.number("micro_batch_size", 1)),
        precision=PrecisionSpec(fp8="hybrid" if fp8 else None, fp8_recipe="blockwise" if fp8 else "delayed"),
        data_parallel=DataParallelSpec(grad_reduce_in_fp32=False, use_distributed_optimizer=False),
        implementation=ImplementationSpec(
            megatron_core=_CORE,
            gpu_arch=d.architecture,
            gradient_accumulation_fusion=False,
            moe_token_dispatcher_type=dispatcher,
            moe_flex_dispatcher_backend=backend or "deepep",
            moe_grouped_gemm=d.flag("moe_grouped_gemm"),
            moe_permute_fusion=d.flag("moe_permute_fusion"),
            moe_router_fusion=d.flag("moe_router_fusion"),
            moe_router_dtype=d.text("moe_router_dtype") or None,
        ),
    )


def moe_layer_stage(run: RunSpec) -> StageEstimate:
    """Weights, plain gradients, workspaces, and the layer's own forward and backward."""
    ctx = context_of(run)
    spec = run.model.layers[0].ffn
    assert isinstance(spec, MoESpec)
    r = Recorder(ctx)
    x = r.tape.input("hidden_states", ctx.hidden_bytes)
    r.tape.output(record_moe_layer(r, spec, x))
    r.tape.touch(x)
    inventory = r.inventory()
    parameters = sum(p.numel for p in inventory.parameters)
    cost = inventory.cost
    (chunk,) = layout(run.model, run.parallel).stages[0]
    libraries = [
        w for w in lasting_workspaces(run, [replace(chunk, embedding=True, output=False)], ctx)
        if not w.between_steps
    ]
    weights = parameters * ctx.act
    # zero_grad(set_to_none=True): a weight's gradient appears in its own backward, as the scratch of that
    # operation; all of them are there only when the saved tensors are gone.
    # The output and the gradient handed to backward stay with the caller.
    backward_peak = cost.backward_peak + 2 * cost.output_bytes
    forward = cost.forward_peak > backward_peak
    peak = max(cost.forward_peak, backward_peak)
    experts = sum(p.numel for p in inventory.parameters if p.expert)
    copies = 2 * r.fp8_bytes(experts) if r.fp8 else 0
    return StageEstimate(
        stage=0,
        layers=(0,),
        parameters=parameters,
        in_flight_microbatches=1,
        components=(
            Component("weights", weights, "weights", "exact"),
            *((Component("fp8 weight copies", copies, "weights", "exact"),) if copies else ()),
            *(Component(w.name, w.bytes, "buffers", w.provenance) for w in libraries),
            Component("activations: one MoE layer", cost.saved, "activation", "assumed"),
            Component("in passing", peak - cost.saved, "transient", "formula"),
        ),
        peak_phase="forward" if forward else "backward",
        peak_operation=cost.forward_peak_op if forward else cost.backward_peak_op,
    )
