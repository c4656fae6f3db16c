"""The modules of a model for engines outside megatron-core: in order, each with its trained and frozen parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

from bridge_memory.components import Provenance, Role, State
from bridge_memory.engines.engine import Line
from bridge_memory.engines.fsdp_buckets import Places, places_of
from bridge_memory.engines.peft import adapter_units, with_parameters
from bridge_memory.engines.torch_optimizers import TorchState, step_bytes, torch_states
from bridge_memory.inventory.stack import Unit
from bridge_memory.inventory.torch.quantized import is_quantized, weight_bytes
from bridge_memory.spec import DTYPE_BYTES, RunSpec
from bridge_memory.tapes.chain import Concurrent, EngineBytes, Label
from bridge_memory.tapes.parameters import ALLOCATION_UNIT, Parameter, ParameterList, Use

T = TypeVar("T")

_NONE = ParameterList(())


class Module(NamedTuple):
    """One block of the model: its place in the forward pass, its trained and its frozen parameters."""

    place: int
    label: Label
    trained: ParameterList
    frozen: ParameterList
    #: Prefix of the names of its frozen parameters; names of their adapters include it.
    prefix: str = ""

    def trained_parameters(self) -> Iterator[tuple[Parameter, int]]:
        """(trained parameter, how many of them), in the order of the model."""
        for parameters, times in self.trained.rows:
            for p in parameters:
                yield p, times

    def parameters(self) -> Iterator[tuple[Parameter, int]]:
        """(parameter, how many of them): trained ones, then frozen ones."""
        yield from self.trained_parameters()
        for parameters, times in self.frozen.rows:
            for p in parameters:
                yield p, times


class Kinds:
    """A function of modules that depends on their parameters alone, evaluated once for equal layers."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Any] = {}

    def of(self, what: str, modules: Sequence[Module], function: Callable[[], T]) -> T:
        """``function()``, which is about ``modules``; ``what``: its name."""
        key = (what, *[part for module in modules for part in (module.trained, module.frozen)])
        if key not in self._known:
            self._known[key] = function()
        found: T = self._known[key]
        return found


class Model(NamedTuple):
    """The modules of one chunk."""

    places: Places
    modules: tuple[Module, ...]
    #: Elements of all parameters.
    numel: int

    def engine_bytes(self, by_place: Sequence[Concurrent]) -> EngineBytes:
        return self.places.engine_bytes(by_place)

    @property
    def number(self) -> int:
        """Number of places."""
        return self.places.loss + 1


def model_of(run: RunSpec, units: Sequence[Unit]) -> Model:
    """The modules of a chunk. If adapters train, nothing else does. Adapters whose targets are full names are counted
    in the first layer, since their module is not known."""
    places = places_of(units)
    adapters: list[ParameterList | None] = [None] * len(units)
    if run.peft.freezes:
        found = adapter_units(run, units)
        if len(found) == len(units):
            adapters = [unit.parameters for unit in found]
        elif found:
            first = next((i for i, unit in enumerate(units) if unit.label is Label.LAYER), 0)
            adapters[first] = found[0].parameters
    kinds: dict[int, tuple[ParameterList, ParameterList]] = {}
    modules = list[Module]()
    for unit, place, of_unit in zip(units, places.first, adapters, strict=True):
        if run.peft.freezes:
            trained, kept = of_unit or _NONE, unit.parameters
        else:
            trained, kept = kinds.get(id(unit.parameters)) or _by_training(unit)
            kinds[id(unit.parameters)] = trained, kept
        modules += [
            Module(position, unit.label, trained, kept, unit.prefix) for position in range(place, place + unit.times)
        ]
    return Model(places, tuple(modules), sum(unit.times * unit.parameters.numel for unit in units))


def _by_training(unit: Unit) -> tuple[ParameterList, ParameterList]:
    """(the unit's parameters that train, those that are frozen where others train)."""
    kept = with_parameters([unit], lambda p: p.trains is False)
    if not kept:
        return unit.parameters, _NONE
    trained = with_parameters([unit], lambda p: p.trains is not False)
    return trained[0].parameters if trained else _NONE, kept[0].parameters


def rounded(nbytes: int) -> int:
    """Bytes that torch's allocator takes for a separate tensor."""
    return -(-nbytes // ALLOCATION_UNIT) * ALLOCATION_UNIT


#: Bytes at which a flat tensor of a broadcast of parameters is full (``nn/parallel/distributed.py:
#: DistributedDataParallel.broadcast_bucket_size``, ``fsdp/_init_utils.py: PARAM_BROADCAST_BUCKET_SIZE``).
BROADCAST_BUCKET = 250 << 20


def broadcast_buffers(sizes: Iterable[int]) -> int:
    """Bytes of the two flat tensors in flight while tensors of ``sizes`` bytes are broadcast; a tensor alone is its own
    (``csrc/distributed/c10d/comm.cpp: broadcast_coalesced``, ``torch/csrc/utils/tensor_flatten.h``)."""
    flats, filled, number = [0], 0, 0
    for nbytes in sizes:
        filled, number = filled + nbytes, number + 1
        if filled >= BROADCAST_BUCKET:
            flats.append(rounded(filled) if number > 1 else 0)
            filled = number = 0
    flats.append(rounded(filled) if number > 1 else 0)
    return max(a + b for a, b in itertools.pairwise(flats))


def made_before(model: Model, sizes: Sequence[int]) -> list[int]:
    """For every place, bytes of the gradients that backward has made before it, in later places; ``sizes``: bytes of
    each module's gradients. The output layer's gradient of a tied weight is not among them: it waits inside autograd,
    and the chain of blocks counts it (``inventory/torch/chain.py``)."""
    made = [0] * (model.number + 1)
    for module, nbytes in zip(model.modules, sizes, strict=True):
        made[module.place] += nbytes
    for place in reversed(range(model.number)):
        made[place] += made[place + 1]
    return made[1:]


def made_gradients(run: RunSpec, model: Model, sizes: Sequence[int]) -> list[Concurrent]:
    """``made_before`` as bytes during each place; zeros if gradients accumulate, since all of them are alive from the
    first microbatch on."""
    made = made_before(model, [0] * len(sizes) if accumulates(run) else sizes)
    return [Concurrent(0, n, n, gradients=n) for n in made]


class Kept(NamedTuple):
    """Bytes of one module's model state on one rank; every tensor is allocated separately."""

    weights: int
    gradients: int
    states: tuple[int, ...]
    #: Of the largest parameter: bytes of exp_avg_sq, and elements.
    largest_state: int
    largest: int
    #: Number of trained tensors.
    tensors: int = 1


def kept(run: RunSpec, module: Module, states: Sequence[TorchState], width: int, ranks: int = 1) -> Kept:
    """A module's model state if every parameter is sharded along its first dimension over ``ranks``; of the first rank,
    which has the largest shards."""
    adapters = run.peft.freezes
    wide = trained_width(run, width)
    weights = gradients = largest_state = largest = tensors = 0
    sums = [0] * len(states)
    for parameters, times in module.frozen.rows:
        for p in parameters:
            quantized = adapters and is_quantized(run, p)
            weights += times * (weight_bytes(run, p) if quantized else rounded(prod(shard(p.shape, ranks)) * width))
    for p, times in module.trained_parameters():
        shape = shard(p.shape, ranks)
        weights += times * rounded(prod(shape) * wide)
        gradients += times * rounded(prod(shape) * wide)
        # Only the Trainer makes this exception, not other users of bitsandbytes.
        embedding = p.use is Use.EMBEDDING and not run.implementation.own_layers
        sizes = [s.nbytes(shape, wide, embedding) for s in states]
        sums = [n + times * size for n, size in zip(sums, sizes, strict=True)]
        largest_state = max(largest_state, *sizes[-1:], 0)
        largest = max(largest, prod(shape))
        tensors += times
    return Kept(weights, gradients, tuple(sums), largest_state, largest, tensors)


def shard(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Shape of the first and largest of ``ranks`` shards along the first dimension, as ``torch.chunk`` divides."""
    return (-(-shape[0] // ranks), *shape[1:]) if ranks > 1 else shape


def kept_of(run: RunSpec, model: Model, width: int, ranks: int = 1) -> list[Kept]:
    """``kept`` of every module."""
    states = torch_states(run)
    known: dict[tuple[int, int], Kept] = {}
    out = []
    for module in model.modules:
        key = id(module.trained), id(module.frozen)
        if key not in known:
            known[key] = kept(run, module, states, width, ranks)
        out.append(known[key])
    return out


def amounts_of(run: RunSpec, all_kept: Sequence[Kept], *, fresh: bool, shard_name: str) -> list[tuple[Line, int]]:
    """The lines of weights, gradients and optimizer states, and their bytes."""
    named = lines(run, fresh=fresh, shard_name=shard_name, adapters=run.peft.freezes)
    sums = [sum(k.weights for k in all_kept), sum(k.gradients for k in all_kept)]
    sums += [sum(k.states[i] for k in all_kept) for i in range(len(named) - 2)]
    return list(zip(named, sums, strict=True))


def in_step(run: RunSpec, all_kept: Iterable[Kept]) -> tuple[int, str]:
    """(bytes, name) of the temporaries of the optimizer's step."""
    made = step_bytes(run)
    them = list(all_kept)
    together = sum(k.states[-1] for k in them) if made.together and them and them[0].states else 0
    largest_state = max((k.largest_state for k in them), default=0)
    largest = max((k.largest for k in them), default=0)
    stepping = made.together * together + made.largest * largest_state + made.fp32 * 4 * largest
    # Before it, one norm per parameter (``torch/nn/utils/clip_grad.py: _get_total_norm``).
    norms = ALLOCATION_UNIT * sum(k.tensors for k in them) if run.optimizer.clip_grad else 0
    return (norms, "norms of gradients") if norms > stepping else (stepping, made.name)


def step_of_largest(run: RunSpec, kept: Kept) -> int:
    """Bytes of temporaries of an optimizer that steps only a module's largest parameter."""
    made = step_bytes(run)
    return (made.together + made.largest) * kept.largest_state + made.fp32 * 4 * kept.largest


def offloaded_activations(run: RunSpec, model: Model) -> tuple[tuple[str, int], ...]:
    """Layer inputs that are offloaded to pinned host memory until backward: (name, bytes)."""
    if not run.transformers.enable_activation_offloading:
        return ()
    layers = sum(module.label is Label.LAYER for module in model.modules)
    return (("inputs of layers (pinned)", layers * hidden_bytes(run)),)


def lines(run: RunSpec, *, fresh: bool, shard_name: str, adapters: bool) -> list[Line]:
    """The lines of weights, gradients and optimizer states of a run."""
    exact = Provenance.EXACT
    return [
        Line(Role.WEIGHTS, State.PARAMETERS, "weights", False, exact, False, shard_name),
        Line(Role.GRADIENTS, State.GRADIENTS, "gradients", False, exact, adapters, shard_name, fresh, True),
        *(
            Line(Role.OPTIMIZER, s.state, s.state.value, False, exact, adapters, shard_name)
            for s in torch_states(run)
        ),
    ]


def parameter_width(run: RunSpec) -> int:
    """Bytes per element of parameters."""
    return DTYPE_BYTES[run.params_dtype]


def trained_width(run: RunSpec, width: int) -> int:
    """Bytes per element of trained parameters, if parameters have ``width``: adapters may be wider."""
    return DTYPE_BYTES[run.adapters_dtype] if run.peft.freezes else width


def accumulates(run: RunSpec) -> bool:
    """Whether a step has more than one microbatch, so that gradients of the first are alive while the others run."""
    return run.num_microbatches > 1


def hidden_bytes(run: RunSpec) -> int:
    """Bytes of a layer's output, and of its gradient."""
    s, b = run.batch.rows
    return s * b * run.model.hidden_size * DTYPE_BYTES[run.compute_dtype]
