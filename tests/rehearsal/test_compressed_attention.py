"""DeepSeek-V4's layers, whose modules no released megatron-core has, beside the operations that Megatron-LM's main
branch runs, told again in torch: what autograd keeps of them and where they are highest.

Linears and norms keep their inputs (and an fp32 deviation a row) as Transformer Engine's do, compiled functions run as
the rehearsal runs megatron-core's, and the indexer's loss is megatron-core 0.19's own.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel import random  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

from bridge_memory.inventory.layer import layer_block  # noqa: E402
from bridge_memory.inventory.layer_links import layer_links  # noqa: E402
from bridge_memory.rehearsal import compiled  # noqa: E402
from bridge_memory.rehearsal.passes import Enter, Leave, run_backward  # noqa: E402
from bridge_memory.rehearsal.patches.fusion import as_a_kernel  # noqa: E402
from bridge_memory.rehearsal.patches.recomputation import (  # noqa: E402
    gradients_of_checkpoints,
    recomputation_without_te,
    storage_shared_without_extension,
)
from bridge_memory.rehearsal.patches.replace import META, replaced  # noqa: E402
from bridge_memory.rehearsal.tracker import Tracker  # noqa: E402
from bridge_memory.rehearsal.world import installed_release, quiet  # noqa: E402
from bridge_memory.spec import (  # noqa: E402
    BatchSpec,
    CompressedAttentionSpec,
    IndexerSpec,
    LayerSpec,
    ModelSpec,
    ParallelSpec,
    RecomputeSpec,
    RunSpec,
)
from bridge_memory.spec.layout import ChunkShape  # noqa: E402
from bridge_memory.tapes.chain import compose  # noqa: E402
from bridge_memory.tapes.context import context_of  # noqa: E402

if (installed_release() or (0, 0)) < (0, 19):
    pytest.skip("the indexer's loss of megatron-core 0.19", allow_module_level=True)

S, H, N = 1024, 1024, 4
BF16 = torch.bfloat16


class _Linear(torch.autograd.Function):
    """Keeps its input; the weight's gradient goes into the main gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.width = weight.shape
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.empty_like(x) if ctx.needs_input_grad[0] else None, gradient.new_empty(ctx.width)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, torch.empty(x.shape[:-1], device=META))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.empty_like(gradient), gradient.new_empty(gradient.shape[-1])


def weight(*shape: int, dtype: Any = BF16) -> Any:
    made = torch.empty(shape, dtype=dtype, device=META, requires_grad=True)
    # As DDP does, which has added it to the main gradient.
    made.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    return made


def linear(x: Any, width: int) -> Any:
    return _Linear.apply(x, weight(width, x.shape[-1]))


def norm(x: Any) -> Any:
    return _Norm.apply(x, weight(x.shape[-1]))


def kernel(function: Any, *args: Any) -> Any:
    return compiled.call(function, args, {}, as_a_kernel)


def rms(q: Any) -> Any:
    return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)


def compress(x: Any, c: int, d: int) -> Any:
    s, b, _ = x.shape
    twice = 2 if c == 4 else 1
    kv, score = linear(x, twice * d), linear(x, twice * d)
    kv, score = (t.view(s // c, c, b, -1) for t in (kv, score))
    score = score + weight(c, twice * d, dtype=torch.float32).view(1, c, 1, -1)
    if twice == 2:
        pair = []
        for t, fill in ((kv, 0), (score, float("-inf"))):
            both = t.new_full((s // c, 2 * c, b, d), fill)
            both[:, c:] = t[..., d:]
            both[1:, :c] = t[:-1, ..., :d]
            pair.append(both)
        kv, score = pair
    pooled = (kv * torch.softmax(score, dim=1)).sum(dim=1)
    return norm(pooled.to(x.dtype))


def choose(spec: Any, x: Any, latent: Any, query: Any, compressed: Any) -> tuple[Any, Any]:
    from megatron.core.transformer.experimental_attention_variant.dsa import FusedDSAIndexerLoss

    s, b, _ = x.shape
    indexer = spec.indexer
    x, latent = x.detach(), latent.detach()
    q = linear(latent, indexer.num_heads * indexer.head_dim).view(s, b, indexer.num_heads, indexer.head_dim).clone()
    k = compress(x, spec.compress_ratio, indexer.head_dim).clone()
    weights = linear(x, indexer.num_heads) * 0.1
    mask = MASKS[s // spec.compress_ratio]
    group = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    key = compressed.unsqueeze(2).expand(-1, -1, spec.num_attention_heads, -1)
    return FusedDSAIndexerLoss.apply(
        q, weights.float() * 0.1, k, query.detach(), key.detach(), 0.1,
        min(indexer.topk, s // spec.compress_ratio), 0.01, mask, False, group,
    )


MASKS: dict[int, Any] = {}


class _Attach(torch.autograd.Function):
    """``DSAIndexerLossAutoScaler``."""

    @staticmethod
    def forward(ctx: Any, output: Any, loss: Any) -> Any:
        ctx.save_for_backward(loss)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, torch.ones_like(ctx.saved_tensors[0])


def attend(query: Any, keys: Any, sink: Any, index: Any) -> Any:
    s, b, a, d = query.shape
    places = index.clamp(min=0).long().unsqueeze(-1).expand(-1, -1, -1, d)
    found = torch.gather(keys.permute(1, 0, 2).unsqueeze(1).expand(-1, s, -1, -1), 2, places)
    q, kv = query.permute(1, 2, 0, 3).float(), found.float()
    scores = torch.einsum("bnsh,bskh->bnsk", q, kv) * 0.1
    scores = scores.masked_fill((index < 0).unsqueeze(1), float("-inf"))
    sink = sink.view(1, a, 1, 1).float()
    most = torch.max(scores.max(dim=-1, keepdim=True).values, sink)
    exponentials = torch.exp(scores - most)
    total = exponentials.sum(dim=-1, keepdim=True) + torch.exp(sink - most)
    shares = exponentials / total
    out = torch.einsum("bnsk,bskh->bnsh", shares, kv).to(query.dtype)
    return out.permute(2, 0, 1, 3).contiguous().reshape(s, b, a * d)


def attention(spec: CompressedAttentionSpec, one: Any, manager: Any) -> Any:
    gain = weight(one.shape[-1])
    x = manager.checkpoint(lambda t: _Norm.apply(t, gain), one)
    s, b, _ = x.shape
    a, d, c = spec.num_attention_heads, spec.head_dim, spec.compress_ratio
    latent = norm(linear(x, spec.q_lora_rank))
    query = kernel(rms, linear(latent, a * d).view(s, b, a, d))
    key = norm(linear(x, d))
    sink = weight(a, dtype=torch.float32)
    window = torch.empty((b, s, spec.window_size), dtype=torch.int64, device=META)
    loss = None
    if c > 1:
        compressed = compress(x, c, d)
        keys = torch.cat([key, compressed], dim=0)
        if spec.indexer is not None:
            chosen, loss = choose(spec, x, latent, query, compressed)
        else:
            chosen = torch.empty((b, s, s // c), dtype=torch.int64, device=META)
        window = torch.cat([window, chosen], dim=-1)
    else:
        keys = key
    out = attend(query, keys, sink, window.int())
    if loss is not None:
        out = _Attach.apply(out, loss)
    groups = weight(spec.output_groups * spec.output_lora_rank, a * d // spec.output_groups)
    groups = groups.view(spec.output_groups, spec.output_lora_rank, -1)
    out = torch.einsum("...gd,grd->...gr", out.view(s, b, spec.output_groups, -1), groups)
    return linear(out.reshape(s, b, -1), H)


def project(x: Any, w: Any) -> Any:
    return x @ w.t(), 1 / (x.norm(dim=-1, keepdim=True) / 64 + 1e-6)


def mixing(proj: Any, r: Any, alpha: Any, bias: Any) -> Any:
    h = r * proj * alpha + bias
    return h[..., :N].sigmoid() + 1e-6, h[..., N : 2 * N].sigmoid() * 2, h[..., 2 * N :]


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.empty_like(gradient)


def aggregate(x: Any, pre: Any) -> Any:
    return (x * pre.unsqueeze(-1)).sum(dim=2)


def mixed(res: Any, x: Any, post: Any, y: Any) -> Any:
    s, b, n, h = x.shape
    streams = torch.bmm(res.view(s * b, n, n).transpose(1, 2), x.view(s * b, n, h)).view(s, b, n, h)
    return post.unsqueeze(-1) * y.unsqueeze(2) + streams


class _Views(torch.autograd.Function):
    """``BroadcastTensorFused``: the three gradients are added by one kernel."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x), x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.empty_like(gradients[0])


class Plain:
    """Nothing is recomputed."""

    def checkpoint(self, function: Any, *args: Any) -> Any:
        return function(*args)


class Recomputed:
    """What ``MHCCheckpointManager`` does with megatron-core's own checkpoints: all outputs lose their storage at the
    end of the block, and come back in forward order with the gradient of its output."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def checkpoint(self, function: Any, *args: Any) -> Any:
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

        self.made.append(CheckpointWithoutOutput())
        return self.made[-1].checkpoint(function, *args)

    def discard(self, out: Any) -> None:
        for one in self.made:
            for made in one.outputs:
                made.untyped_storage().resize_(0)
        out.register_hook(lambda gradient: [one._recompute(None) for one in self.made] and None)


def around(streams: Any, block: Any, manager: Any = None, *, last: bool = False) -> Any:
    """``manager`` recomputes what is aggregated, and what is mixed unless the block is the ``last``."""
    manager = manager or Plain()
    s, b, _ = streams.shape
    first, second, third = _Views.apply(streams)
    x = first.reshape(s * b, -1).to(torch.float32)
    width = N * N + 2 * N
    proj, r = kernel(project, x, weight(width, N * H, dtype=torch.float32))
    pre, post, res = kernel(mixing, proj.view(s, b, width), r.view(s, b, 1), weight(width, dtype=torch.float32),
                            weight(width, dtype=torch.float32))  # fmt: skip
    res = _Sinkhorn.apply(res.view(s, b, N, N))
    pre, post, res = (t.to(BF16) for t in (pre, post, res))
    one = manager.checkpoint(lambda x, w: kernel(aggregate, x.view(s, b, N, H), w), second, pre)
    y = block(one, manager)

    def merged(w: Any, x: Any, v: Any, y: Any) -> Any:
        return kernel(mixed, w, x.view(s, b, N, H), v, y).view(s, b, N * H)

    return (Plain() if last else manager).checkpoint(merged, res, third, post, y)


def spec_of(c: int) -> CompressedAttentionSpec:
    indexer = IndexerSpec(16, 64, 128) if c == 4 else None
    return CompressedAttentionSpec(16, 128, 64, 512, 4, 256, 128, c, indexer)


def run_of(c: int, *, layers: int = 1, recompute: bool = False) -> RunSpec:
    layer = LayerSpec(spec_of(c), None)
    return RunSpec(
        model=ModelSpec("streams", "test", H, 4096, (layer,) * layers, residual_streams=N), parallel=ParallelSpec(),
        batch=BatchSpec(seq_length=S),
        recompute=RecomputeSpec(granularity="selective", modules=("mhc",)) if recompute else RecomputeSpec(),
    )


def passes(c: int, layers: int = 1, *, recompute: bool = False) -> tuple[list[Any], Any, Any]:
    """(what was saved, both peaks) of layers that are attention alone."""
    spec = spec_of(c)
    with quiet(), torch.device(META), ExitStack() as stack:
        for patch in (recomputation_without_te(), gradients_of_checkpoints(), storage_shared_without_extension(META)):
            stack.enter_context(patch)
        stack.enter_context(replaced(random, "_get_all_rng_states", tuple))
        stack.enter_context(replaced(random, "_set_all_rng_states", lambda *states: None))
        stack.enter_context(replaced(random, "_fork_rng", nullcontext))
        MASKS[S // 4] = torch.empty((1, S, S // 4), dtype=torch.float32, device=META)
        tracker = Tracker(MASKS.values())
        with tracker.watching(torch.nn.Linear(1, 1)):
            anchor = torch.empty((), requires_grad=True)
            tracker.ignore(anchor)

            def made(*shape: int, dtype: Any = BF16) -> Any:
                with _disable_current_modes():  # it is there before
                    found = weight_of(*shape, dtype=dtype)
                tracker.ignore(found)
                return found

            weight_of = globals()["weight"]
            globals()["weight"] = made
            try:
                tracker.reset_peak()
                out = Enter.apply(anchor, (S, 1, N * H), BF16)
                manager = Recomputed() if recompute else Plain()
                for number in range(layers):
                    out = around(out, partial(attention, spec), manager, last=number + 1 == layers)
                if recompute:
                    manager.discard(out)
                end = Leave.apply(out)
                del out
                forward = tracker.peak()
                saved = tracker.saved()
                edge = torch.autograd.graph.get_gradient_edge(end)
                del end
                tracker.in_backward = True
                tracker.reset_peak()
                run_backward(edge, torch.empty(()))
                backward = tracker.peak()
            finally:
                globals()["weight"] = weight_of
    return saved, forward, backward


@pytest.mark.parametrize("c", [0, 4, 128])
def test_a_layers_attention_through_streams(c: int) -> None:
    run = run_of(c)
    cost = layer_block(run.model.layers[0], context_of(run)).cost
    saved, forward, backward = passes(c)
    assert cost.retained == pytest.approx(sum(record.bytes for record in saved), rel=0.005)
    assert cost.forward_peak == pytest.approx(forward.bytes, rel=0.005), forward
    assert cost.backward_peak == pytest.approx(backward.bytes, rel=0.005), backward


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputing_streams_frees_them_between_a_chunks_passes(recompute: bool) -> None:
    """Three layers: all but the first one's input goes, and comes back at once."""
    run = run_of(128, layers=3, recompute=recompute)
    layers = ChunkShape(((run.model.layers[0], 3),), False, False, 0, False)
    chunk = compose(layer_links(run.model, layers, context_of(run)))
    saved, forward, backward = passes(128, 3, recompute=recompute)
    assert chunk.retained == pytest.approx(sum(record.bytes for record in saved), rel=0.005)
    assert chunk.forward_peak == pytest.approx(forward.bytes, rel=0.005), forward
    assert chunk.backward_peak == pytest.approx(backward.bytes, rel=0.005), backward
