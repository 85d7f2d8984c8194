//! `_core.PackedPartition`: a partition whose shards may have several pieces; devices are device indices.

use std::sync::Arc;

use numpy::PyUntypedArray;
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyString, PyTuple},
};
use shardwise_core::{
    packed::{PER_DIM, Packed as CorePacked, runs::PackedRuns},
    tiling::Tiling as CoreTiling,
};

use crate::{
    arrays,
    convert::{integers, position},
    errors::{answer, guard, poll_among, to_py},
    layout::Layout,
    partition::{found, located, slices},
    views,
};

/// A layout with packed dims, applied to a shape.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct PackedPartition {
    pub(crate) core: Arc<CorePacked>,
}

#[pymethods]
impl PackedPartition {
    #[new]
    #[pyo3(signature = (layout, shape, uneven, /))]
    fn new(layout: &Layout, shape: &Bound<'_, PyAny>, uneven: &Bound<'_, PyString>) -> PyResult<Self> {
        guard(|| {
            let shape = integers("shape", shape)?;
            let rule = uneven.to_string_lossy().parse().map_err(to_py)?;
            let core = CorePacked::new(layout.core.clone(), &shape, rule).map_err(to_py)?;
            Ok(Self { core: Arc::new(core) })
        })
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.shape()))
    }

    #[getter]
    fn size<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.size()))
    }

    #[getter]
    fn total_shards<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.shards().total_shards()))
    }

    #[getter]
    fn replicas<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.shards().replicas()))
    }

    /// The device's one box as a tuple of slices.
    #[pyo3(signature = (device, /))]
    fn r#box<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| slices(py, self.core.box_of(device).map_err(to_py)?))
    }

    /// The one box of a shard as a tuple of slices.
    #[pyo3(signature = (shard_id, /))]
    fn shard_box<'py>(&self, py: Python<'py>, shard_id: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| self.r#box(py, self.core.shards().canonical_device(position("shard_id", shard_id)?).map_err(to_py)?))
    }

    /// The shape of the device's own array.
    #[pyo3(signature = (device, /))]
    fn shard_shape<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.array_shape(device).map_err(to_py)?))
    }

    /// The device's pieces: a tuple of slices each, and the start in its own array.
    #[pyo3(signature = (device, /))]
    fn pieces<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyList>> {
        guard(|| views::pieces(py, &*self.core, device))
    }

    /// The pieces of all devices: where each device's begin, int64 (devices + 1,), and start, stop and local start of each
    /// along each dim, int64 (pieces, dims, 3).
    fn all_pieces<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| {
            let mut count = 0;
            let begins = arrays::filled(py, &[self.devices()? + 1], |out, poll| {
                self.core.begins_into(out, poll)?;
                count = out[out.len() - 1];
                shardwise_core::error::Result::Ok(())
            })?;
            let shape = [arrays::length("pieces", count)?, self.core.shape().len(), PER_DIM];
            let rows = arrays::filled(py, &shape, |out, poll| self.core.pieces_into(out, PER_DIM, poll))?;
            PyTuple::new(py, [begins, rows])
        })
    }

    /// Start and stop of every device's one box: int64 (devices, dims, 2).
    fn boxes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let shape = [self.devices()?, self.core.shape().len(), 2];
            arrays::filled(py, &shape, |out, poll| self.core.boxes_into(out, poll))
        })
    }

    /// A dict from each of `labels`, which stand in device-index order, to its tuple of slices.
    #[pyo3(signature = (labels, /))]
    fn devices_indices_map<'py>(&self, py: Python<'py>, labels: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyDict>> {
        guard(|| {
            let map = PyDict::new(py);
            for (device, label) in labels.iter_borrowed().enumerate() {
                poll_among(py, device)?;
                map.set_item(label, slices(py, self.core.box_of(device as i64).map_err(to_py)?)?)?;
            }
            Ok(map)
        })
    }

    #[pyo3(signature = (device, /))]
    fn shard_id<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || self.core.shards().shard_id(device).map_err(to_py))
    }

    #[pyo3(signature = (device, /))]
    fn replica_id<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || self.core.shards().replica_id(device).map_err(to_py))
    }

    /// The shard id of every device: int64 (devices,).
    fn shard_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[self.devices()?], |out, poll| self.core.shards().shard_ids_into(out, poll)))
    }

    /// The replica id of every device: int64 (devices,).
    fn replica_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[self.devices()?], |out, poll| self.core.shards().replica_ids_into(out, poll)))
    }

    /// The device indices that hold a shard, in order.
    #[pyo3(signature = (shard_id, /))]
    fn devices_holding<'py>(&self, py: Python<'py>, shard_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || self.core.shards().devices_holding(position("shard_id", shard_id)?).map_err(to_py))
    }

    /// The first device index that holds a shard.
    #[pyo3(signature = (shard_id, /))]
    fn canonical_device<'py>(&self, py: Python<'py>, shard_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || self.core.shards().canonical_device(position("shard_id", shard_id)?).map_err(to_py))
    }

    /// The largest extent of a device's own array along each dim.
    #[getter]
    fn largest_shard_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.largest_shape()))
    }

    /// The elements of every device's own array, padding included: int64 (devices,).
    fn array_sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[self.devices()?], |out, poll| self.core.elements_into(out, poll)))
    }

    /// The elements of every device's pieces, without padding: int64 (devices,).
    fn held_sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[self.devices()?], |out, poll| self.core.held_into(out, poll)))
    }

    /// (shard id, local offset) of global offsets: ints of an int, arrays of an array.
    #[pyo3(signature = (offsets, /))]
    fn locate<'py>(&self, py: Python<'py>, offsets: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| located(py, &*self.core, offsets))
    }

    /// The global offsets of places in shards.
    #[pyo3(signature = (shard_ids, local_offsets, /))]
    fn global_offset<'py>(
        &self,
        py: Python<'py>,
        shard_ids: &Bound<'py, PyAny>,
        local_offsets: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| found(py, &*self.core, shard_ids, local_offsets))
    }

    /// The device's contiguous runs in the global array: int64 (runs, 2), offset and length.
    #[pyo3(signature = (device, /))]
    fn runs<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let runs = PackedRuns::of(&self.core, device).map_err(to_py)?;
            arrays::filled(py, &[arrays::length("runs", runs.count())?, 2], |out, poll| runs.fill_into(out, poll))
        })
    }

    /// For each device, in device-index order, a list of zero-copy views of `array`, one for each of its pieces.
    #[pyo3(signature = (array, /))]
    fn views<'py>(&self, py: Python<'py>, array: &Bound<'py, PyUntypedArray>) -> PyResult<Bound<'py, PyList>> {
        guard(|| {
            let devices = self.devices()?;
            let mut begins = arrays::scratch("devices", devices + 1, 1)?;
            self.core.begins_into(&mut begins, &mut || Ok(())).map_err(to_py)?;
            let count = arrays::length("pieces", begins[devices])?;
            let mut bounds = arrays::scratch("pieces", count, 2 * self.core.shape().len())?;
            self.core.pieces_into(&mut bounds, 2, &mut || Ok(())).map_err(to_py)?;
            let all = views::views(py, array, self.core.shape(), count, &bounds)?;
            let list = PyList::empty(py);
            for (device, ends) in begins.windows(2).enumerate() {
                poll_among(py, device)?;
                list.append(all.get_slice(ends[0] as usize, ends[1] as usize))?;
            }
            Ok(list)
        })
    }

    /// The views of one device, one for each of its pieces.
    #[pyo3(signature = (array, device, /))]
    fn view<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyUntypedArray>,
        device: i64,
    ) -> PyResult<Bound<'py, PyList>> {
        guard(|| {
            let (rank, mut bounds, mut count) = (self.core.shape().len(), Vec::new(), 0);
            let origin = vec![0; rank];
            let pieces = CoreTiling::visit_pieces(&*self.core, device, &mut |piece| {
                count += 1;
                bounds.resize(2 * rank * count, 0);
                piece.region.bounds_into(&origin, &mut bounds[2 * rank * (count - 1)..]);
                Ok(())
            });
            pieces.map_err(to_py)?;
            views::views(py, array, self.core.shape(), count, &bounds)
        })
    }
}

impl PackedPartition {
    fn devices(&self) -> PyResult<usize> {
        arrays::length("devices", self.core.mesh().size())
    }
}
