"""What one layer keeps and its peaks: the inventory's tape against megatron-core's own layer, tensor by tensor.

The rehearsal runs the real module on the meta device and counts every storage that autograd keeps, and all that is
alive at any moment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch

from bridge_memory.rehearsal.compare import compare_layer
from bridge_memory.rehearsal.model import NotBuildable
from bridge_memory.rehearsal.run import rehearse, rehearse_layer
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    ImplementationSpec,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
)

LOCAL = ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False)
UNFUSED = replace(
    LOCAL, masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
    gradient_accumulation_fusion=False,
)  # fmt: skip
ALLGATHER = replace(LOCAL, moe_token_dispatcher_type="allgather")


def model(mixer: Any, ffn: Any, hidden: int, **more: Any) -> ModelSpec:
    layer = LayerSpec(mixer, ffn)
    return ModelSpec(
        name="two layers", model_type="test", hidden_size=hidden, vocab_size=32000, layers=(layer, layer), **more
    )


GQA = AttentionSpec(32, 8, 128)
SWIGLU = MLPSpec(14336, gated=True)
MODELS = {
    "gqa": model(GQA, SWIGLU, 4096),
    "mha": model(
        AttentionSpec(32, 32, 128, add_qkv_bias=True, add_output_bias=True),
        MLPSpec(16384, gated=False, activation="gelu", add_bias=True), 4096,
        normalization="LayerNorm", hidden_dropout=0.1, attention_dropout=0.1,
        position_embedding_type="learned_absolute",
    ),
    "qk norm": model(AttentionSpec(32, 8, 128, qk_layernorm="head", add_qkv_bias=True), SWIGLU, 4096),
    "output gate": model(AttentionSpec(32, 8, 128, attention_output_gate=True), SWIGLU, 4096),
    "sink": model(AttentionSpec(32, 8, 128, learnable_softmax_sink=True), SWIGLU, 4096),
    "squared relu": model(GQA, MLPSpec(14336, gated=False, activation="relu2"), 4096),
    "geglu": model(GQA, MLPSpec(14336, gated=True, activation="gelu"), 4096),
    "mixtral": model(GQA, MoESpec(8, 2, 14336), 4096),
    "fine experts": model(AttentionSpec(32, 4, 128), MoESpec(128, 8, 768), 2048),
    "shared experts": model(
        AttentionSpec(16, 16, 128), MoESpec(64, 6, 1408, shared_expert_intermediate_size=2816), 2048
    ),
    "gated shared": model(
        AttentionSpec(16, 16, 128),
        MoESpec(60, 4, 1408, shared_expert_intermediate_size=5632, shared_expert_gate=True), 2048,
    ),
    "mla": model(MLASpec(128, 1536, 512, 128, 64, 128), MLPSpec(18432, gated=True), 7168),
    "mla without q_lora_rank": model(
        MLASpec(16, None, 512, 128, 64, 128), MLPSpec(10944, gated=True), 2048
    ),
    "deepseek": model(
        MLASpec(128, 1536, 512, 128, 64, 128),
        MoESpec(
            256, 8, 2048, shared_expert_intermediate_size=2048, router_enable_expert_bias=True,
            router_score_function="sigmoid", router_load_balancing_type="seq_aux_loss",
        ), 7168,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    model: str
    tp: int = 1
    sp: bool | None = None
    ep: int = 1
    etp: int | None = None
    implementation: ImplementationSpec = LOCAL
    recompute: str = ""
    seq: int = 4096
    batch: int = 1

    def run(self) -> RunSpec:
        return RunSpec(
            model=MODELS[self.model],
            parallel=ParallelSpec(
                world_size=64, tensor_model_parallel_size=self.tp, sequence_parallel=self.sp,
                expert_model_parallel_size=self.ep, expert_tensor_parallel_size=self.etp,
            ),
            batch=BatchSpec(seq_length=self.seq, micro_batch_size=self.batch),
            implementation=self.implementation,
            recompute=RecomputeSpec(granularity="selective", modules=(self.recompute,))
            if self.recompute
            else RecomputeSpec(),
        )  # fmt: skip

    def __str__(self) -> str:
        words = [self.model, f"tp{self.tp}" if self.tp > 1 else "", f"ep{self.ep}" if self.ep > 1 else ""]
        words += ["no sp" if self.sp is False else "", f"etp{self.etp}" if self.etp else ""]
        words += ["unfused" if self.implementation is UNFUSED else ""]
        words += ["allgather" if self.implementation is ALLGATHER else ""]
        words += [f"recompute {self.recompute}" if self.recompute else ""]
        words += [f"s{self.seq}" if self.seq != 4096 else ""]
        return " ".join(w for w in words if w)


CASES = [
    *(Case("gqa", tp=tp) for tp in (1, 2, 8)),
    Case("gqa", tp=2, sp=False),
    *(Case("mha", tp=tp) for tp in (1, 2, 8)),
    Case("mha", tp=2, sp=False),
    Case("gqa", tp=2, implementation=UNFUSED),
    Case("mha", tp=2, implementation=UNFUSED),
    Case("gqa", tp=2, seq=8192, batch=2),
    *(Case(m, tp=tp) for m in ("qk norm", "output gate", "sink", "squared relu", "geglu") for tp in (1, 2)),
    *(
        Case(m, **more)
        for m in ("mixtral", "fine experts", "shared experts", "gated shared")
        for more in (
            {"ep": 1}, {"ep": 4}, {"tp": 2, "ep": 4}, {"tp": 2, "ep": 4, "etp": 1},
            {"tp": 2, "ep": 4, "implementation": ALLGATHER},
        )
    ),
    *(Case(m, tp=tp) for m in ("mla", "mla without q_lora_rank") for tp in (1, 2)),
    Case("mla", tp=2, recompute="mla_up_proj"),
    Case("mla without q_lora_rank", tp=2, recompute="mla_up_proj"),
    Case("deepseek", ep=8),
    Case("deepseek", tp=2, ep=8, etp=1),
    *(Case("gqa", tp=2, recompute=r) for r in ("core_attn", "layernorm", "mlp")),
    *(Case("mha", tp=2, recompute=r) for r in ("core_attn", "layernorm")),
    *(Case("shared experts", tp=2, ep=4, recompute=r) for r in ("moe", "shared_experts", "layernorm")),
]  # fmt: skip


#: Few tokens, so that the gradients of the weights make the backward peak.
SHORT = [
    replace(case, seq=512)
    for case in CASES
    if case.seq == 4096 and case.model in ("gqa", "mha", "geglu", "mla", "mixtral", "shared experts")
]


@pytest.mark.parametrize("case", [*CASES, *SHORT], ids=str)
def test_a_layer_keeps_what_the_inventory_says(case: Case) -> None:
    """Half a per cent of the bytes saved for backward and of the peak of either pass.

    Every unmatched tensor is in the message, and where both sides have their peaks.
    """
    found = compare_layer(case.run(), 1)
    errors = (found.saved_error, found.forward_error, found.backward_error)
    assert max(map(abs, errors)) <= 0.005, "\n" + "\n".join(found.lines())


@pytest.mark.parametrize("case", [Case(m, tp=2) for m in ("gqa", "mha", "sink", "mla")], ids=str)
@pytest.mark.parametrize("softmax", [None, True, False])
def test_a_layer_in_fp32_or_with_its_softmax_in_16_bits(case: Case, softmax: bool | None) -> None:
    """Scores that are not cast are masked as a view of the GEMM's output, which costs two more of them backward.

    ``softmax``: in fp32 or not, of a layer in bf16 without fused kernels; None: the whole layer in fp32.
    """
    run = replace(case, implementation=UNFUSED).run()
    precision = PrecisionSpec(params_dtype="fp32") if softmax is None else PrecisionSpec(
        attention_softmax_in_fp32=softmax
    )
    found = compare_layer(replace(run, precision=precision), 1)
    errors = (found.saved_error, found.forward_error, found.backward_error)
    assert max(map(abs, errors)) <= 1e-3, "\n" + "\n".join(found.lines())


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize(
    ("model", "tp", "ep", "etp"), [("fine experts", 4, 8, 4), ("fine experts", 2, 2, 1), ("deepseek", 2, 8, 2)]
)
def test_outputs_are_summed_over_etp_in_the_routers_dtype(
    model: str, tp: int, ep: int, etp: int, dtype: str, dispatcher: str
) -> None:
    """The combine casts what experts made to the dtype of the probabilities, reduce-scatters that and casts back."""
    impl = replace(LOCAL, moe_router_dtype=dtype, moe_token_dispatcher_type=dispatcher)
    found = compare_layer(Case(model, tp=tp, ep=ep, etp=etp, implementation=impl).run(), 1)
    errors = (found.saved_error, found.forward_error, found.backward_error)
    assert max(map(abs, errors)) <= 0.002, "\n" + "\n".join(found.lines())


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(("factor", "pad"), [(0.5, False), (2.0, False), (0.5, True), (2.0, True)])
def test_experts_with_a_capacity(factor: float, pad: bool, dispatcher: str) -> None:
    """Both sides send what the capacity leaves; before, megatron-core's side sent every token."""
    impl = replace(
        LOCAL, moe_token_dispatcher_type=dispatcher, moe_expert_capacity_factor=factor,
        moe_pad_expert_input_to_capacity=pad,
    )  # fmt: skip
    found = compare_layer(Case("fine experts", tp=2, ep=4, etp=1, implementation=impl).run(), 1)
    errors = (found.saved_error, found.forward_error, found.backward_error)
    assert max(map(abs, errors)) <= 1e-3, "\n" + "\n".join(found.lines())


def test_padding_to_a_capacity_sends_so_many_rows() -> None:
    """4096 / 2 tokens, 8 of 128 experts each, factor 2: 256 of every expert from each of the 4 ranks, 768 wide in and
    out of the activation: fc1's output has 4 x 32 x 256 rows of 2 x 768 values."""
    impl = replace(
        LOCAL, moe_token_dispatcher_type="allgather", moe_expert_capacity_factor=2.0,
        moe_pad_expert_input_to_capacity=True,
    )  # fmt: skip
    run = Case("fine experts", tp=2, ep=4, etp=1, implementation=impl).run()
    of_experts = [r for r in rehearse_layer(run, 1).saved if r.shape[-1:] == (2 * 768,)]
    assert sum(r.bytes for r in of_experts) == 4 * 32 * 256 * 2 * 768 * 2


def test_gqa_layer_by_hand() -> None:
    """TP1, s = 4096, b = 1, h = 4096, 32 heads of 128, f = 14336, bf16, no dropout, fused softmax.

    Residual stream, two norm inputs and two norm outputs: 4 * 2 s h; two fp32 row statistics: 2 * 4 s;
    rotated query, repeated key and value: 3 * 2 s h; cosines and sines in bf16, for query and key: 4 * 2 s 128;
    probabilities: 2 a s s; attention output: 2 s h; fc1 output 4 s f, activation 2 s f.
    """
    s, h, f, a = 4096, 4096, 14336, 32
    saved = rehearse_layer(Case("gqa").run(), 1).saved_bytes
    assert saved == 8 * s * h + 8 * s + 6 * s * h + 8 * s * 128 + 2 * a * s * s + 2 * s * h + 6 * s * f


def test_attention_dropout_keeps_a_mask_of_one_byte() -> None:
    """Dropped probabilities of 2 a s s bytes and a bool mask of a s s, next to the probabilities themselves."""
    run = Case("mha").run()
    without = replace(run, model=replace(run.model, attention_dropout=0.0))
    extra = rehearse_layer(run, 1).saved_bytes - rehearse_layer(without, 1).saved_bytes
    assert extra == 3 * 32 * 4096 * 4096


def test_a_full_recomputation_keeps_one_input_a_layer() -> None:
    """Uniform, one layer: 2 s h a layer, the rotary table, and the final norm and loss of the last stage."""
    run = Case("gqa").run()
    recompute = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    full = rehearse(replace(run, recompute=recompute), 0).chunks[0].passes
    none = rehearse(run, 0).chunks[0].passes
    inputs = [r for r in full.saved if r.shape == (4096, 1, 4096) and r.bytes == 2 * 4096 * 4096]
    assert full.saved_bytes < 0.35 * none.saved_bytes
    # Two layer inputs, the final norm's input and the output layer's.
    assert len(inputs) == 4


def test_the_last_stage_holds_the_logits_and_the_first_does_not() -> None:
    """fp32 softmax of the vocabulary: 4 s V bytes, V padded to 32000."""
    run = replace(Case("gqa").run(), parallel=ParallelSpec(world_size=8, pipeline_model_parallel_size=2))
    logits = 4 * 4096 * 32000
    sizes = []
    for stage in (0, 1):
        saved = rehearse(run, stage).chunks[0].passes.saved
        sizes.append(max((r.bytes for r in saved if "layers" not in r.module), default=0))
    assert sizes[1] == logits
    assert sizes[0] < logits / 100


def test_what_cannot_run_is_refused_in_one_line() -> None:
    broken = replace(Case("gqa").run(), precision=PrecisionSpec(fp32_residual_connection=True))
    with pytest.raises(NotBuildable) as refusal:
        rehearse_layer(broken, 0)
    assert "\n" not in str(refusal.value)


class _Checkpoint(torch.autograd.Function):
    """``tensor_parallel/random.py: CheckpointFunction`` without its states of random numbers, three times at most."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor) -> Any:
        ctx.run, ctx.times = run, 0
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.times += 1
        if ctx.times == 3:
            raise RecursionError
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, gradients)
        return None, x.grad


def test_a_checkpoint_that_returns_a_parameter_runs_backward_into_itself() -> None:
    """Why ``mlp`` is not recomputed in a model with biases: MLP.forward returns linear_fc2's own."""
    weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    x = torch.ones(1, 2, requires_grad=True)
    (_Checkpoint.apply(lambda x: (x @ weight,), x)[0] + bias).sum().backward()
    y, returned = _Checkpoint.apply(lambda x: (x @ weight, bias), x)
    with pytest.raises(RecursionError):
        (y + returned).sum().backward()


@pytest.mark.parametrize("dtype", [None, "fp32"])
@pytest.mark.parametrize("name", ["fine experts", "deepseek"])
def test_a_z_loss_keeps_the_logits(name: str, dtype: str | None) -> None:
    """A router's logits, [N, E], and the sums of their exponentials, [N]."""
    impl = replace(LOCAL, moe_z_loss_coeff=1e-3, moe_router_dtype=dtype)
    found = compare_layer(Case(name, tp=2, ep=4, implementation=impl).run(), 1)
    without = compare_layer(Case(name, tp=2, ep=4, implementation=replace(impl, moe_z_loss_coeff=None)).run(), 1)
    assert found.found.saved_bytes > without.found.saved_bytes
    errors = (found.saved_error, found.forward_error, found.backward_error)
    assert max(map(abs, errors)) <= 1e-3, "\n" + "\n".join(found.lines())
