//! Blocks of files that a unit of work reads: joined where they touch or lie near, and scattered to their slots.

use std::{fs::File, io::IoSliceMut, path::Path};

use crate::{
    error::Result,
    file,
    slot::BoxRuns,
    strided::{Pointer, positions},
};

/// The least length of a run of a read that has a buffer of its own: that costs less than to copy it afterwards.
const WORTH_A_BUFFER: i64 = 512;

/// A block to be read.
pub(crate) struct BlockRead {
    pub(crate) holder: usize,
    pub(crate) offset: i64,
    pub(crate) length: i64,
    pub(crate) to: Pointer,
    /// The number of the form of copies that takes it to its slot; none if it is read to where it belongs.
    pub(crate) form: Option<usize>,
}

/// True if all of a group is needed, and in runs that are not too short to be read to where they
/// belong.
pub(crate) fn scatters(group: &[BlockRead], forms: &[BoxRuns]) -> bool {
    let mut end = group[0].offset;
    group.iter().all(|read| {
        let touches = read.offset == end;
        end += read.length;
        let form = read.form.and_then(|form| forms.get(form));
        touches && form.is_some_and(|form| form.run >= WORTH_A_BUFFER && form.fills(read.length))
    })
}

/// Reads a group to the slots directly; gives the number of calls.
pub(crate) fn scatter(group: &[BlockRead], forms: &[BoxRuns], source: &File, path: &Path) -> Result<i64> {
    let mut runs: Vec<(Pointer, i64)> = Vec::new();
    for read in group {
        let form = &forms[read.form.unwrap_or(0)];
        positions(&form.dims, |_, to| runs.push((read.to.offset(to), form.run)));
    }
    let (mut at, mut calls) = (group[0].offset, 0);
    for part in runs.chunks(file::MAX_SCATTERED) {
        // SAFETY: runs of slots, as where single runs are read.
        let slices = part.iter().map(|&(to, length)| IoSliceMut::new(unsafe { to.slice_mut(length) }));
        file::read_scattered(source, path, &mut slices.collect::<Vec<_>>(), at)?;
        at += part.iter().map(|run| run.1).sum::<i64>();
        calls += 1;
    }
    Ok(calls)
}

/// The blocks in groups that are read at once: those that touch or overlap, and those whose gap `worth` takes. Gives, for
/// each group, how many blocks and how many bytes it has.
pub(crate) fn joined<'r>(
    mut blocks: &'r [BlockRead],
    mut worth: impl FnMut(i64) -> bool + 'r,
) -> impl Iterator<Item = (usize, i64)> + 'r {
    std::iter::from_fn(move || {
        let first = blocks.first()?;
        let (mut count, mut end) = (1, first.offset + first.length);
        for read in &blocks[1..] {
            let gap = read.offset - end;
            if read.holder != first.holder || (gap > 0 && !worth(gap)) {
                break;
            }
            end = end.max(read.offset + read.length);
            count += 1;
        }
        blocks = &blocks[count..];
        Some((count, end - first.offset))
    })
}
