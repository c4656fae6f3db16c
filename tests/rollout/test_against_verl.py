"""Logits, entropy and log-probabilities against verl's own functions and megatron-core's, run on the CPU: the most
bytes that are alive at once, in logits."""

from __future__ import annotations

import ast
import heapq
import importlib.util
import random
import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bridge_memory import BatchSpec, ParallelSpec, RunSpec
from bridge_memory.components import Part, Role
from bridge_memory.estimation import explain
from bridge_memory.job.megatron.evaluation import forward_passes

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

TOKENS, VOCABULARY = 64, 4096
LOGITS = TOKENS * VOCABULARY


def of_verl() -> ModuleType:
    """``verl/utils/megatron/tensor_parallel.py`` alone: verl itself imports ray and more."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("verl is not installed")
    path = Path(next(iter(spec.submodule_search_locations))) / "utils/megatron/tensor_parallel.py"
    of_file = importlib.util.spec_from_file_location("tensor_parallel_of_verl", path)
    assert of_file is not None and of_file.loader is not None
    module = importlib.util.module_from_spec(of_file)
    of_file.loader.exec_module(module)
    return module


class Alive(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
    """Bytes of all storages made under it, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return out

    def see(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes()
        self.known[key] = weakref.finalize(storage, self.gone, key, size)
        self.now += size
        self.most = max(self.most, self.now)

    def gone(self, key: int, size: int) -> None:
        self.known.pop(key, None)
        self.now -= size


@pytest.fixture
def world(tmp_path: Path) -> Any:
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def processed(module: ModuleType, logits: Any, *, entropy: bool, chunk: int) -> list[Any]:
    """As ``workers/engine/megatron/transformer_impl.py: _lm_head_logits_processor`` calls them, on what Float16Module
    returns."""
    wide = logits.float()
    del logits
    wide.div_(torch.ones(1, TOKENS, 1))
    copy = wide.clone() if entropy else wide
    out = []
    if entropy:
        made = (
            module.vocab_parallel_entropy_with_chunking(wide, chunk) if chunk else module.vocab_parallel_entropy(wide)
        )
        out.append(made)
    return [*out, module.vocab_parallel_log_probs_from_logits(copy, torch.zeros(1, TOKENS, dtype=torch.int64))]


def run_of(**fields: Any) -> RunSpec:
    return RunSpec(
        model="Qwen/Qwen3-0.6B", parallel=ParallelSpec(world_size=1),
        batch=BatchSpec(seq_length=16384, packed_sequences=True),
    ).with_fields(policy_loss="verl", **fields)  # fmt: skip


def in_logits(run: RunSpec, nbytes: int) -> float:
    return nbytes / (run.batch.seq_length * run.model.vocab_size)


@pytest.mark.parametrize(("entropy", "chunk"), [(False, 0), (True, 0), (True, 16)])
def test_a_pass_without_gradients(world: Any, monkeypatch: pytest.MonkeyPatch, entropy: bool, chunk: int) -> None:
    module = of_verl()
    if chunk and not hasattr(module, "vocab_parallel_entropy_with_chunking"):
        pytest.skip("verl before 0.9 has no chunks")
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: lambda f: f)
    alive = Alive()
    with torch.no_grad(), alive:
        logits = torch.zeros(1, TOKENS, VOCABULARY, dtype=torch.bfloat16)
        holder = [logits]
        del logits
        processed(module, holder.pop(), entropy=entropy, chunk=chunk)
    fields = {"policy_entropy": entropy, "policy_chunk_size": 4096 if chunk else 0, "policy_forward_only": True}
    run = run_of(**{k: v for k, v in fields.items() if v})
    loss = [m.nbytes for m in forward_passes(run, 0) if m.name == "loss"][-1]
    # Uncompiled, the entropy multiplies softmax and logits in a tensor of its own (``mul_reduce``), of a chunk too.
    product = 4 * (chunk / TOKENS if chunk else 1) if entropy else 0
    assert alive.most / LOGITS - product == pytest.approx(in_logits(run, loss), abs=0.08)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_step(world: Any, monkeypatch: pytest.MonkeyPatch, entropy: bool) -> None:
    module = of_verl()
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: lambda f: f)
    alive = Alive()
    hidden = torch.zeros(1, TOKENS, 1, dtype=torch.bfloat16, requires_grad=True)
    with alive:
        out = processed(module, hidden.expand(1, TOKENS, VOCABULARY) * 1, entropy=entropy, chunk=0)
        forward, kept = alive.most, alive.now
        alive.most = alive.now
        sum(one.sum() for one in out).backward()
    run = run_of(policy_entropy=True) if entropy else run_of()
    step = explain(run.with_(model=replace(run.model, layers=run.model.layers[:1])), 0)
    of_loss = [c for c in step.components if c.part in (Part.LOSS, Part.RUNNING)]
    retained = sum(c.bytes for c in of_loss if c.role is Role.ACTIVATION)
    assert kept / LOGITS == pytest.approx(in_logits(run, retained), abs=0.1)
    # The product of the entropy, as above.
    most = max(forward - (4 * LOGITS if entropy else 0), alive.most) / LOGITS
    assert most == pytest.approx(in_logits(run, sum(c.bytes for c in of_loss)), abs=0.1)


def test_balancing_exceeds_a_limit_by_less_than_a_sequence() -> None:
    """verl's ``karmarkar_karp`` on drawn batches: uniform lengths, long and short ones, and exponential ones."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("verl is not installed")
    source = (Path(next(iter(spec.submodule_search_locations))) / "utils/seqlen_balancing.py").read_text()
    names: dict[str, Any] = {}
    tree = ast.parse(source)
    wanted = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "karmarkar_karp"]
    exec(compile(ast.Module(wanted, []), "verl", "exec"), {"heapq": heapq}, names)
    draw, longest, most = random.Random(0), 10240, 0.0
    for _ in range(300):
        limit, number = draw.choice([longest, 16384, 2 * longest]), draw.choice([32, 64, 128])
        lengths = [
            draw.choice([draw.randint(64, longest), min(longest, 64 + int(draw.expovariate(1 / 2000)))])
            for _ in range(number)
        ]
        parts = names["karmarkar_karp"](
            [24576 * n + n * n for n in lengths], min(number, -(-sum(lengths) // limit)), False
        )
        most = max(most, *((sum(lengths[i] for i in part) - limit) / longest for part in parts))
    assert 0 < most < 1
