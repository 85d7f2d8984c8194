//! Memory that is that of a mapped file.
//!
//! Where somebody cuts such a file short, the pages behind its new end are gone, and the system answers who reads them
//! with SIGBUS, which ends the process. A read of `/proc/self/mem` at the same address is an error instead: that is how
//! the engine reads such memory. Systems without that file have no remedy; there it is read as all other memory.

use std::{collections::HashMap, fs::File, path::Path};

use crate::{
    error::{Error, Result},
    file::{self, Identity},
    job::{MappedFile, Memory},
};

/// The memory of this process as a file, whose offsets are addresses.
const OWN_MEMORY: &str = "/proc/self/mem";
const OWN_MAPS: &str = "/proc/self/maps";

/// A line of the list of maps: `low-high perms offset device inode path`.
struct Map<'a> {
    low: i64,
    high: i64,
    offset: i64,
    inode: u64,
    /// True if this process may write the file through it.
    is_written: bool,
    path: &'a Path,
}

/// For each memory the file that it is mapped from, or none if it is not.
#[must_use]
pub fn mapped_files(memories: &[Memory]) -> Vec<Option<MappedFile>> {
    let mut found = vec![None; memories.len()];
    let text = if memories.is_empty() { Vec::new() } else { std::fs::read(OWN_MAPS).unwrap_or_default() };
    let maps: Vec<Map<'_>> = text.split(|&byte| byte == b'\n').filter_map(map_of_line).collect();
    if maps.is_empty() || File::open(OWN_MEMORY).is_err() {
        return found;
    }
    // Of a program with many arrays most are of few files.
    let mut files: HashMap<(&Path, u64), Option<Identity>> = HashMap::new();
    for (memory, found) in memories.iter().zip(&mut found) {
        let (low, high) = memory.addresses();
        let first = maps.partition_point(|map| map.high <= low);
        for map in maps[first..].iter().take_while(|map| map.low < high && low < high) {
            let known = files.entry((map.path, map.inode)).or_insert_with(|| regular(map));
            let Some(known) = known else { continue };
            let end = map.offset + (high.min(map.high) - map.low);
            *found = Some(MappedFile {
                path: map.path.to_owned(),
                end,
                size: known.size,
                times: (!map.is_written).then_some((known.modified, known.changed)),
            });
        }
    }
    found
}

/// The state of the file of a map, if it is still there under its name.
fn regular(map: &Map<'_>) -> Option<Identity> {
    let metadata = map.path.metadata().ok().filter(|metadata| metadata.is_file())?;
    Some(Identity::of(&metadata)).filter(|identity| identity.file.1 == map.inode)
}

#[cfg(unix)]
fn map_of_line(line: &[u8]) -> Option<Map<'_>> {
    let mut rest = line;
    let mut next = || {
        let begin = rest.iter().position(|&byte| byte != b' ')?;
        let end = rest[begin..].iter().position(|&byte| byte == b' ').map_or(rest.len(), |length| begin + length);
        let field = std::str::from_utf8(&rest[begin..end]).ok();
        rest = &rest[end..];
        field
    };
    let (low, high) = next()?.split_once('-')?;
    let (permissions, offset, _, inode) = (next()?, next()?, next()?, next()?);
    let hexadecimal = |text| i64::from_str_radix(text, 16).ok();
    let begin = rest.iter().position(|&byte| byte != b' ')?;
    Some(Map {
        low: hexadecimal(low)?,
        high: hexadecimal(high)?,
        offset: hexadecimal(offset)?,
        inode: inode.parse().ok().filter(|&inode| inode != 0)?,
        is_written: permissions.contains('w') && permissions.ends_with('s'),
        path: Path::new(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&rest[begin..])),
    })
}

#[cfg(not(unix))]
fn map_of_line(_: &[u8]) -> Option<Map<'_>> {
    None
}

/// Opens the memory of this process.
pub(crate) fn own_memory() -> Result<File> {
    let path = Path::new(OWN_MEMORY);
    file::counted("opening", path, || File::open(path))
}

/// The error of a read of a mapped file's memory.
pub(crate) fn cut_short(mapped: &MappedFile) -> Error {
    let what = format!("is mapped into memory up to byte {}, and was cut short meanwhile", mapped.end);
    Error::Changed { path: mapped.path.clone(), what }
}
