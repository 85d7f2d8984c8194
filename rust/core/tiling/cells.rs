//! The cells of a grid under a box, found by cutting each dim.

use crate::{error::Result, region::Region, room::Room as _, tiling::tiles::Finder, uneven::Cut};

/// The list that there may be no room for here.
pub(super) const UNDER: &str = "the tiles under a box";

/// A tile of a grid that meets a box along one dim: its index, and start and stop of the common
/// part.
pub(crate) type Common = (i64, i64, i64);

/// The cells of a grid under one box, walked in row-major order.
#[derive(Debug, Default)]
pub(crate) struct Cells {
    /// The common parts of all dims, one dim after the other.
    common: Vec<Common>,
    /// The start of each dim's, and the position in each.
    begins: Vec<usize>,
    at: Vec<usize>,
    row: Vec<i64>,
}

impl Cells {
    /// Walks the cells whose common parts along each dim `find` lists; `strides` gives their numbers.
    pub(crate) fn walk(
        &mut self,
        region: Region<'_>,
        strides: &[i64],
        mut find: impl FnMut(usize, i64, i64, &mut Vec<Common>) -> Result<()>,
        visit: &mut dyn FnMut(i64, Region<'_>) -> Result<()>,
    ) -> Result<()> {
        let rank = region.rank();
        self.common.clear();
        self.begins.clear();
        self.at.clear();
        self.row.resize(2 * rank, 0);
        let mut number = 0;
        for (dim, (start, stop)) in region.sides().enumerate() {
            let begin = self.common.len();
            find(dim, start, stop, &mut self.common)?;
            let Some(&(index, start, stop)) = self.common.get(begin) else { return Ok(()) };
            self.begins.push(begin);
            self.at.push(begin);
            (self.row[dim], self.row[rank + dim]) = (start, stop);
            number += index * strides[dim];
        }
        self.begins.push(self.common.len());
        loop {
            visit(number, Region::of_row(&self.row))?;
            let mut dim = rank;
            loop {
                if dim == 0 {
                    return Ok(());
                }
                dim -= 1;
                number -= self.common[self.at[dim]].0 * strides[dim];
                self.at[dim] += 1;
                let carried = self.at[dim] == self.begins[dim + 1];
                if carried {
                    self.at[dim] = self.begins[dim];
                }
                let (index, start, stop) = self.common[self.at[dim]];
                number += index * strides[dim];
                (self.row[dim], self.row[rank + dim]) = (start, stop);
                if !carried {
                    break;
                }
            }
        }
    }
}

/// Appends what `[start, stop)` has in common with the intervals of a cut, in order. Each step asks for the owner of the
/// next position, so empty shards in between, of which there may be many, cost nothing.
///
/// # Errors
/// [`Error::TooMany`](crate::error::Error::TooMany) if there is no memory for them.
pub(crate) fn under_cut(cut: &Cut, start: i64, stop: i64, common: &mut Vec<Common>) -> Result<()> {
    let mut at = start;
    if at < stop {
        let most = cut.owner(stop - 1).abs_diff(cut.owner(start)).saturating_add(1).min(stop.abs_diff(start));
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        common.room(most, UNDER)?;
    }
    while at < stop {
        let owner = cut.owner(at);
        let end = cut.bounds(owner).1.min(stop);
        common.push((owner, at, end));
        at = end;
    }
    Ok(())
}

/// The cells of cuts, each dim's own.
pub(super) struct CutFinder<'a> {
    cuts: &'a [Cut],
    strides: Vec<i64>,
    cells: Cells,
}

impl<'a> CutFinder<'a> {
    /// `strides` gives the numbers of the cells.
    pub(super) fn new(cuts: &'a [Cut], strides: Vec<i64>) -> Self {
        Self { cuts, strides, cells: Cells::default() }
    }
}

impl Finder for CutFinder<'_> {
    fn under(&mut self, region: Region<'_>, visit: &mut dyn FnMut(i64, Region<'_>) -> Result<()>) -> Result<()> {
        let cuts = self.cuts;
        let find = |dim: usize, start, stop, common: &mut Vec<Common>| under_cut(&cuts[dim], start, stop, common);
        self.cells.walk(region, &self.strides, find, visit)
    }
}
