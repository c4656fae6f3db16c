"""Recordings beside liger-kernel's own functions in the real modules of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from hf_families import CONFIGS
from hf_side_by_side import INSTALLED, errors
from liger_on_meta import available, liger

from bridge_memory import ImplementationSpec, RunSpec, SpecError, clear_caches, estimate
from bridge_memory.cards import rows
from bridge_memory.inventory.torch.liger import chunk_of_tokens
from bridge_memory.spec.transformers import FAMILIES, TransformersSpec, family_of

BOTH = pytest.mark.skipif(not available(), reason="needs liger-kernel")
SPEC = TransformersSpec(transformers_version=INSTALLED)
ALONE = [(name,) for name in ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")]


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of which the meta device has one."""
    monkeypatch.setitem(rows.MULTIPROCESSORS, "hopper", 1)
    clear_caches()
    yield
    clear_caches()


def with_liger(config: dict[str, Any], kernels: tuple[str, ...], **ways: Any) -> tuple[float, float, float]:
    with liger(config["model_type"], kernels):
        return errors(config, liger_kernel=kernels, **ways)


@BOTH
@pytest.mark.parametrize("kernels", ALONE)
@pytest.mark.parametrize("vocab_size", [64, 20000])
def test_each_kernel(kernels: tuple[str, ...], vocab_size: int) -> None:
    """Where the peak is in a layer, and where it is in the loss."""
    found = with_liger({**CONFIGS["llama"], "vocab_size": vocab_size}, kernels)
    assert max(map(abs, found)) < 0.005, found


@BOTH
@pytest.mark.parametrize("name", sorted(n for n, c in CONFIGS.items() if family_of(c["model_type"], SPEC).liger))
def test_families(name: str) -> None:
    """All that Liger has for the class but the unfused loss."""
    has = family_of(CONFIGS[name]["model_type"], SPEC).liger
    kernels = tuple(kernel for kernel in has if kernel != "cross_entropy" or "fused_linear_cross_entropy" not in has)
    if INSTALLED >= (5, 0) and CONFIGS[name].get("num_experts_per_tok"):
        kernels = tuple(kernel for kernel in kernels if kernel != "swiglu")  # named as not modelled
    found = with_liger(CONFIGS[name], kernels)
    assert max(map(abs, found)) < 0.005, found


@BOTH
@pytest.mark.parametrize("way", [
    {"gradient_checkpointing": True, "use_reentrant": False}, {"gradient_checkpointing": True, "use_reentrant": True},
    {"keeps_outputs": True}, {"dtype": "fp32"}, {"batch": 1, "seq": 200},
])  # fmt: skip
def test_ways_to_run_a_model(way: dict[str, Any]) -> None:
    found = with_liger(CONFIGS["llama"], ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"), **way)
    assert max(map(abs, found)) < 0.005, found


@pytest.mark.parametrize(("tokens", "v", "h", "chunk"), [(16384, 32000, 4096, 2048), (4096, 128256, 2048, 128),
                                                         (96, 1000, 2000, 96)])
def test_tokens_of_a_chunk_by_hand(tokens: int, v: int, h: int, chunk: int) -> None:
    """The source's own example: 8 parts of 2048; 63 parts of 66 tokens, up to 128; one part, of all that there are."""
    assert chunk_of_tokens(tokens, v, h) == chunk


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        (("cross_entropy", "fused_linear_cross_entropy"), "drop cross_entropy"),
        (("flash",), "liger_kernel"),
    ],
)
def test_what_it_cannot_do_is_refused(kernels: tuple[str, ...], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        RunSpec(
            model="meta-llama/Llama-3.2-1B", implementation=ImplementationSpec(transformer_impl="transformers"),
            transformers=TransformersSpec(liger_kernel=kernels),
        )


def test_a_kernel_that_liger_lacks_is_said() -> None:
    """It has none for OLMoE, GLM 4.5 or Qwen2-MoE, and no fused loss for Granite."""
    assert {n for n, f in FAMILIES.items() if not f.liger} >= {"olmoe", "glm4_moe", "qwen2_moe", "olmo", "glm"}
    run = RunSpec(
        model="allenai/OLMoE-1B-7B-0924", implementation=ImplementationSpec(transformer_impl="transformers"),
        transformers=TransformersSpec(liger_kernel=("rms_norm",)),
    )
    assert any("liger_kernel (rms_norm)" in note for note in estimate(run).assumptions)
