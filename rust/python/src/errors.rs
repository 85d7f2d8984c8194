//! Core errors as Python exceptions, and panics as `InternalError`.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, set_hook},
    sync::{Mutex, PoisonError},
};

use pyo3::{
    IntoPyObjectExt, PyTypeInfo,
    exceptions::{PyIndexError, PyMemoryError},
    import_exception,
    prelude::*,
};
use shardwise_core::{
    dtensor,
    error::{Error, ErrorKind, Result as CoreResult},
    parallel::panic_message,
};

import_exception!(shardwise.errors, InternalError);
import_exception!(shardwise.errors, LayoutError);
import_exception!(shardwise.errors, MeshError);
import_exception!(shardwise.errors, ParseError);
import_exception!(shardwise.errors, SizeOverflowError);

/// Makes what this module keeps: see `lib`.
pub(crate) fn prepare(py: Python<'_>) {
    InternalError::type_object(py);
    LayoutError::type_object(py);
    MeshError::type_object(py);
    ParseError::type_object(py);
    SizeOverflowError::type_object(py);
}

/// An error of the core or of the dialect, which has its own.
pub(crate) trait Refusal: std::fmt::Display {
    fn kind(&self) -> ErrorKind;
}

impl Refusal for Error {
    fn kind(&self) -> ErrorKind {
        Error::kind(self)
    }
}

impl Refusal for dtensor::Error {
    fn kind(&self) -> ErrorKind {
        dtensor::Error::kind(self)
    }
}

/// The exception for an error of the core. An interruption is the exception that the signal handler left, so it never
/// gets here except through a fault.
#[cold]
#[inline(never)]
pub(crate) fn to_py(error: impl Refusal) -> PyErr {
    let message = error.to_string();
    match error.kind() {
        ErrorKind::Mesh => MeshError::new_err(message),
        ErrorKind::Layout => LayoutError::new_err(message),
        ErrorKind::Parse => ParseError::new_err(message),
        ErrorKind::Overflow => SizeOverflowError::new_err(message),
        ErrorKind::Memory => PyMemoryError::new_err(message),
        ErrorKind::Index => PyIndexError::new_err(message),
        ErrorKind::Interrupted | ErrorKind::Internal => InternalError::new_err(message),
    }
}

/// Runs the body of an entry point. PyO3 would let a panic through as `PanicException`, which is not an `Exception`.
pub(crate) fn guard<T>(body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(fault(payload)))
}

/// The exception for a panic. Apart from `guard`, of which every entry point has its own.
#[cold]
#[inline(never)]
fn fault(payload: Box<dyn Any + Send>) -> PyErr {
    let message = panic_message(payload.as_ref());
    if message == NULL_OBJECT {
        return PyMemoryError::new_err("no memory left for the answer");
    }
    let place = std::mem::take(&mut *PLACE.lock().unwrap_or_else(PoisonError::into_inner));
    InternalError::new_err(format!("a fault of shardwise, please report it: {message} (at {place})"))
}

/// As `guard`, and the answer becomes an object of Python within it: PyO3 panics where there is no memory for one, and
/// what an entry point returns as anything else is converted behind its back.
pub(crate) fn answer<'py, T: IntoPyObjectExt<'py>>(
    py: Python<'py>,
    body: impl FnOnce() -> PyResult<T>,
) -> PyResult<Bound<'py, PyAny>> {
    guard(|| body()?.into_bound_py_any(py))
}

/// The message with which PyO3 panics where Python gives it no object: constructors of tuples,
/// lists, strings and integers fail for want of memory only.
const NULL_OBJECT: &str = "PyObject pointer is null";

/// The place of the last panic. For all threads: what is of one thread needs memory, and where
/// there is none, glibc aborts.
static PLACE: Mutex<String> = Mutex::new(String::new());

/// Notes where a panic is, and writes nothing: every panic becomes an exception, which says it. The usual hook would make
/// a backtrace if `RUST_BACKTRACE` is set, which takes memory that there may not be, and would abort for want of it.
pub(crate) fn note_panics() {
    set_hook(Box::new(|panic| {
        let place = panic.location().map_or_else(String::new, |at| format!("{}:{}", at.file(), at.line()));
        *PLACE.lock().unwrap_or_else(PoisonError::into_inner) = place;
    }));
}

/// Runs a bulk kernel with the interpreter released; the kernel polls for signals, so that Ctrl-C ends it.
pub(crate) fn detached<T, F>(py: Python<'_>, kernel: F) -> PyResult<T>
where
    T: Send,
    F: Send + FnOnce(&mut dyn FnMut() -> CoreResult<()>) -> CoreResult<T>,
{
    let mut pending = None;
    let done = py.detach(|| kernel(&mut || poll_signals(&mut pending)));
    done.map_err(|error| pending.unwrap_or_else(|| to_py(error)))
}

/// Looks at signals now and then while objects of Python are made one by one, of which this is the `number`th.
#[inline(always)] // A call for each object would be a fifth of the time that a dict of slices takes.
pub(crate) fn poll_among(py: Python<'_>, number: usize) -> PyResult<()> {
    if number % 4096 == 4095 { py.check_signals() } else { Ok(()) }
}

/// Leaves what a signal handler raised in `pending`. Apart from `detached`, of which every kernel has its own.
#[inline(never)]
fn poll_signals(pending: &mut Option<PyErr>) -> CoreResult<()> {
    Python::attach(|py| py.check_signals()).map_err(|error| {
        *pending = Some(error);
        Error::Interrupted
    })
}

/// Leaves what a signal handler raised in `pending`, in a call that holds the interpreter. Other threads get their turn:
/// handlers run in the main one, which may be waiting.
#[inline(never)]
pub(crate) fn poll_holding(py: Python<'_>, pending: &mut Option<PyErr>) -> CoreResult<()> {
    py.detach(|| ());
    py.check_signals().map_err(|error| {
        *pending = Some(error);
        Error::Interrupted
    })
}
