"""Token and position embeddings of the first stage.

Source: megatron-core ``models/common/embeddings/language_model_embedding.py: LanguageModelEmbedding.forward``,
``tensor_parallel/layers.py: VocabParallelEmbedding``. V is the padded vocabulary.
"""

from __future__ import annotations

from bridge_memory.inventory.recorder import Recorder
from bridge_memory.spec import ModelSpec, divide


def record_embedding(r: Recorder, model: ModelSpec) -> None:
    """Token ids [b, s] -> [T_sp, h], through dropout where training has it."""
    ctx, tape = r.ctx, r.tape
    rows = divide(ctx.padded_vocab, ctx.tp, "padded vocab_size", "tensor_model_parallel_size")
    h = ctx.hidden_size
    r.parameter("embedding.word_embeddings.weight", (rows, h), sharded=ctx.tp > 1)
    positions = model.position_embedding_type == "learned_absolute"
    if positions:
        r.parameter("embedding.position_embeddings.weight", (model.max_position_embeddings, h))
    if model.embedding_layernorm:
        r.norm_parameters("embedding.word_embeddings_layernorm", h)
    whole = ctx.tokens * h * ctx.act
    ids = tape.input("token ids", 8 * ctx.tokens, requires_grad=False)
    masked = tape.tensor("masked token ids", 8 * ctx.tokens if ctx.tp > 1 else 0, grad=False)
    weight = tape.tensor("word_embeddings.weight", 0)
    tape.op("weight", (), weight)
    # The weight's gradient is dense, of the parameter's size and dtype.
    words = tape.make(
        "word embeddings", (ids, weight), whole, saves=(ids, masked), also=(masked,),
        workspace=whole if ctx.tp > 1 else 0, backward_workspace=rows * h * ctx.act,
    )
    if ctx.tp > 1 and ctx.sp:
        words = tape.make("reduce-scattered embeddings", words, ctx.hidden_bytes)
    if positions:
        position = tape.make(
            "position embeddings", (ids, weight), whole, saves=(ids,),
            backward_workspace=model.max_position_embeddings * h * ctx.act,
        )
        words = tape.make("embeddings", (words, position), words.bytes, alias=True)
    out = tape.make("transposed embeddings", words, ctx.hidden_bytes)
    if model.embedding_layernorm:
        stats = r.norm_statistics("embedding norm", ctx.tokens_sp)
        out = tape.make("normed embeddings", out, ctx.hidden_bytes, saves=(out, *stats), also=stats)
    if ctx.hidden_dropout:
        mask = tape.tensor("embedding dropout mask", ctx.tokens_sp * h, grad=False)
        out = tape.make("embeddings after dropout", out, ctx.hidden_bytes, saves=(mask,), also=(mask,))
    tape.output(out)
