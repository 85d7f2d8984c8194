"""The page of a report in a browser: sorted, searched, folded and used by keyboard, without a network."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise as sw
from tests.browser import Page, browser
from tests.rules.pages import large_report

pytestmark = pytest.mark.slow

SHOWN = "[...document.querySelectorAll('tr.g')].filter(row => row.offsetParent !== null)"
MEMBERS = "[...document.querySelectorAll('tr.m')].filter(row => row.offsetParent !== null)"
NAMES = f"{SHOWN}.map(row => row.cells[0].textContent)"
FOCUS = "document.activeElement"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Path]]:
    folder = tmp_path_factory.mktemp("page")
    large_report().save_html(folder / "report.html", "A model")
    with browser(folder / "profile") as page:
        yield page, folder / "report.html"


@pytest.fixture
def page(window: tuple[Page, Path]) -> Iterator[Page]:
    """The page as it is when it is opened; at the end nothing has gone wrong in it, and nothing was asked of others."""
    found, path = window
    found.open(path)
    yield found
    assert found.complaints == []
    assert found.requests == [path.as_uri()]


def tab_to(page: Page, condition: str) -> None:
    """Press Tab until what has the focus fulfils a condition."""
    for _ in range(200):
        page.press("Tab")
        if page.run(f"(focus => {condition})({FOCUS})"):
            return
    raise AssertionError(f"Tab does not lead to {condition}")


def test_folded_it_has_a_row_for_each_sort_of_tensor(page: Page) -> None:
    assert page.run(f"{SHOWN}.length") == 14
    assert page.run(f"{MEMBERS}.length") == 0
    assert page.run("document.getElementById('status').textContent") == "1004 of 1004 tensors shown"


def test_it_is_searched(page: Page) -> None:
    page.press("/")
    page.type("layers.7. q_proj")
    assert page.run("document.getElementById('status').textContent") == "1 of 1004 tensors shown"
    assert page.run(f"{MEMBERS}.map(row => row.cells[0].textContent)") == ["model.layers.7.self_attn.q_proj.weight"]
    page.press("Escape")
    assert page.run(f"{SHOWN}.length") == 14
    assert page.run(f"{MEMBERS}.length") == 0
    page.type("no such tensor")
    assert page.run(f"{SHOWN}.length") == 0


def test_it_is_filtered_by_what_becomes_of_tensors(page: Page) -> None:
    page.run(
        "(kind => { kind.value = '3'; kind.dispatchEvent(new Event('change')); })(document.getElementById('kind'))"
    )
    assert page.run(NAMES) == ["odd.kernel", "odd.norm"]


def test_it_is_sorted_by_keyboard(page: Page) -> None:
    tab_to(page, "focus.closest('th') && focus.textContent === 'bytes'")
    page.press("Enter")
    # 111 tensors of 896 MiB, of 448 MiB, of 128 MiB twice, then the embeddings, of 2.0 GiB.
    head = "document.querySelector('th[aria-sort]')"
    assert page.run(f"{head}.textContent") == "bytes"
    assert page.run(f"{head}.getAttribute('aria-sort')") == "descending"
    assert ["gate_up" in page.run(NAMES)[0], "down_proj" in page.run(NAMES)[1]] == [True, True]
    first = page.run(NAMES)
    page.press("Enter")
    assert page.run(f"{head}.getAttribute('aria-sort')") == "ascending"
    assert page.run(NAMES)[-1] == first[0]
    assert page.run(NAMES)[0] == "extra.bias"
    # Members stay with their groups.
    page.run("document.getElementById('unfold').click()")
    assert page.run(
        "[...document.querySelectorAll('tr.m')].every(row => { let above = row; while (!above.matches('.g')) "
        "above = above.previousElementSibling; const last = row.cells[0].textContent.split('.').slice(-2).join('.');"
        " return above.cells[0].textContent.includes(last); })"
    )


def test_it_is_unfolded_and_a_tensor_chosen_by_keyboard(page: Page) -> None:
    tab_to(page, "focus.matches('.fold') && focus.closest('tr').textContent.includes('q_proj')")
    page.press("Enter")
    assert page.run(f"{FOCUS}.getAttribute('aria-expanded')") == "true"
    assert page.run(f"{MEMBERS}.length") == 111
    tab_to(page, "focus.textContent === 'model.layers.3.self_attn.q_proj.weight'")
    page.press("Enter")
    assert page.run(f"{FOCUS}.textContent") == "Who holds what"
    cells = page.run(
        "[...document.querySelectorAll('#who tbody tr')].map(row => [...row.cells].map(c => c.textContent))"
    )
    assert cells == [[f"[{1024 * i}:{1024 * i + 1024}, 0:8192]", f"cpu:{i},{i + 8} (2 replicas)"] for i in range(8)]
    # The drawing has a rectangle for each, of one size, one below the other.
    boxes = page.run(
        "[...document.querySelectorAll('#who svg rect')]"
        ".map(r => ['x', 'y', 'width', 'height'].map(name => +r.getAttribute(name)))"
    )
    assert len({(x, width, round(height, 6)) for x, _, width, height in boxes}) == 1
    assert [round(y, 6) for _, y, _, _ in boxes] == [round(i * boxes[0][3], 6) for i in range(8)]
    assert (
        page.run("new Set([...document.querySelectorAll('#who svg rect')].map(r => r.getAttribute('fill'))).size") == 8
    )
    tab_to(page, "focus.textContent === 'Back to the table'")
    page.press("Enter")
    assert page.run(f"{FOCUS}.textContent") == "model.layers.3.self_attn.q_proj.weight"


def test_a_packed_tensor_and_one_without_a_place(page: Page) -> None:
    choose = "[...document.querySelectorAll('tr.g button.plain')].find(b => b.textContent.includes('{}')).click()"
    page.run(choose.replace("{}", "gate_up"))
    rows = page.run("[...document.querySelectorAll('#who tbody tr')].map(row => row.textContent)")
    assert len(rows) == 16
    assert "[32256:35840, 0:8192]cpu:1,9 (2 replicas)" in rows
    assert page.run("document.querySelector('#who h3').textContent").startswith("each of the 111 tensors model.layers.")
    page.run(choose.replace("{}", "odd.kernel"))
    assert "the 8 shards" in page.run("document.querySelector('#who .bad').textContent")
    assert page.run("document.querySelectorAll('#who table').length") == 0


@pytest.mark.parametrize("width", [320, 420, 1280, 1920])
def test_it_fits_the_window(page: Page, width: int) -> None:
    """What is wide scrolls within its own frame, which the keyboard reaches."""
    page.resize(width)
    page.run("document.getElementById('unfold').click()")
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("[...document.querySelectorAll('.scroll')].every(e => e.tabIndex === 0)")


def test_everything_has_a_name(page: Page) -> None:
    """What can be used says what it is, and pictures have a text."""
    assert page.run("[...document.querySelectorAll('button')].filter(b => !(b.textContent || b.ariaLabel)).length") == 0
    assert page.run("[...document.querySelectorAll('input,select')].filter(i => !i.labels.length).length") == 0
    assert page.run(
        "[...document.querySelectorAll('svg')].every(s => s.getAttribute('role') === 'img' && "
        "s.getAttribute('aria-labelledby').split(' ').every(id => document.getElementById(id).textContent))"
    )


def test_it_can_be_read_without_scripts(window: tuple[Page, Path]) -> None:
    page, path = window
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(path)
        assert page.run(f"{SHOWN}.length") == 14
        assert page.run(f"{MEMBERS}.length") == 999
        assert page.run("document.getElementById('search').offsetParent === null")
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)


def test_every_sort_of_cut_is_drawn(window: tuple[Page, Path], tmp_path: Path) -> None:
    """Rectangles within the drawing that do not overlap: slices, vectors, scalars, empty shards, sizes beyond 2^53."""
    rules = sw.LayoutMap(sw.DeviceMesh((2, 2, 2), ("a", "b", "c")))
    rules["cube"] = ("a", "b", "c")
    rules["line"] = (("a", "b", "c"),)
    rules["point"] = ()
    rules["huge"] = ("a", None)
    shapes: dict[str, tuple[int, ...]] = {
        "cube": (4, 4, 4),
        "line": (64,),
        "a short line": (3,),
        "point": (),
        "huge": (2**61, 2),
        "line of none": (0,),
    }
    report = rules.report({name: (shape, "int8") for name, shape in shapes.items()}, uneven="ceil")
    path = tmp_path / "cuts.html"
    report.save_html(path)
    page, _ = window
    page.open(path)
    expected = {"cube": 8, "line": 8, "a short line": 3, "point": 1, "huge": 2, "line of none": 0}
    for name, count in expected.items():
        page.run(f"[...document.querySelectorAll('tr.g button')].find(b => b.textContent === '{name}').click()")
        assert page.run("document.querySelector('#who h3').textContent") == name
        places = page.run(
            "[...document.querySelectorAll('#who svg rect')]"
            ".map(r => ['x', 'y', 'width', 'height'].map(name => +r.getAttribute(name)))"
        )
        assert len(places) == count
        if count:
            _, _, width, height = page.run(
                "document.querySelector('#who svg').getAttribute('viewBox').split(' ').map(Number)"
            )
            assert all(x >= 0 and y >= 0 and x + w <= width + 0.01 and y + h <= height + 0.01 for x, y, w, h in places)
        for (x, y, w, h), (x2, y2, w2, h2) in itertools.combinations(places, 2):
            assert min(x + w, x2 + w2) - max(x, x2) < 0.01 or min(y + h, y2 + h2) - max(y, y2) < 0.01
    page.run("[...document.querySelectorAll('tr.g button')].find(b => b.textContent === 'huge').click()")
    rows = page.run("[...document.querySelectorAll('#who tbody tr')].map(row => row.cells[0].textContent)")
    assert rows == [f"[0:{2**60}, 0:2]", f"[{2**60}:{2**61}, 0:2]"]
    assert page.complaints == []


def test_all_columns_of_a_deployment_fit_a_screen(window: tuple[Page, Path]) -> None:
    """Its layouts are the longest texts: with meshes and devices; 1,280 pixels are enough."""
    page, path = window
    experts = {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
        **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False},
    }
    made = sw.deploy.preset("vllm(tp=4, pp=4, expert_parallel=true)", experts, form="report")
    shapes = {
        "lm_head.weight": ((151936, 2048), "bfloat16"),
        "model.layers.7.self_attn.qkv_proj.weight": ((5120, 2048), "bfloat16"),
        "model.layers.40.mlp.experts.w13_weight": ((128, 1536, 2048), "bfloat16"),
    }
    made.layouts.report(shapes).save_html(path.with_name("deployment.html"), "Experts")
    page.open(path.with_name("deployment.html"))
    wide = "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth)"
    assert page.run(f"{wide}.map(each => each.ariaLabel)") == []
