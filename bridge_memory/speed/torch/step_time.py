"""Seconds of one step under PyTorch's engines and DeepSpeed: one GPU's passes, what is gathered and reduced over
data-parallel ranks and is not hidden by them, the optimizer's step, and what crosses to host memory.

Passes take what ``work`` counts over the rates of ``constants``, which were fitted on Megatron's runs; what an
engine sends and when is read off its source, named at each function. Nothing here was fitted on a run of these engines;
``scripts/maintain/speeds_torch.py`` says how far measured ones are off.
"""

from __future__ import annotations

from typing import NamedTuple

from bridge_memory.engines.peft import adapter_units
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.spec import DTYPE_BYTES, LayerSpec, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.encoders import EncoderWork, encoder_work
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron.step_time import LEAST_EXPOSED, Passes
from bridge_memory.speed.megatron.work import FUSED_BACKWARD, Product
from bridge_memory.speed.torch.work import BlockWork, layer_products, model_work
from bridge_memory.tapes.chain import Label
from bridge_memory.tapes.context import context_of

#: Engines whose step this module times.
TIMED = ("single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")

#: How far such a time can be trusted, for people.
NOT_FITTED = (
    "step times of engines outside of megatron-core are for ranking only: rates were fitted on Megatron's runs, and "
    "only one measured series, of three checkpointing modes, varies these engines' options"
)
#: Seconds that the host takes to start one operation forward (Python, dispatcher, autograd), and backward (C++ alone).
#: Judgement: an eager operation of torch is usually said to take 5 to 10 microseconds.
HOST_FORWARD, HOST_BACKWARD = 1e-5, 5e-6
#: Times an element of a state or a parameter is read or written in a step of torch's optimizers, by optimizer and
#: kind of update: gradient in, parameter and states in and out (fused, one kernel: ``aten/src/ATen/native/cuda/
#: fused_adam_utils.cuh``); each of ``_multi_tensor_adamw``'s ten kernels by itself (``torch/optim/adam.py``), or
#: ``_multi_tensor_sgd``'s. Adafactor's and Lion's likewise (``transformers/optimization.py``, bitsandbytes' kernel).
_ACCESSES = {
    ("adam", "fused"): 7, ("adam", "foreach"): 20, ("adam", "for-loop"): 20, ("sgd", "fused"): 5, ("sgd", "foreach"): 8,
    ("sgd", "for-loop"): 8,
}  # fmt: skip
_OTHER_ACCESSES = {"adafactor": 12, "lion": 5, "lion_8bit": 4, "adamw_8bit": 4}
#: Bytes a step of ZeRO reads and writes an element of its partition: the gradient cast to fp32 (6), its norm (4),
#: scaled (8), FusedAdam over fp32 main parameters and moments (28), the copy in the model's dtype (6)
#: (``runtime/zero/stage_1_and_2.py: step``, ``stage3.py: step``, ``csrc/adam/multi_tensor_adam.cu``).
_ZERO_STEP = 52
#: The same on the host, where ``csrc/adam/cpu_adam_impl.cpp`` passes over them once: gradient, main parameter, moments.
_ZERO_HOST_STEP = 34
#: Reads and writes an element to add a microbatch's gradient to those before it, and to clip (the norm, the product).
_ADDED, _CLIPPED = 3, 3


class StepTime(NamedTuple):
    """Seconds of one step."""

    #: Passes over all microbatches of one GPU; waiting for the host among them.
    forward: float
    backward: float
    #: Of ``backward``, what runs again for checkpoints.
    recomputation: float
    #: Parameters gathered and gradients reduced that no pass hides.
    exposed_communication: float
    #: Those that passes hide; in no sum.
    overlapped_communication: float
    optimizer: float
    #: To and from host memory, and the optimizer's step there.
    host: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.exposed_communication + self.optimizer + self.host

    def times(self, factor: float) -> StepTime:
        """Every part so many times as long."""
        return StepTime(*[factor * part for part in self])


def not_timed(run: RunSpec) -> tuple[str, ...]:
    """What of ``run`` moves its step time and is not in this model, by the names of its fields."""
    hf, z = run.transformers, run.deepspeed
    asked = {
        "torch_compile": hf.torch_compile, "load_in_4bit": hf.load_in_4bit, "load_in_8bit": hf.load_in_8bit,
        "offload_optimizer_device (nvme)": z.offload_optimizer_device == "nvme",
        "offload_param_device (nvme)": z.offload_param_device == "nvme", "peft.use_dora": run.peft.use_dora,
        "paged": run.optimizer.paged,
        "enable_activation_offloading": hf.enable_activation_offloading, "optimizer_in_bwd": hf.optimizer_in_bwd,
        "num_output_chunks": hf.num_output_chunks > 0, "cut_cross_entropy": hf.cut_cross_entropy,
        "checkpoint_submodules": hf.checkpoint_submodules,
    }  # fmt: skip
    return tuple([name for name, is_asked in asked.items() if is_asked])


def step_time(
    run: RunSpec, hardware: Hardware, constants: Constants = DEFAULT, *, recomputation: float | None = None
) -> StepTime:
    """The time of one step of ``run``, whose engine is one of ``TIMED``; ``recomputation``: seconds of what runs again
    of one microbatch, where it is not what the run says."""
    assert run.data_parallel.engine in TIMED, run.data_parallel.engine
    return _Step(run, hardware, constants, recomputation).time()


class LayerAgain(NamedTuple):
    """Seconds of what a checkpointed layer can run again, for one microbatch."""

    #: Name of the matrix -> its product.
    products: dict[str, float]
    attention: float
    #: All other operations.
    rest: float
    #: What the host takes to start them all: no less.
    host: float


def layers_again(run: RunSpec, hardware: Hardware, constants: Constants = DEFAULT) -> dict[LayerSpec, LayerAgain]:
    """For every kind of layer."""
    return _Step(run, hardware, constants).again()


class _Pass(NamedTuple):
    """One microbatch on one GPU."""

    forward: float
    backward: float
    recomputation: float


class _Sent(NamedTuple):
    """What one microbatch's forward and backward pass gather and reduce, and what the step does: seconds, and what of
    each is seen at the least, where passes hide the rest; None where they hide nothing."""

    forward: float = 0.0
    backward: float = 0.0
    #: In the last microbatch, or in each.
    reduced: float = 0.0
    each: bool = False
    #: After the last backward pass, or beside the optimizer.
    step: float = 0.0
    #: Seconds of one unit, the first or last, that nothing runs beside; None: nothing is hidden.
    least_gathered: float | None = 0.0
    least_reduced: float | None = 0.0
    #: Bytes a pass copies into and out of flat buffers: forward and backward of each microbatch, and where it reduces.
    copied_forward: float = 0.0
    copied_backward: float = 0.0
    copied_reduced: float = 0.0


class _Step:
    """One run's step."""

    def __init__(self, run: RunSpec, hardware: Hardware, c: Constants, recomputation: float | None = None) -> None:
        self.run, self.hardware, self.c, self._recomputation = run, hardware, c, recomputation
        self.ctx = context_of(run)
        self.passes = Passes(run, self.ctx, hardware, c)
        self.rates = self.passes.rates
        ((self.shape,),) = layout(run.model, run.parallel).shapes(run.model)
        self.units = chunk_units(run.model, self.shape, self.ctx)
        self.numel = sum(unit.times * unit.parameters.numel for unit in self.units)
        #: Of one layer, and of what is in none.
        in_layers = [unit for unit in self.units if unit.label in (Label.LAYER, Label.MTP)]
        self.layers = sum(unit.times for unit in in_layers)
        self.layer_numel = sum(unit.times * unit.parameters.numel for unit in in_layers) / max(1, self.layers)
        self.root_numel = self.numel - self.layers * self.layer_numel
        self.trained = self.numel
        if run.peft.freezes:
            adapters = adapter_units(run, self.units)
            self.trained = sum(unit.times * unit.parameters.numel for unit in adapters)
        self.ranks = run.parallel.data_parallel_size
        self.m = run.num_microbatches
        self.width = DTYPE_BYTES[run.params_dtype]
        self.compute_width = DTYPE_BYTES[run.compute_dtype]
        #: Of gradients as autograd makes them.
        self.gradient_width = DTYPE_BYTES[run.adapters_dtype] if run.peft.freezes else self.compute_width

    def time(self) -> StepTime:
        """The time of one step."""
        m, memory = self.m, self.rates.memory
        sent, one = self._sent(), self._pass()
        forward = one.forward + sent.copied_forward / memory
        backward = one.backward + sent.copied_backward / memory
        reductions = m if sent.each else 1
        seen = hidden = 0.0
        for gathered, least, beside in (
            (sent.forward, sent.least_gathered, forward), (sent.backward, sent.least_gathered, backward),
        ):
            open_ = _open(gathered, least, beside)
            seen, hidden = seen + m * open_, hidden + m * (gathered - open_)
        # Reductions share the links with what backward gathers.
        beside = max(0.0, backward - sent.backward)
        open_ = _open(sent.reduced, sent.least_reduced, beside)
        seen, hidden = seen + reductions * open_ + sent.step, hidden + reductions * (sent.reduced - open_)
        copies = reductions * sent.copied_reduced / memory
        host_moves, host_step = self._host()
        return StepTime(
            m * forward, m * backward + copies + self._accumulated() / memory, m * one.recomputation, seen, hidden,
            0.0 if host_step else self._optimizer() / memory, host_moves + host_step,
        )

    # ---- one GPU ----

    def _pass(self) -> _Pass:
        if not self.run.implementation.torch_layers:  # Megatron's layers, beside these engines
            of_chunk = self.passes.chunk(self.shape)
            return _Pass(of_chunk.forward.total, of_chunk.backward.total, of_chunk.recomputation)
        work, spec = model_work(self.run), self.run.transformers
        forward = backward = recomputation = 0.0
        for block in (work.embedding, work.end):
            forward, backward = forward + self._forward(block), backward + self._backward(block)
        number = 0
        for block, times in work.layers:
            there, back = self._forward(block), self._backward(block)
            forward, backward = forward + times * there, backward + times * back
            runs_again = 0.0
            if spec.gradient_checkpointing:
                runs_again = times * there
            elif spec.selective_ac_option == "op":
                # Every second product is kept, and attention (torchtitan ``_apply_op_sac``).
                others = block._replace(products=block.products[1::2], attention=0.0)
                runs_again = times * self._forward(others)
            elif spec.selective_ac_option is not None:
                every = int(spec.selective_ac_option)
                runs_again = ((number + times) // every - number // every) * there
            recomputation, number = recomputation + runs_again, number + times
        for encoder in encoder_work(self.run):
            there, back = self._encoder(encoder)
            forward, backward = forward + encoder.times * there, backward + encoder.times * back
            if spec.gradient_checkpointing and encoder.layer:
                recomputation += encoder.times * there
        if self._recomputation is not None:
            recomputation = self._recomputation
        return _Pass(forward, backward + recomputation, recomputation)

    def again(self) -> dict[LayerSpec, LayerAgain]:
        kinds = dict.fromkeys(self.run.model.layers)
        found = {}
        for kind, (block, _) in zip(kinds, model_work(self.run).layers, strict=True):
            products = {name: self._product(p) for name, p in layer_products(self.run, kind)}
            attention = self._fp32_slower * block.attention / self.rates.attention
            found[kind] = LayerAgain(
                products, attention, block.forward / self.rates.memory, HOST_FORWARD * block.operations
            )
        return found

    def _forward(self, w: BlockWork) -> float:
        seconds = sum(self._product(p) for p in w.products)
        seconds += self._fp32_slower * w.attention / self.rates.attention + w.forward / self.rates.memory
        return max(seconds, HOST_FORWARD * w.operations)

    def _backward(self, w: BlockWork) -> float:
        frozen = self.run.peft.freezes
        seconds = sum(self._gradients(p, frozen=frozen) for p in w.products)
        seconds += self._fp32_slower * w.attention_backward / self.rates.attention + w.backward / self.rates.memory
        return max(seconds, HOST_BACKWARD * w.operations_backward)

    def _encoder(self, w: EncoderWork) -> tuple[float, float]:
        """Forward and backward of one of these blocks of an encoder."""
        number, memory = self.run.batch.micro_batch_size, self.rates.memory
        products = [p._replace(rows=number * p.rows) for p in w.products]
        attention = self._fp32_slower * number * w.attention / self.rates.attention
        forward = sum(map(self._product, products)) + attention + number * w.read_forward / memory
        forward = max(forward, HOST_FORWARD * w.operations)
        if not w.operations_backward:
            return forward, 0.0
        backward = sum(self._gradients(p, frozen=not w.trains) for p in products) + number * w.read_backward / memory
        return forward, max(backward + FUSED_BACKWARD * attention, HOST_BACKWARD * w.operations_backward)

    def _product(self, p: Product) -> float:
        seconds: float = self.rates.product(p)
        return self._fp32_slower * seconds

    def _gradients(self, p: Product, *, frozen: bool) -> float:
        """Of the input and of the weight; of frozen weights the first alone."""
        seconds: float = self.rates.product(Product(p.rows, p.inner, p.columns, p.times, False)) if frozen else (
            self.rates.gradients(p)
        )
        return self._fp32_slower * seconds

    @property
    def _fp32_slower(self) -> float:
        """16-bit rates over those of what layers compute in."""
        hf = self.ctx.torch_layers
        width = hf.compute_width if hf is not None else self.compute_width
        return self.hardware.flops / self.hardware.fp32_flops if width == DTYPE_BYTES["fp32"] else 1.0

    # ---- between GPUs ----

    def _sent(self) -> _Sent:
        engine = self.run.data_parallel.engine
        if self.ranks == 1 or engine == "single":
            return _Sent()
        if engine in ("fsdp1", "fsdp2"):
            return self._of_fsdp()
        return self._of_ddp() if engine == "ddp" else self._of_zero3() if engine == "zero3" else self._of_zero()

    def _ring(self, nbytes: float, ranks: int, pieces: float = 1, stride: int = 1) -> float:
        """A gathering or a reduce-scatter of so many bytes over ``ranks`` that are ``stride`` apart, in ``pieces``
        (as ``step_time.py: Step._ring``)."""
        if ranks <= 1 or not nbytes:
            return 0.0
        c, domain = self.c, self.hardware.domain
        sent = nbytes * (ranks - 1) / ranks
        if stride * ranks <= domain:
            return float(sent / self.rates.nvlink + pieces * c.nvlink_latency)
        inside = max(1, min(ranks, domain // stride))
        return float(
            sent / min(self.rates.network * inside, self.rates.nvlink) + pieces * ranks / inside * c.network_latency
        )

    def _of_fsdp(self) -> _Sent:
        """Units are gathered for forward, and for backward where they were divided again; their gradients are divided
        by a reduce-scatter, in the last microbatch or in each, and summed over replicas (``_fsdp_param_group.py:
        unshard, pre_backward, post_backward``; ``_runtime_utils.py``). One unit is gathered ahead of the passes and
        one reduced behind them. FSDP2 copies each gathering out of its flat output, and gradients into the flat input
        (``_fsdp_collectives.py: foreach_all_gather_copy_out, foreach_reduce_scatter_copy_in``)."""
        run, f = self.run, self.run.fsdp
        one = run.data_parallel.engine == "fsdp1"
        ranks = f.shard_degree or self.ranks
        hybrid = f.sharding_strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        if one and hybrid and f.shard_degree is None:
            ranks = min(self.ranks, self.hardware.domain)  # of one machine (``_init_utils.py: _init_intra_node``)
        if one and f.sharding_strategy == "NO_SHARD":
            ranks = 1
        replicas = self.ranks // ranks
        reduce_width = DTYPE_BYTES[f.reduce_dtype or run.compute_dtype]
        whole = f.auto_wrap_policy == "NO_WRAP"
        pieces = 1 if whole else self.layers + (2 if f.auto_wrap_policy == "torchtitan" else 1)
        unit = self.numel if whole else max(self.layer_numel, self.root_numel)
        width = self.compute_width
        gathered = self._ring(self.numel * width, ranks, pieces)
        stays = f.sharding_strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") if one else (
            f.reshard_after_forward is False
        )
        # The root's parameters stay; torchtitan's policy leaves it none.
        root = 0.0 if f.auto_wrap_policy == "torchtitan" else self.root_numel
        pieces_again = self.layers + 2 * (not root)
        regathered = 0.0 if stays or whole else self._ring((self.numel - root) * width, ranks, pieces_again)
        reduced = self._ring(self.trained * reduce_width, ranks, pieces)
        reduced += 2 * self._ring(self.trained * reduce_width / ranks, replicas, pieces, ranks)
        share = self.trained / self.numel
        last = self._ring(unit * share * reduce_width, ranks)
        last += 2 * self._ring(unit * share * reduce_width / ranks, replicas, 1, ranks)
        nothing_ahead = one and f.backward_prefetch == "NO_PREFETCH"
        copied = 0.0 if one else 2.0 * self.numel * width
        sent = _Sent(
            gathered, regathered, reduced, run.data_parallel.sync_each_batch, 0.0, self._ring(unit * width, ranks),
            last, copied, copied * (regathered > 0), self.trained * (self.gradient_width + reduce_width),
        )  # fmt: skip
        # Without prefetching backward waits for every unit that it gathers.
        return sent if not nothing_ahead else sent._replace(backward=0.0, step=self.m * regathered)

    def _of_ddp(self) -> _Sent:
        """Buckets are all-reduced as they fill, in the last microbatch or in each; the last one, with the embedding,
        when backward is over (``reducer.cpp: mark_bucket_ready``). Gradients are copied into buckets and back unless
        they are views of them."""
        d, ddp = self.run.data_parallel, self.run.ddp
        width = DTYPE_BYTES[self.run.adapters_dtype] if self.run.peft.freezes else self.width
        nbytes, bucket = self.trained * width, ddp.bucket_cap_mb * 2**20
        embedding = 0 if self.run.peft.freezes else self.run.model.vocab_size * self.run.model.hidden_size * width
        last = min(nbytes, max(bucket, embedding))
        copied = 0.0 if ddp.gradient_as_bucket_view else 4.0 * nbytes
        return _Sent(
            reduced=2 * self._ring(nbytes, self.ranks, max(1.0, nbytes / bucket)), each=d.sync_each_batch,
            least_reduced=2 * self._ring(last, self.ranks), copied_reduced=copied,
        )  # fmt: skip

    def _of_zero(self) -> _Sent:
        """Buckets of ``reduce_bucket_size`` are all-reduced (``use_multi_rank_bucket_allreduce`` is on), with stage 2
        in each microbatch, with stage 1 in the last (``stage_1_and_2.py: reduce_ready_partitions_and_remove_grads``);
        backward waits unless ``overlap_comm``. After the step whole parameters are gathered, a bucket at a time
        (``all_gather_dp_groups``)."""
        z, stage2 = self.run.deepspeed, self.run.data_parallel.engine == "zero2"
        width = DTYPE_BYTES[z.communication_data_type] if z.communication_data_type else self.gradient_width
        bucket = min(z.reduce_bucket_size, self.trained)
        reduced = 2 * self._ring(self.trained * width, self.ranks, self.trained / bucket)
        step = self._ring(self.trained * self.width, self.ranks, max(1.0, self.trained / z.allgather_bucket_size))
        least = max(2 * self._ring(bucket * width, self.ranks), LEAST_EXPOSED * reduced)
        return _Sent(
            reduced=reduced, each=stage2, step=step, least_reduced=least if z.overlap_comm else None,
            copied_reduced=2.0 * self.trained * self.gradient_width * z.contiguous_gradients,
        )  # fmt: skip

    def _of_zero3(self) -> _Sent:
        """Modules are gathered ahead up to ``stage3_prefetch_bucket_size`` (``partitioned_param_coordinator.py:
        _fetch_sub_module_impl``); parameters that backward needs again within ``stage3_max_reuse_distance`` stay,
        those whose way there and back is shorter. Gradients are divided in each microbatch by reduce-scatters of a
        bucket (``stage3.py: __avg_scatter_grads``), beside backward unless ``overlap_comm`` is off. hpZ gathers for
        backward inside of a partition (``zero_hpz_partition_size``)."""
        z, width = self.run.deepspeed, self.width
        stay = min(self.numel, z.stage3_max_reuse_distance / 2, z.stage3_max_live_parameters)
        gathered = self._ring(self.numel * width, self.ranks, self.layers + 1)
        inside = z.zero_hpz_partition_size
        regathered = self._ring((self.numel - stay) * width, inside if inside > 1 else self.ranks, self.layers + 1)
        comm = DTYPE_BYTES[z.communication_data_type] if z.communication_data_type else self.gradient_width
        bucket = min(z.reduce_bucket_size, self.trained)
        reduced = self._ring(self.trained * comm, self.ranks, self.trained / bucket)
        ahead = z.stage3_prefetch_bucket_size > 0
        first = self._ring(max(self.layer_numel, self.root_numel / 2) * width, self.ranks)
        return _Sent(
            gathered, regathered, reduced, True, 0.0, first if ahead else None,
            self._ring(bucket * comm, self.ranks) if z.overlap_comm is not False else None,
            2.0 * self.numel * width, 2.0 * (self.numel - stay) * width,
            2.0 * self.trained * self.gradient_width * z.contiguous_gradients,
        )  # fmt: skip

    # ---- the step ----

    @property
    def _divided(self) -> int:
        """Ranks over which the optimizer's states are divided."""
        engine, f = self.run.data_parallel.engine, self.run.fsdp
        if engine in ("single", "ddp") or (engine == "fsdp1" and f.sharding_strategy == "NO_SHARD"):
            return 1
        if engine == "fsdp1" and f.sharding_strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            return f.shard_degree or min(self.ranks, self.hardware.domain)
        return (f.shard_degree or self.ranks) if engine == "fsdp2" else self.ranks

    def _optimizer(self) -> float:
        """Bytes read and written by the optimizer's step."""
        o, own = self.run.optimizer, self.trained / self._divided
        if self.run.data_parallel.engine.startswith("zero"):
            return _ZERO_STEP * own
        width = DTYPE_BYTES[self.run.adapters_dtype] if self.run.peft.freezes else self.width
        name = "adam" if o.optimizer in ("adam", "adamw") else o.optimizer
        times = _OTHER_ACCESSES.get(name) or _ACCESSES[name, o.torch_implementation]
        return (times + _CLIPPED * bool(o.clip_grad)) * width * own

    def _accumulated(self) -> float:
        """Bytes read and written to add up the gradients of microbatches, in a step."""
        if self.m == 1:
            return 0.0
        engine, f = self.run.data_parallel.engine, self.run.fsdp
        own, width = float(self.trained), float(self.gradient_width)
        if engine in ("fsdp1", "fsdp2"):
            synced = self.run.data_parallel.sync_each_batch
            own = own / self._divided if synced else own
            width = DTYPE_BYTES[f.reduce_dtype or self.run.compute_dtype] if not synced else self.width
        elif engine in ("zero2", "zero3"):
            own /= self.ranks
        elif engine in ("ddp", "single"):
            width = self.width
        return _ADDED * (self.m - 1) * own * width

    def _host(self) -> tuple[float, float]:
        """(seconds of what crosses to and from host memory, of the optimizer's step there), nothing of it hidden."""
        run, z, f = self.run, self.run.deepspeed, self.run.fsdp
        engine = run.data_parallel.engine
        link, memory = self.rates.host_link, self.rates.host_memory
        own = self.trained / self._divided
        if engine in ("fsdp1", "fsdp2"):
            if not f.offload_params:
                return 0.0, 0.0
            shards = self.numel / self._divided * self.width
            stays = f.reshard_after_forward is False or f.sharding_strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
            gradients = own * self.width * (self.m if run.data_parallel.sync_each_batch else 1)
            accesses = _ACCESSES["adam", "for-loop"]
            return (self.m * shards * (1 if stays else 2) + gradients) / link, accesses * self.width * own / memory
        if not engine.startswith("zero"):
            return 0.0, 0.0
        moved = step = 0.0
        if z.offload_param_device != "none":
            moved += self.m * 2 * self.numel / self.ranks * self.width
        if z.offload_optimizer_device != "none":
            share = z.offload_optimizer_ratio
            each = 1 if engine == "zero1" else self.m
            moved += (each + 1) * own * self.gradient_width * share
            step = _ZERO_HOST_STEP * own * share / memory
        return moved / link, step


def _open(sent: float, least: float | None, beside: float) -> float:
    """Seconds of ``sent`` that passes of ``beside`` seconds do not hide."""
    return sent if least is None else min(sent, max(sent - beside, least))
