"""Checkpoints in object stores: memory://, and a real S3 server with a toxic proxy before it."""

from __future__ import annotations

import gc
import itertools
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.store.data.location import location_of
from shardwise.store.data.objects import ObjectPath
from tests.checks import view_index
from tests.store.real import CASES, DATA, expected
from tests.store.stores import GoogleLike, Store, wrapped
from tests.store.toxic import Request, Times, Toxic

fsspec = pytest.importorskip("fsspec")

# Of asynchronous connections that the server closes, and of packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = {
    "embed": np.random.default_rng(0).normal(size=(60, 36)),
    "norm": np.arange(35, dtype="f4"),
    "scalar": np.array(7, "i2"),
    "empty": np.zeros((0, 3), "u1"),
}
WEIGHTS["tied"] = WEIGHTS["norm"]
RULES = sw.LayoutMap(sw.DeviceMesh((2, 2), ("x", "y")))
RULES["embed"] = ("x", "y")


class TestReading:
    @pytest.mark.parametrize(
        ("kind", "case"),
        [
            *(("memory", case) for case in CASES),
            *(("s3", case) for case in ("torch/dcp", "torch/plain.pt", "megatron")),
        ],
    )
    def test_every_form_is_read_bit_for_bit(self, kind: str, case: str, request: pytest.FixtureRequest) -> None:
        store: Store = request.getfixturevalue(kind)
        folder = case.partition("/")[0]
        place = store.place()
        store.put(DATA / folder, place)
        with sw.open_checkpoint(place / case.partition("/")[2] if "/" in case else place) as checkpoint:
            assert checkpoint.format == CASES[case][1]
            for name, array in expected(case).items():
                assert checkpoint.read(name).tobytes() == array.tobytes(), name
                half = tuple(slice(n // 3, n - n // 4) for n in array.shape)
                assert checkpoint.read(name, half).tobytes() == array[view_index(half)].tobytes(), name

    def test_boxes_of_any_kind(self, memory: Store, tmp_path: Path) -> None:
        """Runs that are longer than a request, and gaps that are longer than what is read for nothing."""
        whole = np.arange(3 * 5 * 1_200_000, dtype="u2").reshape(3, 5, 1_200_000)
        sw.save_checkpoint(tmp_path / "a.safetensors", {"w": whole, "t": np.arange(24, dtype="i4").reshape(2, 3, 4)})
        place = memory.place()
        memory.put(tmp_path / "a.safetensors", place)
        requests: list[tuple[int, int]] = []

        def cat_file(original: Any, path: str, start: int, end: int) -> bytes:
            requests.append((start, end))
            found: bytes = original(path, start=start, end=end)
            return found

        with sw.open_checkpoint(wrapped(place, cat_file=cat_file)) as checkpoint:
            for box, most in [
                ((slice(0, 3), slice(0, 5), slice(0, 1_200_000)), 5),  # 36 MB, in requests of 8 MiB
                ((slice(0, 3), slice(1, 4), slice(7, 9)), 9),  # each 2.4 MB from the next: one each
                ((slice(1, 2), slice(0, 5), slice(0, 1_000_000)), 2),  # holes of 400 kB: read as well
                ((slice(0, 0), slice(0, 5), slice(0, 2)), 0),
                ((slice(2, 3), slice(4, 5), slice(11, 12)), 1),
            ]:
                requests.clear()
                assert np.array_equal(checkpoint.read("w", box), whole[box])
                assert len(requests) <= most
                assert all(end - start <= 8 * 2**20 for start, end in requests)

    def test_strided_tensors_of_pytorch(self, memory: Store) -> None:
        """Dims in any order, and one element that serves for all, as `.pt` files have them."""
        from tests.store.torch_files import save, tensor

        values = np.arange(24, dtype="<f4")
        state = {
            "turned": tensor(values, "s", shape=(4, 6), strides=(1, 4)),
            "spread": tensor(values, "t", shape=(3, 5), strides=(0, 2)),
        }
        place = memory.place("model.pt")
        place.filesystem.pipe_file(place.key, save(state))
        with sw.open_checkpoint(place) as checkpoint:
            assert np.array_equal(checkpoint.read("turned"), values.reshape(6, 4).T)
            assert np.array_equal(checkpoint.read("spread", (slice(1, 3), slice(1, 4))), [[2, 4, 6]] * 2)

    def test_headers_are_few_requests(self, s3: Store, tmp_path: Path) -> None:
        many = {f"layer.{i}": np.zeros((4, 4)) for i in range(300)}
        sw.save_checkpoint(tmp_path / "a.safetensors", many)
        place = s3.place()
        s3.put(tmp_path / "a.safetensors", place)
        assert s3.toxic is not None
        s3.toxic.calm()
        with sw.open_checkpoint(place) as checkpoint:
            assert len(checkpoint) == 300
        assert s3.toxic.count("GET") <= 2

    def test_another_object_is_refused(self, store: Store, tmp_path: Path) -> None:
        for name, start in (("a", 0), ("b", 1)):
            weights = {"w": np.arange(start, start + 200_000), "small": np.arange(3)}
            sw.save_checkpoint(tmp_path / f"{name}.safetensors", weights)
        place = store.place()
        store.put(tmp_path / "a.safetensors", place)
        with sw.open_checkpoint(place) as checkpoint:
            checkpoint.read("w", (slice(5, 9),))
            store.put(tmp_path / "b.safetensors", place)
            with pytest.raises(sw.ParseError, match="a different object than before"):
                checkpoint.read("w")
            place.filesystem.rm_file(place.key)
            with pytest.raises(sw.ParseError, match="no longer exists"):
                checkpoint.read("w")

    def test_a_listing_is_not_the_truth(self, store: Store, tmp_path: Path) -> None:
        """One that lags behind: it lacks the manifest, a file, or has one that is gone."""
        sw.save_checkpoint(tmp_path / "a", WEIGHTS, RULES)
        place = store.place()
        store.put(tmp_path / "a", place)
        for lacking in ("shardwise.json", "shard-00004-model-00001-of-00001.safetensors"):

            def ls(original: Any, *args: Any, lacking: str = lacking, **kwargs: Any) -> Any:
                found = original(*args, **kwargs)
                more = [{**found[0], "name": f"{place.key}/shard-00009-model-00001-of-00001.safetensors"}]
                return [entry for entry in found if not entry["name"].endswith(lacking)] + more

            other = wrapped(place, ls=ls)
            with sw.open_checkpoint(other) as checkpoint:
                assert checkpoint.format == "sharded"
                assert np.array_equal(checkpoint.read("embed"), WEIGHTS["embed"])

    def test_there_is_no_array_without_a_copy(self, memory: Store, tmp_path: Path) -> None:
        sw.save_checkpoint(tmp_path / "a.safetensors", WEIGHTS)
        place = memory.place()
        memory.put(tmp_path / "a.safetensors", place)
        with sw.open_checkpoint(place) as checkpoint:
            with pytest.raises(ValueError, match="is in an object store"):
                checkpoint["embed"].array()
            assert np.array_equal(np.asarray(checkpoint["embed"]), WEIGHTS["embed"])
        with pytest.raises(ValueError, match="is closed"):
            checkpoint["embed"].read()

    def test_nothing_there(self, store: Store) -> None:
        with pytest.raises(FileNotFoundError, match="does not exist"):
            sw.open_checkpoint(store.place())

    def test_by_url_on_the_command_line(self, memory: Store, tmp_path: Path, capsys: Any) -> None:
        place = memory.place()
        sw.save_checkpoint(tmp_path / "a.safetensors", WEIGHTS)
        assert main(["reshard", str(tmp_path / "a.safetensors"), f"{place}/b.safetensors", "--quiet"]) == 0
        assert main(["verify", f"{place}/b.safetensors", "--quiet"]) == 0
        assert main(["diff", str(tmp_path / "a.safetensors"), f"{place}/b.safetensors", "--quiet"]) == 0
        assert main(["inspect", f"{place}/b.safetensors"]) == 0
        assert "embed" in capsys.readouterr().out


class TestToxicReading:
    @pytest.fixture
    def place(self, s3: Store, tmp_path: Path) -> ObjectPath:
        sw.save_checkpoint(tmp_path / "a.safetensors", WEIGHTS | {"large": np.arange(3_000_000)})
        place = s3.place()
        s3.put(tmp_path / "a.safetensors", place)
        return place

    @pytest.mark.parametrize("harm", ["503", "short", "cut", "stall", "lost"])
    def test_what_passes_is_tried_again(self, s3: Store, place: ObjectPath, harm: str) -> None:
        assert s3.toxic is not None
        times = 2 if harm == "stall" else 4
        if harm == "stall":
            # It answers after two seconds; nobody waits as long.
            place = ObjectPath(str(place), endpoint_url=s3.toxic.url, config_kwargs={"read_timeout": 1})
        s3.toxic.poison = Times(harm, times, lambda request: request[0] == "GET")
        with sw.open_checkpoint(place) as checkpoint:
            assert np.array_equal(checkpoint.read("embed"), WEIGHTS["embed"])
            s3.toxic.poison = Times(harm, times, lambda request: request[0] == "GET")
            assert np.array_equal(checkpoint.read("large"), np.arange(3_000_000))

    @pytest.mark.parametrize(("harm", "said"), [("503", ""), ("short", r"bytes 0 to \d+ were needed, but \d+ came")])
    def test_what_stays_is_an_error(self, s3: Store, place: ObjectPath, harm: str, said: str) -> None:
        assert s3.toxic is not None
        s3.toxic.calm()
        s3.toxic.poison = lambda request: harm if request[0] == "GET" else None
        with pytest.raises(OSError, match=f"failed 5 times.*{said}.*{place.key}"):
            sw.open_checkpoint(place)
        assert s3.toxic.count("GET", place.name) == 5

    def test_credentials(self, server: Toxic, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        with pytest.raises(PermissionError, match="no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
            sw.open_checkpoint(ObjectPath("s3://bucket/model", endpoint_url=server.url))


class TestWriting:
    def test_from_memory_and_back_to_a_disk(self, store: Store, tmp_path: Path) -> None:
        place = store.place()
        sharded = sw.distribute_tensor(WEIGHTS["embed"], sw.TensorLayout(("x", "y"), sw.DeviceMesh((2, 2), ("x", "y"))))
        sw.save_checkpoint(place, {**WEIGHTS, "sharded": sharded, "turned": WEIGHTS["embed"].T[::-2]})
        sw.reshard_checkpoint(place, tmp_path / "b.safetensors", dtype="float32", only="embed|turned|sharded")
        with sw.open_checkpoint(tmp_path / "b.safetensors") as checkpoint:
            assert np.array_equal(checkpoint.read("turned"), WEIGHTS["embed"].T[::-2].astype("f4"))
            assert np.array_equal(checkpoint.read("sharded"), WEIGHTS["embed"].astype("f4"))

    def test_in_parts_in_the_order_of_the_bytes(self, s3: Store, tmp_path: Path) -> None:
        large = {"a": np.arange(2_100_001, dtype="f8"), "b": np.arange(4_000_000, dtype="u1").reshape(4, -1).T}
        place = s3.place("a.safetensors")
        assert s3.toxic is not None
        s3.toxic.calm()
        sw.save_checkpoint(place, large, memory=32 * 2**20)
        sw.save_checkpoint(tmp_path / "a.safetensors", large)
        data = (tmp_path / "a.safetensors").read_bytes()
        assert s3.objects(place)[""] == data
        parts = [path for method, path, _ in s3.toxic.requests if method == "PUT"]
        assert 3 <= len(parts) <= 1 + len(data) // (6 * 2**20)
        assert all("partNumber" in path for path in parts)
        with pytest.raises(sw.LayoutError, match=r"memory is 16\.0 MiB; at least 32\.0 MiB are needed"):
            sw.save_checkpoint(s3.place(), large, memory=16 * 2**20)

    def test_plans(self, store: Store, tmp_path: Path) -> None:
        sw.save_checkpoint(tmp_path / "a.safetensors", WEIGHTS)
        place = store.place("b")
        outline = sw.plan_checkpoint(tmp_path / "a.safetensors", place, RULES).outline()
        assert len(outline.files) == 4
        assert outline.memory <= 256 * 2**20
        assert store.objects(place) == {}

    @pytest.mark.heavy
    def test_to_and_from_pytorchs_form(self, memory: Store, tmp_path: Path) -> None:
        """Whose zip containers have CRC-32s, and whose folders have values that are not tensors."""
        place = memory.place()
        store_folder = DATA / "torch" / "dcp"
        memory.put(store_folder, place)
        sw.reshard_checkpoint(place, tmp_path / "a", to="dcp")
        sw.reshard_checkpoint(store_folder, tmp_path / "b", to="dcp")
        names = sorted(path.name for path in (tmp_path / "a").iterdir())
        assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
        for name in names:
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert sw.verify_checkpoint(place) == replace(sw.verify_checkpoint(store_folder), path=location_of(place))
        with sw.open_checkpoint(place) as checkpoint:
            extent = next(tensor for tensor in checkpoint.values() if tensor.size).pieces[0].extent()
        key = f"{place.key}/{extent.holder.path.name}"
        data = bytearray(place.filesystem.cat_file(key))
        data[extent.offset] ^= 1
        place.filesystem.pipe_file(key, bytes(data))
        with pytest.raises(sw.ParseError, match="its CRC-32 is"):
            sw.verify_checkpoint(place)

    def test_only_where_objects_appear_whole(self) -> None:
        with pytest.raises(sw.LayoutError, match="written to s3://, gs:// and memory://, not to http://"):
            sw.save_checkpoint(ObjectPath("http://127.0.0.1/a", filesystem=object()), {"w": np.zeros(3)})


class TestWhatIsThere:
    def test_nothing_is_written_over(self, store: Store, tmp_path: Path) -> None:
        for name in ("a.safetensors", "a"):
            place = store.place(name)
            sw.save_checkpoint(place, WEIGHTS)
            before = store.objects(place)
            for resume in (False, True):
                sw.save_checkpoint(tmp_path / f"{name}-{resume}.safetensors", {"w": np.arange(3)})
                with pytest.raises(FileExistsError, match="exists already"):
                    sw.reshard_checkpoint(tmp_path / f"{name}-{resume}.safetensors", place, resume=resume)
            with pytest.raises(FileExistsError):
                sw.reshard_checkpoint(place, place)
            assert store.objects(place) == before

    @pytest.mark.parametrize("last", ["shard-00002-model-00001-of-00001.safetensors", "shardwise.json"])
    def test_of_two_drivers_one_wins(self, store: Store, last: str) -> None:
        """The other one begins when the first is about to make an object: the condition refuses it."""
        place = store.place()
        theirs = {"embed": WEIGHTS["embed"] + 1}
        raced: list[int] = []

        def race(original: Any, *args: Any, **kwargs: Any) -> Any:
            name = kwargs.get("Key") or args[0]
            if str(name).endswith(last) and args[0] not in ("head_object",) and not raced:
                raced.append(1)
                place.filesystem.pipe_file((place / last).key, b"theirs")
            return original(*args, **kwargs)

        other = wrapped(place, pipe_file=race, call_s3=race)
        with pytest.raises(FileExistsError, match="exists already"):
            sw.save_checkpoint(other, theirs, RULES)
        assert raced
        assert store.objects(place)[last] == b"theirs"
        assert ("shardwise.json" in store.objects(place)) == (last == "shardwise.json")

    def test_an_interrupted_run_leaves_no_checkpoint(self, store: Store, tmp_path: Path) -> None:
        sw.save_checkpoint(tmp_path / "a.safetensors", WEIGHTS)
        place = store.place()
        stop = itertools.count()

        def progress(done: int, total: int) -> None:
            if next(stop) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sw.reshard_checkpoint(tmp_path / "a.safetensors", place, RULES, progress=progress)
        assert sorted(store.objects(place)) == [f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2)]
        with pytest.raises(FileExistsError, match="resume=True goes on with what an interrupted run left"):
            sw.reshard_checkpoint(tmp_path / "a.safetensors", place, RULES)
        report = sw.reshard_checkpoint(tmp_path / "a.safetensors", place, RULES, resume=True)
        assert isinstance(report, sw.store.WriteReport)
        assert 0 < report.bytes_resumed < report.bytes == report.bytes_resumed + report.bytes_written
        assert sw.diff_checkpoints(tmp_path / "a.safetensors", place) == []
        assert sw.verify_checkpoint(place).digests == 4


class TestToxicWriting:
    LARGE: ClassVar[dict[str, Any]] = {"a": np.arange(2_500_000, dtype="f8"), "b": np.arange(7)}

    @staticmethod
    def uploads(place: ObjectPath) -> list[Any]:
        found: list[Any] = place.filesystem.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", [])
        return [upload for upload in found if upload["Key"] in place.key]

    @pytest.mark.parametrize("harm", ["503", "lost"])
    @pytest.mark.parametrize("name", ["a.safetensors", "a"])
    def test_what_passes_is_tried_again(self, s3: Store, harm: str, name: str) -> None:
        """An answer that is lost as well: what was done already is not taken for another's."""
        place = s3.place(name)
        assert s3.toxic is not None
        done: dict[str, int] = {}
        lock = threading.Lock()

        def poison(request: Request) -> str | None:
            # The first two tries of each request but those for looking.
            key = f"{request[0]} {request[1]}"
            with lock:
                done[key] = done.get(key, 0) + 1
                return harm if request[0] in ("PUT", "POST") and done[key] <= 2 else None

        s3.toxic.poison = poison
        sw.save_checkpoint(place, self.LARGE, memory=40 * 2**20)
        s3.toxic.calm()
        with sw.open_checkpoint(place) as checkpoint:
            assert all(np.array_equal(checkpoint.read(key), array) for key, array in self.LARGE.items())

    @pytest.mark.parametrize("where", ["partNumber=2", "uploads", "uploadId="])
    def test_what_stays_leaves_nothing(self, s3: Store, where: str) -> None:
        place = s3.place("a.safetensors")
        assert s3.toxic is not None
        s3.toxic.poison = lambda request: "503" if where in request[1] and request[0] in ("PUT", "POST") else None
        with pytest.raises(OSError, match=f"failed 5 times.*{place.name}"):
            sw.save_checkpoint(place, self.LARGE, memory=40 * 2**20)
        s3.toxic.calm()
        assert s3.objects(place) == {}
        assert self.uploads(place) == []

    def test_a_source_that_fails(self, s3: Store, tmp_path: Path) -> None:
        sw.save_checkpoint(tmp_path / "a", self.LARGE)
        source, place = s3.place(), s3.place()
        s3.put(tmp_path / "a", source)
        assert s3.toxic is not None
        seen = itertools.count()
        s3.toxic.poison = lambda request: "cut" if request[0] == "GET" and next(seen) > 4 else None
        with pytest.raises(OSError, match="failed 5 times"):
            sw.reshard_checkpoint(source, place, memory=40 * 2**20)
        s3.toxic.calm()
        assert s3.objects(place) == {}
        assert self.uploads(place) == []


class TestGoogle:
    @pytest.mark.parametrize("name", ["a.safetensors", "a"])
    def test_objects_are_made_when_they_are_whole(self, tmp_path: Path, name: str) -> None:
        store = GoogleLike()
        place = ObjectPath(f"gs://bucket/{name}", filesystem=store)
        sw.save_checkpoint(place, WEIGHTS, RULES)
        sw.save_checkpoint(tmp_path / name, WEIGHTS, RULES)
        assert sw.diff_checkpoints(place, tmp_path / name) == []
        before = dict(store.made)
        with pytest.raises(FileExistsError, match="exists already"):
            sw.save_checkpoint(place, WEIGHTS, RULES)
        assert store.made == before

    def test_what_fails_is_not_made(self) -> None:
        store = GoogleLike()

        def progress(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sw.save_checkpoint(ObjectPath("gs://bucket/a", filesystem=store), WEIGHTS, progress=progress)
        gc.collect()
        assert (store.made, store.discarded) == ({}, 1)

    def test_another_driver(self) -> None:
        store = GoogleLike()
        place = ObjectPath("gs://bucket/a", filesystem=store)

        def progress(done: int, total: int) -> None:
            store.made["bucket/a/shardwise.json"] = b"theirs"

        with pytest.raises(FileExistsError, match="exists already"):
            sw.save_checkpoint(place, WEIGHTS, progress=progress)
        assert store.made["bucket/a/shardwise.json"] == b"theirs"


class TestPaths:
    def test_what_a_url_is(self, tmp_path: Path) -> None:
        assert location_of(f"file://{tmp_path}") == tmp_path
        assert location_of(tmp_path) == tmp_path
        path = ObjectPath("memory://a//b/c.safetensors/")
        assert (str(path), path.name, path.suffix, str(path.parent)) == (
            "memory://a/b/c.safetensors",
            "c.safetensors",
            ".safetensors",
            "memory://a/b",
        )
        assert repr(path / "d") == "ObjectPath('memory://a/b/c.safetensors/d')"
        assert str(path.with_name("e")) == "memory://a/b/e"
        for wrong in ("memory://", "memory:///", "a/b", "", "://a", "memory://a\0b", 3):
            with pytest.raises(sw.ParseError, match="url must be like"):
                ObjectPath(wrong)  # type: ignore[arg-type]
        with pytest.raises(sw.ParseError, match="nosuch"):
            ObjectPath("nosuch://a/b")
        with pytest.raises(TypeError, match="options 'anon' are only for a new filesystem"):
            ObjectPath("memory://a", filesystem=path.filesystem, anon=True)

    def test_paths_are_values(self) -> None:
        import pickle

        path = ObjectPath("memory://a/b", filesystem=fsspec.filesystem("memory"))
        assert pickle.loads(pickle.dumps(path)) == path
        assert {path: 1}[ObjectPath("memory://a/b", filesystem=path.filesystem)] == 1
        assert path != ObjectPath("memory://a/c", filesystem=path.filesystem)
        assert path != "memory://a/b"
        assert sorted([path / "b", path / "a"])[0].name == "a"

    def test_without_fsspec(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "fsspec", None)
        with pytest.raises(ImportError, match=r"pip install 'shardwise\[s3\]'"):
            sw.open_checkpoint("s3://bucket/model")

    def test_credentials_by_protocol(self) -> None:
        class NoCredentialsError(Exception):
            pass

        def ask(path: str) -> Any:
            raise NoCredentialsError("unable to locate")

        path = ObjectPath("gs://bucket/a", filesystem=type("Fs", (), {"info": staticmethod(ask)})())
        with pytest.raises(PermissionError, match="no credentials: set GOOGLE_APPLICATION_CREDENTIALS"):
            sw.open_checkpoint(path)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("reference://x", "reference:// needs more than a URL: fo must be given.* FSSPEC_REFERENCE_FO"),
        ("ftp://x", "ftp:// needs more than a URL: host must be given.* FSSPEC_FTP_HOST"),
        ("github://x", "org, repo must be given"),
        ("dir://x", "dir:// needs more than a URL: fsspec says: "),
        ("blockcache://x", "blockcache:// needs more than a URL: fsspec says: "),
        ("data://x", "data://x: fsspec's filesystem for data:// fails: ValueError"),
        ("nosuch://x", "Protocol not known: nosuch"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_urls_that_say_too_little(url: str, said: str, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command, url]) == 2
    error = capfd.readouterr().err
    assert re.fullmatch(f"shardwise: error: .*{said}.*\n", error), error


def test_what_is_advised_for_them(tmp_path: Path) -> None:
    """An option by the environment, and a filesystem that has all it needs."""
    sw.save_checkpoint(tmp_path / "model.safetensors", {"w": np.arange(4)})
    within = fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file"))
    with sw.open_checkpoint(sw.ObjectPath("dir://model.safetensors", filesystem=within)) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1, 2, 3]
    command = [sys.executable, "-m", "shardwise", "inspect", "ftp://x"]
    environment = {**os.environ, "FSSPEC_FTP_HOST": "127.0.0.1", "FSSPEC_FTP_PORT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert re.fullmatch("shardwise: error: ftp://: .*refused\n", done.stderr), done.stderr


def test_what_is_advised_without_credentials(s3: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keys by the environment, or none at all; and in a plan file, of which no option is kept, the endpoint."""
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": np.arange(4)})
    place = s3.place("a.safetensors")
    s3.put(tmp_path / "a.safetensors", place)
    place.filesystem.call_s3("put_object_acl", Bucket="bucket", Key=place.key.partition("/")[2], ACL="public-read")
    assert s3.toxic is not None
    url: Any = {"endpoint_url": s3.toxic.url}
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    for name in keys:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    where = str(place)
    with pytest.raises(PermissionError, match=r"set AWS_ACCESS_KEY_ID and .*; ObjectPath\(url, anon=True\) needs none"):
        sw.open_checkpoint(ObjectPath(where, **url))
    with sw.open_checkpoint(ObjectPath(where, anon=True, **url)) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1, 2, 3]
    for name, key in keys.items():
        monkeypatch.setenv(name, key)
    with sw.open_checkpoint(ObjectPath(where, **url)) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1, 2, 3]
    plan = sw.plan_checkpoint(ObjectPath(where, **url), tmp_path / "b.safetensors")
    with pytest.raises(
        TypeError, match=r"give the options in the environment, as FSSPEC_S3_ENDPOINT_URL or AWS_ENDPOINT_URL"
    ):
        plan.save(tmp_path / "plan")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.toxic.url)
    sw.plan_checkpoint(where, tmp_path / "b.safetensors").save(tmp_path / "plan")
    own = sw.CheckpointPlan.load(tmp_path / "plan")
    own.run()
    own.commit()
    assert sw.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors") == []
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    # fsspec reads its variables once, when it is imported.
    program = "import shardwise as sw, sys; print(sw.open_checkpoint(sys.argv[1]).read('w').tolist())"
    found = subprocess.run(
        [sys.executable, "-c", program, where],
        env={**os.environ, "FSSPEC_S3_ENDPOINT_URL": s3.toxic.url}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == "[0, 1, 2, 3]\n"
