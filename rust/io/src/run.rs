//! Doing a job: checks, threads, progress, and what is left of it if it fails.

use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    commit, digest,
    error::{Error, Result},
    file,
    job::{Destination, Job},
    journal::{Journal, Past, fingerprint},
    slot::Finding,
    table::{Table, lock},
    tiles::{Unit, Units, Work},
    unit::{Files, Traffic, Worker},
};

/// Bytes of a thread's buffer, of which it has two: what stays in a core's cache between being read and being written.
const BUFFER: i64 = 1 << 20;
/// Of tensors in more pieces than this, buffers are larger, so that the runs of each are not too short, up to a limit.
const PIECES: usize = 8;
const LARGEST_BUFFER: i64 = 8 << 20;
/// With less than this, fewer threads with larger buffers are better.
const SMALL_BUFFER: i64 = 256 << 10;
/// With less than this, reads and writes are too short to be of use.
const LEAST_BUFFER: i64 = 8 << 10;
/// Below this many bytes, one thread is done before another has started.
const PARALLEL_FROM: i64 = 4 << 20;
/// Without syncs, a journal is brought up to date when this time has passed.
const RECORD_EVERY: Duration = Duration::from_millis(100);

/// How a job is done.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes of memory for buffers, of all threads together.
    pub budget: i64,
    /// Threads; none for one per core.
    pub threads: Option<usize>,
    /// Whether what is written is brought to the disk before the run returns.
    pub sync: bool,
    /// Where a record of what is done is kept, so that the same job, run again after a crash, goes on. The folder should
    /// be one that nobody else writes to.
    pub journal: Option<PathBuf>,
    /// Bytes after which the journal is brought up to date. If the run syncs, this is how much is done twice at most,
    /// and how often everything is synced; if not, it is done ten times a second anyhow.
    pub record_every: i64,
}

impl Default for Options {
    fn default() -> Self {
        Self { budget: 64 << 20, threads: None, sync: false, journal: None, record_every: 1 << 30 }
    }
}

/// What was done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What was moved.
    pub traffic: Traffic,
    /// Bytes of destinations that an earlier run had done.
    pub resumed: i64,
    /// The digest of each destination piece ([`crate::digest`]); 0 where none was asked for.
    pub digests: Vec<u128>,
    /// The CRC-32 of each destination piece; 0 where none was asked for.
    pub crcs: Vec<u32>,
    /// For destination pieces that differ from the file that they are compared with: the piece, by its number, and the
    /// first element, in C order of the tensor, that differs.
    pub differences: Vec<(usize, i64)>,
}

/// How the budget is shared out: threads, and bytes of each of the two buffers of each.
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
    Ok((threads, (options.budget / (2 * threads as i64)).min(useful)))
}

/// What a run would take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outline {
    /// Threads.
    pub threads: usize,
    /// Bytes of the buffers of all threads.
    pub memory: i64,
    /// Bytes of destinations.
    pub bytes: i64,
    /// Those of them that the system is asked to copy.
    pub ranges: i64,
    /// Steps, after each of which a run that is killed can go on.
    pub units: i64,
}

/// Plans a run without touching a file.
///
/// # Errors
/// As for [`run`], as far as they do not depend on files.
pub fn outline(job: &Job, options: &Options, poll: &mut dyn FnMut(i64, i64) -> Result<()>) -> Result<Outline> {
    let bytes = job.bytes()?;
    let (threads, limit) = share(job, options, bytes)?;
    job.check_destinations()?;
    let mut outline = Outline { threads, memory: 2 * limit * threads as i64, bytes, ..Outline::default() };
    let (mut units, mut done) = (Units::new(job, limit), 0);
    while let Some(unit) = units.next()? {
        poll(done, bytes)?;
        done += unit.bytes;
        outline.units += 1;
        outline.ranges += if matches!(unit.work, Work::Range { .. }) { unit.bytes } else { 0 };
    }
    Ok(outline)
}

/// Does the job. `poll` is called often, with the bytes that are done and the bytes in all; an error from it ends the
/// run.
///
/// Files of destinations must not be there yet, unless the journal says that they are this job's. If the run fails, those
/// that it made are removed, unless there is a journal: then they stay, for the next run to go on with.
///
/// # Errors
/// What `poll` returns; [`Error::Job`] for pieces that overlap in a file; [`Error::Budget`], [`Error::Space`] before
/// anything is written; otherwise the first fault of a file, named.
pub fn run(job: &Job, options: &Options, poll: &mut dyn FnMut(i64, i64) -> Result<()>) -> Result<Report> {
    let total = job.bytes()?;
    let (threads, limit) = share(job, options, total)?;
    job.check_destinations()?;
    poll(0, total)?;
    let sources = Table::sources(&job.sources)?;
    let compared = Table::compared(&job.destinations)?;
    let text = fingerprint(job);
    let journal = options.journal.as_deref().map(|path| Journal::open(path, text, limit)).transpose()?;
    let (mut journal, past) = journal.map_or((None, None), |(journal, past)| (Some(journal), past));
    let resumes = past.is_some();
    let mut past = past.unwrap_or_default();
    if let Some(journal) = &mut journal {
        // Every file had been made, and had its size, before the first unit was done. If one went away, or the buffers
        // can no longer be what they were, nothing counts as done; the journal must say so before a file is made.
        let whole = (LEAST_BUFFER..=limit).contains(&past.limit) && job.destinations.iter().all(is_whole);
        if resumes && !whole {
            journal.restart(text, limit)?;
        }
        if !whole {
            past = Past::default();
        }
    }
    let limit = if past.limit > 0 { past.limit } else { limit };
    check_space(job, resumes)?;
    let mut made = Vec::new();
    let done = (|| {
        let destinations = Table::destinations(&job.destinations, !resumes, &sources, &mut made)?;
        let files = Files { sources, destinations, compared };
        let run = Run::new(job, &files, options, journal, past, total)?;
        let report = run.work(threads, limit, poll)?;
        files.sources.check_unchanged()?;
        files.compared.check_unchanged()?;
        if options.sync {
            run.sync_all(poll)?;
        }
        Ok(report)
    })();
    if done.is_err() && options.journal.is_none() {
        for path in made {
            // The error that is reported is the first one.
            let _ = std::fs::remove_file(path);
        }
    }
    done
}

/// Whether a file of the job is there, in its full size.
fn is_whole(destination: &Destination) -> bool {
    match destination {
        Destination::File { path, size, .. } => {
            std::fs::symlink_metadata(path).is_ok_and(|file| file.is_file() && i64::try_from(file.len()) == Ok(*size))
        }
        _ => true,
    }
}

/// Checks that the file systems have room for the files, less what is there already.
fn check_space(job: &Job, resumes: bool) -> Result<()> {
    let mut needed: Vec<(&Path, i64)> = Vec::new();
    for destination in &job.destinations {
        let Destination::File { path, size, there: false } = destination else { continue };
        let there = if resumes { commit::allocated(path) } else { 0 };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let more = (size - there).max(0);
        match needed.iter_mut().find(|(other, _)| *other == folder) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(more),
            None => needed.push((folder, more)),
        }
    }
    commit::check_space(&needed)
}

/// A run under way: what the threads share.
struct Run<'a> {
    job: &'a Job,
    files: &'a Files<'a>,
    sync: bool,
    record_every: i64,
    total: i64,
    past: HashSet<u64>,
    done: AtomicI64,
    resumed: AtomicI64,
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    found: Mutex<Report>,
    journal: Option<Mutex<Recorder>>,
}

/// The journal, and what is not in it yet.
struct Recorder {
    journal: Journal,
    units: Vec<(u64, Vec<Finding>)>,
    bytes: i64,
    last: Instant,
}

impl<'a> Run<'a> {
    fn new(
        job: &'a Job,
        files: &'a Files<'a>,
        options: &Options,
        journal: Option<Journal>,
        past: Past,
        total: i64,
    ) -> Result<Self> {
        let mut report = Report::default();
        let wanted = |wanted: bool| if wanted { job.pieces() } else { 0 };
        report.digests = zeros(wanted(job.tensors.iter().any(|tensor| tensor.wanted.digest)))?;
        report.crcs = zeros(wanted(job.tensors.iter().any(|tensor| tensor.wanted.crc)))?;
        report.add(job, &past.findings);
        let journal =
            journal.map(|journal| Mutex::new(Recorder { journal, units: Vec::new(), bytes: 0, last: Instant::now() }));
        Ok(Self {
            job,
            files,
            sync: options.sync,
            record_every: options.record_every,
            total,
            past: past.units,
            done: AtomicI64::new(0),
            resumed: AtomicI64::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
            found: Mutex::new(report),
            journal,
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
        let failure = lock(&self.failure).take();
        let recorded = self.journal.as_ref().map_or(Ok(()), |journal| self.record(&mut lock(journal)));
        if let Some(error) = failure {
            return Err(error);
        }
        recorded?;
        poll(self.total, self.total)?;
        let mut report = std::mem::take(&mut *lock(&self.found));
        report.resumed = self.resumed.load(Ordering::Relaxed);
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
                if self.past.contains(&unit.number) && !unit.from_memory {
                    self.resumed.fetch_add(unit.bytes, Ordering::Relaxed);
                } else {
                    let findings = worker.run(&unit.work)?;
                    lock(&self.found).add(self.job, &findings);
                    self.finished(&unit, findings)?;
                }
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

    /// Notes in the journal that a unit is done, now or a little later.
    fn finished(&self, unit: &Unit, findings: Vec<Finding>) -> Result<()> {
        let Some(journal) = self.journal.as_ref().filter(|_| !unit.from_memory) else { return Ok(()) };
        let mut recorder = lock(journal);
        recorder.units.push((unit.number, findings));
        recorder.bytes += unit.bytes;
        let due = recorder.bytes >= self.record_every || (!self.sync && recorder.last.elapsed() >= RECORD_EVERY);
        if due { self.record(&mut recorder) } else { Ok(()) }
    }

    /// Writes the journal; with syncs, the data first.
    fn record(&self, recorder: &mut Recorder) -> Result<()> {
        if recorder.units.is_empty() {
            return Ok(());
        }
        if self.sync {
            for (index, path) in self.files.destinations.files() {
                file::sync(&self.files.destinations.get(index)?.0, path)?;
            }
        }
        recorder.journal.append(&recorder.units)?;
        if self.sync {
            recorder.journal.sync()?;
        }
        recorder.units.clear();
        recorder.bytes = 0;
        recorder.last = Instant::now();
        Ok(())
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
        self.copied += other.copied;
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
    zeros.try_reserve_exact(count).map_err(|_| Error::Memory { what: "the digests" })?;
    zeros.resize(count, T::default());
    Ok(zeros)
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}
