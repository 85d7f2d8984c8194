"""The page of a report: what is on it, that it is small, and that nothing in it comes from elsewhere."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from tests.rules.pages import MESH, large_report

#: Elements that have no end.
VOID = {"meta", "input", "wbr"}


class Reader(HTMLParser):
    """Checks that elements end in the order in which they began, and takes the page apart."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.rows: list[list[str]] = []
        self.kinds: list[str] = []
        self.data = ""
        self.texts: list[str] = []
        self.labels: set[str] = set()
        self.ids: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.count[tag] = self.count.get(tag, 0) + 1
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if given.get("for"):
            self.labels.add(str(given["for"]))
        assert not {"src", "srcset", "action"} & set(given)  # Nothing is fetched, nothing sent.
        assert (given.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in given)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.kinds.append(given.get("class") or "")
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] == "script" and data.startswith("{"):
            self.data += data
        elif {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def page() -> str:
    return large_report().to_html("A model")


@pytest.fixture(scope="module")
def reader(page: str) -> Reader:
    return Reader(page)


def test_a_thousand_tensors_are_small(page: str) -> None:
    assert len(large_report().tensors) == 1004
    assert len(page.encode()) < 2**20


def test_nothing_comes_from_elsewhere(page: str, reader: Reader) -> None:
    assert "default-src 'none'" in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert not {"link", "img", "iframe", "object", "base"} & set(reader.count)
    assert len(reader.ids) == len(set(reader.ids))
    assert {"search", "kind"} <= reader.labels
    assert '<html lang="en">' in page


def test_tensors_are_folded(reader: Reader) -> None:
    groups = [row for row, kind in zip(reader.rows, reader.kinds, strict=True) if kind == "g"]
    assert len(groups) == 9 + 5
    assert reader.kinds.count("m") == 999
    by_name = {row[0]: row[1:] for row in groups}
    # 57,344 rows in 8: 7,168 each. 111 tensors of 57344 * 8192 * 2 bytes = 896 MiB.
    assert by_name["+model.layers.{0..110}.mlp.gate_up.weight × 111"][:2] == ["57344 × 8192", "bfloat16"]
    assert by_name["+model.layers.{0..110}.mlp.gate_up.weight × 111"][3:] == [
        "7168 × 8192",
        "97.1 GiB",
        "12.1 GiB",
        "gate_up",
    ]
    assert by_name["extra.bias"][3:] == ["5", "20 B", "20 B", "no rule"]
    assert by_name["odd.kernel"][3:6] == ["none", "240 B", "?"]
    assert "do not divide" in by_name["odd.kernel"][6]
    assert "matches 2 rules" in by_name["odd.norm"][6]


def test_problems_are_listed(reader: Reader) -> None:
    words = "".join(reader.texts)
    for text in (
        "Replicated on every device: 334",  # three of each layer, and extra.bias
        "No rule matches: 112",
        "Several rules match: 1",
        "Rules that apply to no name: 1",
        "Does not divide: 1",
    ):
        assert text in words
    assert ["odd.kernel", "0", "6", "8", "odd\\.", "not placed"] in reader.rows


def test_who_holds_what_is_what_the_partition_says(reader: Reader) -> None:
    data = json.loads(reader.data)
    report = large_report()
    by_text = {}
    for cut in data["cuts"]:
        assert cut["about"] not in by_text
        by_text[cut["about"]] = cut
    tensor = next(t for t in report.tensors if t.name == "model.layers.3.self_attn.q_proj.weight")
    assert tensor.layout is not None
    partition = tensor.layout.partition(tensor.shape)
    cut = by_text["8192 × 8192, ('tp', None)"]
    assert cut["ranges"] == [[f"{1024 * i}:{1024 * (i + 1)}" for i in range(8)], ["0:8192"]]
    assert data["held"][cut["held"]] == [f"cpu:{i},{i + 8} (2 replicas)" for i in range(8)]
    assert partition.devices_holding(3) == ["cpu:3", "cpu:11"]
    packed = next(cut for about, cut in by_text.items() if "gate" in about)
    # Of gate and up, 28,672 rows each, device 1 has rows 3,584 to 7,168.
    assert [piece[1] for piece in packed["pieces"] if piece[3].startswith("cpu:1,")] == ["3584:7168", "32256:35840"]


names = st.text(max_size=20) | st.sampled_from(
    ["</script>", "<!--", "]]>", "\0", "\ud800", "a" * 10**5, "h.0.w", "h.1.w"]
)


@pytest.mark.heavy
@settings(max_examples=40, deadline=None)
@given(st.dictionaries(names, st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6), names, st.booleans())
def test_any_names_are_text(tensors: dict[str, tuple[int, ...]], title: str, by_kind: bool) -> None:
    rules = sw.LayoutMap(MESH)
    rules["h"] = ("dp",)
    rules["w"] = (None, "tp")
    given_tensors = {name: (shape, "int8") if by_kind else shape for name, shape in tensors.items()}
    page = rules.report(given_tensors, uneven="ceil").to_html(title)
    reader = Reader(page)
    assert reader.kinds.count("g") + reader.kinds.count("m") >= len(tensors)
    assert reader.count["script"] == 2
    json.loads(reader.data)
    page.encode()
    assert len(page) < 100_000


def small_report(**more: object) -> sw.rules.LayoutReport:
    """w has 128 bytes, and a device 32 of them; b 8, a device 2; every device has the 3 of x."""
    rules = sw.LayoutMap(sw.DeviceMesh((2, 4), ("dp", "tp")))
    rules["w"], rules["b"] = (None, "tp"), ("tp",)
    return rules.report({"w": ((4, 8), "float32"), "b": ((8,), "int8"), "x": ((3,), "int8"), **more})


def test_the_figures_of_a_page() -> None:
    """On each of 8 devices are 32 + 2 + 3 bytes."""
    assert figures_of(small_report()) == ["3", "139 B", "37 B", "296 B", "2.16%", "1", "0"]
    assert figures_of(small_report(**{"w.2": (8, 8)})) == ["4", "?", "?", "?", "?", "1", "0"]
    assert figures_of(small_report(**{"b.2": ((6,), "int8")})) == ["4", "145 B", "37 B", "296 B", "2.16%", "1", "1"]


def test_nothing_is_said_twice_and_checks_that_found_nothing_are_one_line() -> None:
    page = small_report().to_html()
    # But for the picture, which has a description for those who cannot see it.
    texts = "".join(Reader(re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)).texts)
    assert texts.count("139 B") == texts.count("296 B") == 1
    assert re.findall(r"<summary>(.*?)</summary>", page) == [
        "Replicated on every device: 1",
        "No rule matches: 1",
        "5 checks found nothing",
    ]
    assert "<li>Does not divide</li></ul></details>" in page


def test_64_shards_are_drawn_and_listed_one_by_one() -> None:
    rules = sw.LayoutMap(sw.DeviceMesh((64,), ("tp",)))
    rules["w"] = (None, "tp")
    data = json.loads(Reader(rules.report({"w": ((2, 128), "int8")}).to_html()).data)
    assert data["cuts"][0]["ranges"][1] == [f"{2 * i}:{2 * i + 2}" for i in range(64)]
    assert data["held"][0] == [f"cpu:{i}" for i in range(64)]


def figures_of(report: sw.rules.LayoutReport) -> list[str]:
    page = report.to_html()
    assert re.search(r'aria-label="bars"><svg [^>]*role="img"', page)
    (figures,) = re.findall(r'<ul class="figures">.*?</ul>', page)
    return re.findall(r"<b>(.*?)</b>", figures)


def test_the_rows_of_a_page_sort_by_numbers_and_lead_to_who_holds_what() -> None:
    more = {"x.0": ((2,), "int16"), "x.1": ((2,), "int16"), "b.2": ((6,), "int8"), "w.2": (4, 4)}
    page = small_report(**more).to_html()
    rows = re.findall(r'<tr class="g".*?</tr>', page)
    values = {row[0]: row[1:] for row in (re.findall(r'data-v="(.*?)"', row) for row in rows)}
    cells = {row[0]: row[3:7] for row in Reader(page).rows[-9:] if len(row) == 8}
    # In the order of the rows: elements, dtype, layout, elements of a shard, bytes, bytes of a device, rule.
    assert list(values.values()) == [
        ["8", "int8", "('tp',)", "2", "8", "2", "b"],
        ["6", "int8", "('tp',)", "-1", "6", "-1", "b"],
        ["32", "float32", "(None, 'tp')", "8", "128", "32", "w"],
        ["16", "", "(None, 'tp')", "4", "-1", "-1", "w"],
        ["3", "int8", "(None,)", "3", "3", "3", ""],
        ["2", "int16", "(None,)", "2", "8", "8", ""],
    ]
    assert list(values) == list("012345")
    assert cells["b.2"][1:] == ["none", "6 B", "?"]
    assert cells["w.2"][1:] == ["4 × 1", "?", "?"]
    assert [row[1] for row in Reader(page).rows if row[0] in ("x.0", "x.1")] == ["as above; 4 B, 4 B per device"] * 2
    assert re.findall(r'data-many="?(\d+)', page) == ["2"]
    assert page.count("aria-expanded=") == 1
    cuts = json.loads(Reader(page).data)["cuts"]
    places = [re.findall(r' data-c="(\d+)"', row) for row in rows]
    assert [[cuts[int(place)]["about"] for place in found] for found in places] == [
        ["8, ('tp',)"],
        [],
        ["4 × 8, (None, 'tp')"],
        ["4 × 4, (None, 'tp')"],
        ["3, (None,)"],
        ["2, (None,)"],
    ]


def test_two_dims_lie_in_the_plane_of_a_cut_and_a_packed_one_has_rows_only() -> None:
    rules = sw.LayoutMap(sw.DeviceMesh((2, 4), ("dp", "tp")))
    rules["w"], rules["p"] = (None, "tp"), (sw.packed.gate_up("tp"), None)
    shapes = {"w": (4, 8), "x": (3,), "scalar": (), "box": (2, 3, 4), "p": (16, 5)}
    data = json.loads(Reader(rules.report({name: (shape, "int8") for name, shape in shapes.items()}).to_html()).data)
    planes = {cut["about"].split(",")[0]: cut["plane"] for cut in data["cuts"]}
    assert planes["4 × 8"] == [0, 1]
    assert planes["3"] == planes["16 × 5"] == [None, 0]
    assert planes["scalar"] == [None, None]
    assert len(planes["2 × 3 × 4"]) == 2
    (packed,) = (cut for cut in data["cuts"] if "pieces" in cut)
    # Gate is rows 0 to 8 and up 8 to 16; each of four devices has two of either.
    assert packed["shape"] == ["16"]
    assert {piece[1] for piece in packed["pieces"]} == {f"{at}:{at + 2}" for at in range(0, 16, 2)}


def test_long_lists_are_cut_and_counted() -> None:
    names = ["".join(letters) for letters in itertools.product("abcdefghijklmno", repeat=2)]
    for count, more in ((200, []), (201, ["1"]), (225, ["25"])):
        report = sw.LayoutMap(MESH).report(dict.fromkeys(names[:count], ((2,), "int8")))
        # Of what is replicated, and of what no rule matches.
        assert re.findall(r"<p>and (\d+) more</p>", report.to_html()) == more * 2
        assert re.findall(r"<p>and (\d+) more</p>", report._repr_html_()) == more
        page = Reader(report.to_html())
        # Seven figures, and five checks that found nothing.
        assert page.count["li"] == 7 + 5 + 2 * min(count, 200)
        assert "None" not in page.texts
    rules = sw.LayoutMap(MESH, default=("tp",))
    page = Reader(rules.report({"a": ((8,), "int8")}).to_html())
    assert [row[-1] for row in page.rows if row[0] == "a"] == ["the default"]


def test_a_large_mesh_and_large_tensors() -> None:
    rules = sw.LayoutMap(sw.DeviceMesh((2**40,), ("x",)))
    rules["w"] = ("x", None)
    data = json.loads(Reader(rules.report({"w": ((2**40, 2**20), "int8")}).to_html()).data)
    assert data["cuts"][0]["ranges"][0][-1].endswith(f":{2**40}")
    assert len(data["cuts"][0]["ranges"][0]) <= 64


def test_many_shapes_stay_small() -> None:
    """Every tensor with a shape of its own."""
    rules = sw.LayoutMap(MESH)
    rules["w"] = ("tp", "dp")
    report = rules.report({f"w{i}": ((8 * i + 8, 2 * i + 2), "float32") for i in range(1000)})
    assert len(report.to_html().encode()) < 2**20


def test_a_report_without_a_mesh_or_tensors() -> None:
    rules = sw.LayoutMap()
    rules["w"] = ("x",)
    assert "No mesh." in rules.report({"w": (4,)}).to_html()
    assert Reader(sw.LayoutMap(MESH).report({}).to_html()).kinds.count("g") == 0


def test_a_notebook_shows_the_tensors_folded() -> None:
    shown = Reader(large_report()._repr_html_())
    assert [row[0] for row in shown.rows if "gate_up" in row[0]] == ["model.layers.{0..110}.mlp.gate_up.weight × 111"]
    assert shown.count["li"] == len(large_report().warnings)
    assert "script" not in shown.count
    small = small_report(**{"x.0": ((2,), "int16"), "x.1": ((2,), "int16"), "b.2": ((6,), "int8")})
    assert Reader(small._repr_html_()).rows[-6:] == [
        ["tensor", "shape", "layout", "bytes per device", "rule"],
        ["b", "8", "('tp',)", "2 B", "b"],
        ["b.2", "6", "('tp',)", "?", "b"],
        ["w", "4 × 8", "(None, 'tp')", "32 B", "w"],
        ["x", "3", "(None,)", "3 B", "replicated, no rule matches"],
        ["x.{0,1} × 2", "2", "(None,)", "8 B", "replicated, no rule matches"],
    ]


def test_it_is_saved_as_a_whole(tmp_path: Path) -> None:
    report = large_report(1)
    path = tmp_path / "report.html"
    path.write_text("old")
    report.save_html(path, "A model")
    assert path.read_text(encoding="utf-8") == report.to_html("A model")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError, match="title must be a str"):
        report.save_html(path, 5)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="nowhere"):
        report.save_html(tmp_path / "nowhere" / "report.html")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    rgb = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


def test_the_colours_of_the_page_can_be_read(page: str) -> None:
    """WCAG 2: 4.5 for text, on the page and on bands."""
    themes = [dict(re.findall(r"--(\w+):(#\w{6})", line)) for line in page.splitlines() if "--page:" in line]
    assert len(themes) == 2
    for theme in themes:
        for ground in (theme["page"], theme["band"]):
            for name in ("text", "quiet", "link", "warn", "bad"):
                light, dark = sorted((luminance(theme[name]), luminance(ground)), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, ground)


class TestDeployments:
    """Two views of eight devices: two stages of four, and experts over all."""

    def page(self) -> Reader:
        meshes = {"attention": sw.DeviceMesh((2, 4), ("pp", "tp")), "experts": sw.DeviceMesh((8,), ("ep",))}
        rules = {
            "h.{i}.q": sw.deploy.DeploymentRule(("tp", None), mesh="attention", at={"pp": "i // 2"}),
            "h.{i}.norm": sw.deploy.DeploymentRule((None,), mesh="attention", at={"pp": "i // 2"}),
            "experts": sw.deploy.DeploymentRule(("ep", None), mesh="experts"),
            "step": sw.deploy.DeploymentRule((), mesh="experts"),
        }
        tensors = {
            f"h.{i}.{name}": (shape, "int8") for i in range(4) for name, shape in (("q", (8, 4)), ("norm", (4,)))
        }
        report = sw.deploy.Deployment(8, meshes, rules).report(
            {**tensors, "experts": ((8, 2), "int8"), "step": ((), "int8")}
        )
        return Reader(report.to_html())

    def test_the_meshes_are_named(self) -> None:
        said = "On 8 devices by the meshes attention (pp=2, tp=4); experts (ep=8); uneven rule: even."
        assert said in self.page().texts

    def test_a_row_names_the_devices_of_its_mesh(self) -> None:
        """Layers of both stages have the same axes, and a row for each stage."""
        page = self.page()
        layouts = [row[3] for row, kind in zip(page.rows, page.kinds, strict=True) if kind == "g"]
        assert sorted(layouts) == [
            "('ep', None) over ep=8: cpu:0..7",
            "('tp', None) over pp=1, tp=4: cpu:0..3",
            "('tp', None) over pp=1, tp=4: cpu:4..7",
            "() over ep=8: cpu:0..7",
            "(None,) over pp=1, tp=4: cpu:0..3",
            "(None,) over pp=1, tp=4: cpu:4..7",
        ]

    def test_what_the_devices_of_one_stage_hold_is_not_on_every_device(self) -> None:
        assert "Replicated on every device: 1" in self.page().texts

    def test_who_holds_what_names_the_mesh(self) -> None:
        cuts = json.loads(self.page().data)["cuts"]
        assert "8 × 4, ('tp', None) over pp=1, tp=4: cpu:4..7" in [cut["about"] for cut in cuts]

    def test_each_mesh_is_drawn_with_what_its_devices_hold(self) -> None:
        """Two stages of two layers of four: by hand from the rules above."""
        texts = self.page().texts
        assert "Meshes of the deployment" in texts
        assert texts.count("h 0,1") == texts.count("h 2,3") == 2 * 4
