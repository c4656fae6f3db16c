"""The real engines on CPU, every storage counted: a small Llama of transformers for three steps.

One process: collectives of a fake process group do nothing (DDP's reducer wants real ones, of a group of one), so that
what is allocated is what one rank of the world allocates. Storages are rounded up as the CUDA allocator rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from bridge_memory.rehearsal.tracker import Tracker  # noqa: E402
from bridge_memory.tapes.parameters import ALLOCATION_UNIT  # noqa: E402

LAYERS, SEQ, BATCH = 4, 64, 2
#: Sizes whose shards over two or four ranks are whole blocks of the allocator.
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip


@dataclass
class Measured:
    """Bytes of one rank."""

    #: After wrapping; after the third step; after ``zero_grad``.
    built: int = 0
    after_step: int = 0
    zeroed: int = 0
    #: The most in each pass of the third step, and in the optimizer's step.
    forward: int = 0
    backward: int = 0
    step: int = 0
    #: Of the layers.
    layers_forward: list[int] = field(default_factory=list)
    layers_backward: list[int] = field(default_factory=list)


class PlaceTracker(Tracker):
    """Knows the most in every layer."""

    def __init__(self) -> None:
        super().__init__(device="cpu", unit=ALLOCATION_UNIT)
        self.in_layers: dict[int, int] = {}

    def _mark(self, name: str) -> None:
        super()._mark(name)
        parts = self._path[-1].split(".")
        if "layers" in parts:
            layer = int(parts[parts.index("layers") + 1])
            self.in_layers[layer] = max(self.in_layers.get(layer, 0), self.live_bytes)

    def layers(self) -> list[int]:
        found = [self.in_layers.get(i, 0) for i in range(LAYERS)]
        self.in_layers.clear()
        return found


@contextmanager
def world(backend: str, size: int, rank: int = 0) -> Iterator[None]:
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measured(
    wrap: Callable[[Any], Any], *, backend: str = "fake", size: int = 1, dtype: str = "float32", microbatches: int = 1,
    optimizer: Callable[[Any], Any] | None = None, no_sync: Callable[[Any, bool], Any] | None = None,
    config: dict[str, Any] | None = None, prepare: Callable[[Any], Any] = lambda m: m,
) -> Measured:  # fmt: skip
    """Three steps of a model that ``wrap`` gives to an engine. ``no_sync(model, last)``: a context of a microbatch."""
    found = Measured()
    settings = transformers.LlamaConfig(**{k: v for k, v in {**CONFIG, **(config or {})}.items()})
    settings._attn_implementation = "eager"
    with world(backend, size):
        tracker = PlaceTracker()
        with tracker.following(torch.nn.Module()):
            model = prepare(transformers.LlamaForCausalLM(settings).to(getattr(torch, dtype)))
            wrapped = wrap(model)
            tracker._names = {id(m): name for name, m in wrapped.named_modules()}
            found.built = tracker.live_bytes
            make = optimizer or (lambda ps: torch.optim.AdamW(ps, lr=1e-9, foreach=True))
            opt = make([p for p in wrapped.parameters() if p.requires_grad])
            tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
            for _ in range(3):
                for number in range(microbatches):
                    last = number == microbatches - 1
                    with no_sync(wrapped, last) if no_sync is not None else nullcontext():
                        tracker.reset_peak()
                        tracker.layers()
                        loss = wrapped(input_ids=tokens, labels=tokens, use_cache=False).loss
                        found.forward, found.layers_forward = tracker.peak(1).bytes, tracker.layers()
                        tracker.reset_peak()
                        tracker.in_backward = True
                        loss.backward()
                        tracker.in_backward = False
                        found.backward, found.layers_backward = tracker.peak(1).bytes, tracker.layers()
                        del loss
                tracker.reset_peak()
                opt.step()
                found.step, found.after_step = tracker.peak(1).bytes, tracker.live_bytes
                opt.zero_grad()
                found.zeroed = tracker.live_bytes
    return found


# ---- what is expected of them ----


def expected(run: Any) -> dict[str, int]:
    """Bytes of the estimate, phase by phase, where a step has one chunk."""
    from bridge_memory.estimation import _Stages

    held = _Stages(run)[0]
    during = held.static_bytes - held.fresh + held.state.in_passes + held.batch
    return {
        "state": sum(nbytes for _, nbytes in held.state.amounts),
        "fresh": held.fresh,
        "forward": during + held.inventories[0].forward_peak,
        "backward": during + held.inventories[0].backward_peak,
        "step": held.static_bytes + held.between_bytes + held.state.in_step,
    }


def run_of(
    engine: str, *, ranks: int = 1, microbatches: int = 1, dtype: str = "fp32", config: dict[str, Any] | None = None,
    sync_each_batch: bool = False, transformers_options: dict[str, Any] | None = None, **groups: Any,
) -> Any:  # fmt: skip
    """The same run for an estimate."""
    from bridge_memory.readers.huggingface import model_from_hf_config
    from bridge_memory.spec import (
        BatchSpec,
        DataParallelSpec,
        ImplementationSpec,
        ParallelSpec,
        PrecisionSpec,
        RunSpec,
    )
    from bridge_memory.spec.transformers import TransformersSpec

    return RunSpec(
        model=model_from_hf_config({**CONFIG, **(config or {})}, "small"),
        parallel=ParallelSpec(world_size=ranks),
        batch=BatchSpec(
            seq_length=SEQ, micro_batch_size=BATCH, global_batch_size=microbatches * BATCH * ranks
        ),
        precision=PrecisionSpec(params_dtype=dtype),
        data_parallel=DataParallelSpec(engine=engine, sync_each_batch=sync_each_batch),
        implementation=ImplementationSpec(transformer_impl="transformers", cublas_workspace_bytes=0),
        transformers=TransformersSpec(
            attn_implementation="eager", attention_mask="none", **(transformers_options or {})
        ),
        **groups,
    )
