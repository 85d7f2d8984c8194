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

/// The CRC-32 of two runs of bytes, one after the other, from the CRC-32 of each and the length of the second.
#[pyfunction]
#[pyo3(signature = (first, second, length, /))]
pub(crate) fn joined_crc(py: Python<'_>, first: u32, second: u32, length: u64) -> PyResult<Bound<'_, PyAny>> {
    answer(py, || Ok(shardwise_io::crc_before(first, length) ^ second))
}
