"""LoRA adapters of the linears on a rank: two low-rank weights each, the only ones that train.

linear_in maps h to r features, linear_out maps r features to the output; ``spec.adapters`` decides which dimension of
each is sharded. A grouped linear has one adapter for all its experts.
Source: Megatron Bridge ``peft/lora.py: LoRA.transform``, ``peft/utils.py: ParallelLinearAdapter``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bridge_memory.inventory.stack import Unit, named_parameters
from bridge_memory.spec import ParallelSpec, PeftSpec, RunSpec
from bridge_memory.spec.adapters import DUPLICATED, ROW_PARALLEL, divide_features, is_target, split_rank
from bridge_memory.tapes.chain import Label
from bridge_memory.tapes.parameters import EXPERT_NUMBER, Parameter, ParameterList, Repeated

#: No parallelism.
ALONE = ParallelSpec()
_WEIGHT = re.compile(r"(?P<module>.*?(?P<linear>[A-Za-z_0-9]+))\.weight(?P<expert>\d*)$")


def adapter_units(run: RunSpec, units: Sequence[Unit]) -> list[Unit]:
    """What trains of a chunk whose weights are frozen: the adapters of its linears (none if their rank is not known),
    or the parts of encoders that are not frozen."""
    if run.peft.scheme == "frozen":
        return with_parameters(units, lambda p: p.trains is True)
    if run.peft.scheme != "lora" or not run.peft.dim:
        return []
    targets = run.peft.target_modules
    make = partial(lora_parameters, peft=run.peft, parallel=run.parallel)
    if any("*" in target or "." in target for target in targets):  # some layers or experts only, perhaps
        each = [Repeated((adapter,)) for adapter in make(list(named_parameters(units)))]
        return [Unit(Label.LAYER, "", ParameterList(each))]
    made: dict[tuple[int, str], ParameterList] = {}
    for unit in units:
        kind = id(unit.parameters), unit.prefix
        if kind not in made:
            made[kind] = ParameterList(list(_adapters_of(unit, make)))
    return [unit._replace(parameters=made[id(unit.parameters), unit.prefix]) for unit in units]


def with_parameters(units: Sequence[Unit], kept: Callable[[Parameter], bool]) -> list[Unit]:
    """The units with those of their parameters that are ``kept``; units without any are left out."""
    out = []
    for unit in units:
        rows = [
            Repeated(few, times)
            for parameters, times in unit.parameters.rows
            if (few := tuple(p for p in parameters if kept(p)))
        ]
        if rows:
            out.append(unit._replace(parameters=ParameterList(rows)))
    return out


def _adapters_of(unit: Unit, make: Callable[[Sequence[Parameter]], list[Parameter]]) -> Iterator[Repeated]:
    """The adapters of one block, with how often each exists."""
    for parameters, times in unit.parameters.rows:
        adapters = make([p.numbered(0).under(unit.prefix) for p in parameters])
        grouped = all(p.name.endswith(EXPERT_NUMBER) for p in parameters)
        if adapters:
            yield Repeated(tuple(adapters), 1 if grouped else times)


def lora_parameters(
    params: Sequence[Parameter], *, peft: PeftSpec, parallel: ParallelSpec = ALONE
) -> list[Parameter]:
    """The local shards of the adapters of ``params``, a rank's parameters. Raises SpecError where Megatron raises."""
    out: list[Parameter] = []
    for p in params:
        match = _WEIGHT.match(p.name)
        if match is None or len(p.shape) != 2 or match["expert"] not in ("", "0"):
            continue
        linear = match["linear"]
        if not is_target(peft, linear, match["module"]):
            continue
        out_local, in_local = p.shape
        ranks = parallel.etp if p.expert else parallel.tp
        if linear in ROW_PARALLEL:
            out_local = divide_features("hidden_size", out_local, ranks, experts=p.expert)
            shapes = ((peft.dim, in_local), (out_local, peft.dim))
        else:
            if linear in DUPLICATED:
                out_local = divide_features(linear, out_local, ranks, experts=p.expert)
            shapes = ((split_rank(peft.dim, ranks, experts=p.expert), in_local), (out_local, peft.dim))
        for name, shape in zip(("linear_in", "linear_out"), shapes, strict=True):
            out.append(Parameter(f"{match['module']}.adapter.{name}.weight", shape, p.expert, ranks > 1))
        if peft.use_dora:
            out.append(Parameter(f"{match['module']}.adapter.magnitude", shapes[1][:1], p.expert))
    return out
