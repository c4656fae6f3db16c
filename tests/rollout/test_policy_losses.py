"""Log-probabilities of tokens as NeMo-RL, slime and TRL compute them: bytes a logit that are alive at most."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bridge_memory import BatchSpec, DataParallelSpec, ParallelSpec, RunSpec, SpecError
from bridge_memory.components import Part, Role
from bridge_memory.estimation import explain
from bridge_memory.job.megatron.evaluation import forward_passes
from bridge_memory.rollout.reading import read

TOKENS = 16384
MIB = 1 << 20


def run_of(**fields: Any) -> RunSpec:
    return RunSpec(
        model="Qwen/Qwen3-0.6B", parallel=ParallelSpec(world_size=1),
        batch=BatchSpec(seq_length=TOKENS, packed_sequences=True),
    ).with_fields(**fields)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "kept", "step", "forward"),
    [
        ({"policy_loss": "nemo-rl"}, 4, 12, 12),
        ({"policy_loss": "nemo-rl", "policy_defers_fp32": True}, 4, 14, 14),
        ({"policy_loss": "nemo-rl", "policy_defers_fp32": True, "policy_chunk_size": TOKENS // 4}, 2, 10, 5),
        ({"policy_loss": "slime"}, 4, 8, 8),
        ({"policy_loss": "slime", "policy_rescales": True}, 4, 12, 12),
        ({"policy_loss": "slime", "policy_chunk_size": TOKENS // 4}, 4, 8, 6),
        ({"policy_loss": "slime", "policy_entropy": True}, 8, 12, 8),
        ({"policy_loss": "slime", "policy_entropy": True, "policy_chunk_size": TOKENS // 4}, 8, 9, 6),
    ],
)
def test_bytes_of_a_logit_on_megatron(fields: dict[str, Any], kept: float, step: float, forward: float) -> None:
    """Counted with NeMo-RL's (0433dae) and slime's (after #2152) functions on the CPU, by storages that are alive: what
    stays for backward, the most of a step, and the most of a pass without gradients; logits come as bf16, and in fp32
    unless that is deferred."""
    run = run_of(**fields)
    logits = TOKENS * run.model.vocab_size
    alone = explain(run.with_(model=replace(run.model, layers=run.model.layers[:1])), 0)
    loss = [c for c in alone.components if c.part in (Part.LOSS, Part.RUNNING)]
    assert sum(c.bytes for c in loss if c.role is Role.ACTIVATION) / logits == pytest.approx(kept, abs=0.02)
    assert sum(c.bytes for c in loss) / logits == pytest.approx(step, abs=0.02)
    passes = forward_passes(run.with_fields(policy_forward_only=True), 0)
    assert [m.nbytes for m in passes if m.name == "loss"][-1] / logits == pytest.approx(forward, abs=0.02)


def test_the_options_of_a_policy_loss_need_one() -> None:
    for name in ("policy_defers_fp32", "policy_rescales"):
        with pytest.raises(SpecError, match=f"{name} .True. does nothing without policy_loss"):
            run_of(**{name: True})


def test_frameworks_options_reach_their_loss(tmp_path: Path) -> None:
    words = "--colocate --hf-checkpoint Qwen/Qwen3-0.6B --actor-num-gpus-per-node 8 --rollout-max-response-len 4096"
    at = {t: read("slime", f"{words} --rollout-temperature {t}").log_prob_run().implementation for t in ("1", "0.8")}
    assert not at["1"].policy_rescales and at["0.8"].policy_rescales
    text = "policy: {model_name: Qwen/Qwen3-0.6B, generation: {}, megatron_cfg: {enabled: true}}"
    told = ["policy.megatron_cfg.defer_fp32_logits=true", "policy.logprob_chunk_size=1024"]
    found = read("nemo_rl", "nemo.yaml", told, text=text).update_run().implementation
    assert found.policy_defers_fp32 and found.policy_chunk_size == 1024


# ---- TRL's loss in tiles ----------------------------------------------------------------------------


def of_trl() -> ModuleType:
    """``trl/kernels/chunked_logprob.py``, with what its backward imports from the trainer."""
    pytest.importorskip("torch")
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("trl is not installed")
    kernels = Path(next(iter(spec.submodule_search_locations))) / "kernels/chunked_logprob.py"
    if not kernels.exists():
        pytest.skip("TRL before its loss in tiles")
    of_file = importlib.util.spec_from_file_location("trl_alone.kernels.chunked_logprob", kernels)
    assert of_file is not None and of_file.loader is not None
    utils = ModuleType("trl_alone.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *of: contextlib.nullcontext()  # type: ignore[attr-defined]
    for name, module in (("trl_alone", ModuleType("trl_alone")), ("trl_alone.kernels", ModuleType("kernels")),
                         ("trl_alone.trainer", ModuleType("trainer")), ("trl_alone.trainer.utils", utils)):  # fmt: skip
        module.__path__ = []  # type: ignore[attr-defined]
        sys.modules[name] = module
    module = importlib.util.module_from_spec(of_file)
    of_file.loader.exec_module(module)
    return module


def of_ours(tokens: int) -> tuple[int, int]:
    """What stays for the backward pass, and its temporaries, of a model in bf16."""
    run = RunSpec(
        model="Qwen/Qwen3-0.6B", parallel=ParallelSpec(world_size=1), data_parallel=DataParallelSpec(engine="single"),
        batch=BatchSpec(seq_length=tokens),
    ).with_fields(policy_loss="trl", cut_cross_entropy=True)  # fmt: skip
    step = explain(run.with_(model=replace(run.model, layers=run.model.layers[:1])), 0)
    parts = {c.name: c.bytes for c in step.components}
    return parts["activations: logits and loss"], parts["temporaries: log-probabilities"]


@pytest.mark.slow
def test_trls_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its kernels, which on a GPU write into the tile and the sums that they are given."""
    module = of_trl()
    import torch
    from test_against_verl import Alive

    for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        monkeypatch.setattr(module, name, lambda *of, **more: None)
    monkeypatch.setattr(module, "_use_triton", lambda device: False)
    tokens, h, v = 5000, 1024, 151936
    alive = Alive()
    with alive:
        states = torch.zeros(tokens, h, dtype=torch.bfloat16, requires_grad=True)
        head = torch.zeros(v, h, dtype=torch.bfloat16, requires_grad=True)
        inputs = alive.now
        alive.most = 0
        out = module.ChunkedLogProbFunction.apply(
            states[torch.ones(tokens, dtype=torch.bool)], head, None, torch.zeros(tokens, dtype=torch.int64), 1.0,
            32768, None, 1.0, ("log_probs", "entropy"),
        )  # fmt: skip
        forward, kept = alive.most - inputs, alive.now - inputs
        alive.most = 0
        out[0].sum().backward()
    kept_found, backward_found = of_ours(tokens)
    assert kept == pytest.approx(kept_found, abs=MIB / 4)
    assert alive.most - inputs - kept == pytest.approx(backward_found, abs=MIB)
    # A tile of 4096 x 32768 in bf16, and seven statistics.
    assert forward - kept == pytest.approx(256 * MIB, abs=MIB)
