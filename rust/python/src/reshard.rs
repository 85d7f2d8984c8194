//! `_core.ReshardPlan`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::PyList,
};
use shardwise_core::{
    copy::{overlap::Disjoint, run::run, strided::Strided},
    error::{Error, Result as CoreResult},
    reshard::{plan::Plan, rounds::rounds},
};

use crate::{
    arrays,
    convert::Numbers,
    errors::{detached, guard, to_py},
    partition::Partition,
    views,
};

/// How often a running plan looks for signals and reports its progress.
const POLL_EVERY: Duration = Duration::from_millis(20);

/// What must move from one partition to another.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct ReshardPlan {
    core: Arc<Plan>,
}

#[pymethods]
impl ReshardPlan {
    /// `same` holds, for each destination device, the source device that it is, or -1.
    #[new]
    #[pyo3(signature = (src, dst, same, /))]
    fn new(py: Python<'_>, src: &Partition, dst: &Partition, same: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(|| {
            let (src, dst, same) = (src.core.clone(), dst.core.clone(), numbers("same", same)?);
            let core = py.detach(|| Plan::new(src, dst, same)).map_err(to_py)?;
            Ok(Self { core: Arc::new(core) })
        })
    }

    /// The plan from boxes made by hand, (boxes, dims, 2).
    #[staticmethod]
    #[pyo3(signature = (boxes, dst, /))]
    fn from_boxes(py: Python<'_>, boxes: &Bound<'_, PyAny>, dst: &Partition) -> PyResult<Self> {
        guard(|| {
            let (boxes, dst) = (numbers("boxes", boxes)?, dst.core.clone());
            let core = py.detach(|| Plan::from_boxes(boxes, dst)).map_err(to_py)?;
            Ok(Self { core: Arc::new(core) })
        })
    }

    /// The number of transfers.
    #[getter]
    fn count(&self) -> usize {
        self.core.transfers()
    }

    /// How many partial sums make one value.
    #[getter]
    fn addends(&self) -> usize {
        self.core.addends()
    }

    /// int64 (transfers, 2 + 2 dims): source device, destination device, start, stop.
    fn transfers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let shape = [self.core.transfers(), self.core.row()];
            arrays::filled(py, &shape, |out, poll| self.core.transfers_into(out, poll))
        })
    }

    /// The boxes that stay where they are, in rows like those of `transfers`.
    fn kept<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[self.core.kept(), self.core.row()], |out, _| self.core.kept_into(out)))
    }

    /// The pieces of the transfers in the order of their rounds, and the number of pieces up to the end of each round.
    #[pyo3(signature = (budget, itemsize, /))]
    fn rounds<'py>(
        &self,
        py: Python<'py>,
        budget: i64,
        itemsize: i64,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        guard(|| {
            let (row, rank) = (self.core.row(), self.core.destination().shape().len());
            let done = detached(py, |poll| rounds(&self.core.transfer_rows()?, rank, budget, itemsize, poll))?;
            let copy = |numbers: &[i64], shape: &[usize]| {
                arrays::filled(py, shape, |out, _| {
                    out.copy_from_slice(numbers);
                    Ok(())
                })
            };
            let ends: Vec<i64> = done.ends.iter().map(|&end| end as i64).collect();
            Ok((copy(&done.rows, &[done.rows.len() / row, row])?, copy(&ends, &[ends.len()])?))
        })
    }

    /// Copies into `destinations` what they are to hold, out of `sources`; `outputs[d]` is the position among the
    /// destinations of device `d`'s array, or -1 if nothing is to be copied for it. Of partial sums, the first addend.
    /// Calls `progress` with the bytes done and the bytes in all.
    #[pyo3(signature = (sources, destinations, outputs, progress, /))]
    fn run(
        &self,
        py: Python<'_>,
        sources: &Bound<'_, PyList>,
        destinations: &Bound<'_, PyList>,
        outputs: Vec<i64>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        guard(|| {
            let (_held, sources) = memory(sources, false)?;
            let (_kept, destinations) = memory(destinations, true)?;
            self.check_shapes(&sources, self.core.source_boxes(), &[])?;
            let outputs: Vec<Option<usize>> = outputs.iter().map(|&output| usize::try_from(output).ok()).collect();
            self.check_shapes(&destinations, self.core.destination_boxes(), &outputs)?;
            let mut failure = None;
            let report = |done: i64, total: i64| -> PyResult<()> {
                Python::attach(|py| progress.as_ref().map_or(Ok(()), |call| call.call1(py, (done, total)).map(drop)))
            };
            let done = detached(py, |poll| {
                let regions = Disjoint::new(&sources, &destinations)?;
                let mut last: Option<Instant> = None;
                run(&self.core, regions, &outputs, &mut |done, total| -> CoreResult<()> {
                    if done < total && last.is_some_and(|last| last.elapsed() < POLL_EVERY) {
                        return Ok(());
                    }
                    last = Some(Instant::now());
                    report(done, total).map_err(|error| {
                        failure = Some(error);
                        Error::Interrupted
                    })?;
                    poll()
                })
            });
            failure.map_or(done, Err)
        })
    }
}

impl ReshardPlan {
    /// That the regions have the extents of the boxes; `outputs`, if there are any, says whose boxes they are.
    fn check_shapes(
        &self,
        regions: &[Strided],
        boxes: CoreResult<Vec<i64>>,
        outputs: &[Option<usize>],
    ) -> PyResult<()> {
        let rank = self.core.destination().shape().len();
        let boxes = boxes.map_err(to_py)?;
        let fits = |device: usize, region: &Strided| {
            let bounds = boxes.get(device * rank * 2..(device + 1) * rank * 2);
            let extents = bounds.map(|b| b.chunks_exact(2).map(|side| side[1] - side[0]));
            extents.is_some_and(|extents| extents.eq(region.dims().iter().map(|dim| dim.0)))
        };
        let all = if outputs.is_empty() {
            regions.iter().enumerate().all(|(device, region)| fits(device, region))
                && (rank == 0 || regions.len() * rank * 2 == boxes.len())
        } else {
            let used = outputs.iter().enumerate().filter_map(|(device, output)| output.map(|output| (device, output)));
            used.clone().all(|(device, output)| regions.get(output).is_some_and(|region| fits(device, region)))
                && used.clone().map(|(_, output)| output).eq(0..regions.len())
        };
        let itemsize = regions.first().map(Strided::itemsize);
        if all && regions.iter().all(|region| Some(region.itemsize()) == itemsize) {
            return Ok(());
        }
        Err(PyValueError::new_err(
            "the arrays are not of the shapes, or not of one item size, that the plan is made for",
        ))
    }
}

/// The memory of arrays, which are held meanwhile.
fn memory<'py>(list: &Bound<'py, PyList>, written: bool) -> PyResult<(Vec<Bound<'py, PyUntypedArray>>, Vec<Strided>)> {
    let arrays = list.iter().map(|item| Ok(item.cast_into::<PyUntypedArray>()?)).collect::<PyResult<Vec<_>>>()?;
    for array in &arrays {
        if array.dtype().has_object() {
            return Err(PyTypeError::new_err("object arrays hold references, which cannot be copied as bytes"));
        }
        if written && !views::writeable(array) {
            return Err(PyValueError::new_err("a destination is read-only"));
        }
    }
    let regions = arrays.iter().map(views::strided).collect();
    Ok((arrays, regions))
}

/// An array of integers as a vector.
fn numbers(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    match Numbers::new(name, value)? {
        Numbers::One(one) => Ok(vec![one]),
        Numbers::Many(array) => Ok(array.slice()?.to_vec()),
    }
}
