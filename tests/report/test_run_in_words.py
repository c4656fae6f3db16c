"""The block "The run": its precision is that of the bytes that are counted, its releases those whose rules apply."""

from __future__ import annotations

import re

import pytest

from bridge_memory.components import State
from bridge_memory.estimation import estimate
from bridge_memory.report.summary import configuration
from bridge_memory.spec import RunSpec

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "8-bit": 1, "16-bit remainders": 2}
MODEL = "meta-llama/Llama-3.2-1B"
PARAMETERS = 1_235_814_400


def words_of(**fields: object) -> tuple[dict[str, str], dict[State, int]]:
    """The block, and bytes of each copy of the parameters, of a run on one GPU."""
    result = estimate(RunSpec(model=MODEL).with_fields(**fields))
    stage = result.stages[0]
    copies: dict[State, int] = {}
    for c in (*stage.components, *stage.carried_over):
        if c.state and c.name != "gradient buckets":
            copies[c.state] = copies.get(c.state, 0) + c.bytes
    return dict(configuration(result)), copies


def dtype_of(state: State, words: str) -> str:
    """That of ``state`` in "fp32 (main parameters), bf16 (exp_avg, exp_avg_sq)", or the one of all."""
    for dtype, names in re.findall(r"([\w][\w -]*?) \(([^)]*)\)", words):
        if str(state) in names.split(", ") or (state is not State.MAIN_PARAMETERS and names == "moments"):
            return str(dtype)
    return words


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"grad_reduce_in_fp32": False}, {"params_dtype": "fp32"},
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"},
        {"engine": "single"}, {"engine": "single", "params_dtype": "fp32"}, {"engine": "fsdp2"}, {"engine": "ddp"},
        {"engine": "zero1"}, {"engine": "zero2"}, {"engine": "zero3"},
        {"engine": "zero3", "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True},
        {"engine": "single", "optimizer.optimizer": "lion"},
        {"engine": "single", "paged": True}, {"use_precision_aware_optimizer": True, "store_param_remainders": False},
    ],
)  # fmt: skip
def test_the_precision_is_that_of_the_bytes(fields: dict[str, object]) -> None:
    words, copies = words_of(**fields)
    found = re.fullmatch(r"weights (\S+), gradients (\S+), optimizer states (.*)", words["precision"])
    assert found is not None, words["precision"]
    assert copies[State.PARAMETERS] == pytest.approx(WIDTHS[found[1]] * PARAMETERS, rel=1e-3)
    if State.GRADIENTS in copies:  # ZeRO keeps none between steps
        assert copies[State.GRADIENTS] == pytest.approx(WIDTHS[found[2]] * PARAMETERS, rel=1e-3)
    states = {s: n for s, n in copies.items() if s not in (State.PARAMETERS, State.GRADIENTS, State.FP8_COPIES)}
    assert states
    for state, nbytes in states.items():
        width = min(WIDTHS.values(), key=lambda w: abs(w - nbytes / PARAMETERS))
        assert width == WIDTHS[dtype_of(state, found[3])], state


def test_releases_are_those_of_the_run_and_unset_ones_are_assumed() -> None:
    unset = "megatron-core 0.19 (assumed), Transformer Engine 2.20 (assumed), torch 2.11 (assumed)"
    assert words_of()[0]["releases"] == unset
    given = words_of(megatron_core=(0, 15), transformer_engine=(2, 5), torch=(2, 8))[0]["releases"]
    assert given == "megatron-core 0.15, Transformer Engine 2.5, torch 2.8"
    other = words_of(engine="zero3")[0]["releases"]
    assert other == "transformers 4.57, torch 2.11 (assumed), DeepSpeed 0.19 (assumed)"
    assert "Transformer Engine" not in words_of(transformer_impl="local")[0]["releases"]


def test_host_memory_is_named_where_it_is_used_alone() -> None:
    assert "host memory" not in words_of(engine="zero3")[0]
    words = words_of(engine="zero3", offload_optimizer_device="cpu")[0]["host memory"]
    assert re.fullmatch(r"[\d.]+ GiB per rank, [\d.]+ GiB per node of 1 GPU", words)
