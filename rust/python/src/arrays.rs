//! New int64 arrays, and the kernels that fill them.

use numpy::{PyArray1, PyArrayMethods};
use pyo3::{exceptions::PyMemoryError, intern, prelude::*, sync::PyOnceLock, types::PyTuple};
use shardwise_core::error::Result as CoreResult;

use crate::errors::{InternalError, SizeOverflowError, detached};

/// A new int64 array of `shape`, and itself flat. Asked of numpy from Python, because the crate's constructors panic
/// where memory is short.
pub(crate) fn empty<'py>(py: Python<'py>, shape: &[usize]) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyArray1<i64>>)> {
    static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static INT64: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let elements = shape.iter().try_fold(8_usize, |bytes, &n| bytes.checked_mul(n));
    if elements.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(SizeOverflowError::new_err(format!("an int64 array of shape {shape:?} is over the address space")));
    }
    let int64 = INT64.import(py, "numpy", "int64")?;
    let flat = EMPTY.import(py, "numpy", "empty")?.call1((shape.iter().product::<usize>(), int64))?;
    let array = match shape {
        [_] => flat.clone(),
        _ => flat.call_method1(intern!(py, "reshape"), (PyTuple::new(py, shape)?,))?,
    };
    Ok((array, flat.cast_into::<PyArray1<i64>>()?))
}

/// A new array of `shape`, filled by `kernel` with the interpreter released.
pub(crate) fn filled<'py, F>(py: Python<'py>, shape: &[usize], kernel: F) -> PyResult<Bound<'py, PyAny>>
where
    F: Send + FnOnce(&mut [i64], &mut dyn FnMut() -> CoreResult<()>) -> CoreResult<()>,
{
    let (array, flat) = empty(py, shape)?;
    let mut guard = flat.try_readwrite().map_err(|error| InternalError::new_err(error.to_string()))?;
    let slice = guard.as_slice_mut().map_err(|error| InternalError::new_err(error.to_string()))?;
    detached(py, |poll| kernel(slice, poll))?;
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
