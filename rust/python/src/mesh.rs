//! `_core.Mesh`.

use std::sync::Arc;

use pyo3::{
    prelude::*,
    types::{PyString, PyTuple},
};
use shardwise_core::mesh::Mesh as CoreMesh;

use crate::{
    arrays,
    convert::{integers, position, positions, strings},
    errors::{answer, guard, to_py},
    memory::room,
};

/// The bytes that an axis takes at most, with what it is made of on the way.
const NAME_BYTES: usize = 256;

/// Named axes with sizes; devices by their row-major index.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct Mesh {
    pub(crate) core: Arc<CoreMesh>,
}

#[pymethods]
impl Mesh {
    #[new]
    #[pyo3(signature = (shape, axis_names, /))]
    fn new(shape: &Bound<'_, PyAny>, axis_names: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(|| {
            let sizes = integers("shape", shape)?;
            room("the mesh", sizes.len().saturating_mul(NAME_BYTES))?;
            let names = strings("axis_names", axis_names)?;
            Ok(Self { core: Arc::new(CoreMesh::new(&names, &sizes).map_err(to_py)?) })
        })
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.sizes()))
    }

    #[getter]
    fn axis_names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.names()))
    }

    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.strides()))
    }

    #[getter]
    fn size<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.size()))
    }

    /// The coordinate of one device.
    #[pyo3(signature = (index, /))]
    fn coordinate<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.coordinate(position("index", index)?).map_err(to_py)?))
    }

    /// `index` itself, if the mesh has such a device.
    #[pyo3(signature = (index, /))]
    fn checked<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || self.core.check(position("index", index)?).map_err(to_py))
    }

    /// The device index that a default label spells, `"cpu:0"`, `"cpu:1"`, …; `None` if the mesh does not have it.
    #[pyo3(signature = (label, /))]
    fn default_index<'py>(&self, py: Python<'py>, label: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.index_of_default(label)))
    }

    /// The device index at a coordinate.
    #[pyo3(signature = (coordinate, /))]
    fn device_index<'py>(&self, py: Python<'py>, coordinate: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || self.core.device_index(&positions("coordinate", coordinate)?).map_err(to_py))
    }

    /// The coordinates of all devices: int64 (devices, axes).
    fn coordinates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let shape = [arrays::length("devices", self.core.size())?, self.core.sizes().len()];
            arrays::written(py, &shape, |out, poll| self.core.coordinates_into(out, poll))
        })
    }
}

impl Mesh {
    fn index_of_default(&self, label: &Bound<'_, PyAny>) -> Option<i64> {
        let digits = label.cast::<PyString>().ok()?.to_str().ok()?.strip_prefix("cpu:")?;
        // One spelling for each number: no sign, no leading zero.
        let canonical = digits == "0" || (digits.starts_with(|c| matches!(c, '1'..='9')));
        if !canonical || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        digits.parse().ok().filter(|index| *index < self.core.size())
    }
}
