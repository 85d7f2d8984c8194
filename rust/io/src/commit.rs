//! What makes a set of files appear at once, and last: syncs, renames, locks, room.
//!
//! A checkpoint of several files is complete when its manifest is there under its final name. So: lock the folder, write
//! the data, [`sync`] it, write the manifest under another name, sync it, and [`publish`] it, which renames it and syncs
//! the folder. Killed before the rename, there is no manifest; killed after it, all is there.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    file::{self, Identity},
};

/// A lock of a path against other processes, and other locks of this one, until it is dropped.
///
/// The system ends it with the process, however that ends: there are no stale locks. The file goes away with the lock.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Makes the lock file, and locks it.
    ///
    /// # Errors
    /// [`Error::Locked`] if somebody holds it, with the process that the file names.
    pub fn new(path: &Path) -> Result<Self> {
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let mut file = file::counted("opening", path, || options.open(path))?;
            match file::retried(|| file.try_lock().map_err(io::Error::from)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut owner = String::new();
                    let _ = (&mut file).take(32).read_to_string(&mut owner);
                    return Err(Error::Locked { path: path.to_owned(), owner: owner.trim().to_owned() });
                }
                Err(error) => return Err(Error::os("locking", path, None, error)),
            }
            // Its holder may have removed it since it was opened; then it locks nothing.
            let held = file::counted("looking at", path, || file.metadata())?;
            let there = fs::metadata(path).map(|there| Identity::of(&there).file);
            if there.is_ok_and(|there| there == Identity::of(&held).file) {
                // From here on it goes away whatever happens.
                let mut lock = Self { file, path: path.to_owned() };
                let owner = format!("{}\n", std::process::id());
                let noted = (lock.file.set_len(0))
                    .and_then(|()| lock.file.rewind())
                    .and_then(|()| lock.file.write_all(owner.as_bytes()));
                noted.map_err(|error| Error::os("writing", path, None, error))?;
                return Ok(lock);
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before it is unlocked: afterwards it might be another's. What cannot be removed does not lock without a process.
        let _ = fs::remove_file(&self.path);
        let _ = self.file.unlock();
    }
}

/// Brings files to the disk, and then the folders that hold them.
///
/// # Errors
/// [`Error::Os`].
pub fn sync(paths: &[PathBuf]) -> Result<()> {
    let mut folders: Vec<&Path> = Vec::new();
    for path in paths {
        let file = file::counted("opening", path, || File::open(path))?;
        file::sync(&file, path)?;
        folders.push(folder_of(path));
    }
    folders.sort_unstable();
    folders.dedup();
    folders.into_iter().try_for_each(sync_folder)
}

/// Renames a file or a folder and syncs the folders of both names. Nothing may be there under the new name.
///
/// # Errors
/// [`Error::Os`], with "File exists" where something is there.
pub fn publish(from: &Path, to: &Path) -> Result<()> {
    file::counted("renaming to", to, || rename(from, to))?;
    sync_folder(folder_of(to))?;
    if folder_of(from) != folder_of(to) {
        sync_folder(folder_of(from))?;
    }
    Ok(())
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn rename(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::{
        fs::{CWD, RenameFlags, renameat_with},
        io::Errno,
    };
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => rename_if_free(from, to),
        done => Ok(done?),
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn rename(from: &Path, to: &Path) -> io::Result<()> {
    rename_if_free(from, to)
}

/// Where the system cannot rename and look at once; the lock keeps others of us away in between.
fn rename_if_free(from: &Path, to: &Path) -> io::Result<()> {
    match fs::symlink_metadata(to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::rename(from, to),
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
