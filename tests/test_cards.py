"""The cards: one row each, found by the names people type, with the source of each figure and a search on each."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import bridge_memory
from bridge_memory.cards.generations import GENERATIONS, generation_of
from bridge_memory.cards.gpu import Gpu, Rates
from bridge_memory.cards.names import gpu_of_name, name_key
from bridge_memory.cards.rows import GPUS, MULTIPROCESSORS
from bridge_memory.cli import main
from bridge_memory.spec import PrecisionSpec, SpecError
from bridge_memory.spec.gpus import check_computes, find_gpu, lacks
from bridge_memory.speed.hardware import HARDWARE, hardware_of

PACKAGE = Path(bridge_memory.__file__).parent

#: A line a card: its generation and compute capability by NVIDIA's list (developer.nvidia.com/cuda-gpus) and AMD's ISA
#: manuals, the GB on its box, and the CUDA cores or stream processors of its data sheet.
CARDS = {
    "V100-16GB": ("volta", (7, 0), 16, 5120),
    "V100-32GB": ("volta", (7, 0), 32, 5120),
    "T4": ("turing", (7, 5), 16, 2560),
    "A10": ("ampere", (8, 6), 24, 9216),
    "A30": ("ampere", (8, 0), 24, 3584),
    "A40": ("ampere", (8, 6), 48, 10752),
    "A6000": ("ampere", (8, 6), 48, 10752),
    "A100-40GB": ("ampere", (8, 0), 40, 6912),
    "A100-80GB": ("ampere", (8, 0), 80, 6912),
    "A800": ("ampere", (8, 0), 80, 6912),
    "RTX-3090": ("ampere", (8, 6), 24, 10496),
    "RTX-4090": ("ada", (8, 9), 24, 16384),
    "L4": ("ada", (8, 9), 24, 7424),
    "L40": ("ada", (8, 9), 48, 18176),
    "L40S": ("ada", (8, 9), 48, 18176),
    "H100": ("hopper", (9, 0), 80, 16896),
    "H100-96GB": ("hopper", (9, 0), 96, 16896),
    "H100-NVL": ("hopper", (9, 0), 94, 16896),
    "H800": ("hopper", (9, 0), 80, 16896),
    "H20": ("hopper", (9, 0), 96, 9984),
    "H20-141GB": ("hopper", (9, 0), 141, 9984),
    "H200": ("hopper", (9, 0), 141, 16896),
    "GH200-96GB": ("hopper", (9, 0), 96, 16896),
    "GH200-144GB": ("hopper", (9, 0), 144, 16896),
    "RTX-5090": ("blackwell", (12, 0), 32, 21760),
    "RTX-PRO-6000": ("blackwell", (12, 0), 96, 24064),
    "B200": ("blackwell", (10, 0), 180, 18944),
    "GB200": ("blackwell", (10, 0), 186, 18944),
    "B300": ("blackwell", (10, 3), 288, 20480),
    "GB300": ("blackwell", (10, 3), 288, 20480),
    "MI250X": ("cdna2", (9, 0), 64, 7040),
    "MI300X": ("cdna3", (9, 4), 192, 19456),
    "MI325X": ("cdna3", (9, 4), 256, 19456),
    "MI355X": ("cdna4", (9, 5), 288, 16384),
}


def test_every_card_has_its_line() -> None:
    assert list(GPUS) == list(CARDS)


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_of_the_generation_and_capability_that_its_maker_lists(name: str) -> None:
    """Its name alone says so too, among a job's other words, and whatever row or family it is matched by."""
    generation, capability, *_ = CARDS[name]
    gpu = GPUS[name]
    assert (gpu.generation, gpu.capability) == (generation, capability)
    assert gpu.arch == (generation if generation in GENERATIONS else None)
    for words in (name, gpu.description, f"dgx_{name.lower()}"):
        assert gpu_of_name(words) == (gpu.vendor, capability), words


@pytest.mark.parametrize("name", CARDS)
def test_a_capacity_is_a_little_below_the_figure_on_the_box(name: str) -> None:
    """The driver keeps 1 to 8 % (error correction on GDDR cards takes most); where vendors count 288 GB in powers of
    ten, torch's GiB are 7 % fewer again."""
    box = CARDS[name][2]
    assert f"{box}GB" in GPUS[name].description
    assert 0.9 < GPUS[name].capacity_bytes / 2**30 / box < 1


# ---- figures ----

#: A maker's document, a bus's standard, what torch reports; or why there is none.
SOURCE = re.compile(r"(NVIDIA|AMD) \S.*|PCIe \d, .*|half of a Grace's .*|torch's total_memory, .*|assumed: \S.{15,}")


def wrong_sources(gpu: Gpu) -> list[str]:
    """Figures of ``gpu`` with no source, with two, or with one that names no document; sources of nothing."""
    stated = Counter(figure for figures in gpu.sources for figure in figures.split())
    known = {"capacity", "multiprocessors", *Rates._fields}
    return [
        *(figure for figure in gpu.figures() if stated[figure] != 1 or not SOURCE.fullmatch(gpu.source_of(figure))),
        *(figure for figure in stated if figure not in known or figure not in gpu.figures()),
    ]


@pytest.mark.parametrize("name", CARDS)
def test_every_figure_has_one_source(name: str) -> None:
    assert wrong_sources(GPUS[name]) == []


@pytest.mark.parametrize("name", CARDS)
def test_rates_are_of_one_chip(name: str) -> None:
    """fp8 runs at twice the rate of bf16 and fp4 at two to three times that of fp8, but for rounding; fp32 without TF32
    far below; a chip reads operands for 30 to 450 operations a byte; neighbours are nearer than the network."""
    gpu = GPUS[name]
    r = gpu.rates
    assert r is not None and gpu.multiprocessors
    assert bool(r.fp8) == (not lacks(gpu, PrecisionSpec(fp8="hybrid")))
    assert not r.fp8 or 1.95 < r.fp8 / r.bf16 < 2.05
    assert not r.fp4 or 1.95 < r.fp4 / r.fp8 < 4.05
    assert 1.4 < r.bf16 / r.fp32 < 35
    assert 30 < r.bf16 * 1000 / r.memory < 450
    assert r.link > r.network or r.domain == 1
    assert r.host_link <= r.host_memory * 2


@pytest.mark.parametrize("name", CARDS)
def test_multiprocessors_hold_the_cores_of_the_data_sheet(name: str) -> None:
    """128 each in GPUs for graphics and since Hopper, 64 in others and in AMD's compute units."""
    generation, capability, _, cores = CARDS[name]
    each = 128 if generation in GENERATIONS and capability not in ((7, 0), (7, 5), (8, 0)) else 64
    assert GPUS[name].multiprocessors * each == cores


def test_one_card_stands_for_each_generation() -> None:
    typical = [gpu for gpu in GPUS.values() if gpu.typical]
    assert [gpu.generation for gpu in typical] == list(GENERATIONS) == list(MULTIPROCESSORS)


# ---- what is said of cards elsewhere ----


def numbers_in(node: ast.AST) -> bool:
    return any(
        isinstance(n, ast.Constant) and isinstance(n.value, int | float) and not isinstance(n.value, bool)
        for n in ast.walk(node)
    )


def named(node: ast.AST | None, names: frozenset[str]) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.casefold() in names


def figures_about_gpus(source: str) -> Iterator[int]:
    """Lines that give a card or a generation a number: in a dictionary, a row of a table or a call, or by a name such
    as ``multiprocessors``."""
    cards = frozenset(n.casefold() for gpu in GPUS.values() for n in (gpu.name, *gpu.aliases)) | {"v100", "a100"}
    names = cards | frozenset(GENERATIONS)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            yield from (v.lineno for k, v in zip(node.keys, node.values, strict=True)
                        if named(k, names) and numbers_in(v))  # fmt: skip
        elif isinstance(node, ast.Tuple | ast.List) and len(node.elts) > 1:
            if named(node.elts[0], names) and any(numbers_in(e) for e in node.elts[1:]):
                yield node.lineno
        elif isinstance(node, ast.Call):
            if node.args and named(node.args[0], cards) and any(numbers_in(e) for e in node.args[1:]):
                yield node.lineno
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.keyword):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            words = [getattr(node, "arg", None) or "", *(getattr(t, "id", getattr(t, "attr", "")) for t in targets)]
            if any("processor" in word.lower() for word in words) and node.value and numbers_in(node.value):
                yield node.lineno


@pytest.mark.slow
def test_no_figure_about_gpus_stands_outside_of_the_cards() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}" for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "cards"
        for line in figures_about_gpus(path.read_text())
    ]  # fmt: skip
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        'HOST = {"H100": (64e9, 77e9)}', 'RATES = {"hopper": 989.4}', 'row("L40S", 362, 864)', 'ROWS = [("T4", 65)]',
        "MULTIPROCESSORS = 132", "class D:\n    multi_processor_count = 132", 'MPS = {"v100": 80}',
    ],
)  # fmt: skip
def test_a_table_of_gpus_is_seen(source: str) -> None:
    assert list(figures_about_gpus(source))


# ---- names ----


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H100", "H100"),
        ("h100", "H100"),
        ("NVIDIA H100 80GB", "H100"),
        ("H100-SXM", "H100"),
        ("a100-80gb", "A100-80GB"),
        ("A100 40GB", "A100-40GB"),
        ("a100_80", "A100-80GB"),
        ("NVIDIA H200", "H200"),
        ("b200", "B200"),
        ("GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("mi300x", "MI300X"),
        ("RTX 4090", "RTX-4090"),
        # As torch and nvidia-smi name the card.
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
    ],
)
def test_a_gpu_is_found_by_the_names_people_type(typed: str, name: str) -> None:
    assert find_gpu(typed).name == name


def test_every_card_is_found_by_its_own_names_and_by_no_other_cards() -> None:
    assert all(find_gpu(name) is gpu for gpu in GPUS.values() for name in (gpu.name, *gpu.aliases))
    keys = Counter(name_key(name) for gpu in GPUS.values() for name in (gpu.name, *gpu.aliases))
    assert [key for key, times in keys.items() if times > 1] == []


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("A100", "A100-40GB or A100-80GB"), ("H300", "H100"), ("V100", "V100-16GB or V100-32GB"), ("", "lists them")],
)
def test_an_unknown_or_ambiguous_gpu_is_refused_with_near_ones(typed: str, hint: str) -> None:
    with pytest.raises(SpecError, match=re.escape(repr(typed))) as caught:
        find_gpu(typed)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


#: What Transformer Engine's check_fp8_support, check_fp8_block_scaling_support and check_mxfp8_support say of a card.
COMPUTES = {
    "V100-32GB": "", "A100-80GB": "", "RTX-3090": "", "MI250X": "",
    "L4": "delayed tensorwise", "L40S": "delayed tensorwise", "RTX-4090": "delayed tensorwise",
    "H100": "delayed tensorwise blockwise", "H200": "delayed tensorwise blockwise",
    "GH200-144GB": "delayed tensorwise blockwise", "RTX-PRO-6000": "delayed tensorwise blockwise",
    "RTX-5090": "delayed tensorwise blockwise", "MI300X": "delayed tensorwise blockwise",
    "B200": "delayed tensorwise blockwise mxfp8", "GB200": "delayed tensorwise blockwise mxfp8",
    "B300": "delayed tensorwise blockwise mxfp8", "MI355X": "delayed tensorwise blockwise mxfp8",
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTES)
def test_a_card_computes_in_the_formats_of_its_generation(name: str) -> None:
    assert not lacks(GPUS[name], PrecisionSpec())
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        precision = PrecisionSpec(fp8="hybrid", fp8_recipe=recipe)
        if recipe in COMPUTES[name].split():
            check_computes(GPUS[name], precision)
            continue
        with pytest.raises(SpecError, match=f"--gpu {name}, of compute capability") as refusal:
            check_computes(GPUS[name], precision)
        text = str(refusal.value)
        assert text.startswith("fp8 (hybrid)" if not COMPUTES[name] else f"fp8_recipe ({recipe})")
        assert "B200" in text and "\n" not in text


@pytest.mark.parametrize(
    ("name", "vendor", "generation"),
    [
        # torch.cuda.get_device_name()
        ("Tesla V100-SXM2-32GB", "NVIDIA", "volta"), ("Tesla T4", "NVIDIA", "turing"),
        ("Quadro RTX 6000", "NVIDIA", "turing"), ("NVIDIA A100-SXM4-80GB", "NVIDIA", "ampere"),
        ("NVIDIA A10G", "NVIDIA", "ampere"), ("NVIDIA RTX A6000", "NVIDIA", "ampere"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA", "ada"), ("NVIDIA L40S", "NVIDIA", "ada"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA", "ada"), ("NVIDIA H100 80GB HBM3", "NVIDIA", "hopper"),
        ("NVIDIA GH200 480GB", "NVIDIA", "hopper"), ("NVIDIA B200", "NVIDIA", "blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA", "blackwell"),
        ("AMD Instinct MI300X", "AMD", None), ("AMD Instinct MI250X / MI250", "AMD", None),
        # as people and job lists write them
        ("dgx_a100", "NVIDIA", "ampere"), ("dgxh100_coreweave", "NVIDIA", "hopper"), ("hopper", "NVIDIA", "hopper"),
    ],
)  # fmt: skip
def test_a_name_gives_vendor_and_generation(name: str, vendor: str, generation: str | None) -> None:
    known = gpu_of_name(name)
    assert known is not None
    assert (known.vendor, known.generation) == (vendor, generation)


def test_names_that_say_nothing_of_a_gpu_say_nothing() -> None:
    """A10 is no A100, L4 no L40, and neither Canada nor a Tesla P100 is of a generation that is known here."""
    for name in ("", "cpu", "canada", "Tesla P100-PCIE-16GB", "A1000", "p4d.24xlarge"):
        assert gpu_of_name(name) is None, name
    assert gpu_of_name("A10").capability == (8, 6) and gpu_of_name("A100").capability == (8, 0)


@pytest.mark.parametrize(
    ("capability", "generation"),
    [
        ((6, 1), None), ((7, 0), "volta"), ((7, 2), "volta"), ((7, 5), "turing"), ((8, 0), "ampere"),
        ((8, 6), "ampere"), ((8, 7), "ampere"), ((8, 9), "ada"), ((9, 0), "hopper"), ((10, 0), "blackwell"),
        ((12, 1), "blackwell"),
    ],
)  # fmt: skip
def test_a_compute_capability_has_a_generation(capability: tuple[int, int], generation: str | None) -> None:
    assert generation_of(capability) == generation


# ---- searches ----


def test_every_card_has_the_figures_of_a_search_by_its_own_name() -> None:
    """And no other name has: what a refusal offers, ``--gpu`` takes."""
    assert list(HARDWARE) == list(GPUS)
    with pytest.raises(SpecError, match=re.escape(", ".join(GPUS))):
        hardware_of("V100")


@pytest.mark.parametrize("engine", ["megatron_ddp", "fsdp2"])
@pytest.mark.parametrize("name", CARDS)
def test_a_search_takes_every_card(name: str, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of GPT-2 small on two GPUs, which all of them hold; the Megatron search and that of other engines."""
    fixed = ["--num-gpus", "2", "--micro-batch-size", "1", "--global-batch-size", "4", "--seq-length", "512"]
    if engine == "megatron_ddp":
        fixed += ["--tp", "1", "--pp", "1", "--cp", "1"]
    assert main(["search", "openai-community/gpt2", "--gpu", name, "--engine", engine, *fixed, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fit"] and all(row["step_seconds"] > 0 for row in found["best"])


def test_the_v100_is_searched_by_the_names_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Hardware was once called V100 and no card was: each of two refusals sent to the other."""
    argv = ["search", "openai-community/gpt2", "--num-gpus", "2", "--global-batch-size", "4", "--gpu"]
    assert main([*argv, "V100"]) == 2
    offered = re.findall(r"V100-\d+GB", capsys.readouterr().err)
    assert offered == ["V100-16GB", "V100-32GB"]
    for name in offered:
        assert find_gpu(name).name == hardware_of(name).name == name
