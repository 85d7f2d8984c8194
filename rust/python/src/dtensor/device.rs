//! Device names.

use pyo3::prelude::*;
use shardwise_core::dtensor::{DeviceSpec, Error};

use super::{parsed_text, text};
use crate::{
    convert::integer,
    errors::{guard, to_py},
};

/// The parts of a device name: job, replica, task, device type, device index.
type Parts = (Option<String>, Option<i64>, Option<i64>, Option<String>, Option<i64>);

/// Reads a device name.
#[pyfunction]
pub(crate) fn parse_device(text: &Bound<'_, PyAny>) -> PyResult<Parts> {
    guard(|| {
        let text = parsed_text("device name", text)?;
        let spec = DeviceSpec::parse(text).map_err(|problem| {
            let (at, problem) = (problem.at, problem.problem.to_owned());
            to_py(Error::Text { what: "device name", at, problem })
        })?;
        let owned = |part: Option<&str>| part.map(str::to_owned);
        Ok((owned(spec.job), spec.replica, spec.task, owned(spec.device_type), spec.device_index))
    })
}

/// Writes a device name, if its parts can stand in one.
#[pyfunction]
pub(crate) fn print_device(
    job: Option<&Bound<'_, PyAny>>,
    replica: Option<&Bound<'_, PyAny>>,
    task: Option<&Bound<'_, PyAny>>,
    device_type: Option<&Bound<'_, PyAny>>,
    device_index: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    guard(|| {
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
