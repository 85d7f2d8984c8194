//! The files of a job: opened when first needed, closed again when too many are open, and known by what they are.
//!
//! A checkpoint may have more files than a process may have descriptors. A source that is opened again must be the very
//! file that it was, unchanged: renamed over or written to meanwhile is an error, so what is read never mixes two
//! versions.

use std::{
    collections::{HashMap, VecDeque},
    fs::File,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
};

use crate::{
    error::{Error, Result},
    file::{self, Identity},
    job::{Destination, Source, SourceFile},
};

/// A lock that is taken even after a panic elsewhere: every change of a table is one step, so what
/// is left is valid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Open files, no more than `limit` of them, in the order in which they were opened.
struct Open {
    files: HashMap<usize, Arc<File>>,
    order: VecDeque<usize>,
    limit: usize,
}

impl Open {
    fn put(&mut self, index: usize, file: File) -> Arc<File> {
        while self.files.len() >= self.limit {
            match self.order.pop_front() {
                Some(oldest) => drop(self.files.remove(&oldest)),
                None => break,
            }
        }
        let file = Arc::new(file);
        if self.files.insert(index, Arc::clone(&file)).is_none() {
            self.order.push_back(index);
        }
        file
    }
}

/// The files of one side of a job.
pub(crate) struct Table<'a> {
    paths: Vec<Option<&'a Path>>,
    /// Files that the caller opened.
    given: HashMap<usize, Arc<File>>,
    /// The folders of those that are opened from one.
    folders: HashMap<usize, &'a File>,
    identities: Vec<Option<Identity>>,
    written: bool,
    open: Mutex<Open>,
}

impl<'a> Table<'a> {
    /// The sources, each looked at: of the size and the time that the job says, and a regular file.
    pub(crate) fn sources(sources: &'a [Source]) -> Result<Self> {
        let mut table = Self::empty(sources.len(), false);
        for (index, source) in sources.iter().enumerate() {
            if let Source::File(given) = source {
                table.add_source(index, given)?;
            }
        }
        Ok(table)
    }

    /// The files to compare with.
    pub(crate) fn compared(destinations: &'a [Destination]) -> Result<Self> {
        let mut table = Self::empty(destinations.len(), false);
        for (index, destination) in destinations.iter().enumerate() {
            if let Destination::Compared(given) = destination {
                table.add_source(index, given)?;
            }
        }
        Ok(table)
    }

    /// The files to write, made and given their size unless they must be there. `made` gets the paths of those that were
    /// made.
    pub(crate) fn destinations(
        destinations: &'a [Destination],
        sources: &Self,
        made: &mut Vec<(&'a Path, Option<&'a File>)>,
    ) -> Result<Self> {
        let mut table = Self::empty(destinations.len(), true);
        let mut seen: HashMap<(u64, u64), &Path> = HashMap::new();
        let known = sources.identities.iter().zip(&sources.paths);
        seen.extend(known.filter_map(|(identity, path)| Some((identity.as_ref()?.file, (*path)?))));
        for (index, destination) in destinations.iter().enumerate() {
            let Destination::File { path, size, there, folder } = destination else { continue };
            let folder = folder.as_deref();
            let (file, identity) = match *there {
                // One that would soon be closed again is opened when it is written.
                true if table.is_full() => (None, file::look_there(path, folder)?),
                true => file::open_there(path, folder).map(|(file, identity)| (Some(file), identity))?,
                false => file::make(path, folder).map(|(file, identity)| (Some(file), identity))?,
            };
            if *there && identity.size != *size {
                let what = format!("has {} bytes, but should have {size}", identity.size);
                return Err(Error::Changed { path: path.clone(), what });
            }
            if !there {
                made.push((path, folder));
            }
            if let Some(other) = seen.get(&identity.file).filter(|_| cfg!(unix)) {
                let (path, other) = (path.display(), other.display());
                return Err(Error::job(format!(
                    "{path} is to be written, but is also {other}, another file of the job"
                )));
            }
            seen.insert(identity.file, path);
            if let Some(file) = file.as_ref().filter(|_| !there) {
                file::allocate(file, path, *size)?;
            }
            table.paths[index] = Some(path);
            table.folders.extend(folder.map(|folder| (index, folder)));
            table.identities[index] = Some(identity);
            if let Some(file) = file {
                lock(&table.open).put(index, file);
            }
        }
        Ok(table)
    }

    fn empty(count: usize, written: bool) -> Self {
        let open = Open { files: HashMap::new(), order: VecDeque::new(), limit: descriptors() };
        Self {
            paths: vec![None; count],
            given: HashMap::new(),
            folders: HashMap::new(),
            identities: vec![None; count],
            written,
            open: Mutex::new(open),
        }
    }

    fn add_source(&mut self, index: usize, given: &'a SourceFile) -> Result<()> {
        let path: &Path = &given.path;
        let (file, identity) = match &given.file {
            Some(file) => (None, file::look_at_source(file, path)?),
            None if self.is_full() => (None, file::look_at(path)?),
            None => file::open_source(path).map(|(file, identity)| (Some(file), identity))?,
        };
        let modified = given.modified.unwrap_or(identity.modified);
        let changed = given.changed.unwrap_or(identity.changed);
        check_same(path, Identity { size: given.size, modified, changed, ..identity }, identity)?;
        self.paths[index] = Some(path);
        self.identities[index] = Some(identity);
        match (file, &given.file) {
            (Some(file), _) => drop(lock(&self.open).put(index, file)),
            (None, given) => self.given.extend(given.as_ref().map(|file| (index, Arc::clone(file)))),
        }
        Ok(())
    }

    /// True if as many files are open as may be.
    fn is_full(&self) -> bool {
        let open = lock(&self.open);
        open.files.len() >= open.limit
    }

    /// The file of a holder, opened if it is not, and its path.
    pub(crate) fn get(&self, index: usize) -> Result<(Arc<File>, &'a Path)> {
        let path = self.paths.get(index).copied().flatten();
        let (Some(path), Some(known)) = (path, self.identities[index]) else {
            return Err(Error::job(format!("holder {index} is not a file")));
        };
        if let Some(file) = self.given.get(&index).or(lock(&self.open).files.get(&index)) {
            return Ok((Arc::clone(file), path));
        }
        let folder = self.folders.get(&index).copied();
        let (file, found) = if self.written { file::open_there(path, folder) } else { file::open_source(path) }?;
        if self.written && found.file != known.file {
            return Err(Error::Changed { path: path.to_owned(), what: "was replaced while it was written".to_owned() });
        }
        if !self.written {
            check_same(path, known, found)?;
        }
        Ok((lock(&self.open).put(index, file), path))
    }

    /// The holders that are files, with their paths.
    pub(crate) fn files(&self) -> impl Iterator<Item = (usize, &'a Path)> {
        self.paths.iter().enumerate().filter_map(|(index, path)| Some((index, (*path)?)))
    }

    /// Checks that every source is what it was when it was first opened.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        for (index, path) in self.files() {
            let given = self.given.get(&index);
            let look = || given.map_or_else(|| path.metadata(), |file| file.metadata());
            let found = file::counted("looking at", path, look)?;
            if let Some(known) = self.identities[index] {
                check_same(path, known, Identity::of(&found))?;
            }
        }
        Ok(())
    }
}

fn check_same(path: &Path, known: Identity, found: Identity) -> Result<()> {
    let what = if known.file != found.file {
        "was replaced by another file".to_owned()
    } else if known.size != found.size {
        format!("had {} bytes and has {} now", known.size, found.size)
    } else if known.modified != found.modified {
        "was written to since it was opened or planned".to_owned()
    } else if known.changed != found.changed {
        "was changed or replaced since it was opened or planned: its change time differs".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::Changed { path: path.to_owned(), what })
}

/// The most files of one side that may be open: a quarter of what the process may have, so that
/// both sides and what the caller has open leave a quarter for the program. At most 1,024: more are
/// opened again in turn.
pub(crate) fn descriptors() -> usize {
    #[cfg(unix)]
    {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        limit.map_or(1024, |limit| usize::try_from(limit / 4).unwrap_or(usize::MAX)).clamp(1, 1024)
    }
    #[cfg(not(unix))]
    128
}
