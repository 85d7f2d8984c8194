//! `_core.Held`: the elements of a tensor that a holder has, by their offsets.

use numpy::{Element, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyTuple};
use shardwise_core::locate::held::{Held as CoreHeld, Offset, Side};

use crate::{
    arrays,
    convert::{Numbers, integers},
    errors::{answer, detached, guard, to_py},
};

/// Boxes of a tensor, and where they are in the array of the holder that has them.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct Held {
    core: CoreHeld,
}

#[pymethods]
impl Held {
    /// `sides` has start, stop and the place in the holder's array for each dim of each box, one after the other.
    #[new]
    #[pyo3(signature = (shape, own, sides, /))]
    fn new(shape: &Bound<'_, PyAny>, own: &Bound<'_, PyAny>, sides: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(|| {
            let sides = Numbers::new("sides", sides)?;
            let sides: Vec<Side> = sides
                .slice()?
                .chunks_exact(3)
                .map(|side| Side { start: side[0], stop: side[1], at: side[2] })
                .collect();
            let core = CoreHeld::new(&integers("shape", shape)?, &integers("own", own)?, &sides);
            Ok(Self { core: core.map_err(to_py)? })
        })
    }

    /// The elements of the holder's array.
    #[getter]
    fn room<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.room()))
    }

    /// The first of some offsets that is not in the tensor, as its position; `None` if all are.
    #[pyo3(signature = (offsets, /))]
    fn first_outside<'py>(&self, py: Python<'py>, offsets: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || with_offsets(offsets, &mut FirstOutside { core: &self.core }))
    }

    /// The positions of those of some offsets that the holder has, and their places: two int64 arrays.
    #[pyo3(signature = (offsets, /))]
    fn locate<'py>(&self, offsets: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| with_offsets(offsets, &mut Locate { core: &self.core }))
    }

    /// Write a value for each offset to its place in the holder's array, and return how many places that were.
    /// `values` and `array` are of unsigned integers of one size.
    #[pyo3(signature = (offsets, values, array, /))]
    fn scatter<'py>(
        &self,
        py: Python<'py>,
        offsets: &Bound<'py, PyAny>,
        values: &Bound<'py, PyAny>,
        array: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || match values.cast::<PyUntypedArray>()?.dtype().itemsize() {
            1 => with_offsets(offsets, &mut Scatter::<u8>::new(&self.core, values, array)?),
            2 => with_offsets(offsets, &mut Scatter::<u16>::new(&self.core, values, array)?),
            4 => with_offsets(offsets, &mut Scatter::<u32>::new(&self.core, values, array)?),
            _ => with_offsets(offsets, &mut Scatter::<u64>::new(&self.core, values, array)?),
        })
    }
}

/// Work on offsets, whatever integers they are.
trait Work<'py> {
    type Answer;

    fn run<O: Offset>(&mut self, py: Python<'py>, offsets: &[O]) -> PyResult<Self::Answer>;
}

fn with_offsets<'py, W: Work<'py>>(offsets: &Bound<'py, PyAny>, work: &mut W) -> PyResult<W::Answer> {
    if let Ok(narrow) = offsets.cast::<PyArray1<i32>>() {
        return work.run(offsets.py(), narrow.try_readonly().map_err(wrong)?.as_slice().map_err(wrong)?);
    }
    let wide = offsets.cast::<PyArray1<i64>>()?;
    work.run(offsets.py(), wide.try_readonly().map_err(wrong)?.as_slice().map_err(wrong)?)
}

/// The error for arrays of another kind than a function of the core's takes.
pub(crate) fn wrong(error: impl std::fmt::Display) -> PyErr {
    PyTypeError::new_err(error.to_string())
}

struct FirstOutside<'a> {
    core: &'a CoreHeld,
}

impl<'py> Work<'py> for FirstOutside<'_> {
    type Answer = Option<usize>;

    fn run<O: Offset>(&mut self, py: Python<'py>, offsets: &[O]) -> PyResult<Self::Answer> {
        detached(py, |poll| self.core.first_outside(offsets, poll))
    }
}

struct Locate<'a> {
    core: &'a CoreHeld,
}

impl<'py> Work<'py> for Locate<'_> {
    type Answer = Bound<'py, PyTuple>;

    fn run<O: Offset>(&mut self, py: Python<'py>, offsets: &[O]) -> PyResult<Self::Answer> {
        let count = detached(py, |poll| self.core.count(offsets, poll))?;
        let mut places = py.None().into_bound(py);
        let which = arrays::new_array(py, &[count], count, &mut |which| {
            places = arrays::new_array(py, &[count], count, &mut |places| {
                detached(py, |poll| self.core.locate_into(offsets, which, places, poll))
            })?;
            Ok(())
        })?;
        PyTuple::new(py, [which, places])
    }
}

struct Scatter<'a, 'py, T: Element> {
    core: &'a CoreHeld,
    values: &'a Bound<'py, PyArray1<T>>,
    array: &'a Bound<'py, PyArray1<T>>,
}

impl<'a, 'py, T: Element> Scatter<'a, 'py, T> {
    fn new(core: &'a CoreHeld, values: &'a Bound<'py, PyAny>, array: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        Ok(Self { core, values: values.cast()?, array: array.cast()? })
    }
}

impl<'py, T: Element + Copy + Sync> Work<'py> for Scatter<'_, 'py, T> {
    type Answer = usize;

    fn run<O: Offset>(&mut self, py: Python<'py>, offsets: &[O]) -> PyResult<Self::Answer> {
        let values = self.values.try_readonly().map_err(wrong)?;
        let values = values.as_slice().map_err(wrong)?;
        let mut array = self.array.try_readwrite().map_err(wrong)?;
        let array = array.as_slice_mut().map_err(wrong)?;
        detached(py, |poll| self.core.scatter(offsets, values, array, poll))
    }
}
