//! `_core.CollectiveSearch` and `_core.priced_collectives`.

use std::sync::Arc;

use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyList, PyTuple},
};
use shardwise_core::{
    collective::{
        Obstacle,
        cost::Links,
        given::{Given, priced},
        kinds::Kind,
        search::{Sequence, obstacle, sequence},
        views::{Side, Views},
    },
    mesh::Mesh as CoreMesh,
    partition::Partition as CorePartition,
};

use crate::{
    convert::strings,
    errors::{answer, detached, guard, to_py},
    layout::Layout,
    mesh::Mesh,
    partition::Partition,
    tiling::numbers,
};

/// The facts about a change of layout that are known before its collectives are looked for.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct CollectiveSearch {
    source: Arc<CorePartition>,
    destination: Arc<CorePartition>,
    meshes: [Arc<CoreMesh>; 2],
    views: Result<Views, Obstacle>,
}

#[pymethods]
impl CollectiveSearch {
    /// `same` holds, for each destination device, the source device that it is, or -1; none if they are the same.
    #[new]
    #[pyo3(signature = (src_mesh, src, dst_mesh, dst, same, /))]
    fn new(
        py: Python<'_>,
        src_mesh: &Mesh,
        src: &Partition,
        dst_mesh: &Mesh,
        dst: &Partition,
        same: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        guard(|| {
            let same = same.map(|same| numbers("same", same)).transpose()?;
            if same.as_ref().is_some_and(|same| same.len() as i64 != dst_mesh.core.size()) {
                return Err(PyValueError::new_err("same must have one entry for each destination device"));
            }
            let (source, destination) = (src.core.clone(), dst.core.clone());
            let meshes = [src_mesh.core.clone(), dst_mesh.core.clone()];
            let views = py.detach(|| {
                let [from, to] = &meshes;
                let from = Side { mesh: from, refined: source.mesh() };
                let to = Side { mesh: to, refined: destination.mesh() };
                match obstacle(&source, &destination) {
                    Some(obstacle) => Err(obstacle),
                    None => Views::new(from, to, same.as_deref()),
                }
            });
            Ok(Self { source, destination, meshes, views })
        })
    }

    /// The reason why there are no collectives, as a word and a sentence; none if there are.
    #[getter]
    fn obstacle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.views.as_ref().err().map(described)))
    }

    /// For each common sub-axis, the axes of the source's and of the destination's mesh that it is part of.
    #[getter]
    fn axes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            let [from, to] = &self.meshes;
            let factors = self.views.as_ref().map(Views::factors).unwrap_or_default();
            let names = factors.iter().map(|factor| {
                (from.names()[factor.sub_axis.axis].as_str(), to.names()[factor.destination_axis].as_str())
            });
            Ok(names.collect::<Vec<_>>())
        })
    }

    /// The steps, as `priced_collectives` gives them, with links for each of `axes`; or the obstacle.
    #[pyo3(signature = (itemsize, bandwidth, latency, /))]
    fn steps<'py>(
        &self,
        py: Python<'py>,
        itemsize: i64,
        bandwidth: Vec<f64>,
        latency: Vec<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let views = match &self.views {
                Ok(views) => views,
                Err(obstacle) => return Ok(described(obstacle).into_pyobject(py)?.into_any()),
            };
            let links = links(bandwidth, latency, views.factors().len())?;
            let found = detached(py, |poll| sequence(views, &self.source, &self.destination, itemsize, &links, poll))?;
            match found {
                Ok(found) => steps(py, &found).map(Bound::into_any),
                Err(obstacle) => Ok(described(&obstacle).into_pyobject(py)?.into_any()),
            }
        })
    }
}

/// Collectives given as (kind, axes, gathered dim, cut dim, layout after the collective or none), priced one after another, with
/// links for each axis of the mesh: tuples (kind, axes, gathered dim, cut dim, bytes, seconds, specs, unreduced).
#[pyfunction]
#[pyo3(signature = (mesh, src, steps, itemsize, bandwidth, latency, /))]
pub(crate) fn priced_collectives<'py>(
    py: Python<'py>,
    mesh: &Mesh,
    src: &Partition,
    steps: &Bound<'py, PyList>,
    itemsize: i64,
    bandwidth: Vec<f64>,
    latency: Vec<f64>,
) -> PyResult<Bound<'py, PyList>> {
    guard(|| {
        let links = links(bandwidth, latency, mesh.core.sizes().len())?;
        let given = steps.iter().map(|step| given(&step)).collect::<PyResult<Vec<_>>>()?;
        let found = py.detach(|| priced(&mesh.core, &src.core, &given, itemsize, &links)).map_err(to_py)?;
        self::steps(py, &found)
    })
}

type GivenFields<'py> = (String, Bound<'py, PyTuple>, Option<usize>, Option<usize>, Option<PyRef<'py, Layout>>);

fn given(step: &Bound<'_, PyAny>) -> PyResult<Given> {
    let (kind, axes, from_dim, to_dim, after): GivenFields<'_> = step.extract()?;
    let kind = Kind::ALL.into_iter().find(|known| known.name() == kind);
    let kind = kind.ok_or_else(|| PyValueError::new_err("this kind is not a collective"))?;
    let after = after.map(|layout| layout.core.clone());
    Ok(Given { kind, axes: strings("axes", &axes)?, from_dim, to_dim, after })
}

fn links(bandwidth: Vec<f64>, latency: Vec<f64>, count: usize) -> PyResult<Links> {
    if bandwidth.len() != count || latency.len() != count {
        return Err(PyValueError::new_err(format!("links must have one entry for each axis, {count} in all")));
    }
    Ok(Links { bandwidth, latency })
}

fn described(obstacle: &Obstacle) -> (&'static str, String) {
    (obstacle.name(), obstacle.to_string())
}

fn steps<'py>(py: Python<'py>, found: &Sequence) -> PyResult<Bound<'py, PyList>> {
    let names = |factors: &[usize]| PyTuple::new(py, found.views.names(factors));
    let steps = found.steps.iter().map(|step| {
        let collective = &step.collective;
        let specs = collective.after.specs.iter().map(|spec| names(spec)).collect::<PyResult<Vec<_>>>()?;
        let tuple = (
            collective.kind.name(),
            names(&collective.axes)?,
            collective.from_dim,
            collective.to_dim,
            step.bytes,
            step.seconds,
            PyTuple::new(py, specs)?,
            names(&collective.after.unreduced)?,
        );
        tuple.into_pyobject(py)
    });
    PyList::new(py, steps.collect::<PyResult<Vec<_>>>()?)
}
