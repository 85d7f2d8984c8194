//! The reads of a unit of work: which blocks of files and pieces of memory go to which slots, and the reading itself.

use std::{fs::File, path::Path, sync::Arc};

use super::{SlotCopy, Worker, grown};
use crate::{
    blocks::{BlockRead, joined, scatter, scatters},
    error::{Error, Result},
    file,
    job::Source,
    maps,
    pair::{Fetch, GAP, Group, dense_strides, groups},
    piece::Piece,
    slot::{BoxRuns, Slot},
    strided::{self, Pointer, positions},
    tiles::Tile,
};

impl<'a> Worker<'a> {
    /// The reads from files for the slots, and the copies that follow; what comes from memory is
    /// copied at once.
    pub(super) fn reads(
        &mut self,
        tiles: &[Tile],
        slots: &[Slot<'_>],
        first: &[usize],
    ) -> Result<(Vec<BlockRead>, Vec<BoxRuns>, Vec<SlotCopy>)> {
        let mut wanted: Vec<(Piece<'_>, Group, Vec<&Slot<'_>>, bool)> = Vec::new();
        let mut shared = 0;
        for (at, tile) in tiles.iter().enumerate() {
            let tensor = &self.job.tensors[tile.tensor];
            let slots = &slots[first[at]..first[at + 1]];
            for &s in &tile.sources {
                let piece = tensor.sources.get(s as usize);
                let empty = slots.iter().filter(|slot| !slot.is_source);
                let meeting = empty.filter_map(|slot| Some((slot.bounds.region().overlap(piece.region)?, slot)));
                if let Source::Memory(memory) = &self.job.sources[piece.holder] {
                    for (bounds, slot) in meeting {
                        let bounds = bounds.region();
                        let from = Pointer::new(memory.start).offset(piece.at(bounds.start()));
                        let form = BoxRuns::between(bounds, piece.strides, &slot.strides);
                        // SAFETY: the box lies in both pieces, whose extents were checked against their holders when
                        // they were added; the caller vouches for the memory (`Memory::new`); a slot in the buffer has
                        // room for its box, and no two slots overlap.
                        unsafe { strided::copy(from, slot.at(bounds.start()), &form.dims, form.run) };
                    }
                    continue;
                }
                let (parts, held): (Vec<_>, Vec<_>) = meeting.unzip();
                for group in groups(&piece, &parts) {
                    shared += if group.together { group.bounds.region().volume() } else { 0 };
                    let those = group.parts.iter().map(|&part| held[part]).collect();
                    wanted.push((piece, group, those, parts.len() == 1));
                }
            }
        }
        let buffer = Pointer::new(self.room_to_share(shared)?.as_mut_ptr());
        let (mut reads, mut forms, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        let mut used = 0;
        for (piece, group, slots, alone) in wanted {
            let bounds = group.bounds.region();
            let (to, strides, alone) = if group.together {
                let (to, strides) = (buffer.offset(used), dense_strides(piece.strides, bounds));
                used += bounds.volume();
                for slot in slots {
                    // The part is not empty: it was found as one.
                    let Some(part) = slot.bounds.region().overlap(bounds) else { continue };
                    let part = part.region();
                    let within = part.start().iter().zip(bounds.start()).zip(&strides);
                    let from = to.offset(within.map(|((at, start), stride)| (at - start) * stride).sum());
                    let form = BoxRuns::between(part, &strides, &slot.strides);
                    copies.push(SlotCopy { from, to: slot.at(part.start()), form });
                }
                (to, strides, true)
            } else {
                (slots[0].at(bounds.start()), slots[0].strides.clone(), alone)
            };
            let fetch = Fetch::new(&piece, bounds, &strides, self.limit, alone);
            let (first, to) = (self.base(piece.holder) + fetch.span.0, to.offset(fetch.to));
            let form = (!fetch.direct).then_some(forms.len());
            positions(&fetch.outer, |from, step| {
                let (offset, to) = (first + from, to.offset(step));
                reads.push(BlockRead { holder: piece.holder, offset, length: fetch.block, to, form });
            });
            if form.is_some() {
                forms.push(BoxRuns { dims: fetch.inner, run: fetch.run });
            }
        }
        Ok((reads, forms, copies))
    }

    /// Room for so many bytes that several slots want. Both buffers are given up, and grow again as they must, if they would
    /// be larger than the limit together.
    pub(super) fn room_to_share(&mut self, shared: i64) -> Result<&mut [u8]> {
        if (self.shared.len().max(shared as usize) + self.reading.len()) as i64 > self.limit {
            (self.shared, self.reading) = (Vec::new(), Vec::new());
        }
        grown(&mut self.shared, shared)
    }

    /// Reads, in the order of the files, and copies to the slots.
    pub(super) fn fetch(&mut self, reads: &mut [BlockRead], forms: &[BoxRuns]) -> Result<()> {
        for read in reads.iter().filter(|read| read.form.is_none()) {
            let (source, path) = self.source(read.holder)?;
            // SAFETY: a run of a slot: its own part of the buffer, which is initialised, or of the caller's memory, which
            // the caller vouches for; no other slot and no other thread has it.
            let run = unsafe { read.to.slice_mut(read.length) };
            file::read(&source, path, run, read.offset).map_err(|error| self.told(read.holder, error))?;
            self.traffic.read += read.length;
            self.traffic.calls += 1;
        }
        reads.sort_unstable_by_key(|read| (read.form.is_none(), read.holder, read.offset));
        let blocks = &reads[..reads.partition_point(|read| read.form.is_some())];
        // How much may be read for nothing: what is left of the buffer when all that touches is joined.
        let touching: i64 = joined(blocks, |_| false).map(|(_, length)| length).sum();
        let mut spare = self.limit - self.shared.len() as i64 - touching;
        let mut rest = blocks;
        while !rest.is_empty() {
            let mut groups = joined(rest, |gap| {
                let worth = gap <= GAP && gap <= spare;
                spare -= if worth { gap } else { 0 };
                worth
            });
            let Some((count, length)) = groups.next() else { break };
            let (group, after) = rest.split_at(count);
            rest = after;
            let holder = group[0].holder;
            let (source, path) = self.source(holder)?;
            self.traffic.read += length;
            if scatters(group, forms) {
                let calls = scatter(group, forms, &source, path).map_err(|error| self.told(holder, error))?;
                self.traffic.calls += calls;
                continue;
            }
            let buffer = grown(&mut self.reading, length)?;
            let done = file::read(&source, path, buffer, group[0].offset);
            let start = Pointer::new(buffer.as_mut_ptr());
            done.map_err(|error| self.told(holder, error))?;
            self.traffic.calls += 1;
            for read in group {
                let form = &forms[read.form.unwrap_or(0)];
                // SAFETY: the block was read to this place of the buffer; its positions in the slot are within it, as in
                // `reads`. The two buffers do not overlap, nor does the caller's memory.
                unsafe { strided::copy(start.offset(read.offset - group[0].offset), read.to, &form.dims, form.run) };
            }
        }
        Ok(())
    }

    /// The byte of the file that a holder is read from at which the holder begins: that of memory is its address.
    fn base(&self, holder: usize) -> i64 {
        match &self.job.sources[holder] {
            Source::Mapped(memory, _) => memory.start as i64,
            Source::File(_) | Source::Memory(_) => 0,
        }
    }

    /// The file that a holder is read from, and its path.
    fn source(&self, holder: usize) -> Result<(Arc<File>, &'a Path)> {
        match (&self.job.sources[holder], &self.files.memory) {
            (Source::Mapped(_, mapped), Some(memory)) => Ok((Arc::clone(memory), &mapped.path)),
            _ => self.files.sources.get(holder),
        }
    }

    /// The error for a read that failed: for memory of a mapped file it is an address that cannot
    /// be read.
    fn told(&self, holder: usize, error: Error) -> Error {
        match (&self.job.sources[holder], error) {
            (Source::Mapped(_, mapped), Error::Os { .. } | Error::Ends { .. }) => maps::cut_short(mapped),
            (_, error) => error,
        }
    }
}
