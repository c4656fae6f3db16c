"""The real engine of a run on one process: transformers' model under torch's DDP and FSDP or DeepSpeed's ZeRO, three
steps, every storage of one rank counted as torch's allocator would round it.

A fake process group of the full size stands for the other ranks: its collectives do nothing (DDP's reducer asks for a
real group, of one). Nothing large is computed (``uncomputed``), so that memory and time of this machine hold a model of
any size.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

from bridge_memory.engines.engine import Phase
from bridge_memory.engines.zero_1_and_2 import fullest_rank
from bridge_memory.rehearse.world import RehearsalUnavailable, first_line
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.parts import ENGINE_OPTIONS

_STEPS = 3


def _of_deepspeed(run: RunSpec) -> bool:
    return ENGINE_OPTIONS.get(run.data_parallel.engine) == "deepspeed"


def require(run: RunSpec) -> None:
    """Raise RehearsalUnavailable, in one line, where a package of the engine is missing; SpecError where a run's option
    needs a GPU."""
    engine = run.data_parallel.engine
    needed = ["torch", "transformers", *(["deepspeed"] if _of_deepspeed(run) else [])]
    needed += ["peft"] if run.peft.freezes else []
    for package in needed:
        if find_spec(package) is None:
            raise RehearsalUnavailable(
                f"rehearse --engine {engine} runs the real {package}, which is not installed; install it: "
                f"pip install {package}"
            )
    if not run.implementation.hugging_face:
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
    """A config.json's first so many layers; lists with an entry a layer are cut too. Raises SpecError."""
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


def rehearse_engine(run: RunSpec, config: Mapping[str, Any], *, rank: int | None = None) -> dict[Phase, int]:
    """The most bytes of one rank in each phase of three steps of ``run``, whose model ``config`` (a config.json) is.

    ``rank``: the fullest if not said.

    Raises SpecError, or RehearsalUnavailable where something is missing here.
    """
    require(run)
    engine = run.data_parallel.engine
    if rank is None:
        rank = fullest_rank(run) if engine in ("zero1", "zero2") else 0
    if _of_deepspeed(run):
        os.environ.update(
            DS_ACCELERATOR="cpu", LOCAL_RANK="0", RANK=str(rank), WORLD_SIZE=str(run.parallel.world_size)
        )
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


def _rehearsed(run: RunSpec, config: Mapping[str, Any], rank: int) -> dict[Phase, int]:
    import torch

    from bridge_memory.inventory.parameters import ALLOCATION_UNIT
    from bridge_memory.rehearse.hugging_face import as_on_cuda
    from bridge_memory.rehearse.tracker import Tracker
    from bridge_memory.rehearse.uncomputed import Uncomputed

    engine = run.data_parallel.engine
    with ExitStack() as stack:
        stack.enter_context(world(engine, run.parallel.world_size, rank))
        stack.enter_context(as_on_cuda(padded=run.transformers.attention_mask == "padded"))
        stack.enter_context(Uncomputed())
        tracker = Tracker(device="cpu", unit=ALLOCATION_UNIT)
        stack.enter_context(tracker.following(torch.nn.Module()))
        model = _model(run, config)
        tracker.reset_peak()
        job = (_DeepSpeed if _of_deepspeed(run) else _Torch)(run, model)
        del model
        wrapping = tracker.peak(1).bytes
        inputs = _inputs(run)
        found = {Phase.BUILDING: wrapping}
        for step in range(_STEPS):
            most = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
            for number in range(run.num_microbatches):
                with job.microbatch(last=number == run.num_microbatches - 1):
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
            tracker.reset_peak()
            job.step()
            found |= {Phase.STEP: tracker.peak(1).bytes, **most}
            if step == 0:
                found |= {
                    Phase.FIRST_FORWARD: most[Phase.FORWARD], Phase.FIRST_BACKWARD: most[Phase.BACKWARD]
                }  # fmt: skip
            job.zero_grad()
        if engine != "fsdp1":  # whose flat parameters take no tensors of another device in their place
            tracker.reset_peak()
            with _to_host():
                job.save()
            found[Phase.SAVING] = tracker.peak(1).bytes
        return found


@contextmanager
def _to_host() -> Iterator[None]:
    """What is copied to host memory is nowhere here, where everything is in it."""
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


@contextmanager
def world(engine: str, size: int, rank: int = 0) -> Iterator[None]:
    """A process group of the job's size that does nothing; for DDP a real one of this process alone."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RehearsalUnavailable(
            "torch.distributed is already initialised in this process; run rehearse in a process of its own"
        )
    if engine == "ddp":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _model(run: RunSpec, config: Mapping[str, Any]) -> Any:
    import torch

    from bridge_memory.rehearse.hugging_face import DTYPES, build, in_autocast

    t = run.transformers
    given = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype", "quantization_config", "auto_map")}
    model = build(
        given, attention=t.attn_implementation, dtype=DTYPES[run.precision.params_dtype], device="cpu"
    )
    if t.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": t.reentrant})
    if run.peft.freezes:
        peft = import_module("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=run.peft.dim, target_modules=list(run.peft.target_modules),
                              lora_dropout=t.lora_dropout),
            autocast_adapter_dtype=t.autocast_adapter_dtype,
        )  # fmt: skip
    if t.autocast:
        from transformers.modeling_layers import GradientCheckpointingLayer

        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.forward = in_autocast(module.forward, getattr(torch, _LONG[t.autocast]))
    return model


_LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _autocast(run: RunSpec) -> AbstractContextManager[Any]:
    if not run.transformers.autocast:
        return nullcontext()
    from bridge_memory.rehearse.hugging_face import DTYPES, AutocastOnMeta

    return AutocastOnMeta(DTYPES[run.transformers.autocast])


def _inputs(run: RunSpec) -> dict[str, Any]:
    import torch

    s, b = run.batch.rows
    ids = torch.zeros(b, s, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone(), "use_cache": run.transformers.use_cache}
    if run.transformers.attention_mask != "none":
        inputs["attention_mask"] = torch.ones(b, s, dtype=torch.long)
    return inputs


class _Torch:
    """DDP, FSDP1 and FSDP2 of torch, and a model by itself."""

    def __init__(self, run: RunSpec, model: Any) -> None:
        import torch

        self.run = run
        engine = run.data_parallel.engine
        wrap = {"single": lambda m: m, "ddp": self._ddp, "fsdp1": self._fsdp1, "fsdp2": self._fsdp2}[engine]
        self.model = wrap(model)
        o = run.optimizer
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if o.optimizer == "sgd":
            self.optimizer: Any = torch.optim.SGD(trained, lr=1e-9, momentum=o.sgd_momentum)
        else:
            how = {"foreach": o.torch_implementation == "foreach", "fused": o.torch_implementation == "fused"}
            self.optimizer = torch.optim.AdamW(trained, lr=1e-9, **how)

    def _ddp(self, model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        d = self.run.ddp
        return DistributedDataParallel(
            model, bucket_cap_mb=d.bucket_cap_mb, gradient_as_bucket_view=d.gradient_as_bucket_view,
            static_graph=d.static_graph, find_unused_parameters=d.find_unused_parameters,
        )

    def _precision(self, kind: Any) -> Any:
        f = self.run.fsdp
        if not (f.param_dtype or f.reduce_dtype):
            return None
        import torch

        named = {"param_dtype": f.param_dtype, "reduce_dtype": f.reduce_dtype}
        return kind(**{name: getattr(torch, _LONG[dtype]) for name, dtype in named.items() if dtype})

    def _layers(self, model: Any) -> list[Any]:
        """Decoder layers, which the Trainer's and accelerate's policy wraps."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]

    def _fsdp2(self, model: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        f, world = self.run.fsdp, self.run.parallel.world_size
        given: dict[str, Any] = {"reshard_after_forward": f.reshard_after_forward}
        degree = f.shard_degree or world
        names = {"mesh_dim_names": ("replicate", "shard")} if degree < world else {}
        given["mesh"] = init_device_mesh("cpu", (world // degree, degree) if degree < world else (world,), **names)
        policy = self._precision(MixedPrecisionPolicy)
        if policy is not None:
            given["mp_policy"] = policy
        if f.auto_wrap_policy != "NO_WRAP":
            if f.auto_wrap_policy == "torchtitan":
                fully_shard(model.get_input_embeddings(), **given)
            layers = self._layers(model)
            for layer in layers:
                fully_shard(layer, **given)
            if f.auto_wrap_policy == "torchtitan":
                fully_shard([model.base_model.norm, model.get_output_embeddings()], **given)
        return fully_shard(model, **given)

    def _fsdp1(self, model: Any) -> Any:
        import torch
        from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        f = self.run.fsdp
        given: dict[str, Any] = {
            "sharding_strategy": ShardingStrategy[f.sharding_strategy], "use_orig_params": f.use_orig_params,
            "forward_prefetch": f.forward_prefetch, "limit_all_gathers": f.limit_all_gathers,
            "backward_prefetch": getattr(BackwardPrefetch, f.backward_prefetch, None),
            "device_id": torch.device("cpu"), "mixed_precision": self._precision(MixedPrecision),
        }  # fmt: skip
        if f.auto_wrap_policy != "NO_WRAP":
            kinds = {type(layer) for layer in self._layers(model)}
            given["auto_wrap_policy"] = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
        return FullyShardedDataParallel(model, **given)

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        engine, d = self.run.data_parallel.engine, self.run.data_parallel
        if last or d.sync_each_batch or engine == "single":
            if engine == "fsdp2" and not d.sync_each_batch:
                self.model.set_requires_gradient_sync(True)
            yield
        elif engine == "fsdp2":
            self.model.set_requires_gradient_sync(False)
            yield
        else:
            with self.model.no_sync():
                yield

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        return self.model(**inputs)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def save(self) -> None:
        """The full state dict, as accelerate asks for it (``utils/fsdp_utils.py: save_fsdp_model``)."""
        engine = self.run.data_parallel.engine
        if engine == "fsdp2":
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        else:
            self.model.state_dict()


class _DeepSpeed:
    """DeepSpeed's engine."""

    def __init__(self, run: RunSpec, model: Any) -> None:
        import torch

        deepspeed = import_module("deepspeed")

        # Its collectives in shared memory are compiled where they are asked for.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        self.run = run
        o = run.optimizer
        trained = [p for p in model.parameters() if p.requires_grad]
        if o.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(trained, lr=1e-9, momentum=o.sgd_momentum)
        else:
            how = {"foreach": o.torch_implementation == "foreach", "fused": o.torch_implementation == "fused"}
            optimizer = torch.optim.AdamW(trained, lr=1e-9, **how)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(run))

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        yield

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        return self.engine(**inputs)

    def backward(self, loss: Any) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        """DeepSpeed's step has done it."""

    def save(self) -> None:
        """``save_16bit_model``, less the writing."""
        if self.run.deepspeed.stage3_gather_16bit_weights_on_model_save:
            self.engine._zero3_consolidated_16bit_state_dict()
        else:
            self.engine.module.state_dict()


def deepspeed_config(run: RunSpec) -> dict[str, Any]:
    """DeepSpeed's JSON of a run."""
    z, engine = run.deepspeed, run.data_parallel.engine
    zero: dict[str, Any] = {
        "stage": int(engine[-1]), "reduce_bucket_size": z.reduce_bucket_size,
        "allgather_bucket_size": z.allgather_bucket_size, "contiguous_gradients": z.contiguous_gradients,
        "reduce_scatter": z.reduce_scatter, "round_robin_gradients": z.round_robin_gradients,
    }  # fmt: skip
    if z.overlap_comm is not None:
        zero["overlap_comm"] = z.overlap_comm
    if engine == "zero3":
        zero |= {
            "stage3_prefetch_bucket_size": z.stage3_prefetch_bucket_size,
            "stage3_param_persistence_threshold": z.stage3_param_persistence_threshold,
            "stage3_max_live_parameters": z.stage3_max_live_parameters,
            "stage3_max_reuse_distance": z.stage3_max_reuse_distance, "sub_group_size": z.sub_group_size,
            "stage3_gather_16bit_weights_on_model_save": z.stage3_gather_16bit_weights_on_model_save,
        }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.batch.micro_batch_size,
        "gradient_accumulation_steps": run.num_microbatches, "zero_optimization": zero,
        "zero_allow_untested_optimizer": True, "gradient_clipping": run.optimizer.clip_grad,
    }  # fmt: skip
    dtype = run.precision.params_dtype
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "bf16":
        config["bf16"] |= {
            "bf16_master_weights_and_grads": z.bf16_master_weights_and_grads,
            "bf16_optimizer_states": z.bf16_optimizer_states,
        }
    if z.communication_data_type:
        config["communication_data_type"] = z.communication_data_type
    if z.grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": z.grad_accum_dtype}
    return config

