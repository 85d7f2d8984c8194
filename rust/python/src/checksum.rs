//! Checksums of stored formats.

use pyo3::{prelude::*, types::PyBytes};

use crate::errors::guard;

/// The CRC-32C of some bytes.
#[pyfunction]
#[pyo3(signature = (data, /))]
pub(crate) fn crc32c(data: &Bound<'_, PyBytes>) -> PyResult<u32> {
    guard(|| {
        let bytes = data.as_bytes();
        Ok(data.py().detach(|| shardwise_io::crc32c::crc32c(bytes)))
    })
}
