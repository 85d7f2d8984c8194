//! A plan, run on arrays in memory: every box copied, on all cores.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::{
    error::{Error, Result},
    parallel,
    reshard::{
        copy::{Copies, Group},
        memory::Disjoint,
        plan::Plan,
    },
};

/// The least and the most bytes that a worker copies at a time: long enough to be worth taking, short enough for all to
/// end together. Two workers at neighbouring rows write to the same pages, so pieces are rather large.
const PIECE_BYTES: (i64, i64) = (1 << 18, 1 << 22);
/// Into how many pieces the work is cut, if they are neither too small nor too large.
const PIECES: i64 = 16;

/// Copies what each destination device receives and keeps into its array. `outputs[d]` is the destination among
/// `regions` that is device `d`'s, or none if it needs no copy. Of partial sums only the first addend is copied; the
/// others are the caller's to add.
///
/// `poll` is called now and then with the bytes that are done, of the bytes in all.
///
/// # Errors
/// What `poll` returns, in which case the destinations are partly written; [`Error::Length`] or [`Error::OutOfRange`],
/// before anything is written, if the arrays are not the plan's.
pub fn run(
    plan: &Plan,
    regions: Disjoint<'_>,
    outputs: &[Option<usize>],
    poll: &mut dyn FnMut(i64, i64) -> Result<()>,
) -> Result<()> {
    let mut copies = collect(plan, regions, outputs)?;
    let groups = copies.arrange();
    let (copies, total) = (&copies, copies.bytes());
    let done = AtomicI64::new(0);
    let mut poll_done = || poll(done.load(Ordering::Relaxed), total);
    let elements = usize::try_from(total / 8).unwrap_or(usize::MAX);
    parallel::for_each(elements, Pieces::new(total, &groups), &mut poll_done, |(group, turns)| {
        done.fetch_add(copies.copy(group, turns), Ordering::Relaxed);
        Ok(())
    })?;
    poll_done()
}

/// All boxes of the plan.
fn collect<'a>(plan: &Plan, regions: Disjoint<'a>, outputs: &[Option<usize>]) -> Result<Copies<'a>> {
    let rank = plan.destination().shape().len();
    let (from_boxes, to_boxes) = (plan.source_boxes()?, plan.destination_boxes()?);
    let devices = plan.destination().mesh().size() as usize;
    if outputs.len() != devices {
        return Err(Error::Length { left: "out", left_len: outputs.len(), right: "devices", right_len: devices });
    }
    let kept = plan.kept_rows()?;
    let mut copies = Copies::new(regions, plan.transfers() + kept.len() / plan.row())?;
    let (mut from, mut to, mut extent) = (vec![0; rank], vec![0; rank], vec![0; rank]);
    let mut collect = |row: &[i64]| {
        let (source, device) = (row[0] as usize, row[1] as usize);
        let Some(output) = outputs[device] else { return Ok(()) };
        if plan.addend_of(row[0]) != 0 {
            return Ok(());
        }
        let (have, want) = (&from_boxes[source * rank * 2..], &to_boxes[device * rank * 2..]);
        for dim in 0..rank {
            let (start, stop) = (row[2 + dim], row[2 + rank + dim]);
            from[dim] = start - have[dim * 2];
            to[dim] = start - want[dim * 2];
            extent[dim] = stop - start;
        }
        copies.push(source, &from, output, &to, &extent)
    };
    kept.chunks_exact(plan.row()).try_for_each(&mut collect)?;
    plan.visit_transfers(collect)?;
    Ok(copies)
}

/// The turns of all groups, cut into pieces.
struct Pieces<'a> {
    groups: std::slice::Iter<'a, Group>,
    /// About how many bytes make a piece.
    bytes: i64,
    /// The group at hand, its next turn, all its turns, and how many make a piece.
    current: Option<(&'a Group, i64, i64, i64)>,
}

impl<'a> Pieces<'a> {
    fn new(total: i64, groups: &'a [Group]) -> Self {
        let bytes = (total / PIECES).clamp(PIECE_BYTES.0, PIECE_BYTES.1);
        Self { groups: groups.iter(), bytes, current: None }
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = (&'a Group, std::ops::Range<i64>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((group, next, turns, step)) = &mut self.current
                && *next < *turns
            {
                let end = (*next + *step).min(*turns);
                let piece = (*group, *next..end);
                *next = end;
                return Some(piece);
            }
            let group = self.groups.next()?;
            let per_turn = group.bytes / group.turns.max(1);
            self.current = Some((group, 0, group.turns, (self.bytes / per_turn.max(1)).max(1)));
        }
    }
}
