//! The steps that make a set of files appear at once, and last: syncs, renames, locks, room.
//!
//! A checkpoint of several files is complete when its manifest is there under its final name. So: lock the folder, write
//! the data, [`sync`] it, write the manifest under another name, sync it, and [`publish`] it, which renames it and syncs
//! the folder. Killed before the rename, there is no manifest; killed after it, all is there.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use shardwise_core::parallel::has_room_for;

use crate::{
    error::{Error, Result},
    file::{self, Identity},
};

/// A lock of a path against other processes, and other locks of this one, until it is dropped.
///
/// The system ends it with the process, however that ends: there are no stale locks. The file goes away with the lock.
/// It says whose it is: a file that does not is somebody's, and is neither written nor removed.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

/// The beginning of a lock file, before the number of its process.
const LOCKED_BY: &[u8] = b"shardwise process ";
/// No lock file is longer.
const MOST_LOCK: u64 = 64;

impl Lock {
    /// Makes the lock file, and locks it.
    ///
    /// # Errors
    /// [`Error::Locked`] if somebody holds it, with the process that the file names; [`Error::Taken`] if what is there
    /// is a link, has another name, or is no lock file.
    pub fn new(path: &Path) -> Result<Self> {
        loop {
            let mut file = match file::counted("opening", path, || file::written().create(true).open(path)) {
                Err(Error::Os { .. }) if path.symlink_metadata().is_ok_and(|found| !found.is_file()) => {
                    return Err(not_a_lock(path));
                }
                opened => opened?,
            };
            let held = file::counted("looking at", path, || file.metadata())?;
            if !file::is_only_ours(&held) || held.len() > MOST_LOCK {
                return Err(not_a_lock(path));
            }
            match file::retried(|| file.try_lock().map_err(io::Error::from)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let said = said_by(&mut file);
                    let owner = said.strip_prefix(LOCKED_BY).unwrap_or_default();
                    let owner = String::from_utf8_lossy(owner).trim().to_owned();
                    return Err(Error::Locked { path: path.to_owned(), owner });
                }
                Err(error) => return Err(Error::os("locking", path, None, error)),
            }
            // Its holder may have removed it since it was opened; then it locks nothing.
            let there = fs::symlink_metadata(path).map(|there| Identity::of(&there).file);
            if there.is_ok_and(|there| there == Identity::of(&held).file) {
                let said = said_by(&mut file);
                if !said.starts_with(LOCKED_BY) && !LOCKED_BY.starts_with(&said) {
                    return Err(not_a_lock(path));
                }
                // From here on it goes away whatever happens.
                let mut lock = Self { file, path: path.to_owned() };
                let owner = [LOCKED_BY, std::process::id().to_string().as_bytes(), b"\n"].concat();
                let noted =
                    (lock.file.set_len(0)).and_then(|()| lock.file.rewind()).and_then(|()| lock.file.write_all(&owner));
                noted.map_err(|error| Error::os("writing", path, None, error))?;
                return Ok(lock);
            }
        }
    }
}

/// The contents of a lock file.
fn said_by(file: &mut File) -> Vec<u8> {
    let mut said = Vec::new();
    let _ = file.rewind().and_then(|()| file.take(MOST_LOCK).read_to_end(&mut said));
    said
}

fn not_a_lock(path: &Path) -> Error {
    Error::Taken {
        path: path.to_owned(),
        what: "has the name of a lock file, but is not one; move it away, or write to another name",
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before it is unlocked: afterwards it might be another's. What cannot be removed does not lock without a process.
        let _ = fs::remove_file(&self.path);
        let _ = self.file.unlock();
    }
}

/// From so many files on, several threads bring them to the disk, and how many. A file system with a journal writes that
/// once for all who wait for it: of thousands of small files eight threads bring twice as many there as one.
const TOGETHER_FROM: usize = 32;
const TOGETHER: usize = 8;

/// The error of the first file that failed, with the file's number: threads find them in any order.
#[derive(Default)]
struct Failure(Mutex<Option<(usize, Error)>>);

impl Failure {
    fn add(&self, at: usize, error: Error) {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if found.as_ref().is_none_or(|&(first, _)| at < first) {
            *found = Some((at, error));
        }
    }

    fn reported(self) -> Result<()> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// Brings files to the disk, and then the folders that hold them; `poll` is asked before each file of the calling thread.
///
/// # Errors
/// [`Error::Os`] of the first file that failed; what `poll` returns.
pub fn sync(paths: &[PathBuf], poll: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failure = Failure::default();
    let worker = |poll: &mut dyn FnMut() -> Result<()>| {
        while let Some((at, path)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, paths.get(at)?)))
        {
            let opened = poll().and_then(|()| file::open_source(path));
            if let Err(error) = opened.and_then(|(file, _)| file::sync(&file, path)) {
                next.store(paths.len(), Ordering::Relaxed);
                failure.add(at, error);
            }
        }
    };
    let threads = if paths.len() >= TOGETHER_FROM && has_room_for(TOGETHER) { TOGETHER } else { 1 };
    thread::scope(|scope| {
        for _ in 1..threads {
            // A thread that cannot be started is one helper less; the caller does the work all the same.
            let _ = thread::Builder::new().spawn_scoped(scope, || worker(&mut || Ok(())));
        }
        worker(poll);
    });
    failure.reported()?;
    let mut folders: Vec<&Path> = paths.iter().map(|path| folder_of(path)).collect();
    folders.sort_unstable();
    folders.dedup();
    folders.into_iter().try_for_each(sync_folder)
}

/// Renames a file or a folder and, if wished, syncs the folders of both names. Nothing may be there under the new name.
///
/// To sync a folder may take as long as to sync what was written before: a journal keeps the order.
///
/// With `folder`, the one that `from` is in, `from` is found there by its name, and no other part of its path is followed.
///
/// # Errors
/// [`Error::Os`], with "File exists" where something is there.
pub fn publish(from: &Path, folder: Option<&File>, to: &Path, synced: bool) -> Result<()> {
    file::counted("renaming to", to, || rename(from, folder, to))?;
    if !synced {
        return Ok(());
    }
    sync_folder(folder_of(to))?;
    match folder {
        Some(folder) => file::sync(folder, folder_of(from))?,
        None if folder_of(from) != folder_of(to) => sync_folder(folder_of(from))?,
        None => {}
    }
    Ok(())
}

#[cfg(unix)]
fn rename(from: &Path, folder: Option<&File>, to: &Path) -> io::Result<()> {
    use std::os::fd::AsFd;
    let name = from.file_name().map_or(from, Path::new);
    let (at, from) = folder.map_or((rustix::fs::CWD, from), |folder| (folder.as_fd(), name));
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use rustix::{
            fs::{CWD, RenameFlags, renameat_with},
            io::Errno,
        };
        match renameat_with(at, from, CWD, to, RenameFlags::NOREPLACE) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
            done => return Ok(done?),
        }
    }
    refuse_existing(to)?;
    Ok(rustix::fs::renameat(at, from, rustix::fs::CWD, to)?)
}

#[cfg(not(unix))]
fn rename(from: &Path, _: Option<&File>, to: &Path) -> io::Result<()> {
    refuse_existing(to)?;
    fs::rename(from, to)
}

/// A look before a rename, where the system cannot do both at once; the lock keeps others of us
/// away in between.
fn refuse_existing(to: &Path) -> io::Result<()> {
    match fs::symlink_metadata(to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
    }
}

/// The folder that a path is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Brings a folder's names to the disk. Where a folder cannot be opened (Windows), there is no such thing.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        let folder = file::counted("opening", path, || File::open(path))?;
        file::sync(&folder, path)?;
    }
    let _ = path;
    Ok(())
}

/// Checks that the file systems of these folders have room for so many bytes.
///
/// # Errors
/// [`Error::Space`] naming the folder.
pub fn check_space(needed: &[(&Path, i64)]) -> Result<()> {
    #[cfg(unix)]
    {
        let mut systems: Vec<(u64, &Path, i64)> = Vec::new();
        for &(folder, bytes) in needed {
            let metadata = file::counted("looking at", folder, || fs::metadata(folder))?;
            let device = std::os::unix::fs::MetadataExt::dev(&metadata);
            match systems.iter_mut().find(|(other, ..)| *other == device) {
                Some((.., all)) => *all = all.saturating_add(bytes),
                None => systems.push((device, folder, bytes)),
            }
        }
        for (_, folder, needed) in systems {
            let available = free_space(folder)?;
            if needed > available {
                return Err(Error::Space { path: folder.to_owned(), needed, available });
            }
        }
    }
    let _ = needed;
    Ok(())
}

/// The bytes that can still be written to a folder's file system.
///
/// # Errors
/// [`Error::Os`].
#[cfg(unix)]
pub fn free_space(folder: &Path) -> Result<i64> {
    let found = file::counted("looking at", folder, || Ok(rustix::fs::statvfs(folder)?))?;
    Ok(i64::try_from(found.f_bavail.saturating_mul(found.f_frsize)).unwrap_or(i64::MAX))
}

/// Not known here.
///
/// # Errors
/// None.
#[cfg(not(unix))]
pub fn free_space(_: &Path) -> Result<i64> {
    Ok(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_files_that_failed_the_first_is_reported() {
        let missing = |at: usize| Error::Taken { path: PathBuf::from(at.to_string()), what: "is missing" };
        // Whatever the order in which threads find them.
        for order in [[2, 3, 5], [2, 5, 3], [3, 2, 5], [3, 5, 2], [5, 2, 3], [5, 3, 2]] {
            let failure = Failure::default();
            order.into_iter().for_each(|at| failure.add(at, missing(at)));
            assert_eq!(failure.reported().unwrap_err().to_string(), missing(2).to_string(), "{order:?}");
        }
        let alone = Failure::default();
        alone.add(4, missing(4));
        assert_eq!(alone.reported().unwrap_err().to_string(), missing(4).to_string());
        assert!(Failure::default().reported().is_ok());
    }

    #[test]
    fn of_many_files_that_are_missing_the_first_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for count in [1, TOGETHER_FROM - 1, TOGETHER_FROM, 4 * TOGETHER_FROM] {
            let paths: Vec<PathBuf> = (0..count).map(|at| folder.path().join(format!("file{at}"))).collect();
            // The calling thread is late: others, if there are, have failed by then.
            let mut late = || {
                thread::sleep(std::time::Duration::from_millis(20));
                Ok(())
            };
            let Err(Error::Os { path, .. }) = sync(&paths, &mut late) else { panic!("{count}") };
            assert_eq!(path, paths[0], "{count}");
        }
    }
}
