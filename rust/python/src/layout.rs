//! `_core.Layout`.

use std::sync::Arc;

use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyList, PyString, PyTuple},
};
use shardwise_core::{
    layout::Layout as CoreLayout,
    sections::{DimSpec, Factor, Pad, PartSpec},
};

use crate::{
    arrays,
    convert::{repr, strings},
    errors::{answer, guard, to_py},
    memory::room,
    mesh::Mesh,
};

/// The bytes that a dim or a name takes at most, with what it is made of on the way.
const NAME_BYTES: usize = 512;

/// For each dim, the mesh axes that cut it.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct Layout {
    pub(crate) core: Arc<CoreLayout>,
}

#[pymethods]
impl Layout {
    /// `axes` holds `None`, an axis name, or a tuple of names for each dim; or, for a packed one, a list of parts, tuples of
    /// factors (an unknown one is minus its ratio), the number of the cut one, axes, rule, the most shards, whether it is
    /// split, the unit, and padding: the multiple, and whether that is meant for each shard.
    #[new]
    #[pyo3(signature = (mesh, axes, unreduced, /))]
    fn new(mesh: &Mesh, axes: &Bound<'_, PyTuple>, unreduced: &Bound<'_, PyTuple>) -> PyResult<Self> {
        guard(|| {
            let names = axes.iter_borrowed().map(|entry| 1 + entry.cast::<PyTuple>().map_or(0, |names| names.len()));
            room("the layout", names.sum::<usize>().saturating_add(unreduced.len()).saturating_mul(NAME_BYTES))?;
            let unreduced = strings("unreduced", unreduced)?;
            let core = if axes.iter_borrowed().any(|entry| entry.is_instance_of::<PyList>()) {
                let dims = axes.iter().enumerate().map(|(dim, entry)| match entry.cast::<PyList>() {
                    Ok(list) => Ok(DimSpec::Parts(listed_parts(dim, list)?)),
                    Err(_) => spec(dim, &entry).map(DimSpec::Axes),
                });
                CoreLayout::packed(mesh.core.clone(), &dims.collect::<PyResult<Vec<_>>>()?, &unreduced)
            } else {
                let specs = axes.iter().enumerate().map(|(dim, entry)| spec(dim, &entry));
                CoreLayout::new(mesh.core.clone(), &specs.collect::<PyResult<Vec<_>>>()?, &unreduced)
            };
            Ok(Self { core: Arc::new(core.map_err(to_py)?) })
        })
    }

    /// The number of shards of each dim.
    #[getter]
    fn num_shards<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.num_shards()))
    }

    /// The names and the sizes of the axes of the mesh, which is factored where specs name sub-axes.
    #[getter]
    fn mesh_axes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            let mesh = self.core.mesh();
            Ok((PyTuple::new(py, mesh.names())?, PyTuple::new(py, mesh.sizes())?))
        })
    }

    /// For each dim, the positions among `mesh_axes` of those that cut it, major first.
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| {
            let dims = self.core.specs().iter().map(|spec| PyTuple::new(py, spec)).collect::<PyResult<Vec<_>>>()?;
            PyTuple::new(py, dims)
        })
    }

    /// The positions among `mesh_axes` of those over which the values are partial sums.
    #[getter]
    fn unreduced<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.unreduced_axes()))
    }

    /// The positions among `mesh_axes` of those that replicate.
    #[getter]
    fn replicated<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.replicated_axes()))
    }
}

/// One entry of `axes` as a list of axis names, major first.
fn spec(dim: usize, entry: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    if entry.is_none() {
        return Ok(Vec::new());
    }
    if entry.is_instance_of::<PyString>() || entry.is_instance_of::<PyTuple>() {
        let one = PyTuple::new(entry.py(), [entry])?;
        let names = entry.cast::<PyTuple>().unwrap_or(&one);
        return strings(&format!("axes[{dim}]"), names);
    }
    Err(PyTypeError::new_err(format!(
        "axes[{dim}] must be None, an axis name or a tuple of axis names, got {}",
        repr(entry)
    )))
}

type PartTuple<'py> =
    (Vec<i64>, Option<usize>, Bound<'py, PyTuple>, Option<String>, Option<i64>, bool, Option<i64>, Option<(i64, bool)>);

/// The parts of a packed dim, as the Python layer has checked and written them.
fn listed_parts(dim: usize, list: &Bound<'_, PyList>) -> PyResult<Vec<PartSpec<String>>> {
    let mut parts = arrays::list("parts", list.len())?;
    for entry in list.iter() {
        let (factors, cut, axes, uneven, at_most, split, unit, pad): PartTuple<'_> = entry.extract()?;
        let factor = |size: i64| if size < 0 { Factor::Free(size.saturating_neg()) } else { Factor::Known(size) };
        parts.push(PartSpec {
            factors: factors.into_iter().map(factor).collect(),
            cut,
            axes: strings(&format!("axes[{dim}]"), &axes)?,
            uneven: uneven.map(|rule| rule.parse()).transpose().map_err(to_py)?,
            at_most,
            split,
            unit,
            pad: pad.map(|(multiple, each)| Pad { multiple, each }),
        });
    }
    Ok(parts)
}
