//! Doing a job: checks, threads, progress, and what is left of it if it fails.

use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    thread,
};

use shardwise_core::{error::Error as CoreError, parallel::panic_message};

use crate::{
    commit, digest,
    error::{Error, Result, no_room},
    file,
    job::{Destination, Job, Source},
    maps,
    slot::Finding,
    table::{Table, descriptors, lock},
    tiles::Units,
    unit::{Files, Traffic, Worker},
};

/// Bytes of a thread's buffer, of which it has two: what stays in a core's cache between being read and being written.
const BUFFER: i64 = 1 << 20;
/// The number of pieces of a tensor from which on buffers are larger, so that the runs of each are
/// not too short, up to a limit.
const PIECES: usize = 8;
const LARGEST_BUFFER: i64 = 8 << 20;
/// The buffer below which fewer threads with larger buffers are better.
const SMALL_BUFFER: i64 = 256 << 10;
/// The buffer below which reads and writes are too short to be of use.
const LEAST_BUFFER: i64 = 8 << 10;
/// The bytes below which one thread is done before another has started.
const PARALLEL_FROM: i64 = 4 << 20;

/// The options of a run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes of memory for buffers, of all threads together.
    pub budget: i64,
    /// Threads; none for one per core.
    pub threads: Option<usize>,
    /// True if what is written is brought to the disk before the run returns.
    pub sync: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { budget: 64 << 20, threads: None, sync: false }
    }
}

/// The report of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// The bytes that were moved.
    pub traffic: Traffic,
    /// The digest of each destination piece ([`crate::digest`]); 0 where none was asked for.
    pub digests: Vec<u128>,
    /// The CRC-32 of each destination piece; 0 where none was asked for.
    pub crcs: Vec<u32>,
    /// For destination pieces that differ from the file that they are compared with: the piece, by its number, and the
    /// first element, in C order of the tensor, that differs.
    pub differences: Vec<(usize, i64)>,
}

/// The shares of the budget: threads, and bytes of each of the two buffers of each.
fn share(job: &Job, options: &Options, bytes: i64) -> Result<(usize, i64)> {
    if options.budget < 2 * LEAST_BUFFER {
        return Err(Error::Budget { given: options.budget, needed: 2 * LEAST_BUFFER });
    }
    let cores = || thread::available_parallelism().map_or(1, |cores| cores.get());
    let mut threads = options.threads.unwrap_or_else(cores).clamp(1, 256);
    if bytes < PARALLEL_FROM {
        threads = 1;
    }
    let affordable = usize::try_from(options.budget / (2 * SMALL_BUFFER)).unwrap_or(usize::MAX);
    threads = threads.min(affordable.max(1));
    let pieces =
        job.tensors.iter().map(|tensor| tensor.sources.len().max(tensor.destinations.len())).max().unwrap_or(0);
    let useful = BUFFER.saturating_mul((pieces / PIECES) as i64).clamp(BUFFER, LARGEST_BUFFER);
    // More files than can be open at a time: the fewer units, the fewer of them are opened again.
    let files = |is_file: &dyn Fn(usize) -> bool, count: usize| (0..count).filter(|&at| is_file(at)).count();
    let from = files(&|at| matches!(job.sources[at], Source::File(_)), job.sources.len());
    let to = files(&|at| !matches!(job.destinations[at], Destination::Memory(_)), job.destinations.len());
    let useful = if from.max(to) > descriptors() { i64::MAX } else { useful };
    Ok((threads, (options.budget / (2 * threads as i64)).min(useful)))
}

/// Does the job. `poll` is called often, with the bytes that are done and the bytes in all; an error from it ends the
/// run.
///
/// Files of destinations that are to be made must not be there yet. If the run fails, those that it made are removed.
///
/// # Errors
/// What `poll` returns; [`Error::Job`] for pieces that overlap in a file; [`Error::Budget`], [`Error::Space`] before
/// anything is written; otherwise the first fault of a file, named.
pub fn run(job: &Job, options: &Options, poll: &mut dyn FnMut(i64, i64) -> Result<()>) -> Result<Report> {
    let total = job.bytes()?;
    let (threads, limit) = share(job, options, total)?;
    let mut stopped = None;
    let checked = job.check_destinations(&mut || {
        poll(0, total).map_err(|error| {
            stopped = Some(error);
            CoreError::Interrupted
        })
    });
    checked.map_err(|error| stopped.unwrap_or(error))?;
    poll(0, total)?;
    let sources = Table::sources(&job.sources)?;
    let compared = Table::compared(&job.destinations)?;
    let is_mapped = job.sources.iter().any(|source| matches!(source, Source::Mapped(..)));
    let memory = is_mapped.then(maps::own_memory).transpose()?.map(Arc::new);
    check_space(job)?;
    let mut made = Vec::new();
    let done = (|| {
        let destinations = Table::destinations(&job.destinations, &sources, &mut made)?;
        let files = Files { sources, destinations, compared, memory };
        let run = Run::new(job, &files, total)?;
        let report = run.work(threads, limit, poll)?;
        files.sources.check_unchanged()?;
        files.compared.check_unchanged()?;
        if options.sync {
            run.sync_all(poll)?;
        }
        Ok(report)
    })();
    if done.is_err() {
        for (path, folder) in made {
            // The error that is reported is the first one.
            file::remove(path, folder);
        }
    }
    done
}

/// Checks that the file systems have room for the files that are to be made.
fn check_space(job: &Job) -> Result<()> {
    let mut needed: Vec<(&Path, i64)> = Vec::new();
    for destination in &job.destinations {
        let Destination::File { path, size, there: false, .. } = destination else { continue };
        let folder = commit::folder_of(path);
        match needed.iter_mut().find(|(other, _)| *other == folder) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(*size),
            None => needed.push((folder, *size)),
        }
    }
    commit::check_space(&needed)
}

/// A run under way: what the threads share.
struct Run<'a> {
    job: &'a Job,
    files: &'a Files<'a>,
    total: i64,
    done: AtomicI64,
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    found: Mutex<Report>,
}

impl<'a> Run<'a> {
    fn new(job: &'a Job, files: &'a Files<'a>, total: i64) -> Result<Self> {
        let mut report = Report::default();
        let wanted = |wanted: bool| if wanted { job.pieces() } else { 0 };
        report.digests = zeros(wanted(job.tensors.iter().any(|tensor| tensor.wanted.digest)))?;
        report.crcs = zeros(wanted(job.tensors.iter().any(|tensor| tensor.wanted.crc)))?;
        Ok(Self {
            job,
            files,
            total,
            done: AtomicI64::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
            found: Mutex::new(report),
        })
    }

    /// All units, on this thread and others.
    fn work(&self, threads: usize, limit: i64, poll: &mut dyn FnMut(i64, i64) -> Result<()>) -> Result<Report> {
        let units = Mutex::new(Units::new(self.job, limit));
        thread::scope(|scope| {
            for _ in 1..threads {
                // A thread that cannot be started is one helper less; the caller does the work all the same.
                let _ = thread::Builder::new().spawn_scoped(scope, || self.worker(&units, limit, &mut |_, _| Ok(())));
            }
            self.worker(&units, limit, poll);
            // Others may be at their last units.
        });
        if let Some(error) = lock(&self.failure).take() {
            return Err(error);
        }
        poll(self.total, self.total)?;
        let mut report = std::mem::take(&mut *lock(&self.found));
        report.differences.sort_unstable();
        Ok(report)
    }

    /// Takes units until there are none, or something fails.
    fn worker(&self, units: &Mutex<Units<'_>>, limit: i64, poll: &mut dyn FnMut(i64, i64) -> Result<()>) {
        let work = || -> Result<()> {
            let mut worker = Worker::new(self.job, self.files, limit);
            while !self.stop.load(Ordering::Relaxed) {
                poll(self.done.load(Ordering::Relaxed), self.total)?;
                let Some(unit) = lock(units).next()? else { break };
                let findings = worker.run(&unit.tiles)?;
                lock(&self.found).add(self.job, &findings);
                self.done.fetch_add(unit.bytes, Ordering::Relaxed);
            }
            lock(&self.found).traffic.add(worker.traffic);
            Ok(())
        };
        let error = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(payload) => Error::Panicked(panic_message(payload.as_ref())),
        };
        self.stop.store(true, Ordering::Relaxed);
        lock(&self.failure).get_or_insert(error);
    }

    /// Brings every file to the disk, and the folders that hold them.
    fn sync_all(&self, poll: &mut dyn FnMut(i64, i64) -> Result<()>) -> Result<()> {
        let mut folders = HashSet::new();
        for (index, path) in self.files.destinations.files() {
            poll(self.total, self.total)?;
            file::sync(&self.files.destinations.get(index)?.0, path)?;
            folders.insert(commit::folder_of(path));
        }
        folders.into_iter().try_for_each(commit::sync_folder)
    }
}

impl Traffic {
    fn add(&mut self, other: Self) {
        self.read += other.read;
        self.written += other.written;
        self.calls += other.calls;
    }
}

impl Report {
    fn add(&mut self, job: &Job, findings: &[Finding]) {
        for finding in findings {
            let piece = finding.piece as usize;
            if let Some(digest) = self.digests.get_mut(piece) {
                *digest = digest::sum(*digest, finding.digest);
            }
            if let Some(crc) = self.crcs.get_mut(piece) {
                *crc ^= finding.crc;
            }
            if finding.differs >= 0 {
                let tensor = job.tensors.partition_point(|tensor| tensor.first <= piece) - 1;
                let element = finding.differs / job.tensors[tensor].itemsize;
                match self.differences.iter_mut().find(|(other, _)| *other == piece) {
                    Some((_, first)) => *first = element.min(*first),
                    None => self.differences.push((piece, element)),
                }
            }
        }
    }
}

fn zeros<T: Clone + Default>(count: usize) -> Result<Vec<T>> {
    let mut zeros = Vec::new();
    zeros.try_reserve_exact(count).map_err(no_room("the digests"))?;
    zeros.resize(count, T::default());
    Ok(zeros)
}
