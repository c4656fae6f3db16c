"""A transformers model under the engine of a RunSpec: torch's DDP, FSDP1 and FSDP2, or DeepSpeed's ZeRO.

Used by the rehearsal, which counts storages in host memory, and by measurements on a GPU.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from bridge_memory.rehearsal.world import require_no_process_group
from bridge_memory.spec import RunSpec


@contextmanager
def world(run: RunSpec, rank: int = 0, *, device: str = "cpu") -> Iterator[None]:
    """A fake process group of the job's size; for DDP a real one of this process only. Raises RehearsalUnavailable
    where the process has a process group already."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    require_no_process_group()
    size = run.parallel.world_size
    if run.data_parallel.of_deepspeed:
        os.environ.update(LOCAL_RANK="0", RANK=str(rank), WORLD_SIZE=str(size))
        if device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
    if run.data_parallel.engine == "ddp":
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def job_of(run: RunSpec, model: Any, *, device: str = "cpu") -> _Torch | _DeepSpeed:
    """``model`` under the engine of ``run``. Call inside ``world``."""
    return _DeepSpeed(run, model) if run.data_parallel.of_deepspeed else _Torch(run, model, device)


def optimizer_of(run: RunSpec, model: Any) -> Any:
    """torch's optimizer of ``OptimizerSpec`` over the trained parameters; its learning rate is negligible."""
    import torch

    o = run.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    if o.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=1e-9, momentum=o.sgd_momentum)
    how = {"foreach": o.torch_implementation == "foreach", "fused": o.torch_implementation == "fused"}
    return torch.optim.AdamW(trained, lr=1e-9, **how)


class _Torch:
    """torch's DDP, FSDP1 or FSDP2, or the model without an engine."""

    def __init__(self, run: RunSpec, model: Any, device: str) -> None:
        self.run, self.device = run, device
        engine = run.data_parallel.engine
        wrap = {"single": lambda m: m, "ddp": self._ddp, "fsdp1": self._fsdp1, "fsdp2": self._fsdp2}[engine]
        self.model = wrap(model)
        self.optimizer = optimizer_of(run, self.model)

    def _ddp(self, model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        d = self.run.ddp
        return DistributedDataParallel(
            model, bucket_cap_mb=d.bucket_cap_mb, gradient_as_bucket_view=d.gradient_as_bucket_view,
            static_graph=d.static_graph, find_unused_parameters=d.find_unused_parameters,
        )

    def _precision(self, kind: Any) -> Any:
        from bridge_memory.rehearsal.torch.modules import DTYPES

        f = self.run.fsdp
        if not (f.param_dtype or f.reduce_dtype):
            return None
        named = {"param_dtype": f.param_dtype, "reduce_dtype": f.reduce_dtype}
        return kind(**{name: DTYPES[dtype] for name, dtype in named.items() if dtype})

    def _layers(self, model: Any) -> list[Any]:
        """Decoder layers, which the wrap policy of Trainer and accelerate wraps."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]

    def _fsdp2(self, model: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        f, world = self.run.fsdp, self.run.parallel.world_size
        given: dict[str, Any] = {"reshard_after_forward": f.reshard_after_forward}
        degree = f.shard_degree or world
        names = {"mesh_dim_names": ("replicate", "shard")} if degree < world else {}
        sizes = (world // degree, degree) if degree < world else (world,)
        given["mesh"] = init_device_mesh(self.device, sizes, **names)
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
        from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy

        f = self.run.fsdp
        given: dict[str, Any] = {
            "sharding_strategy": ShardingStrategy[f.sharding_strategy], "use_orig_params": f.use_orig_params,
            "forward_prefetch": f.forward_prefetch, "limit_all_gathers": f.limit_all_gathers,
            "backward_prefetch": getattr(BackwardPrefetch, f.backward_prefetch, None),
            "device_id": torch.device("cuda:0" if self.device == "cuda" else self.device),
            "mixed_precision": self._precision(MixedPrecision),
        }  # fmt: skip
        if f.auto_wrap_policy != "NO_WRAP":
            kinds = {type(layer) for layer in self._layers(model)}
            layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
            given["auto_wrap_policy"] = layers
            if self.run.peft.freezes:  # peft ``utils/other.py: fsdp_auto_wrap_policy``, which the Trainer sets
                adapters = functools.partial(lambda_auto_wrap_policy, lambda_fn=_trains_alone)
                given["auto_wrap_policy"] = functools.partial(_or_policy, policies=[adapters, layers])
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

    def parameters(self) -> Iterator[Any]:
        yield from self.model.parameters()

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        return self.model(**inputs)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def go_on(self) -> None:
        """Between microbatches: nothing to do."""

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def save(self) -> None:
        """Gather the full state dict as accelerate does (``utils/fsdp_utils.py: save_fsdp_model``)."""
        engine = self.run.data_parallel.engine
        if engine == "fsdp2":
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        elif engine == "fsdp1":
            from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

            kept = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, kept):
                self.model.state_dict()
        else:
            self.model.state_dict()


def _trains_alone(module: Any) -> bool:
    """Whether this is a trained module without children: a linear of an adapter."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.requires_grad and not any(True for _ in module.children())


class _DeepSpeed:
    """DeepSpeed's engine."""

    def __init__(self, run: RunSpec, model: Any) -> None:
        deepspeed = import_module("deepspeed")

        # Collectives in shared memory would be compiled on first use.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        here = deepspeed.accelerator.get_accelerator()
        if here.device_name() == "cpu":  # large tensors are not computed
            here.is_fp16_supported = lambda: True
        self.run = run
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer_of(run, model), config=deepspeed_config(run)
        )

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        yield

    def parameters(self) -> Iterator[Any]:
        yield from self.engine.parameters()

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        return self.engine(**inputs)

    def backward(self, loss: Any) -> None:
        self.engine.backward(loss)

    def go_on(self) -> None:
        """Between microbatches: DeepSpeed counts them by ``step`` (``engine.py:
        is_gradient_accumulation_boundary``)."""
        self.engine.step()

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        """Nothing: DeepSpeed's ``step`` includes it."""

    def save(self) -> None:
        """``save_16bit_model`` without writing the file."""
        if self.run.deepspeed.stage3_gather_16bit_weights_on_model_save:
            self.engine._zero3_consolidated_16bit_state_dict()
        else:
            self.engine.module.state_dict()


def deepspeed_config(run: RunSpec) -> dict[str, Any]:
    """The DeepSpeed configuration (JSON) of a run."""
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

