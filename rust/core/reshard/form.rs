//! How the boxes of a copy lie in their arrays: as rows, which are contiguous in both, in blocks.

use std::cmp::Reverse;

use crate::radix;

/// The longest row that is copied at once, so that long ones are shared among threads.
pub(super) const LONGEST_ROW: i64 = 1 << 16;
/// How many short rows of one copy are done before the next has its turn.
const ROWS_PER_BLOCK: i64 = 32;
/// The bytes of a block that make it large enough, whatever its number of rows.
const BYTES_PER_BLOCK: i64 = 1 << 14;
/// From how many bytes on a row is long: memory is read in its own order, even if the next row is far away.
const LONG_ROW: i64 = 1 << 11;
/// The bytes of a block of long rows: new memory is cleared by the kernel a large page at a time, and is best filled
/// while it is still in the cache.
const LONG_BLOCK: i64 = 1 << 21;
/// From how many bytes between rows on the processor does not see by itself which comes next.
const PREFETCHED_FROM: usize = 1 << 12;
/// Up to how many bytes the rows are so short that it cannot catch up while one is copied.
const LONGEST_PREFETCHED: i64 = 512;

/// How the boxes of a copy lie in their arrays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Form {
    /// (extent, source stride, destination stride) of the dims over the row, outermost first.
    pub(super) dims: Vec<(i64, isize, isize)>,
    /// The bytes of a row.
    pub(super) row: i64,
    /// The number of rows: the product of the extents.
    pub(super) rows: i64,
    /// Rows per block.
    block: i64,
    /// Whether the rows lie further apart in the source than in the destination.
    pub(super) wide_source: bool,
    /// If rows that are copied soon are worth being fetched into the cache, for they are short and far apart in the wide
    /// array: how far.
    pub(super) prefetched: Option<isize>,
}

impl Form {
    pub(super) fn new(mut dims: Vec<(i64, isize, isize)>, itemsize: i64) -> Self {
        dims.retain(|&(extent, ..)| extent != 1);
        // The order of the dims is free; the destination's own order makes long rows of it.
        dims.sort_by_key(|&(_, _, stride)| Reverse(stride.unsigned_abs()));
        let mut merged: Vec<(i64, isize, isize)> = Vec::with_capacity(dims.len());
        for (extent, from, to) in dims {
            match merged.last_mut() {
                Some(outer) if outer.1 == from * extent as isize && outer.2 == to * extent as isize => {
                    *outer = (outer.0 * extent, from, to);
                }
                _ => merged.push((extent, from, to)),
            }
        }
        let mut row = itemsize;
        if let Some(&(extent, from, to)) = merged.last()
            && (from as i64, to as i64) == (itemsize, itemsize)
        {
            row = extent * itemsize;
            merged.pop();
        }
        Self::of_rows(merged, row)
    }

    fn of_rows(dims: Vec<(i64, isize, isize)>, row: i64) -> Self {
        let rows = dims.iter().map(|dim| dim.0).product();
        let block = if row >= LONG_ROW {
            LONG_BLOCK / row
        } else {
            (BYTES_PER_BLOCK / row.max(1)).min(ROWS_PER_BLOCK.max(256 / row.max(1)))
        };
        let (from, to) = dims.last().map_or((0, 0), |&(_, from, to)| (from, to));
        let wide_source = from.unsigned_abs() > to.unsigned_abs();
        let stride = if wide_source { from } else { to };
        let prefetched = stride.unsigned_abs() >= PREFETCHED_FROM && row <= LONGEST_PREFETCHED;
        Self { dims, row, rows, block: block.max(1), wide_source, prefetched: prefetched.then_some(stride) }
    }

    /// The form with its rows cut into pieces of [`LONGEST_ROW`], and what is left of each row, with its offset.
    pub(super) fn shortened(&self) -> (Self, Option<(Self, isize)>) {
        let (pieces, rest) = (self.row / LONGEST_ROW, self.row % LONGEST_ROW);
        let mut dims = self.dims.clone();
        dims.push((pieces, LONGEST_ROW as isize, LONGEST_ROW as isize));
        let tail = (rest > 0).then(|| (Self::of_rows(self.dims.clone(), rest), (pieces * LONGEST_ROW) as isize));
        (Self::of_rows(dims, LONGEST_ROW), tail)
    }

    pub(super) fn blocks(&self) -> i64 {
        radix::ceil_div(self.rows, self.block)
    }

    /// First row, and number of rows, of a block; none past the last block.
    pub(super) fn rows_of(&self, block: i64) -> (i64, i64) {
        let first = block * self.block;
        (first, (self.rows - first).min(self.block))
    }

    /// Shows `visit` the `count` rows from `first` on, in runs that are evenly spaced along the last dim: the offsets of
    /// the run's first row in source and destination, and the number of its rows.
    #[inline(always)]
    pub(super) fn each_run(&self, first: i64, count: i64, mut visit: impl FnMut(isize, isize, i64)) {
        let Some((&(inner, inner_from, inner_to), outer)) = self.dims.split_last() else {
            return visit(0, 0, 1);
        };
        let (mut row, end) = (first, first + count);
        while row < end {
            let (mut rest, at) = (row / inner, row % inner);
            let (mut from, mut to) = (at as isize * inner_from, at as isize * inner_to);
            for &(extent, stride_from, stride_to) in outer.iter().rev() {
                let digit = (rest % extent) as isize;
                rest /= extent;
                from += digit * stride_from;
                to += digit * stride_to;
            }
            let length = (inner - at).min(end - row);
            visit(from, to, length);
            row += length;
        }
    }
}
