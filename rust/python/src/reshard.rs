//! `_core.ReshardPlan` and `_core.collectives`.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::{PyList, PyTuple},
};
use shardwise_core::{
    copy::{overlap::Disjoint, run::run, strided::Strided},
    error::{Error, Result as CoreResult},
    plan::{
        Plan, Transfer,
        places::{Places, Window},
        rounds::rounds,
    },
    reshard::collectives::{Links, sequence},
};

use crate::{
    arrays,
    errors::{detached, guard, to_py},
    partition::Partition,
    tiling::{numbers, tiling},
    views,
};

/// How often a running plan looks for signals and reports its progress.
const POLL_EVERY: Duration = Duration::from_millis(20);

/// What must move from one tiling to another.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct ReshardPlan {
    core: Plan,
    /// The places of the source's and of the destination's pieces, once they are asked for.
    places: [OnceLock<Places>; 2],
}

#[pymethods]
impl ReshardPlan {
    /// `same` holds, for each destination holder, the source holder that it is, or -1.
    #[new]
    #[pyo3(signature = (src, dst, same, /))]
    fn new(py: Python<'_>, src: &Bound<'_, PyAny>, dst: &Bound<'_, PyAny>, same: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(|| {
            let (src, dst, same) = (tiling("src", src)?, tiling("dst", dst)?, numbers("same", same)?);
            let core = detached(py, |poll| Plan::new(src, dst, same, poll))?;
            Ok(Self { core, places: [OnceLock::new(), OnceLock::new()] })
        })
    }

    /// The number of transfers.
    #[getter]
    fn count(&self) -> PyResult<usize> {
        guard(|| Ok(self.core.transfers()))
    }

    /// How many partial sums make one value.
    #[getter]
    fn addends(&self) -> PyResult<usize> {
        guard(|| Ok(self.core.addends()))
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

    /// The numbers of the pieces, the source's and the destination's: int64 (transfers, 2).
    fn pieces<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[self.core.transfers(), 2], |out, _| self.core.pieces_into(out)))
    }

    /// The same for the boxes that stay.
    fn kept_pieces<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[self.core.kept(), 2], |out, _| self.core.kept_pieces_into(out)))
    }

    /// Where each transfer's box lies in what the source's pieces (`side` 0) or the destination's (1) are seen in: int64
    /// (transfers, dims, 2). `kept`: the same for the boxes that stay.
    #[pyo3(signature = (side, kept, /))]
    fn local_boxes<'py>(&self, py: Python<'py>, side: usize, kept: bool) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let places = self.places(py, side)?;
            let plan = &self.core;
            let rank = plan.destination().shape().len();
            let count = if kept { plan.kept() } else { plan.transfers() };
            arrays::filled(py, &[count, rank, 2], |out, poll| {
                let mut rows = out.chunks_exact_mut((2 * rank).max(1));
                let mut write = |transfer: Transfer<'_>| {
                    let origin = match side {
                        0 => places.origin(transfer.source, transfer.source_piece),
                        _ => places.origin(transfer.destination, transfer.destination_piece),
                    };
                    let Some(row) = rows.next() else { return Ok(()) };
                    for ((bounds, (start, stop)), origin) in
                        row.chunks_exact_mut(2).zip(transfer.region.sides()).zip(origin)
                    {
                        (bounds[0], bounds[1]) = (start - origin, stop - origin);
                    }
                    Ok(())
                };
                let all = 0..plan.destination().holders() as usize;
                if kept { plan.visit_kept(all, &mut write) } else { plan.visit_transfers(all, poll, &mut write) }
            })
        })
    }

    /// Where a piece lies: the position in the tensor that is position 0 of what it is seen in; and `None` if that is its
    /// holder's whole array, or the offset in a flat one and the piece's shape.
    #[pyo3(signature = (side, holder, piece, /))]
    fn place<'py>(&self, py: Python<'py>, side: usize, holder: i64, piece: i64) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| {
            let places = self.places(py, side)?;
            let window = match places.window(holder, piece) {
                Window::Whole => None,
                Window::Flat { offset, piece } => Some((offset, PyTuple::new(py, piece.extents())?)),
            };
            (PyTuple::new(py, places.origin(holder, piece))?, window).into_pyobject(py)
        })
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
            let done = detached(py, |poll| rounds(&self.core.transfer_rows(poll)?, rank, budget, itemsize, poll))?;
            let copy = |numbers: &[i64], shape: &[usize]| {
                arrays::filled(py, shape, |out, _| {
                    out.copy_from_slice(numbers);
                    CoreResult::Ok(())
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
            let outputs: Vec<Option<usize>> = outputs.iter().map(|&output| usize::try_from(output).ok()).collect();
            self.check_counts(sources.len(), destinations.len(), &outputs)?;
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
    /// The places of the pieces of one side, found once.
    fn places(&self, py: Python<'_>, side: usize) -> PyResult<&Places> {
        let place = self.places.get(side).ok_or_else(|| PyValueError::new_err("side must be 0 or 1"))?;
        if let Some(places) = place.get() {
            return Ok(places);
        }
        let tiling = if side == 0 { self.core.source() } else { self.core.destination() };
        let places = detached(py, |poll| Places::new(&**tiling, poll))?;
        Ok(place.get_or_init(|| places))
    }

    /// That there is an array for every holder. Their shapes are checked by the caller, and whether a box lies in its
    /// array once more where it is copied.
    fn check_counts(&self, sources: usize, destinations: usize, outputs: &[Option<usize>]) -> PyResult<()> {
        let used = outputs.iter().filter_map(|output| *output);
        if sources as i64 == self.core.source().holders() && used.eq(0..destinations) {
            return Ok(());
        }
        Err(PyValueError::new_err("the arrays are not as many as the plan's holders"))
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

/// The cheapest sequence found, as tuples (kind, axes, gathered dim, cut dim, bytes, seconds, specs, unreduced), with
/// axes by position; none if there is no sequence.
#[pyfunction]
#[pyo3(signature = (src, dst, itemsize, bandwidth, latency, /))]
pub(crate) fn collectives<'py>(
    py: Python<'py>,
    src: &Partition,
    dst: &Partition,
    itemsize: i64,
    bandwidth: Vec<f64>,
    latency: Vec<f64>,
) -> PyResult<Option<Bound<'py, PyList>>> {
    guard(|| {
        let axes = src.core.mesh().sizes().len();
        if bandwidth.len() != axes || latency.len() != axes {
            return Err(PyValueError::new_err(format!("links must have one entry for each of the {axes} mesh axes")));
        }
        let links = Links { bandwidth, latency };
        let found = py.detach(|| sequence(&src.core, &dst.core, itemsize, &links));
        let Some(steps) = found else { return Ok(None) };
        let steps = steps.into_iter().map(|step| {
            let specs =
                step.after.specs.into_iter().map(|spec| PyTuple::new(py, spec)).collect::<PyResult<Vec<_>>>()?;
            let tuple = (
                step.kind.name(),
                PyTuple::new(py, step.axes)?,
                step.from_dim,
                step.to_dim,
                step.bytes,
                step.seconds,
                PyTuple::new(py, specs)?,
                PyTuple::new(py, step.after.unreduced)?,
            );
            tuple.into_pyobject(py)
        });
        PyList::new(py, steps.collect::<PyResult<Vec<_>>>()?).map(Some)
    })
}
