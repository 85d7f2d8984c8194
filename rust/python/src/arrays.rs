//! New int64 arrays, and the kernels that fill them.

use numpy::{
    PY_ARRAY_API, PyArrayDescrMethods, dtype,
    npyffi::{NpyTypes, PyArrayObject, get_type_object, npy_intp},
};
use pyo3::{exceptions::PyMemoryError, prelude::*, types::PyBytes};
use shardwise_core::{error::Result as CoreResult, tiling::Poll};

use crate::errors::{InternalError, SizeOverflowError, detached, to_py};

/// The size of an array below which it is written without giving the interpreter away: that takes as long as writing
/// some hundreds of numbers, and a thread that wants it may keep it for milliseconds.
const FEW: usize = 1 << 14;

/// The elements of an int64 array of `shape`.
pub(crate) fn elements(shape: &[usize]) -> PyResult<usize> {
    let bytes = shape.iter().try_fold(8_usize, |bytes, &n| bytes.checked_mul(n));
    match bytes.map(isize::try_from) {
        Some(Ok(bytes)) => Ok(bytes as usize / 8),
        _ => Err(SizeOverflowError::new_err(format!(
            "an int64 array of shape {shape:?} does not fit in the address space"
        ))),
    }
}

/// A new array of `shape`, filled by `kernel` with the interpreter released.
pub(crate) fn filled<'py, F>(py: Python<'py>, shape: &[usize], kernel: F) -> PyResult<Bound<'py, PyAny>>
where
    F: Send + FnOnce(&mut [i64], Poll<'_>) -> CoreResult<()>,
{
    let mut kernel = Some(kernel);
    made(py, shape, 0, &mut |out, poll| kernel.take().map_or(Ok(()), |kernel| kernel(out, poll)))
}

/// The same numbers in a `bytes` object, which nobody can write to afterwards.
pub(crate) fn frozen<'py, F>(py: Python<'py>, shape: &[usize], kernel: F) -> PyResult<Bound<'py, PyBytes>>
where
    F: Send + FnOnce(&mut [i64], Poll<'_>) -> CoreResult<()>,
{
    PyBytes::new_with(py, 8 * elements(shape)?, |memory| {
        // SAFETY: any bytes are an i64.
        let (before, out, behind) = unsafe { memory.align_to_mut::<i64>() };
        if !(before.is_empty() && behind.is_empty()) {
            return Err(InternalError::new_err("a bytes object is not aligned to its words"));
        }
        detached(py, |poll| kernel(out, poll))
    })
}

/// The same by a kernel that takes no longer than writing the numbers takes: for few of them the interpreter is kept.
pub(crate) fn written<'py, F>(py: Python<'py>, shape: &[usize], kernel: F) -> PyResult<Bound<'py, PyAny>>
where
    F: Send + FnOnce(&mut [i64], Poll<'_>) -> CoreResult<()>,
{
    let mut kernel = Some(kernel);
    made(py, shape, FEW, &mut |out, poll| kernel.take().map_or(Ok(()), |kernel| kernel(out, poll)))
}

/// The common part of both, compiled once for all kernels. For fewer than `kept` numbers the
/// interpreter is kept.
fn made<'py>(
    py: Python<'py>,
    shape: &[usize],
    kept: usize,
    kernel: &mut (dyn FnMut(&mut [i64], Poll<'_>) -> CoreResult<()> + Send),
) -> PyResult<Bound<'py, PyAny>> {
    let elements = elements(shape)?;
    new_array(py, shape, elements, &mut |out| {
        if elements < kept {
            return kernel(out, &mut || Ok(())).map_err(to_py);
        }
        detached(py, |poll| kernel(out, poll))
    })
}

/// A new C-contiguous int64 array of `shape`, which has `elements` of at most `isize::MAX` bytes together: `fill` writes
/// them, before anyone else has the array. (The constructors of rust-numpy panic where memory is short.)
pub(crate) fn new_array<'py>(
    py: Python<'py>,
    shape: &[usize],
    elements: usize,
    fill: &mut dyn FnMut(&mut [i64]) -> PyResult<()>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut dims: Vec<npy_intp> = shape.iter().map(|&n| n as npy_intp).collect();
    // SAFETY: the type object is numpy's static; the call steals the reference to the dtype; `dims` holds as many entries
    // as are said. The result is a new reference, or null with an exception set.
    let array = unsafe {
        let array = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            get_type_object(py, NpyTypes::PyArray_Type),
            dtype::<i64>(py).into_dtype_ptr(),
            dims.len() as std::ffi::c_int,
            dims.as_mut_ptr(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            0,
            std::ptr::null_mut(),
        );
        Bound::from_owned_ptr_or_err(py, array)?
    };
    // SAFETY: the array is a live ndarray that nobody else has, C-contiguous, with memory of its own for `elements` int64,
    // aligned as numpy aligns what it allocates. Any bytes are an i64. The slice does not outlive the call, the array does.
    fill(unsafe {
        let data = (*array.as_ptr().cast::<PyArrayObject>()).fields.data;
        std::slice::from_raw_parts_mut(data.cast::<i64>(), elements)
    })?;
    Ok(array)
}

/// Zeros of (rows, columns) for a while; what does not fit in memory is a `MemoryError`, where `vec!` would abort.
pub(crate) fn scratch(what: &str, rows: usize, columns: usize) -> PyResult<Vec<i64>> {
    let mut zeros = Vec::new();
    match rows.checked_mul(columns).map(|slots| (slots, zeros.try_reserve_exact(slots))) {
        Some((slots, Ok(()))) => zeros.resize(slots, 0),
        _ => return Err(PyMemoryError::new_err(format!("{what}: {rows} are too many to list"))),
    }
    Ok(zeros)
}

/// An empty list with room for `len` entries; what does not fit in memory is a `MemoryError`, where `Vec` would abort.
pub(crate) fn list<T>(what: &str, len: usize) -> PyResult<Vec<T>> {
    let mut entries = Vec::new();
    let too_many = |_| PyMemoryError::new_err(format!("{what}: {len} are too many to list"));
    entries.try_reserve_exact(len).map_err(too_many)?;
    Ok(entries)
}

/// A size of the core as a length in memory; more than can be addressed is a lack of memory.
pub(crate) fn length(what: &str, size: i64) -> PyResult<usize> {
    usize::try_from(size).map_err(|_| PyMemoryError::new_err(format!("{what}: {size} are too many to list")))
}
