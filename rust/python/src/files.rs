//! `_core.FileLock`, and what makes files appear at once and for good: their sync, their names, room for them.

use std::path::PathBuf;

use pyo3::prelude::*;
use shardwise_io::commit;

use crate::{
    errors::{answer, guard},
    io::{open_file, to_py, watched},
};

/// A lock of a path against other processes.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct FileLock {
    lock: std::sync::Mutex<Option<commit::Lock>>,
}

#[pymethods]
impl FileLock {
    #[new]
    #[pyo3(signature = (path, /))]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        guard(|| {
            let lock = py.detach(|| commit::Lock::new(&path)).map_err(to_py)?;
            Ok(Self { lock: std::sync::Mutex::new(Some(lock)) })
        })
    }

    /// Ends the lock; a second call does nothing.
    fn release(&self) -> PyResult<()> {
        guard(|| {
            drop(self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take());
            Ok(())
        })
    }
}

/// Brings files, and the folders that hold them, to the disk.
#[pyfunction]
#[pyo3(signature = (paths, /))]
pub(crate) fn sync_files(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<()> {
    guard(|| watched(py, None, |poll| commit::sync(&paths, &mut || poll(0, 1))))
}

/// Renames, and brings the names to the disk if `sync`. With the descriptor of the folder that `source` is in, it is found
/// there.
#[pyfunction]
#[pyo3(signature = (source, folder, target, /, *, sync))]
pub(crate) fn publish(
    py: Python<'_>,
    source: PathBuf,
    folder: Option<i32>,
    target: PathBuf,
    sync: bool,
) -> PyResult<()> {
    guard(|| {
        let folder = folder.map(|descriptor| open_file(descriptor, &source)).transpose()?;
        py.detach(|| commit::publish(&source, folder.as_deref(), &target, sync)).map_err(to_py)
    })
}

/// The bytes that can still be written to a folder's file system.
#[pyfunction]
#[pyo3(signature = (folder, /))]
pub(crate) fn free_space(py: Python<'_>, folder: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    answer(py, || py.detach(|| commit::free_space(&folder)).map_err(to_py))
}
