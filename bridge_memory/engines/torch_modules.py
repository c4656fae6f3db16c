"""The modules of a model as engines outside of megatron-core see them: one after the other, each with its parameters,
some of which train.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from bridge_memory.components import Provenance, Role, State
from bridge_memory.engines.engine import Line
from bridge_memory.engines.fsdp_buckets import Places, places_of
from bridge_memory.engines.peft import adapter_units
from bridge_memory.engines.torch_optimizers import TorchState, step_bytes, torch_states
from bridge_memory.inventory.stack import Unit
from bridge_memory.inventory.torch.quantized import is_quantized, weight_bytes
from bridge_memory.spec import DTYPE_BYTES, RunSpec
from bridge_memory.tapes.chain import Concurrent, EngineBytes, Label
from bridge_memory.tapes.parameters import ALLOCATION_UNIT, Parameter, ParameterList, Use, pad

_NONE = ParameterList(())


class Module(NamedTuple):
    """One block of the model: its place in the forward pass, what of it trains and what is frozen."""

    place: int
    label: Label
    trained: ParameterList
    frozen: ParameterList
    #: Of the names of its frozen parameters, which those of adapters beside them begin with.
    prefix: str = ""

    def trained_parameters(self) -> Iterator[tuple[Parameter, int]]:
        """(parameter, how many of them), in the order of the model."""
        for parameters, times in self.trained.rows:
            for p in parameters:
                yield p, times

    def parameters(self) -> Iterator[tuple[Parameter, int]]:
        """Those that train and those that do not."""
        yield from self.trained_parameters()
        for parameters, times in self.frozen.rows:
            for p in parameters:
                yield p, times


class Model(NamedTuple):
    """The modules of one chunk."""

    places: Places
    modules: tuple[Module, ...]
    #: Elements of all parameters.
    numel: int

    def engine_bytes(self, beside: Sequence[Concurrent]) -> EngineBytes:
        return self.places.engine_bytes(beside)

    @property
    def number(self) -> int:
        """Of places."""
        return self.places.loss + 1


def model_of(run: RunSpec, units: Sequence[Unit]) -> Model:
    """The modules of a chunk. Where adapters train they are the only ones; adapters of which no module is known, since
    they are asked for by full names, count as the first layer's."""
    places = places_of(units)
    adapters: list[ParameterList | None] = [None] * len(units)
    if run.peft.freezes:
        beside = adapter_units(run, units)
        if len(beside) == len(units):
            adapters = [unit.parameters for unit in beside]
        elif beside:
            first = next((i for i, unit in enumerate(units) if unit.label is Label.LAYER), 0)
            adapters[first] = beside[0].parameters
    modules = []
    for unit, place, beside_it in zip(units, places.first, adapters, strict=True):
        for position in range(place, place + unit.times):
            if run.peft.freezes:
                modules.append(Module(position, unit.label, beside_it or _NONE, unit.parameters, unit.prefix))
            else:
                modules.append(Module(position, unit.label, unit.parameters, _NONE))
    return Model(places, tuple(modules), sum(unit.times * unit.parameters.numel for unit in units))


def rounded(nbytes: int) -> int:
    """Of a tensor of its own in torch's allocator."""
    return pad(nbytes, ALLOCATION_UNIT)


def made_before(model: Model, sizes: Sequence[int]) -> list[int]:
    """At every place what its backward finds of the gradients that later places have made; ``sizes``: of each
    module. What the output layer makes of a tied weight is no gradient yet: it waits in autograd, and the chain of
    blocks counts it (``inventory/torch/chain.py``)."""
    made = [0] * (model.number + 1)
    for module, nbytes in zip(model.modules, sizes, strict=True):
        made[module.place] += nbytes
    for place in reversed(range(model.number)):
        made[place] += made[place + 1]
    return made[1:]


def beside_made(run: RunSpec, model: Model, sizes: Sequence[int]) -> list[Concurrent]:
    """The same beside each place: nothing where gradients accumulate, since all are there from the first microbatch
    on; ``sizes``: of each module's gradients."""
    made = made_before(model, [0] * len(sizes) if accumulates(run) else sizes)
    return [Concurrent(0, n, n, gradients=n) for n in made]


class Kept(NamedTuple):
    """Bytes of one module's tensors on one rank, each a tensor of its own."""

    weights: int
    gradients: int
    states: tuple[int, ...]
    #: Of the largest parameter: exp_avg_sq, and elements.
    largest_state: int
    largest: int
    #: Tensors that train.
    tensors: int = 1


def kept(run: RunSpec, module: Module, states: Sequence[TorchState], width: int, ranks: int = 1) -> Kept:
    """What a module keeps where every parameter's first dimension is divided over ``ranks``, and the first has most."""
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
        # The Trainer's, not that of others who call bitsandbytes.
        embedding = p.use is Use.EMBEDDING and not run.implementation.own_layers
        sizes = [s.nbytes(shape, wide, embedding) for s in states]
        sums = [n + times * size for n, size in zip(sums, sizes, strict=True)]
        largest_state = max(largest_state, *sizes[-1:], 0)
        largest = max(largest, prod(shape))
        tensors += times
    return Kept(weights, gradients, tuple(sums), largest_state, largest, tensors)


def shard(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The first and largest of ``ranks`` pieces along the first dimension, as ``torch.chunk`` cuts."""
    return (-(-shape[0] // ranks), *shape[1:]) if ranks > 1 else shape


def kept_of(run: RunSpec, model: Model, width: int, ranks: int = 1) -> list[Kept]:
    """Of every module."""
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
    """(bytes, name) of what the optimizer's step makes and frees."""
    made = step_bytes(run)
    them = list(all_kept)
    together = sum(k.states[-1] for k in them) if made.together and them and them[0].states else 0
    largest_state = max((k.largest_state for k in them), default=0)
    largest = max((k.largest for k in them), default=0)
    stepping = made.together * together + made.largest * largest_state + made.fp32 * 4 * largest
    # Before it, a norm a parameter (``torch/nn/utils/clip_grad.py: _get_total_norm``).
    norms = ALLOCATION_UNIT * sum(k.tensors for k in them) if run.optimizer.clip_grad else 0
    return (norms, "norms of gradients") if norms > stepping else (stepping, made.name)


def step_of_one(run: RunSpec, kept: Kept) -> int:
    """Bytes that the step of an optimizer of a module's largest parameter alone makes."""
    made = step_bytes(run)
    return (made.together + made.largest) * kept.largest_state + made.fp32 * 4 * kept.largest


def offloaded_activations(run: RunSpec, model: Model) -> tuple[tuple[str, int], ...]:
    """Inputs of layers that wait in pinned host memory for backward."""
    if not run.transformers.enable_activation_offloading:
        return ()
    layers = sum(module.label is Label.LAYER for module in model.modules)
    return (("inputs of layers (pinned)", layers * hidden_bytes(run)),)


def lines(run: RunSpec, *, fresh: bool, shard_name: str, adapters: bool) -> list[Line]:
    """Weights, gradients and optimizer states of a run."""
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
    """Bytes of an element of parameters as they are kept."""
    return DTYPE_BYTES[run.params_dtype]


def trained_width(run: RunSpec, width: int) -> int:
    """The same of what trains, where parameters have ``width``: adapters may be wider."""
    return DTYPE_BYTES[run.adapters_dtype] if run.peft.freezes else width


def accumulates(run: RunSpec) -> bool:
    """Whether a step has more than one microbatch: gradients of the first are there while the others run."""
    return run.num_microbatches > 1


def hidden_bytes(run: RunSpec) -> int:
    """Of what a layer hands to the next one, and of its gradient."""
    s, b = run.batch.rows
    return s * b * run.model.hidden_size * DTYPE_BYTES[run.compute_dtype]
