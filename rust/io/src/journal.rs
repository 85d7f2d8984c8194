//! What of a job is done, on disk: so that a run that was killed goes on.
//!
//! ```text
//! "SWJOURN1"  u128 the job's fingerprint  i64 bytes of a thread's buffer  u32 CRC-32 of all before
//! record*     u32 length of what follows the CRC  u32 CRC-32 of it  u64 unit  findings: (u64 piece, u128 digest, u32 crc)*
//! ```
//!
//! All little-endian. A record is appended after the unit's bytes were written, and, if the run syncs, after they were
//! synced; so what the journal says is done is done. The first record that is torn or does not match its CRC ends it.
//! The fingerprint covers the paths, sizes and times of the files and all pieces: the units of another job are others.

use std::{
    collections::HashSet,
    fs::{File, OpenOptions},
    io,
    path::{Path, PathBuf},
};

use crate::{
    digest::Digest,
    error::{Error, Result},
    file,
    job::{Destination, Job, Source, SourceFile},
    slot::Finding,
};

const MAGIC: &[u8; 8] = b"SWJOURN1";
const HEADER: usize = 8 + 16 + 8 + 4;
const FINDING: usize = 8 + 16 + 4;
/// No unit has more findings than this many bytes; a longer record is damage.
const MAX_RECORD: usize = 64 << 20;

/// An open journal.
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    end: i64,
}

/// What a journal says.
#[derive(Debug, Default)]
pub(crate) struct Past {
    /// The bytes of a thread's buffer, on which the units depend.
    pub(crate) limit: i64,
    pub(crate) units: HashSet<u64>,
    pub(crate) findings: Vec<Finding>,
}

impl Journal {
    /// Opens the journal of this job; what is there of another job, or damaged, is no past. `limit` is for a new one.
    pub(crate) fn open(path: &Path, fingerprint: u128, limit: i64) -> Result<(Self, Option<Past>)> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = file::counted("opening", path, || options.open(path))?;
        let metadata = file::counted("looking at", path, || file.metadata())?;
        if !metadata.is_file() {
            return Err(Error::Kind { path: path.to_owned(), kind: "not a file" });
        }
        // Two runs of one job would each take the other's files for their own.
        match file::retried(|| file.try_lock().map_err(io::Error::from)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(Error::Locked { path: path.to_owned(), owner: String::new() });
            }
            locked => locked.map_err(|error| Error::os("locking", path, None, error))?,
        }
        let size = i64::try_from(metadata.len()).unwrap_or(0);
        let mut journal = Self { file, path: path.to_owned(), end: HEADER as i64 };
        if let Some(past) = journal.past(size, fingerprint)? {
            let (file, end) = (&journal.file, journal.end);
            file::counted("cutting", path, || file.set_len(end as u64))?;
            return Ok((journal, Some(past)));
        }
        journal.restart(fingerprint, limit)?;
        Ok((journal, None))
    }

    /// Forgets everything.
    pub(crate) fn restart(&mut self, fingerprint: u128, limit: i64) -> Result<()> {
        let mut header = MAGIC.to_vec();
        header.extend(fingerprint.to_le_bytes());
        header.extend(limit.to_le_bytes());
        header.extend(crc32fast::hash(&header).to_le_bytes());
        file::counted("cutting", &self.path, || self.file.set_len(0))?;
        file::write(&self.file, &self.path, &header, 0)?;
        self.end = HEADER as i64;
        self.sync()
    }

    /// The records, up to the first that is damaged; none if the header is not this job's.
    fn past(&mut self, size: i64, fingerprint: u128) -> Result<Option<Past>> {
        if size < HEADER as i64 {
            return Ok(None);
        }
        let mut header = [0; HEADER];
        file::read(&self.file, &self.path, &mut header, 0)?;
        let (body, crc) = header.split_at(HEADER - 4);
        if body[..8] != MAGIC[..] || u128_at(body, 8) != fingerprint || crc != crc32fast::hash(body).to_le_bytes() {
            return Ok(None);
        }
        let mut past = Past { limit: u64_at(body, 24) as i64, ..Past::default() };
        let mut record = Vec::new();
        while size - self.end >= 8 {
            let mut head = [0; 8];
            file::read(&self.file, &self.path, &mut head, self.end)?;
            let (length, crc) = (u32_at(&head, 0) as usize, u32_at(&head, 4));
            let whole = length >= 8 && (length - 8).is_multiple_of(FINDING) && length <= MAX_RECORD;
            if !whole || size - self.end - 8 < length as i64 {
                break;
            }
            record.resize(length, 0);
            file::read(&self.file, &self.path, &mut record, self.end + 8)?;
            if crc32fast::hash(&record) != crc {
                break;
            }
            self.end += 8 + length as i64;
            if past.units.insert(u64_at(&record, 0)) {
                past.findings.extend(record[8..].chunks_exact(FINDING).map(|finding| Finding {
                    piece: u64_at(finding, 0),
                    digest: u128_at(finding, 8),
                    crc: u32_at(finding, 24),
                    differs: -1,
                }));
            }
        }
        Ok(Some(past))
    }

    /// Appends records of units.
    pub(crate) fn append(&mut self, units: &[(u64, Vec<Finding>)]) -> Result<()> {
        let mut bytes = Vec::new();
        for (unit, findings) in units {
            let mut record = unit.to_le_bytes().to_vec();
            for finding in findings {
                record.extend(finding.piece.to_le_bytes());
                record.extend(finding.digest.to_le_bytes());
                record.extend(finding.crc.to_le_bytes());
            }
            bytes.extend((record.len() as u32).to_le_bytes());
            bytes.extend(crc32fast::hash(&record).to_le_bytes());
            bytes.extend(record);
        }
        file::write(&self.file, &self.path, &bytes, self.end)?;
        self.end += bytes.len() as i64;
        Ok(())
    }

    /// Brings the records to the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        file::sync(&self.file, &self.path)
    }
}

/// What tells one job from another, except for the content of memory.
pub(crate) fn fingerprint(job: &Job) -> u128 {
    let mut text = Fingerprint::default();
    let file = |text: &mut Fingerprint, file: &SourceFile| {
        text.path(&file.path);
        text.numbers(&[file.size, file.modified.unwrap_or(-1)]);
    };
    for source in &job.sources {
        match source {
            Source::File(given) => file(&mut text, given),
            Source::Memory(_) => text.numbers(&[-2]),
        }
    }
    text.numbers(&[-3]);
    for destination in &job.destinations {
        match destination {
            Destination::File { path, size, there } => {
                text.path(path);
                text.numbers(&[*size, i64::from(*there)]);
            }
            Destination::Compared(given) => file(&mut text, given),
            Destination::Memory(_) => text.numbers(&[-4]),
            Destination::Nowhere => text.numbers(&[-5]),
        }
    }
    for tensor in &job.tensors {
        let wanted = i64::from(tensor.wanted.digest) + 2 * i64::from(tensor.wanted.crc);
        text.numbers(&[-6, wanted, tensor.shape.len() as i64]);
        text.numbers(&tensor.shape);
        for (kind, pieces) in [(-7, &tensor.sources), (-8, &tensor.destinations)] {
            text.numbers(&[kind, pieces.len() as i64]);
            for piece in pieces.iter() {
                text.numbers(&[piece.holder as i64, piece.offset]);
                text.numbers(piece.start);
                text.numbers(piece.stop);
                text.numbers(piece.strides);
            }
        }
    }
    text.digest.value()
}

#[derive(Default)]
struct Fingerprint {
    digest: Digest,
    length: i64,
}

impl Fingerprint {
    fn bytes(&mut self, bytes: &[u8]) {
        self.digest.add(self.length, bytes);
        self.length += bytes.len() as i64;
    }

    fn numbers(&mut self, numbers: &[i64]) {
        numbers.iter().for_each(|number| self.bytes(&number.to_le_bytes()));
    }

    fn path(&mut self, path: &Path) {
        let path = path.as_os_str().as_encoded_bytes();
        self.numbers(&[path.len() as i64]);
        self.bytes(path);
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

fn u128_at(bytes: &[u8], at: usize) -> u128 {
    let mut number = [0; 16];
    number.copy_from_slice(&bytes[at..at + 16]);
    u128::from_le_bytes(number)
}
