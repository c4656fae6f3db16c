"""What a block needs to know about the run: local sizes and which implementation runs. No layers, no pipeline.

``Settings`` and the sizes (``DIMENSIONS``) are all that a trace of a block depends on. A ``SettingsCache`` holds the
traces of one combination of settings; the process has one bounded ``TraceCache`` of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any, NamedTuple, Protocol

from bridge_memory.processes import whole_in_forks
from bridge_memory.releases import (
    AXES_GATHERED_ONCE,
    EXPERTS_IN_ONE_PARAMETER,
    MTP_CHECKPOINT_DIFFERENTIATES,
    MTP_DEPTHS_RECOMPUTED,
    MXFP8_ATTENTION,
    PACKING_IS_CHECKED,
    UNMASKED_MAY_BE_PACKED,
)
from bridge_memory.spec import (
    DTYPE_BYTES,
    DiffusionSpec,
    EncoderSpec,
    EncoderStructure,
    ImplementationSpec,
    PeftSpec,
    RecomputeSpec,
    RunSpec,
    SideBySideSpec,
)
from bridge_memory.spec.encoders import Item, items_of, recorded
from bridge_memory.spec.parts import OFFLOAD_MODULES, RECOMPUTE_MODULES
from bridge_memory.spec.transformers import (
    DEFAULT_TRANSFORMERS_SPEC,
    TORCHTITAN,
    TORCHTUNE,
    Family,
    TransformersSpec,
    family_of,
)
from bridge_memory.tapes.symbolic import DIMENSIONS, SIZES, SymInt, Traces, chosen

#: Traces that a TraceCache holds; one more empties it.
MOST_TRACES = 4096


class TorchLayers(NamedTuple):
    """Settings of torch's own layers: transformers, torchtitan, torchtune (``transformer_impl``)."""

    spec: TransformersSpec
    family: Family
    #: Bytes of an element of what linears make.
    compute_width: int
    tied: bool
    #: Bytes of an element of LoRA adapters.
    adapter_width: int
    #: Gradients of a layer's weights stay until its backward pass is over (``RunSpec.layer_gradients_stay``).
    gradients_stay: bool = False
    #: A weight's gradient is a separate tensor, not the view that torch's linear returns (deepspeed ``runtime/zero/
    #: linear.py: LinearFunctionForZeroStage3.backward``, which replaces it under ZeRO-3).
    plain_gradients: bool = False
    #: What the model returns is cloned (torch ``nn/parallel/distributed.py: _DDPSink.forward``).
    clones_outputs: bool = False
    #: Layers are compiled by torch.compile (``compiled.py``).
    compiled: bool = False
    #: The library that implements the layers.
    modules: str = "transformers"

    @property
    def compiled_loss(self) -> bool:
        """Whether the loss is compiled too. Without ``compile_loss`` torchtune compiles only the chunked loss
        (``recipes/full_finetune_single_device.py: setup``)."""
        if self.spec.compile_loss is not None:
            return self.spec.compile_loss
        return self.compiled and (self.modules != "torchtune" or self.spec.num_output_chunks > 0)

    @property
    def compiled_whole(self) -> bool:
        """Whether the model is compiled as a whole, final norm and embedding included."""
        return self.compiled and self.modules == "transformers"

    @property
    def autocast(self) -> bool:
        return self.spec.autocast is not None

    @property
    def attention(self) -> str:
        """The attention implementation that runs: model classes without sdpa fall back to eager."""
        requested = self.spec.attn_implementation
        return "eager" if requested == "sdpa" and "sdpa" not in self.family.attention else requested

    def liger(self, *kernels: str) -> bool:
        """Whether one of these kernels of liger-kernel runs: requested, and available for the family."""
        return any(name in self.spec.liger_kernel and name in self.family.liger for name in kernels)

    @property
    def packing_is_supposed(self) -> bool:
        """Whether a batch without a mask is treated as possibly packed, which position ids would show
        (``masking_utils.py: find_packed_sequence_indices``). From 5 on transformers looks at the position ids."""
        return UNMASKED_MAY_BE_PACKED(self.spec) and not PACKING_IS_CHECKED(self.spec)

    @property
    def fused_experts(self) -> bool:
        """Whether the weights of all experts are one three-dimensional parameter (one for each projection)."""
        return EXPERTS_IN_ONE_PARAMETER(self.spec)

    @property
    def grouped_experts(self) -> bool:
        looped = self.family.looped_experts
        return self.fused_experts and not looped and self.spec.experts_implementation in (None, "grouped_mm")


class EncoderRun(NamedTuple):
    """A modality encoder whose activations are recorded, and what each sample gives it."""

    spec: EncoderSpec
    structure: EncoderStructure
    items: tuple[Item, ...]
    #: How transformers runs it.
    layers: TorchLayers
    #: Sequences of a microbatch: of ``seq_length`` tokens each, also where they are packed into one row.
    seq_length: int


class Settings(NamedTuple):
    """What a trace depends on in addition to its block and the dimensions."""

    hidden_size: int
    #: Bytes of one activation element, and of one element of the residual stream.
    act: int
    residual: int
    normalization: str
    hidden_dropout: float
    attention_dropout: float
    params_dtype: str
    #: The format that linears compute in (fp8 or fp4), and its recipe.
    fp8: str | None
    fp8_recipe: str
    fp8_param: bool
    #: Whether attention computes in fp8 too.
    fp8_attention: bool
    attention_softmax_in_fp32: bool
    impl: ImplementationSpec
    #: Whether layers rotate queries and keys.
    rotary: bool
    #: Dimensions of a head that are rotated; 0 if the source does not say (then all are).
    rotary_dim: int
    #: Adapters of frozen weights; None if every weight trains, or is counted as if it did.
    adapters: PeftSpec | None
    #: Sequences packed into one row of tokens.
    packed: bool
    #: Set if ``transformer_impl`` is one of torch's own layers, else None.
    torch_layers: TorchLayers | None = None
    #: Residual streams of hyper-connections, and whether fused kernels mix them.
    residual_streams: int = 1
    fused_hyper_connections: bool = False
    #: Encoders whose activations are recorded.
    encoders: tuple[EncoderRun, ...] = ()
    #: Set for a diffusion model.
    diffusion: DiffusionSpec | None = None


class SettingsCache:
    """The traces of all blocks under one combination of settings."""

    __slots__ = ("blocks", "kept", "offloads", "owner", "settings")

    def __init__(self, owner: TraceCache, settings: Settings, blocks: dict[Any, Traces] | None = None) -> None:
        """``blocks``: of settings that offload other modules, which have the same traces."""
        self.owner = owner
        self.settings = settings
        #: Modules that are offloaded (``Structure.offloading``); None: nothing is.
        self.offloads = frozenset(settings.impl.offload_modules) or None
        self.blocks: dict[Any, Traces] = {} if blocks is None else blocks
        #: Results that depend only on the settings and a few switches; each user chooses its keys.
        self.kept: dict[Any, Any] = {}

    def traces(self, block: Any) -> Traces:
        found = self.blocks.get(block)
        if found is None:
            found = self.blocks.setdefault(block, Traces())
        return found


class TraceCache:
    """Owner of all traces. Thread-safe, bounded by ``MOST_TRACES``."""

    def __init__(self) -> None:
        self.lock = RLock()
        self._by_settings: dict[Settings, SettingsCache] = {}
        #: Templates of parameter lists, each for lists that differ only in sizes, with their sums (``blocks.py``).
        self.parameter_lists: dict[Any, Any] = {}
        #: Results that depend on parameters and an engine's options, but not on tokens; each user chooses its keys.
        self.replays: dict[Any, Any] = {}
        self.traced = 0

    def cache(self, settings: Settings) -> SettingsCache:
        found = self._by_settings.get(settings)
        if found is None:
            with self.lock:
                blocks = None
                if settings.impl.offload_modules not in ((), OFFLOAD_MODULES):
                    every = replace(settings.impl, offload_modules=OFFLOAD_MODULES)
                    blocks = self.cache(settings._replace(impl=every)).blocks
                found = self._by_settings.setdefault(settings, SettingsCache(self, settings, blocks))
        return found

    def count_trace(self) -> None:
        """Count a new trace. Over the bound the cache is emptied; runs in progress keep the traces they refer to."""
        self.traced += 1
        if self.traced > MOST_TRACES:
            self.clear()

    def forget(self, settings: Settings) -> None:
        """Drop what is known of some settings. What others share with them stays (``SettingsCache.blocks``)."""
        with self.lock:
            self._by_settings.pop(settings, None)

    def clear(self) -> None:
        with self.lock:
            self._by_settings = {}
            self.parameter_lists = {}
            self.replays = {}
            self.traced = 0


#: The cache that all estimates of this process share.
TRACE_CACHE = TraceCache()
whole_in_forks(TRACE_CACHE.lock)


class ManyBlocks(Protocol):
    """The blocks of many runs at once (``many.RunGrid``)."""

    def block(self, key: Any, record: Callable[[Any], None]) -> Any:
        """As ``blocks.block``."""

    def bare(self) -> BlockContext:
        """As ``BlockContext.bare``."""

    def by_recompute(self, number: Callable[[RecomputeSpec], int]) -> Any:
        """As ``BlockContext.by_recompute``."""

    def common_recompute(self, value: Callable[[RecomputeSpec], Any]) -> Any:
        """As ``BlockContext.common_recompute``."""

    def largest_scratch(self, requests: Sequence[Any]) -> dict[Any, Any]:
        """As ``stack.stage_scratch``, of requests of chunks."""


class BlockContext:
    """Local sizes and settings of one rank, for every block of a run.

    Sizes are numbers; while a block is traced they are ``symbolic.SymInt``s, and reading a switch records a guard.
    """

    __slots__ = (
        *Settings._fields,
        *SIZES,
        "_sp",
        "_switches",
        "blocks",
        "cache",
        "dimensions",
        "evaluated",
        "hidden_bytes",
        "many",
        "recompute",
        "tokens",
        "tokens_sp",
    )

    hidden_size: int
    act: int
    residual: int
    normalization: str
    hidden_dropout: float
    attention_dropout: float
    params_dtype: str
    fp8: str | None
    fp8_recipe: str
    fp8_param: bool
    fp8_attention: bool
    attention_softmax_in_fp32: bool
    impl: ImplementationSpec
    rotary: bool
    rotary_dim: int
    adapters: PeftSpec | None
    packed: bool
    torch_layers: TorchLayers | None
    residual_streams: int
    fused_hyper_connections: bool
    encoders: tuple[EncoderRun, ...]
    diffusion: DiffusionSpec | None
    #: s after context parallelism, b: the micro batch.
    seq: int
    batch: int
    tp: int
    cp: int
    ep: int
    etp: int
    padded_vocab: int
    #: None while a block is traced: full recomputation concerns chunks, not blocks.
    recompute: RecomputeSpec
    #: s b on this context-parallel rank.
    tokens: int
    #: Tokens of the residual stream: s b / t under sequence parallelism.
    tokens_sp: int
    #: One residual-stream tensor [s, b, h] (divided by t under SP), of all streams.
    hidden_bytes: int

    def __init__(self, cache: SettingsCache, dimensions: Sequence[Any], recompute: RecomputeSpec | None = None) -> None:
        self.cache = cache
        self.recompute = recompute  # type: ignore[assignment]
        self.dimensions = tuple(dimensions)
        (
            self.hidden_size, self.act, self.residual, self.normalization, self.hidden_dropout,
            self.attention_dropout, self.params_dtype, self.fp8, self.fp8_recipe, self.fp8_param,
            self.fp8_attention, self.attention_softmax_in_fp32, self.impl, self.rotary, self.rotary_dim,
            self.adapters, self.packed, self.torch_layers, self.residual_streams, self.fused_hyper_connections,
            self.encoders, self.diffusion,
        ) = cache.settings
        (
            self.seq, self.batch, self.tp, self.cp, self.ep, self.etp, self.padded_vocab, self._sp, *switches
        ) = self.dimensions  # fmt: skip
        self._switches = dict(zip(_SWITCHES, switches, strict=True))
        self.tokens = self.seq * self.batch
        self.tokens_sp = self.tokens // chosen(self._sp, self.tp, 1)
        self.hidden_bytes = self.tokens_sp * self.hidden_size * self.residual * self.residual_streams
        #: Results of this run that several callers share; each user chooses its keys.
        self.evaluated: dict[Any, Any] = {}
        #: Blocks of this run, by key.
        self.blocks: dict[Any, Any] = {}
        #: If sizes are arrays: what evaluates blocks.
        self.many: ManyBlocks | None = None

    def bare(self) -> BlockContext:
        """The same sizes with one sequence and no recomputation: for parameters, which depend on neither."""
        found: BlockContext | None = self.evaluated.get("bare")
        if found is None:
            sizes = (self.seq, 1, *self.dimensions[2 : len(SIZES) + 1])
            switches = (False,) * len(_SWITCHES)
            if self.many is None:
                found = BlockContext(self.cache, (*sizes, *switches), RecomputeSpec())
            else:
                found = self.many.bare()
            self.evaluated["bare"] = found
        return found

    def by_recompute(self, number: Callable[[RecomputeSpec], int]) -> Any:
        """A number that depends on the run's recomputation; of many runs an array."""
        return number(self.recompute) if self.many is None else self.many.by_recompute(number)

    def common_recompute(self, value: Callable[[RecomputeSpec], Any]) -> Any:
        """``value`` of the run's recomputation settings. Many runs must have the same value, else Differs is raised."""
        return value(self.recompute) if self.many is None else self.many.common_recompute(value)

    def switch(self, module: str) -> Any:
        """As ``recomputes``, without a guard."""
        return self._switches[module]

    @property
    def te(self) -> bool:
        return self.impl.te

    @property
    def sp(self) -> bool:
        """Sequence parallelism."""
        return _is_on(self._sp)

    def as_encoder(self, *, attention_again: bool) -> None:
        """In a copy for an encoder's blocks: no sequence parallelism, and no selective recomputation but attention's.
        """
        self._sp = False
        self._switches = {**dict.fromkeys(self._switches, False), "core_attn": attention_again}

    @property
    def mtp_recomputed(self) -> bool:
        """Whether whole MTP depths are recomputed in backward."""
        return _is_on(self._switches["mtp_recomputed"])

    @property
    def mtp_without_gradients(self) -> bool:
        """Whether that recomputation detaches them from the graph, so that they have no backward."""
        return _detaches_depths(self.impl, self.fp8, self.fp8_recipe) and self.mtp_recomputed

    @property
    def recomputes_fully(self) -> bool:
        """Whether whole layers are recomputed, so that their first forward runs without gradients."""
        return _is_on(self._switches["recomputes_fully"])

    def recomputes(self, module: str) -> bool:
        """Whether selective recomputation covers this module name."""
        return _is_on(self._switches[module])


_SWITCHES = DIMENSIONS[len(SIZES) + 1 :]


def _is_on(switch: Any) -> bool:
    return switch.is_on() if type(switch) is SymInt else bool(switch)


def context_of(run: RunSpec, owner: TraceCache = TRACE_CACHE) -> BlockContext:
    """The context of every block of ``run`` (all its ranks share it)."""
    dimensions = (*sizes_of(run), *switches_of(run.recompute, run.implementation))
    return BlockContext(owner.cache(settings_of(run)), dimensions, run.recompute)


def sizes_of(run: RunSpec) -> tuple[Any, ...]:
    """The first of DIMENSIONS, up to and with sequence parallelism."""
    p, (length, sequences) = run.parallel, run.batch.rows
    return length // p.cp, sequences, p.tp, p.cp, p.ep, p.etp, run.model.padded_vocab_size(p.tp), p.sp


def _recomputes_depths(rc: RecomputeSpec, impl: ImplementationSpec) -> bool:
    return MTP_DEPTHS_RECOMPUTED(impl) and rc.granularity == "full" and rc.method == "uniform"


def _detaches_depths(impl: ImplementationSpec, fp8: str | None, recipe: str) -> bool:
    """Whether MTP depths that are recomputed have no backward."""
    return impl.te and fp8 is not None and recipe != "nvfp4" and not MTP_CHECKPOINT_DIFFERENTIATES(impl)


def mtp_without_gradients(run: RunSpec) -> bool:
    """As ``BlockContext.mtp_without_gradients``; of many runs asked only for what decides it."""
    impl, precision = run.implementation, run.precision
    detaches = _detaches_depths(impl, precision.fp8 or precision.fp4, precision.recipe)
    return detaches and _recomputes_depths(run.recompute, impl)


def switches_of(rc: RecomputeSpec, impl: ImplementationSpec) -> tuple[bool, ...]:
    """The other DIMENSIONS: the switches of recomputation."""
    full = rc.granularity == "full"
    selected = rc.modules if rc.granularity == "selective" else ()
    return (
        _recomputes_depths(rc, impl), full,
        *[module in selected for module in RECOMPUTE_MODULES],
    )  # fmt: skip


def settings_of(run: RunSpec) -> Settings:
    """What blocks of ``run`` depend on in addition to sizes and switches."""
    b, m, precision = run.batch, run.model, run.precision
    act = DTYPE_BYTES[run.compute_dtype if run.implementation.torch_layers else precision.params_dtype]
    return Settings(
        m.hidden_size,
        act,
        # Falcon-H1's layers make their residual fp32 and cast what enters their blocks.
        4 if precision.fp32_residual_connection or isinstance(m.layers[0].mixer, SideBySideSpec) else act,
        m.normalization,
        m.hidden_dropout,
        m.attention_dropout,
        precision.params_dtype,
        precision.fp8 or precision.fp4,
        precision.recipe,
        precision.quantized_param,
        _fp8_attention(run),
        # Scaling by the layer number keeps the softmax in fp32 (TransformerConfig.__post_init__).
        precision.attention_softmax_in_fp32 or run.implementation.apply_query_key_layer_scaling,
        run.implementation if not m.yarn else replace(run.implementation, apply_rope_fusion=run.fuses_rotation),
        m.position_embedding_type == "rope",
        m.rotary_dim,
        _adapters(run.peft),
        b.packed_sequences,
        _torch_layers(run) if run.implementation.torch_layers else None,
        m.residual_streams,
        m.fused_hyper_connections,
        _encoders(run) if m.encoders else (),
        m.diffusion,
    )


def _adapters(peft: PeftSpec) -> PeftSpec | None:
    """Adapters of frozen weights; without targets if the weights are frozen and have none."""
    if peft.scheme == "frozen":
        return replace(peft, target_modules=())
    return peft if peft.trains_adapters else None


def _encoders(run: RunSpec) -> tuple[EncoderRun, ...]:
    """The encoders whose structure is known: beside Megatron's models as transformers runs them in the dtype of the
    parameters, else as the rest of a model of transformers."""
    if run.implementation.torch_layers:
        if run.implementation.own_layers:
            return ()
        layers = _torch_layers(run)._replace(spec=replace(run.transformers, liger_kernel=()), family=Family())
    else:
        width = DTYPE_BYTES[run.precision.params_dtype]
        spec = replace(
            DEFAULT_TRANSFORMERS_SPEC, transformers_version=run.transformers.transformers_version,
            attn_implementation=run.transformers.attn_implementation,
        )
        layers = TorchLayers(spec, Family(), width, False, width)
    return tuple(
        EncoderRun(encoder, encoder.structure, items_of(encoder.structure, run.batch), layers, run.batch.seq_length)
        for encoder in run.model.encoders
        if encoder.structure is not None and recorded(run.implementation.torch_layers, encoder.structure)
    )


def _fp8_attention(run: RunSpec) -> bool:
    """Whether attention computes in fp8: only recipes to which megatron-core passes the option do
    (``fp8_utils.py: get_fp8_recipe``)."""
    p, impl = run.precision, run.implementation
    if not p.fp8_dot_product_attention or p.fp8 is None or not impl.te:
        return False
    return p.fp8_recipe in ("delayed", "tensorwise") or (p.fp8_recipe == "mxfp8" and MXFP8_ATTENTION(impl))


def _torch_layers(run: RunSpec) -> TorchLayers:
    spec = run.transformers
    own = {"torchtitan": TORCHTITAN, "torchtune": TORCHTUNE}
    family = own.get(run.implementation.transformer_impl) or family_of(run.model.model_type, spec)
    if any(encoder.structure is not None and encoder.structure.kind == "qwen2_5_vl" for encoder in run.model.encoders):
        family = family._replace(rotary=family.rotary if AXES_GATHERED_ONCE(spec) else "gathered", rotary_axes=3)
    return TorchLayers(
        spec, family, DTYPE_BYTES[spec.autocast or run.compute_dtype],
        run.model.share_embeddings_and_output_weights, DTYPE_BYTES[run.adapters_compute_dtype],
        run.layer_gradients_stay,
        run.data_parallel.engine == "zero3",
        run.data_parallel.engine == "ddp" and run.ddp.find_unused_parameters and not run.ddp.static_graph,
        run.layers_compiled, run.implementation.transformer_impl,
    )
