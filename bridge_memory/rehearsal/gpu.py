"""Train one rank on one GPU without its peers: its parameters, DDP, optimizer and schedule.

Collectives and point-to-point communication use torch's fake backend, which does nothing: loss values are meaningless.
Every expert gets the same number of tokens. All allocations are megatron-core's own code. Needs a CUDA build of torch;
uses Transformer Engine if it is installed and the run sets it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bridge_memory.components import GIB, State
from bridge_memory.readers.megatron_args import gpu_architecture
from bridge_memory.rehearsal.adapters import adapt
from bridge_memory.rehearsal.measuring import Notebook, snapshot_to
from bridge_memory.rehearsal.model import build_chunks
from bridge_memory.rehearsal.patches.collectives import objects_of_peers
from bridge_memory.rehearsal.patches.modules import has_te, norms_without_apex, permissive_core_attention
from bridge_memory.rehearsal.patches.process_state import loss_scales_restored
from bridge_memory.rehearsal.patches.recomputation import recomputation_without_te
from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.rehearsal.patches.routing import balanced_routing
from bridge_memory.rehearsal.record import Phase, installed, record_of
from bridge_memory.rehearsal.refusals import refuse_what_is_ignored
from bridge_memory.rehearsal.world import RehearsalUnavailable, fake_world
from bridge_memory.releases import GRAPH_OF_THE_ITERATION, release_in
from bridge_memory.residual import SIGN, percent, relative
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.ranks import rank_of_stage, stage_of_rank

#: Further options that this loop does not run: they concern the steps of a real optimizer, or a real batch.
_NOT_REHEARSED_HERE = ("packed_sequences", "log_params_norm", "create_attention_mask")
#: Options that run on a GPU but not on meta tensors: graphs of layers, activations in host memory.
_REHEARSED_HERE = ("cuda_graph_impl", "cpu_offloading_num_layers")


@dataclass(slots=True)
class Measured:
    """One rehearsal on a GPU. ``phases``: model built, first forward, first backward, first optimizer step, and each
    further step as one phase."""

    run: RunSpec
    rank: int
    stage: int
    gpu: str
    steps: int
    phases: list[Phase] = field(default_factory=list)

    @property
    def allocated(self) -> int:
        """Bytes after the last step."""
        return self.phases[-1].allocated

    @property
    def peak(self) -> int:
        """The peak of the last step in bytes; with one step, over all of its phases."""
        phases = self.phases[-1:] if self.steps > 1 else self.phases[1:]
        return max(p.max_allocated for p in phases)

    def lines(self) -> list[str]:
        """Lines of text: the phases, then predicted and measured figures."""
        out = [
            f"{self.run.model.name}: rank {self.rank}, pipeline stage {self.stage}, on {self.gpu}; "
            "loss values are meaningless",
            f"{'':<34}{'allocated':>15}{'max allocated':>17}{'reserved':>15}",
        ]
        out += [
            f"{p.name:<34}{p.allocated / GIB:>11.4f} GiB{p.max_allocated / GIB:>13.4f} GiB"
            f"{p.reserved / GIB:>11.4f} GiB"
            for p in self.phases
        ]
        out += ["", f"{'':<34}{'predicted':>15}{'measured':>17}{SIGN:>22}  % of measured"]
        out += [
            f"{name:<34}{ours / GIB:>11.4f} GiB{found / GIB:>13.4f} GiB{(found - ours) / GIB:>+18.4f} GiB"
            f"  {percent(relative(found, ours), 2):>13}"
            for name, ours, found in self.rows()
        ]
        return out

    def rows(self) -> list[tuple[str, int, int]]:
        """(quantity, predicted, measured) in bytes."""
        from bridge_memory.estimation import estimate

        stage = estimate(self.run).stages[self.stage]
        by_name = {p.name: p for p in self.phases}
        rows = []
        if not self.run.optimizer.use_precision_aware_optimizer and "first backward" in by_name:
            moments = sum(
                c.bytes for c in stage.components if c.state in (State.EXP_AVG, State.EXP_AVG_SQ)
            )
            model_state = stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
            before, after = by_name["first backward"], by_name["first optimizer step"]
            rows += [
                ("model built", model_state - moments, by_name["model built"].allocated),
                ("made by the first optimizer step", moments, after.allocated - before.allocated),
            ]
        if self.steps > 1:
            rows.append((f"static, after step {self.steps}", stage.static_bytes, self.allocated))
            rows.append((f"peak of step {self.steps}", stage.peak_bytes, self.peak))
        return rows

    def as_record(self) -> dict[str, Any]:
        """One line of the format of tests/data/measurements/runs.jsonl."""
        return record_of(self.run, self.rank, self.gpu, self.steps, self.phases)


def rehearse_on_gpu(
    run: RunSpec,
    stage: int | None = None,
    *,
    rank: int | None = None,
    steps: int = 2,
    snapshot: str | None = None,
    architecture: Any = None,
) -> Measured:
    """Run ``steps`` training steps of one rank on the current GPU. Raises SpecError, RehearsalUnavailable.

    ``snapshot`` names a file for torch's memory snapshot, written also when memory runs out. ``architecture``: as for
    ``megatron_config.transformer_config``.
    """
    run = run_here(run)
    rank = rank_of_stage(run.parallel, stage or 0) if rank is None else rank
    notebook = Notebook()
    measured = Measured(
        run, rank, stage_of_rank(run.parallel, rank), torch.cuda.get_device_name(), steps, notebook.phases
    )
    with snapshot_to(snapshot):
        torch.cuda.reset_peak_memory_stats()
        train(run, rank, steps, notebook.note, architecture)
    return measured


def run_here(run: RunSpec) -> RunSpec:
    """``run`` as it is trained on this machine. Raises SpecError, RehearsalUnavailable."""
    if not torch.cuda.is_available():
        raise RehearsalUnavailable(
            "device cuda needs a GPU and torch with CUDA; --device cpu rehearses without either"
        )
    run = on_this_machine(run, torch.cuda.get_device_name())
    refuse_what_is_not_rehearsed(run)
    return run


def on_this_machine(run: RunSpec, gpu: str) -> RunSpec:
    """``run`` with this machine's releases, GPU and allocator, which are measured."""
    from bridge_memory.readers.environment import cublas_workspace_bytes, expandable_segments

    impl = run.implementation
    return run.with_(
        implementation=replace(
            impl,
            megatron_core=release_in(installed("megatron-core")) or impl.megatron_core,
            transformer_engine=release_in(installed("transformer-engine")) if impl.te else None,
            torch=release_in(torch.__version__),
            gpu_arch=gpu_architecture(gpu),
            expandable_segments=expandable_segments(os.environ),
            cublas_workspace_bytes=cublas_workspace_bytes(os.environ.get("CUBLAS_WORKSPACE_CONFIG")),
        ),
    )


def missing_kernels() -> dict[str, bool]:
    """ImplementationSpec's fusions that megatron-core takes from Apex: whether they are missing here."""
    return {
        "gradient_accumulation_fusion": importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None,
        "masked_softmax_fusion": importlib.util.find_spec("scaled_upper_triang_masked_softmax_cuda") is None,
    }


def refuse_what_is_not_rehearsed(run: RunSpec) -> None:
    """Raise RehearsalUnavailable where the measured run would differ from the described one."""
    impl = run.implementation
    if impl.te and not has_te():
        raise RehearsalUnavailable(
            "transformer_impl (transformer_engine) is not installed here; install it or give "
            "--transformer-impl local"
        )
    for name, missing in missing_kernels().items():
        # Transformer Engine has a softmax of its own; the output layer's weight gradient is megatron-core's also with
        # it.
        if missing and getattr(impl, name) and not (impl.te and name == "masked_softmax_fusion"):
            flag = name.replace("_", "-")
            raise RehearsalUnavailable(f"{name} needs Apex, which is not installed here; give --no-{flag}")
    if run.precision.params_dtype == "fp16":
        raise RehearsalUnavailable(
            "params_dtype (fp16) scales its loss, and meaningless losses overflow: the optimizer would skip its "
            "steps; rehearse with --precision bf16"
        )
    if run.optimizer.optimizer == "muon":
        raise RehearsalUnavailable("optimizer (muon) is not rehearsed; use adam or sgd")
    if impl.cuda_graph_impl == "transformer_engine":
        raise RehearsalUnavailable(
            f"cuda_graph_impl ({impl.cuda_graph_impl}) is captured by the training loop, which is not Megatron-LM's "
            "here; local, which layers capture themselves, and full_iteration are rehearsed"
        )
    if impl.cuda_graph_impl == "full_iteration" and not GRAPH_OF_THE_ITERATION(impl):
        raise RehearsalUnavailable(
            "cuda_graph_impl (full_iteration) is megatron-core's since 0.18; give --cuda-graph-impl local"
        )
    refuse_what_is_ignored(run, _NOT_REHEARSED_HERE, but=_REHEARSED_HERE)


@contextmanager
def _helped(run: RunSpec) -> Iterator[None]:
    """The replacements that a GPU needs: norms without Apex, objects of peers, balanced routing."""
    with ExitStack() as stack:
        if not run.implementation.te:
            stack.enter_context(norms_without_apex())
            stack.enter_context(permissive_core_attention())
            stack.enter_context(recomputation_without_te())
        stack.enter_context(objects_of_peers())
        for moe in limits_of(run.model).moes[:1]:
            stack.enter_context(balanced_routing(moe.topk, moe.num_experts))
        yield


def train(run: RunSpec, rank: int, steps: int, note: Callable[[str], None], architecture: Any = None) -> None:
    """``steps`` steps of ``rank``; ``note(name)`` after the model is built, the first forward, the first backward, the
    first optimizer step and each further step. Raises SpecError.

    As in Megatron-LM's ``training/training.py: setup_model_and_optimizer, train_step`` and in Bridge's.
    """
    if steps < 1:
        raise SpecError(f"steps ({steps}) must be at least 1; 2 shows the peak that counts")
    with fake_world(run.parallel, rank), loss_scales_restored(), _helped(run):
        _train(run, steps, note, architecture)


def _train(run: RunSpec, steps: int, note: Callable[[str], None], architecture: Any) -> None:
    from megatron.core import tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from bridge_memory.rehearsal.model_state import distributed, optimizer

    graphs = run.implementation.cuda_graph_impl != "none"
    # A graph captures separate random states (``arguments.py: validate_args`` asks for them).
    tensor_parallel.model_parallel_cuda_manual_seed(1234, **({"use_cudagraphable_rng": True} if graphs else {}))
    chunks = build_chunks(run, initialize=True, architecture=architecture)
    adapt(run, chunks)
    if getattr(chunks[0].config, "mtp_standalone", False):
        raise RehearsalUnavailable("MTP on a stage of its own asks its peers for shapes, which never answer")
    wrapped = [distributed(run, chunk, i) for i, chunk in enumerate(chunks)]
    adam = optimizer(run, wrapped)
    _configure(run, chunks[0].config, wrapped, adam)
    note("model built")
    batch = _batch(run)
    schedule = get_forward_backward_func()
    if run.implementation.cuda_graph_impl == "full_iteration":  # as training.py: train does
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        schedule = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=1)

    def passes() -> None:
        for ddp in wrapped:
            ddp.zero_grad_buffer()
        adam.zero_grad()
        schedule(
            forward_step_func=_forward_step,
            data_iterator=[_forever(batch) for _ in wrapped] if len(wrapped) > 1 else _forever(batch),
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=run.num_microbatches,
            seq_length=run.batch.seq_length,
            micro_batch_size=run.batch.micro_batch_size,
            forward_only=False,
        )

    with _before_the_first_backward(lambda: note("first forward")):
        passes()
    note("first backward")
    adam.step()
    note("first optimizer step")
    for step in range(2, steps + 1):
        passes()
        adam.step()
        note({2: "second step"}.get(step, f"step {step}"))


def _configure(run: RunSpec, config: Any, wrapped: list[Any], adam: Any) -> None:
    """Set what training loops set on the config after building model and optimizer (``training.py: train``)."""
    from megatron.core.distributed import finalize_model_grads

    config.deallocate_pipeline_outputs = run.implementation.deallocate_pipeline_outputs
    config.grad_scale_func = adam.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if len(wrapped) > 1:
        # Interleaved, both overlap point-to-point with computation (``arguments.py: validate_args``).
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False
    if run.data_parallel.overlap_grad_reduce:
        hooks = [ddp.no_sync for ddp in wrapped]
        config.no_sync_func = hooks if len(wrapped) > 1 else hooks[0]


@contextmanager
def _before_the_first_backward(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` once, before the first backward pass, after the warm-up microbatches."""
    from megatron.core.pipeline_parallel import schedules

    backward_step = schedules.backward_step
    waiting = [call]

    def step(*args: Any, **kwargs: Any) -> Any:
        if waiting:
            waiting.pop()()
        return backward_step(*args, **kwargs)

    with replaced(schedules, "backward_step", step):
        yield


def _forever(batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield batch


def _forward_step(iterator: Any, model: Any) -> tuple[Any, Any]:
    """Megatron-LM's ``pretrain_gpt.py: forward_step, loss_func`` without data and reports."""
    batch = next(iterator)
    mask = batch["loss_mask"]

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        value = torch.sum(output.view(-1).float() * mask.view(-1))
        tokens = mask.sum().to(torch.int)
        return value, tokens, {"lm loss": value.detach().clone()}

    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss


def _batch(run: RunSpec) -> dict[str, torch.Tensor]:
    shape = (run.batch.micro_batch_size, run.batch.seq_length // run.parallel.cp)
    ids = torch.randint(0, run.model.vocab_size, shape, device="cuda")
    positions = torch.arange(shape[1], device="cuda").expand(shape)
    mask = torch.ones(shape, device="cuda")
    return {"tokens": ids, "position_ids": positions, "labels": ids.clone(), "loss_mask": mask}
