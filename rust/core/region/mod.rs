//! The algebra of boxes: overlap, one box relative to another, volume, offset, runs.
//!
//! A box has a start and a stop for each dim, half open. Lists of boxes are rows of numbers, first all starts of a box,
//! then all its stops; [`Region`] is a view of one row, [`RegionBuf`] owns one, [`Regions`] owns many, and no other place
//! knows the order. What comes from Python and goes there are *bounds*: start and stop of each dim, dim by dim
//! ([`sides`], [`Region::bounds_into`]).

use crate::{
    error::{Error, Result, box_text},
    index::radix,
    room::Room as _,
};

/// A box: where it starts and where it stops along each dim.
///
/// ```
/// use shardwise_core::region::{Region, Regions};
/// let (a, b) = (Region::of_row(&[0, 2, 4, 6]), Region::of_row(&[3, 0, 9, 4])); // [0:4, 2:6] and [3:9, 0:4]
/// let mut common = [0; 4];
/// assert!(a.overlap_into(b, &mut common));
/// assert_eq!(common, [3, 2, 4, 4]);
/// assert_eq!(Region::of_row(&common).elements()?, 2);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region<'a> {
    start: &'a [i64],
    stop: &'a [i64],
}

impl<'a> Region<'a> {
    /// The box from `start` to `stop`, which have one entry for each dim.
    #[must_use]
    pub fn new(start: &'a [i64], stop: &'a [i64]) -> Self {
        debug_assert_eq!(start.len(), stop.len());
        Self { start, stop }
    }

    /// The box of a row: all its starts, then all its stops.
    #[must_use]
    pub fn of_row(row: &'a [i64]) -> Self {
        let (start, stop) = row.split_at(row.len() / 2);
        Self { start, stop }
    }

    /// The number of dims.
    #[must_use]
    pub fn rank(self) -> usize {
        self.start.len()
    }

    /// The start of the region.
    #[must_use]
    pub fn start(self) -> &'a [i64] {
        self.start
    }

    /// The stop of the region.
    #[must_use]
    pub fn stop(self) -> &'a [i64] {
        self.stop
    }

    /// Start and stop of each dim.
    pub fn sides(self) -> impl DoubleEndedIterator<Item = (i64, i64)> + ExactSizeIterator + Clone + 'a {
        self.start.iter().copied().zip(self.stop.iter().copied())
    }

    /// The extent of each dim.
    pub fn extents(self) -> impl DoubleEndedIterator<Item = i64> + ExactSizeIterator + Clone + 'a {
        self.sides().map(|(start, stop)| stop - start)
    }

    /// The extent of one dim.
    #[must_use]
    pub fn extent(self, dim: usize) -> i64 {
        self.stop[dim] - self.start[dim]
    }

    /// True if it holds no element.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.sides().any(|(start, stop)| start >= stop)
    }

    /// The number of its elements.
    ///
    /// # Errors
    /// [`Error::Overflow`] if they are more than 2^63 - 1.
    pub fn elements(self) -> Result<i64> {
        if self.is_empty() {
            return Ok(0);
        }
        let product = self.extents().try_fold(1_i64, i64::checked_mul);
        product.ok_or_else(|| Error::Overflow { what: format!("the number of elements of {}", self.text()) })
    }

    /// [`Region::elements`] of a box that lies in a tensor, whose own elements have been counted.
    #[inline]
    #[must_use]
    pub fn volume(self) -> i64 {
        self.extents().fold(1, i64::saturating_mul)
    }

    /// True if the two have an element in common.
    #[must_use]
    pub fn meets(self, other: Region<'_>) -> bool {
        self.sides().zip(other.sides()).all(|(a, b)| a.0.max(b.0) < a.1.min(b.1))
    }

    /// True if all of `other` lies within it.
    #[must_use]
    pub fn contains(self, other: Region<'_>) -> bool {
        self.sides().zip(other.sides()).all(|(a, b)| a.0 <= b.0 && b.1 <= a.1)
    }

    /// Writes what the two have in common into `row`; false if that is empty.
    pub fn overlap_into(self, other: Region<'_>, row: &mut [i64]) -> bool {
        let (start, stop) = row.split_at_mut(row.len() / 2);
        let mut common = true;
        for (((a, b), start), stop) in self.sides().zip(other.sides()).zip(start).zip(stop) {
            (*start, *stop) = (a.0.max(b.0), a.1.min(b.1));
            common &= *start < *stop;
        }
        common
    }

    /// The common part of the two, if that holds an element.
    #[must_use]
    pub fn overlap(self, other: Region<'_>) -> Option<RegionBuf> {
        if !self.meets(other) {
            return None;
        }
        let mut common = RegionBuf { row: vec![0; 2 * self.rank()] };
        self.overlap_into(other, &mut common.row);
        Some(common)
    }

    /// The same box with numbers of its own.
    #[must_use]
    pub fn to_buf(self) -> RegionBuf {
        RegionBuf { row: [self.start, self.stop].concat() }
    }

    /// Writes the same box, counted from `origin`, into `row`.
    pub fn relative_into(self, origin: &[i64], row: &mut [i64]) {
        let (start, stop) = row.split_at_mut(row.len() / 2);
        for (((side, origin), start), stop) in self.sides().zip(origin).zip(start).zip(stop) {
            (*start, *stop) = (side.0 - origin, side.1 - origin);
        }
    }

    /// Writes start and stop of each dim, counted from `origin`, into `bounds`.
    pub fn bounds_into(self, origin: &[i64], bounds: &mut [i64]) {
        for ((side, origin), bounds) in self.sides().zip(origin).zip(bounds.chunks_exact_mut(2)) {
            bounds.copy_from_slice(&[side.0 - origin, side.1 - origin]);
        }
    }

    /// The C-order offset of its first element in an array of row-major `strides`.
    #[must_use]
    pub fn offset(self, strides: &[i64]) -> i64 {
        self.start.iter().zip(strides).map(|(start, stride)| start * stride).sum()
    }

    /// The dim before which the box is one position thick and after which it spans `shape`: from there on its elements
    /// are one run of the array.
    #[must_use]
    pub fn contiguous_from(self, shape: &[i64]) -> usize {
        let whole = self.sides().zip(shape).rev().take_while(|&(side, &n)| side == (0, n)).count();
        (self.rank() - whole).saturating_sub(1)
    }

    /// The box as numpy would write it: `[0:4, 2:6]`, cut short if it has many dims.
    #[must_use]
    pub fn text(self) -> String {
        box_text(self.start, self.stop)
    }
}

/// Start and stop of each dim of a box whose bounds these are, (dims, 2) in C order.
pub fn sides(bounds: &[i64]) -> impl DoubleEndedIterator<Item = (i64, i64)> + ExactSizeIterator + Clone {
    bounds.chunks_exact(2).map(|side| (side[0], side[1]))
}

/// A box that owns its numbers: what `PathBuf` is to `Path`.
///
/// ```
/// use shardwise_core::region::Region;
/// let mut around = Region::of_row(&[0, 4, 2, 5]).to_buf(); // [0:2, 4:5]
/// around.include(Region::of_row(&[1, 2, 7, 3])); // and [1:7, 2:3]
/// assert_eq!(around.region().text(), "[0:7, 2:5]");
/// let [low, high] = around.split(0, 3);
/// assert_eq!((low.region().text(), high.region().text()), ("[0:3, 2:5]".to_owned(), "[3:7, 2:5]".to_owned()));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RegionBuf {
    row: Vec<i64>,
}

impl RegionBuf {
    /// The box.
    #[must_use]
    pub fn region(&self) -> Region<'_> {
        Region::of_row(&self.row)
    }

    /// Grows to the smallest box that holds both.
    pub fn include(&mut self, other: Region<'_>) {
        let (start, stop) = self.row.split_at_mut(other.rank());
        for ((start, stop), side) in start.iter_mut().zip(stop).zip(other.sides()) {
            (*start, *stop) = ((*start).min(side.0), (*stop).max(side.1));
        }
    }

    /// The part before position `at` of `dim`, which lies within the box, and the part from there on.
    #[must_use]
    pub fn split(self, dim: usize, at: i64) -> [Self; 2] {
        let rank = self.row.len() / 2;
        let (mut low, mut high) = (self.clone(), self);
        low.row[rank + dim] = at;
        high.row[dim] = at;
        [low, high]
    }
}

/// Boxes of one rank, one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Regions {
    rank: usize,
    /// Boxes of no dims have no numbers, so they are counted.
    count: usize,
    rows: Vec<i64>,
}

impl Regions {
    /// No boxes, of `rank` dims.
    #[must_use]
    pub fn new(rank: usize) -> Self {
        Self { rank, count: 0, rows: Vec::new() }
    }

    /// The boxes of `bounds`, (boxes, dims, 2) in C order: start and stop of each dim. `count` is their number, which the
    /// length tells unless they have no dims.
    ///
    /// # Errors
    /// [`Error::Length`] if the length is not that of so many boxes, [`Error::TooMany`] if there is no memory for them.
    pub fn of_bounds(rank: usize, count: usize, bounds: &[i64]) -> Result<Self> {
        if count.checked_mul(2 * rank) != Some(bounds.len()) {
            let right_len = count.saturating_mul(2 * rank);
            return Err(Error::Length { left: "boxes", left_len: bounds.len(), right: "starts and stops", right_len });
        }
        let mut regions = Self::new(rank);
        regions.reserve(count)?;
        regions.rows.resize(bounds.len(), 0);
        let row = (2 * rank).max(1);
        for (row, bounds) in regions.rows.chunks_exact_mut(row).zip(bounds.chunks_exact(row)) {
            let (start, stop) = row.split_at_mut(rank);
            for ((side, start), stop) in sides(bounds).zip(start).zip(stop) {
                (*start, *stop) = side;
            }
        }
        regions.count = count;
        Ok(regions)
    }

    /// Room for `more` boxes.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for them.
    pub fn reserve(&mut self, more: usize) -> Result<()> {
        let numbers = more.saturating_mul(2 * self.rank);
        self.rows.room(numbers, format_args!("{more} boxes of {} dims", self.rank))
    }

    /// Adds a box of the same rank.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for it.
    pub fn push(&mut self, region: Region<'_>) -> Result<()> {
        debug_assert_eq!(region.rank(), self.rank);
        self.reserve(1)?;
        self.rows.extend_from_slice(region.start);
        self.rows.extend_from_slice(region.stop);
        self.count += 1;
        Ok(())
    }

    /// The number of dims.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of boxes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The box `index`.
    #[inline]
    #[must_use]
    pub fn get(&self, index: usize) -> Region<'_> {
        Region::of_row(&self.rows[2 * self.rank * index..2 * self.rank * (index + 1)])
    }

    /// All boxes, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Region<'_>> + Clone {
        (0..self.count).map(|index| self.get(index))
    }

    /// The boxes as (boxes, 2, dims) in C order: the starts of each, then its stops.
    #[must_use]
    pub fn rows(&self) -> &[i64] {
        &self.rows
    }
}

/// Cuts the elements `[start, stop)`, in C order, of a tensor of `shape` into boxes: at most `2 · rank - 1` of them.
///
/// The range is a part of a row, then rows, then planes, and so on, up to the dim where both ends are in one slab of the
/// next, and down again. `visit` gets each box with the offset of its first element, in order.
///
/// # Errors
/// What `visit` returns.
pub fn boxes_of_range(
    (start, stop): (i64, i64),
    shape: &[i64],
    visit: &mut dyn FnMut(Region<'_>, i64) -> Result<()>,
) -> Result<()> {
    let rank = shape.len();
    let strides = radix::strides(shape);
    let mut row = vec![0; 2 * rank];
    let mut at = start;
    while at < stop {
        let digits = radix::unravel(at, shape);
        // The outermost dim at whose boundary `at` stands, and of whose slabs at least one whole fits before `stop`.
        let mut dim = rank;
        while dim > 0 && at % strides[dim - 1] == 0 && stop - at >= strides[dim - 1] {
            dim -= 1;
        }
        let (low, high) = row.split_at_mut(rank);
        low.copy_from_slice(&digits);
        let mut next = at + 1;
        for d in 0..rank {
            high[d] = if d <= dim { digits[d] + 1 } else { shape[d] };
        }
        if rank > 0 {
            let dim = dim.min(rank - 1);
            // As many slabs as fit before the end of the range, and before the end of the slab that these are in.
            let steps = ((stop - at) / strides[dim]).min(shape[dim] - digits[dim]);
            high[dim] = digits[dim] + steps;
            next = at + steps * strides[dim];
        }
        visit(Region::of_row(&row), at)?;
        at = next;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
