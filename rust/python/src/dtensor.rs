//! The mesh and layout of the DTensor dialect; presented in Python by `shardwise.dtensor`.

mod device;
mod layout;
mod mesh;
mod message;

use std::hash::{DefaultHasher, Hash, Hasher};

use pyo3::{
    exceptions::{PyIndexError, PyTypeError},
    prelude::*,
    types::PyString,
};
use shardwise_core::dtensor::{Error, Result as CoreResult};

use crate::{
    convert::repr,
    errors::{SizeOverflowError, to_py},
};

pub(crate) use device::{parse_device, print_device};
pub(crate) use layout::DtensorLayout;
pub(crate) use mesh::DtensorMesh;
pub(crate) use message::{decode_layout, decode_mesh, encode_layout, encode_mesh};

/// A string argument.
fn text<'a>(name: &str, value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    let string = string(name, value)?;
    string
        .to_str()
        .map_err(|_| PyTypeError::new_err(format!("{name} is not valid Unicode (it holds a lone surrogate)")))
}

/// A string argument that is to be read; what it cannot hold is an error of the format.
fn parsed_text<'a>(what: &'static str, value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    let string = string(what, value)?;
    string.to_str().map_err(|_| {
        let at = string.to_string_lossy().find('\u{fffd}').unwrap_or_default();
        to_py(Error::Text { what, at, problem: "a lone surrogate, which is no character".to_owned() })
    })
}

fn string<'a, 'py>(name: &str, value: &'a Bound<'py, PyAny>) -> PyResult<&'a Bound<'py, PyString>> {
    value.cast().map_err(|_| PyTypeError::new_err(format!("{name} must be a string, got {}", repr(value))))
}

/// An integer that is a position; one that 64 bits do not hold is outside of whatever it is a position in.
fn outside(name: &str) -> impl Fn(PyErr) -> PyErr {
    move |error| {
        Python::attach(|py| {
            if error.is_instance_of::<SizeOverflowError>(py) {
                return PyIndexError::new_err(format!("{name} is outside of anything: {}", error.value(py)));
            }
            error
        })
    }
}

fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
