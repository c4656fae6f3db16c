"""What a block needs to know about the run: local sizes and which implementation runs. No layers, no pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from bridge_memory.spec import DTYPE_BYTES, ImplementationSpec, RecomputeSpec, RunSpec


@dataclass(frozen=True, slots=True, eq=False)
class BlockContext:
    """Local sizes of one rank. Instances are interned by ``context_of``: equal runs share one object."""

    hidden_size: int
    #: s after context parallelism, b: the micro batch.
    seq: int
    batch: int
    tp: int
    sp: bool
    cp: int
    ep: int
    etp: int
    #: Bytes of one activation element, and of one element of the residual stream.
    act: int
    residual: int
    normalization: str
    hidden_dropout: float
    attention_dropout: float
    params_dtype: str
    fp8: str | None
    fp8_recipe: str
    fp8_param: bool
    attention_softmax_in_fp32: bool
    recompute: RecomputeSpec
    impl: ImplementationSpec
    #: Whether layers rotate queries and keys.
    rotary: bool
    #: Width of a head that is rotated; 0 where the source does not say (then the whole head is).
    rotary_dim: int
    padded_vocab: int

    @property
    def te(self) -> bool:
        return self.impl.transformer_impl == "transformer_engine"

    @property
    def tokens(self) -> int:
        """s b on this context-parallel rank."""
        return self.seq * self.batch

    @property
    def tokens_sp(self) -> int:
        """Tokens of the residual stream: s b / t under sequence parallelism."""
        return self.seq * self.batch // self.tp if self.sp else self.seq * self.batch

    @property
    def hidden_bytes(self) -> int:
        """One residual-stream tensor [s, b, h] (divided by t under SP)."""
        return self.tokens_sp * self.hidden_size * self.residual


@lru_cache(maxsize=4096)
def _intern(key: tuple) -> BlockContext:
    return BlockContext(*key)


def context_of(run: RunSpec) -> BlockContext:
    """The context of every block of ``run`` (all its ranks share it)."""
    p, b, m = run.parallel, run.batch, run.model
    act = DTYPE_BYTES[run.precision.params_dtype]
    return _intern(
        (
            m.hidden_size,
            b.seq_length // p.cp,
            b.micro_batch_size,
            p.tp,
            p.sp,
            p.cp,
            p.ep,
            p.etp,
            act,
            4 if run.precision.fp32_residual_connection else act,
            m.normalization,
            m.hidden_dropout,
            m.attention_dropout,
            run.precision.params_dtype,
            run.precision.fp8,
            run.precision.fp8_recipe,
            run.precision.fp8_param,
            run.precision.attention_softmax_in_fp32,
            run.recompute,
            run.implementation,
            m.position_embedding_type == "rope",
            m.rotary_dim,
            m.padded_vocab_size(p.tp),
        )
    )
