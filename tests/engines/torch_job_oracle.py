"""torch's engines and DeepSpeed's through the phases of a job beside the step, as the Trainer and accelerate run them:
every storage of one rank that is not in host memory.

The CPU stands for the GPU. What is in host memory are tensors that the tracker does not know; where a library moves one
to the GPU, which does nothing here, it is copied.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from real_engines import BATCH, CONFIG, SEQ, PlaceTracker, world
from torch.utils._python_dispatch import _disable_current_modes

BUCKET = 500_000
#: Peaks, and what is alive after a phase, by name.
Found = dict[str, int]


class HostTensor:
    """A tensor in host memory, of which ``to`` makes a copy on the GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def detach(self) -> HostTensor:
        return self

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty_like(self.tensor)


def a_model(dtype: str, config: dict[str, Any] | None = None) -> Any:
    settings = transformers.LlamaConfig(**{**CONFIG, **(config or {})})
    settings._attn_implementation = "eager"
    return transformers.LlamaForCausalLM(settings).to(getattr(torch, dtype))


def to_the_gpu(parameters: Any, *_: Any) -> None:
    for p in parameters:
        if not p.is_meta:
            p.data = p.data.clone()


class Job:
    """One rank of an engine."""

    def __init__(self, model: Any, tracker: PlaceTracker) -> None:
        self.model, self.tracker, self.found = model, tracker, Found()
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.ignore(tensor)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.tracker.reset_peak()
        before = self.tracker.live_bytes
        yield
        self.found[name] = self.tracker.peak(1).bytes
        self.found[f"after {name}"] = self.tracker.live_bytes
        self.found[f"before {name}"] = before

    def optimizer(self) -> torch.optim.Optimizer:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-9, foreach=True)

    def step(self, optimizer: Any) -> None:
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
        self.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()
        with self.phase("evaluation"), torch.no_grad():
            tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
            out = self.model(input_ids=tokens, labels=tokens, use_cache=False)
            del out, tokens
        self.model.train()


@contextmanager
def job(backend: str, size: int, dtype: str, config: dict[str, Any] | None = None) -> Iterator[Job]:
    with world(backend, size):
        model = a_model(dtype, config)
        tracker = PlaceTracker()
        with tracker.following(torch.nn.Module()):
            yield Job(model, tracker)


def _replicated(model: Any) -> Any:
    """Without the first rank's weights, whose flat tensors gloo's thread may hold for longer than NCCL's."""
    return torch.nn.parallel.DistributedDataParallel(model, init_sync=False)


def ddp(dtype: str = "float32", config: dict[str, Any] | None = None) -> Found:
    with job("gloo", 1, dtype, config) as one:
        with one.phase("build"):
            to_the_gpu(one.model.parameters())
            one.model = _replicated(one.model)
        optimizer = one.optimizer()
        one.step(optimizer)
        one.evaluate()
        with one.phase("save"):
            one.model.state_dict(), optimizer.state_dict()
        loaded = one.found
    with job("gloo", 1, dtype, config) as one:
        to_the_gpu(one.model.parameters())
        one.model = _replicated(one.model)
        optimizer = one.optimizer()
        with one.phase("resume"):
            optimizer.load_state_dict(_states(optimizer, one.tracker, host=False))
        return {**loaded, **{k: v for k, v in one.found.items() if "resume" in k}}


def ddp_of_frozen() -> Found:
    """Of a model of which only the last norm trains."""
    with job("gloo", 1, "float32") as one:
        for name, p in one.model.named_parameters():
            p.requires_grad_(name == "model.norm.weight")
        with one.phase("build"):
            to_the_gpu(one.model.parameters())
            one.model = torch.nn.parallel.DistributedDataParallel(one.model)
        return one.found


def _states(optimizer: Any, tracker: PlaceTracker, *, host: bool) -> dict[str, Any]:
    """A loaded state dict: on the GPU, or in host memory (in another dtype, so that it is copied)."""
    state = {}
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        with _disable_current_modes() if host else nullcontext():
            dtype = torch.float64 if host else p.dtype
            own = {name: torch.zeros(p.shape, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        if host:
            for tensor in own.values():
                tracker.ignore(tensor)
        state[i] = {"step": torch.tensor(1.0), **own}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _shard(model: Any, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp2(ranks: int, *, efficient: bool, dtype: str = "float32", config: dict[str, Any] | None = None) -> Found:
    """``efficient``: accelerate's cpu_ram_efficient_loading, on a model on the meta device."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    with job("fake", ranks, dtype, config) as one:
        with one.phase("build"):
            if efficient:
                from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

                whole = {name: HostTensor(p) for name, p in one.model.state_dict().items()}
                frequencies = one.model.model.rotary_emb.inv_freq
                one.model = one.model.to("meta")
                one.model.tie_weights()
                _shard(one.model, ranks)
                fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=True), one.model, whole)
                one.model.model.rotary_emb.inv_freq = frequencies
                one.model.tie_weights()
            else:
                with patch.object(_fsdp_init, "_move_states_to_device", to_the_gpu):
                    _shard(one.model, ranks)
        optimizer = one.optimizer()
        with one.phase("states"):
            states = get_optimizer_state_dict(one.model, optimizer)
        # In host memory by now (``offload_to_cpu``): in another dtype, so that loading copies.
        hosted = {"state": {name: {
            key: value if key == "step" else _elsewhere(value, one.tracker) for key, value in of.items()
        } for name, of in states["state"].items()}, "param_groups": states["param_groups"]}
        del states
        with one.phase("resume"):
            set_optimizer_state_dict(one.model, optimizer, hosted)
        del hosted
        one.step(optimizer)
        one.evaluate()
        return one.found


def _elsewhere(value: Any, tracker: PlaceTracker) -> Any:
    """``value`` in host memory."""
    with _disable_current_modes():
        moved = value.double()
    tracker.ignore(moved._local_tensor)
    return moved


def fsdp1(ranks: int, *, dtype: str = "float32", original: bool = False, config: dict[str, Any] | None = None) -> Found:
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
        _init_utils,
    )
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from bridge_memory.rehearsal.torch.run import _flat_to_host

    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    full = (
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )
    with job("fake", ranks, dtype, config) as one:
        with one.phase("build"), patch.object(_init_utils, "_move_states_to_device", to_the_gpu), patch.object(
            _init_utils, "_check_module_states_for_sync_module_states", lambda states: None
        ):
            one.model = FullyShardedDataParallel(
                one.model, auto_wrap_policy=layers, device_id=torch.device("cpu"), sync_module_states=True,
                use_orig_params=original,
            )
        optimizer = one.optimizer()
        one.step(optimizer)
        with one.phase("save"), _flat_to_host(one.tracker), FullyShardedDataParallel.state_dict_type(one.model, *full):
            one.model.state_dict()
        if original:  # what other ranks have of the optimizer's states is not known here
            return one.found
        shapes = {
            name: p.shape for name, p in a_model(dtype, config).named_parameters()
        }
        with one.phase("save optimizer"), patch.object(torch.Tensor, "cpu", lambda x, *a, **k: x.to("meta")), \
                patch.object(torch.distributed, "all_gather_object", _from_every_rank), \
                FullyShardedDataParallel.state_dict_type(one.model, *full):
            states = FullyShardedDataParallel.optim_state_dict(one.model, optimizer)
        one.found["states"] = sum(
            v.numel() * v.element_size() for of in optimizer.state.values() for v in of.values() if v.dim()
        )
        groups = states["param_groups"]
        del states
        optimizer.state.clear()

        def read(shape: Any) -> dict[str, Any]:
            each = torch.empty(shape, dtype=getattr(torch, dtype), device="meta").as_subclass(FromHost)
            return {"exp_avg": each, "exp_avg_sq": each.clone().as_subclass(FromHost), "step": torch.tensor(1.0)}

        loaded = {"state": {name: read(shape) for name, shape in shapes.items()}, "param_groups": groups}
        with one.phase("resume"), patch.object(torch.Tensor, "cpu", lambda x, *a, **k: x.to("meta")), \
                FullyShardedDataParallel.state_dict_type(one.model, *full):
            flat = FullyShardedDataParallel.optim_state_dict_to_load(one.model, optimizer, loaded)
            optimizer.load_state_dict(flat)
        del flat, loaded
        one.evaluate()
        return one.found


def _from_every_rank(found: list[Any], own: Any, group: Any = None) -> None:
    found[:] = [own] * len(found)


class FromHost(torch.Tensor):
    """A tensor on the meta device that stands for host memory: moved to the GPU, it is allocated."""

    def to(self, *_: Any, **__: Any) -> torch.Tensor:  # type: ignore[override]
        return torch.zeros(self.shape, dtype=self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def zero(stage: int, *, ranks: int = 2, rank: int = 0, dtype: str = "bfloat16", extra: dict[str, Any] | None = None,
         **options: Any) -> Found:  # fmt: skip
    """In a process of its own, since deepspeed keeps its groups."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0", RANK=str(rank), WORLD_SIZE=str(ranks))
    import deepspeed
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, _load_state_dict_into_zero3_model

    logging.disable(logging.WARNING)
    # Its collectives in shared memory are compiled where they are asked for.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET, **options,
        },
        "zero_allow_untested_optimizer": True, "gradient_clipping": 1.0, **(extra or {}),
    }
    with job("fake", ranks, dtype) as one:
        if stage == 3:
            kept = HfDeepSpeedConfig(config)
            with _disable_current_modes():
                whole = dict(one.model.state_dict())
            with one.phase("init"), deepspeed.zero.Init(config_dict_or_path=config):
                one.model = transformers.LlamaForCausalLM(one.model.config)
            with one.phase("load"):
                _load_state_dict_into_zero3_model(one.model, whole)
            del kept
        else:
            with one.phase("moved"):
                to_the_gpu(one.model.parameters())
        with one.phase("build"):
            optimizer = one.optimizer()
            engine, *_ = deepspeed.initialize(model=one.model, optimizer=optimizer, config=config)
        with one.phase("resume"):
            # What ``load_checkpoint`` gives to it, which it moves.
            inner = engine.optimizer.optimizer
            if stage == 3:
                engine.optimizer._set_fp32_optimizer_param_groups()
            inner.load_state_dict(_states(inner, one.tracker, host=True))
            if stage == 3:
                engine.optimizer._clear_fp32_optimizer_param_groups()
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
        for _ in range(3):
            engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
            engine.step()
        one.model = engine
        one.evaluate()
        return one.found
