"""Encoders of a first chunk, storage by storage: between the embedding and the layers, as one block.

Token embeddings wait while an encoder runs, and their gradient while it runs backward (Megatron Bridge
``models/*_vl/modeling_*.py: forward``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bridge_memory.inventory.encoders.chain import blocks_of_encoder, joined_block, last_encoder, sizes_of_encoder
from bridge_memory.tapes.allocation_trace import Passes, Storages, plain_context
from bridge_memory.tapes.context import BlockContext

Back = Callable[[int | None], dict[int, int]]


class _Encoder(NamedTuple):
    """Its blocks in order, each as often as it is repeated, and whether it makes features of its own of what the layers
    before it give to those after it; and what its forward holds beside those after the first."""

    blocks: list[tuple[Passes, int, bool]]
    joined: Passes
    held: int


class Encoders:
    """All encoders of a model that have something to encode."""

    def __init__(self, ctx: BlockContext, storages: Storages) -> None:
        self._storages, self._all = storages, list[_Encoder]()
        own = plain_context(ctx)
        last = last_encoder(ctx)
        for number, run in enumerate(ctx.encoders):
            if run.items:
                known: dict[int, Passes] = {}
                blocks = []
                for name, found, count in blocks_of_encoder(own, run, number):
                    tape = found.tape  # type: ignore[attr-defined]
                    passes = known.setdefault(id(found), Passes(tape, storages))
                    blocks.append((passes, count, name == "beside"))
                joined = joined_block(own, run, number, enters=number == last).tape  # type: ignore[attr-defined]
                self._all.append(_Encoder(blocks, Passes(joined, storages), sizes_of_encoder(run, ctx).held))

    def forward(self, x: int | None) -> tuple[int, Back]:
        """As ``Passes.forward``: from token embeddings to those with features among them."""
        assert x is not None
        storages, backs = self._storages, list[Back]()
        out = storages.hold(x)
        for encoder in self._all:
            given = out
            out, its_back = self._one(encoder, given)
            storages.drop(given)
            backs.append(its_back)

        def back(gradient: int | None) -> dict[int, int]:
            found: dict[int, int] = {}
            while backs:
                found = backs.pop()(gradient)
                gradient = found.get(0)
            return found

        return out, back

    def _one(self, encoder: _Encoder, embeddings: int) -> tuple[int, Back]:
        storages, backs = self._storages, list[tuple[Back, bool]]()
        inside = held = None
        for passes, count, beside in encoder.blocks:
            for _ in range(count):
                out, its_back = passes.forward(inside)
                backs.append((its_back, beside))
                if beside:
                    storages.drop(out)  # the language model has saved it
                    continue
                if inside is not None:
                    storages.drop(inside)
                inside = out
            held = storages.make(encoder.held) if held is None else held
        assert inside is not None and held is not None
        storages.drop(held)
        out, joined_back = encoder.joined.forward_of((inside, embeddings))
        storages.drop(inside)

        def back(gradient: int | None) -> dict[int, int]:
            found = joined_back(gradient)
            of_features = found.pop(0, None)
            while backs:
                its_back, beside = backs.pop()
                if beside:  # its gradient is added to that of the next layer
                    added = its_back(None).get(0)
                    if added is not None and of_features is not None:
                        storages.drop(added)
                    elif added is not None:
                        of_features = added
                elif of_features is not None:
                    of_features = its_back(of_features).get(0)
            if of_features is not None:
                storages.drop(of_features)
            return {} if 1 not in found else {0: found[1]}

        return out, back
