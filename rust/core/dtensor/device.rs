//! Device names: `/job:worker/replica:0/task:1/device:GPU:3` and its shorter forms.
//!
//! TensorFlow reads them with two parsers which do not agree: `DeviceSpec` in Python and `DeviceNameUtils` in C++. What
//! is accepted here is what both would take for the same device, and the local forms of the first: segments joined by
//! `/`, after an optional leading one, each at most once and in any order,
//!
//! - `job:NAME`, `replica:N`, `task:N`;
//! - `device:TYPE:N` or `device:TYPE:*`, where a type `cpu` or `gpu` counts as `CPU` or `GPU`;
//! - `TYPE`, `TYPE:N` or `TYPE:*` for the types that TensorFlow knows, in any case.
//!
//! Names begin with an ASCII letter and go on with letters, digits and `_`; numbers are decimal, without sign or
//! leading zeros, and at most 2^63 - 1.

use std::fmt;

/// The types that may stand without `device:` before them.
const SHORT_TYPES: [&str; 5] = ["CPU", "GPU", "TPU", "CUSTOM", "EPU"];

/// The parts of a device name, each of which may be left open.
///
/// ```
/// use shardwise_core::dtensor::DeviceSpec;
/// let spec = DeviceSpec::parse("/job:worker/task:1/gpu:3")?;
/// assert_eq!((spec.job, spec.task, spec.device_type), (Some("worker"), Some(1), Some("GPU")));
/// assert_eq!(spec.to_string(), "/job:worker/task:1/device:GPU:3");
/// # Ok::<(), shardwise_core::dtensor::DeviceProblem>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceSpec<'a> {
    /// The job, such as `localhost` or `worker`.
    pub job: Option<&'a str>,
    /// The replica, nearly always 0.
    pub replica: Option<i64>,
    /// The task: the process within the job.
    pub task: Option<i64>,
    /// The type, such as `CPU`.
    pub device_type: Option<&'a str>,
    /// The number among the devices of the type; none stands for any.
    pub device_index: Option<i64>,
}

/// A reason why a text is not a device name, and the byte at which that shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{problem} (at byte {at})")]
pub struct DeviceProblem {
    /// The byte offset in the name.
    pub at: usize,
    /// The mistake at that place.
    pub problem: &'static str,
}

impl<'a> DeviceSpec<'a> {
    /// Reads a device name.
    ///
    /// # Errors
    /// The first place at which `text` is not a device name.
    pub fn parse(text: &'a str) -> Result<Self, DeviceProblem> {
        let mut spec = Self::default();
        let mut at = usize::from(text.starts_with('/'));
        if at == text.len() {
            return Ok(spec);
        }
        for segment in text[at..].split('/') {
            spec.read_segment(segment).map_err(|problem| DeviceProblem { at, problem })?;
            at += segment.len() + 1;
        }
        Ok(spec)
    }

    /// A spec of the given parts, if they are such as a device name can hold.
    ///
    /// # Errors
    /// What is wrong, and the name of the part.
    pub fn new(
        job: Option<&'a str>,
        replica: Option<i64>,
        task: Option<i64>,
        device_type: Option<&'a str>,
        device_index: Option<i64>,
    ) -> Result<Self, (&'static str, &'static str)> {
        if let Some(job) = job {
            name(job).map_err(|problem| ("job", problem))?;
        }
        for (part, number) in [("replica", replica), ("task", task), ("device_index", device_index)] {
            if number.is_some_and(|n| n < 0) {
                return Err((part, "a number in a device name cannot be negative"));
            }
        }
        let device_type = device_type.map(canonical_type).transpose().map_err(|problem| ("device_type", problem))?;
        if device_type.is_none() && device_index.is_some() {
            return Err(("device_index", "an index needs a device_type"));
        }
        Ok(Self { job, replica, task, device_type, device_index })
    }

    fn read_segment(&mut self, segment: &'a str) -> Result<(), &'static str> {
        if let Some(job) = segment.strip_prefix("job:") {
            return set(&mut self.job, name(job)?);
        }
        if let Some(replica) = segment.strip_prefix("replica:") {
            return set(&mut self.replica, number(replica)?);
        }
        if let Some(task) = segment.strip_prefix("task:") {
            return set(&mut self.task, number(task)?);
        }
        let (device_type, index) = if let Some(device) = segment.strip_prefix("device:") {
            let (device_type, index) = device.split_once(':').ok_or("a device needs a type and an index, or `*`")?;
            (canonical_type(device_type)?, index)
        } else {
            let (word, index) = segment.split_once(':').unwrap_or((segment, "*"));
            let known = SHORT_TYPES.into_iter().find(|short| short.eq_ignore_ascii_case(word));
            (known.ok_or("neither job, replica, task, device nor a known device type")?, index)
        };
        set(&mut self.device_type, device_type)?;
        if index != "*" {
            self.device_index = Some(number(index)?);
        }
        Ok(())
    }
}

impl fmt::Display for DeviceSpec<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(job) = self.job {
            write!(f, "/job:{job}")?;
        }
        if let Some(replica) = self.replica {
            write!(f, "/replica:{replica}")?;
        }
        if let Some(task) = self.task {
            write!(f, "/task:{task}")?;
        }
        match (self.device_type, self.device_index) {
            (Some(device_type), Some(index)) => write!(f, "/device:{device_type}:{index}"),
            (Some(device_type), None) => write!(f, "/device:{device_type}:*"),
            (None, _) => Ok(()),
        }
    }
}

fn set<T>(part: &mut Option<T>, value: T) -> Result<(), &'static str> {
    if part.replace(value).is_some() { Err("a part that is given twice") } else { Ok(()) }
}

fn name(text: &str) -> Result<&str, &'static str> {
    let bytes = text.as_bytes();
    if !bytes.first().is_some_and(u8::is_ascii_alphabetic) {
        return Err("a name that does not begin with an ASCII letter");
    }
    if !bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_') {
        return Err("a name with characters other than ASCII letters, digits and `_`");
    }
    Ok(text)
}

#[inline]
fn canonical_type(text: &str) -> Result<&str, &'static str> {
    Ok(match name(text)? {
        "cpu" => "CPU",
        "gpu" => "GPU",
        other => other,
    })
}

/// A decimal number as it would be printed: no sign, no leading zero, at most 2^63 - 1.
#[inline]
pub(super) fn number(text: &str) -> Result<i64, &'static str> {
    let bytes = text.as_bytes();
    if bytes.is_empty() {
        return Err("not a decimal number");
    }
    let mut value = Some(0_i64);
    for byte in bytes {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return Err("not a decimal number");
        }
        value = value.and_then(|n| n.checked_mul(10)?.checked_add(i64::from(digit)));
    }
    if bytes[0] == b'0' && bytes.len() > 1 {
        return Err("a number with a leading zero");
    }
    value.ok_or("a number over 9223372036854775807 (2**63 - 1)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_forms_of_one_device() {
        let full = "/job:localhost/replica:0/task:0/device:TPU:0";
        for text in [full, "job:localhost/replica:0/task:0/TPU:0", "/task:0/replica:0/job:localhost/tpu:0"] {
            assert_eq!(DeviceSpec::parse(text).unwrap().to_string(), full, "{text}");
        }
        for (text, printed) in [
            ("CPU:0", "/device:CPU:0"),
            ("cpu", "/device:CPU:*"),
            ("/device:cpu:*", "/device:CPU:*"),
            ("/device:tpu:1", "/device:tpu:1"),
            ("Epu:9223372036854775807", "/device:EPU:9223372036854775807"),
            ("", ""),
            ("/", ""),
            ("/job:a", "/job:a"),
        ] {
            assert_eq!(DeviceSpec::parse(text).unwrap().to_string(), printed, "{text}");
        }
    }

    #[test]
    fn what_is_no_device() {
        for (text, at) in [
            ("foo", 0),
            ("//CPU:0", 1),
            ("CPU:0/", 6),
            ("/job:", 1),
            ("/job:a-b/CPU:0", 1),
            ("/job:a/job:a", 7),
            ("/CPU:0/GPU:0", 7),
            ("/task:*", 1),
            ("/task:-1", 1),
            ("/task:+1", 1),
            ("/task:01", 1),
            ("/task:1_0", 1),
            ("/task:9223372036854775808", 1),
            ("/device:CPU", 1),
            ("/device:*:1", 1),
            ("/device::1", 1),
            ("/device:CPU:0:1", 1),
            ("CPU:", 0),
            ("CPU:0,CPU:1", 0),
            ("XPU:0", 0),
            ("CPU:\u{661}", 0),
        ] {
            assert_eq!(DeviceSpec::parse(text).map_err(|e| e.at), Err(at), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_printing_is_its_inverse(text in "(/?(job:|replica:|task:|device:|CPU|gpu|[a-z:*0-9/é]){0,8})") {
            if let Ok(spec) = DeviceSpec::parse(&text) {
                let printed = spec.to_string();
                prop_assert_eq!(DeviceSpec::parse(&printed), Ok(spec));
            }
        }
    }
}
