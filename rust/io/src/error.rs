//! The errors, with the file and the byte at which something went wrong.

use std::{
    io,
    path::{Path, PathBuf},
};

/// The result of functions of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The failures of jobs.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation on a file.
    #[error("{operation} {}{}: {error}", path.display(), offset.map(|at| format!(" at byte {at}")).unwrap_or_default())]
    Os {
        /// The operation, as in "writing".
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The byte of it at which a read or a write began.
        offset: Option<i64>,
        /// The system's answer.
        error: io::Error,
    },
    /// A source that ends before the bytes that are needed.
    #[error("{} ends at byte {end}; bytes {start} to {stop} were needed", path.display())]
    Ends {
        /// The file.
        path: PathBuf,
        /// The end of the file.
        end: i64,
        /// The first byte that was needed.
        start: i64,
        /// One past the last.
        stop: i64,
    },
    /// A path that does not lead to a regular file.
    #[error("{} is {kind}; a regular file is needed", path.display())]
    Kind {
        /// The path.
        path: PathBuf,
        /// The kind of file, as in "a directory".
        kind: &'static str,
    },
    /// A source that is not what it was when the job was made.
    #[error("{} {what}", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// The change, with both values.
        what: String,
    },
    /// A job that contradicts itself.
    #[error("{0}")]
    Job(String),
    /// A budget that even the smallest pieces do not fit in.
    #[error("budget is {given} bytes; at least {needed} are needed")]
    Budget {
        /// The budget.
        given: i64,
        /// The least that would do.
        needed: i64,
    },
    /// A file system without room for what is to be written.
    #[error("{} has {available} bytes free; {needed} are needed", path.display())]
    Space {
        /// A folder on the file system.
        path: PathBuf,
        /// The bytes that are to be written to it.
        needed: i64,
        /// The bytes that are free.
        available: i64,
    },
    /// A lock that another process holds.
    #[error("{} is locked{}; another process is writing there", path.display(), holder(owner))]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// The holder, as the lock file names it.
        owner: String,
    },
    /// Something that is not ours where a file of ours is to be.
    #[error("{} {what}", path.display())]
    Taken {
        /// The path.
        path: PathBuf,
        /// The thing that it is, and advice.
        what: &'static str,
    },
    /// More values than there is memory for.
    #[error("{what} does not fit in memory")]
    Memory {
        /// The values.
        what: &'static str,
    },
    /// The caller's poll asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// A worker thread panicked.
    #[error("a worker thread panicked: {0}")]
    Panicked(String),
}

impl Error {
    /// An answer of the operating system; `offset` is the byte, for reads and writes.
    pub(crate) fn os(operation: &'static str, path: &Path, offset: Option<i64>, error: io::Error) -> Self {
        Self::Os { operation, path: path.to_owned(), offset, error }
    }

    /// A mistake in the job.
    pub(crate) fn job(message: impl Into<String>) -> Self {
        Self::Job(message.into())
    }
}

fn holder(owner: &str) -> String {
    if owner.is_empty() { String::new() } else { format!(" by process {owner}") }
}

/// An error that there is no memory for `what`, whatever a collection says about it.
pub(crate) fn no_room<E>(what: &'static str) -> impl FnOnce(E) -> Error {
    move |_| Error::Memory { what }
}
