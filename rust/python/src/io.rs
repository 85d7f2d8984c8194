//! `_core.CopyJob`: jobs of `shardwise-io`, with its errors as exceptions.

use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use numpy::{PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::{
    exceptions::{PyMemoryError, PyOSError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyList, PyTuple},
};
use shardwise_core::{
    copy::{overlap::Disjoint, strided::Strided},
    error::{Error as CoreError, ErrorKind, Result as CoreResult},
};
use shardwise_io::{
    error::{Error, Result},
    job::{Destination, Job, MappedFile, Memory, Source, SourceFile, Wanted},
    maps,
    run::{Options, run},
};

use crate::{
    errors::{InternalError, LayoutError, ParseError, answer, detached, guard},
    views,
};

/// The time between two looks for signals, and reports of progress, of a running job.
const POLL_EVERY: Duration = Duration::from_millis(20);
/// Tensors that are added in between.
const POLL_TENSORS: usize = 4096;
/// The error numbers of a full disk and of a lock that is held, where the system gives none of its own.
const NO_SPACE: i32 = 28;
const WOULD_BLOCK: i32 = 11;
const BROKEN: i32 = 5;
const EXISTS: i32 = 17;
const BAD_DESCRIPTOR: i32 = 9;

/// A list of Python's, a part of which is each holder's description.
type Holders<'py> = Bound<'py, PyList>;

/// A job: sources, destinations, and the tensors between them.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct CopyJob {
    job: Job,
    /// The arrays whose memory the job has.
    _arrays: Vec<Py<PyUntypedArray>>,
}

#[pymethods]
impl CopyJob {
    /// `sources` holds tuples (path, size, (time, change time) or None, descriptor or None) and arrays; `destinations` holds tuples ("write", path, size, folder)
    /// ("fill", path, size, folder) for a file that is there, with the descriptor of its folder or None, and ("compare", path, size, (time, change time) or None),
    /// arrays, and None for nowhere. `program` is, for each tensor, `[itemsize, wanted, dims, source pieces, destination pieces, shape…, rows…]`, with the rows of
    /// `shardwise_io::job::Job::add`.
    #[new]
    #[pyo3(signature = (sources, destinations, program, /))]
    fn new(
        py: Python<'_>,
        sources: &Holders<'_>,
        destinations: &Holders<'_>,
        program: &Bound<'_, PyArray1<i64>>,
    ) -> PyResult<Self> {
        guard(|| {
            let mut arrays = Vec::new();
            let (mut read, mut written) = (Vec::new(), Vec::new());
            let sources: Vec<Source> =
                sources.iter().map(|item| source(&item, &mut arrays, &mut read)).collect::<PyResult<_>>()?;
            // The list of maps takes as long to read as a small job to do.
            let may_be_mapped = !arrays.iter().all(|array| views::owns_memory(array.bind(py)));
            let mut folders = HashMap::new();
            let destinations = destinations
                .iter()
                .map(|item| destination(&item, &mut arrays, &mut written, &mut folders))
                .collect::<PyResult<_>>()?;
            let program = program.try_readonly().map_err(|error| PyTypeError::new_err(format!("program: {error}")))?;
            let program = program.as_slice()?;
            let job = detached(py, |poll| -> CoreResult<Result<Job>> {
                let sources = if may_be_mapped { with_maps(sources) } else { sources };
                match Disjoint::new(&read, &written, poll) {
                    Err(error) if error.kind() == ErrorKind::Layout => {
                        return Ok(Err(Error::Job(overlap(&error))));
                    }
                    checked => checked?,
                };
                let mut job = match Job::new(sources, destinations) {
                    Ok(job) => job,
                    refused => return Ok(refused),
                };
                Ok(add_all(&mut job, program, poll)?.map(|()| job))
            })?;
            Ok(Self { job: job.map_err(to_py)?, _arrays: arrays })
        })
    }

    /// Does the job; gives (bytes read, written, calls), digests, CRCs, differences.
    #[pyo3(signature = (budget, threads, sync, progress, /))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        budget: i64,
        threads: Option<usize>,
        sync: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            let options = Options { budget, threads, sync };
            let report = watched(py, progress, |poll| run(&self.job, &options, poll))?;
            let traffic = report.traffic;
            let counts = (traffic.read, traffic.written, traffic.calls);
            Ok((counts, report.digests, report.crcs, report.differences))
        })
    }
}

/// Runs work with the interpreter released, reporting progress and looking for signals now and then.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    work: impl Send + FnOnce(&mut dyn FnMut(i64, i64) -> Result<()>) -> Result<T>,
) -> PyResult<T> {
    let (mut failure, mut last) = (None, None::<Instant>);
    let report = |done: i64, total: i64| -> PyResult<()> {
        let Some(call) = &progress else { return Ok(()) };
        Python::attach(|py| call.call1(py, (done, total)).map(drop))
    };
    let done = detached(py, |poll| -> CoreResult<Result<T>> {
        let outcome = work(&mut |done, total| {
            if done < total && last.is_some_and(|last| last.elapsed() < POLL_EVERY) {
                return Ok(());
            }
            last = Some(Instant::now());
            report(done, total).map_err(|error| {
                failure = Some(error);
                Error::Interrupted
            })?;
            poll().map_err(|_| Error::Interrupted)
        });
        if matches!(outcome, Err(Error::Interrupted)) { Err(CoreError::Interrupted) } else { Ok(outcome) }
    });
    match failure {
        Some(failure) => Err(failure),
        None => done?.map_err(to_py),
    }
}

fn source(
    item: &Bound<'_, PyAny>,
    arrays: &mut Vec<Py<PyUntypedArray>>,
    memories: &mut Vec<Strided>,
) -> PyResult<Source> {
    if let Ok(array) = item.cast::<PyUntypedArray>() {
        return memory(array, arrays, memories).map(Source::Memory);
    }
    let (path, size, times, descriptor): (PathBuf, i64, Option<Times>, Option<i32>) = item.extract()?;
    let file = descriptor.map(|descriptor| open_file(descriptor, &path)).transpose()?;
    Ok(Source::File(source_file(path, size, times, file)))
}

/// The time of a file's last write, and of its last change of any kind if that matters.
type Times = (i64, Option<i64>);

fn source_file(path: PathBuf, size: i64, times: Option<Times>, file: Option<Arc<File>>) -> SourceFile {
    SourceFile {
        path,
        size,
        modified: times.map(|(modified, _)| modified),
        changed: times.and_then(|(_, changed)| changed),
        file,
    }
}

/// Sources of which those in the memory of mapped files are said to be there.
fn with_maps(mut sources: Vec<Source>) -> Vec<Source> {
    let memories: Vec<Memory> = sources
        .iter()
        .filter_map(|source| match source {
            Source::Memory(memory) => Some(*memory),
            _ => None,
        })
        .collect();
    let mut found = maps::mapped_files(&memories).into_iter();
    for source in &mut sources {
        if let Source::Memory(memory) = source
            && let Some(Some(mapped)) = found.next()
        {
            *source = Source::Mapped(*memory, mapped);
        }
    }
    sources
}

/// The files that arrays are mapped from: for each array none, or the path, the end of what the array has of it, its
/// bytes and when it was last written to, if that is not for this process to do.
#[pyfunction]
#[pyo3(signature = (arrays, /))]
pub(crate) fn mapped_files<'py>(
    py: Python<'py>,
    arrays: Vec<Bound<'py, PyUntypedArray>>,
) -> PyResult<Bound<'py, PyAny>> {
    answer(py, || {
        let memories: Vec<Memory> = arrays.iter().map(|array| views::memory(array, &views::strided(array))).collect();
        let found = py.detach(|| maps::mapped_files(&memories));
        let said = |file: MappedFile| (file.path.into_os_string(), file.end, file.size, file.times);
        Ok(found.into_iter().map(|file| file.map(said)).collect::<Vec<_>>())
    })
}

/// A descriptor of our own for an open file of the caller's.
#[cfg(unix)]
pub(crate) fn open_file(descriptor: i32, path: &Path) -> PyResult<Arc<File>> {
    use std::os::fd::BorrowedFd;
    if descriptor < 0 {
        return Err(PyOSError::new_err((BAD_DESCRIPTOR, "Bad file descriptor", path.as_os_str().to_owned())));
    }
    // SAFETY: a number that is not -1; whether it is open is what duplicating it finds out, and nothing else is done
    // with it.
    let own = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned();
    let own =
        own.map_err(|error| to_py(Error::Os { operation: "opening", path: path.to_owned(), offset: None, error }))?;
    Ok(Arc::new(File::from(own)))
}

#[cfg(not(unix))]
pub(crate) fn open_file(_: i32, path: &Path) -> PyResult<Arc<File>> {
    let opened = File::open(path).map(Arc::new);
    opened.map_err(|error| to_py(Error::Os { operation: "opening", path: path.to_owned(), offset: None, error }))
}

fn destination(
    item: &Bound<'_, PyAny>,
    arrays: &mut Vec<Py<PyUntypedArray>>,
    memories: &mut Vec<Strided>,
    folders: &mut HashMap<i32, Arc<File>>,
) -> PyResult<Destination> {
    if item.is_none() {
        return Ok(Destination::Nowhere);
    }
    if let Ok(array) = item.cast::<PyUntypedArray>() {
        if !views::writeable(array) {
            return Err(PyValueError::new_err("a destination array is read-only"));
        }
        return memory(array, arrays, memories).map(Destination::Memory);
    }
    let tuple = item.cast::<PyTuple>()?;
    let how = How::of(tuple.get_item(0)?.extract()?)?;
    if let How::Compare = how {
        let (_, path, size, times): (String, PathBuf, i64, Option<Times>) = tuple.extract()?;
        return Ok(Destination::Compared(source_file(path, size, times, None)));
    }
    let (_, path, size, folder): (String, PathBuf, i64, Option<i32>) = tuple.extract()?;
    // Thousands of files are in one folder, which takes one descriptor.
    let folder = match folder {
        Some(number) => Some(match folders.get(&number) {
            Some(folder) => Arc::clone(folder),
            None => Arc::clone(folders.entry(number).or_insert(open_file(number, &path)?)),
        }),
        None => None,
    };
    Ok(Destination::File { path, size, there: matches!(how, How::Fill), folder })
}

/// The treatment of a file that is a destination: the first item of its description.
enum How {
    /// The file is made.
    Write,
    /// The file is there.
    Fill,
    /// The file is compared with what would be written.
    Compare,
}

impl How {
    fn of(said: &str) -> PyResult<Self> {
        match said {
            "write" => Ok(Self::Write),
            "fill" => Ok(Self::Fill),
            "compare" => Ok(Self::Compare),
            _ => {
                Err(PyValueError::new_err(format!("a destination is \"write\", \"fill\" or \"compare\", not {said:?}")))
            }
        }
    }
}

fn memory(
    array: &Bound<'_, PyUntypedArray>,
    arrays: &mut Vec<Py<PyUntypedArray>>,
    memories: &mut Vec<Strided>,
) -> PyResult<Memory> {
    if array.dtype().has_object() {
        return Err(PyTypeError::new_err("object arrays hold references, which cannot be copied as bytes"));
    }
    let strided = views::strided(array);
    memories.push(strided.clone());
    arrays.push(array.clone().unbind());
    Ok(views::memory(array, &strided))
}

fn overlap(error: &CoreError) -> String {
    match error {
        CoreError::OverlapsItself { index } => {
            format!("destination array {index} overlaps itself in memory (a zero stride?), so it cannot be written")
        }
        CoreError::OverlapsOther { index, other, position } => {
            let other = if *other == "out" { "destination" } else { "source" };
            format!("destination array {index} shares memory with {other} array {position}")
        }
        other => other.to_string(),
    }
}

/// Adds the tensors of a program.
fn add_all(job: &mut Job, program: &[i64], poll: &mut dyn FnMut() -> CoreResult<()>) -> CoreResult<Result<()>> {
    let (mut rest, mut count) = (program, 0);
    while !rest.is_empty() {
        count += 1;
        if count % POLL_TENSORS == 0 {
            poll()?;
        }
        match add_one(job, &mut rest, poll) {
            Err(Error::Interrupted) => return Err(CoreError::Interrupted),
            Err(error) => return Ok(Err(error)),
            Ok(()) => {}
        }
    }
    Ok(Ok(()))
}

/// Adds the first tensor of what is left of a program.
fn add_one(job: &mut Job, rest: &mut &[i64], poll: &mut dyn FnMut() -> CoreResult<()>) -> Result<()> {
    let mut take = |count: Option<usize>| -> Result<&[i64]> {
        let taken = count.and_then(|count| rest.split_at_checked(count));
        let (taken, after) = taken.ok_or_else(|| Error::Job("program ends within a tensor".to_owned()))?;
        *rest = after;
        Ok(taken)
    };
    let head = take(Some(5))?;
    let dims = usize::try_from(head[2]).ok();
    let rows = |pieces: i64| usize::try_from(pieces).ok()?.checked_mul(dims?.checked_mul(3)?.checked_add(2)?);
    let shape = take(dims)?;
    let sources = take(rows(head[3]))?;
    let destinations = take(rows(head[4]))?;
    let wanted = Wanted { digest: head[1] & 1 != 0, crc: head[1] & 2 != 0 };
    job.add(head[0], shape, sources, destinations, wanted, poll)
}

pub(crate) fn to_py(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Os { operation, path, offset, error } => {
            let place = offset.map(|at| format!(" at byte {at}")).unwrap_or_default();
            let number = error.raw_os_error().unwrap_or(BROKEN);
            let text = error.to_string();
            let text = text.split(" (os error").next().unwrap_or_default();
            PyOSError::new_err((number, format!("{text} ({operation}{place})"), path.into_os_string()))
        }
        Error::Space { path, needed, available } => {
            let text = format!("No space left on device ({needed} bytes are needed, but {available} are free)");
            PyOSError::new_err((NO_SPACE, text, path.into_os_string()))
        }
        Error::Taken { path, what } => PyOSError::new_err((EXISTS, what, path.into_os_string())),
        Error::Locked { path, .. } => PyOSError::new_err((WOULD_BLOCK, message, path.into_os_string())),
        Error::Ends { .. } | Error::Kind { .. } | Error::Changed { .. } => ParseError::new_err(message),
        Error::Job(_) | Error::Budget { .. } => LayoutError::new_err(message),
        Error::Memory { .. } => PyMemoryError::new_err(message),
        Error::Interrupted | Error::Panicked(_) => InternalError::new_err(message),
    }
}
