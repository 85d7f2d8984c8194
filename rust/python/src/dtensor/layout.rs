//! The layout.

use std::sync::{Arc, OnceLock};

use numpy::{PyUntypedArray, PyUntypedArrayMethods};
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyInt, PyList, PyTuple},
};
use shardwise_core::{
    dtensor::{ANY, Error, Layout, LayoutKind, Mesh},
    error::Error as CoreError,
};

use super::{CoreResult, DtensorMesh, hash_of, mesh::numbers, outside, parsed_text, room_to_read, room_to_write, text};
use crate::{
    arrays::{filled, length, list, scratch},
    convert::{Numbers, integer, integers, listed, strings},
    errors::{answer, detached, guard, to_py},
};

/// The Rust half of `shardwise.dtensor.Layout`.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct DtensorLayout {
    layout: Layout,
    hash: OnceLock<u64>,
}

impl DtensorLayout {
    fn made(layout: CoreResult<Layout>) -> PyResult<Self> {
        Ok(Self { layout: layout.map_err(to_py)?, hash: OnceLock::new() })
    }
}

impl DtensorLayout {
    /// The entries of a tuple of as many plain ints as the layout has dims, if these are few: the usual case, which is
    /// called in loops and need not allocate.
    fn small_index(&self, index: &Bound<'_, PyAny>) -> Option<[i64; 8]> {
        let tuple = index.cast_exact::<PyTuple>().ok()?;
        let mut small = [0; 8];
        if tuple.len() != self.layout.rank() || tuple.len() > small.len() {
            return None;
        }
        for (slot, item) in small.iter_mut().zip(tuple.iter_borrowed()) {
            *slot = item.cast_exact::<PyInt>().ok()?.extract().ok()?;
        }
        Some(small)
    }

    fn shard_ids<'py>(&self, py: Python<'py>, indices: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let Numbers::Many(array) = Numbers::new("offset_tuple", indices)? else {
            return Err(PyTypeError::new_err("offset_tuple is not an array"));
        };
        let (rows, columns) = (array.shape[0], array.shape[1]);
        if columns != self.layout.rank() {
            return Err(to_py(Error::IndexRank { given: columns, rank: self.layout.rank() }));
        }
        let flat = array.slice()?;
        let mut refused = None;
        let ids = filled(py, &[rows], |out, _| {
            self.layout.shard_ids_into(flat, out).map_err(|error| {
                refused = Some(error);
                CoreError::Interrupted // Ends the kernel; what is said is the dialect's own error.
            })
        });
        ids.map_err(|error| refused.map_or(error, to_py))
    }
}

#[pymethods]
impl DtensorLayout {
    #[staticmethod]
    fn new(specs: &Bound<'_, PyAny>, mesh: &DtensorMesh) -> PyResult<Self> {
        guard(|| {
            let specs = strings("sharding_specs", specs)?;
            for (dim, spec) in specs.iter().enumerate() {
                refuse_any(dim, spec, &mesh.mesh)?;
            }
            Self::made(Layout::new(LayoutKind::Static, &specs, Arc::clone(&mesh.mesh)))
        })
    }

    #[staticmethod]
    fn replicated(mesh: &DtensorMesh, rank: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(|| Self::made(Layout::replicated(Arc::clone(&mesh.mesh), integer("rank", rank)?)))
    }

    #[staticmethod]
    fn cut_at(
        mesh: &DtensorMesh,
        spec: &Bound<'_, PyAny>,
        rank: &Bound<'_, PyAny>,
        axis: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        guard(|| {
            let (rank, axis) = (integer("rank", rank)?, integer("axis", axis)?);
            let spec = text("the mesh dimension", spec)?;
            refuse_any(usize::try_from(axis).unwrap_or_default(), spec, &mesh.mesh)?;
            Self::made(Layout::cut_at(Arc::clone(&mesh.mesh), spec, rank, axis))
        })
    }

    #[staticmethod]
    fn on_single_device(mesh: &DtensorMesh) -> PyResult<Self> {
        guard(|| Self::made(Layout::on_single_device(Arc::clone(&mesh.mesh))))
    }

    #[staticmethod]
    fn from_text(text: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(|| Self::made(Layout::from_text(parsed_text("layout text", text)?)))
    }

    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        guard(|| {
            room_to_read("the message", data.len())?;
            Self::made(Layout::from_bytes(data))
        })
    }

    fn to_text<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            room_to_write(self.layout.mesh())?;
            Ok(self.layout.to_text())
        })
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        guard(|| {
            room_to_write(self.layout.mesh())?;
            Ok(PyBytes::new(py, &self.layout.to_bytes()))
        })
    }

    #[getter]
    fn mesh(&self) -> PyResult<DtensorMesh> {
        guard(|| Ok(DtensorMesh::of(Arc::clone(self.layout.mesh()))))
    }

    #[getter]
    fn specs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.layout.spec_texts().collect::<Vec<_>>()))
    }

    #[getter]
    fn rank<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.layout.rank()))
    }

    /// The number that TensorFlow gives the form of the layout, in `LayoutType`.
    #[getter]
    fn layout_type<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            Ok(match self.layout.kind() {
                LayoutKind::Empty => 0_u8,
                LayoutKind::Static => 1,
                LayoutKind::SingleDevice => 2,
                LayoutKind::Parted => 3,
            })
        })
    }

    fn delete(&self, dims: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(|| Self::made(self.layout.delete(&integers("dims", dims)?)))
    }

    fn to_parted(&self) -> PyResult<Self> {
        guard(|| Self::made(self.layout.to_parted()))
    }

    fn is_fully_replicated(&self) -> PyResult<bool> {
        guard(|| Ok(self.layout.is_fully_replicated()))
    }

    fn is_batch_parallel(&self) -> PyResult<bool> {
        guard(|| Ok(self.layout.is_batch_parallel()))
    }

    fn num_shards<'py>(&self, py: Python<'py>, dim: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || self.layout.num_shards(integer("idx", dim)?).map_err(to_py))
    }

    fn all_num_shards<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || self.layout.all_num_shards().map_err(to_py))
    }

    fn global_shape<'py>(&self, py: Python<'py>, shape: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.layout.global_shape(&sizes("local_shape", shape)?).map_err(to_py)?))
    }

    fn local_shape<'py>(&self, py: Python<'py>, shape: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.layout.local_shape(&sizes("global_shape", shape)?).map_err(to_py)?))
    }

    /// The shard id of one index, or of each row of an array of them.
    fn shard_id<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            if let Some(small) = self.small_index(index) {
                let id = self.layout.shard_id(&small[..self.layout.rank()]).map_err(to_py)?;
                return Ok(id.into_pyobject(py)?.into_any());
            }
            if index.cast::<PyUntypedArray>().is_ok_and(|array| array.ndim() == 2) {
                return self.shard_ids(py, index);
            }
            let index = integers("offset_tuple", index).map_err(outside("offset_tuple"))?;
            Ok(self.layout.shard_id(&index).map_err(to_py)?.into_pyobject(py)?.into_any())
        })
    }

    /// For every device its shard index, as a tuple; the devices that hold one shard share it.
    fn offset_to_shard<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        guard(|| {
            let partition = self.layout.unit_partition().map_err(to_py)?;
            let devices = length("devices", partition.mesh().size())?;
            let mut ids = scratch("devices", devices, 1)?;
            detached(py, |poll| partition.layout().shard_ids_into(&mut ids, poll))?;
            let tuples = index_tuples(py, partition.shape())?;
            PyList::new(py, ids.into_iter().map(|id| &tuples[id as usize]))
        })
    }

    fn __eq__(&self, other: &Self) -> PyResult<bool> {
        guard(|| Ok(self.layout == other.layout))
    }

    fn __hash__(&self) -> PyResult<u64> {
        guard(|| Ok(*self.hash.get_or_init(|| hash_of(&self.layout))))
    }
}

/// All indices into an array of `shape`, in C order; equal numbers are one object.
fn index_tuples<'py>(py: Python<'py>, shape: &[i64]) -> PyResult<Vec<Bound<'py, PyTuple>>> {
    let longest = shape.iter().copied().max().unwrap_or(0);
    let numbers = numbers(py, longest)?;
    let count = shape.iter().product();
    let mut digits = vec![0_usize; shape.len()];
    let mut tuples = list("shards", length("shards", count)?)?;
    for _ in 0..count {
        tuples.push(PyTuple::new(py, digits.iter().map(|&digit| &numbers[digit]))?);
        for (digit, &size) in digits.iter_mut().zip(shape).rev() {
            *digit += 1;
            if (*digit as i64) < size {
                break;
            }
            *digit = 0;
        }
    }
    Ok(tuples)
}

/// Callers cannot ask for `any`, which only TensorFlow's propagation uses.
fn refuse_any(dim: usize, spec: &str, mesh: &Mesh) -> PyResult<()> {
    if spec != ANY {
        return Ok(());
    }
    Err(to_py(Error::UnknownSpec { dim, spec: spec.to_owned(), axes: mesh.dim_names().to_vec() }))
}

/// The size of a dim, where `None` is unknown, which TensorFlow writes as -1.
fn sizes(name: &str, values: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let items = (values.len().unwrap_or(0), values.try_iter()?);
    listed(name, items, |i, value| if value.is_none() { Ok(-1) } else { integer(&format!("{name}[{i}]"), value) })
}
