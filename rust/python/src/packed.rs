//! `_core.PackedPartition`: a partition whose shards may have several pieces; devices are device indices.

use std::sync::Arc;

use numpy::PyUntypedArray;
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyString, PyTuple},
};
use shardwise_core::{
    packed::{PER_DIM, Packed as CorePacked},
    tiling::{Tiling as CoreTiling, divided::Divided as _},
};

use crate::{
    arrays,
    convert::position,
    errors::{answer, guard, poll_among, to_py},
    layout::Layout,
    partition::{self, devices, partition_class, slices},
    views,
};

/// A layout with packed dims, applied to a shape.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct PackedPartition {
    pub(crate) core: Arc<CorePacked>,
}

partition_class!(PackedPartition {
    #[new]
    #[pyo3(signature = (layout, shape, uneven, /))]
    fn new(
        layout: &Layout,
        shape: &Bound<'_, PyAny>,
        uneven: &Bound<'_, PyString>,
    ) -> PyResult<Self> {
        guard(|| Ok(Self { core: partition::new(layout, shape, uneven, CorePacked::new)? }))
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
            let begins = arrays::filled(py, &[devices(&*self.core)? + 1], |out, poll| {
                self.core.begins_into(out, poll)?;
                count = out[out.len() - 1];
                shardwise_core::error::Result::Ok(())
            })?;
            let shape = [arrays::length("pieces", count)?, self.core.shape().len(), PER_DIM];
            let rows = arrays::filled(py, &shape, |out, poll| self.core.pieces_into(out, PER_DIM, poll))?;
            PyTuple::new(py, [begins, rows])
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

    /// The elements of every device's own array, padding included: int64 (devices,).
    fn array_sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[devices(&*self.core)?], |out, poll| self.core.elements_into(out, poll)))
    }

    /// The elements of every device's pieces, without padding: int64 (devices,).
    fn held_sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[devices(&*self.core)?], |out, poll| self.core.held_into(out, poll)))
    }

    /// For each device, in device-index order, a list of zero-copy views of `array`, one for each of its pieces.
    #[pyo3(signature = (array, /))]
    fn views<'py>(&self, py: Python<'py>, array: &Bound<'py, PyUntypedArray>) -> PyResult<Bound<'py, PyList>> {
        guard(|| {
            let devices = devices(&*self.core)?;
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
});
