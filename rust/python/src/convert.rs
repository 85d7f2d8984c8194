//! Python arguments as Rust values, with errors that name the argument.

use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::{
    PyTypeInfo,
    exceptions::{PyIndexError, PyMemoryError, PyOverflowError, PyTypeError},
    intern,
    prelude::*,
    types::{PyBool, PyByteArray, PyBytes, PyDict, PyInt, PyIterator, PyList, PySequence, PyString, PyTuple},
};

use crate::errors::{InternalError, SizeOverflowError, answer};

/// An integer: a Python int or anything with `__index__` (numpy integers), but no bool.
pub(crate) fn integer(name: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    if value.is_exact_instance_of::<PyInt>() {
        return value.extract().map_err(|error| overflow(name, value, error));
    }
    let method = intern!(value.py(), "__index__");
    if value.is_instance_of::<PyBool>() || !value.hasattr(method)? {
        return Err(not_an_integer(name, value));
    }
    let index = value.call_method0(method).map_err(|error| {
        // What an `__index__` raises of its own accord is the caller's affair and goes through.
        if error.is_instance_of::<PyTypeError>(value.py()) { not_an_integer(name, value) } else { error }
    })?;
    index.extract().map_err(|error| overflow(name, value, error))
}

/// An integer that is a position: one beyond 64 bits is outside every range, not too large a size.
pub(crate) fn position(name: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    integer(name, value).map_err(|error| outside(value.py(), error))
}

/// A sequence of positions.
pub(crate) fn positions(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    integers(name, value).map_err(|error| outside(value.py(), error))
}

fn outside(py: Python<'_>, error: PyErr) -> PyErr {
    if error.is_instance_of::<SizeOverflowError>(py) {
        return PyIndexError::new_err(error.value(py).to_string());
    }
    error
}

fn not_an_integer(name: &str, value: &Bound<'_, PyAny>) -> PyErr {
    let given = value.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!("{name} must be an integer, got {} ({given})", repr(value)))
}

fn overflow(name: &str, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(value.py()) {
        return SizeOverflowError::new_err(format!("{name} is {}, outside the 64-bit range", repr(value)));
    }
    error
}

/// The value's repr, cut short: it goes into a message.
pub(crate) fn repr(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| "an object whose repr fails".to_owned(), |text| text.to_string());
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// A sequence of integers: a tuple, a list, a one-dimensional array, a range; not text, bytes, a set or a mapping.
pub(crate) fn integers(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if let Ok(tuple) = value.cast_exact::<PyTuple>()
        && tuple.len() <= 64
    {
        return tuple.iter().enumerate().map(|(i, item)| entry(name, i, &item)).collect();
    }
    let items = sequence(value)
        .ok_or_else(|| PyTypeError::new_err(format!("{name} must be a sequence of integers, got {}", repr(value))))?;
    listed(name, items, |i, item| entry(name, i, item))
}

/// Makes what these functions keep: see `lib`.
pub(crate) fn prepare(py: Python<'_>) -> PyResult<()> {
    let numbers = PyArray1::from_vec(py, vec![0_i64]);
    drop(numbers.try_readonly());
    sequence(&numbers);
    PySequence::type_object(py);
    // What is no integer has its name looked up.
    drop(integer("", &py.None().into_bound(py)));
    Ok(())
}

/// Length and items of a sequence. Text and bytes are sequences too, but never what was meant.
fn sequence<'py>(value: &Bound<'py, PyAny>) -> Option<(usize, Bound<'py, PyIterator>)> {
    let py = value.py();
    let length = value.len().ok()?;
    let indexable = value.hasattr(intern!(py, "__getitem__")).unwrap_or(false);
    let excluded = value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>()
        || value.is_instance_of::<PyDict>();
    if indexable && !excluded { Some((length, value.try_iter().ok()?)) } else { None }
}

/// A list of what `entry` makes of each item. A sequence may be longer than any memory: a range is
/// one.
pub(crate) fn listed<'py, T>(
    name: &str,
    (length, items): (usize, Bound<'py, PyIterator>),
    mut entry: impl FnMut(usize, &Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let mut entries = Vec::new();
    let too_many = |_| PyMemoryError::new_err(format!("{name}: {length} are too many to list"));
    entries.try_reserve_exact(length).map_err(too_many)?;
    for (i, item) in items.enumerate() {
        entries.try_reserve(1).map_err(too_many)?; // Some sequences give more than they say that they have.
        entries.push(entry(i, &item?)?);
    }
    Ok(entries)
}

fn entry(name: &str, position: usize, item: &Bound<'_, PyAny>) -> PyResult<i64> {
    if item.is_exact_instance_of::<PyInt>()
        && let Ok(value) = item.extract()
    {
        return Ok(value);
    }
    integer(&format!("{name}[{position}]"), item)
}

/// An argument of offsets or ids: one, or an array of them.
pub(crate) enum Numbers<'py> {
    One(i64),
    Many(NumberArray<'py>),
}

/// A C-contiguous, aligned int64 array.
pub(crate) struct NumberArray<'py> {
    array: PyReadonlyArrayDyn<'py, i64>,
    pub(crate) shape: Vec<usize>,
}

impl<'py> Numbers<'py> {
    pub(crate) fn new(name: &str, value: &Bound<'py, PyAny>) -> PyResult<Self> {
        if value.is_exact_instance_of::<PyInt>() {
            return position(name, value).map(Self::One);
        }
        let array = match ready(value) {
            Some(array) => array.clone(),
            None if value.cast::<PyUntypedArray>().is_err() && value.try_iter().is_err() => {
                return position(name, value).map(Self::One);
            }
            None => {
                let array = int64_array(name, value).map_err(|error| outside(value.py(), error))?;
                array.cast_into::<PyArrayDyn<i64>>()?
            }
        };
        let shape = array.shape().to_vec();
        let array = array.try_readonly().map_err(|error| PyTypeError::new_err(format!("{name}: {error}")))?;
        Ok(Self::Many(NumberArray { array, shape }))
    }

    /// The numbers in C order.
    pub(crate) fn slice(&self) -> PyResult<&[i64]> {
        match self {
            Self::One(one) => Ok(std::slice::from_ref(one)),
            Self::Many(array) => array.slice(),
        }
    }
}

/// The value, if `int64_array` would give it back as it is, which takes that function longer to find out.
fn ready<'a, 'py>(value: &'a Bound<'py, PyAny>) -> Option<&'a Bound<'py, PyArrayDyn<i64>>> {
    value.cast_exact::<PyUntypedArray>().ok()?;
    let array = value.cast::<PyArrayDyn<i64>>().ok()?;
    (array.is_c_contiguous() && array.data().is_aligned()).then_some(array)
}

/// The value as an int64 array that a slice may be taken of; converts (and copies) only what is not one already.
fn int64_array<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    value.py().import("shardwise._arguments")?.call_method1("int64_array", (name, value))
}

/// The number of `arrays`, from the first on, that are of numpy's own type, of the shape that
/// `shapes` has for them, and of `dtype` itself. Whether the next one will do all the same is for
/// the caller to say.
#[pyfunction]
#[pyo3(signature = (arrays, shapes, dtype, /))]
pub(crate) fn count_fitting<'py>(
    arrays: &Bound<'py, PyList>,
    shapes: &Bound<'py, PyList>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    answer(arrays.py(), || {
        let fits = |array: &Bound<'_, PyAny>, shape: &Bound<'_, PyAny>| {
            let (Ok(array), Ok(shape)) = (array.cast_exact::<PyUntypedArray>(), shape.cast::<PyTuple>()) else {
                return false;
            };
            let same =
                |(size, &n): (Borrowed<'_, '_, PyAny>, &usize)| size.extract().is_ok_and(|size: usize| size == n);
            shape.len() == array.ndim()
                && shape.iter_borrowed().zip(array.shape()).all(same)
                && array.dtype().as_any().is(dtype)
        };
        Ok(arrays.iter().zip(shapes.iter()).take_while(|(array, shape)| fits(array, shape)).count())
    })
}

/// A sequence of strings.
pub(crate) fn strings(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let wrong = || PyTypeError::new_err(format!("{name} must be a sequence of strings, got {}", repr(value)));
    listed(name, sequence(value).ok_or_else(wrong)?, |i, item| {
        if !item.is_instance_of::<PyString>() {
            return Err(PyTypeError::new_err(format!("{name}[{i}] must be a string, got {}", repr(item))));
        }
        let given = item.cast::<PyString>()?.to_str().map_err(|error| {
            let surrogate =
                || PyTypeError::new_err(format!("{name}[{i}] is not valid Unicode (it holds a lone surrogate)"));
            if error.is_instance_of::<PyMemoryError>(item.py()) { error } else { surrogate() }
        })?;
        let mut text = String::new();
        let too_long = |_| PyMemoryError::new_err(format!("{name}: no room for a text of {} bytes", given.len()));
        text.try_reserve_exact(given.len()).map_err(too_long)?;
        text.push_str(given);
        Ok(text)
    })
}

impl NumberArray<'_> {
    /// The numbers in C order.
    pub(crate) fn slice(&self) -> PyResult<&[i64]> {
        self.array.as_slice().map_err(|error| InternalError::new_err(error.to_string()))
    }
}
