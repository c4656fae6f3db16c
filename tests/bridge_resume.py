"""A resume with Megatron Bridge's own loader of optimizer states, on a rank whose tensors have no data.

Runs in a separate process, as ``bridge_rehearsal.py``: ``python tests/bridge_resume.py CASE ...``. Prints one JSON line
a case: bytes at the highest moment of the resume, predicted and measured, as Bridge loads and as Megatron-LM does.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from bridge_child import print_answers
from bridge_rehearsal import start

DP2: dict[str, Any] = {"world_size": 2}
LOW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
QWEN = "Qwen/Qwen3-30B-A3B"
#: Case -> (model, fields of the run).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one GPU": ("meta-llama/Llama-3.2-1B", {}),
    "DP 2": ("meta-llama/Llama-3.2-1B", DP2),
    "fp32": ("meta-llama/Llama-3.2-1B", DP2 | {"params_dtype": "fp32"}),
    "whole states": ("meta-llama/Llama-3.2-1B", DP2 | {"dist_ckpt_optim_fully_reshardable": True}),
    "experts, EDP 2": (QWEN, {"world_size": 8, "expert_model_parallel_size": 4}),
    "no distributed optimizer": ("meta-llama/Llama-3.2-1B", DP2 | {"use_distributed_optimizer": False}),
    "bf16 moments": ("meta-llama/Llama-3.2-1B", DP2 | LOW),
}


def answer(name: str) -> dict[str, Any]:
    from job_oracle import job
    from megatron.bridge.training.optim import memory_efficient_fp32_optimizer_state_loading

    from bridge_memory.job.megatron.loading import How, loading
    from bridge_memory.outside.amount import total
    from bridge_memory.readers import resolve_model
    from bridge_memory.spec import RunSpec

    model, more = CASES[name]
    layers = resolve_model(model)
    small = replace(layers, layers=layers.layers[:1], vocab_size=1024)
    run, found = RunSpec(model=small).with_fields(**more), {}
    for adopts in (True, False):
        with job(run) as real:
            if adopts:
                with memory_efficient_fp32_optimizer_state_loading(real.optimizer):
                    real.load(with_optimizer=True)
            else:
                real.load(with_optimizer=True)
        least, most = total(loading(run.with_fields(adopt_optim_states=adopts), 0, How.RESUME) or ())
        found["adopted" if adopts else "copied"] = [least, most, real.phases["resume"].peak]
    return found


def main(names: list[str]) -> None:
    start()
    print_answers(names or CASES, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
