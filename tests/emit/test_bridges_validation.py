"""Emitted overrides on Megatron Bridge 0.6.2's own recipes: applied, updated and validated by Bridge, then read."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_read_back import check, running, with_model
from wide_runs import wide_runs

from bridge_memory import SpecError
from bridge_memory.emit.bridge import bridge_overrides
from bridge_memory.readers.config_container import run_of_container
from bridge_memory.releases import Running, release_in

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from bridge_stubs import require_bridge  # noqa: E402

#: Model -> its recipe.
RECIPES = {
    "meta-llama/Meta-Llama-3-8B": "llama3_8b", "Qwen/Qwen3-30B-A3B": "qwen3_30b_a3b",
    "deepseek-ai/DeepSeek-V3": "deepseek_v3", "google/gemma-2-9b": "gemma2_9b",
}  # fmt: skip
DRAWN = 80
#: What Bridge, or megatron-core 0.19, refuses of a run that another release takes, or that nobody asks for.
REFUSED = (
    "cuda_graph", "cuda graph", "NCCL_ALGO must be", "fp8/fp4 must be specified", "hierarchical_context_parallel_sizes",
    "Transformer Engine >= 2.7", "offloading is only supported with transformer_engine implementation",
)  # fmt: skip


@pytest.fixture(scope="module")
def recipes() -> Iterator[Any]:
    require_bridge()
    import megatron.bridge
    from bridge_recipes import bridge_on_cpu

    if (release_in(megatron.bridge.__version__) or (0, 0)) < (0, 6):
        pytest.skip("overrides are written for Megatron Bridge 0.6")
    with bridge_on_cpu() as module:
        yield module


def test_what_bridge_validates_is_the_run(
    recipes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from bridge_recipes import build
    from megatron.bridge.training import config as bridge_config

    monkeypatch.setattr(bridge_config, "validate_flex_dispatcher_backend", lambda model: None)
    outcomes: Counter[str] = Counter()
    for run in itertools.islice(wide_runs("validated", models=tuple(RECIPES)), DRAWN):
        try:
            emitted = bridge_overrides(run)
        except SpecError:
            continue
        config = build(getattr(recipes, f"{RECIPES[run.model.name]}_pretrain_config"))
        config.model.vocab_size = config.model.vocab_size or config.tokenizer.vocab_size
        exec(emitted.commented, {"cfg": config})
        config.checkpoint.pretrained_checkpoint = str(tmp_path)  # which adapters want
        with monkeypatch.context() as patched:
            for name, value in config.env_vars.items():  # Bridge exports them
                patched.setenv(name, str(value))
            patched.setattr(bridge_config, "get_world_size_safe", lambda run=run: run.parallel.world_size)
            try:
                bridge_config.runtime_config_update(config)
            except (AssertionError, ValueError) as error:
                outcomes[str(error)] += 1
                continue
            read = run_of_container(
                config, Running(**{"megatron_core": None, "transformer_engine": None, "torch": None,
                                   **running(run, emitted.left)}),
                world_size=run.parallel.world_size, bridge=(0, 6), gpu_arch=run.implementation.gpu_arch,
            )  # fmt: skip
        outcomes["read"] += 1
        if "are the recipe's" in emitted.note:
            read = with_model(read, run)
        check("bridge", run, emitted, read)
    read_back = outcomes.pop("read")
    assert not [words for words in outcomes if not any(known in words for known in REFUSED)]
    assert read_back > 0.75 * DRAWN
