"""Every constant of the estimate that was fitted on measured runs instead of read in a source.

Each has a name, a unit, the runs behind it and the values it was chosen from: ``bridge-memory accuracy --folds K``
chooses again with whole families left out and predicts those. Sizes of libraries are in ``workspaces``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from bridge_memory.releases import COMPILED_DROPOUT_KEEPS_INPUT
from bridge_memory.spec import AttentionSpec, FeedForward, Mixer, MLPSpec, RunSpec


@dataclass(frozen=True, slots=True)
class Fitted:
    """One constant: its name here, the values it was chosen from (the last one means "no such tensor").

    ``moves``: whether the estimate of a run can depend on it; False only where it cannot.
    """

    name: str
    candidates: tuple[object, ...]
    runs: str
    moves: Callable[[RunSpec], bool]


#: Bytes an element [T_sp, h] that a compiled dropout-add without a bias keeps beside its mask: its input
#: (``releases.COMPILED_DROPOUT_KEEPS_INPUT``); not found in a traced graph (torch 2.13 on a CPU keeps the mask only),
#: so the holder is unknown.
COMPILED_DROPOUT_INPUT_BYTES = 2


def _has_compiled_dropout_without_bias(run: RunSpec) -> bool:
    impl = run.implementation
    compiled = impl.bias_dropout_fusion and COMPILED_DROPOUT_KEEPS_INPUT(impl)
    blocks = {block for layer in run.model.layers for block in (layer.mixer, layer.ffn) if block is not None}
    return compiled and run.model.hidden_dropout > 0 and not all(map(_ends_in_bias, blocks))


def _ends_in_bias(block: Mixer | FeedForward) -> bool:
    if isinstance(block, AttentionSpec):
        return block.add_output_bias
    return isinstance(block, MLPSpec) and block.add_bias


FITTED = (
    Fitted(
        "COMPILED_DROPOUT_INPUT_BYTES", (1, 2, 4, 0),
        "Megatron-LM functional tests of MoE GPTs without linear biases and with hidden dropout 0.1, at TP 1, 2 and "
        "4, Transformer Engine and local, before and after 0.16; those without dropout do not change",
        _has_compiled_dropout_without_bias,
    ),
)


def assumptions(run: RunSpec) -> tuple[str, ...]:
    """What of the estimate of ``run`` rests on a fitted constant; one sentence each."""
    if not (COMPILED_DROPOUT_INPUT_BYTES and _has_compiled_dropout_without_bias(run)):
        return ()
    return (
        f"hidden_dropout ({run.model.hidden_dropout:g}): a fused dropout-add without a bias keeps its input beside the "
        f"mask, {COMPILED_DROPOUT_INPUT_BYTES} bytes an element, as measured runs do; by torch's own partitioner it "
        "keeps the mask alone",
    )


@contextmanager
def replaced(values: Mapping[str, object]) -> Iterator[None]:
    """Other values of constants, by name, inside a with-block; estimates inside take them (``inventory.context``)."""
    before = {name: globals()[name] for name in values}
    try:
        globals().update(values)
        yield
    finally:
        globals().update(before)
