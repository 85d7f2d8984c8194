//! Many short boxes of wide sources, or of few rows each, found by the workers that copy them.
//!
//! A *strip* is some neighbouring destinations, and some of their turns: the boxes of one turn mostly lie side by side in
//! one source. So a strip is copied turn by turn, and no list of all boxes is made, which would take longer to write and
//! to read again than the boxes to find. Where one turn differs from the next in nothing but the source and the position
//! along one dim, its boxes are not even found again: they are moved.
//!
//! The turns of a destination go on where the ones before have ended, so its lines are streamed whole: see `stream`.

use std::ops::Range;

use crate::{
    copy::{
        blocks::{Copies, Group, Side},
        contest::Contest,
        overlap::Disjoint,
        sides::Sides,
        stream::Streams,
    },
    error::Result,
    plan::{
        Plan,
        turns::{OneSource, Turns},
    },
};

/// What one worker copies: of some destination holders, one of so many equal parts of their turns.
#[derive(Debug, Clone)]
pub(super) struct Strip {
    holders: Range<usize>,
    part: usize,
    parts: usize,
}

impl Strip {
    /// All destination holders of a plan, in `ranges` ranges at most, with the turns of each in `parts` parts. The plan
    /// must have more than one range. Strips of the same turns follow one another, so that workers read the same sources.
    pub(super) fn all(plan: &Plan, ranges: usize, parts: usize) -> impl Iterator<Item = Self> + Send {
        let ranges = plan.ranges(ranges);
        (0..parts).flat_map(move |part| {
            let strip = move |holders| Self { holders, part, parts };
            ranges.clone().into_iter().map(strip)
        })
    }

    /// Copies its boxes, and tells `add` their bytes.
    pub(super) fn copy(
        &self,
        plan: &Plan,
        sides: &Sides<'_>,
        regions: Disjoint<'_>,
        outputs: &[Option<usize>],
        contest: &Contest,
        add: impl Fn(i64),
    ) -> Result<()> {
        let mut turns = plan.turns(self.holders.clone());
        // The product may be too large for 64 bits.
        let count = turns.count();
        let [start, stop] =
            [self.part, self.part + 1].map(|at| (count as u128 * at as u128 / self.parts as u128) as usize);
        turns.skip(start);
        let mut copies = Copies::new(regions, self.holders.len())?;
        let mut streams = Streams::new(self.holders.len());
        let (mut group, mut before) = (Group::default(), None);
        for _ in start..stop {
            let next = turns.next_of_one_source();
            if self.shift(sides, before, next, &mut copies) {
                turns.skip(1);
            } else {
                copies.clear();
                self.find(sides, &mut turns, outputs, &mut copies)?;
                group = copies.as_added()?;
            }
            before = next;
            add(copies.go_on(&group, &mut streams, contest));
        }
        copies.finish(&mut streams);
        Ok(())
    }

    /// Adds the boxes of the next turn.
    fn find(
        &self,
        sides: &Sides<'_>,
        turns: &mut Turns<'_>,
        outputs: &[Option<usize>],
        copies: &mut Copies<'_>,
    ) -> Result<()> {
        turns.visit_next(|transfer| {
            sides.add(transfer, outputs, transfer.destination as usize - self.holders.start, copies)
        })
    }

    /// Makes the boxes of the turn `before` those of the turn `next`; false, and nothing is done, if that takes more than
    /// to move all of them alike.
    fn shift(
        &self,
        sides: &Sides<'_>,
        before: Option<OneSource>,
        next: Option<OneSource>,
        copies: &mut Copies<'_>,
    ) -> bool {
        let (Some(before), Some(next)) = (before, next) else { return false };
        let dim = next.dim;
        let [(old, had), (new, have)] =
            [before, next].map(|turn| sides.from.piece(turn.source, 0, turn.source as usize));
        // All holders are at the same place along the dim.
        let (_, want) = sides.to.piece(self.holders.start as i64, 0, 0);
        let along = |turn: OneSource, have: &[i64]| Side {
            from: turn.start - have[dim],
            to: turn.start - want[dim],
            extent: turn.stop - turn.start,
        };
        had.iter().zip(have).enumerate().all(|(other, (had, have))| other == dim || had == have)
            && copies.shift(dim, (old, along(before, had)), (new, along(next, have)))
    }
}
