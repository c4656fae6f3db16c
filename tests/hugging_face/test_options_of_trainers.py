"""What loops around transformers' modules do: checkpoints of parts of a layer, a loss without logits, steps in
backward, offloaded checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from hf_oracle import META, as_on_cuda, build, passes

from bridge_memory import BatchSpec, DataParallelSpec, ImplementationSpec, OptimizerSpec, RunSpec, SpecError, estimate
from bridge_memory.components import State
from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.rehearsal.tracker import Tracker
from bridge_memory.spec import ParallelSpec, PrecisionSpec
from bridge_memory.spec.layout import layout
from bridge_memory.spec.transformers import TransformersSpec
from bridge_memory.tapes.context import context_of

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
BATCH, SEQ = 2, 256
TOKENS = BATCH * SEQ


def run_of(config: dict[str, Any] | None = None, impl: str = "transformers", **fields: Any) -> RunSpec:
    run = {key: fields.pop(key) for key in list(fields) if key in ("optimizer", "data_parallel", "parallel", "batch")}
    return RunSpec(
        model=model_from_hf_config({**CONFIG, **(config or {})}, "small"),
        precision=PrecisionSpec(params_dtype="bf16"), implementation=ImplementationSpec(transformer_impl=impl),
        transformers=TransformersSpec(**{"attention_mask": "ones", **fields}),
        **{
            "batch": BatchSpec(seq_length=SEQ, micro_batch_size=BATCH),
            "data_parallel": DataParallelSpec(engine="single"),
            "optimizer": OptimizerSpec(optimizer="adamw", torch_implementation="fused"), **run,
        },
    )  # fmt: skip


def of_model(run: RunSpec) -> Any:
    ((shape,),) = layout(run.model, run.parallel).shapes(run.model)
    return chunk_inventory(run.model, shape, context_of(run))


def test_checkpoints_of_norms_attention_and_mlp() -> None:
    """As Automodel wraps them."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    # Gradients that are there before, of several microbatches.
    batch = BatchSpec(seq_length=SEQ, micro_batch_size=BATCH, global_batch_size=8)
    run = run_of(checkpoint_submodules=True, batch=batch)
    model = build(CONFIG)
    for layer in model.model.layers:
        for name in ("mlp", "self_attn", "input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, checkpoint_wrapper(getattr(layer, name)))
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long, device=META)
    mask = torch.ones_like(ids)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tracker = Tracker(static=[ids, mask, *(p.grad for p in model.parameters())])
    with as_on_cuda(None, padded=False), tracker.watching(model):
        found = passes(tracker, lambda: model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss)
    ours = of_model(run)
    assert ours.retained == pytest.approx(found.retained, rel=0.005)
    assert ours.forward_peak == pytest.approx(found.forward, rel=0.01)
    # What is made again stops before the last product's output, which is counted.
    output = TOKENS * 256 * 2
    assert ours.backward_peak == pytest.approx(found.backward + output, rel=0.01)


class _Cut(torch.autograd.Function):
    """What ``cce.py: LinearCrossEntropyFunction`` keeps and makes, by its source."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, targets: Any) -> Any:
        rows, vocab = x.shape[0], weight.shape[0]
        lse, average = (torch.empty(n, dtype=torch.float32, device=META) for n in (rows, vocab))
        nll = torch.empty(rows, dtype=torch.float32, device=META).add_(lse)
        ctx.save_for_backward(x, weight, lse, targets, average)
        return nll.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight, *_ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight), None


@pytest.mark.parametrize("vocab_size", [512, 60000])
def test_cut_cross_entropy_makes_no_logits(vocab_size: int) -> None:
    config = {"vocab_size": vocab_size}
    batch = BatchSpec(seq_length=SEQ, micro_batch_size=BATCH, global_batch_size=8)
    run = run_of(config, cut_cross_entropy=True, batch=batch)
    model = build({**CONFIG, **config})
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long, device=META)
    mask = torch.ones_like(ids)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tracker = Tracker(static=[ids, mask, *(p.grad for p in model.parameters())])

    def loss() -> Any:
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return _Cut.apply(hidden.flatten(0, 1), model.lm_head.weight, ids.clone().flatten())

    with as_on_cuda(None, padded=False), tracker.watching(model):
        found = passes(tracker, loss)
    ours = of_model(run)
    assert ours.retained == pytest.approx(found.retained, rel=0.002)
    assert ours.backward_peak == pytest.approx(found.backward, rel=0.005)


@pytest.mark.parametrize("tied", [True, False])
def test_steps_in_backward_leave_no_gradient(tied: bool) -> None:
    """A real optimizer a parameter, whose hook steps and frees (plain ``torch.optim.SGD``, which keeps nothing)."""
    config = {"tie_word_embeddings": tied, "vocab_size": 20000}
    run = run_of(config, optimizer_in_bwd=True, optimizer=OptimizerSpec(optimizer="sgd", sgd_momentum=0.0))
    model = build({**CONFIG, **config})
    steps = {p: torch.optim.SGD([p], lr=1e-3, foreach=False) for p in model.parameters()}

    def step(p: Any) -> None:
        steps[p].step()
        steps[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long, device=META)
    mask = torch.ones_like(ids)
    tracker = Tracker(static=[ids, mask])
    with as_on_cuda(None, padded=False), tracker.watching(model):
        found = passes(tracker, lambda: model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss)
    assert all(p.grad is None for p in model.parameters())
    found_peak = max(found.forward, found.backward)
    answer = estimate(run)
    weights = sum(2 * p.numel() for p in model.parameters())
    stage = answer.stages[0]
    outside = sum(c.bytes for c in stage.components if "workspaces" in c.name or "batch" in c.name)
    assert not any(c.state is State.GRADIENTS for c in stage.components)
    assert stage.peak_bytes - weights - outside == pytest.approx(found_peak, rel=0.01)


def test_offloaded_checkpoints_keep_no_layer_inputs() -> None:
    """Four layers of 512 tokens of 256 features in bf16: a quarter of a MiB each, all of them on the host."""
    kept = {"gradient_checkpointing": True, "use_reentrant": False, "attention_mask": "none"}
    on, off = (of_model(run_of(impl="torchtune", enable_activation_offloading=flag, **kept)) for flag in (True, False))
    assert off.retained - on.retained == 4 * TOKENS * 256 * 2
    run = run_of(impl="torchtune", enable_activation_offloading=True, optimizer_in_bwd=True, **kept)
    assert dict(estimate(run).stages[0].host)["inputs of layers (pinned)"] == 4 * TOKENS * 256 * 2


@pytest.mark.parametrize(("fields", "said"), [
    ({"num_output_chunks": 8}, "set transformer_impl to torchtune"),
    ({"impl": "torchtune", "num_output_chunks": 300}, "is more than seq_length"),
    ({"impl": "torchtune", "config": {"model_type": "qwen3"}}, "model_type .qwen3."),
    ({"impl": "torchtune", "liger_kernel": ("rope",)}, "liger_kernel"),
    ({"impl": "torchtune", "gradient_checkpointing": True, "use_reentrant": True}, "use_reentrant"),
    ({"enable_activation_offloading": True}, "needs gradient_checkpointing"),
    ({"enable_activation_offloading": True, "gradient_checkpointing": True}, "use_reentrant"),
    ({"optimizer_in_bwd": True, "data_parallel": DataParallelSpec(engine="ddp"),
      "parallel": ParallelSpec(world_size=2)}, "engine single"),
    ({"optimizer_in_bwd": True, "batch": BatchSpec(seq_length=8, global_batch_size=4)}, "after one microbatch"),
    ({"cut_cross_entropy": True, "liger_kernel": ("fused_linear_cross_entropy",)}, "drop one"),
    ({"checkpoint_submodules": True, "gradient_checkpointing": True}, "drop one"),
    ({"compile_loss": True}, "compile_loss"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_in_one_line(fields: dict[str, Any], said: str) -> None:
    given = {**fields}
    with pytest.raises(SpecError, match=said) as error:
        run_of(given.pop("config", None), given.pop("impl", "transformers"), **given)
    assert "\n" not in str(error.value)
