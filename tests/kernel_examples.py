"""Small layers in which tensors of kernels are looked up, and the sizes that formulas of the table use.

Two tensor-parallel ranks with sequence parallelism, 512 tokens in two sequences, bf16 unless an example says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import comb
from typing import Any

from bridge_memory.inventory.layer import layer_block
from bridge_memory.inventory.tail import tail_blocks
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    GatedDeltaNetSpec,
    ImplementationSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
)
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.tapes.context import context_of

S, B, H, TP, F, VOCAB = 256, 2, 512, 2, 1024, 4096
ATTENTION = AttentionSpec(8, 4, 64)
DENSE = MLPSpec(F, gated=True)
EXPERTS = MoESpec(8, 2, 256, router_load_balancing_type="none")
MLA = MLASpec(8, 128, 64, 64, 32, 64)
MAMBA = MambaSpec(16, 64, 32, 4)
DELTA = GatedDeltaNetSpec(4, 8, 64, 64)
TE = {"transformer_engine": (2, 20), "megatron_core": (0, 19)}
OLD = {"transformer_engine": (2, 11), "megatron_core": (0, 16)}
LOCAL = {"transformer_impl": "local", "megatron_core": (0, 19)}
FUSED_ROUTER = {"moe_router_fusion": True, "moe_permute_fusion": True}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_permute_fusion": True, "moe_router_dtype": "fp32"}


@dataclass(frozen=True)
class Example:
    mixer: Any = ATTENTION
    ffn: Any = DENSE
    impl: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    ep: int = 1
    cp: int = 1

    def run(self) -> RunSpec:
        model = ModelSpec(
            name="m", model_type="m", hidden_size=H, vocab_size=VOCAB, layers=(LayerSpec(self.mixer, self.ffn),) * 2,
            share_embeddings_and_output_weights=False, **self.model,
        )  # fmt: skip
        return RunSpec(
            model=model, batch=BatchSpec(seq_length=S * self.cp, micro_batch_size=B),
            parallel=ParallelSpec(
                world_size=TP * max(self.ep, self.cp), tensor_model_parallel_size=TP, sequence_parallel=True,
                expert_model_parallel_size=self.ep, expert_tensor_parallel_size=1,
                context_parallel_size=self.cp,
            ),
            implementation=ImplementationSpec(**{**TE, **self.impl}), precision=PrecisionSpec(**self.precision),
        )  # fmt: skip


EXAMPLES = {
    "dense": Example(),
    "layer norm": Example(model={"normalization": "LayerNorm"}),
    "flash": Example(impl={"attention_backend": "flash"}),
    "unfused attention": Example(impl={"attention_backend": "unfused"}),
    "ring": Example(cp=2),
    "all to all": Example(impl={"cp_comm_type": "a2a"}, cp=2),
    "gathered": Example(impl={"cp_comm_type": "all_gather"}, cp=2),
    "mla": Example(mixer=MLA),
    "experts": Example(ffn=EXPERTS, impl=FUSED_ROUTER, ep=4),
    "experts 2.11": Example(ffn=EXPERTS, impl={**OLD, **FUSED_ROUTER}, ep=4),
    "auxiliary loss": Example(ffn=replace(EXPERTS, router_load_balancing_type="aux_loss"), impl=FUSED_ROUTER, ep=4),
    "deepep": Example(ffn=EXPERTS, impl=FLEX, ep=4),
    "hybridep": Example(ffn=EXPERTS, impl={**FLEX, "moe_flex_dispatcher_backend": "hybridep"}, ep=4),
    "mamba": Example(mixer=MAMBA),
    "delta net": Example(mixer=DELTA),
    "local": Example(impl=LOCAL),
    "fp8 delayed": Example(precision={"fp8": "hybrid"}),
    "fp8 tensorwise": Example(precision={"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "fp8 blockwise": Example(precision={"fp8": "e4m3", "fp8_recipe": "blockwise"}),
    "mxfp8": Example(precision={"fp8": "e4m3", "fp8_recipe": "mxfp8"}, impl={"gpu_arch": "blackwell"}),
    "nvfp4": Example(precision={"fp4": "e2m1"}, impl={"gpu_arch": "blackwell"}),
    "dropout": Example(model={"hidden_dropout": 0.1}),
}
#: Examples of what follows the layers: the loss.
LOSSES = {
    "loss": Example(),
    "loss of local modules": Example(impl=LOCAL),
    "fused loss 2.11": Example(impl={**OLD, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}),
    "fused loss": Example(impl={"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}),
}


def saved(name: str) -> dict[str, int]:
    """Tensors that an example saves, and their bytes; those of one name together."""
    example = (EXAMPLES | LOSSES)[name]
    run = example.run()
    ctx = context_of(run)
    if name in LOSSES:
        shape = ChunkShape((), embedding=False, output=True, num_depths=0, last_layer=False)
        tensors = [t for block, _ in tail_blocks(run.model, shape, ctx) for t in block.cost.tensors]
    else:
        tensors = list(layer_block(run.model.layers[1], ctx).cost.tensors)
    found: dict[str, int] = {}
    for tensor in tensors:
        found[tensor.name] = found.get(tensor.name, 0) + tensor.bytes
    return found


#: What a formula of the table may name: sizes of the examples, per rank.
SIZES = {
    "s": S, "b": B, "h": H, "t": TP, "f": F // TP, "T": S * B, "T_sp": S * B // TP, "a": 8 // TP, "g": 4 // TP, "d": 64,
    "V": VOCAB // TP, "E": 8, "k": 2, "e": 4, "f_e": 256,
    # Tokens of four ranks that have one of two experts among the two of a rank.
    "received": round(S * B // TP * 4 * (1 - comb(6, 2) / comb(8, 2))),
}  # fmt: skip
