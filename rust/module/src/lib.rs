//! The compiled module `shardwise._core`, which is `shardwise_python`.
//!
//! A crate of its own, for the crate that is linked last says how the whole is optimised. The bindings are made small, and
//! linked by themselves they would take the loops of the core with them, which must be fast.

use pyo3::prelude::*;

/// The compiled part of shardwise.
#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    shardwise_python::fill(module)
}
