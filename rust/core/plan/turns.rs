//! The boxes of some holders in turns: the first box of each, then the second of each, and so on.
//!
//! A plan lists holder by holder. Copied in this order, narrow columns of one source would be read at the other end of
//! memory each; the first boxes of neighbouring holders mostly lie side by side in one source, as do the second ones.

use std::ops::Range;

use crate::{
    error::Result,
    plan::{Plan, Transfers, closed::Closed, intersect::Placed, listed::Listed, transfer::Transfer},
    region::Region,
};

/// The boxes that some destination holders receive or keep, of partial sums the first addend's, in turns.
pub struct Turns<'p> {
    holders: Range<usize>,
    boxes: Boxes<'p>,
    /// The turn that comes next.
    next: usize,
}

enum Boxes<'p> {
    Closed(Cells<'p>),
    Listed {
        plan: &'p Plan,
        lists: &'p Listed,
        /// The ranges of the transfers, and of the boxes that stay, that are a holder's.
        of_holder: Vec<[Range<usize>; 2]>,
    },
}

/// The cells of a plan's grids, one grid for each holder.
struct Cells<'p> {
    rank: usize,
    /// For each holder and dim, what lies under its box along the dim.
    sides: Vec<&'p [Placed]>,
    /// The cell of each holder that comes next, and how many there are from it on.
    cells: Vec<usize>,
    left: Vec<usize>,
    /// The number of turns that were taken or left out.
    done: usize,
    row: Option<Row<'p>>,
}

/// Sources that lie one behind the other along `dim`, under the boxes of all holders: the holders' boxes of a turn are all
/// of one source, and those of the next turn differ in nothing but the source and the position along `dim`.
#[derive(Clone, Copy)]
struct Row<'p> {
    dim: usize,
    sides: &'p [Placed],
    /// The addition of the other dims to the number of the source.
    device: i64,
}

/// The part that all boxes of a turn have in common, if all are of one source; see
/// [`Turns::next_of_one_source`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OneSource {
    /// The source holder.
    pub source: i64,
    /// The dim along which the turns differ.
    pub dim: usize,
    /// The start of the boxes along it, in the tensor.
    pub start: i64,
    /// The stop of the boxes along it.
    pub stop: i64,
}

impl Plan {
    /// The turns of the holders of one of [`Self::ranges`], if these are more than one.
    #[must_use]
    pub fn turns(&self, holders: Range<usize>) -> Turns<'_> {
        let boxes = match &self.transfers {
            Transfers::Closed(closed) => Boxes::Closed(Cells::new(closed, holders.clone())),
            Transfers::Listed(lists) => {
                let of_holder = |holder| [&lists.moved, &lists.kept].map(|list| list.of_holder(holder));
                Boxes::Listed { plan: self, lists, of_holder: holders.clone().map(of_holder).collect() }
            }
        };
        Turns { holders, boxes, next: 0 }
    }
}

impl Turns<'_> {
    /// The number of turns: the most boxes that a holder has.
    #[must_use]
    pub fn count(&self) -> usize {
        match &self.boxes {
            Boxes::Closed(cells) => cells.done + cells.left.iter().max().unwrap_or(&0),
            Boxes::Listed { of_holder, .. } => {
                of_holder.iter().map(|[moved, kept]| moved.len() + kept.len()).max().unwrap_or(0)
            }
        }
    }

    /// Leaves out so many turns.
    pub fn skip(&mut self, turns: usize) {
        self.next += turns;
    }

    /// The source of the next turn, if every turn is of one source only and differs from the one before in nothing but
    /// the source and the position along one dim.
    #[must_use]
    pub fn next_of_one_source(&self) -> Option<OneSource> {
        let Boxes::Closed(Cells { row: Some(row), .. }) = &self.boxes else { return None };
        let Placed { overlap, device } = row.sides.get(self.next)?;
        let (source, dim) = (row.device + device, row.dim);
        Some(OneSource { source, dim, start: overlap.start, stop: overlap.stop })
    }

    /// Shows `visit` the boxes of the next turn, in the order of the holders.
    ///
    /// # Errors
    /// What `visit` returns.
    pub fn visit_next(&mut self, mut visit: impl FnMut(Transfer<'_>) -> Result<()>) -> Result<()> {
        let turn = self.next;
        self.next += 1;
        match &mut self.boxes {
            Boxes::Closed(cells) => {
                cells.skip(turn - cells.done);
                cells.visit_next(self.holders.start, visit)
            }
            Boxes::Listed { plan, lists, of_holder } => of_holder.iter().try_for_each(|[moved, kept]| {
                let transfer = match turn.checked_sub(moved.len()) {
                    None => lists.moved.get(moved.start + turn),
                    Some(at) if at < kept.len() => lists.kept.get(kept.start + at),
                    Some(_) => return Ok(()),
                };
                if plan.addend_of(transfer.source) == 0 { visit(transfer) } else { Ok(()) }
            }),
        }
    }
}

impl<'p> Cells<'p> {
    fn new(closed: &'p Closed, holders: Range<usize>) -> Self {
        let rank = closed.rank();
        let sides: Vec<_> = holders.clone().flat_map(|holder| closed.sides(holder)).collect();
        let left = match rank {
            0 => vec![1; holders.len()],
            _ => sides.chunks_exact(rank).map(|sides| sides.iter().map(|side| side.len()).product()).collect(),
        };
        let row = Row::new(&sides, rank);
        Self { rank, cells: vec![0; sides.len()], sides, left, done: 0, row }
    }

    fn skip(&mut self, turns: usize) {
        if turns == 0 {
            return;
        }
        self.done += turns;
        for (holder, left) in self.left.iter_mut().enumerate() {
            *left = left.saturating_sub(turns);
            let mut rest = turns;
            for at in (holder * self.rank..(holder + 1) * self.rank).rev() {
                let size = self.sides[at].len().max(1);
                let cell = self.cells[at] + rest % size;
                (self.cells[at], rest) = (cell % size, rest / size + cell / size);
            }
        }
    }

    fn visit_next(&mut self, first: usize, mut visit: impl FnMut(Transfer<'_>) -> Result<()>) -> Result<()> {
        let rank = self.rank;
        let mut row = vec![0; 2 * rank];
        self.done += 1;
        for (holder, left) in self.left.iter_mut().enumerate().filter(|(_, left)| **left > 0) {
            let dims = holder * rank..(holder + 1) * rank;
            let (cell, sides) = (&mut self.cells[dims.clone()], &self.sides[dims]);
            let mut source = 0;
            let (start, stop) = row.split_at_mut(rank);
            for (((start, stop), &at), side) in start.iter_mut().zip(stop).zip(&*cell).zip(sides) {
                let Placed { overlap, device } = side[at];
                source += device;
                (*start, *stop) = (overlap.start, overlap.stop);
            }
            let destination = (first + holder) as i64;
            let region = Region::of_row(&row);
            visit(Transfer { source, source_piece: 0, destination, destination_piece: 0, region })?;
            *left -= 1;
            for (at, side) in cell.iter_mut().zip(sides).rev() {
                *at += 1;
                if *at < side.len() {
                    break;
                }
                *at = 0;
            }
        }
        Ok(())
    }
}

impl<'p> Row<'p> {
    /// The row under the boxes of holders with these `sides`, if it is one.
    fn new(sides: &[&'p [Placed]], rank: usize) -> Option<Self> {
        let first = sides.get(..rank)?;
        let dim = first.iter().position(|side| side.len() > 1)?;
        let device_of = |sides: &[&[Placed]]| {
            let others = || sides.iter().enumerate().filter(|&(other, _)| other != dim);
            let is_one = others().all(|(_, side)| side.len() == 1) && std::ptr::eq(sides[dim], first[dim]);
            is_one.then(|| others().map(|(_, side)| side[0].device).sum())
        };
        let device = device_of(first)?;
        let is_one = sides.chunks_exact(rank).all(|sides| device_of(sides) == Some(device));
        is_one.then_some(Self { dim, sides: first[dim], device })
    }
}
