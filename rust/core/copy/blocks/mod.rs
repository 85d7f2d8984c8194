//! Which boxes are copied side by side, and in which order: blocks of rows, in turns.
//!
//! A box of one array is copied to a box of another, whatever their dtype and strides, as *rows*: runs of bytes that are
//! contiguous in both. The order of the rows decides the speed. Cut 16,384 columns among 512 devices and a row is 128
//! bytes; copied device by device, every row opens another page of the source, and the memory delivers a fifth of what
//! it could. So the copies that read (or write) one wide array go side by side, a block of at most 32 rows of each in
//! turn: then both arrays are walked nearly in order.
//!
//! ```text
//! for each block of 32 rows of the wide array: for each narrow array: copy the block's rows
//! ```

use std::{cmp::Reverse, ops::Range};

use crate::{
    copy::{
        choices,
        contest::{Contest, Way},
        form::Form,
        kernel::{Job, Place, copy_rows, prefetch},
        overlap::Disjoint,
        stream::{LINE, Streams},
        tuning::LONGEST_ROW,
    },
    error::{Error, Result},
};

/// Where a box lies along one dim.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Side {
    /// Its start in the source.
    pub(super) from: i64,
    /// Its start in the destination.
    pub(super) to: i64,
    pub(super) extent: i64,
}

impl Side {
    fn lies_within(self, start: i64, size: i64) -> bool {
        start >= 0 && self.extent >= 0 && start <= size && self.extent <= size - start
    }
}

/// Boxes to be copied between regions, collected and put in order.
#[derive(Debug)]
pub(super) struct Copies<'a> {
    regions: Disjoint<'a>,
    forms: Vec<Form>,
    /// The item size, extents and strides that gave the newest form: neighbouring boxes mostly have the same.
    newest: (usize, Vec<(i64, isize, isize)>),
    jobs: Vec<Job>,
    /// How many of the jobs have a wide source.
    wide_sources: usize,
    /// A dim, and its extent and stride in the destinations of all jobs, if [`Self::shift`] has found that they are alike.
    alike: Option<(usize, (i64, isize))>,
}

/// Copies that share their wide array, and are done in turns.
#[derive(Debug, Clone, Default)]
pub(super) struct Group {
    /// Which ones, as a range of the order.
    jobs: Range<usize>,
    /// The blocks of the copy that has the most; those that have more come first.
    pub(super) turns: i64,
    /// The blocks of the copy that has the fewest.
    least_turns: i64,
    pub(super) bytes: i64,
}

impl Group {
    /// The group in parts that are small enough for a worker in each turn; none if it is empty.
    fn split(&self) -> impl Iterator<Item = Self> {
        let parts = choices::parts_of_group(self.bytes / self.turns.max(1));
        let step = self.jobs.len().div_ceil(parts as usize).max(1);
        let bytes = self.bytes / parts;
        self.jobs.clone().step_by(step).map(move |start| {
            let jobs = start..(start + step).min(self.jobs.end);
            Self { jobs, bytes, ..self.clone() }
        })
    }
}

impl<'a> Copies<'a> {
    /// Room for `boxes` boxes.
    ///
    /// # Errors
    /// [`Error::TooMany`] if the memory has no room for them.
    pub(super) fn new(regions: Disjoint<'a>, boxes: usize) -> Result<Self> {
        let mut jobs = Vec::new();
        // They are numbered with 32 bits, and each may become two when long rows are cut.
        if boxes > (u32::MAX / 2) as usize || jobs.try_reserve_exact(boxes).is_err() {
            return Err(too_many(boxes));
        }
        Ok(Self { regions, forms: Vec::new(), newest: (0, Vec::new()), jobs, wide_sources: 0, alike: None })
    }

    /// Adds a box of source `source`, to go to destination `destination`; `sides` says where it lies in them, dim by dim.
    /// The boxes added for one destination must not share an element. `stream` is the number of the destination
    /// among those of [`Self::go_on`]; for [`Self::arrange`] it may be any.
    #[inline(always)]
    pub(super) fn push(
        &mut self,
        source: usize,
        destination: usize,
        stream: usize,
        sides: impl ExactSizeIterator<Item = Side> + Clone,
    ) -> Result<()> {
        let (a, b) = (&self.regions.sources()[source], &self.regions.destinations()[destination]);
        if a.itemsize() != b.itemsize() {
            let (left, right) = ("an item of the source", "an item of the destination");
            return Err(Error::Length { left, left_len: a.itemsize(), right, right_len: b.itemsize() });
        }
        if a.dims().len() != sides.len() || b.dims().len() != sides.len() {
            return Err(outside(source));
        }
        let (mut from, mut to) = (0_isize, 0_isize);
        let mut is_empty = a.itemsize() == 0;
        let mut is_new = a.itemsize() != self.newest.0 || self.newest.1.len() != sides.len();
        let mut newest = self.newest.1.iter();
        for ((side, &(size_from, stride_from)), &(size_to, stride_to)) in sides.clone().zip(a.dims()).zip(b.dims()) {
            if !side.lies_within(side.from, size_from) {
                return Err(outside(source));
            }
            if !side.lies_within(side.to, size_to) {
                return Err(outside(destination));
            }
            // Wrapping: strides of opposite signs may leave the array and come back; the sum is an item's offset.
            from = from.wrapping_add((side.from as isize).wrapping_mul(stride_from));
            to = to.wrapping_add((side.to as isize).wrapping_mul(stride_to));
            is_empty |= side.extent == 0;
            is_new |= newest.next() != Some(&(side.extent, stride_from, stride_to));
        }
        if is_empty {
            return Ok(());
        }
        if is_new {
            self.add_form(
                sides.zip(a.dims()).zip(b.dims()).map(|((side, a), b)| (side.extent, a.1, b.1)).collect(),
                a.itemsize(),
            );
        }
        let number = self.forms.len() - 1;
        self.wide_sources += usize::from(self.forms[number].wide_source);
        let place = Place::of(a, b).moved(from, to);
        self.alike = None;
        if self.jobs.len() == self.jobs.capacity() {
            self.make_room(1)?;
        }
        self.jobs.push(Job {
            place,
            form: number as u32,
            arrays: (source as u32, destination as u32),
            stream: stream as u32,
        });
        Ok(())
    }

    /// Makes sure that the memory has room for so many more boxes.
    #[cold]
    fn make_room(&mut self, more: usize) -> Result<()> {
        self.jobs.try_reserve(more).map_err(|_| too_many(self.jobs.len() + more))
    }

    #[cold]
    fn add_form(&mut self, dims: Vec<(i64, isize, isize)>, itemsize: usize) {
        self.forms.push(Form::new(dims.clone(), itemsize as i64));
        self.newest = (itemsize, dims);
    }

    /// Cuts long rows and puts side by side what shares its wide array; gives the groups.
    ///
    /// # Errors
    /// [`Error::TooMany`] if the memory has no room for the boxes twice.
    pub(super) fn arrange(&mut self) -> Result<Vec<Group>> {
        self.shorten()?;
        let by_source = self.have_wide_sources();
        let key = |job: &Job| (if by_source { job.arrays.0 } else { job.arrays.1 }) as usize;
        let mut groups = vec![Group::default(); self.jobs.iter().map(|job| key(job) + 1).max().unwrap_or(0)];
        for job in &self.jobs {
            let (group, form) = (&mut groups[key(job)], &self.forms[job.form as usize]);
            let blocks = form.blocks();
            group.least_turns = if group.jobs.end == 0 { blocks } else { group.least_turns.min(blocks) };
            group.turns = group.turns.max(blocks);
            group.jobs.end += 1;
            group.bytes += form.rows * form.row;
        }
        let mut start = 0;
        for group in &mut groups {
            let count = group.jobs.end;
            // Its end moves on below, with each job that is put into its place.
            group.jobs = start..start;
            start += count;
        }
        let mut sorted = Vec::new();
        sorted.try_reserve_exact(self.jobs.len()).map_err(|_| too_many(self.jobs.len()))?;
        sorted.extend_from_slice(&self.jobs);
        for job in &self.jobs {
            let end = &mut groups[key(job)].jobs.end;
            sorted[*end] = *job;
            *end += 1;
        }
        self.jobs = sorted;
        for group in groups.iter().filter(|group| group.least_turns < group.turns) {
            // Without memory, as a stable sort would take.
            let order = |job: &Job| (Reverse(self.forms[job.form as usize].blocks()), job.arrays);
            self.jobs[group.jobs.clone()].sort_unstable_by_key(order);
        }
        let groups: Vec<Group> = groups.iter().flat_map(Group::split).collect();
        for group in &groups {
            // One wide destination, or one for each job.
            let jobs = self.jobs[group.jobs.clone()].iter_mut().zip(0..);
            jobs.for_each(|(job, number)| job.stream = if by_source { number } else { 0 });
        }
        Ok(groups)
    }

    /// Cuts the rows that are too long for one thread at a time.
    fn shorten(&mut self) -> Result<()> {
        let cut: Vec<_> = self.forms.iter().map(|f| (f.row > LONGEST_ROW).then(|| f.shortened())).collect();
        if cut.iter().all(Option::is_none) {
            return Ok(());
        }
        let mut tails = Vec::new();
        for (form, tail) in cut.into_iter().enumerate() {
            let Some((main, rest)) = tail else {
                tails.push(None);
                continue;
            };
            self.forms[form] = main;
            tails.push(rest.map(|(rest, offset)| {
                self.forms.push(rest);
                (self.forms.len() as u32 - 1, offset)
            }));
        }
        let more = self.jobs.iter().filter(|job| tails[job.form as usize].is_some()).count();
        self.make_room(more)?;
        for i in 0..self.jobs.len() {
            let job = self.jobs[i];
            if let Some((form, offset)) = tails[job.form as usize] {
                self.jobs.push(Job { place: job.place.moved(offset, offset), form, ..job });
            }
        }
        Ok(())
    }

    /// Forgets all boxes, and their forms: those of long rows have been cut, and are not those of new boxes.
    pub(super) fn clear(&mut self) {
        self.jobs.clear();
        self.forms.clear();
        self.newest = (0, Vec::new());
        self.wide_sources = 0;
        self.alike = None;
    }

    /// Moves all boxes, which are of one source and lie along `dim` as `old` says, to another source and to where `new`
    /// says; false, and nothing is done, if that would not be the same as to add them there.
    pub(super) fn shift(&mut self, dim: usize, old: (usize, Side), new: (usize, Side)) -> bool {
        let (a, b) = (&self.regions.sources()[old.0], &self.regions.sources()[new.0]);
        let Some(first) = self.jobs.first() else { return true };
        let along = |job: &Job| self.regions.destinations()[job.arrays.1 as usize].dims()[dim];
        let (size, stride_to) = along(first);
        let (size_from, stride_from) = a.dims()[dim];
        if self.alike != Some((dim, (size, stride_to))) {
            if self.jobs.iter().any(|job| along(job) != (size, stride_to)) {
                return false;
            }
            self.alike = Some((dim, (size, stride_to)));
        }
        let are_alike = (a.itemsize(), a.dims(), old.1.extent) == (b.itemsize(), b.dims(), new.1.extent);
        if !are_alike || !new.1.lies_within(new.1.from, size_from) || !new.1.lies_within(new.1.to, size) {
            return false;
        }
        let further = |old: i64, new: i64, stride: isize| ((new - old) as isize).wrapping_mul(stride);
        let from = further(old.1.from, new.1.from, stride_from);
        let to = further(old.1.to, new.1.to, stride_to);
        for job in &mut self.jobs {
            let offset = job.place.source(0).addr().wrapping_sub(a.address()) as isize;
            job.place = job.place.with_source(b, offset.wrapping_add(from)).moved(0, to);
            job.arrays.0 = new.0 as u32;
        }
        true
    }

    /// Whether most boxes lie further apart in their source.
    pub(super) fn have_wide_sources(&self) -> bool {
        2 * self.wide_sources > self.jobs.len()
    }

    /// Whether each box has so few rows that it hardly matters in which order arrays are walked.
    pub(super) fn have_few_rows(&self) -> bool {
        self.forms.iter().all(|form| choices::are_few(form.rows))
    }

    /// All copies as one group, in the order in which they were added; those that have the most blocks come first.
    ///
    /// # Errors
    /// [`Error::TooMany`] if the memory has no room for the rows that are cut.
    pub(super) fn as_added(&mut self) -> Result<Group> {
        self.shorten()?;
        let blocks = |job: &Job| self.forms[job.form as usize].blocks();
        let turns = self.jobs.iter().map(blocks).max().unwrap_or(0);
        let least_turns = self.jobs.iter().map(blocks).min().unwrap_or(0);
        let bytes = self.jobs.iter().map(|job| &self.forms[job.form as usize]).map(|form| form.rows * form.row).sum();
        let group = Group { jobs: 0..self.jobs.len(), turns, least_turns, bytes };
        if least_turns < turns {
            self.jobs.sort_by_key(|job| Reverse(self.forms[job.form as usize].blocks()));
        }
        Ok(group)
    }

    /// Copies the blocks of the given turns of each group's copies, and gives their bytes; `contest` says how.
    pub(super) fn copy<'g>(&self, groups: impl Iterator<Item = (&'g Group, Range<i64>)>, contest: &Contest) -> i64 {
        let mut bytes = 0;
        let mut groups = groups.peekable();
        while let Some((group, turns)) = groups.next() {
            let next = groups.peek().and_then(|(group, turns)| self.tiles(group, turns.clone()).next());
            bytes += contest.round(|way| match way {
                Way::Streaming => {
                    let jobs = &self.jobs[group.jobs.clone()];
                    let mut streams = Streams::new(jobs.iter().map(|job| job.stream as usize + 1).max().unwrap_or(0));
                    let bytes = self.stream(group, turns, &mut streams);
                    self.finish(&mut streams);
                    bytes
                }
                Way::Ordinary => self.copy_tiles(self.tiles(group, turns), next),
            });
        }
        bytes
    }

    /// Copies all of a group. What it has of lines that `streams` have begun goes on where these have ended, and what it has
    /// of lines that it does not end is left to them, until [`Self::finish`].
    pub(super) fn go_on(&self, group: &Group, streams: &mut Streams, contest: &Contest) -> i64 {
        if group.jobs.is_empty() {
            return 0;
        }
        contest.round(|way| match way {
            Way::Streaming => self.stream(group, 0..group.turns, streams),
            Way::Ordinary => self.copy_tiles(self.tiles(group, 0..group.turns), None),
        })
    }

    /// Stores what is still under way.
    pub(super) fn finish(&self, streams: &mut Streams) {
        // SAFETY: what is under way was valid when it was taken, and still is: these are rows of the same arrays.
        unsafe { streams.finish() };
    }

    /// Copies tiles with ordinary stores, and fetches ahead what each needs while the one before is copied; `next` comes
    /// after them.
    fn copy_tiles<'s>(&'s self, tiles: impl Iterator<Item = (i64, &'s [Job])>, next: Option<(i64, &'s [Job])>) -> i64 {
        let mut bytes = 0;
        let mut tiles = tiles.peekable();
        while let Some((turn, tile)) = tiles.next() {
            let next = tiles.peek().or(next.as_ref());
            for (i, job) in tile.iter().enumerate() {
                let form = &self.forms[job.form as usize];
                let rows = form.rows_of(turn);
                if let Some(&(turn, next)) = next {
                    self.prefetch_part(next, turn, i, tile.len());
                }
                // SAFETY: these are rows of the box that `push` checked (point 1); no other thread
                // has them, for each turn of each group is handed out once, and nothing else overlaps them (point 2).
                unsafe { copy_rows(form, job.place, rows.clone()) };
                bytes += (rows.end - rows.start) * form.row;
            }
        }
        bytes
    }

    /// Copies the given turns of a group with streaming stores.
    ///
    /// If the destination is the wide array, row by row through all sources, which together make whole lines of it, or some
    /// rows of each source if they are short; else array by array, a few rows at a time.
    fn stream(&self, group: &Group, turns: Range<i64>, streams: &mut Streams) -> i64 {
        let mut bytes = 0;
        let jobs = &self.jobs[group.jobs.clone()];
        let form_of = |job: &Job| &self.forms[job.form as usize];
        for turn in turns {
            let jobs = &jobs[..jobs.partition_point(|job| form_of(job).blocks() > turn)];
            // A part of a group may have fewer turns than the group.
            if jobs.is_empty() {
                break;
            }
            let by_row = jobs.iter().all(|job| !form_of(job).wide_source && !form_of(job).is_stretch());
            let is_across = by_row && choices::streams_across(form_of(&jobs[0]).row);
            let step = if by_row && !is_across { 1 } else { choices::rows_streamed(form_of(&jobs[0]).row) };
            // Mostly all boxes have one form, and need not be looked at one by one.
            let is_one_form = self.forms.len() == 1;
            let some = if is_one_form { &jobs[..1] } else { jobs };
            let most = some.iter().map(|job| form_of(job).rows_of(turn)).map(|rows| rows.end - rows.start).max();
            for at in (0..most.unwrap_or(0)).step_by(step as usize) {
                for jobs in jobs.chunk_by(|a, b| is_one_form || a.form == b.form) {
                    let form = form_of(&jobs[0]);
                    let rows = form.rows_of(turn);
                    let rows = rows.start + at..(rows.start + at + step).min(rows.end);
                    if rows.is_empty() {
                        continue;
                    }
                    bytes += (rows.end - rows.start) * form.row * jobs.len() as i64;
                    // SAFETY: rows of the boxes that `push` checked (point 1); no other thread has them, for each turn
                    // of each group is handed out once, and nothing else overlaps them (point 2).
                    unsafe {
                        match form.row >= LINE as i64 {
                            true if is_across => streams.copy_across(form, &rows, jobs),
                            true => streams.copy_rows(form, &rows, jobs),
                            false => jobs.iter().for_each(|job| copy_rows(form, job.place, rows.clone())),
                        }
                    }
                }
            }
        }
        bytes
    }

    /// A group's copies in each of the turns, as many side by side as make a tile.
    fn tiles<'s>(&'s self, group: &Group, turns: Range<i64>) -> impl Iterator<Item = (i64, &'s [Job])> + use<'s, 'a> {
        let jobs = &self.jobs[group.jobs.clone()];
        let width = choices::side_by_side(self.forms[jobs[0].form as usize].row);
        turns.flat_map(move |turn| {
            let left = jobs.partition_point(|job| self.forms[job.form as usize].blocks() > turn);
            jobs[..left].chunks(width).map(move |tile| (turn, tile))
        })
    }

    /// Fetches part `part` of `parts` of what a tile needs of the wide array in a turn, row by row: so memory is read in
    /// its own order, and there is time while the tile before is copied.
    fn prefetch_part(&self, tile: &[Job], turn: i64, part: usize, parts: usize) {
        let number = tile[0].form;
        let form = &self.forms[number as usize];
        let Some(stride) = form.prefetched else { return };
        let rows = form.rows_of(turn);
        let count = rows.end - rows.start;
        let (start, stop) = (count * part as i64 / parts as i64, count * (part as i64 + 1) / parts as i64);
        if stop <= start {
            return;
        }
        let jobs = tile.iter().take_while(|job| job.form == number);
        if form.wide_source {
            form.each_run(rows.start + start, stop - start, |from, _, length| {
                let rows = (0..length as isize).map(|at| from + at * stride);
                rows.for_each(|row| jobs.clone().for_each(|job| prefetch(job.place.source(row), form.row)));
            });
        } else {
            form.each_run(rows.start + start, stop - start, |_, to, length| {
                let rows = (0..length as isize).map(|at| to + at * stride);
                rows.for_each(|row| jobs.clone().for_each(|job| prefetch(job.place.destination(row), form.row)));
            });
        }
    }
}

fn too_many(boxes: usize) -> Error {
    Error::TooMany { what: format!("{boxes} copies") }
}

/// A plan's boxes always lie in the arrays that it is run on.
fn outside(position: usize) -> Error {
    Error::OutOfRange { what: "box of array", position: Some(position), value: -1, limit: 0 }
}

#[cfg(test)]
mod tests;
