//! Zero-copy views of numpy arrays.
//!
//! A view is what `array[box]` gives: the same memory, strides, dtype and writability, with the array as its base. The
//! indexing machinery of numpy takes 0.3 to 0.9 µs to make one; with the box at hand, numpy's C constructor takes a
//! third of it. Good:
//!
//! ```text
//! PyArray_NewFromDescr(ndarray, the array's own descr, stop - start, the array's strides, data + Σ start·stride)
//! ```
//!
//! Bad: building a Rust slice `&[T]` of the data. Arrays may be misaligned, overlap themselves or be written by another
//! thread, each of which is undefined for a Rust reference. So the data is never looked at here, not even through a
//! pointer: only addresses are computed, and those are bounded by the array's own extents.
//!
//! Limits: subclasses, whose `__array_finalize__` and `__getitem__` must be asked, and dtypes of the new kind (numpy's
//! `StringDType`), whose descriptors own memory and may not be passed on, go through `array[box]`.

use numpy::{
    PY_ARRAY_API, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods,
    npyffi::{NPY_ARRAY_OWNDATA, NPY_ARRAY_WRITEABLE, NpyTypes, PyArray_Descr, get_type_object, npy_intp},
};
use pyo3::{
    exceptions::PyTypeError,
    ffi,
    prelude::*,
    types::{PyEllipsis, PyList, PyTuple},
};

use shardwise_core::{
    copy::strided::Strided,
    error::Error,
    region::sides,
    shown,
    tiling::{Piece, Place, Tiling},
};
use shardwise_io::job::Memory;

use crate::{
    arrays,
    errors::{LayoutError, poll_among, to_py},
};

/// From this type number on, dtypes are of the new kind (`NPY_VSTRING`); below are numpy's own and those registered the
/// classic way, such as bfloat16.
const FIRST_NEW_STYLE: i32 = 2056;

/// One view of `array`, which must be of `shape`, per box of `bounds`: (boxes, dims, 2) in C order, within the shape.
pub(crate) fn views<'py>(
    py: Python<'py>,
    array: &Bound<'py, PyUntypedArray>,
    shape: &[i64],
    boxes: usize,
    bounds: &[i64],
) -> PyResult<Bound<'py, PyList>> {
    let fits = array.shape().len() == shape.len()
        && array.shape().iter().zip(shape).all(|(&have, &want)| i64::try_from(have) == Ok(want));
    if !fits {
        let (given, wanted) = (shown::list(array.shape()), shown::list(shape));
        let message = format!("array has shape {given} but the partition is of shape {wanted}");
        return Err(LayoutError::new_err(message));
    }
    let row = 2 * shape.len();
    let rows = (0..boxes).map(|i| &bounds[i * row..(i + 1) * row]);
    let mut views = arrays::list("views", boxes)?;
    match Template::of(py, array)? {
        Some(mut template) => {
            for (number, row) in rows.enumerate() {
                poll_among(py, number)?;
                views.push(template.view(py, array, row)?);
            }
        }
        None => {
            for (number, row) in rows.enumerate() {
                poll_among(py, number)?;
                views.push(index(py, array, row)?);
            }
        }
    }
    PyList::new(py, views)
}

/// `slice(start, stop)`, with no step, as JAX and people write it. Calling the type costs three times as much, and PyO3's
/// own constructor always gives a step.
pub(crate) fn slice<'py>(py: Python<'py>, (start, stop): (i64, i64)) -> PyResult<Bound<'py, PyAny>> {
    let (start, stop) = (start.into_pyobject(py)?, stop.into_pyobject(py)?);
    // SAFETY: the interpreter is attached; both pointers are objects that live until the call has taken its own
    // references, a null step means none, and the result is a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PySlice_New(start.as_ptr(), stop.as_ptr(), std::ptr::null_mut())) }
}

/// A holder's pieces: a tuple of slices each, and the start in its own array, a tuple or the offset in a flat one.
pub(crate) fn pieces<'py>(py: Python<'py>, tiling: &dyn Tiling, holder: i64) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    let (mut failure, mut number) = (None, 0);
    let mut add = |piece: Piece<'_>| -> PyResult<()> {
        let slices = piece.region.sides().map(|side| slice(py, side)).collect::<PyResult<Vec<_>>>()?;
        let start = match piece.place {
            Place::At(start) => PyTuple::new(py, start)?.into_any(),
            Place::Flat(offset) => offset.into_pyobject(py)?.into_any(),
        };
        number += 1;
        poll_among(py, number)?;
        list.append((PyTuple::new(py, slices)?, start))
    };
    let done = tiling.visit_pieces(holder, &mut |piece| {
        add(piece).map_err(|error| {
            failure = Some(error);
            Error::Interrupted
        })
    });
    match failure {
        Some(error) => Err(error),
        None => done.map(|()| list).map_err(to_py),
    }
}

/// True if numpy lets `array` be written.
pub(crate) fn writeable(array: &Bound<'_, PyUntypedArray>) -> bool {
    // SAFETY: `array` is a live ndarray, so its fields are initialised; they are only read.
    unsafe { (*array.as_array_ptr()).fields.flags & NPY_ARRAY_WRITEABLE != 0 }
}

/// True if numpy allocated the memory of `array`, so that it is that of no file.
pub(crate) fn owns_memory(array: &Bound<'_, PyUntypedArray>) -> bool {
    // SAFETY: `array` is a live ndarray, so its fields are initialised; they are only read.
    unsafe { (*array.as_array_ptr()).fields.flags & NPY_ARRAY_OWNDATA != 0 }
}

/// The memory of `array`, for copies of raw bytes. The array must outlive it.
pub(crate) fn strided(array: &Bound<'_, PyUntypedArray>) -> Strided {
    let dims = array.shape().iter().zip(array.strides()).map(|(&n, &stride)| (n as i64, stride)).collect();
    // SAFETY: `array` is a live ndarray, so its fields are initialised; they are only read. What extents and strides
    // span from its data pointer on is its own memory (numpy's contract for every array, `as_strided` being the
    // caller's word for it); the callers use it as a destination only where numpy says that it is writeable.
    unsafe { Strided::new((*array.as_array_ptr()).fields.data.cast(), array.dtype().itemsize(), dims) }
}

/// The memory of `array`, whose `strided` this is, for jobs of `shardwise-io`. The array must outlive them.
pub(crate) fn memory(array: &Bound<'_, PyUntypedArray>, strided: &Strided) -> Memory {
    let (mut low, mut high) = (0_i64, strided.itemsize() as i64);
    for &(extent, stride) in strided.dims() {
        let reach = (extent - 1).saturating_mul(stride as i64);
        low = low.saturating_add(reach.min(0));
        high = high.saturating_add(reach.max(0));
    }
    if strided.dims().iter().any(|dim| dim.0 == 0) {
        (low, high) = (0, 0);
    }
    // SAFETY: `array` is a live ndarray, so its fields are initialised; they are only read. From `low` to `high` of its
    // data pointer is what its extents and strides span: its own memory, as for `strided`. The callers make no
    // destination of an array that is read-only, and check that destinations share no memory with anything; that others
    // leave the memory alone meanwhile is asked of the user, as for every array that is worked on without the lock.
    unsafe { Memory::new((*array.as_array_ptr()).fields.data.cast(), low, high) }
}

/// `array[start:stop, …, ...]`. Without the ellipsis, a 0-d array would give a scalar.
fn index<'py>(py: Python<'py>, array: &Bound<'py, PyUntypedArray>, row: &[i64]) -> PyResult<Bound<'py, PyAny>> {
    let mut key = sides(row).map(|side| slice(py, side)).collect::<PyResult<Vec<_>>>()?;
    key.push(PyEllipsis::get(py).to_owned().into_any());
    array.as_any().get_item(PyTuple::new(py, key)?)
}

/// The template that all views of one array share.
struct Template {
    ndarray: *mut ffi::PyTypeObject,
    data: *mut std::ffi::c_char,
    descr: *mut PyArray_Descr,
    strides: Vec<npy_intp>,
    dims: Vec<npy_intp>,
    flags: std::ffi::c_int,
}

impl Template {
    /// The template of an array, or `None` if its views must be made by indexing it.
    fn of(py: Python<'_>, array: &Bound<'_, PyUntypedArray>) -> PyResult<Option<Self>> {
        if !array.is_exact_instance_of::<PyUntypedArray>() || !(0..FIRST_NEW_STYLE).contains(&array.dtype().num()) {
            return Ok(None);
        }
        // SAFETY: the type object is a static of the loaded numpy.
        let ndarray = unsafe { get_type_object(py, NpyTypes::PyArray_Type) };
        let strides = array.strides().iter().map(|&stride| stride as npy_intp).collect();
        // SAFETY: `array` is a live ndarray, so its fields are initialised; they are only read. The descr and the data
        // stay valid while `array` is borrowed.
        let (data, descr, flags) = unsafe {
            let fields = &(*array.as_array_ptr()).fields;
            (fields.data, fields.descr, fields.flags)
        };
        if descr.is_null() {
            return Err(PyTypeError::new_err("array has no dtype"));
        }
        Ok(Some(Self {
            ndarray,
            data,
            descr,
            strides,
            dims: vec![0; array.ndim()],
            flags: flags & NPY_ARRAY_WRITEABLE,
        }))
    }

    /// The view of one box, whose bounds lie within the array's shape.
    fn view<'py>(
        &mut self,
        py: Python<'py>,
        array: &Bound<'py, PyUntypedArray>,
        row: &[i64],
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut data = self.data;
        let empty = sides(row).any(|(start, stop)| start == stop);
        for (((start, stop), stride), extent) in sides(row).zip(&self.strides).zip(&mut self.dims) {
            *extent = (stop - start) as npy_intp;
            // An empty view points at the array's first element: none of its own exists to point at.
            if !empty {
                // Wrapping, because a zero-copy view may step outside and back (negative strides); the address of its
                // first element, reached at the end of the loop, is that of an element of the array.
                data = data.wrapping_offset((start as isize).wrapping_mul(*stride));
            }
        }
        // SAFETY: `ndarray` is numpy's static; `descr` is alive and gets the reference that the call steals; `dims` and
        // `strides` hold as many entries as the array has dims. start + extent <= dim for each, so every address that
        // the view can form is one that `array` can form, and the base keeps that memory alive. numpy recomputes the
        // contiguity and alignment flags.
        let view = unsafe {
            ffi::Py_INCREF(self.descr.cast());
            PY_ARRAY_API.PyArray_NewFromDescr(
                py,
                self.ndarray,
                self.descr,
                self.dims.len() as std::ffi::c_int,
                self.dims.as_mut_ptr(),
                self.strides.as_mut_ptr(),
                data.cast(),
                self.flags,
                std::ptr::null_mut(),
            )
        };
        // SAFETY: the call returns a new reference, or null with an exception set.
        let view = unsafe { Bound::from_owned_ptr_or_err(py, view)? };
        // SAFETY: `view` is a new array without a base; the call steals the reference that is made here for it.
        let done = unsafe {
            ffi::Py_INCREF(array.as_ptr());
            PY_ARRAY_API.PyArray_SetBaseObject(py, view.as_ptr().cast(), array.as_ptr())
        };
        if done < 0 { Err(PyErr::fetch(py)) } else { Ok(view) }
    }
}
