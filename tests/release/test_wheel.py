"""What goes into a wheel: what is linked in is named, and a wheel that is not as it must be is refused."""

from __future__ import annotations

import random
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import shardwise as sw
from release.checks import MOST_BYTES, faults
from release.licences import FILE, linked_crates
from release.wheel import remapped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
INFO = f"shardwise-{sw.__version__}.dist-info"


@pytest.mark.skipif(shutil.which("cargo") is None, reason="needs cargo")
def test_every_crate_that_is_linked_in_has_its_licence() -> None:
    text = FILE.read_text(encoding="utf-8")
    crates = [f"{name} {version}" for name, version in linked_crates()]
    assert re.findall(r"^(\S+ [\d.]+): ", text, re.MULTILINE) == crates
    headings = re.findall(r"^=+\n(.*)\n=+$", text, re.MULTILINE)
    assert {name for heading in headings for name in heading.split(", ")} == set(crates)


def test_the_conda_recipe_is_of_this_version_and_its_needs() -> None:
    recipe = (ROOT / "release" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^  version: "(.*)"$', recipe, re.MULTILINE) == [sw.__version__]
    (listed,) = re.findall(r"^dependencies = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
    needs = {re.sub(r"(?<=[a-z])(?=[<>=])", " ", need.partition(";")[0]) for need in re.findall(r'"([^"]+)"', listed)}
    (run,) = re.findall(r"^  run:\n((?:    - .*\n)+)", recipe, re.MULTILINE)
    assert set(re.findall(r"- (.*)", run)) == needs | {"python >=3.10"}


def wheel(folder: Path, **changes: bytes | None) -> Path:
    """A wheel of the files of this checkout, with a compiled module that compiles to nothing, and with changes."""
    members: dict[str, bytes | None] = {
        path.relative_to(ROOT / "python").as_posix(): path.read_bytes()
        for path in (ROOT / "python" / "shardwise").rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyd", ".pyc")
    }
    members |= {f"{INFO}/licenses/{name}": b"" for name in ("LICENSE", "THIRD-PARTY-LICENSES")}
    members |= {"shardwise/_core.abi3.so": b"\x7fELF/cargo/registry/src/pyo3/src/lib.rs", f"{INFO}/METADATA": b""}
    members |= changes
    path = folder / f"shardwise-{sw.__version__}-cp310-abi3-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            if data is not None:
                archive.writestr(name, data)
    return path


def test_a_wheel_as_it_must_be(tmp_path: Path) -> None:
    assert faults(wheel(tmp_path)) == []


@pytest.mark.parametrize(
    ("member", "data", "fault"),
    [
        ("shardwise/_core.abi3.so", None, r"there must be one compiled module, got \[\]"),
        ("shardwise/_core.cpython-311.so", b"", "there must be one compiled module"),
        ("shardwise/_core.abi3.so", str(ROOT).encode() + b"/rust/core/mesh.rs", re.escape(f"holds the path {ROOT}")),
        ("shardwise/_core.abi3.so", b"\0/home/me/.cargo/registry/src\0", r"the path /home/me/\.cargo/registry/src"),
        ("shardwise/_core.abi3.so", rb"C:\Users\me\lib.rs", r"the path C:\\Users\\me\\lib\.rs"),
        ("shardwise/mesh.py", None, r"shardwise/mesh\.py is missing"),
        ("shardwise/py.typed", None, r"py\.typed is missing"),
        ("shardwise/_core.pyi", None, r"_core\.pyi is missing"),
        ("shardwise/rules/examples/vllm/llama.toml", None, r"vllm/llama\.toml is missing"),
        (f"{INFO}/licenses/THIRD-PARTY-LICENSES", None, "THIRD-PARTY-LICENSES is missing"),
        ("tests/test_mesh.py", b"", "does not belong there"),
    ],
)
def test_a_wheel_that_is_not_as_it_must_be(tmp_path: Path, member: str, data: bytes | None, fault: str) -> None:
    [found] = faults(wheel(tmp_path, **{member: data}))
    assert re.search(fault, found)


@pytest.mark.heavy
def test_a_wheel_that_is_too_large(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(MOST_BYTES)
    [found] = faults(wheel(tmp_path, **{"shardwise/_core.abi3.so": noise}))
    assert re.search(rf"has \d,\d{{3}},\d{{3}} bytes, {MOST_BYTES:,} at most", found)


def test_what_rustc_is_told(tmp_path: Path) -> None:
    source = tmp_path / "shardwise-1.0"
    (source / ".cargo").mkdir(parents=True)
    (source / ".cargo" / "config.toml").write_text('build.rustflags = ["-C", "linker=a b"]', encoding="utf-8")
    flags = "--remap-path-prefix=/cargo home=/cargo", f"--remap-path-prefix={source}=/shardwise"
    kept = {"CARGO_HOME": "/cargo home", "PATH": "/bin"}
    assert remapped(kept, source) == {**kept, "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(("-C", "linker=a b", *flags))}
    with_flags = remapped({**kept, "RUSTFLAGS": "-C  debuginfo=1"}, source)
    assert with_flags["CARGO_ENCODED_RUSTFLAGS"] == "\x1f".join(("-C", "debuginfo=1", *flags))
    encoded = remapped({**kept, "RUSTFLAGS": "-x", "CARGO_ENCODED_RUSTFLAGS": "--cfg\x1fa b"}, source)
    assert encoded["CARGO_ENCODED_RUSTFLAGS"] == "\x1f".join(("--cfg", "a b", *flags))


def test_what_developers_need_is_not_published() -> None:
    """And no group is called `dev`: maturin would install it with every build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    assert not {"dev", "test", "docs"} & set(extras)
    assert "dev" not in groups
    makefile, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "CONTRIBUTING.md"))
    # Each is installed by a target, or by the name that a contributor gives to `make test`.
    assert set(re.findall(r"\.group-(\w+)", makefile)) | set(re.findall(r"`WITH=(\w+)`", page)) == set(groups)


def test_what_publishes_is_pinned() -> None:
    """By commit what is not GitHub's own, by version what builds: neither changes from one release to the next."""
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)@(\S+)", workflow)
    assert used
    for action, at in used:
        assert re.fullmatch(r"v\d+" if action.startswith("actions/") else r"[0-9a-f]{40}", at), action
    for toolchain in re.findall(r"rustup toolchain install (\S+)", workflow):
        assert re.fullmatch(r"\d+\.\d+\.\d+", toolchain)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for tool in project["dependency-groups"]["release"]:
        assert re.fullmatch(r"[a-z0-9]+==[\d.]+(; .*)?", tool), tool
