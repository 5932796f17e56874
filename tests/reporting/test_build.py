"""The report from files to files: what is shown, what becomes a note, and what is never overwritten."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from moetune.errors import MissingError, RunError, UsageError
from moetune.outcome import Compiled, Subject
from moetune.reporting import build, build_report, publish, tables
from moetune.store import Provenance, Recording, Store, save_recording
from tests.reporting import made_up

PAIR = (16, 4096)  # enough token counts where the pictures are not looked at
HOSTILE = "<script>alert(1)</script>\"' onload=x &--><!-- $\\frac \u202e\u6f22\x00"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """A user with no tables and no trials, and nothing shipped unless a test says so."""
    for name in ("XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name))
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    for module in ("moetune_kernels.paths", "moetune.reporting.tables"):
        monkeypatch.setattr(f"{module}.shipped_tables_dir", lambda: shipped)
    monkeypatch.setattr("moetune.reporting.trials.shipped_recording", lambda shape: None)
    return tmp_path


def provenance(**changes) -> Provenance:
    made = Provenance(
        backend="cuda",
        shape=made_up.DEFAULT_SHAPE,
        device=made_up.H200,
        kernels_sha256="new",
        triton="3.6.0",
        torch="2.11.0",
        driver="580",
    )
    return dataclasses.replace(made, **changes)


def store_of(path: Path, trials, **changes) -> Path:
    with Store(path) as store:
        run = store.begin(provenance(**changes), "made up")
        for trial in trials:
            run.record(trial)
    return path


class Reader(HTMLParser):
    """Collects what a browser would see: tags, attributes and text."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data


def test_one_table_with_trials_becomes_a_page_and_four_pictures(tmp_path):
    table = made_up.write(made_up.table(), tmp_path / "in" / "t.json")
    store = store_of(tmp_path / "trials.sqlite", made_up.trials())
    made = build_report([table], [store], tmp_path / "out")

    assert made.notes == ()
    kinds = [path.stem.rsplit("_", 1)[1] for path in made.images]
    assert kinds == ["roofline", "times", "bound", "heatmap"]
    for image in made.images:
        with Image.open(image) as picture:
            assert picture.format == "PNG"
            assert picture.size[0] == 1140  # 7.6 in at 150 dpi
            assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 50, "an empty picture has few colours"
    seen = Reader(made.page)
    page = made.page.read_text(encoding="utf-8")
    assert page.count("<figure>") == page.count('<div class="scroll" tabindex="0" role="img"') == 4
    assert len(page) < build.MAX_PAGE_BYTES
    entry = made_up.entry(made_up.DEFAULT_SHAPE, 64, counted=True)
    for shown in (
        "NVIDIA H200",
        "580.159.04",
        "132",
        "measured on the GPU named here (backend cuda)",
        "moetune sweep --hidden 4096 --inter 14336 --experts 64 --top-k 2",
        f"{entry['median_us']:,.0f}",
        f"{entry['baseline_us'] / entry['median_us']:.2f}×",
        f"{entry['bound_us'] / entry['median_us'] * 100:.0f} %",
        "relative L2 error 0.31, at most 0.006 is a match",
        f"trial store {store}",
    ):
        assert shown in seen.text, shown


def test_the_same_input_gives_the_same_bytes_under_the_same_names(tmp_path):
    table = made_up.write(made_up.table(tokens=PAIR), tmp_path / "t.json")
    first = build_report([table], [], tmp_path / "out")
    before = {path: path.read_bytes() for path in (*first.images, first.page)}
    second = build_report([table], [], tmp_path / "out")
    assert {path: path.read_bytes() for path in (*second.images, second.page)} == before
    assert sorted((tmp_path / "out").iterdir()) == sorted(before)


def test_hostile_texts_of_a_table_never_become_markup(tmp_path):
    device = dataclasses.replace(made_up.H200, name=HOSTILE + "x" * 100)
    hostile = made_up.table(device=device, tokens=PAIR, measured_at=HOSTILE)
    hostile |= {"command": HOSTILE, "driver": HOSTILE, "torch": HOSTILE, "triton": HOSTILE}
    hostile["kernels"] = {"version": HOSTILE, "source_sha256": HOSTILE}
    hostile["entries"]["16"]["issue_efficiency"] = {"value": None, "source": "unavailable", "reason": HOSTILE}
    hostile["entries"][HOSTILE] = {}
    table = made_up.write(hostile, tmp_path / "<img src=x>.json")
    made = build_report([table], [], tmp_path / "out")

    seen = Reader(made.page)
    assert not seen.tags & {"script", "img", "iframe", "object", "embed", "image", "foreignobject"}
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in seen.text
    for path in (made.page, *made.images):
        assert path.parent == tmp_path / "out"
        assert len(path.name) < 120
        assert path.name.isascii()


def test_the_page_asks_for_nothing_outside_itself(tmp_path):
    table = made_up.write(made_up.table(), tmp_path / "t.json")
    made = build_report([table], [store_of(tmp_path / "s.sqlite", made_up.trials())], tmp_path / "out")
    seen = Reader(made.page)
    linked = [value for name, value in seen.attributes if name in {"href", "src", "xlink:href", "data", "action"}]
    assert linked, "pictures refer to their letters by href"
    assert all(value.startswith("#") for value in linked)
    ids = [value for name, value in seen.attributes if name == "id"]
    assert len(ids) == len(set(ids)), "two pictures share an id"
    assert {value[1:] for value in linked} <= set(ids), "a link leads nowhere"
    page = made.page.read_text(encoding="utf-8")
    for reference in page.split("url(")[1:]:
        assert reference.startswith("#")
        assert reference[1 : reference.index(")")] in ids
    assert "http" not in page.replace("http-equiv", "")


def test_a_table_that_cannot_be_read_becomes_a_note_and_the_page_is_made(tmp_path):
    folder = tmp_path / "in"
    made_up.write(made_up.table(tokens=PAIR), folder / "good.json")
    (folder / "broken.json").write_text("{")
    (folder / "text.json").write_bytes(b"\xff\xfe\x00")
    (folder / "huge.json").write_bytes(b" " * (tables.MAX_TABLE_BYTES + 1))
    (folder / "gone.json").symlink_to(tmp_path / "nowhere")
    made = build_report([folder], [], tmp_path / "out")
    seen = Reader(made.page)
    for name in ("broken.json", "text.json", "huge.json", "gone.json"):
        assert sum(name in note for note in made.notes) == 1, name
        assert name in seen.text
    assert "good.json" not in " ".join(made.notes)


def test_faults_of_a_table_are_listed_and_its_other_entries_shown(tmp_path):
    value = made_up.table(tokens=(1, 16, 64))
    value["entries"]["16"]["median_us"] = -1
    made = build_report([made_up.write(value, tmp_path / "t.json")], [], tmp_path / "out")
    text = Reader(made.page).text
    assert "median_us must be a finite number" in text
    assert "Tuned for 2 token counts, 1 to 64." in text


def test_a_table_without_entries_still_has_its_card(tmp_path):
    value = made_up.table()
    value["entries"] = {}
    made = build_report([made_up.write(value, tmp_path / "t.json")], [], tmp_path / "out")
    assert made.images == ()
    assert "no entry that can be read" in Reader(made.page).text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("median_us", "bound_us", "baseline_us", "ceilings"),
    [
        pytest.param(9e17, 1e-17, 1e-3, {"bytes_per_s": 0, "flops": 9e17}, id="endless-times-and-no-memory-roof"),
        pytest.param(1e-3, 9e17, None, {"bytes_per_s": 1, "flops": 1}, id="no-time-at-all-under-an-endless-bound"),
        pytest.param(1.0, 0, 1.0, {"bytes_per_s": 9e17, "flops": 9e17}, id="no-bound"),
    ],
)
def test_absurd_numbers_are_drawn_without_a_warning(tmp_path, median_us, bound_us, baseline_us, ceilings):
    value = made_up.table(tokens=(1, 131_072)) | {"ceilings": ceilings}
    for entry in value["entries"].values():
        entry |= {"median_us": median_us, "bound_us": bound_us, "baseline_us": baseline_us}
    made = build_report([made_up.write(value, tmp_path / "t.json")], [], tmp_path / "out")
    assert [path.stem.rsplit("_", 1)[1] for path in made.images][:2] == ["roofline", "times"]


def test_the_users_tables_hide_the_shipped_ones(tmp_path, home):
    made_up.write(made_up.table(made_up.QWEN3_30B, tokens=PAIR), home / "shipped" / "s.json")
    shipped_only = build_report([], [], tmp_path / "a")
    assert made_up.QWEN3_30B.key in Reader(shipped_only.page).text

    made_up.write(
        made_up.table(tokens=PAIR), home / "home" / "XDG_DATA_HOME" / "moetune" / "tables" / "h200" / "t.json"
    )
    own = Reader(build_report([], [], tmp_path / "b").page).text
    assert made_up.DEFAULT_SHAPE.key in own
    assert made_up.QWEN3_30B.key not in own


def test_the_folder_of_the_environment_is_searched(tmp_path, monkeypatch):
    made_up.write(made_up.table(tokens=PAIR), tmp_path / "named" / "t.json")
    monkeypatch.setenv("MOETUNE_CONFIG_DIR", str(tmp_path / "named"))
    assert made_up.DEFAULT_SHAPE.key in Reader(build_report([], [], tmp_path / "out").page).text


def test_only_the_newest_table_of_a_device_and_shape_is_shown(tmp_path):
    folder = tmp_path / "in"
    made_up.write(made_up.table(tokens=PAIR, measured_at="2026-01-02T00:30:00+01:00"), folder / "a-older.json")
    made_up.write(made_up.table(tokens=PAIR, measured_at="2026-01-02T00:00:00+00:00"), folder / "b-newer.json")
    made_up.write(made_up.table(tokens=PAIR, measured_at="yesterday"), folder / "c-unreadable-time.json")
    made = build_report([folder], [], tmp_path / "out")
    assert f"{folder / 'b-newer.json'}" in Reader(made.page).text
    left_out = [note for note in made.notes if "left out" in note]
    assert sorted(Path(note.split(":")[0]).name for note in left_out) == ["a-older.json", "c-unreadable-time.json"]


def test_several_tables_get_an_index_that_leads_to_each(tmp_path):
    folder = tmp_path / "in"
    for name, shape in (("a", made_up.DEFAULT_SHAPE), ("b", made_up.QWEN3_30B)):
        made_up.write(made_up.table(shape, tokens=PAIR), folder / f"{name}.json")
    made_up.write(made_up.table(backend="replay", tokens=PAIR), folder / "c.json")
    made = build_report([folder], [], tmp_path / "out")
    page = made.page.read_text(encoding="utf-8")
    assert page.count("<section ") == 3
    assert page.count('<td class="text"><a href="#nvidia_h200_') == 3
    assert "nothing ran on a GPU for this table (backend replay)" in page
    assert len(set(made.images)) == 9


def test_a_folder_without_tables_is_told_of(tmp_path):
    named = made_up.write(made_up.table(), tmp_path / "a.json")
    (tmp_path / "empty").mkdir()
    made = build_report([named, tmp_path / "empty"], [], tmp_path / "out")
    assert any("empty: holds no tables" in note for note in made.notes)


def test_a_path_with_bytes_that_are_no_text_is_shown_and_not_stumbled_over(tmp_path):
    folder = tmp_path / "h\udcff"
    made_up.write(made_up.table(), folder / "a.json")
    made = build_report([folder], [], tmp_path / "out\udcff")
    assert "h\\udcff/a.json" in made.page.read_text(encoding="utf-8")


def test_nothing_to_show_says_how_to_get_a_table(tmp_path):
    with pytest.raises(MissingError, match="moetune sweep"):
        build_report([], [], tmp_path / "out")
    (tmp_path / "broken.json").write_text("[]")
    with pytest.raises(MissingError, match=r"broken\.json.*moetune sweep"):
        build_report([tmp_path / "broken.json"], [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_no_report_wrote_is_left_alone(tmp_path):
    table = made_up.write(made_up.table(tokens=PAIR), tmp_path / "t.json")
    theirs = tmp_path / "out" / build.PAGE_NAME
    theirs.parent.mkdir()
    theirs.write_text("<html>a thesis</html>")
    with pytest.raises(UsageError, match="not written by `moetune report`"):
        build_report([table], [], theirs.parent)
    assert theirs.read_text() == "<html>a thesis</html>"


def test_a_report_that_dies_while_writing_leaves_the_old_page_whole(tmp_path, monkeypatch):
    table = made_up.write(made_up.table(tokens=PAIR), tmp_path / "t.json")
    made = build_report([table], [], tmp_path / "out")
    before = made.page.read_bytes()

    def full_disk(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish.Path, "replace", full_disk)
    with pytest.raises(RunError, match="No space left"):
        build_report([table], [], tmp_path / "out")
    assert made.page.read_bytes() == before
    assert [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []


def test_a_page_without_room_names_the_pictures_instead(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PICTURE_BUDGET_BYTES", 1)
    table = made_up.write(made_up.table(tokens=PAIR), tmp_path / "t.json")
    made = build_report([table], [], tmp_path / "out")
    text = Reader(made.page).text
    assert all(image.is_file() and image.name in text for image in made.images)
    assert "no room for more pictures" in text


def test_a_page_that_would_be_too_large_leaves_out_its_oldest_tables(tmp_path, monkeypatch):
    folder = tmp_path / "in"
    made_up.write(made_up.table(tokens=PAIR, measured_at="2026-01-01"), folder / "new.json")
    made_up.write(made_up.table(made_up.QWEN3_30B, tokens=PAIR, measured_at="2025-01-01"), folder / "old.json")
    monkeypatch.setattr(build, "MAX_PAGE_BYTES", 150_000)
    made = build_report([folder], [], tmp_path / "out")
    assert "old.json" in " ".join(made.notes)
    text = Reader(made.page).text
    assert made_up.DEFAULT_SHAPE.key in text
    assert "its section is left out" in text


def test_trials_of_older_kernels_do_not_mix_with_the_newest(tmp_path):
    table = made_up.write(made_up.table(tokens=PAIR), tmp_path / "t.json")
    store = store_of(tmp_path / "s.sqlite", made_up.trials(tokens=(1,)), kernels_sha256="old")
    store_of(store, made_up.trials(tokens=(64,)))
    page = build_report([table], [store], tmp_path / "out").page.read_text(encoding="utf-8")
    assert '<td class="text">gate-up</td><td>64</td>' in page
    assert '<td class="text">gate-up</td><td>1</td>' not in page


def test_registers_of_a_plan_come_from_its_trial_whatever_its_memory_ceiling(tmp_path):
    config = dataclasses.replace(made_up.plan(16).down, smem_size=None)
    trial = dataclasses.replace(next(made_up.trials()), choice=config, subject=Subject.DOWN)
    compiled = Compiled(registers=167, spills=3, smem_bytes=99_328, block_size=384)
    store = store_of(tmp_path / "s.sqlite", [dataclasses.replace(trial, compiled=compiled)])
    table = made_up.write(made_up.table(tokens=(16,)), tmp_path / "t.json")
    page = build_report([table], [store], tmp_path / "out").page.read_text(encoding="utf-8")
    assert "<td>384</td><td>3</td><td>167 (cap 168)</td><td>3</td><td>97.0</td>" in page
    assert "<td>not known</td>" in page, "the gate-up kernel has no trial"


def test_trials_of_another_routing_are_not_shown(tmp_path):
    table = made_up.write(made_up.table(tokens=PAIR) | {"routing": "zipf:1.1"}, tmp_path / "t.json")
    store = store_of(tmp_path / "s.sqlite", made_up.trials(tokens=(1,)))
    assert not [path for path in build_report([table], [store], tmp_path / "one").images if "heatmap" in path.name]
    store_of(store, made_up.trials(tokens=(64,)), routing="zipf:1.1")
    page = build_report([table], [store], tmp_path / "two").page.read_text(encoding="utf-8")
    assert f"trial store {store}" in page
    assert '<td class="text">gate-up</td><td>64</td>' in page
    assert '<td class="text">gate-up</td><td>1</td>' not in page
    assert "zipf:1.1" in page


def test_trials_of_another_device_are_not_shown(tmp_path):
    table = made_up.write(made_up.table(tokens=PAIR), tmp_path / "t.json")
    other = dataclasses.replace(made_up.H200, name="NVIDIA H100 80GB HBM3")
    store = store_of(tmp_path / "s.sqlite", made_up.trials(tokens=(1,)), device=other)
    made = build_report([table], [store], tmp_path / "out")
    assert not [path for path in made.images if "heatmap" in path.name]


def test_a_recording_stands_in_where_the_store_has_no_trials(tmp_path, monkeypatch):
    table = made_up.write(made_up.table(tokens=PAIR), tmp_path / "t.json")
    recording = Recording(
        provenance=provenance(),
        ceilings={"bytes_per_s": 1e12, "flops": 1e14},
        bounds={64: 1.0},
        measured_at="2026-01-01",
        command="made up",
        trials=tuple(made_up.trials(tokens=(64,))),
    )
    path = save_recording(recording, tmp_path / "r.jsonl.xz")
    monkeypatch.setattr("moetune.reporting.trials.shipped_recording", lambda shape: path)
    made = build_report([table], [], tmp_path / "out")
    assert [image for image in made.images if "heatmap" in image.name]
    assert "From the recording r.jsonl.xz, measured 2026-01-01" in Reader(made.page).text


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0 and then nothing"], ids=["text", "torn"])
def test_a_store_that_cannot_be_read_becomes_one_note(tmp_path, content):
    folder = tmp_path / "in"
    for shape in (made_up.DEFAULT_SHAPE, made_up.QWEN3_30B):
        made_up.write(made_up.table(shape, tokens=PAIR), folder / f"{shape.key}.json")
    store = tmp_path / "s.sqlite"
    store.write_bytes(content)
    made = build_report([folder], [store, tmp_path / "missing.sqlite"], tmp_path / "out")
    assert sum("s.sqlite" in note for note in made.notes) == 1
    assert sum("missing.sqlite" in note for note in made.notes) == 1
    assert store.read_bytes() == content
    assert not (tmp_path / "missing.sqlite").exists()


def test_importing_the_package_is_free_and_a_report_needs_no_torch(tmp_path):
    table = made_up.write(made_up.table(tokens=PAIR), tmp_path / "t.json")
    code = (
        "import sys, pathlib, moetune.reporting\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"moetune.reporting.build_report([pathlib.Path({str(table)!r})], [], pathlib.Path({str(tmp_path / 'out')!r}))\n"
        "print(*({'torch', 'triton', 'pandas', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_layer_is_also_called_by_the_models_that_have_it(tmp_path):
    made_up.write(made_up.table(made_up.QWEN3_30B), tmp_path / "a.json")
    made_up.write(made_up.table(), tmp_path / "b.json")
    page = build_report([tmp_path], [tmp_path / "none"], tmp_path / "out").page.read_text("utf-8")
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert "NVIDIA H200 · e128_h2048_i768_k8_bf16 (qwen3-30b-a3b)" in titles
    assert "NVIDIA H200 · e64_h4096_i14336_k2_bf16" in titles
    assert "e128_h2048_i768_k8_bf16</a> <small>qwen3-30b-a3b</small>" in page


def test_what_a_report_leaves_in_a_checkout_is_no_change_to_it(tmp_path):
    rules = (Path(__file__).parents[2] / ".gitignore").read_text("utf-8").splitlines()
    made_up.write(made_up.table(), tmp_path / "a.json")
    made = build_report([tmp_path], [tmp_path / "none"], tmp_path / "reports")
    left = [path.relative_to(tmp_path).as_posix() for path in (made.page, *made.images)]
    assert [name for name in left if not any(fnmatch.fnmatchcase(name, rule) for rule in rules)] == []
