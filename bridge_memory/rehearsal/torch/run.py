"""Rehearse an engine outside of megatron-core: three steps of a transformers model under torch's DDP or FSDP or
DeepSpeed's ZeRO in one process, with every storage of one rank counted in units of torch's allocator.

A fake process group of the full size replaces the other ranks; its collectives do nothing. DDP's reducer needs a real
group, of one rank. Large tensors are not computed (``uncomputed``), so that a model of any size fits this machine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from bridge_memory.engines.engine import Phase
from bridge_memory.engines.zero_1_and_2 import fullest_rank
from bridge_memory.rehearsal.torch.jobs import job_of, world
from bridge_memory.rehearsal.world import RehearsalUnavailable, first_line
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.parts import ALL_LINEAR

if TYPE_CHECKING:
    from bridge_memory.rehearsal.tracker import Tracker
    from bridge_memory.workspaces.caching_allocator import Reserved

_STEPS = 3


def require(run: RunSpec) -> None:
    """Raise RehearsalUnavailable, in one line, where a package of the engine is missing, and SpecError where an option
    of the run needs a GPU."""
    engine = run.data_parallel.engine
    needed = ["torch", "transformers", *(["deepspeed"] if run.data_parallel.of_deepspeed else [])]
    needed += ["peft"] if run.peft.freezes else []
    for package in needed:
        if find_spec(package) is None:
            raise RehearsalUnavailable(
                f"rehearse --engine {engine} runs the real {package}, which is not installed; install it: "
                f"pip install {package}"
            )
    if not run.implementation.torch_layers or run.implementation.own_layers:
        raise SpecError(
            f"transformer_impl ({run.implementation.transformer_impl}) is not what rehearse --engine {engine} runs; "
            "set it to transformers"
        )
    t = run.transformers
    if t.attn_implementation == "flash_attention_2":
        raise SpecError(
            "attn_implementation (flash_attention_2) runs on a GPU alone; set it to sdpa, which keeps the same"
        )
    if t.liger_kernel:
        raise SpecError(f"liger_kernel ({', '.join(t.liger_kernel)}) runs on a GPU alone; drop it")
    if run.optimizer.optimizer not in ("adam", "adamw", "sgd") or run.optimizer.paged:
        raise SpecError(
            f"optimizer ({run.optimizer.optimizer}) does not run without a GPU; rehearse with adamw or sgd"
        )
    for device in (run.deepspeed.offload_optimizer_device, run.deepspeed.offload_param_device):
        if device != "none":
            raise SpecError(
                f"offload to {device} cannot be told from the GPU here, where both are the CPU; drop it to rehearse"
            )
    if run.fsdp.offload_params:
        raise SpecError("fsdp_offload_params cannot be told from the GPU here, where both are the CPU; drop it")


def with_layers(config: Mapping[str, Any], number: int | None) -> dict[str, Any]:
    """A config.json with its first ``number`` layers; lists with an entry per layer are cut too. Raises SpecError."""
    out = dict(config)
    if number is None:
        return out
    key = next((k for k in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(out.get(k), int)), None)
    if key is None:
        raise SpecError("--num-layers: the config says its number of layers by no name that is known; drop it")
    whole = out[key]
    if not 1 <= number <= whole:
        raise SpecError(f"--num-layers ({number}) is not one of 1 to {whole}, the model's layers")
    for name, value in out.items():
        if isinstance(value, list) and len(value) == whole:
            out[name] = value[:number]
    out[key] = number
    return out


def as_on_cpu(run: RunSpec) -> RunSpec:
    """Without the workspaces of CUDA's libraries, which the CPU does not have."""
    return run.with_(implementation=replace(run.implementation, cublas_workspace_bytes=0))


def differences(run: RunSpec) -> list[str]:
    """What differs in the rehearsal from the job of ``run``, a sentence each."""
    found = ["without the workspaces of CUDA's libraries, which the CPU does not have"]
    if run.model.has_experts:
        found.append("routers send every expert as many tokens as any other")
    return found


class Rehearsed(NamedTuple):
    """The peak of ``rank`` in each phase, in bytes, and what torch's allocator reserves, where the engine's streams are
    known."""

    rank: int
    phases: dict[Phase, int]
    reserved: Reserved | None = None


def rehearse_engine(run: RunSpec, config: Mapping[str, Any], *, rank: int | None = None) -> Rehearsed:
    """Rehearse three steps of ``run``, whose model is ``config`` (a config.json).

    ``rank``: the one with the most bytes by default. Raises SpecError, or RehearsalUnavailable where a package is
    missing.
    """
    require(run)
    engine = run.data_parallel.engine
    if rank is None:
        rank = fullest_rank(run) if engine in ("zero1", "zero2") else 0
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return _rehearsed(run, config, rank)
    except SpecError:
        raise
    except (RuntimeError, ValueError, NotImplementedError, AssertionError, KeyError, ImportError) as error:
        raise RehearsalUnavailable(
            f"{run.data_parallel.engine_title} does not run this without a GPU: {first_line(error)[:300]}"
        ) from error
    finally:
        logging.disable(level)


def _rehearsed(run: RunSpec, config: Mapping[str, Any], rank: int) -> Rehearsed:
    import torch

    from bridge_memory.rehearsal.torch.modules import as_on_cuda
    from bridge_memory.rehearsal.torch.reserved import Follower, why_not
    from bridge_memory.rehearsal.tracker import Tracker
    from bridge_memory.rehearsal.uncomputed import Uncomputed
    from bridge_memory.tapes.parameters import ALLOCATION_UNIT

    engine = run.data_parallel.engine
    with ExitStack() as stack:
        stack.enter_context(world(run, rank))
        stack.enter_context(as_on_cuda(padded=run.transformers.attention_mask == "padded"))
        stack.enter_context(Uncomputed())
        tracker = Tracker(device="cpu", unit=ALLOCATION_UNIT)
        stack.enter_context(tracker.following(torch.nn.Module()))
        model = _model(run, config)
        tracker.reset_peak()
        job = job_of(run, model)
        del model
        wrapping = tracker.peak(1).bytes
        inputs = _inputs(run)
        found = {Phase.BUILDING: wrapping}
        follower = Follower(tracker) if why_not(run) is None else None
        for step in range(_STEPS):
            most = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
            for number in range(run.num_microbatches):
                last = number == run.num_microbatches - 1
                with job.microbatch(last=last):
                    tracker.reset_peak()
                    with _autocast(run):
                        outputs = job.forward(inputs)
                        loss = outputs.loss
                        if not run.transformers.keeps_outputs:
                            del outputs
                    most[Phase.FORWARD] = max(most[Phase.FORWARD], tracker.peak(1).bytes)
                    tracker.reset_peak()
                    tracker.in_backward = True
                    job.backward(loss)
                    tracker.in_backward = False
                    del loss
                    most[Phase.BACKWARD] = max(most[Phase.BACKWARD], tracker.peak(1).bytes)
                if not last:
                    job.go_on()
            tracker.reset_peak()
            job.step()
            found |= {Phase.STEP: tracker.peak(1).bytes, **most}
            if step == 0:
                found |= {
                    Phase.FIRST_FORWARD: most[Phase.FORWARD], Phase.FIRST_BACKWARD: most[Phase.BACKWARD]
                }  # fmt: skip
            job.zero_grad()
        reserved = follower.done(getattr(job, "model", None)) if follower is not None else None
        tracker.reset_peak()
        with _flat_to_host(tracker) if engine == "fsdp1" else _to_host():
            job.save()
        found[Phase.SAVING] = tracker.peak(1).bytes
        return Rehearsed(rank, found, reserved)


@contextmanager
def _flat_to_host(tracker: Tracker) -> Iterator[None]:
    """Do not count FSDP1's flat parameter while it is offloaded to host memory, nor the clones of its tensors there
    (``FlatParamHandle.to_cpu``; ``_state_dict_utils.py: _full_post_state_dict_hook``)."""
    import torch
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    @contextmanager
    def to_cpu(handle: Any) -> Iterator[None]:
        storage = handle._get_padded_unsharded_flat_param().untyped_storage()
        tracker.resized(storage, 0)
        try:
            yield
        finally:
            tracker.resized(storage, storage.nbytes())

    with patch.object(FlatParamHandle, "to_cpu", to_cpu), patch.object(torch.Tensor, "clone", lambda x, **_: x):
        yield


@contextmanager
def _to_host() -> Iterator[None]:
    """Do not count copies to host memory: they go to the meta device, since the CPU is the GPU here."""
    import torch
    from torch.distributed.tensor import DTensor

    to = torch.Tensor.to

    def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        place = args[0] if args else kwargs.get("device")
        alone = len(args) + len(kwargs) == 1 and isinstance(place, torch.device | str)
        if alone and str(place) == "cpu" and not isinstance(tensor, DTensor):
            return to(tensor, "meta")
        return to(tensor, *args, **kwargs)

    with patch.object(torch.Tensor, "cpu", lambda x, *a, **k: to(x, "meta")), patch.object(torch.Tensor, "to", moved):
        yield


def _model(run: RunSpec, config: Mapping[str, Any]) -> Any:

    from bridge_memory.rehearsal.torch.modules import DTYPES, build, layer_in_autocast

    t = run.transformers
    given = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype", "quantization_config", "auto_map")}
    model = build(
        given, attention=t.attn_implementation, dtype=DTYPES[run.precision.params_dtype], device="cpu"
    )
    if t.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": t.reentrant})
    if run.peft.freezes:
        peft = import_module("peft")
        asked = run.peft.target_modules
        targets = ALL_LINEAR if ALL_LINEAR in asked else list(asked)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=run.peft.dim, target_modules=targets,
                              lora_dropout=t.lora_dropout),
            autocast_adapter_dtype=t.autocast_adapter_dtype,
        )  # fmt: skip
    if t.autocast:
        from transformers.modeling_layers import GradientCheckpointingLayer

        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                layer_in_autocast(module, DTYPES[t.autocast])
    return model


def _autocast(run: RunSpec) -> AbstractContextManager[Any]:
    if not run.transformers.autocast:
        return nullcontext()
    from bridge_memory.rehearsal.torch.modules import DTYPES, AutocastOnMeta

    return AutocastOnMeta(DTYPES[run.transformers.autocast])


def _inputs(run: RunSpec) -> dict[str, Any]:
    import torch

    s, b = run.batch.rows
    ids = torch.zeros(b, s, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone(), "use_cache": run.transformers.use_cache}
    if run.transformers.attention_mask != "none":
        inputs["attention_mask"] = torch.ones(b, s, dtype=torch.long)
    return inputs
