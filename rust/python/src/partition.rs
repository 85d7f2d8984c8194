//! `_core.Partition`, and what it has in common with `_core.PackedPartition`: devices are device indices here; labels are the business of the Python layer.

use std::sync::Arc;

use numpy::{PyArray1, PyArrayMethods, PyUntypedArray};
use pyo3::{
    IntoPyObjectExt,
    prelude::*,
    types::{PyDict, PyList, PyString, PyTuple},
};
use shardwise_core::{
    error::Result as CoreResult,
    layout::Layout as CoreLayout,
    partition::{Bounds, Partition as CorePartition},
    tiling::divided::Divided as CoreDivided,
    uneven::Uneven,
};

use crate::{
    arrays,
    convert::{Numbers, integers, position},
    errors::{LayoutError, answer, detached, guard, poll_among, to_py},
    held::wrong,
    layout::Layout,
    memory::room,
    views,
};

/// The bytes that a dim takes at most, in the partition or in any answer.
const DIM_BYTES: usize = 256;

/// The dims that the reserve has room for.
const FEW_DIMS: usize = 64;

/// The methods of a class of partitions: those that all have, which ask the [`CoreDivided`] in `core`, and its own.
macro_rules! partition_class {
    ($class:ident { $($own:tt)* }) => {
        #[pymethods]
        impl $class {
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
                answer(py, || Ok(self.core.layout().total_shards()))
            }

            #[getter]
            fn replicas<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                answer(py, || Ok(self.core.layout().replicas()))
            }

            /// The device's one box as a tuple of slices.
            #[pyo3(signature = (device, /))]
            fn r#box<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyTuple>> {
                guard(|| $crate::partition::slices(py, $crate::partition::roomy(&*self.core)?.box_of(device).map_err(to_py)?))
            }

            /// The one box of a shard as a tuple of slices.
            #[pyo3(signature = (shard_id, /))]
            fn shard_box<'py>(&self, py: Python<'py>, shard_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
                guard(|| $crate::partition::slices(py, $crate::partition::roomy(&*self.core)?.box_of_shard(position("shard_id", shard_id)?).map_err(to_py)?))
            }

            /// The shape of the device's own array.
            #[pyo3(signature = (device, /))]
            fn shard_shape<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyTuple>> {
                guard(|| PyTuple::new(py, $crate::partition::roomy(&*self.core)?.array_shape(device).map_err(to_py)?))
            }

            /// Start and stop of every device's one box: int64 (devices, dims, 2).
            fn boxes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                guard(|| {
                    let shape = [$crate::partition::devices(&*self.core)?, self.core.shape().len(), 2];
                    arrays::written(py, &shape, |out, poll| self.core.boxes_into(out, poll))
                })
            }

            #[pyo3(signature = (device, /))]
            fn shard_id<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyAny>> {
                answer(py, || $crate::partition::roomy(&*self.core)?.layout().shard_id(device).map_err(to_py))
            }

            #[pyo3(signature = (device, /))]
            fn replica_id<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyAny>> {
                answer(py, || $crate::partition::roomy(&*self.core)?.layout().replica_id(device).map_err(to_py))
            }

            /// The shard id of every device: int64 (devices,).
            fn shard_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                guard(|| arrays::written(py, &[$crate::partition::devices(&*self.core)?], |out, poll| self.core.layout().shard_ids_into(out, poll)))
            }

            /// The replica id of every device: int64 (devices,).
            fn replica_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                guard(|| arrays::written(py, &[$crate::partition::devices(&*self.core)?], |out, poll| self.core.layout().replica_ids_into(out, poll)))
            }

            /// The device indices that hold a shard, in order.
            #[pyo3(signature = (shard_id, /))]
            fn devices_holding<'py>(&self, py: Python<'py>, shard_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
                answer(py, || $crate::partition::roomy(&*self.core)?.layout().devices_holding(position("shard_id", shard_id)?).map_err(to_py))
            }

            /// The first device index that holds a shard.
            #[pyo3(signature = (shard_id, /))]
            fn canonical_device<'py>(&self, py: Python<'py>, shard_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
                answer(py, || $crate::partition::roomy(&*self.core)?.layout().canonical_device(position("shard_id", shard_id)?).map_err(to_py))
            }

            /// The largest extent of a device's own array along each dim.
            #[getter]
            fn largest_shard_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
                guard(|| PyTuple::new(py, self.core.largest_shape()))
            }

            /// (shard id, local offset) of global offsets: ints of an int, arrays of an array.
            #[pyo3(signature = (offsets, /))]
            fn locate<'py>(&self, py: Python<'py>, offsets: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
                guard(|| $crate::partition::located(py, $crate::partition::roomy(&*self.core)?, offsets))
            }

            /// `locate` of an array, into two int64 arrays of its length.
            #[pyo3(signature = (offsets, shard_ids, local_offsets, /))]
            fn locate_into<'py>(
                &self,
                offsets: &Bound<'py, PyAny>,
                shard_ids: &Bound<'py, PyAny>,
                local_offsets: &Bound<'py, PyAny>,
            ) -> PyResult<()> {
                guard(|| {
                    $crate::partition::located_into($crate::partition::roomy(&*self.core)?, offsets, [shard_ids, local_offsets])
                })
            }

            /// The inverse of `locate`.
            #[pyo3(signature = (shard_ids, local_offsets, /))]
            fn global_offset<'py>(
                &self,
                py: Python<'py>,
                shard_ids: &Bound<'py, PyAny>,
                local_offsets: &Bound<'py, PyAny>,
            ) -> PyResult<Bound<'py, PyAny>> {
                guard(|| $crate::partition::found(py, $crate::partition::roomy(&*self.core)?, shard_ids, local_offsets))
            }

            /// The device's contiguous runs in the global array: int64 (runs, 2), offset and length.
            #[pyo3(signature = (device, /))]
            fn runs<'py>(&self, py: Python<'py>, device: i64) -> PyResult<Bound<'py, PyAny>> {
                guard(|| {
                    let runs = $crate::partition::roomy(&*self.core)?.runs(device).map_err(to_py)?;
                    arrays::written(py, &[arrays::length("runs", runs.count())?, 2], |out, poll| runs.fill_into(out, poll))
                })
            }

            $($own)*
        }
    };
}
pub(crate) use partition_class;

/// The partition, after asking for what a question about so many dims may take.
pub(crate) fn roomy<T: CoreDivided>(core: &T) -> PyResult<&T> {
    dims_room("the dims", core.shape().len())?;
    Ok(core)
}

/// Ask for what a partition of so many dims, or an answer of it, may take.
fn dims_room(what: &str, dims: usize) -> PyResult<()> {
    if dims > FEW_DIMS { room(what, dims.saturating_mul(DIM_BYTES)) } else { Ok(()) }
}

pub(crate) fn devices(core: &impl CoreDivided) -> PyResult<usize> {
    arrays::length("devices", roomy(core)?.layout().mesh().size())
}

/// The arguments of a new partition: a layout, a shape and an uneven rule.
pub(crate) fn new<T>(
    layout: &Layout,
    shape: &Bound<'_, PyAny>,
    uneven: &Bound<'_, PyString>,
    make: impl FnOnce(Arc<CoreLayout>, &[i64], Uneven) -> CoreResult<T>,
) -> PyResult<Arc<T>> {
    let shape = integers("shape", shape)?;
    dims_room("the partition", shape.len())?;
    // A lone surrogate cannot be a rule either; its replacement is refused by name.
    let rule = uneven.to_string_lossy().parse().map_err(to_py)?;
    Ok(Arc::new(make(layout.core.clone(), &shape, rule).map_err(to_py)?))
}

/// A layout without packed dims, applied to a shape.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct Partition {
    pub(crate) core: Arc<CorePartition>,
}

partition_class!(Partition {
    #[new]
    #[pyo3(signature = (layout, shape, uneven, /))]
    fn new(
        layout: &Layout,
        shape: &Bound<'_, PyAny>,
        uneven: &Bound<'_, PyString>,
    ) -> PyResult<Self> {
        guard(|| Ok(Self { core: new(layout, shape, uneven, CorePartition::new)? }))
    }

    /// A dict from each of `labels`, which stand in device-index order, to its tuple of slices. Equal slices, and the
    /// tuples of replicas, are one object.
    #[pyo3(signature = (labels, /))]
    fn devices_indices_map<'py>(&self, py: Python<'py>, labels: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyDict>> {
        guard(|| {
            let mut ids = arrays::scratch("devices", devices(&*self.core)?, 1)?;
            self.core.layout().shard_ids_into(&mut ids, &mut || Ok(())).map_err(to_py)?;
            let boxes = self.shard_boxes(py)?;
            let map = PyDict::new(py);
            for (number, (label, &id)) in labels.iter_borrowed().zip(&ids).enumerate() {
                poll_among(py, number)?;
                map.set_item(label, &boxes[id as usize])?;
            }
            Ok(map)
        })
    }

    /// A zero-copy view of `array` for each device, in device-index order.
    #[pyo3(signature = (array, /))]
    fn views<'py>(&self, py: Python<'py>, array: &Bound<'py, PyUntypedArray>) -> PyResult<Bound<'py, PyList>> {
        guard(|| {
            let mut bounds = arrays::scratch("views", devices(&*self.core)?, 2 * self.core.shape().len())?;
            self.core.boxes_into(&mut bounds, &mut || Ok(())).map_err(to_py)?;
            views::views(py, array, self.core.shape(), devices(&*self.core)?, &bounds)
        })
    }

    /// The view of one device.
    #[pyo3(signature = (array, device, /))]
    fn view<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyUntypedArray>,
        device: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let bounds = self.core.box_of(device).map_err(to_py)?;
            let flat: Vec<i64> = bounds.into_iter().flat_map(<[i64; 2]>::from).collect();
            views::views(py, array, self.core.shape(), 1, &flat)?.get_item(0)
        })
    }
});

impl Partition {
    /// The tuple of slices of every shard, in the order of the shard ids.
    fn shard_boxes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let cuts = self.core.dims();
        // The slices of all dims in a row, each dim's from its own start on.
        let mut slices = arrays::list("slices", cuts.iter().map(|cut| cut.shards() as usize).sum())?;
        let mut starts = Vec::with_capacity(cuts.len());
        for cut in cuts {
            starts.push(slices.len());
            for i in 0..cut.shards() {
                poll_among(py, i as usize)?;
                slices.push(views::slice(py, cut.bounds(i))?);
            }
        }
        let mut index = starts.clone();
        let shards = arrays::length("shards", self.core.layout().total_shards())?;
        let mut boxes = arrays::list("shards", shards)?;
        for number in 0..shards {
            poll_among(py, number)?;
            boxes.push(PyTuple::new(py, index.iter().map(|&i| &slices[i]))?);
            // One further along the last dim that has not come to its end, whose slices end where the next dim's start.
            let mut end = slices.len();
            for (i, &start) in index.iter_mut().zip(&starts).rev() {
                *i += 1;
                if *i < end {
                    break;
                }
                (*i, end) = (start, start);
            }
        }
        Ok(boxes)
    }
}

/// A box as a tuple of slices.
pub(crate) fn slices(py: Python<'_>, bounds: Bounds) -> PyResult<Bound<'_, PyTuple>> {
    let slices = bounds.into_iter().map(|bounds| views::slice(py, bounds)).collect::<PyResult<Vec<_>>>()?;
    PyTuple::new(py, slices)
}

/// (shard id, local offset) of global offsets: ints of an int, arrays of an array.
pub(crate) fn located<'py>(
    py: Python<'py>,
    core: &dyn CoreDivided,
    offsets: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyTuple>> {
    let array = match Numbers::new("offsets", offsets)? {
        Numbers::One(offset) => {
            return PyTuple::new(py, <[i64; 2]>::from(core.locate_one(offset).map_err(to_py)?));
        }
        Numbers::Many(array) => array,
    };
    let (offsets, elements) = (array.slice()?, arrays::elements(&array.shape)?);
    let mut locals = py.None().into_bound(py);
    let shard_ids = arrays::new_array(py, &array.shape, elements, &mut |ids| {
        locals = arrays::new_array(py, &array.shape, elements, &mut |locals| {
            detached(py, |poll| core.locate_into(offsets, ids, locals, poll))
        })?;
        Ok(())
    })?;
    PyTuple::new(py, [shard_ids, locals])
}

/// `located` of an array, into arrays that are there.
pub(crate) fn located_into<'py>(
    core: &dyn CoreDivided,
    offsets: &Bound<'py, PyAny>,
    out: [&Bound<'py, PyAny>; 2],
) -> PyResult<()> {
    let array = Numbers::new("offsets", offsets)?;
    let [shard_ids, locals] = out.map(Bound::cast::<PyArray1<i64>>);
    let (mut shard_ids, mut locals) =
        (shard_ids?.try_readwrite().map_err(wrong)?, locals?.try_readwrite().map_err(wrong)?);
    let (shard_ids, locals) = (shard_ids.as_slice_mut().map_err(wrong)?, locals.as_slice_mut().map_err(wrong)?);
    let given = array.slice()?;
    if [shard_ids.len(), locals.len()] != [given.len(); 2] {
        return Err(wrong("shard_ids and local_offsets must be as long as offsets"));
    }
    detached(offsets.py(), |poll| core.locate_into(given, shard_ids, locals, poll))
}

/// The inverse of `located`.
pub(crate) fn found<'py>(
    py: Python<'py>,
    core: &dyn CoreDivided,
    shard_ids: &Bound<'py, PyAny>,
    local_offsets: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let (ids, locals) = match (Numbers::new("shard_ids", shard_ids)?, Numbers::new("local_offsets", local_offsets)?) {
        (Numbers::One(id), Numbers::One(local)) => {
            let offset = core.global_offset_one(id, local).map_err(to_py)?;
            return offset.into_bound_py_any(py);
        }
        (Numbers::Many(ids), Numbers::Many(locals)) if ids.shape == locals.shape => (ids, locals),
        (Numbers::Many(ids), Numbers::Many(locals)) => {
            let (a, b) = (ids.shape, locals.shape);
            let message = format!("shard_ids has shape {a:?} but local_offsets has {b:?}; they must be equal");
            return Err(LayoutError::new_err(message));
        }
        _ => {
            let message = "shard_ids and local_offsets must both be integers, or both arrays of one shape";
            return Err(LayoutError::new_err(message));
        }
    };
    let (shard_ids, locals_slice) = (ids.slice()?, locals.slice()?);
    arrays::filled(py, &ids.shape, |out, poll| core.global_offset_into(shard_ids, locals_slice, out, poll))
}
