"""The same bytes by Dask, MPI and Ray, where these are installed; and the examples, as they stand."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from tests.store.stores import Store

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning")

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "clusters"
TASK = 1 << 16


def need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def run(*command: object, timeout: int = 3600) -> str:
    """Run a command with this interpreter's tools first on the path, and give what it prints."""
    # Where the package is not installed, as in a checkout, it is found all the same; children of children too.
    package = str(Path(sw.__file__).parents[1])
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [package, str(ROOT), os.environ.get("PYTHONPATH")])),
        "RAY_AUTH_MODE": "disabled",
    }
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def mpiexec() -> str:
    need("mpi4py")
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("there is no mpiexec")
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    tensors = {f"{i}.weight": rng.standard_normal((64, 1000 + i)).astype("f4") for i in range(6)}
    sw.save_checkpoint(tmp_path / "src.safetensors", {**tensors, "norm": np.ones(7, "f2")})
    sw.reshard_checkpoint(tmp_path / "src.safetensors", tmp_path / "direct", rules())
    return tmp_path / "src.safetensors"


def rules() -> sw.LayoutMap:
    layout_map = sw.LayoutMap(sw.DeviceMesh((4,), ("model",)))
    layout_map[r"\.weight$"] = ("model", None)
    return layout_map


def same_bytes(folder: Path) -> None:
    expected = {path.name: path.read_bytes() for path in (folder.parent / "direct").iterdir()}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


def reshard(source: str, target: str, executor: Any, **settings: Any) -> sw.store.WriteReport:
    report = sw.reshard_checkpoint(source, target, rules(), executor=executor, task_bytes=TASK, **settings)
    assert isinstance(report, sw.store.WriteReport)
    return report


DASK = """
import os, random, signal, sys
from dask.distributed import Client, LocalCluster
from tests.store.write.test_clusters import reshard

def killed(done, total):
    # While tasks are under way, one of the workers dies; its nanny starts another.
    if random.random() < float(sys.argv[3]):
        os.kill(random.choice(list(client.run(os.getpid).values())), signal.SIGKILL)

if __name__ == "__main__":
    random.seed(2)
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, Client(cluster) as client:
        reshard(sys.argv[1], sys.argv[2], client.get_executor(), progress=killed)
"""


@pytest.mark.parametrize("chance", [0, 0.1])
def test_dask(source: Path, tmp_path: Path, chance: float) -> None:
    need("distributed")
    (tmp_path / "script.py").write_text(DASK)
    run(sys.executable, tmp_path / "script.py", source, tmp_path / "new", chance)
    same_bytes(tmp_path / "new")


MPI = """
import sys
from mpi4py.futures import MPIPoolExecutor
from tests.store.write.test_clusters import reshard

if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        assert executor.num_workers == 3
        reshard(sys.argv[1], sys.argv[2], executor)
"""


def test_mpi(source: Path, tmp_path: Path) -> None:
    command = mpiexec()
    (tmp_path / "script.py").write_text(MPI)
    script = ("-m", "mpi4py.futures", tmp_path / "script.py", source, tmp_path / "new")
    run(command, "-n", "4", sys.executable, *script)
    same_bytes(tmp_path / "new")


RAY = """
import runpy, sys
import ray
from tests.store.write.test_clusters import EXAMPLES, reshard

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
reshard(sys.argv[1], sys.argv[2], runpy.run_path(str(EXAMPLES / "ray_reshard.py"))["RayExecutor"]())
"""


def test_ray(source: Path, tmp_path: Path) -> None:
    need("ray")
    (tmp_path / "script.py").write_text(RAY)
    run(sys.executable, tmp_path / "script.py", source, tmp_path / "new")
    same_bytes(tmp_path / "new")


class Doomed(Executor):
    """An executor one of whose workers is killed while it has a task, the first time that it is given it."""

    def __init__(self, inner: Any, marker: str) -> None:
        self.inner, self.marker, self.num_workers = inner, marker, inner.num_workers

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self.inner.submit(dying, self.marker, fn, *args)


def dying(marker: str, fn: Callable[..., Any], *args: Any) -> Any:
    if args[0].number == 9 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return fn(*args)


DOOMED_RAY = """
import runpy, sys
import ray
from tests.store.write.test_clusters import EXAMPLES, Doomed, reshard

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
executor = runpy.run_path(str(EXAMPLES / "ray_reshard.py"))["RayExecutor"]()
reshard(sys.argv[1], sys.argv[2], Doomed(executor, sys.argv[3]))
"""


def test_a_worker_of_ray_is_killed(source: Path, tmp_path: Path) -> None:
    """Ray starts another, and the task is run again."""
    need("ray")
    (tmp_path / "script.py").write_text(DOOMED_RAY)
    run(sys.executable, tmp_path / "script.py", source, tmp_path / "new", tmp_path / "killed")
    assert (tmp_path / "killed").exists()
    same_bytes(tmp_path / "new")


DOOMED_MPI = """
import sys
from mpi4py.futures import MPIPoolExecutor
from tests.store.write.test_clusters import Doomed, reshard

if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        reshard(sys.argv[1], sys.argv[2], Doomed(executor, sys.argv[3]), sync=False, resume=True)
"""


def test_a_process_of_mpi_is_killed(source: Path, tmp_path: Path) -> None:
    """The job ends with it, as MPI has it; the same job, started again, does what is left."""
    command = mpiexec()
    (tmp_path / "script.py").write_text(DOOMED_MPI)
    job = (tmp_path / "script.py", source, tmp_path / "new", tmp_path / "killed")
    with pytest.raises(AssertionError):
        run(command, "-n", "4", sys.executable, "-m", "mpi4py.futures", *job)
    assert (tmp_path / "killed").exists()
    assert not (tmp_path / "new").exists()
    run(command, "-n", "4", sys.executable, "-m", "mpi4py.futures", *job)
    same_bytes(tmp_path / "new")


STORE = """
import os, random, signal, sys
from dask.distributed import Client, LocalCluster
import shardwise as sw
from tests.store.write.test_clusters import rules

def killed(done, total):
    if not random.randrange(4):
        os.kill(random.choice(list(client.run(os.getpid).values())), signal.SIGKILL)

if __name__ == "__main__":
    random.seed(3)
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, Client(cluster) as client:
        place = sw.ObjectPath(sys.argv[2], endpoint_url=sys.argv[3])
        sw.reshard_checkpoint(sys.argv[1], place, rules(), executor=client.get_executor(), progress=killed)
"""


def test_objects_by_dask_whose_workers_are_killed(source: Path, tmp_path: Path, s3: Store) -> None:
    need("distributed")
    assert s3.toxic is not None
    (tmp_path / "script.py").write_text(STORE)
    place = s3.place("new")
    run(sys.executable, tmp_path / "script.py", source, place, s3.toxic.url)
    assert s3.objects(place) == {path.name: path.read_bytes() for path in (tmp_path / "direct").iterdir()}


@pytest.mark.parametrize(("example", "module"), [("dask_reshard.py", "distributed"), ("ray_reshard.py", "ray")])
def test_the_examples(example: str, module: str) -> None:
    need(module)
    assert "the same tensors" in run(sys.executable, EXAMPLES / example)


def test_the_example_of_mpi() -> None:
    found = run(mpiexec(), "-n", "4", sys.executable, "-m", "mpi4py.futures", EXAMPLES / "mpi_reshard.py")
    assert "the same tensors" in found


@pytest.mark.heavy
def test_the_example_of_slurm(source: Path, tmp_path: Path) -> None:
    command = tmp_path / "bin" / "shardwise"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom shardwise.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    whole = f'PATH="{command.parent}:$PATH" bash "{EXAMPLES}/slurm_array.sh"'
    assert "the same tensors" in run("bash", "-c", whole)
    # As Slurm starts it.
    plan = sw.plan_checkpoint(source, tmp_path / "new", rules(), task_bytes=TASK)
    plan.save(tmp_path / "new.swplan")
    for part in (2, 3, 1):
        one = f'SLURM_ARRAY_TASK_ID={part} SLURM_ARRAY_TASK_COUNT=3 {whole} "{tmp_path}/new.swplan"'
        run("bash", "-c", one)
    plan.commit()
    same_bytes(tmp_path / "new")
