//! The mesh and layout of the DTensor dialect; presented in Python by `shardwise.dtensor`.

mod device;
mod layout;
mod mesh;
mod message;

use std::hash::{DefaultHasher, Hash, Hasher};

use pyo3::{
    exceptions::{PyIndexError, PyMemoryError, PyTypeError},
    prelude::*,
    types::PyString,
};
use shardwise_core::dtensor::{DeviceList, Error, Mesh, Result as CoreResult, TiledMesh};

use crate::{
    convert::repr,
    errors::{SizeOverflowError, to_py},
    memory::room,
};

pub(crate) use device::{parse_device, print_device};
pub(crate) use layout::DtensorLayout;
pub(crate) use mesh::DtensorMesh;
pub(crate) use message::{decode_layout, decode_mesh, encode_layout, encode_mesh};

/// A string argument.
fn text<'a>(name: &str, value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    string(name, value)?.to_str().map_err(|error| {
        let surrogate = || PyTypeError::new_err(format!("{name} is not valid Unicode (it holds a lone surrogate)"));
        if error.is_instance_of::<PyMemoryError>(value.py()) { error } else { surrogate() }
    })
}

/// The bytes that reading takes at most for each byte that is read, all steps together: measured in
/// `tests/process/test_memory.py`, and some more.
const READING: usize = 40;

/// Asks for the memory that reading `length` bytes takes.
fn room_to_read(what: &str, length: usize) -> PyResult<()> {
    room(what, length.saturating_mul(READING))
}

/// Asks for the memory that writing the mesh takes: text or bytes of its devices' names and ids, twice, while they grow.
fn room_to_write(mesh: &Mesh) -> PyResult<()> {
    let names = |devices: Option<&DeviceList>| devices.map_or(0, |devices| devices.joined().len() + 8 * devices.len());
    let ids = usize::try_from(mesh.size()).unwrap_or(usize::MAX).saturating_add(mesh.local_ids().len());
    let names = names(mesh.local_devices()) + names(mesh.tiled().map(TiledMesh::global_devices));
    room("the text of the mesh", ids.saturating_mul(100).saturating_add(8 * names))
}

/// A string argument that is to be read; what it cannot hold is an error of the format.
fn parsed_text<'a>(what: &'static str, value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    let string = string(what, value)?;
    let text = string.to_str().map_err(|error| {
        if error.is_instance_of::<PyMemoryError>(value.py()) {
            return error;
        }
        let at = string.to_string_lossy().find('\u{fffd}').unwrap_or_default();
        to_py(Error::Text { what, at, problem: "a lone surrogate, which is not a character".to_owned() })
    })?;
    room_to_read(what, text.len())?;
    Ok(text)
}

fn string<'a, 'py>(name: &str, value: &'a Bound<'py, PyAny>) -> PyResult<&'a Bound<'py, PyString>> {
    value.cast().map_err(|_| PyTypeError::new_err(format!("{name} must be a string, got {}", repr(value))))
}

/// An integer that is a position; one that 64 bits do not hold is outside of whatever it is a position in.
fn outside(name: &str) -> impl Fn(PyErr) -> PyErr {
    move |error| {
        Python::attach(|py| {
            if error.is_instance_of::<SizeOverflowError>(py) {
                return PyIndexError::new_err(format!("{name} is out of range: {}", error.value(py)));
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
