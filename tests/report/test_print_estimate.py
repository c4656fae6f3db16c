"""The printed report: every total is the sum of what stands beside it, in any unit, in 80 columns, piped or not."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal

import pytest
from report_runs import NAMES, result

from bridge_memory.estimation import estimate
from bridge_memory.report.details import stage_details
from bridge_memory.report.table import print_estimate
from bridge_memory.report.units import DECIMALS, UNITS
from bridge_memory.spec import DataParallelSpec, ParallelSpec, RunSpec, SpecError
from bridge_memory.verdict import fits

PARTS = ("weights", "gradients", "optimizer", "buffers", "activations", "temporaries")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")


def printed(name: str, stream: io.StringIO | None = None, **options: object) -> str:
    out = stream or io.StringIO()
    print_estimate(result(name), fits(result(name)), stream=out, **options)  # type: ignore[arg-type]
    return out.getvalue()


def tables(text: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(title, rows) of every table; a cell that wraps over lines is put together again."""
    for block in text.split("\n\n"):
        lines = block.splitlines()
        rule = next((i for i, line in enumerate(lines) if re.fullmatch(r"-+( +-+)*", line)), None)
        if rule is None:
            continue
        spans = [m.span() for m in re.finditer("-+", lines[rule])]
        heads = [lines[rule - 1][a:b].strip() for a, b in spans]
        rows: list[dict[str, str]] = []
        for line in lines[rule + 1 :]:
            cells = [line[a:b].strip() for a, b in spans]
            if line.startswith("* ") or any(line[b : b + 1].strip() for _, b in spans):
                break  # a note: words run over the gaps
            if cells[0] or not rows:
                rows.append(dict(zip(heads, cells, strict=True)))
            else:
                for head, cell in zip(heads, cells, strict=True):
                    rows[-1][head] = f"{rows[-1][head]} {cell}".strip()
        yield " ".join(lines[: rule - 1]), rows


def by_stage(text: str, title: str) -> dict[str, dict[str, str]]:
    """The rows of a table, put together again where it was split, by stage."""
    stages: dict[str, dict[str, str]] = {}
    inside = False
    for head, rows in tables(text):
        inside = head.startswith(title) or (inside and not head)
        if inside:
            for row in rows:
                stages.setdefault(row["stage"].removesuffix(" *"), {}).update(row)
    return stages


def number(cell: str) -> Decimal:
    return Decimal(cell.replace(",", ""))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_the_sum_of_the_numbers_left_of_it(name: str, unit: str) -> None:
    stages = by_stage(printed(name, unit=unit), "Memory of one rank")
    shown = [s for span in stages for s in expand(span)]
    assert shown == [s.stage for s in result(name).stages]
    for span, row in stages.items():
        stage = result(name).stages[expand(span)[0]]
        peak = number(row["= peak"])
        assert sum(number(row[part]) for part in PARTS) == peak
        assert abs(peak - Decimal(stage.peak_bytes) / UNITS[unit]) <= Decimal(10) ** -DECIMALS[unit] / 2
        for part, nbytes in zip(PARTS, parts_of(stage), strict=True):
            assert abs(number(row[part]) - Decimal(nbytes) / UNITS[unit]) < Decimal(10) ** -DECIMALS[unit]


def expand(span: str) -> list[int]:
    first, _, last = span.partition("-")
    return list(range(int(first), int(last or first) + 1))


def parts_of(stage: object) -> list[int]:
    names = ("weights", "gradients", "optimizer", "buffers", "activation", "transient")
    return [getattr(stage, f"{name}_bytes") for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_static_is_what_lasts_of_the_peak_and_what_a_step_leaves(name: str) -> None:
    text = printed(name)
    for span, row in by_stage(text, "Pipeline stages").items():
        stage = result(name).stages[expand(span)[0]]
        persistent = sum(number(by_stage(text, "Memory of one rank")[span][part]) for part in PARTS[:4])
        said = re.findall(r"([\d.]+) GiB on stages? ([\d\-, ]+)", " ".join(text.split()))
        amounts = [Decimal(amount) for amount, spans in said if covers(spans, stage.stage)]
        left = Decimal(sum(c.bytes for c in stage.carried_over)) / UNITS["GiB"]
        assert len(amounts) == (left >= Decimal("0.005"))  # less than half of the last digit is not said
        amount = sum(amounts)
        assert number(row["static"]) == persistent + amount
        assert abs(number(row["static"]) - Decimal(stage.static_bytes) / UNITS["GiB"]) <= Decimal("0.01")


def covers(spans: str, stage: int) -> bool:
    return any(stage in expand(span) for span in spans.replace(",", " ").split())


@pytest.mark.parametrize("unit", ("GiB", "MB", "bytes"))
@pytest.mark.parametrize("name", NAMES)
def test_the_components_of_the_peak_stage_add_up_to_its_peak(name: str, unit: str) -> None:
    title, rows = next((t, rows) for t, rows in tables(printed(name, unit=unit)) if t.startswith("Why"))
    *parts, total = (number(row[unit]) for row in rows)
    assert sum(parts) == total
    assert f"{total:,}" in title
    assert sum(Decimal(row["%"]) for row in rows[:-1]) == pytest.approx(100, abs=0.6)


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_components_come_first_and_say_how_they_are_known(name: str) -> None:
    by_name = {c.name: c for c in result(name).peak_stage.components}
    rows = next(rows for title, rows in tables(printed(name)) if title.startswith("Why"))
    listed = [by_name[row["component"].partition(" (over ")[0]] for row in rows if row["basis"]]
    assert len(listed) >= 10
    assert [c.bytes for c in listed] == sorted((c.bytes for c in by_name.values()), reverse=True)[: len(listed)]
    assert [c.provenance for c in listed] == [row["basis"] for row in rows if row["basis"]]


@pytest.mark.parametrize("width", (60, 80, 100, 200))
@pytest.mark.parametrize("unit", ("GiB", "bytes"))
@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_wider_than_the_terminal(
    name: str, unit: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    details = {s.stage: stage_details(result(name), s.stage) for s in result(name).stages[:1]}
    assert max(map(len, printed(name, unit=unit, details=details).splitlines())) <= width


@pytest.mark.parametrize("unit", ("GiB", "bytes"))
@pytest.mark.parametrize("name", NAMES)
def test_a_terminal_shows_the_words_of_the_pipe(name: str, unit: str) -> None:
    """Through rich: the same lines but for colour and rules, so nothing is cut, folded or read as markup."""
    details = {0: stage_details(result(name), 0)}
    coloured = printed(name, Terminal(), unit=unit, details=details)
    assert "\x1b[" in coloured
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in coloured.splitlines()]
    assert max(map(len, lines)) <= 80
    plain = printed(name, unit=unit, details=details).splitlines()
    assert [line for line in lines if line.strip("\u2500 ")] == [line for line in plain if line.strip("- ")]


def test_alike_stages_share_a_row_and_no_others() -> None:
    """One microbatch in flight everywhere: the 14 inner stages of 8 layers are alike, the ends are not."""
    stages = by_stage(printed("one microbatch"), "Memory of one rank")
    assert list(stages) == ["0", "1-14", "15"]
    assert by_stage(printed("one microbatch"), "Pipeline stages")["1-14"]["layers"] == "8: 7-118"
    # 1F1B holds one microbatch less on every further stage: nothing to merge.
    assert len(by_stage(printed("sixteen stages"), "Memory of one rank")) == 16


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_listed_once(name: str) -> None:
    cells = [row["layers"] for row in by_stage(printed(name), "Pipeline stages").values()]
    listed = [i for cell in cells for span in cell.partition(": ")[2].split(", ") for i in expand(span)]
    assert sorted(listed) == list(range(result(name).run.model.num_layers))


def test_the_peak_stage_is_marked() -> None:
    worst = result("uneven").peak_stage.stage
    text = printed("uneven")
    assert re.search(rf"^{worst} \*", text, re.M)
    assert f"* the highest peak: stage {worst}" in text
    assert "*" not in printed("one GPU")


def test_one_stage_alone_is_explained_and_compared_with_the_highest() -> None:
    text = printed("uneven", stage=0)
    assert list(by_stage(text, "Memory of one rank")) == ["0"]
    assert "Why stage 0 peaks" in text
    assert f"stage {result('uneven').peak_stage.stage} has the highest" in " ".join(text.split())


def test_headroom_is_what_peak_and_margin_leave_of_the_usable() -> None:
    rows = next(rows for title, rows in tables(printed("uneven")) if title.startswith("GPUs"))
    for row, fit in zip(rows, fits(result("uneven")), strict=True):
        assert number(row["usable"]) - number(row["- peak"]) - number(row["- margin"]) == number(row["= free"])
        assert (row["fits"] == "yes") is fit.fits


def test_what_is_assumed_and_not_modelled_is_listed() -> None:
    feature = "option_x changes memory and is not modelled"
    estimate = replace(result("hybrid"), not_modelled=(feature, feature))
    out = io.StringIO()
    print_estimate(estimate, (), stream=out)
    text = " ".join(out.getvalue().split())
    assert text.partition("Not modelled")[2].count(feature) == 1
    assert all(" ".join(sentence.split()) in text for sentence in estimate.assumptions)
    assert "GPUs, by the highest peak" not in text


def test_every_tensor_is_shown_with_its_exact_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = stage_details(result("uneven"), 3)
    monkeypatch.setenv("COLUMNS", "200")
    text = printed("uneven", stage=3, details={3: rows})
    for row in rows:
        assert re.search(rf"\s{row.count:,}\s+{row.bytes:,}\s+{re.escape(row.name.split()[0])}", text), row
    for title, listed in tables(text):
        if title.startswith("Stage 3, "):
            assert sum(number(r["MiB"]) for r in listed[:-1]) == number(listed[-1]["MiB"])


def test_a_name_cannot_write_to_the_terminal() -> None:
    """A model's name comes from a file or a folder: escape sequences and line breaks in it stay text."""
    base = result("one GPU")
    model = replace(base.run.model, name="evil\x1b[2J\nname [red]")
    out = io.StringIO()
    print_estimate(replace(base, run=base.run.with_(model=model)), (), stream=out)
    assert out.getvalue().startswith(r"Estimate of evil\x1b[2J\nname [red]: peak ")
    out = Terminal()
    print_estimate(replace(base, run=base.run.with_(model=model)), (), stream=out)
    assert r"evil\x1b[2J\nname [red]" in out.getvalue()


def test_a_stage_or_a_unit_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SpecError, match=r"stage is 4.*0 to 3"):
        printed("uneven", stage=4)
    with pytest.raises(SpecError, match=r"unit \('TiB'\).*GiB, MiB, GB, MB, bytes"):
        printed("uneven", unit="TiB")


def test_without_a_terminal_nothing_is_coloured() -> None:
    assert "\x1b" not in printed("uneven")


def test_a_pipe_gets_eighty_columns_whatever_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command writes the same file from a narrow and from a wide window."""
    expected = printed("uneven")
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((200, 50)))
    assert printed("uneven") == expected
    assert max(map(len, printed("uneven", Terminal()).splitlines())) > 80
    for nonsense in ("", "0", "-5", "wide"):
        monkeypatch.setenv("COLUMNS", nonsense)
        assert printed("uneven") == expected


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit != "GiB"])
def test_one_unit_throughout(unit: str) -> None:
    """The margin's sentence too, which states what lies outside of torch."""
    stream = io.StringIO()
    print_estimate(result("four stages"), fits(result("four stages")), unit=unit.lower(), stream=stream)
    text = " ".join(stream.getvalue().split())
    margin = rf"margin, outside of torch, the most: .*: A100-40GB [\d,.]+ {unit} to [\d,.]+ {unit}; H100 "
    assert "GiB" not in text and re.search(margin, text)
    assert re.search(rf"90% band: [\d,.]+ to [\d,.]+ {unit},", text)


def test_a_shard_is_over_groups_of_several_ranks() -> None:
    """Eight data-parallel ranks of TP 1 divide optimizer states alone; Megatron-FSDP divides weights too."""
    shards: dict[str, dict[str, str]] = {}
    for engine, more in (
        ("megatron_ddp", {}), ("megatron_fsdp", {"data_parallel_sharding_strategy": "optim_grads_params"}),
    ):  # fmt: skip
        run = RunSpec(
            model="Qwen/Qwen3-8B", parallel=ParallelSpec(world_size=8),
            data_parallel=DataParallelSpec(engine=engine, **more),
        )
        stream = io.StringIO()
        print_estimate(estimate(run), (), stream=stream)
        lines = (line.partition(" (over ") for line in stream.getvalue().splitlines())
        shards[engine] = {name.split("  ")[-1].strip(): groups.rstrip(")") for name, _, groups in lines}
    assert [shards["megatron_ddp"][name] for name in ("weights", "gradients", "exp_avg")] == ["", "", "dp"]
    assert [shards["megatron_fsdp"][name] for name in ("weights", "gradients", "exp_avg")] == ["dp", "dp", "dp"]


def test_virtual_stages_of_a_layout_are_said_and_counted() -> None:
    """Interleaved 1F1B (``schedules.py: get_pp_rank_microbatches``): rank r of p = 4 with v = 2 runs 2 (p - r - 1) +
    (v - 1) p forward passes before its first backward, and holds one more at its peak."""
    run = RunSpec(
        model="Qwen/Qwen3-8B",
        parallel=ParallelSpec(
            world_size=8, pipeline_model_parallel_size=4, pipeline_model_parallel_layout="Et*4|(t*5|)*6,t*2L"
        ),
    )
    named = run.with_fields(virtual_pipeline_model_parallel_size=2)
    assert run.num_microbatches == named.num_microbatches == 8
    answer = estimate(run)
    assert [sum(stage.in_flight) for stage in answer.stages] == [2 * (3 - r) + 4 + 1 for r in range(4)]
    texts = []
    for one in (answer, estimate(named)):
        stream = io.StringIO()
        print_estimate(one, (), stream=stream)
        texts.append(stream.getvalue())
    assert texts[0] == texts[1] and "2 virtual stages" in texts[0]
    assert [row["in flight"] for row in by_stage(texts[0], "Pipeline stages").values()] == ["11", "9", "7", "5"]
    assert "summed over virtual stages" in " ".join(texts[0].split())
