"""The parameters of recipes' models, as megatron-core builds them through Bridge's providers and as counted here.

A process of its own (``python tests/readers/bridge_parameters.py RECIPE ...``): Transformer Engine's constructors must
make weights, as in ``bridge_memory/rehearsal/te_shapes.py``, before megatron-core is imported. Prints one JSON line a
recipe: its name and both counts, [inventory, megatron-core]; or why it is not built.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

#: On one GPU, without what needs more of them or a GPU at all.
ALONE: dict[str, Any] = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
    "pipeline_model_parallel_layout": None, "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None, "sequence_parallel": False, "defer_embedding_wgrad_compute": False,
    "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False,
    "overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False, "cuda_graph_impl": "none", "fp8": None,
    "recompute_granularity": None, "recompute_modules": None, "recompute_method": None, "recompute_num_layers": None,
    "gradient_accumulation_fusion": False, "perform_initialization": False, "bf16": True, "dsa_kernel_backend": "none",
}  # fmt: skip


def stub_with_weights() -> None:
    import bridge_stubs

    from bridge_memory.rehearsal.te_shapes import _constructors

    made_empty = bridge_stubs._StubLoader.exec_module

    def exec_module(self: Any, module: Any) -> None:
        made_empty(self, module)
        if module.__name__ == "transformer_engine.pytorch":
            for made in _constructors():
                setattr(module, made.__name__, made)

    bridge_stubs._StubLoader.exec_module = exec_module  # type: ignore[method-assign]


def counts(config: Any) -> list[int]:
    """Of the text model; a release's names are its own."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from parameters_of import stage_parameters

    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.rehearsal.patches import building
    from bridge_memory.rehearsal.world import fake_world

    model = config.model
    for key, value in ALONE.items():
        if hasattr(model, key):
            setattr(model, key, value)
    if model.num_moe_experts:
        model.moe_token_dispatcher_type = "alltoall"
    config.comm_overlap = config.mixed_precision = None
    if hasattr(config.dataset, "enable_offline_packing"):  # which the attention of Gemma 2 and EXAONE 4 refuses
        config.dataset.enable_offline_packing, config.dataset.offline_packing_specs = False, None
    config.train.global_batch_size = config.train.micro_batch_size
    model.vocab_size = model.vocab_size or 32000
    run = run_from_config_container(config, world_size=1)
    run = replace(run, model=replace(run.model, encoders=()))
    ours = sum(p.numel for chunk in stage_parameters(run, 0) for p in chunk)
    with fake_world(run.parallel, 0), building(), torch.device("meta"):
        model._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        model.finalize()
        text = getattr(model, "provide_language_model", model.provide)
        theirs = sum(p.numel() for p in text(pre_process=True, post_process=True).parameters())
    return [ours, theirs]


def main(names: list[str]) -> None:
    stub_with_weights()
    from bridge_recipes import bridge_on_cpu, build

    logging.disable(logging.CRITICAL)
    with bridge_on_cpu() as recipes:
        import megatron.core.extensions.transformer_engine as extension

        extension._get_cpu_offload_context = lambda *args, **kwargs: (None, None)
        for name in names:
            try:
                answer: dict[str, Any] = {"counts": counts(build(getattr(recipes, name)))}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print("=", json.dumps({"recipe": name, **answer}))


if __name__ == "__main__":
    main(sys.argv[1:])
