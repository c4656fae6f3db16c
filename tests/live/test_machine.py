"""What the live report finds out about its process: GPU, releases, allocator; and what it says where it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bridge_memory.calibration import config_digest, journal
from bridge_memory.calibration.records import RunRecord
from bridge_memory.live import MemoryReport
from bridge_memory.live.cuda import Reading
from bridge_memory.live.machine import Machine
from bridge_memory.readers.config_container import run_from_config_container

GIB = 1 << 30
#: CUBLAS_WORKSPACE_CONFIG's sizes are in KiB.
KIB = 1 << 10


def module(name: str, release: str, **more: Any) -> ModuleType:
    made = ModuleType(name)
    made.__version__ = release  # type: ignore[attr-defined]
    vars(made).update(more)
    return made


def torch_on(name: str, capability: tuple[int, int], *, hip: str | None = None, initialized: bool = True) -> ModuleType:
    cuda = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: initialized, get_device_name=lambda: name,
        get_device_capability=lambda: capability,
    )  # fmt: skip
    return module("torch", "2.9.0a0+50eac811a6.nv25.09", cuda=cuda, version=SimpleNamespace(hip=hip))


def found(torch: ModuleType, environ: dict[str, str] | None = None, config: Any = None, **modules: Any) -> Machine:
    return Machine.of_process(config, modules={"torch": torch, **modules}, environ=environ or {})


@pytest.mark.parametrize(
    ("name", "capability", "generation"),
    [
        ("Tesla V100-SXM2-32GB", (7, 0), "volta"), ("Tesla T4", (7, 5), "turing"), ("NVIDIA A10G", (8, 6), "ampere"),
        ("NVIDIA L40S", (8, 9), "ada"), ("NVIDIA H100 80GB HBM3", (9, 0), "hopper"),
        ("NVIDIA B200", (10, 0), "blackwell"), ("NVIDIA RTX PRO 6000 Blackwell", (12, 0), "blackwell"),
    ],
)  # fmt: skip
def test_the_device_capability_says_the_generation(name: str, capability: tuple[int, int], generation: str) -> None:
    machine = found(torch_on(name, capability))
    assert machine.overrides()["gpu_arch"] == generation
    assert (machine.gpu, machine.notes) == (name, ())
    assert machine.line().startswith(f"machine: {name}, {generation} {capability[0]}.{capability[1]}, ")
    assert machine.facts["gpu_arch"].source == "torch.cuda"


def test_releases_are_those_of_the_imported_packages() -> None:
    machine = found(
        torch_on("NVIDIA H100 80GB HBM3", (9, 0)),
        **{
            "megatron.core": module("megatron.core", "0.15.0rc8"),
            "transformer_engine": module("transformer_engine", "2.11.0+c188b533"),
        },
    )
    overrides = machine.overrides()
    assert (overrides["megatron_core"], overrides["transformer_engine"], overrides["torch"]) == (
        (0, 15), (2, 11), (2, 9),
    )  # fmt: skip
    assert "megatron-core 0.15, Transformer Engine 2.11, torch 2.9" in machine.line()
    none = found(torch_on("NVIDIA H100 80GB HBM3", (9, 0)), transformer_engine=None)
    assert "transformer_engine" not in none.overrides() and "Transformer Engine not imported" in none.line()


@pytest.mark.parametrize(
    ("environ", "fields"),
    [
        ({}, {"expandable_segments": False, "nvte_deterministic": False}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}, {"expandable_segments": True}),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {"expandable_segments": True}),
        # CUDAAllocatorConfig.h: PYTORCH_CUDA_ALLOC_CONF goes before PYTORCH_ALLOC_CONF.
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
         {"expandable_segments": False}),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, {"cublas_workspace_bytes": 8 * 4096 * KIB}),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, {"cublas_workspace_bytes": 8 * 16 * KIB}),
        ({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, {"nvte_deterministic": True}),
        ({"NVTE_FUSED_ATTN": "0"}, {"attention_backend": "flash"}),
        ({"NVTE_FLASH_ATTN": "0"}, {"attention_backend": "fused"}),
        ({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}, {"attention_backend": "unfused"}),
    ],
)  # fmt: skip
def test_the_environment_says_how_memory_is_handed_out(environ: dict[str, str], fields: dict[str, Any]) -> None:
    overrides = found(torch_on("NVIDIA H100 80GB HBM3", (9, 0)), environ).overrides()
    assert {name: overrides.get(name) for name in fields} == fields
    assert ("cublas_workspace_bytes" in overrides) is ("CUBLAS_WORKSPACE_CONFIG" in environ)
    assert ("attention_backend" in overrides) is any("ATTN" in name for name in environ)


def test_the_containers_env_vars_count_where_the_process_has_none() -> None:
    """Megatron Bridge 0.6: ``cfg.env_vars`` are defaults of the process environment, ints among them."""
    config = SimpleNamespace(
        env_vars={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": 0}
    )
    h100 = torch_on("NVIDIA H100 80GB HBM3", (9, 0))
    both = found(h100, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, config)
    assert (both.overrides()["expandable_segments"], both.overrides()["nvte_deterministic"]) == (True, False)
    assert both.facts["expandable_segments"].source == "the container's env_vars"
    assert both.facts["nvte_deterministic"].source == "environment"
    assert found(h100, {}, config).overrides()["nvte_deterministic"] is True
    for env_vars in (None, "NVTE_FLASH_ATTN=0", ["NVTE_FLASH_ATTN=0"]):
        assert "attention_backend" not in found(h100, {}, SimpleNamespace(env_vars=env_vars)).overrides()


def test_without_a_device_in_use_the_default_stays_and_is_said() -> None:
    """A CPU or gloo process, one whose GPU nobody has touched, one older than Volta, and one whose driver fails."""
    broken = torch_on("x", (9, 0))
    broken.cuda.is_available = lambda: 1 / 0
    for torch, words in (
        (torch_on("NVIDIA A100", (8, 0), initialized=False), "no CUDA device is in use"),
        (torch_on("Tesla P100-PCIE-16GB", (6, 0)), "compute capability 6.0 is of an unknown generation"),
        (broken, "the GPU is not known (ZeroDivisionError)"),
        (None, "no CUDA device is in use"),
    ):
        machine = Machine.of_process(modules={"torch": torch}, environ={})
        assert "gpu_arch" not in machine.overrides()
        (note,) = machine.notes
        assert note.startswith(words) and note.endswith("library workspaces as on a Hopper GPU")
        assert note in machine.line()


def test_a_process_on_rocm_says_that_nvidias_rules_are_taken() -> None:
    """gfx942 reports capability 9.4, which is not Hopper's."""
    machine = found(torch_on("AMD Instinct MI300X", (9, 4), hip="6.2.41133"))
    assert "gpu_arch" not in machine.overrides()
    (note,) = machine.notes
    assert "ROCm 6.2.41133" in note and "NVIDIA's Hopper" in note and "\n" not in note
    assert machine.line().startswith("machine: AMD Instinct MI300X, ") and note in machine.line()


def test_the_container_that_names_its_attention_is_believed(container: SimpleNamespace) -> None:
    flash = {"attention_backend": "flash", "gpu_arch": "ada"}
    assert run_from_config_container(container, implementation=flash).implementation.attention_backend == "flash"
    container.model.attention_backend = "unfused"
    named = run_from_config_container(container, implementation=flash).implementation
    assert (named.attention_backend, named.gpu_arch) == ("unfused", "ada")


def report(container: SimpleNamespace, path: Path) -> tuple[RunRecord, str]:
    shown: list[str] = []
    made = MemoryReport(path, emit=shown.append, read=lambda rank, stage: Reading(rank, stage, 10 * GIB, 20 * GIB))
    made.on_train_start(SimpleNamespace(state=SimpleNamespace(cfg=container, train_state=SimpleNamespace(step=0))))
    made.on_train_end(None)
    run = next(iter(journal.read(path)))
    assert isinstance(run, RunRecord)
    return run, shown[-1]


def test_the_report_and_the_journal_show_the_machine_and_the_prediction_is_for_it(
    container: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same container on an H100 and on an A100: 28 MiB of Transformer Engine's workspace (32 and 4) apart, and two
    of torch's (32 and 8.125) on the last stage, which has the output layer."""
    peaks = {}
    for name, capability in (("NVIDIA H100 80GB HBM3", (9, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0))):
        monkeypatch.setitem(sys.modules, "torch", torch_on(name, capability))
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        run, shown = report(container, tmp_path / f"{name}.jsonl")
        monkeypatch.undo()
        assert run.machine is not None and run.machine["gpu"] == name
        assert run.machine["facts"]["torch"] == {"value": "2.9", "source": "imported"}
        title, machine, *_ = shown.splitlines()
        assert title.startswith("GPU memory by pipeline stage") and machine.startswith(f"  machine: {name}, ")
        assert "expandable segments" in machine
        json.dumps(run.to_json())
        peaks[name] = [stage["static"] for stage in run.predicted]
    differences = [h100 - a100 for h100, a100 in zip(*peaks.values(), strict=True)]
    assert differences == [28 << 20] * 3 + [(28 << 20) + 2 * ((32 << 20) - (2 * 4096 + 8 * 16) * KIB)]


def test_residuals_are_found_again_by_a_command_line_that_names_the_gpu(container: SimpleNamespace) -> None:
    """What only the process knows does not count; the generation and megatron-core's release do."""
    plain = run_from_config_container(container)
    def on(**fields: Any) -> str:
        return config_digest(run_from_config_container(container, implementation=fields))

    only_here = dict(
        torch=(2, 9), transformer_engine=(2, 11), expandable_segments=True, cublas_workspace_bytes=1 << 20,
        nvte_deterministic=True,
    )  # fmt: skip
    assert on(**only_here) == config_digest(plain)
    assert len({on(), on(gpu_arch="ampere"), on(megatron_core=(0, 14))}) == 3
