"""Assignment of layers to pipeline stages and virtual chunks.

Sources in megatron-core: ``transformer/transformer_block.py: get_num_layers_to_build``,
``transformer/transformer_layer.py: get_transformer_layer_offset``,
``transformer/pipeline_parallel_layer_layout.py: PipelineParallelLayerLayout``,
``transformer/transformer_config.py: TransformerConfig.__post_init__``,
``transformer/multi_token_prediction.py: get_mtp_num_layers_to_build`` and, for hybrid models,
``ssm/mamba_block.py: MambaStack._select_layers_for_pipeline_parallel``.

All of them assign layers in the order in which a microbatch passes the chunks: chunk 0 of every stage, then chunk 1 of
every stage, and so on. Only the number of layers per chunk differs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.layout_string import parse_layout_string, quote, short_layout_string
from bridge_memory.spec.model import LayerSpec, ModelSpec
from bridge_memory.spec.parts import ParallelSpec


class Chunk(NamedTuple):
    """One virtual stage: its decoder layers and MTP depths (0-based), and whether it holds embedding and output."""

    first_layer: int
    num_layers: int
    #: Holds the input embedding (``pre_process``).
    embedding: bool = False
    #: Holds the final norm, the output layer and the loss (``post_process``).
    output: bool = False
    first_depth: int = 0
    num_depths: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.first_layer, self.first_layer + self.num_layers))

    @property
    def mtp(self) -> tuple[int, ...]:
        return tuple(range(self.first_depth, self.first_depth + self.num_depths))

    def shape(self, model: ModelSpec) -> ChunkShape:
        """What the chunk holds, without the layers' positions."""
        first, beyond = self.first_layer, self.first_layer + self.num_layers
        runs = model.layer_runs
        layers = []
        at = bisect_right(runs, first, key=itemgetter(1)) - 1 if self.num_layers else len(runs)
        while at < len(runs) and runs[at][1] < beyond:
            kind, start, end = runs[at]
            layers.append((kind, min(end, beyond) - max(start, first)))
            at += 1
        last = bool(self.num_layers) and beyond == len(model.layers)
        return ChunkShape(tuple(layers), self.embedding, self.output, self.num_depths, last)


class ChunkShape(NamedTuple):
    """What a chunk holds, without the layers' positions: equal chunks of different stages have one ChunkShape."""

    #: Layers in order, as (LayerSpec, number of consecutive ones).
    layers: tuple[tuple[LayerSpec, int], ...]
    embedding: bool
    output: bool
    num_depths: int
    #: Holds the last decoder layer.
    last_layer: bool

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @property
    def kinds(self) -> dict[LayerSpec, int]:
        """Number of layers of each kind."""
        out: dict[LayerSpec, int] = {}
        for kind, count in self.layers:
            out[kind] = out.get(kind, 0) + count
        return out


StageShape = tuple[ChunkShape, ...]


class Layout:
    """``stages[pipeline rank][virtual stage]`` -> Chunk."""

    __slots__ = ("_shapes", "stages")

    def __init__(self, stages: tuple[tuple[Chunk, ...], ...]) -> None:
        self.stages = stages
        self._shapes: tuple[ModelSpec, tuple[StageShape, ...]] | None = None

    @property
    def virtual_pipeline_model_parallel_size(self) -> int:
        """Chunks per stage. A layout string can imply more than one without the field being set."""
        return len(self.stages[0])

    def shapes(self, model: ModelSpec) -> tuple[StageShape, ...]:
        """The chunk shapes of each stage; cached for the last model, equal shapes being one object."""
        known = self._shapes
        if known is None or known[0] is not model:
            one: dict[ChunkShape, ChunkShape] = {}  # equal shapes are one object
            stages = tuple([
                tuple([one.setdefault(shape, shape) for shape in [c.shape(model) for c in chunks]])
                for chunks in self.stages
            ])  # fmt: skip
            known = self._shapes = (model, stages)
        return known[1]


def layout(model: ModelSpec, parallel: ParallelSpec) -> Layout:
    """Assign the model's layers to pipeline stages and virtual chunks. Results are cached.

    Raises SpecError where megatron-core would refuse, or would silently place layers differently.
    """
    answer = _layout(
        len(model.layers),
        model.mtp_num_layers,
        model.hybrid and not model.pattern_splits_pipeline,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.num_layers_in_first_pipeline_stage,
        parallel.num_layers_in_last_pipeline_stage,
        parallel.account_for_embedding_in_pipeline_split,
        parallel.account_for_loss_in_pipeline_split,
        parallel.pipeline_model_parallel_layout,
    )
    if type(answer) is str:
        raise SpecError(answer)
    return answer  # type: ignore[return-value]


# --------------------------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """The sizes that the advice in a refusal depends on."""

    num_layers: int
    mtp_num_layers: int
    hybrid: bool
    pp: int
    v: int

    @property
    def chunks(self) -> int:
        return self.pp * self.v


@lru_cache(maxsize=1024)
def _layout(
    num_layers: int,
    mtp_num_layers: int,
    hybrid: bool,
    pp: int,
    vpp: int | None,
    first: int | None,
    last: int | None,
    embedding_slot: bool,
    loss_slot: bool,
    text: str | None,
) -> Layout | str:
    """The layout, or the refusal as text (cached too: a search meets many invalid layouts)."""
    try:
        if text is not None:
            return _from_string(num_layers, mtp_num_layers, hybrid, pp, vpp, first, last,
                                embedding_slot or loss_slot, text)  # fmt: skip
        v = vpp or 1
        shape = _Shape(num_layers, mtp_num_layers, hybrid, pp, v)
        if hybrid:
            _check_hybrid(vpp, embedding_slot, loss_slot)
        if first is not None or last is not None:
            if embedding_slot or loss_slot:
                raise SpecError(
                    "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split (True) do not go "
                    "with num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage; drop one pair"
                )
            stages = _uneven(shape, first, last)
        else:
            stages = [_even(shape, embedding_slot, loss_slot)] * pp
    except SpecError as error:
        return str(error)
    sizes = [[n // v for _ in range(v)] for n in stages]
    sizes[0][0] -= embedding_slot
    sizes[-1][-1] -= loss_slot
    letters = [["t" * n for n in row] for row in sizes]
    letters[0][0] = "E" + letters[0][0]
    letters[-1][-1] += "m" * mtp_num_layers + "L"
    return _place(letters)


def _place(letters: Sequence[Sequence[str]]) -> Layout:
    """Number the layers of ``letters[rank][chunk]`` in the order in which a microbatch passes them."""
    rows: list[list[Chunk]] = [[] for _ in letters]
    layer = depth = 0
    for c in range(len(letters[0])):
        for rank, row in enumerate(letters):
            layers, depths = row[c].count("t"), row[c].count("m")
            rows[rank].append(Chunk(layer, layers, "E" in row[c], "L" in row[c], depth, depths))
            layer += layers
            depth += depths
    return Layout(tuple(map(tuple, rows)))


def _check_hybrid(vpp: int | None, embedding_slot: bool, loss_slot: bool) -> None:
    """Raise SpecError for options that ``MambaStack`` refuses, or silently ignores and thereby drops layers."""
    if vpp is not None and vpp > 1:
        raise SpecError(
            f"virtual_pipeline_model_parallel_size ({vpp}) is not modelled for hybrid (Mamba) models: megatron-core "
            "before 0.17 refuses it, later ones take it only from | in hybrid_layer_pattern; drop it"
        )
    for name, on in (
        ("account_for_embedding_in_pipeline_split", embedding_slot),
        ("account_for_loss_in_pipeline_split", loss_slot),
    ):
        if on:
            raise SpecError(
                f"{name} (True) is ignored for hybrid (Mamba) models by megatron-core's MambaStack; "
                "set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
            )


def _even(shape: _Shape, embedding_slot: bool, loss_slot: bool) -> int:
    """Layer slots per stage; embedding and loss may each occupy one."""
    slots = shape.num_layers + embedding_slot + loss_slot
    if slots % shape.chunks == 0:
        return slots // shape.pp
    extra = "".join(
        f" + 1 for {name}"
        for name, on in (
            ("account_for_embedding_in_pipeline_split", embedding_slot),
            ("account_for_loss_in_pipeline_split", loss_slot),
        )
        if on
    )
    by = f"pipeline_model_parallel_size ({shape.pp})"
    if shape.v > 1:
        by += f" x virtual_pipeline_model_parallel_size ({shape.v})"
    raise SpecError(f"num_layers ({shape.num_layers}){extra} is not divisible by {by}; {_advice(shape)}")


def _uneven(shape: _Shape, first: int | None, last: int | None) -> list[int]:
    """Layers of each stage with ``num_layers_in_first/last_pipeline_stage``."""
    num_layers, pp, v = shape.num_layers, shape.pp, shape.v
    given = []
    for name, value in (
        ("num_layers_in_first_pipeline_stage", first),
        ("num_layers_in_last_pipeline_stage", last),
    ):
        if value is None:
            continue
        if value % v:
            raise SpecError(
                f"{name} ({value}) is not divisible by virtual_pipeline_model_parallel_size ({v}); "
                + _advice(shape, drop=True)
            )
        given.append(f"{name} ({value})")
    what = " and ".join(given)
    middle = pp - len(given)
    rest = num_layers - (first or 0) - (last or 0)
    leave = "leaves" if len(given) == 1 else "leave"
    if middle < 0:
        raise SpecError(f"{what} need a pipeline_model_parallel_size of 2 or more, not {pp}; drop them")
    if middle == 0 and v > 1 and pp > 1:
        # get_transformer_layer_offset divides by the number of middle stages.
        raise SpecError(
            f"{what} with pipeline_model_parallel_size (2) and virtual_pipeline_model_parallel_size ({v}) "
            "make megatron-core divide by zero; set only one of the two"
        )
    if rest < 0 or bool(rest) != bool(middle):
        raise SpecError(
            f"{what} {leave} {rest} of num_layers ({num_layers}) for the {middle} other stages of "
            f"pipeline_model_parallel_size ({pp}); {_advice(shape, first, last, drop=True)}"
        )
    if middle and rest % (middle * v):
        by = f"the {middle} other stages" if v == 1 else f"the {middle} other stages x {v} virtual stages"
        raise SpecError(
            f"{what} {leave} {rest} of num_layers ({num_layers}), not divisible by {by} of "
            f"pipeline_model_parallel_size ({pp}); {_advice(shape, first, last, drop=True)}"
        )
    stages = [rest // middle if middle else 0] * pp
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    return stages


def _from_string(
    num_layers: int,
    mtp_num_layers: int,
    hybrid: bool,
    pp: int,
    vpp: int | None,
    first: int | None,
    last: int | None,
    slots: bool,
    text: str,
) -> Layout:
    """``TransformerConfig.__post_init__`` (PP layout) and ``validate_layer_layout``."""
    here = f"pipeline_model_parallel_layout {quote(text)}"
    if hybrid:
        raise SpecError(
            f"{here} is ignored for hybrid (Mamba) models by megatron-core's MambaStack; set "
            "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )
    if first is not None or last is not None or slots:
        raise SpecError(
            f"{here} does not go with num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage, "
            "account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split; drop those"
        )
    chunks = parse_layout_string(text)
    if len(chunks) % pp:
        raise SpecError(
            f"{here} has {len(chunks)} stages, not a multiple of pipeline_model_parallel_size ({pp}); "
            "write one stage a pipeline rank and virtual chunk"
        )
    v = len(chunks) // pp
    if vpp is not None and v != vpp:
        raise SpecError(
            f"{here} has {len(chunks)} stages, {v} a rank of pipeline_model_parallel_size ({pp}), not "
            f"virtual_pipeline_model_parallel_size ({vpp}); set that to {v if v > 1 else 'None'}"
        )
    if pp == 1 and v > 1:
        raise SpecError(
            f"{here} has {v} stages for pipeline_model_parallel_size (1), and virtual stages need 2 or more; "
            "write one stage"
        )
    flat = "".join(chunks)
    for letter, name, wanted in (
        ("E", "embedding", 1),
        ("L", "loss", 1),
        ("t", "num_layers", num_layers),
        ("m", "mtp_num_layers", mtp_num_layers),
    ):
        if flat.count(letter) != wanted:
            raise SpecError(f"{here} has {flat.count(letter)} {letter} ({name}); write {wanted}")
    if not chunks[0].startswith("E"):
        # megatron-core builds the embedding on the first stage even if the layout puts it elsewhere.
        raise SpecError(f"{here} must begin with E, the embedding")
    if not chunks[-1].endswith("L"):
        raise SpecError(f"{here} must end with L, the loss, in the last stage")
    if "m" in flat:
        if "t" in flat[flat.index("m") :]:
            raise SpecError(f"{here} has t (decoder) after m (MTP); move every m behind the last t")
        holders = [i for i, chunk in enumerate(chunks) if "m" in chunk]
        if len(holders) > 1:
            raise SpecError(f"{here} spreads m (MTP) over {len(holders)} stages; put every m into one stage")
        if holders[0] // pp != v - 1:
            raise SpecError(
                f"{here} has m (MTP) in virtual stage {holders[0] // pp} of its rank; put it into the last one, {v - 1}"
            )
    return _place([[chunks[c * pp + rank] for c in range(v)] for rank in range(pp)])


# --------------------------------------------------------------------------------------------------
# Advice: a split that works.
# --------------------------------------------------------------------------------------------------


def _advice(shape: _Shape, first: int | None = None, last: int | None = None, *, drop: bool = False) -> str:
    """Words for the most even split that works, keeping the user's sizes if possible.

    ``drop``: the user set num_layers_in_first/last_pipeline_stage; they are dropped if no split fits them.
    """
    n, chunks = shape.num_layers, shape.chunks
    kept = ((first, None), (None, last)) if first is not None and last is not None else ((first, last),)
    splits = [s for f, z in kept for s in _uneven_splits(shape, f, z)] or list(_uneven_splits(shape))
    if splits:
        return min(splits)[-1]
    before = "drop it and " if drop else ""
    if drop and n % chunks == 0:
        return "drop it"
    if n + 2 < chunks or shape.hybrid:
        return before + _lower(shape)
    if (n + 2) % chunks == 0:
        return (
            f"{before}set account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split "
            f"({(n + 2) // chunks} layers a chunk, one fewer in the first and in the last)"
        )
    if (n + 1) % chunks == 0:
        return (
            f"{before}set account_for_loss_in_pipeline_split ({(n + 1) // chunks} layers a chunk, one fewer "
            "in the last)"
        )
    return f"{before}set pipeline_model_parallel_layout to {_even_string(shape)!r}"


def _uneven_splits(
    shape: _Shape, first: int | None = None, last: int | None = None
) -> Iterator[tuple[int, int, int, str]]:
    """Splits whose first and last stage differ from the others: (largest - smallest, fields to set, largest, advice).

    ``first`` and ``last`` are kept if given. Every size is a positive multiple of ``v``.
    """
    n, pp, v = shape.num_layers, shape.pp, shape.v
    if pp < 2 or n % v:
        return
    near = n // shape.chunks
    for middle in range(v * max(1, near - 2), v * (near + 4), v):
        rest = n - middle * (pp - 2)
        half = -(-(rest // v) // 2) * v
        if first is not None:
            ends = [first]
        elif last is not None:
            ends = [rest - last]
        else:
            ends = [middle, half]
        for a in ends:
            b = rest - a
            if min(a, b) < v or a % v or b % v:
                continue
            sizes = [a, *[middle] * (pp - 2), b]
            fields = []
            # A first stage as large as the middle ones needs no field.
            if first is not None or (pp > 2 and (a != middle or last is not None)):
                fields.append(f"num_layers_in_first_pipeline_stage to {a}")
            if first is None or pp > 2:
                fields.append(f"num_layers_in_last_pipeline_stage to {b}")
            advice = f"set {' and '.join(fields)} ({_sum(sizes)})"
            yield max(sizes) - min(sizes), len(fields), max(sizes), advice


def _even_string(shape: _Shape) -> str:
    """The most even layout string; the first and last chunk, with embedding and loss, are the shorter ones."""
    base, more = divmod(shape.num_layers, shape.chunks)
    sizes = [base] * shape.chunks
    start = (shape.chunks - more + 1) // 2
    for i in range(start, start + more):
        sizes[i] += 1
    chunks = ["t" * n for n in sizes]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * shape.mtp_num_layers + "L"
    return short_layout_string(chunks)


def _lower(shape: _Shape) -> str:
    """Advice: the next smaller virtual or pipeline size that divides the layers."""
    n, pp, v = shape.num_layers, shape.pp, shape.v
    if v > 1:
        fitting = next((k for k in range(v - 1, 0, -1) if n % (pp * k) == 0), 0)
        if fitting:
            return f"set virtual_pipeline_model_parallel_size to {fitting if fitting > 1 else 'None'}"
    fitting = next((k for k in range(min(pp, n), 0, -1) if n % k == 0), 1)
    also = " and virtual_pipeline_model_parallel_size to None" if v > 1 else ""
    return f"set pipeline_model_parallel_size to {fitting}{also}"


def _sum(sizes: Sequence[int]) -> str:
    """Sizes as text: 15+15+15+16; 3+14x4+2 for more than 8 stages."""
    if len(sizes) <= 8:
        return "+".join(map(str, sizes))
    runs: list[list[int]] = []
    for n in sizes:
        if runs and runs[-1][1] == n:
            runs[-1][0] += 1
        else:
            runs.append([1, n])
    return "+".join(str(n) if times == 1 else f"{times}x{n}" for times, n in runs)
