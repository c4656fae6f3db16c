"""The parameters of a rank under Transformer Engine, without Transformer Engine.

megatron-core's TE layer specs decide which module goes where and with which sizes; TE's constructors turn
those sizes into weights. Here megatron-core's own wrappers (``extensions/transformer_engine.py``) run
unchanged over stand-ins of TE's constructors, which make the same weights and nothing else. megatron-core
looks for TE while it is imported, so this happens in a process of its own: ``parameter_shapes_with_te``
starts it.

Weights as of Transformer Engine 2.x: ``pytorch/module/{linear,layernorm_linear,grouped_linear}.py``,
``pytorch/attention/dot_product_attention/dot_product_attention.py``,
``pytorch/ops/basic/{layer,rms}norm.py``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import pickle
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any

from bridge_memory.rehearsal.world import RehearsalUnavailable
from bridge_memory.spec import RunSpec

Shapes = list[dict[str, tuple[int, ...]]]
Job = tuple[RunSpec, int]


def parameter_shapes_with_te(jobs: Sequence[Job]) -> list[Shapes | str]:
    """For each (run, stage): {name: local shape} of each chunk, or why megatron-core cannot build it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__],
        input=pickle.dumps(list(jobs)), capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RehearsalUnavailable(f"building with Transformer Engine's shapes failed: {' '.join(last)}")
    answer: list[Shapes | str] = pickle.loads(done.stdout)
    return answer


# ---- in the other process -------------------------------------------------------------------------


class _StubModule(types.ModuleType):
    """Any capitalised name is a class that accepts anything, any other a submodule."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        import torch

        made = type(name, (torch.nn.Module,), {"__init__": _ignore_arguments})
        setattr(self, name, made)
        return made

    def __call__(self, *args: object, **kwargs: object) -> tuple[None, None]:
        """A function of that name; the one that constructors call returns two things (cpu_offload)."""
        return None, None


def _ignore_arguments(self: Any, *args: object, **kwargs: object) -> None:
    import torch

    torch.nn.Module.__init__(self)


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds transformer_engine and everything below it."""

    ROOTS = ("transformer_engine", "transformer_engine_torch")

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.split(".")[0] not in self.ROOTS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StubModule(spec.name)
        if spec.name == "transformer_engine":
            module.__version__ = "2.9.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "transformer_engine.pytorch":
            for made in _constructors():
                setattr(module, made.__name__, made)


def _constructors() -> list[type]:
    import torch
    from torch.nn import Parameter

    def empty(*shape: int, dtype: Any) -> Any:
        return Parameter(torch.empty(*shape, dtype=dtype, device="meta"))

    class _Linear(torch.nn.Module):
        """Sizes of one shard: outputs divided in column mode, inputs in row mode."""

        def shard(self, in_features: int, out_features: int, mode: Any, tp_size: int) -> tuple[int, int]:
            self.tp_size, self.parallel_mode = tp_size, mode
            if mode == "column":
                out_features //= tp_size
            elif mode == "row":
                in_features //= tp_size
            return out_features, in_features

    class Linear(_Linear):
        def __init__(
            self, in_features: int, out_features: int, bias: bool = True, parallel_mode: Any = None,
            tp_size: int = 1, params_dtype: Any = None, **_: object,
        ) -> None:  # fmt: skip
            super().__init__()
            out, inp = self.shard(in_features, out_features, parallel_mode, tp_size)
            self.weight = empty(out, inp, dtype=params_dtype)
            self.bias = empty(out, dtype=params_dtype) if bias else torch.empty(0)

    class LayerNormLinear(_Linear):
        def __init__(
            self, in_features: int, out_features: int, bias: bool = True, parallel_mode: Any = None,
            tp_size: int = 1, params_dtype: Any = None, normalization: str = "LayerNorm", **_: object,
        ) -> None:  # fmt: skip
            super().__init__()
            out, inp = self.shard(in_features, out_features, parallel_mode, tp_size)
            self.layer_norm_weight = empty(in_features, dtype=params_dtype)
            if normalization == "LayerNorm":
                self.layer_norm_bias = empty(in_features, dtype=params_dtype)
            self.weight = empty(out, inp, dtype=params_dtype)
            self.bias = empty(out, dtype=params_dtype) if bias else torch.empty(0)

    class GroupedLinear(_Linear):
        def __init__(
            self, num_gemms: int, in_features: int, out_features: int, bias: bool = True,
            parallel_mode: Any = None, tp_size: int = 1, params_dtype: Any = None, **_: object,
        ) -> None:  # fmt: skip
            super().__init__()
            out, inp = self.shard(in_features, out_features, parallel_mode, tp_size)
            self.num_gemms = num_gemms
            for i in range(num_gemms):
                self.register_parameter(f"weight{i}", empty(out, inp, dtype=params_dtype))
                if bias:
                    self.register_parameter(f"bias{i}", empty(out, dtype=params_dtype))

    class RMSNorm(torch.nn.Module):
        def __init__(self, hidden_size: int = 0, normalized_shape: int = 0, **_: object) -> None:
            super().__init__()
            self.size = hidden_size or normalized_shape  # the latter is what megatron-core 0.17 and later say
            self.weight = empty(self.size, dtype=torch.bfloat16)

    class LayerNorm(RMSNorm):
        def __init__(self, **sizes: Any) -> None:
            super().__init__(**sizes)
            self.bias = empty(self.size, dtype=torch.bfloat16)

    class DotProductAttention(torch.nn.Module):
        def __init__(
            self, num_attention_heads: int, tp_size: int = 1, softmax_type: str = "vanilla", **_: object
        ) -> None:
            super().__init__()
            if softmax_type == "learnable":
                self.softmax_offset = empty(num_attention_heads // tp_size, dtype=torch.float32)

    return [Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention]


def _answer(jobs: Sequence[Job]) -> list[Shapes | str]:
    from bridge_memory.rehearsal.model import build_chunks, parameter_shapes
    from bridge_memory.rehearsal.patches import building
    from bridge_memory.rehearsal.world import NotBuildable, fake_world
    from bridge_memory.spec.ranks import rank_of_stage

    answers: list[Shapes | str] = []
    for run, stage in jobs:
        try:
            with fake_world(run.parallel, rank_of_stage(run.parallel, stage)), building():
                answers.append(parameter_shapes(build_chunks(run)))
        except NotBuildable as refusal:
            answers.append(str(refusal))
    return answers


def _serve() -> None:
    import logging
    import os

    logging.disable(logging.WARNING)
    jobs = pickle.loads(sys.stdin.buffer.read())
    answer_to, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    sys.meta_path.insert(0, _StubFinder())
    answer_to.write(pickle.dumps(_answer(jobs)))
    answer_to.close()


if __name__ == "__main__":
    _serve()
