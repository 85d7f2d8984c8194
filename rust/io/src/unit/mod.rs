//! One unit of work, by one thread with two buffers: what is read, and what is to be written.
//!
//! First every destination part gets its slot: its place in the write buffer, in the order of the files, or in the
//! caller's memory. Then the sources are read: long runs to where they belong, everything else, sorted and joined, into
//! the read buffer, from which it is copied to the slots. Then the slots are digested, and written or compared.

mod reads;

use std::{fs::File, sync::Arc};

use shardwise_core::region::RegionBuf;

use crate::{
    error::{Result, no_room},
    file,
    job::{Destination, Job, Source},
    pair::dense_strides,
    slot::{BoxRuns, Finding, Slot},
    strided::{self, Pointer},
    table::Table,
    tiles::Tile,
};

/// The open files of a job.
pub(crate) struct Files<'a> {
    pub(crate) sources: Table<'a>,
    pub(crate) destinations: Table<'a>,
    pub(crate) compared: Table<'a>,
    /// The memory of this process, if a source is that of a mapped file.
    pub(crate) memory: Option<Arc<File>>,
}

/// The bytes that were moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes read from files, those between needed ones included.
    pub read: i64,
    /// Bytes written to files.
    pub written: i64,
    /// Calls that read or write.
    pub calls: i64,
}

/// A copy from what was read for several slots to one of them.
struct SlotCopy {
    from: Pointer,
    to: Pointer,
    form: BoxRuns,
}

/// A thread's buffers.
pub(crate) struct Worker<'a> {
    job: &'a Job,
    files: &'a Files<'a>,
    limit: i64,
    reading: Vec<u8>,
    writing: Vec<u8>,
    /// Bytes that several slots want, until they are copied to them. Together with `reading` they
    /// are no larger than `limit`.
    shared: Vec<u8>,
    pub(crate) traffic: Traffic,
}

impl<'a> Worker<'a> {
    /// A worker whose buffers grow to `limit` bytes each.
    pub(crate) fn new(job: &'a Job, files: &'a Files<'a>, limit: i64) -> Self {
        Self {
            job,
            files,
            limit,
            reading: Vec::new(),
            writing: Vec::new(),
            shared: Vec::new(),
            traffic: Traffic::default(),
        }
    }

    /// Does a unit.
    pub(crate) fn run(&mut self, tiles: &[Tile]) -> Result<Vec<Finding>> {
        let (slots, first) = self.slots(tiles)?;
        let (mut reads, forms, copies) = self.reads(tiles, &slots, &first)?;
        self.fetch(&mut reads, &forms)?;
        for copy in copies {
            // SAFETY: the box lies in what was read for it and in its slot, as in `reads`; the two are other memory.
            unsafe { strided::copy(copy.from, copy.to, &copy.form.dims, copy.form.run) };
        }
        let mut findings = Vec::new();
        for slot in slots.iter().filter(|slot| slot.tensor.wanted.digest || slot.tensor.wanted.crc) {
            findings.push(slot.checksums());
        }
        self.compare(&slots, &mut findings)?;
        self.write(&slots)?;
        Ok(findings)
    }

    /// The slots of the tiles, those of each tile one after the other, and the first one of each tile.
    fn slots<'t>(&mut self, tiles: &[Tile]) -> Result<(Vec<Slot<'t>>, Vec<usize>)>
    where
        'a: 't,
    {
        let mut slots = Vec::new();
        let mut first = Vec::with_capacity(tiles.len() + 1);
        // (holder, byte of it, slot, bytes) of those that need room in the buffer.
        let mut buffered: Vec<(usize, i64, usize, i64)> = Vec::new();
        for tile in tiles {
            first.push(slots.len());
            let tensor = &self.job.tensors[tile.tensor];
            for &d in &tile.destinations {
                let piece = tensor.destinations.get(d as usize);
                let Some(bounds) = tile.bounds.region().overlap(piece.region) else { continue };
                if let Some(slot) = self.slot_in_memory(tile, d as usize, &bounds) {
                    slots.push(slot);
                    continue;
                }
                let at = piece.at(bounds.region().start());
                let strides = match &self.job.destinations[piece.holder] {
                    Destination::Memory(_) => piece.strides.to_vec(),
                    _ => dense_strides(piece.strides, bounds.region()),
                };
                let start = match &self.job.destinations[piece.holder] {
                    Destination::Memory(memory) => Pointer::new(memory.start).offset(at),
                    _ => {
                        buffered.push((piece.holder, at, slots.len(), bounds.region().volume()));
                        Pointer::new(std::ptr::null_mut())
                    }
                };
                slots.push(Slot { tensor, piece: d as usize, bounds, strides, start, is_source: false });
            }
        }
        first.push(slots.len());
        buffered.sort_unstable();
        let total = buffered.iter().map(|slot| slot.3).sum();
        let buffer = Pointer::new(grown(&mut self.writing, total)?.as_mut_ptr());
        let mut used = 0;
        for (_, _, slot, bytes) in buffered {
            slots[slot].start = buffer.offset(used);
            used += bytes;
        }
        Ok((slots, first))
    }

    /// A slot that is the memory of a source, for what is only digested: none if the source has only a part of it, or has it
    /// in shorter runs than a copy would.
    fn slot_in_memory<'t>(&self, tile: &Tile, piece: usize, bounds: &RegionBuf) -> Option<Slot<'t>>
    where
        'a: 't,
    {
        let (tensor, region) = (&self.job.tensors[tile.tensor], bounds.region());
        let destination = tensor.destinations.get(piece);
        let Destination::Nowhere = self.job.destinations[destination.holder] else { return None };
        let pieces = tile.sources.iter().map(|&source| tensor.sources.get(source as usize));
        let source = pieces.into_iter().find(|source| source.region.contains(region))?;
        let Source::Memory(memory) = &self.job.sources[source.holder] else { return None };
        let run = |strides: &[i64]| BoxRuns::between(region, &tensor.strides, strides).run;
        if run(source.strides) < run(&dense_strides(destination.strides, region)) {
            return None;
        }
        let start = Pointer::new(memory.start).offset(source.at(region.start()));
        let strides = source.strides.to_vec();
        Some(Slot { tensor, piece, bounds: bounds.clone(), strides, start, is_source: true })
    }

    /// Writes the slots that go to files; those that follow one another there are written together.
    fn write(&mut self, slots: &[Slot<'_>]) -> Result<()> {
        let mut runs: Vec<(usize, i64, i64, Pointer)> = Vec::new();
        for slot in slots {
            let piece = slot.tensor.destinations.get(slot.piece);
            if let Destination::File { .. } = self.job.destinations[piece.holder] {
                slot.file_runs(|offset, length, from| runs.push((piece.holder, offset, length, from)));
            }
        }
        runs.sort_unstable_by_key(|&(holder, offset, ..)| (holder, offset));
        let mut at = 0;
        while at < runs.len() {
            let (holder, offset, mut length, from) = runs[at];
            at += 1;
            while let Some(&(next, next_offset, more, place)) = runs.get(at) {
                if next != holder || next_offset != offset + length || place != from.offset(length) {
                    break;
                }
                length += more;
                at += 1;
            }
            let (destination, path) = self.files.destinations.get(holder)?;
            // SAFETY: slots that follow one another in the buffer, which nobody writes now.
            let bytes = unsafe { from.slice(length) };
            file::write(&destination, path, bytes, offset)?;
            self.traffic.written += length;
            self.traffic.calls += 1;
        }
        Ok(())
    }

    /// Compares the slots that have a file to be compared with; adds what differs to the findings.
    fn compare(&mut self, slots: &[Slot<'_>], findings: &mut Vec<Finding>) -> Result<()> {
        for slot in slots {
            let piece = slot.tensor.destinations.get(slot.piece);
            if !matches!(self.job.destinations[piece.holder], Destination::Compared(_)) {
                continue;
            }
            let (other, path) = self.files.compared.get(piece.holder)?;
            let mut runs = Vec::new();
            slot.file_runs(|offset, length, from| runs.push((offset, length, from)));
            let mut differs = None;
            for (offset, length, from) in runs {
                let mut done = 0;
                while done < length {
                    let part = (length - done).min(self.limit);
                    let buffer = grown(&mut self.reading, part)?;
                    file::read(&other, path, buffer, offset + done)?;
                    self.traffic.read += part;
                    self.traffic.calls += 1;
                    // SAFETY: a run of the slot in the write buffer, which nobody writes now.
                    let ours = unsafe { from.offset(done).slice(part) };
                    if ours != &*buffer {
                        let first = slot.start.distance(from) + done;
                        let bytes = ours.iter().zip(&*buffer).enumerate().filter(|(_, (a, b))| a != b);
                        let places = bytes.map(|(i, _)| slot.position(first + i as i64));
                        differs = differs.into_iter().chain(places).min();
                    }
                    done += part;
                }
            }
            if let Some(differs) = differs {
                findings.push(Finding { differs, ..slot.nothing() });
            }
        }
        Ok(())
    }
}

/// The first `bytes` bytes of a buffer, which grows if it must.
fn grown(buffer: &mut Vec<u8>, bytes: i64) -> Result<&mut [u8]> {
    let bytes = bytes as usize;
    if buffer.len() < bytes {
        let more = bytes - buffer.len();
        buffer.try_reserve_exact(more).map_err(no_room("a buffer"))?;
        buffer.resize(bytes, 0);
    }
    Ok(&mut buffer[..bytes])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_and_what_is_read_are_within_the_limit_together() {
        let job = Job::new(Vec::new(), Vec::new()).unwrap();
        let sources = Table::sources(&job.sources).unwrap();
        let destinations = Table::destinations(&job.destinations, &sources, &mut Vec::new()).unwrap();
        let compared = Table::compared(&job.destinations).unwrap();
        let files = Files { sources, destinations, compared, memory: None };
        // Of 100 bytes: those of the two buffers, those that are to be shared, and those of the buffers afterwards.
        for (shared, reading, more, after) in [
            (0, 0, 0, (0, 0)),
            (0, 60, 40, (40, 60)),
            (0, 60, 41, (41, 0)),
            (10, 60, 40, (40, 60)),
            (40, 60, 10, (40, 60)), // No less than it has.
            (50, 60, 10, (10, 0)),  // What it has counts, if it is more.
            (10, 0, 100, (100, 0)),
            (100, 0, 5, (100, 0)),
            (90, 11, 5, (5, 0)),
        ] {
            let mut worker = Worker::new(&job, &files, 100);
            (worker.shared, worker.reading) = (vec![0; shared], vec![0; reading]);
            assert_eq!(worker.room_to_share(more).unwrap().len() as i64, more);
            assert_eq!((worker.shared.len(), worker.reading.len()), after, "{shared} {reading} {more}");
        }
    }
}
