"""Random tapes with everything that a tape can record, in the order in which real blocks use it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from bridge_memory.tapes.tape import Tape, Tensor

#: Kinds of nodes, those of plain tapes first.
KINDS = ("make", "make", "make", "keep_alive", "alias", "views", "checkpoint", "discardable", "offload")


class Writer:
    """Writes one tape. ``size``: number -> bytes; the same numbers are asked for in the same order, whatever it says.

    ``plain``: operations and variables only, each gradient a tensor of its own.
    """

    def __init__(self, rng: Random, size: Callable[[int], Any], tape: Any = None, *, plain: bool = False) -> None:
        self.rng = rng
        self.size = size
        self.tape = Tape() if tape is None else tape
        self.plain = plain
        self.kinds = KINDS[:4] if plain else KINDS
        self.landmark = not plain and rng.random() < 0.5
        self._names = 0

    def write(self) -> Any:
        tape, rng = self.tape, self.rng
        inputs = [
            tape.input(f"input {i}", self.bytes(), requires_grad=not i or rng.random() < 0.5)
            for i in range(rng.randint(1, 2))
        ]
        first = self.make(inputs)
        made = [first, *self.nodes(rng.randint(1, 6), [*inputs, first], depth=0)]
        tape.output(*rng.sample(made, min(len(made), rng.randint(1, 2))))
        if rng.random() < 0.5:
            tape.keep_alive(inputs[0])
        return tape

    def bytes(self) -> Any:
        return self.size(self.rng.randint(0, 5))

    def name(self) -> str:
        self._names += 1
        return f"t{self._names}"

    def make(self, inputs: list[Tensor], *, alias: bool = False) -> Tensor:
        rng = self.rng
        saves = [t for t in inputs if rng.random() < 0.6]
        in_place = saves == inputs[:1] == inputs and not alias and not self.plain and rng.random() < 0.3
        also = ()
        if rng.random() < 0.2:
            also = (self.tape.tensor(self.name(), self.bytes(), grad=False),)
            saves = [*saves, *also]
        return self.tape.make(
            self.name(), inputs, self.bytes(), saves=saves, save_output=not in_place and rng.random() < 0.3,
            grad=rng.random() < 0.9, workspace=self.bytes(), backward_workspace=self.bytes(), alias=alias,
            in_place=in_place, also=also,
        )

    def some(self, of: list[Tensor]) -> list[Tensor]:
        return self.rng.sample(of, min(len(of), self.rng.randint(1, 2)))

    def nodes(self, number: int, visible: list[Tensor], depth: int) -> list[Tensor]:
        """Write nodes over ``visible`` tensors; what they made."""
        visible, made = list(visible), []
        mark = self.rng.randrange(number) if self.landmark and not depth else -1
        for position in range(number):
            new: list[Tensor] = []
            kind = self.rng.choice(self.kinds)
            if depth and kind in ("checkpoint", "discardable", "offload"):
                kind = "make"
            if kind in ("make", "alias"):
                new.append(self.make(self.some(visible), alias=kind == "alias"))
            elif kind == "keep_alive":
                self.tape.keep_alive(*self.some(visible))
            elif kind == "views":
                whole = self.rng.choice(visible)
                new += self.tape.views(self.name(), whole, (self.name(), self.bytes()), (self.name(), self.bytes()))
            elif kind == "checkpoint":
                inputs = self.some(visible)
                with self.tape.checkpoint("region", inputs):
                    inner = self.nodes(self.rng.randint(1, 3), inputs, depth + 1)
                new += inner[-2:]
            elif kind == "discardable":
                inputs = self.some(visible)
                with self.tape.discardable("region", inputs) as region:
                    out = self.make(inputs)
                user = self.tape.make(self.name(), out, self.bytes(), saves=(out,), backward_workspace=self.bytes())
                self.tape.discard(region, out)
                new.append(user)
            else:
                with self.tape.offload(True):
                    new += self.nodes(self.rng.randint(1, 2), visible, depth + 1)
            if position == mark:
                self.tape.landmark("landmark")
            visible += new
            made += new
        if not made:
            made.append(self.make(self.some(visible)))
        return made
