//! Device names.

use pyo3::{IntoPyObjectExt, prelude::*};
use shardwise_core::dtensor::{DeviceSpec, Error};

use super::{parsed_text, text};
use crate::{
    convert::integer,
    errors::{answer, to_py},
};

/// The parts of a device name: job, replica, task, device type, device index.
type Parts<'a> = (Option<&'a str>, Option<i64>, Option<i64>, Option<&'a str>, Option<i64>);

/// Reads a device name.
#[pyfunction]
pub(crate) fn parse_device<'py>(py: Python<'py>, text: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    answer(py, || {
        let text = parsed_text("device name", text)?;
        let spec = DeviceSpec::parse(text).map_err(|problem| {
            let (at, problem) = (problem.at, problem.problem.to_owned());
            to_py(Error::Text { what: "device name", at, problem })
        })?;
        let parts: Parts<'_> = (spec.job, spec.replica, spec.task, spec.device_type, spec.device_index);
        parts.into_bound_py_any(py)
    })
}

/// Writes a device name, if its parts can stand in one.
#[pyfunction]
pub(crate) fn print_device<'py>(
    py: Python<'py>,
    job: Option<&Bound<'py, PyAny>>,
    replica: Option<&Bound<'py, PyAny>>,
    task: Option<&Bound<'py, PyAny>>,
    device_type: Option<&Bound<'py, PyAny>>,
    device_index: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    answer(py, || {
        let replica = replica.map(|n| integer("replica", n)).transpose()?;
        let task = task.map(|n| integer("task", n)).transpose()?;
        let device_index = device_index.map(|n| integer("device_index", n)).transpose()?;
        let job = job.map(|name| text("job", name)).transpose()?;
        let device_type = device_type.map(|name| text("device_type", name)).transpose()?;
        match DeviceSpec::new(job, replica, task, device_type, device_index) {
            Ok(spec) => Ok(spec.to_string()),
            Err((part, problem)) => {
                let text = match part {
                    "job" => job.unwrap_or_default().to_owned(),
                    "device_type" => device_type.unwrap_or_default().to_owned(),
                    "replica" => replica.unwrap_or_default().to_string(),
                    "task" => task.unwrap_or_default().to_string(),
                    _ => device_index.unwrap_or_default().to_string(),
                };
                Err(to_py(Error::Device { what: part.to_owned(), text, problem: problem.to_owned() }))
            }
        }
    })
}
