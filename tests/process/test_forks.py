"""Children forked while other threads use the library: they have all its locks, but not those who hold them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="forks")

HEAD = """
    import os, signal, sys, threading, time
    import numpy as np
    import shardwise as sw
    from shardwise._fork import ForkLock, cached_property

    def forked(work):
        # What `work` gives in a child, or "hangs".
        to_read, to_write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os.write(to_write, str(work()).encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os.close(to_write)
        return os.read(to_read, 99).decode() if status == 0 else "hangs" if status == signal.SIGALRM else status

    def while_a_thread(does, started, work):
        thread = threading.Thread(target=does)
        thread.start()
        assert started.wait(60)
        found = forked(work)
        go_on.set()
        thread.join()
        return found

    started, go_on = threading.Event(), threading.Event()
"""


def run(program: str, *arguments: str) -> list[str]:
    """What a program prints after the lines above; it may write nothing to stderr."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        textwrap.dedent(HEAD) + textwrap.dedent(program),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("shardwise.reshard.plan", "len(sw.plan_reshard(cut, cut))"),
        ("shardwise.reshard.plan", "len(sharded.reshard(cut.layout).shards)"),
        ("shardwise.mesh_views", "len(mesh['x'].axis_names)"),
        ("shardwise.store", "len(sw.open_checkpoint.__name__)"),
        ("shardwise.packed.notation", "len(sw.packed.parse('(8@x 2)').parts)"),
        ("shardwise.show.draw", "len(cut._repr_svg_()[:1])"),
        ("shardwise.interop.translation", "len(sw.interop.DIALECTS) > 1"),
    ],
)
def test_a_fork_waits_for_the_imports_of_other_threads_and_they_do_not_wait_for_it(module: str, use: str) -> None:
    program = """
        mesh = sw.DeviceMesh((2,), ("x",))
        cut = sw.TensorLayout(("x",), mesh).partition((8,))
        sharded = sw.distribute_tensor(np.arange(8), cut.layout)
        module, use = sys.argv[1:]

        class Slow:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == module and not started.is_set():
                    import concurrent.futures, logging

                    threads = concurrent.futures.ThreadPoolExecutor(1)
                    started.set()
                    time.sleep(0.2)
                    # A fork takes the locks of these two.
                    logging.getLogger("one")
                    threads.submit(int).result()

        sys.meta_path.insert(0, Slow)
        print(while_a_thread(lambda: eval(use), started, lambda: eval(use) == eval(use)))
    """
    assert run(program, module, use) == ["True"]


@pytest.mark.heavy
def test_a_fork_does_not_wait_for_ever_for_an_import_that_needs_a_lock_which_a_fork_takes() -> None:
    """The import of h5py registers its lock for forks, and takes it later."""
    program = """
        from shardwise import _fork

        _fork._LONGEST, lock = 0.5, threading.RLock()

        def imports():
            with _fork.importing:
                os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
                started.set()
                time.sleep(0.2)
                with lock:
                    pass

        cut = sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",))).partition((8,))
        for _ in range(2):
            print(while_a_thread(imports, started, lambda: len(sw.plan_reshard(cut, cut))))
        print(forked(lambda: len(sw.plan_reshard(cut, cut))))
    """
    assert run(program) == ["0", "0", "0"]


@pytest.mark.heavy
def test_a_child_does_not_wait_for_an_attribute_that_a_thread_makes() -> None:
    program = """
        class One:
            def __init__(self, value):
                self.value = value

            @cached_property
            def made(self):
                if self.value == 1:
                    started.set()
                    go_on.wait(60)
                return object() if self.value == 3 else self.value

        print(while_a_thread(lambda: One(1).made, started, lambda: One(2).made))
        same = One(3)
        print(same.made is same.made, "made" in vars(same), type(One.made) is cached_property)
    """
    assert run(program) == ["2", "True True True"]


def test_all_threads_have_the_attribute_that_was_there_first() -> None:
    program = """
        both = threading.Barrier(2)

        class One:
            @cached_property
            def made(self):
                both.wait(60)
                return object()

        one, found = One(), []
        threads = [threading.Thread(target=lambda: found.append(one.made)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(found[0] is found[1] is one.made)
    """
    assert run(program) == ["True"]


@pytest.mark.heavy
def test_a_lock_is_open_in_a_child_and_stays_held_in_its_parent() -> None:
    program = """
        lock, layout_map = ForkLock(), sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))

        def hold():
            with lock, layout_map._lock:
                started.set()
                go_on.wait(60)

        def use():
            with lock:
                with lock:
                    layout_map["w"] = ("x",)
            return len(layout_map)

        def held_by_others():
            taken = []
            thread = threading.Thread(target=lambda: [lock.__enter__(), taken.append(1), lock.__exit__()], daemon=True)
            thread.start()
            thread.join(0.1)
            return not taken

        print(while_a_thread(hold, started, use))
        with lock:
            print(held_by_others(), forked(use))
            with lock:
                pass
            print(held_by_others())
        time.sleep(0.1)
        print(held_by_others())
    """
    assert run(program) == ["1", "True 1", "True", "False"]


USE = """
    def work():
        mesh = sw.DeviceMesh((2, 4), ("x", "y"))
        rows, columns = (sw.TensorLayout(axes, mesh) for axes in ((("x", "y"), None), (None, ("x", "y"))))
        array = np.arange(1024.0).reshape(32, 32)
        moved = sw.distribute_tensor(array, rows).reshard(columns)
        assert (moved.numpy() == array).all()
        steps = sw.plan_reshard(rows.partition((32, 32)), columns.partition((32, 32))).collectives("f4")
        assert [step.kind for step in steps] == ["all-to-all"]
        assert mesh["x"].shape + mesh.transpose("y", "x").shape == (2, 4, 2)
        layout_map = sw.LayoutMap(mesh)
        layout_map[r"\\w*e"], layout_map["b"] = ("x", None), ("y",)
        assert layout_map["größe"].axes == ("x", None)
        assert layout_map.report({"größe": ((8, 8), "f4")}).tensors
        with sw.open_checkpoint(sys.argv[1]) as checkpoint:
            assert checkpoint["w"].read().tolist() == [[0, 1, 2], [3, 4, 5]]
        assert sw.packed.parse("(8@x 2)").size == 16
        assert rows.partition((32, 32))._repr_svg_()
        large = sw.TensorLayout(("x", "y"), mesh).partition((512, 512))
        assert large.locate(np.arange(large.size))[0][-1] == 7
        return True
"""


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(3))
def test_children_of_a_process_whose_threads_use_the_library(seed: int, tmp_path: Path) -> None:
    """From its first call on, when all is imported and made for the first time."""
    import numpy as np

    import shardwise as sw

    sw.save_checkpoint(tmp_path / "saved", {"w": np.arange(6.0).reshape(2, 3)}, to="hf")
    program = """
        import random
        pause, end, failed = random.Random(int(sys.argv[2])), threading.Event(), []

        def use():
            while not end.is_set():
                try:
                    work()
                except BaseException as error:
                    failed.append(error)
                    raise

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        children = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                os._exit(0 if work() else 1)
            children.append(child)
            time.sleep(pause.uniform(0, 0.01))
        print({os.waitpid(child, 0)[1] for child in children}, failed)
        end.set()
        for thread in threads:
            thread.join()
    """
    assert run(textwrap.dedent(USE) + textwrap.dedent(program), str(tmp_path / "saved"), str(seed)) == ["{0} []"]
