"""What torch.compile keeps of a function for backward: the real front end, joint graph passes and partitioner of
Inductor, at full size, on tensors without data. Only the making of kernels is left out: the graphs run as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode

META_FLASH = torch.ops.aten._scaled_dot_product_flash_attention


class Kept:
    """Forward graphs, as the partitioner gives them."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def backend(self, graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=self._as_it_is)

    def _as_it_is(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        if not options.get("is_backward"):
            self.graphs.append(graph)

        def run(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            return graph(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def saved(self, *beside: torch.Tensor) -> dict[str, int]:
        """Name of a node -> bytes of its storage, each once; without what the function returns (the first output),
        parameters and whatever else is ``beside``."""
        shapes = {(tuple(t.shape), t.dtype) for t in beside}
        found: dict[str, int] = {}
        seen = set()
        for graph in self.graphs:
            outputs = next(iter(graph.graph.find_nodes(op="output"))).args[0]
            for node in outputs[1:]:
                value = node.meta.get("val") if node is not None else None
                if not isinstance(value, torch.Tensor):
                    continue
                if node.op == "placeholder" and (tuple(value.shape), value.dtype) in shapes:
                    continue
                storage = value.untyped_storage()._cdata
                if storage not in seen:
                    seen.add(storage)
                    found[node.name] = value.numel() * value.element_size()
        return found


@contextmanager
def importable(modules: dict[str, Any]) -> Iterator[None]:
    """Modules under the names by which the compiler asks for them."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def flash(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> tuple[Any, None]:
    """transformers' attention interface, of CUDA's flash kernel by its name."""
    return META_FLASH(q, k, v, 0.0, True)[0].transpose(1, 2).contiguous(), None


@contextmanager
def without_data(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """New tensors have no data; parameters are made in ``dtype``, as one that was loaded in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch._dynamo.reset()
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_default_dtype(before)
        torch._dynamo.reset()


def kept_by_layer(config: dict[str, Any], batch: int, seq: int) -> dict[str, int]:
    """Of one decoder layer of transformers, compiled by itself."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    given = AutoConfig.for_model(**config)
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = flash
    try:
        with without_data():
            model = AutoModelForCausalLM.from_config(given, attn_implementation="sdpa")
            layer = model.model.layers[0].train()
            kept = Kept()
            layer.compile(backend=kept.backend)
            head = getattr(given, "head_dim", None) or given.hidden_size // given.num_attention_heads
            tables = torch.empty(1, seq, head), torch.empty(1, seq, head)
            x = torch.empty(batch, seq, given.hidden_size, requires_grad=True)
            out = layer(x, position_embeddings=tables, attention_mask=None, position_ids=None)
            out = out[0] if isinstance(out, tuple) else out
            out.backward(torch.empty_like(out))
            return kept.saved(*tables, *layer.parameters())
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before


def kept_by_model(config: dict[str, Any], batch: int, seq: int) -> dict[str, int]:
    """Of a whole model with its loss."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    given = AutoConfig.for_model(**config, use_cache=False)
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = flash
    try:
        with without_data():
            model = AutoModelForCausalLM.from_config(given, attn_implementation="sdpa").train()
            kept = Kept()
            model.compile(backend=kept.backend)
            ids = torch.zeros(batch, seq, dtype=torch.long)
            model(input_ids=ids, labels=ids).loss.backward()
            return kept.saved(*model.parameters())
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before


def kept_by_loss(tokens: int, vocab: int, loss: Callable[[Any, Any], Any]) -> dict[str, int]:
    with without_data():
        kept = Kept()
        logits, labels = torch.empty(tokens, vocab, requires_grad=True), torch.zeros(tokens, dtype=torch.long)
        torch.compile(loss, backend=kept.backend)(logits, labels).backward()
        return kept.saved()
