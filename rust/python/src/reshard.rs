//! `_core.ReshardPlan`.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::{PyBytes, PyList, PyTuple},
};
use shardwise_core::{
    copy::{contest::Way, overlap::Disjoint, run::run, strided::Strided},
    error::{Error, Result as CoreResult},
    plan::{
        End, Plan,
        model::{Model, Sort},
        places::{Places, Seen},
        program::Programs,
        rounds::rounds,
    },
};

use crate::{
    arrays,
    convert::integers,
    errors::{answer, detached, guard, poll_among, to_py},
    memory::room,
    tiling::{numbers, tiling},
    views,
};

/// The time between two looks for signals, and reports of progress, of a running plan.
const POLL_EVERY: Duration = Duration::from_millis(20);

/// The boxes that must move from one tiling to another.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct ReshardPlan {
    core: Plan,
    /// The places of the source's and of the destination's pieces, once they are asked for.
    places: [OnceLock<Places>; 2],
    /// The programs of all holders, once one is asked for.
    programs: OnceLock<Programs>,
}

#[pymethods]
impl ReshardPlan {
    /// `same` holds, for each destination holder, the source holder that it is, or -1; `senders`, if given, who sends each
    /// transfer.
    #[new]
    #[pyo3(signature = (src, dst, same, senders, /))]
    fn new(
        py: Python<'_>,
        src: &Bound<'_, PyAny>,
        dst: &Bound<'_, PyAny>,
        same: &Bound<'_, PyAny>,
        senders: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        guard(|| {
            let (src, dst, same) = (tiling("src", src)?, tiling("dst", dst)?, numbers("same", same)?);
            let senders = senders.map(|senders| numbers("senders", senders)).transpose()?;
            let core = detached(py, |poll| match &senders {
                None => Plan::new(src, dst, same, poll),
                Some(senders) => Plan::with_senders(src, dst, same, senders, poll),
            })?;
            Ok(Self { core, places: [OnceLock::new(), OnceLock::new()], programs: OnceLock::new() })
        })
    }

    /// The number of transfers.
    #[getter]
    fn count<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.transfers()))
    }

    /// The number of partial sums that make one value.
    #[getter]
    fn addends<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.addends()))
    }

    /// The bytes of int64 (transfers, 2 + 2 dims): source device, destination device, start, stop.
    fn transfers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        guard(|| {
            let shape = [self.core.transfers(), self.core.row()];
            arrays::frozen(py, &shape, |out, poll| self.core.transfers_into(out, poll))
        })
    }

    /// The boxes that stay where they are, in rows like those of `transfers`.
    fn kept<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        guard(|| arrays::frozen(py, &[self.core.kept(), self.core.row()], |out, _| self.core.kept_into(out)))
    }

    /// The numbers of the pieces, the source's and the destination's: int64 (transfers, 2).
    fn pieces<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[self.core.transfers(), 2], |out, _| self.core.pieces_into(out)))
    }

    /// The same for the boxes that stay.
    fn kept_pieces<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| arrays::filled(py, &[self.core.kept(), 2], |out, _| self.core.kept_pieces_into(out)))
    }

    /// The box of each transfer in what the source's pieces (`side` 0) or the destination's (1) are
    /// seen in: int64 (transfers, dims, 2). `kept`: the same for the boxes that stay.
    #[pyo3(signature = (side, kept, /))]
    fn local_boxes<'py>(&self, py: Python<'py>, side: usize, kept: bool) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let (plan, end) = (&self.core, end(side)?);
            let count = if kept { plan.kept() } else { plan.transfers() };
            let places = if plan.is_far_larger(end, count) { None } else { Some(self.places(py, side)?) };
            let shape = [count, plan.destination().shape().len(), 2];
            arrays::filled(py, &shape, |out, poll| plan.local_boxes_into(end, kept, places, out, poll))
        })
    }

    /// The place of a piece: the position in the tensor that is position 0 of what it is seen in;
    /// and `None` if that is its holder's whole array, or the offset in a flat one and the piece's
    /// shape.
    #[pyo3(signature = (side, holder, piece, /))]
    fn place<'py>(&self, py: Python<'py>, side: usize, holder: i64, piece: i64) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| {
            let seen = Seen::new(&**self.core.end(end(side)?), holder, piece).map_err(to_py)?;
            let window = match seen.flat {
                None => None,
                Some((offset, extents)) => Some((offset, PyTuple::new(py, extents)?)),
            };
            (PyTuple::new(py, seen.origin)?, window).into_pyobject(py)
        })
    }

    /// The steps of one holder, in order: int64 (steps, 4) of kind (0 copy, 1 send, 2 receive), the
    /// other holder (of the destination if it sends, else of the source), the number of the
    /// transfer or of the box that stays, and the addend. `source` and `destination` are its
    /// numbers on the two sides, or -1.
    #[pyo3(signature = (source, destination, /))]
    fn program<'py>(&self, py: Python<'py>, source: i64, destination: i64) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let programs = match self.programs.get() {
                Some(programs) => programs,
                None => {
                    let made = detached(py, |poll| Programs::new(&self.core, poll))?;
                    self.programs.get_or_init(|| made)
                }
            };
            let steps = programs.steps_of(source, destination).map_err(to_py)?;
            arrays::filled(py, &[steps.len(), 4], |out, _| {
                for (row, step) in out.chunks_exact_mut(4).zip(steps) {
                    row.copy_from_slice(&[step.kind as i64, step.peer, step.number as i64, step.addend]);
                }
                CoreResult::Ok(())
            })
        })
    }

    /// The pieces of the transfers in the order of their rounds, and the number of pieces up to the end of each round.
    #[pyo3(signature = (budget, itemsize, /))]
    fn rounds<'py>(&self, py: Python<'py>, budget: i64, itemsize: i64) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            let rank = self.core.destination().shape().len();
            let done = detached(py, |poll| rounds(&self.core.transfer_rows(poll)?, rank, budget, itemsize, poll))?;
            let rows = arrays::frozen(py, &[done.rows.len()], |out, _| {
                out.copy_from_slice(&done.rows);
                CoreResult::Ok(())
            })?;
            let ends = arrays::filled(py, &[done.ends.len()], |out, _| {
                out.iter_mut().zip(&done.ends).for_each(|(out, &end)| *out = end as i64);
                CoreResult::Ok(())
            })?;
            Ok((rows, ends))
        })
    }

    /// Copies into `destinations` what they are to hold, out of `sources`; `outputs[d]` is the position among the
    /// destinations of device `d`'s array, or -1 if nothing is to be copied for it. Of partial sums, the first addend.
    /// Calls `progress` with the bytes done and the bytes in all. `streaming` says whether bytes are stored past the cache;
    /// `None`, if that turns out faster.
    #[pyo3(signature = (sources, destinations, outputs, progress, streaming=None, /))]
    fn run(
        &self,
        py: Python<'_>,
        sources: &Bound<'_, PyList>,
        destinations: &Bound<'_, PyList>,
        outputs: &Bound<'_, PyAny>,
        progress: Option<Py<PyAny>>,
        streaming: Option<bool>,
    ) -> PyResult<()> {
        guard(|| {
            let way = streaming.map(|streaming| if streaming { Way::Streaming } else { Way::Ordinary });
            room("the arrays", (sources.len() + destinations.len()).saturating_mul(ARRAY_BYTES))?;
            let outputs = integers("outputs", outputs)?;
            let (_held, sources) = memory(sources, false)?;
            let (_kept, destinations) = memory(destinations, true)?;
            let outputs: Vec<Option<usize>> = outputs.iter().map(|&output| usize::try_from(output).ok()).collect();
            self.check_counts(sources.len(), destinations.len(), &outputs)?;
            let places = [self.places(py, 0)?, self.places(py, 1)?];
            let mut failure = None;
            let done = detached(py, |poll| {
                let regions = Disjoint::new(&sources, &destinations, poll)?;
                // Who has not asked for reports is not reported the beginning and the end of a small copy either: to get
                // the interpreter for them takes longer than all else that comes before it.
                let mut last = progress.is_none().then(Instant::now);
                run(&self.core, places, regions, &outputs, way, &mut |done, total| -> CoreResult<()> {
                    let is_due = last.is_none_or(|last| last.elapsed() >= POLL_EVERY);
                    if !is_due && (done < total || progress.is_none()) {
                        return Ok(());
                    }
                    last = Some(Instant::now());
                    if let Some(progress) = &progress {
                        Python::attach(|py| progress.call1(py, (done, total)).map(drop)).map_err(|error| {
                            failure = Some(error);
                            Error::Interrupted
                        })?;
                    }
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
        let (tiling, place) = (self.core.end(end(side)?), &self.places[side]);
        if let Some(places) = place.get() {
            return Ok(places);
        }
        let places = detached(py, |poll| Places::new(&**tiling, poll))?;
        Ok(place.get_or_init(|| places))
    }

    /// Check that there is an array for every holder. Their shapes are checked by the caller, and
    /// whether a box lies in its array once more where it is copied.
    fn check_counts(&self, sources: usize, destinations: usize, outputs: &[Option<usize>]) -> PyResult<()> {
        let used = outputs.iter().filter_map(|output| *output);
        if sources as i64 == self.core.source().holders() && used.eq(0..destinations) {
            return Ok(());
        }
        Err(PyValueError::new_err("the number of arrays is not that of the plan's holders"))
    }
}

/// The end of a plan that `side` means: 0 the source, 1 the destination.
fn end(side: usize) -> PyResult<End> {
    [End::Source, End::Destination].get(side).copied().ok_or_else(|| PyValueError::new_err("side must be 0 or 1"))
}

/// The bytes that an array takes at most while it is copied from or to: its reference, its strides, its place among the
/// others where overlaps are looked for, and its share of the copies.
const ARRAY_BYTES: usize = 1024;

/// The memory of arrays, which are held meanwhile.
fn memory<'py>(list: &Bound<'py, PyList>, written: bool) -> PyResult<(Vec<Bound<'py, PyUntypedArray>>, Vec<Strided>)> {
    let arrays = list.iter().map(|item| Ok(item.cast_into::<PyUntypedArray>()?)).collect::<PyResult<Vec<_>>>()?;
    for (position, array) in arrays.iter().enumerate() {
        poll_among(list.py(), position)?;
        if array.dtype().has_object() {
            return Err(PyTypeError::new_err("object arrays hold references, which cannot be copied as bytes"));
        }
        if written && !views::writeable(array) {
            let message = format!("out[{position}] is read-only, so the shard cannot be written into it");
            return Err(PyValueError::new_err(message));
        }
    }
    let regions = arrays.iter().map(views::strided).collect();
    Ok((arrays, regions))
}

/// The senders of many tensors. `sorts` are tuples (src, dst, same, from, to): two tilings, and the
/// participants that their holders are; each tensor has one of them, and the bytes of its elements;
/// `nodes` has the node of each participant, or is None. Gives the bytes that each participant
/// sends, receives and keeps, and for each tensor the senders of its transfers, or None if no box
/// has replicas.
#[pyfunction]
#[pyo3(signature = (sorts, tensors, itemsizes, participants, nodes, /))]
pub(crate) fn balance_model<'py>(
    py: Python<'py>,
    sorts: &Bound<'py, PyList>,
    tensors: Vec<usize>,
    itemsizes: Vec<i64>,
    participants: usize,
    nodes: Option<Vec<u32>>,
) -> PyResult<Bound<'py, PyAny>> {
    answer(py, || {
        type Ends<'py> =
            (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);
        let mut made = Vec::new();
        for sort in sorts.iter() {
            let (src, dst, same, from, to): Ends<'_> = sort.extract()?;
            let ids = |name, value: &Bound<'_, PyAny>| -> PyResult<Vec<u32>> {
                let all = numbers(name, value)?;
                let fits = |&id: &i64| u32::try_from(id).ok().filter(|&id| (id as usize) < participants);
                let ids: Option<Vec<u32>> = all.iter().map(fits).collect();
                ids.ok_or_else(|| PyValueError::new_err(format!("{name} has a number that is not a participant's")))
            };
            let (src, dst, same) = (tiling("src", &src)?, tiling("dst", &dst)?, numbers("same", &same)?);
            let (from, to) = (ids("from", &from)?, ids("to", &to)?);
            made.push(detached(py, |poll| {
                Plan::check_ends(&*src, &dst, &same)?;
                Sort::new(&*src, &*dst, (&from, &to), &same, poll)
            })?);
        }
        let tensors: Vec<_> = tensors.into_iter().zip(itemsizes).collect();
        let model = detached(py, |poll| Model::new(&made, &tensors, participants, nodes.as_deref(), poll))?;
        let copy = |numbers: &[i64]| {
            arrays::filled(py, &[numbers.len()], |out, _| {
                out.copy_from_slice(numbers);
                CoreResult::Ok(())
            })
        };
        let senders = PyList::empty(py);
        for own in &model.senders {
            senders.append(own.as_ref().map(|own| copy(own)).transpose()?)?;
        }
        Ok((copy(&model.sent)?, copy(&model.received)?, copy(&model.kept)?, senders))
    })
}
