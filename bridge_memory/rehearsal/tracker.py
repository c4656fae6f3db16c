"""Which storages are alive when, in bytes, on the meta device or on another.

Every operation passes a dispatch mode; a storage that it creates is alive until PyTorch drops its last reference.
Forward hooks name modules, saved-tensor hooks find what is saved for backward. Bytes are exact sizes unless ``unit``
says otherwise: the CUDA allocator rounds each up to 512. Temporaries inside a kernel are not seen.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch._compile
import torch._dynamo.eval_frame
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bridge_memory.rehearsal.patches.fusion import after_each_kernel, inside_a_kernel
from bridge_memory.rehearsal.patches.replace import META, replaced


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """One storage saved for backward: the module that saved it first, and the operation that created it."""

    module: str
    made_by: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    #: The outermost module that was running: "embedding", "decoder", "mtp", "output_layer"; "" for the model itself.
    part: str = ""

    def __str__(self) -> str:
        return f"{self.module}: {self.dtype}{list(self.shape)} by {self.made_by}, {self.bytes:,} bytes"


@dataclass(frozen=True, slots=True)
class Alive:
    """One storage alive at some moment: the module and the operation that created it."""

    module: str
    made_by: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive during a phase, the module and operation at that moment, and the largest storages then."""

    bytes: int
    module: str
    operation: str
    largest: tuple[Alive, ...]


@dataclass(slots=True)
class _Storage:
    nbytes: int
    module: str
    made_by: str
    ref: Any
    #: Unique, unlike the address, which is used again once a storage is freed.
    serial: int


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with storage: of a quantized tensor its data, scales and maxima, of a pending collective its
    result."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return (tensor.elem,)
    data = getattr(tensor, "get_data_tensors", None)
    if data is None:
        return (tensor,)
    names = ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise")
    return tuple(t for t in (*data(), *(getattr(tensor, name, None) for name in names)) if t is not None)


# ---- sums of gradients ----
#
# Autograd adds a second gradient of a tensor to the first in place if nothing else refers to the first, but never while
# a dispatch mode is active (``torch/csrc/autograd/input_buffer.cpp: can_accumulate_inplace``). The tracker is such a
# mode, so that it adds in place itself.

#: Files of torch's own frames around a dispatch mode.
WRAPPERS = (torch._compile.__file__, torch._dynamo.eval_frame.__file__)
#: Whether this torch exposes reference counts of tensors and storages.
COUNTED = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")
ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


#: Operations of backward formulas on new zeros. They run in place, but out of place while a dispatch mode is active or
#: a tensor has no data (``torch/csrc/autograd/FunctionsManual.cpp: index_backward,
#: value_selecting_reduction_backward``; ``TensorAdvancedIndexing.cpp: gather_backward, index_select_backward``).
INTO_ZEROS = {
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
}

#: Kernels that copy an argument where it is not contiguous, which a tensor without data does not show, and its place
#: (``aten/src/ATen/native/cuda/Embedding.cu: embedding_dense_backward_cuda``, ``Indexing.cu:
#: index_put_with_sort_kernel``).
CONTIGUOUS_INSIDE = {torch.ops.aten.embedding_dense_backward.default: 0, torch.ops.aten.index_put_.default: 2}


def _sums_gradients(func: Any) -> bool:
    """Whether autograd's engine itself adds gradients, not a backward function written in Python. Call it directly from
    the mode's ``__torch_dispatch__``."""
    return func is ADD and COUNTED and _the_engine_asks(3)


def _the_engine_asks(depth: int) -> bool:
    """Whether autograd's engine called the frame that is ``depth`` frames up."""
    if torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename in WRAPPERS:
        frame = frame.f_back
    return frame is not None and "run_backward" in frame.f_code.co_names


@dataclass(frozen=True, slots=True)
class _Owners:
    """Reference counts: of the tensor, of its storage and of its Python object."""

    tensor: int
    storage: int
    wrapper: int

    def __le__(self, other: _Owners) -> bool:
        return self.tensor <= other.tensor and self.storage <= other.storage and self.wrapper <= other.wrapper


def _owners(args: tuple[Any, ...]) -> _Owners:
    storage = args[0].untyped_storage()
    return _Owners(args[0]._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(args[0]))


class _Watch(TorchDispatchMode):
    """Records the reference counts of the first gradient of every sum."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[_Owners] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _sums_gradients(func):
            self.seen.append(_owners(args))
        return func(*args, **(kwargs or {}))


@torch.enable_grad()
def _sole_owner() -> _Owners:
    """``_owners`` of a gradient that only the engine refers to; zeros in a release without these counts."""
    x = torch.ones((), device=META, requires_grad=True) * 1
    loss = x.exp() + x.sin()
    with _Watch() as watch:
        loss.backward()
    return watch.seen[0] if watch.seen else _Owners(0, 0, 0)


#: Differs between releases of PyTorch; measured on import, when no other mode is active.
SOLE_OWNER = _sole_owner()


class Tracker(TorchDispatchMode):
    """Use ``with tracker.watching(module):``. Storages that exist before are not counted."""

    def __init__(self, static: Iterable[torch.Tensor] = (), device: str = META, unit: int = 1) -> None:
        """``static``: tensors that are not counted. ``unit``: bytes to whose multiples the allocator rounds up."""
        super().__init__()
        self._device = device
        self._unit = unit
        self._live: dict[int, _Storage] = {}
        self._serial = count()
        self._static: dict[int, Any] = {}
        self._saved: dict[int, tuple[SavedRecord, Any]] = {}
        self._names: dict[int, str] = {}
        self._path: list[str] = [""]
        self.live_bytes = 0
        #: Called for every allocation with (serial number, bytes), and for every free with (serial number, None).
        self.heard: Callable[[int, int | None], None] | None = None
        self._peak = 0
        self._peak_at: tuple[str, str] = ("", "")
        self._peak_state: tuple[_Storage, ...] = ()
        self.in_backward = False
        for tensor in static:
            self.ignore(tensor)

    # ---- storages ----

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count this tensor's storage: a parameter, a buffer, a main gradient."""
        storage = tensor.untyped_storage()
        self._static[storage._cdata] = storage

    def name_alive(self, name: str) -> None:
        """Name the storages that are alive and belong to no module: the batch, or the input that another stage sent."""
        for storage in self._live.values():
            if not storage.module:
                storage.module = name

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Name the storage of this tensor."""
        self._live[tensor.untyped_storage()._cdata].module = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # A DTensor asks again for the tensors that it is made of.
        if _sums_gradients(func) and _owners(args) <= SOLE_OWNER:
            func = ADD_IN_PLACE
        elif func in INTO_ZEROS and _the_engine_asks(2) and self._is_new_zeros(args[0]):
            func = INTO_ZEROS[func]
        name = func._schema.name.split("::")[-1]
        made, at = False, CONTIGUOUS_INSIDE.get(func)
        if at is not None and not args[at].is_contiguous():
            args = (*args[:at], args[at].contiguous(), *args[at + 1 :])
            made = self._note(args[at], name)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            # DTensor uses fake tensors to compute shapes; they have no memory.
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device and not isinstance(leaf, FakeTensor):
                # The wrapper of quantized data has a storage of its logical size, and allocates nothing.
                for part in parts_of(leaf):
                    made |= self._note(part, name)
        if made:
            self._mark(name)
        return out

    def _is_new_zeros(self, tensor: torch.Tensor) -> bool:
        """Whether a backward formula has made it, and not another function's gradient (as where ``x[mask] = 0`` has
        one)."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return known is not None and "zeros" in known.made_by

    def _note(self, tensor: torch.Tensor, name: str) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._static:
            return False
        nbytes = self._given(storage.nbytes())
        made = _Storage(nbytes, self._path[-1], name, None, next(self._serial))
        made.ref = weakref.ref(storage, self._forget(key))
        self._live[key] = made
        self.live_bytes += nbytes
        if self.heard is not None:
            self.heard(made.serial, nbytes)
        return True

    def _given(self, nbytes: int) -> int:
        return -(-nbytes // self._unit) * self._unit

    def _forget(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            storage = self._live.pop(key, None)
            if storage is not None:
                self.live_bytes -= storage.nbytes
                if self.heard is not None:
                    self.heard(storage.serial, None)

        return gone

    def resized(self, storage: Any, nbytes: int) -> None:
        """The storage has been resized to ``nbytes``."""
        known = self._live.get(storage._cdata)
        if known is not None:
            nbytes = self._given(nbytes)
            self.live_bytes += nbytes - known.nbytes
            if self.heard is not None and nbytes != known.nbytes:
                self.heard(known.serial, None)
                self.heard(known.serial, nbytes)
            known.nbytes = nbytes
            self._mark("resize_")

    # ---- peaks ----

    def _mark(self, name: str) -> None:
        if self.live_bytes > self._peak and not inside_a_kernel():
            self._peak = self.live_bytes
            self._peak_at = (self._path[-1], name)
            self._peak_state = tuple(self._live.values())

    def reset_peak(self) -> None:
        self._peak = 0
        self._mark("(start)")

    def peak(self, most: int = 16) -> Peak:
        largest = sorted(self._peak_state, key=lambda s: -s.nbytes)[:most]
        return Peak(
            self._peak, *self._peak_at, tuple(Alive(s.module, s.made_by, s.nbytes) for s in largest)
        )

    def keys(self) -> frozenset[int]:
        """The storages alive now, by serial number."""
        return frozenset(s.serial for s in self._live.values())

    def present(self) -> list[tuple[int, int]]:
        """(serial number, bytes) of every storage alive now, the oldest first."""
        return sorted((s.serial, s.nbytes) for s in self._live.values())

    def alive(self, among: frozenset[int]) -> list[Alive]:
        return [
            Alive(s.module, s.made_by, s.nbytes)
            for s in self._live.values()
            if s.serial in among and s.nbytes
        ]

    def without(self, persistent: frozenset[int], *peaks: Peak) -> list[Peak]:
        """The peaks without the ``persistent`` storages."""
        kept = [s for s in self._live.values() if s.serial in persistent]
        off = sum(s.nbytes for s in kept)
        names = {(s.module, s.made_by, s.nbytes) for s in kept}
        return [
            replace(
                p,
                bytes=p.bytes - off,
                largest=tuple(a for a in p.largest if (a.module, a.made_by, a.bytes) not in names),
            )
            for p in peaks
        ]

    # ---- what is saved for backward ----

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        module = self._path[-1]
        for part in parts_of(tensor):
            if part.device.type == self._device:
                self._keep(part, module)
        return tensor, module

    def _keep(self, tensor: torch.Tensor, module: str) -> None:
        key = tensor.untyped_storage()._cdata
        known = self._live.get(key)
        if known is not None and (key not in self._saved or self._saved[key][1]() is None):
            record = SavedRecord(
                module,
                f"{known.module or 'input'}: {known.made_by}",
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                known.nbytes,
                next((p for p in self._path if p), "").split(".")[0],
            )
            self._saved[key] = (record, known.ref)

    def _unpack(self, packed: tuple[torch.Tensor, str]) -> torch.Tensor:
        if self.in_backward:
            self._path[-1] = packed[1]
        return packed[0]

    def saved(self, persistent: frozenset[int] = frozenset()) -> list[SavedRecord]:
        """What is alive now because backward needs it, each storage once, in order of saving.

        Without ``persistent`` storages (a cached rotary table), except those of the batch: every batch has its own.
        """
        found = []
        for key, (record, ref) in self._saved.items():
            storage = self._live.get(key)
            if storage is None or storage.ref is not ref or not storage.nbytes:
                continue
            if storage.serial not in persistent or storage.module == "batch":
                found.append(record)
        return found

    def held(self, persistent: frozenset[int]) -> list[Alive]:
        """What is alive now, neither saved nor ``persistent``: a module's attribute or the caller refers to it."""
        saved = {key for key, (_, ref) in self._saved.items() if ref() is not None}
        return [
            Alive(s.module, s.made_by, s.nbytes)
            for key, s in self._live.items()
            if key not in saved and s.serial not in persistent and s.nbytes
        ]

    # ---- watching a model ----

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[Tracker]:
        """Track every operation inside, without the parameters and buffers of ``model``."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.ignore(tensor)
        with self.following(model):
            yield self

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[None]:
        """Track every operation inside, by the modules of ``model``."""
        self._names = {id(m): name for name, m in model.named_modules()}

        def enter(module: torch.nn.Module, args: Any) -> None:
            self._path.append(self._names.get(id(module), self._path[-1]))

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._path.pop()

        hooks = torch.nn.modules.module
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, nbytes: int) -> Any:
            done = resize(storage, nbytes)
            self.resized(storage, nbytes)
            return done

        with ExitStack() as stack:
            for handle in (
                hooks.register_module_forward_pre_hook(enter),
                hooks.register_module_forward_hook(leave, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", resized))
            # The copy between storages that fills a recomputed output moves no bytes here.
            stack.enter_context(replaced(torch.UntypedStorage, "copy_", lambda s, *a, **k: s))
            stack.enter_context(after_each_kernel(lambda: self._mark("fused kernel")))
            # A weight that passed the saved-tensor hooks is another Python object without DDP's attribute, for which
            # ``tensor_parallel/layers.py`` would make no gradient.
            stack.enter_context(replaced(torch.Tensor, "grad_added_to_main_grad", False, add=True))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            stack.enter_context(self)
            yield
