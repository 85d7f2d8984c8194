//! The elements of a tensor that one holder has, found by their offsets: one pass over these, whatever the boxes are.
//!
//! Dims that all boxes have whole are one with the dim before, so that most cuts leave one dim, and a comparison for each
//! offset: rows of a matrix are a range of offsets. A cut of columns leaves two, and a division.

use crate::{
    error::{Error, Result},
    parallel::{PIECE, Poll},
    radix::{Divider, product, strides},
};

/// A kind of integer that offsets are given in.
pub trait Offset: Copy + Sync {
    /// The offset.
    fn number(self) -> i64;
}

impl Offset for i32 {
    #[inline(always)]
    fn number(self) -> i64 {
        i64::from(self)
    }
}

impl Offset for i64 {
    #[inline(always)]
    fn number(self) -> i64 {
        self
    }
}

/// One dim of a box: from where to where in the tensor, and where it begins in the holder's own array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Side {
    /// The first position.
    pub start: i64,
    /// One past the last position.
    pub stop: i64,
    /// The place of the first one in the holder's array.
    pub at: i64,
}

/// Boxes of a tensor, and where they are in the array of the holder that has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    size: i64,
    room: i64,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    /// Ranges of offsets in ascending order, none of which has an element of another.
    Ranges(Vec<Side>),
    /// A divider for each dim but the first, the strides of the array, and the sides of each box, one after the other.
    Boxes { dims: Vec<Divider>, strides: Vec<i64>, sides: Vec<Side> },
}

/// A dim, or several that are one: its size in the tensor and in the array, and that side of each box.
struct Dim {
    size: i64,
    own: i64,
    sides: Vec<Side>,
}

impl Dim {
    /// True if each box has all of it.
    fn is_whole(&self) -> bool {
        self.size == self.own && self.sides.iter().all(|&side| side == Side { start: 0, stop: self.size, at: 0 })
    }

    /// Joins the dim and the one after it into one, if that is possible.
    fn with(self, after: Self) -> std::result::Result<Self, (Self, Self)> {
        if self.size == 1 && self.is_whole() {
            return Ok(after);
        }
        if !after.is_whole() {
            return Err((self, after));
        }
        // The products were checked.
        let times = |side: Side| Side {
            start: side.start * after.size,
            stop: side.stop * after.size,
            at: side.at * after.size,
        };
        let sides = self.sides.into_iter().map(times).collect();
        Ok(Self { size: self.size * after.size, own: self.own * after.own, sides })
    }
}

impl Held {
    /// The boxes of a holder.
    ///
    /// # Arguments
    /// The shape of the tensor, that of the holder's array, and the sides of each box, one after the other.
    ///
    /// # Errors
    /// [`Error::Length`] if there are not as many dims, or sides; [`Error::OutOfRange`] if a box is not within the tensor,
    /// or not within the array; [`Error::Overflow`] if either is too large.
    pub fn new(shape: &[i64], own: &[i64], sides: &[Side]) -> Result<Self> {
        let (size, room, dims) = (product("shape", shape)?, product("own", own)?, shape.len());
        if own.len() != dims {
            return Err(Error::Length { left: "own", left_len: own.len(), right: "shape", right_len: dims });
        }
        if dims == 0 {
            // A tensor without dims has one element, and each of the boxes is it.
            let ranges = vec![Side { start: 0, stop: 1, at: 0 }; usize::from(!sides.is_empty())];
            return Ok(Self { size, room, kind: Kind::Ranges(ranges) });
        }
        if !sides.len().is_multiple_of(dims) {
            return Err(Error::Length { left: "sides", left_len: sides.len(), right: "shape", right_len: dims });
        }
        let mut boxes = Vec::new();
        for one in sides.chunks(dims) {
            for ((side, &size), &own) in one.iter().zip(shape).zip(own) {
                let outside = |value, limit| Error::OutOfRange { what: "sides", position: None, value, limit };
                if side.start < 0 || side.start > side.stop || side.stop > size {
                    return Err(outside(if side.stop > size { side.stop } else { side.start }, size));
                }
                let end = side.at.checked_add(side.stop - side.start).filter(|&end| side.at >= 0 && end <= own);
                end.ok_or_else(|| outside(side.at, own))?;
            }
            if one.iter().all(|side| side.start < side.stop) {
                boxes.push(one);
            }
        }
        if boxes.is_empty() {
            return Ok(Self { size, room, kind: Kind::Ranges(Vec::new()) });
        }
        let dim = |at: usize| Dim { size: shape[at], own: own[at], sides: boxes.iter().map(|one| one[at]).collect() };
        let mut merged = Vec::new();
        let mut last = dim(dims - 1);
        for at in (0..dims - 1).rev() {
            last = dim(at).with(last).unwrap_or_else(|(before, after)| {
                merged.push(after);
                before
            });
        }
        merged.push(last);
        merged.reverse();
        if let [only] = merged.as_mut_slice() {
            only.sides.sort_unstable_by_key(|side| side.start);
            if only.sides.windows(2).all(|pair| pair[0].stop <= pair[1].start) {
                return Ok(Self { size, room, kind: Kind::Ranges(std::mem::take(&mut only.sides)) });
            }
        }
        let sides = (0..boxes.len()).flat_map(|one| merged.iter().map(move |dim| dim.sides[one])).collect();
        let extents: Vec<i64> = merged.iter().map(|dim| dim.own).collect();
        let dims = merged[1..].iter().map(|dim| Divider::new(dim.size)).collect();
        Ok(Self { size, room, kind: Kind::Boxes { dims, strides: strides(&extents), sides } })
    }

    /// The elements of the holder's array.
    #[must_use]
    pub fn room(&self) -> i64 {
        self.room
    }

    /// The first of some offsets that is not in the tensor.
    ///
    /// # Errors
    /// What `poll` returns.
    pub fn first_outside<O: Offset>(&self, offsets: &[O], poll: Poll<'_>) -> Result<Option<usize>> {
        for (number, piece) in offsets.chunks(PIECE).enumerate() {
            poll()?;
            // Each of the two is negative if the offset is outside, and `|` keeps the sign.
            let last = self.size - 1;
            let outside = |offset: i64| offset | last.wrapping_sub(offset);
            if piece.iter().fold(0, |signs, &offset| signs | outside(offset.number())) < 0 {
                let at = piece.iter().position(|&offset| outside(offset.number()) < 0);
                return Ok(at.map(|at| number * PIECE + at));
            }
        }
        Ok(None)
    }

    /// The number of places of some offsets, all of which are in the tensor.
    ///
    /// # Errors
    /// What `poll` returns.
    pub fn count<O: Offset>(&self, offsets: &[O], poll: Poll<'_>) -> Result<usize> {
        let mut count = 0;
        self.pieces(offsets, poll, |_, _| count += 1)?;
        Ok(count)
    }

    /// Finds those of some offsets that the holder has: their positions, in order, and their places; fills as many as
    /// [`Held::count`] says.
    ///
    /// # Errors
    /// [`Error::Length`] if the slices are too short; what `poll` returns.
    pub fn locate_into<O: Offset>(
        &self,
        offsets: &[O],
        which: &mut [i64],
        places: &mut [i64],
        poll: Poll<'_>,
    ) -> Result<()> {
        let mut slots = which.iter_mut().zip(places.iter_mut());
        let mut is_full = false;
        self.pieces(offsets, poll, |number, place| match slots.next() {
            Some((which, at)) => (*which, *at) = (number as i64, place),
            None => is_full = true,
        })?;
        if is_full {
            let (left_len, right_len) = (which.len(), offsets.len());
            return Err(Error::Length { left: "which", left_len, right: "offsets", right_len });
        }
        Ok(())
    }

    /// Writes a value for each offset, all of which are in the tensor, to its place in the holder's array, in order; gives
    /// the number of places.
    ///
    /// # Errors
    /// [`Error::Length`] if there are not as many values as offsets, or the array is another one; what `poll` returns.
    pub fn scatter<O: Offset, T: Copy>(
        &self,
        offsets: &[O],
        values: &[T],
        array: &mut [T],
        poll: Poll<'_>,
    ) -> Result<usize> {
        let wrong = |left, left_len, right, right_len| Err(Error::Length { left, left_len, right, right_len });
        if values.len() != offsets.len() {
            return wrong("values", values.len(), "offsets", offsets.len());
        }
        if array.len() as i64 != self.room {
            return wrong("array", array.len(), "own", self.room as usize);
        }
        let mut count = 0;
        self.pieces(offsets, poll, |number, place| {
            array[place as usize] = values[number];
            count += 1;
        })?;
        Ok(count)
    }

    /// Calls `found` with the number of each offset that the holder has, and its place.
    fn pieces<O: Offset>(&self, offsets: &[O], poll: Poll<'_>, mut found: impl FnMut(usize, i64)) -> Result<()> {
        for (number, piece) in offsets.chunks(PIECE).enumerate() {
            poll()?;
            self.each(piece, number * PIECE, &mut found);
        }
        Ok(())
    }

    #[inline]
    fn each<O: Offset>(&self, offsets: &[O], first: usize, found: &mut impl FnMut(usize, i64)) {
        let numbered = offsets.iter().enumerate().map(|(at, offset)| (first + at, offset.number()));
        match &self.kind {
            Kind::Ranges(ranges) => match ranges.as_slice() {
                [] => {}
                [one] => {
                    let length = (one.stop - one.start) as u64;
                    for (number, offset) in numbered {
                        let within = offset.wrapping_sub(one.start);
                        if (within as u64) < length {
                            found(number, within + one.at);
                        }
                    }
                }
                ranges => {
                    // Neighbours are mostly in the same range.
                    let mut last = ranges[0];
                    for (number, offset) in numbered {
                        if offset < last.start || offset >= last.stop {
                            let after = ranges.partition_point(|range| range.start <= offset);
                            last = ranges[after.saturating_sub(1)];
                        }
                        if offset >= last.start && offset < last.stop {
                            found(number, offset - last.start + last.at);
                        }
                    }
                }
            },
            Kind::Boxes { dims, strides, sides } => match (dims.as_slice(), sides.as_slice()) {
                (&[columns], &[rows, side]) => {
                    let (height, width) = ((rows.stop - rows.start) as u64, (side.stop - side.start) as u64);
                    for (number, offset) in numbered {
                        let (row, column) = columns.div_rem(offset);
                        let (row, column) = (row - rows.start, column - side.start);
                        if (row as u64) < height && (column as u64) < width {
                            found(number, (row + rows.at) * strides[0] + column + side.at);
                        }
                    }
                }
                _ => {
                    let mut index = vec![0; strides.len()];
                    for (number, offset) in numbered {
                        let mut rest = offset;
                        for (at, dim) in index[1..].iter_mut().zip(dims).rev() {
                            (rest, *at) = dim.div_rem(rest);
                        }
                        index[0] = rest;
                        for one in sides.chunks(strides.len()) {
                            let is_in = one.iter().zip(&index).all(|(side, at)| side.start <= *at && *at < side.stop);
                            if is_in {
                                let places = one.iter().zip(&index).zip(strides);
                                found(
                                    number,
                                    places.map(|((side, at), step)| (at - side.start + side.at) * step).sum(),
                                );
                            }
                        }
                    }
                }
            },
        }
    }
}

#[cfg(test)]
mod tests;
