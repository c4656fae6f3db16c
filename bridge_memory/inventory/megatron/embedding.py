"""Token and position embeddings of the first stage.

Source: megatron-core ``models/common/embeddings/language_model_embedding.py: LanguageModelEmbedding.forward``,
``tensor_parallel/layers.py: VocabParallelEmbedding``. V is the padded vocabulary.
"""

from __future__ import annotations

from bridge_memory.inventory.megatron.hyper_connections import expand
from bridge_memory.spec import ModelSpec, divide
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.parameters import Use
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def learned_positions(model: ModelSpec) -> int | None:
    """Rows of the position table: 0 without a table, None if it has as many rows as a sequence has tokens."""
    if model.position_embedding_type != "learned_absolute":
        return 0
    return model.max_position_embeddings or None


def record_embedding(r: Recorder, rows: int | None, norm: bool, *, scaled: bool = False) -> Tensor:
    """Token ids [b, s] -> [T_sp, h], with dropout if the model has it. ``rows``: from ``learned_positions``. ``norm``:
    on the embeddings (BLOOM). ``scaled``: multiplied by a constant, in a new tensor."""
    ctx, h = r.ctx, r.ctx.hidden_size
    r.parameter("embedding.word_embeddings.weight", (_rows(r), h), sharded=ctx.tp > 1, use=Use.EMBEDDING)
    positions = position_rows(ctx, rows)
    if rows != 0:
        r.parameter("embedding.position_embeddings.weight", (positions, h), use=Use.EMBEDDING)
    if norm:
        r.norm_parameters("embedding.word_embeddings_layernorm", h)
    ids = r.tape.input("token ids", 8 * ctx.tokens, requires_grad=False)
    out = embed(r, ids, positions=positions, norm=norm, unscattered=bool(ctx.encoders))
    if scaled:
        out = r.tape.make("scaled embeddings", out, ctx.hidden_bytes)
    if ctx.residual_streams > 1:
        out = expand(r, out)
    r.tape.output(out)
    return out


def position_rows(ctx: BlockContext, rows: int | None) -> int:
    """Rows of the position table; ``rows``: from ``learned_positions``."""
    return ctx.seq * ctx.cp if rows is None else rows


def embed(
    r: Recorder, ids: Tensor, *, positions: int = 0, norm: bool = False, place: Tensor | None = None,
    waits: bool = False, unscattered: bool = False,
) -> Tensor:
    """The module's forward pass. ``positions``: rows of its position table, 0 without one. ``unscattered``: whole
    under sequence parallelism too (``scatter_embedding_sequence_parallel``), since features of images are to be put in.

    ``place``: position ids, if not the batch's. ``waits``: the gradient of the position table is alive while that of
    the word table is made. Gradients of the tables are what costs are asked for without too.
    """
    ctx, tape = r.ctx, r.tape
    h = ctx.hidden_size
    whole = ctx.tokens * h * ctx.act
    # With several sequences the gradient is a view of [s, b, h]; the kernel makes a contiguous [b, s, h] of it (torch
    # ``native/cuda/Embedding.cu: embedding_dense_backward_cuda``).
    copied = whole if ctx.batch > 1 else 0
    weight = tape.tensor("embedding weight", 0)  # frozen, neither it nor its results have gradients
    tape.op("weight", (), weight)
    mask = None
    if ctx.tp > 1:
        # Tokens of other ranks look up row 0 and are then overwritten with zeros.
        mask = tape.make("token mask", ids, ctx.tokens, grad=False)
        ids = tape.make("masked token ids", ids, 8 * ctx.tokens, grad=False)
    # The weight's gradient is dense, of the parameter's size and dtype.
    out = tape.make(
        "word embeddings", (ids, weight), whole if mask is None else 0, saves=(ids,),
        backward_workspace=(_rows(r) + (positions if waits else 0)) * h * ctx.act + copied, apart=True,
    )
    if mask is not None:
        # In place in forward; backward makes a new gradient.
        out.grad_bytes = 0 if r.frozen else whole
        out = tape.make("masked embeddings", (out, mask), whole, saves=(mask,))
    scattered = ctx.sp and not positions and not unscattered
    looked_up = [out]  # variables of LanguageModelEmbedding.forward
    if scattered:
        if ctx.batch > 1:
            out = tape.make("transposed embeddings", out, whole, alias=True)
        out = tape.make("reduce-scattered embeddings", out, ctx.tokens_sp * h * ctx.act)
        looked_up = [out]
    if positions:
        if place is None:
            place = tape.input("position ids", 8 * ctx.tokens, requires_grad=False)
        position = tape.make(
            "position embeddings", (place, weight), whole, saves=(place,),
            backward_workspace=positions * h * ctx.act + copied, apart=True,
        )
        out = tape.make("embeddings", (out, position), whole, alias=True)
        looked_up.append(position)
    if not scattered and ctx.batch > 1:
        out = tape.make("transposed embeddings", out, whole, alias=True)
    if ctx.residual != ctx.act:
        out = tape.make("fp32 embeddings", out, out.bytes // ctx.act * ctx.residual)
    if ctx.sp and positions and not unscattered:
        # A copy of the view of this rank's tokens (``clone_scatter_output_in_embedding``).
        out = tape.make("scattered embeddings", out, ctx.hidden_bytes)
    if norm:
        stats = r.norm_statistics("embedding norm", ctx.tokens_sp)
        out = tape.make("normed embeddings", out, ctx.hidden_bytes, saves=(out, *stats), also=stats)
    if ctx.hidden_dropout:
        dropped = tape.tensor("embedding dropout mask", ctx.tokens_sp * h, grad=False)
        out = tape.make("embeddings after dropout", out, ctx.hidden_bytes, saves=(dropped,), also=(dropped,))
    tape.keep_alive(*looked_up)
    return out


def _rows(r: Recorder) -> int:
    return divide(r.ctx.padded_vocab, r.ctx.tp, "padded vocab_size", "tensor_model_parallel_size")
