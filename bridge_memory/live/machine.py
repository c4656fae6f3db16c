"""GPU, releases and allocator settings of this process. Imports nothing and does not start CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bridge_memory.calibration.records import FactRecord, MachineRecord
from bridge_memory.cards.generations import DEFAULT_GENERATION, generation_of
from bridge_memory.live.guard import pass_on
from bridge_memory.readers import environment
from bridge_memory.releases import release_in, release_words
from bridge_memory.spec import RunSpec
from bridge_memory.spec.gpus import amd_assumption

#: Field of ImplementationSpec -> (module, name) of a package whose releases have rules.
_PACKAGES = {
    "megatron_core": ("megatron.core", "megatron-core"),
    "transformer_engine": ("transformer_engine", "Transformer Engine"),
    "torch": ("torch", "torch"),
}
LOADED, VARIABLE, CONTAINER, DEVICE = "imported", "environment", "the container's env_vars", "torch.cuda"
_AS_DEFAULT = f"library workspaces as on a {DEFAULT_GENERATION.capitalize()} GPU"


@dataclass(frozen=True, slots=True)
class Fact:
    """A field of ImplementationSpec in this process: its value, in words, and its source."""

    value: Any
    words: str
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """``facts`` by field of ImplementationSpec; a missing field keeps its default, as ``notes`` say."""

    facts: Mapping[str, Fact] = field(default_factory=dict)
    #: ``torch.cuda.get_device_name``; "" where no device is in use.
    gpu: str = ""
    #: Assumptions of a prediction for this machine.
    notes: tuple[str, ...] = ()
    #: Packages whose absence is reported.
    expected: tuple[str, ...] = tuple(_PACKAGES)

    @classmethod
    def of_process(
        cls,
        config: Any = None,
        *,
        modules: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Machine:
        """The machine of this process. ``config``: a container, whose ``env_vars`` are defaults of the process's
        environment (Megatron Bridge 0.6). Never raises: a fact that cannot be read is left out."""
        modules = sys.modules if modules is None else modules
        environ = os.environ if environ is None else environ
        facts: dict[str, Fact] = {}
        notes: list[str] = []
        gpu = ""
        try:
            gpu = _device(modules.get("torch"), facts, notes)
        except Exception as error:
            pass_on(error)
            notes.append(f"the GPU is not known ({type(error).__name__}): {_AS_DEFAULT}")
        for name, (module, words) in _PACKAGES.items():
            with suppress(Exception):
                if (release := release_in(getattr(modules.get(module), "__version__", None))) is not None:
                    facts[name] = Fact(release, f"{words} {release_words(release)}", LOADED)
        with suppress(Exception):
            _variables(environ, config, facts)
        return cls(facts, gpu, tuple(notes), ("torch",) if _without_megatron(config) else tuple(_PACKAGES))

    def overrides(self) -> dict[str, Any]:
        """Fields of ImplementationSpec, for ``run_from_config_container(..., implementation=...)``."""
        return {name: fact.value for name, fact in self.facts.items()}

    def line(self) -> str:
        """One line: what was found, and what stays the default."""
        missing = [f"{words} not imported" for name, (_, words) in _PACKAGES.items()
                   if name in self.expected and name not in self.facts]
        found = [fact.words for fact in self.facts.values() if fact.words]
        return "machine: " + "; ".join((", ".join(filter(None, (self.gpu, *found, *missing))), *self.notes))

    def to_json(self) -> MachineRecord:
        facts = {n: FactRecord(value=_word(f.value), source=f.source) for n, f in self.facts.items()}
        return MachineRecord(gpu=self.gpu, facts=facts, notes=list(self.notes))


def _without_megatron(config: Any) -> bool:
    """Whether a run's layers are not megatron-core's."""
    return isinstance(config, RunSpec) and config.implementation.torch_layers


def _device(torch: Any, facts: dict[str, Fact], notes: list[str]) -> str:
    """The name of the device in use; its generation goes into ``facts``."""
    cuda = getattr(torch, "cuda", None)
    rocm = getattr(getattr(torch, "version", None), "hip", None)
    if rocm:
        notes.append(amd_assumption(f"ROCm {rocm}", DEFAULT_GENERATION))
    # An unused device is not queried: reading its properties would start CUDA.
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        notes.append(f"no CUDA device is in use: {_AS_DEFAULT}")
        return ""
    name = str(cuda.get_device_name())
    if rocm:
        return name
    major, minor = cuda.get_device_capability()
    generation = generation_of((int(major), int(minor)))
    if generation is None:
        notes.append(f"compute capability {major}.{minor} is of an unknown generation: {_AS_DEFAULT}")
    else:
        facts["gpu_arch"] = Fact(generation, f"{generation} {major}.{minor}", DEVICE)
    return name


def _variables(environ: Mapping[str, str], config: Any, facts: dict[str, Fact]) -> None:
    """Settings of the environment. An unset variable is a fact too: the library's default applies."""
    theirs = getattr(config, "env_vars", None)
    theirs = {str(k): str(v) for k, v in theirs.items()} if isinstance(theirs, Mapping) else {}
    env = {name: value for name in environment.VARIABLES if (value := environ.get(name, theirs.get(name))) is not None}

    def source(*names: str) -> str:
        return CONTAINER if any(n in env and n not in environ for n in names) else VARIABLE

    grows = environment.expandable_segments(env)
    of_allocator = [name for name in environment.VARIABLES if name.endswith("ALLOC_CONF")]
    facts["expandable_segments"] = Fact(grows, "expandable segments" if grows else "", source(*of_allocator))
    config_of_cublas = env.get("CUBLAS_WORKSPACE_CONFIG")
    size = environment.cublas_workspace_bytes(config_of_cublas)
    if size is not None:
        words = f"CUBLAS_WORKSPACE_CONFIG={config_of_cublas}"
        facts["cublas_workspace_bytes"] = Fact(size, words, source("CUBLAS_WORKSPACE_CONFIG"))
    strict = environment.nvte_deterministic(env)
    words = "deterministic Transformer Engine" if strict else ""
    facts["nvte_deterministic"] = Fact(strict, words, source("NVTE_ALLOW_NONDETERMINISTIC_ALGO"))
    left = environment.attention_backend(env)
    if left is not None:
        words = f"{left} attention by NVTE_FLASH_ATTN and NVTE_FUSED_ATTN"
        facts["attention_backend"] = Fact(left, words, source("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"))


def _word(value: Any) -> str:
    return release_words(value) if isinstance(value, tuple) else str(value)
