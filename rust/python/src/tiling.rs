//! `_core.Tiling`: holders are numbers here; labels are the business of the Python layer.

use std::sync::Arc;

use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::{PyBool, PyList, PyTuple},
};
use shardwise_core::{
    region::{Region, Regions},
    tiling::{
        BoxTree as CoreBoxTree, Tiling as CoreTiling,
        boxes::{Array, Boxes, one_each},
        flat::FlatRanges,
        grid::Grid,
    },
};

use crate::{
    arrays,
    convert::{Numbers, integers},
    errors::{answer, detached, guard, to_py},
    memory,
    packed::PackedPartition,
    partition::Partition,
    views,
};

/// The boxes of a tensor that each holder has, where that is not a partition.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct Tiling {
    core: Arc<dyn CoreTiling>,
}

#[pymethods]
impl Tiling {
    /// One holder for each box of `bounds`, (boxes, dims, 2).
    #[staticmethod]
    #[pyo3(signature = (shape, bounds, count, replicas, /))]
    fn one_each(
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        bounds: &Bound<'_, PyAny>,
        count: usize,
        replicas: bool,
    ) -> PyResult<Self> {
        guard(|| {
            let shape = integers("shape", shape)?;
            let bounds = Numbers::new("boxes", bounds)?;
            let bounds = bounds.slice()?;
            let core = py.detach(|| one_each(&shape, count, bounds, replicas)).map_err(to_py)?;
            Ok(Self { core })
        })
    }

    /// Holders with any boxes: tuples of bounds (boxes, dims, 2), their number, and the array: True for the one box's own,
    /// False for a flat one, or its shape and the starts in it.
    #[staticmethod]
    #[pyo3(signature = (shape, holders, replicas, /))]
    fn boxes(py: Python<'_>, shape: &Bound<'_, PyAny>, holders: &Bound<'_, PyList>, replicas: bool) -> PyResult<Self> {
        guard(|| {
            let shape = integers("shape", shape)?;
            let parse = |holder: Bound<'_, PyAny>| -> PyResult<(Regions, Array)> {
                let (bounds, count, array): (Bound<'_, PyAny>, usize, Bound<'_, PyAny>) = holder.extract()?;
                let regions = Regions::of_bounds(shape.len(), count, &numbers("boxes", &bounds)?).map_err(to_py)?;
                let array = if array.is_instance_of::<PyBool>() {
                    if array.extract()? { Array::Own } else { Array::Flat }
                } else {
                    let (own, starts): (Bound<'_, PyAny>, Bound<'_, PyAny>) = array.extract()?;
                    Array::Given { shape: integers("arrays", &own)?, starts: numbers("start", &starts)? }
                };
                Ok((regions, array))
            };
            let mut parsed = arrays::list("holders", holders.len())?;
            for holder in holders.iter() {
                parsed.push(parse(holder)?);
            }
            Ok(Self { core: Arc::new(detached(py, |poll| Boxes::new(&shape, &parsed, replicas, poll))?) })
        })
    }

    /// A regular grid of chunks.
    #[staticmethod]
    #[pyo3(signature = (shape, chunks, padded, /))]
    fn grid(shape: &Bound<'_, PyAny>, chunks: &Bound<'_, PyAny>, padded: bool) -> PyResult<Self> {
        guard(|| {
            let grid = Grid::new(&integers("shape", shape)?, &integers("chunks", chunks)?, padded).map_err(to_py)?;
            Ok(Self { core: Arc::new(grid) })
        })
    }

    /// Ranges of the flattened tensor: int64 (holders, 2).
    #[staticmethod]
    #[pyo3(signature = (shape, ranges, replicas, /))]
    fn flat(shape: &Bound<'_, PyAny>, ranges: &Bound<'_, PyAny>, replicas: bool) -> PyResult<Self> {
        guard(|| {
            let ranges = numbers("ranges", ranges)?;
            let ranges = ranges.chunks_exact(2).map(|ends| (ends[0], ends[1]));
            let flat = FlatRanges::new(&integers("shape", shape)?, ranges, replicas).map_err(to_py)?;
            Ok(Self { core: Arc::new(flat) })
        })
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.shape()))
    }

    /// The shape of the chunks, if the holders are all the chunks of a regular grid, in C order.
    #[getter]
    fn chunks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || self.core.chunks().map(|chunks| PyTuple::new(py, chunks)).transpose())
    }

    /// The number of holders.
    #[getter]
    fn holders<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.holders()))
    }

    /// The shape of a holder's own array.
    #[pyo3(signature = (holder, /))]
    fn array_shape<'py>(&self, py: Python<'py>, holder: i64) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.array_shape(holder).map_err(to_py)?))
    }

    /// The elements of every holder's own array: int64 (holders,).
    fn array_sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let holders = arrays::length("holders", self.core.holders())?;
            arrays::filled(py, &[holders], |out, poll| self.core.array_sizes_into(out, poll))
        })
    }

    /// The elements of every holder's pieces: int64 (holders,).
    fn held_sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let holders = arrays::length("holders", self.core.holders())?;
            arrays::filled(py, &[holders], |out, poll| self.core.held_sizes_into(out, poll))
        })
    }

    /// A holder's pieces: a tuple of slices each, and the start in its own array, a tuple or the offset in a flat one.
    #[pyo3(signature = (holder, /))]
    fn pieces<'py>(&self, py: Python<'py>, holder: i64) -> PyResult<Bound<'py, PyList>> {
        guard(|| views::pieces(py, &*self.core, holder))
    }

    /// Check that the pieces hold each element of the tensor, once except for replicas.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        guard(|| detached(py, |poll| self.core.check(poll)))
    }
}

/// No box has more numbers, and so many bytes for each dim are needed for the rows that the tree works with.
const LONGEST_ROW: usize = 1 << 28;
const ROWS_AT_ONCE: usize = 64;

/// Boxes that may share elements, found by where they lie.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct BoxTree {
    core: CoreBoxTree,
    rank: usize,
}

#[pymethods]
impl BoxTree {
    /// The tree of the boxes of `rows`, int64 of (boxes, 2 * rank): starts, then stops.
    #[new]
    #[pyo3(signature = (rows, rank, /))]
    fn new(py: Python<'_>, rows: &Bound<'_, PyAny>, rank: usize) -> PyResult<Self> {
        guard(|| {
            let rows = Numbers::new("boxes", rows)?;
            let rows = whole_rows(rows.slice()?, rank)?;
            memory::room("boxes", rank.saturating_mul(ROWS_AT_ONCE))?;
            let core = detached(py, |poll| {
                let mut regions = Regions::new(rank);
                regions.reserve(rows.len() / (2 * rank))?;
                rows.chunks_exact(2 * rank).try_for_each(|row| regions.push(Region::of_row(row)))?;
                CoreBoxTree::new(regions, poll)
            })?;
            Ok(Self { core, rank })
        })
    }

    /// The pairs of a box of the tree and one of `rows` that share elements: int64 of (2, pairs).
    #[pyo3(signature = (rows, /))]
    fn pairs<'py>(&self, py: Python<'py>, rows: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let rows = Numbers::new("boxes", rows)?;
            let rows = whole_rows(rows.slice()?, self.rank)?;
            memory::room("boxes", self.rank.saturating_mul(ROWS_AT_ONCE))?;
            let [ours, theirs] = detached(py, |poll| self.core.pairs(rows, poll))?;
            arrays::filled(py, &[2, ours.len()], |out, _| {
                let (first, second) = out.split_at_mut(ours.len());
                first.copy_from_slice(&ours);
                second.copy_from_slice(&theirs);
                Ok(())
            })
        })
    }
}

/// Rows of `start…, stop…`, whole ones.
fn whole_rows(rows: &[i64], rank: usize) -> PyResult<&[i64]> {
    let length = rank.checked_mul(2).filter(|&length| length > 0 && length <= LONGEST_ROW);
    if !length.is_some_and(|length| rows.len().is_multiple_of(length)) {
        return Err(PyValueError::new_err(format!("boxes: {} numbers are not boxes of {rank} dims", rows.len())));
    }
    Ok(rows)
}

/// The core's tiling of a `_core.Tiling`, a `_core.Partition` or a `_core.PackedPartition`.
pub(crate) fn tiling(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Arc<dyn CoreTiling>> {
    if let Ok(partition) = value.cast::<Partition>() {
        return Ok(partition.get().core.clone());
    }
    if let Ok(packed) = value.cast::<PackedPartition>() {
        return Ok(packed.get().core.clone());
    }
    let tiling = value.cast::<Tiling>().map_err(|_| PyTypeError::new_err(format!("{name} must be a Tiling")))?;
    Ok(tiling.get().core.clone())
}

/// An array of integers as a vector.
pub(crate) fn numbers(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let numbers = Numbers::new(name, value)?;
    let slice = numbers.slice()?;
    let mut copy = arrays::scratch(name, slice.len(), 1)?;
    copy.copy_from_slice(slice);
    Ok(copy)
}
