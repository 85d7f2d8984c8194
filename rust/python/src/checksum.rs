//! Checksums of stored formats.

use pyo3::{prelude::*, types::PyBytes};

use crate::errors::answer;

/// The CRC-32C of some bytes.
#[pyfunction]
#[pyo3(signature = (data, /))]
pub(crate) fn crc32c<'py>(data: &Bound<'py, PyBytes>) -> PyResult<Bound<'py, PyAny>> {
    answer(data.py(), || {
        let bytes = data.as_bytes();
        Ok(data.py().detach(|| shardwise_io::crc32c::crc32c(bytes)))
    })
}
