"""Record the allocations of megatron-core itself, on a CPU, in the form of a torch.cuda memory snapshot.

A real GPTModel in Megatron's DDP, two training steps with Adam. Every storage that an operation makes is an allocation
with the Python frames that asked for it, and a free when PyTorch lets it go, which is what the CUDA allocator records.

    python record_snapshot.py FOLDER      writes dense.pickle and moe.pickle
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.trace: list[dict[str, Any]] = []
        self.alive: dict[int, dict[str, Any]] = {}
        self.refs: dict[int, Any] = {}
        self.next = 1 << 12

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.note(leaf.untyped_storage())
        return out

    def note(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.refs or nbytes < 512:
            return
        address = self.next
        self.next += -(-nbytes // 512) * 512
        frames, frame = [], sys._getframe(2)
        while frame is not None:
            frames.append(
                {"filename": frame.f_code.co_filename, "name": frame.f_code.co_name, "line": frame.f_lineno}
            )
            frame = frame.f_back  # type: ignore[assignment]
        event = {"action": "alloc", "addr": address, "size": nbytes, "frames": frames, "stream": 0}
        self.trace.append(event)
        self.alive[address] = event

        def gone(_: Any) -> None:
            self.refs.pop(key, None)
            self.alive.pop(address, None)
            self.trace.append({**event, "action": "free_requested", "frames": []})

        self.refs[key] = weakref.ref(storage, gone)

    def snapshot(self) -> dict[str, Any]:
        blocks = [
            {"address": e["addr"], "size": -(-e["size"] // 512) * 512, "requested_size": e["size"],
             "state": "active_allocated", "frames": e["frames"]}
            for e in self.alive.values()
        ]  # fmt: skip
        return {"segments": [{"device": 0, "address": 0, "blocks": blocks}], "device_traces": [self.trace]}


def build(kind: str) -> tuple[Any, Any]:
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    # The tracker of CUDA generators, which a CPU has not.
    tracker = tensor_parallel.get_cuda_rng_tracker()
    type(tracker).fork = lambda self, *a, **k: contextlib.nullcontext()
    # Without Transformer Engine megatron-core 0.16 leaves this name of its import undefined.
    moe_utils.te_general_gemm = None
    moe = dict(
        num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=512, moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2,
    )  # fmt: skip
    config = TransformerConfig(
        num_layers=2, hidden_size=256, ffn_hidden_size=1024, num_attention_heads=8, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, pipeline_dtype=torch.float32, **(moe if kind == "moe" else {}),
    )  # fmt: skip
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=4 if kind == "moe" else None, moe_grouped_gemm=False
        ),
        vocab_size=1024, max_sequence_length=128, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    return model, ddp


def main() -> None:
    from megatron.core import parallel_state

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.is_available = lambda: False
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment,method-assign]
    for kind in ("dense", "moe"):
        snapshot = record(kind)
        with open(os.path.join(sys.argv[1], f"{kind}.pickle"), "wb") as file:
            pickle.dump(snapshot, file)


def record(kind: str) -> dict[str, Any]:
    recorder = Recorder()
    with recorder:
        model, ddp = build(kind)
        optimizer = torch.optim.Adam(model.parameters())
        tokens = torch.randint(0, 1024, (4, 128))
        positions = torch.arange(128).repeat(4, 1)
        mask = torch.ones(1, 1, 128, 128, dtype=torch.bool).triu(1)
        for _ in range(2):
            ddp.zero_grad_buffer()
            loss = ddp(tokens, positions, mask, labels=tokens).mean()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None
            del loss
        return recorder.snapshot()


main()
