//! Whether arrays that are to be copied share a byte.
//!
//! Arrays of their own are told apart by where they begin and end. Views of one array interleave: those are boxes of one
//! grid, and compared as boxes; what is not a box of the grid is compared with each of the others, exactly, or almost.

mod boxes;
mod item;
mod pair;

pub use pair::share;

use crate::{
    copy::{
        overlap::{
            boxes::Boxes,
            item::{Item, Meeting, span},
        },
        strided::Strided,
    },
    error::{Error, Result},
    radix,
    tiling::Poll,
};

/// After how many arrays, or pairs of them, there is a poll.
const ARRAYS_PER_POLL: usize = 1 << 12;

/// The arrays of a copy, checked: no byte of a destination is a byte of anything else.
#[derive(Debug, Clone, Copy)]
pub struct Disjoint<'a> {
    sources: &'a [Strided],
    destinations: &'a [Strided],
}

impl<'a> Disjoint<'a> {
    /// Checks that no destination overlaps itself, another destination or a source. Sources may overlap one another.
    ///
    /// Arrays of their own cost `n log n` steps, and so do views of one array, unless they neither fall apart along any
    /// dim nor are apart: then it is all pairs that overlap along one dim.
    ///
    /// # Errors
    /// [`Error::OverlapsItself`], [`Error::OverlapsOther`]; [`Error::TooMany`]; what `poll` returns.
    pub fn new(sources: &'a [Strided], destinations: &'a [Strided], poll: Poll<'_>) -> Result<Self> {
        if let Some(index) = destinations.iter().position(overlaps_itself) {
            return Err(Error::OverlapsItself { index });
        }
        let count = sources.len() + destinations.len();
        let mut all = Vec::new();
        all.try_reserve_exact(count).map_err(|_| Error::TooMany { what: format!("the bounds of {count} arrays") })?;
        all.extend(Item::of(sources, false).chain(Item::of(destinations, true)));
        all.sort_unstable_by_key(|item| (item.low, item.written, item.index));
        let (mut start, mut reach) = (0, i128::MIN);
        for (i, item) in all.iter().enumerate() {
            if (i + 1) % ARRAYS_PER_POLL == 0 {
                poll()?;
            }
            if item.low >= reach {
                check(&all[start..i], poll)?;
                start = i;
            }
            reach = reach.max(item.high);
        }
        check(&all[start..], poll)?;
        Ok(Self { sources, destinations })
    }

    /// The sources.
    #[must_use]
    pub fn sources(&self) -> &'a [Strided] {
        self.sources
    }

    /// The destinations.
    #[must_use]
    pub fn destinations(&self) -> &'a [Strided] {
        self.destinations
    }
}

/// Checks arrays whose bytes interleave.
fn check(items: &[Item<'_>], poll: Poll<'_>) -> Result<()> {
    if items.len() < 2 || items.iter().all(|item| !item.written) {
        return Ok(());
    }
    let boxes = Boxes::of(items, poll)?;
    let mut meeting = boxes.meeting(poll)?;
    let mut pairs = 0;
    for (i, &odd) in boxes.others.iter().enumerate() {
        if meeting.is_some() {
            break;
        }
        for (other, item) in items.iter().enumerate() {
            pairs += 1;
            if pairs % ARRAYS_PER_POLL == 0 {
                poll()?;
            }
            let is_written = items[odd].written || item.written;
            let is_done = other == odd || boxes.others[..i].binary_search(&other).is_ok();
            if is_written && !is_done && share(items[odd].array, item.array) {
                meeting = Some(Meeting(odd, other));
                break;
            }
        }
    }
    let Some(Meeting(a, b)) = meeting else { return Ok(()) };
    let (a, b) = (&items[a], &items[b]);
    Err(match (a.written, b.written) {
        (true, true) => {
            Error::OverlapsOther { index: a.index.max(b.index), other: "out", position: a.index.min(b.index) }
        }
        (true, false) => Error::OverlapsOther { index: a.index, other: "src_shards", position: b.index },
        (false, _) => Error::OverlapsOther { index: b.index, other: "src_shards", position: a.index },
    })
}

/// Whether two elements of an array may share a byte.
fn overlaps_itself(region: &Strided) -> bool {
    let dims = region.dims().iter().map(|&(extent, stride)| (extent, stride as i64));
    span(region).is_some() && radix::overlaps_itself(region.itemsize() as i64, dims)
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
