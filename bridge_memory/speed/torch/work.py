"""The work of the modules that Hugging Face transformers and torchtitan build: products, attention, and the bytes that
all other operations read and write.

Operations are those of the traces that memory is counted from (``inventory/torch``): each reads its inputs
and writes its outputs, and its backward reads what it kept and the gradients that come, and writes those that it
gives. A product's own operands are taken off again: its time covers them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bridge_memory.inventory.torch.attention import needs_mask
from bridge_memory.inventory.torch.blocks import embedding_block, final_norm_block, layer_block, output_block
from bridge_memory.spec import AttentionSpec, LayerSpec, MLASpec, MoESpec, RunSpec
from bridge_memory.speed.megatron.work import FUSED_BACKWARD, Product
from bridge_memory.tapes.blocks import Block, PlainTraces
from bridge_memory.tapes.context import BlockContext, context_of
from bridge_memory.tapes.parameters import Parameter, Use
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Node, Op, Region, Tape, Tensor

#: Backward of plain attention over its forward: two products for one.
_PLAIN_BACKWARD = 2.0


class BlockWork(NamedTuple):
    """One block, one microbatch on one GPU."""

    products: tuple[Product, ...] = ()
    #: Floating-point operations of attention forward, and of its backward.
    attention: float = 0.0
    attention_backward: float = 0.0
    #: Bytes that other operations read and write.
    forward: float = 0.0
    backward: float = 0.0
    #: Operations, each at least one kernel that the host starts.
    operations: int = 0
    operations_backward: int = 0


class ModelWork(NamedTuple):
    """A model's blocks: the embedding, its kinds of layers with how many there are, and what follows them."""

    embedding: BlockWork
    layers: tuple[tuple[BlockWork, int], ...]
    #: Final norm, output layer and loss.
    end: BlockWork


def model_work(run: RunSpec) -> ModelWork:
    """The work of ``run``, whose modules are transformers' or torchtitan's."""
    model, tied = run.model, run.model.share_embeddings_and_output_weights
    of = _Works(run)
    layers = tuple([(of.layer(kind), times) for kind, times in Counter(model.layers).items()])
    end = _joined(of.final_norm(), of.output(model.output_bias, not tied))
    return ModelWork(of.embedding(), layers, end)


def layer_products(run: RunSpec, kind: LayerSpec) -> tuple[tuple[str, Product], ...]:
    """Names of a layer's matrices and their products, in the order in which they run."""
    return _Works(run).products(kind)


class _Works:
    """Works of blocks, kept with the traces of the same settings."""

    def __init__(self, run: RunSpec) -> None:
        self._run, self._known = run, context_of(run)
        self._tapes = context_of(run)
        self._tapes.many = PlainTraces(self._tapes)  # type: ignore[assignment]

    def _kept(self, key: Any, work: Callable[[], BlockWork]) -> BlockWork:
        kept: dict[Any, BlockWork] = self._known.cache.kept
        name = ("work", key, self._known.dimensions, self._run.batch)
        found = kept.get(name)
        if found is None:
            found = kept[name] = work()
        return found

    def layer(self, kind: LayerSpec) -> BlockWork:
        return self._kept(kind, lambda: self._of(layer_block(kind, self._tapes), kind))

    def products(self, kind: LayerSpec) -> tuple[tuple[str, Product], ...]:
        recorder: Any = layer_block(kind, self._tapes)
        names = [
            p.name.removesuffix(".weight") for parameters, _ in recorder.rows for p in parameters if len(p.shape) == 2
        ]
        return tuple(zip(names, _products(recorder, kind), strict=True))

    def embedding(self) -> BlockWork:
        return self._kept("embedding", lambda: self._of(embedding_block(self._run.model, self._tapes)))

    def final_norm(self) -> BlockWork:
        return self._kept("final norm", lambda: self._of(final_norm_block(self._tapes)))

    def output(self, bias: bool, own: bool) -> BlockWork:
        return self._kept(("output", bias, own), lambda: self._output(output_block(bias, own, self._tapes)))

    def _of(self, block: Block, kind: LayerSpec | None = None) -> BlockWork:
        recorder: Any = block
        products = tuple(_products(recorder, kind)) if kind is not None else ()
        attention, backward = _attention(self._run, self._known, kind)
        return self._work(recorder.tape, products, attention, backward)

    def _output(self, block: Block) -> BlockWork:
        """The output layer's product is there whoever owns its weight; Liger's fused loss makes logits a chunk at a
        time: they are written, read for the loss and overwritten by their gradient."""
        recorder: Any = block
        ctx, hf = self._known, self._known.torch_layers
        assert hf is not None
        product = Product(ctx.tokens, ctx.padded_vocab, ctx.hidden_size, quantized=False)
        work = self._work(recorder.tape, (product,))
        if hf.liger("fused_linear_cross_entropy"):
            logits = 3.0 * ctx.tokens * ctx.padded_vocab * hf.compute_width
            work = self._work(recorder.tape, ())._replace(products=(product,))
            work = work._replace(forward=work.forward + logits)
        return work

    def _work(
        self, tape: Tape, products: tuple[Product, ...], attention: float = 0.0, attention_backward: float = 0.0
    ) -> BlockWork:
        hf = self._known.torch_layers
        assert hf is not None
        traffic = Traffic(tape)
        weights = float(hf.autocast)  # copies that autocast made are inputs like others
        own = back = 0.0
        for p in products:
            in_and_out = p.rows * (p.inner + p.columns) * p.times * hf.compute_width
            weight = p.inner * p.columns * p.times * hf.compute_width * weights
            own += in_and_out + weight
            back += in_and_out + p.rows * p.inner * p.times * hf.compute_width + 2 * weight
        return BlockWork(
            products, attention, attention_backward, max(0.0, traffic.forward - own),
            max(0.0, traffic.backward - back), traffic.operations, traffic.operations_backward,
        )  # fmt: skip


class Traffic:
    """Bytes and operations of one tape."""

    def __init__(self, tape: Tape) -> None:
        self.forward = self.backward = 0.0
        self.operations = self.operations_backward = 0
        readers: Counter[int] = Counter()
        gradients: dict[int, float] = {}
        for op in _operations(tape.nodes):
            made = sum(t.bytes for t in op.outputs)
            came = sum(t.grad_bytes for t in op.outputs)
            if made:
                self.forward += made + sum(map(_read, op.inputs))
                self.operations += 1
            for t in op.inputs:
                if t.has_gradient:
                    readers[id(t)] += 1
                    gradients[id(t)] = t.grad_bytes
            if not came:
                continue
            given = sum(t.grad_bytes for t in op.inputs)
            if not op.alias:
                self.backward += came + given + sum(map(_read, op.saves))
                self.operations_backward += 1
        for tensor, times in readers.items():
            if times > 1:  # the gradients of several uses are summed: two read, one written
                self.backward += 3.0 * (times - 1) * gradients[tensor]
                self.operations_backward += times - 1


def _read(t: Tensor) -> Any:
    """Bytes of a tensor, or of the part that a view is, of which its gradient tells."""
    return t.bytes or t.grad_bytes


def _operations(nodes: Sequence[Node]) -> Iterator[Op]:
    for node in nodes:
        if isinstance(node, Op):
            if not node.scope:
                yield node
        elif isinstance(node, Region):
            yield from _operations(node.nodes)


def _products(recorder: Recorder, kind: LayerSpec) -> Iterator[Product]:
    """Of every matrix of a layer; of experts each has its share of the tokens."""
    tokens, ffn = recorder.ctx.tokens, kind.ffn
    for parameters, times in recorder.rows:
        for p in parameters:
            experts, shape = _matrix(p)
            if shape is None or p.use is Use.EMBEDDING:
                continue
            rows: float = tokens
            if p.expert:
                assert isinstance(ffn, MoESpec)
                rows = tokens * ffn.topk / ffn.num_experts
            yield Product(rows, shape[0], shape[1], times * experts, False)


def _matrix(p: Parameter) -> tuple[int, tuple[int, int] | None]:
    """(how many matrices a parameter is, their shape): experts may be in one of three dimensions."""
    if len(p.shape) == 3 and p.expert:
        return p.shape[0], (p.shape[1], p.shape[2])
    return 1, (p.shape[0], p.shape[1]) if len(p.shape) == 2 else None


def _attention(run: RunSpec, ctx: BlockContext, kind: LayerSpec | None) -> tuple[float, float]:
    """Floating-point operations of a layer's attention, forward and backward. Flash attention leaves out what the mask
    hides; torch's other kernels and eager attention do not."""
    mixer = None if kind is None else kind.mixer
    hf = ctx.torch_layers
    assert hf is not None
    length: float = ctx.seq
    window = None
    if isinstance(mixer, AttentionSpec):
        heads, width, window = mixer.num_attention_heads, mixer.kv_channels + mixer.value_channels, mixer.window_size
    elif isinstance(mixer, MLASpec):
        heads = mixer.num_attention_heads
        width = mixer.qk_head_dim + mixer.qk_pos_emb_head_dim + mixer.v_head_dim
    else:
        return 0.0, 0.0
    spec = hf.spec
    masked = hf.attention == "sdpa" and needs_mask(hf, window, ctx.seq, packed=run.batch.packed_sequences)
    plain = hf.attention == "eager" or spec.sdpa_kernel == "math"
    if not (plain or masked or spec.sdpa_kernel == "efficient"):
        length = length / 2 if window is None or window >= length else window * (1 - window / (2 * length))
    flops = 2.0 * ctx.tokens * length * heads * width
    return flops, flops * (_PLAIN_BACKWARD if plain else FUSED_BACKWARD)


def _joined(*works: BlockWork) -> BlockWork:
    products = tuple([p for w in works for p in w.products])
    return BlockWork(products, *[sum(values) for values in list(zip(*works, strict=True))[1:]])
