//! Single operations on files: whole or an error, whatever the system does of them at a time.
//!
//! All of them count as steps of [`crate::faults`], are tried again when a signal interrupts them, and name the file in
//! their errors.

use std::{
    fs::{File, Metadata, OpenOptions},
    io::{self, IoSliceMut},
    path::Path,
};

use crate::{
    error::{Error, Result},
    faults,
};

/// The identity of a file, and its state when it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The file system and the file's number on it; zeros where the system does not tell.
    pub file: (u64, u64),
    /// The size of the file in bytes.
    pub size: i64,
    /// The time of the last write, in nanoseconds since 1970.
    pub modified: i64,
    /// The time of the last change of the file, its rights or its times, which no program can set; 0 where the system
    /// does not tell.
    pub changed: i64,
}

impl Identity {
    pub(crate) fn of(metadata: &Metadata) -> Self {
        let size = i64::try_from(metadata.len()).unwrap_or(i64::MAX);
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let time = |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
            let modified = time(metadata.mtime(), metadata.mtime_nsec());
            let changed = time(metadata.ctime(), metadata.ctime_nsec());
            Self { file: (metadata.dev(), metadata.ino()), size, modified, changed }
        }
        #[cfg(not(unix))]
        {
            let modified = metadata.modified().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
            Self { file: (0, 0), size, modified: modified.map_or(0, |at| at.as_nanos() as i64), changed: 0 }
        }
    }
}

/// Repeats `operation` for as long as signals interrupt it.
pub(crate) fn retried<T>(mut operation: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match operation() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// Counts an operation that does all or nothing, and repeats it for as long as signals interrupt it.
pub(crate) fn counted<T>(what: &'static str, path: &Path, mut operation: impl FnMut() -> io::Result<T>) -> Result<T> {
    let done = retried(|| {
        faults::whole()?;
        operation()
    });
    done.map_err(|error| Error::os(what, path, None, error))
}

/// Opens a regular file to read it.
pub(crate) fn open_source(path: &Path) -> Result<(File, Identity)> {
    let mut options = OpenOptions::new();
    options.read(true);
    // Opening a FIFO would wait for a writer, perhaps for ever.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::NONBLOCK.bits() as i32);
    let file = counted("opening", path, || options.open(path))?;
    let identity = look_at_source(&file, path)?;
    Ok((file, identity))
}

/// Looks at a file that is open to be read; it must be a regular one.
pub(crate) fn look_at_source(file: &File, path: &Path) -> Result<Identity> {
    let metadata = counted("looking at", path, || file.metadata())?;
    check_kind(path, &metadata)?;
    Ok(Identity::of(&metadata))
}

/// The options for files that are written: never through a link, and a FIFO without waiting for its
/// reader.
pub(crate) fn written() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        (rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW).bits() as i32,
    );
    options
}

/// Opens a file to write it: by its name in a folder, if there is one, so that no other part of its path is followed.
fn open_written(path: &Path, folder: Option<&File>, is_new: bool) -> io::Result<File> {
    #[cfg(unix)]
    if let (Some(folder), Some(name)) = (folder, path.file_name()) {
        use rustix::fs::{Mode, OFlags, openat};
        let new = if is_new { OFlags::CREATE | OFlags::EXCL } else { OFlags::empty() };
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC | new;
        return Ok(openat(folder, name, flags, Mode::from_raw_mode(0o666))?.into());
    }
    let _ = folder;
    written().create_new(is_new).open(path)
}

/// Removes a file that was made.
pub(crate) fn remove(path: &Path, folder: Option<&File>) {
    #[cfg(unix)]
    if let (Some(folder), Some(name)) = (folder, path.file_name()) {
        let _ = rustix::fs::unlinkat(folder, name, rustix::fs::AtFlags::empty());
        return;
    }
    let _ = folder;
    let _ = std::fs::remove_file(path);
}

/// Opens a regular file, which must be there under this name alone, to write it (and to read it).
pub(crate) fn open_there(path: &Path, folder: Option<&File>) -> Result<(File, Identity)> {
    let file = counted("opening", path, || open_written(path, folder, false))?;
    let metadata = counted("looking at", path, || file.metadata())?;
    check_kind(path, &metadata)?;
    check_one_name(path, &metadata)?;
    Ok((file, Identity::of(&metadata)))
}

/// Looks at a file that is to be opened by [`open_there`] later, which tells why one that may not be written may not.
pub(crate) fn look_there(path: &Path, folder: Option<&File>) -> Result<Identity> {
    #[cfg(unix)]
    if let (Some(folder), Some(name)) = (folder, path.file_name()) {
        use rustix::fs::{AtFlags, FileType, statat};
        let status = counted("looking at", path, || Ok(statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?))?;
        if FileType::from_raw_mode(status.st_mode).is_file() && status.st_nlink == 1 {
            let time = |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
            return Ok(Identity {
                file: (status.st_dev as u64, status.st_ino as u64),
                size: status.st_size as i64,
                modified: time(status.st_mtime as i64, status.st_mtime_nsec as i64),
                changed: time(status.st_ctime as i64, status.st_ctime_nsec as i64),
            });
        }
    }
    let _ = folder;
    open_there(path, folder).map(|(_, identity)| identity)
}

/// Looks at a file that is to be opened by [`open_source`] later.
pub(crate) fn look_at(path: &Path) -> Result<Identity> {
    let metadata = counted("looking at", path, || path.metadata())?;
    check_kind(path, &metadata)?;
    Ok(Identity::of(&metadata))
}

/// Makes a file, which must not be there, and opens it to write it (and to read it).
pub(crate) fn make(path: &Path, folder: Option<&File>) -> Result<(File, Identity)> {
    let file = counted("creating", path, || open_written(path, folder, true))?;
    let metadata = counted("looking at", path, || file.metadata()).inspect_err(|_| {
        // It is ours, and nobody knows of it yet.
        remove(path, folder);
    })?;
    Ok((file, Identity::of(&metadata)))
}

/// A refusal of files with several names: writing through one must not change what has another.
fn check_one_name(path: &Path, metadata: &Metadata) -> Result<()> {
    #[cfg(unix)]
    if std::os::unix::fs::MetadataExt::nlink(metadata) > 1 {
        return Err(Error::Taken { path: path.to_owned(), what: "is a file that has another name too (a hard link)" });
    }
    let _ = (path, metadata);
    Ok(())
}

/// True if a file is a regular one with one name, which only we have written.
pub(crate) fn is_only_ours(metadata: &Metadata) -> bool {
    metadata.is_file() && check_one_name(Path::new(""), metadata).is_ok()
}

fn check_kind(path: &Path, metadata: &Metadata) -> Result<()> {
    let kind = metadata.file_type();
    if kind.is_file() {
        return Ok(());
    }
    let kind = if kind.is_dir() { "a directory" } else { "a FIFO, a socket or a device" };
    Err(Error::Kind { path: path.to_owned(), kind })
}

/// Fills `buffer` from byte `offset` on.
pub(crate) fn read(file: &File, path: &Path, buffer: &mut [u8], offset: i64) -> Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        let at = offset + done as i64;
        let count = retried(|| {
            let part = faults::step()?.part(buffer.len() - done);
            read_at(file, &mut buffer[done..done + part], at as u64)
        });
        match count.map_err(|error| Error::os("reading", path, Some(at), error))? {
            0 => {
                let stop = offset + buffer.len() as i64;
                return Err(Error::Ends { path: path.to_owned(), end: at, start: offset, stop });
            }
            count => done += count,
        }
    }
    Ok(())
}

/// The most buffers that the system fills in one call.
pub(crate) const MAX_SCATTERED: usize = 1024;

/// Fills buffers one after the other from byte `offset` on.
#[cfg(unix)]
pub(crate) fn read_scattered(file: &File, path: &Path, buffers: &mut [IoSliceMut<'_>], offset: i64) -> Result<()> {
    let (mut rest, mut at) = (buffers, offset);
    while rest.iter().any(|buffer| !buffer.is_empty()) {
        let count = retried(|| {
            let part = faults::step()?.part(rest.len());
            Ok(rustix::io::preadv(file, &mut rest[..part], at as u64)?)
        });
        match count.map_err(|error| Error::os("reading", path, Some(at), error))? {
            0 => {
                let left: usize = rest.iter().map(|buffer| buffer.len()).sum();
                return Err(Error::Ends { path: path.to_owned(), end: at, start: offset, stop: at + left as i64 });
            }
            count => {
                at += count as i64;
                IoSliceMut::advance_slices(&mut rest, count);
            }
        }
    }
    Ok(())
}

/// Fills buffers one after the other from byte `offset` on.
#[cfg(not(unix))]
pub(crate) fn read_scattered(file: &File, path: &Path, buffers: &mut [IoSliceMut<'_>], offset: i64) -> Result<()> {
    let mut at = offset;
    for buffer in buffers {
        read(file, path, buffer, at)?;
        at += buffer.len() as i64;
    }
    Ok(())
}

/// The most that is written in one call. The page cache takes a write in the largest blocks that fit it, and where
/// memory is in pieces, blocks of a MiB are hard to find: on ext4 with Linux 6.18, writes of 1 MiB took three to eight
/// times as long as two of half of it. For the same reason writes end where such blocks do.
const MAX_WRITE: usize = 512 << 10;

/// The bytes from byte `at` of a file to the next place where a write should end.
fn to_boundary(at: i64) -> usize {
    MAX_WRITE - at as usize % MAX_WRITE
}

/// Writes all of `bytes` from byte `offset` on.
pub(crate) fn write(file: &File, path: &Path, bytes: &[u8], offset: i64) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let at = offset + done as i64;
        let count = retried(|| {
            let part = faults::step()?.part((bytes.len() - done).min(to_boundary(at)));
            write_at(file, &bytes[done..done + part], at as u64)
        });
        match count.map_err(|error| Error::os("writing", path, Some(at), error))? {
            0 => {
                let error = io::Error::from(io::ErrorKind::WriteZero);
                return Err(Error::os("writing", path, Some(at), error));
            }
            count => done += count,
        }
    }
    Ok(())
}

/// Gives a file its size and, where the file system can, the blocks for it, so that a full disk is found at once.
pub(crate) fn allocate(file: &File, path: &Path, size: i64) -> Result<()> {
    counted("sizing", path, || file.set_len(size as u64))?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    if size > 0 {
        use rustix::{fs::FallocateFlags, io::Errno};
        let done = retried(|| {
            faults::whole()?;
            Ok(rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size as u64)?)
        });
        if let Err(error) = done {
            // A file system that does not know how is not full.
            let cannot = [Errno::NOSYS, Errno::OPNOTSUPP, Errno::INVAL];
            if !cannot.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error())) {
                return Err(Error::os("allocating", path, None, error));
            }
        }
    }
    Ok(())
}

/// Brings the file's bytes to the disk.
pub(crate) fn sync(file: &File, path: &Path) -> Result<()> {
    counted("syncing", path, || file.sync_all())
}

#[cfg(unix)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, offset)
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::write_at(file, bytes, offset)
}

#[cfg(windows)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, offset)
}

#[cfg(windows)]
fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_write(file, bytes, offset)
}
