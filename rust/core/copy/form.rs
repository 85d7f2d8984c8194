//! How the boxes of a copy lie in their arrays: as rows, which are contiguous in both, in blocks.

use std::{cmp::Reverse, ops::Range};

use crate::{
    copy::{choices, tuning::LONGEST_ROW},
    radix,
};

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
    is_stretch: bool,
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
        let (from, to) = dims.last().map_or((0, 0), |&(_, from, to)| (from, to));
        let wide_source = choices::has_wide_source(from, to);
        let stride = if wide_source { from } else { to };
        let prefetched = choices::fetches_ahead(row, stride).then_some(stride);
        let mut bytes = row;
        let is_stretch = dims.iter().rev().all(|&(extent, _, to)| {
            let follows = to as i64 == bytes;
            bytes *= extent;
            follows
        });
        Self { dims, row, rows, block: choices::rows_per_block(row), is_stretch, wide_source, prefetched }
    }

    /// The form with its rows cut into pieces of [`LONGEST_ROW`], and what is left of each row, with its offset.
    pub(super) fn shortened(&self) -> (Self, Option<(Self, isize)>) {
        let (pieces, rest) = (self.row / LONGEST_ROW, self.row % LONGEST_ROW);
        let mut dims = self.dims.clone();
        dims.push((pieces, LONGEST_ROW as isize, LONGEST_ROW as isize));
        let tail = (rest > 0).then(|| (Self::of_rows(self.dims.clone(), rest), (pieces * LONGEST_ROW) as isize));
        (Self::of_rows(dims, LONGEST_ROW), tail)
    }

    /// How far rows lie apart in the source and in the destination, along the last dim over them.
    pub(super) fn row_strides(&self) -> (isize, isize) {
        self.dims.last().map_or((0, 0), |&(_, from, to)| (from, to))
    }

    /// Whether all rows follow one another in the destination.
    pub(super) fn is_stretch(&self) -> bool {
        self.is_stretch
    }

    pub(super) fn blocks(&self) -> i64 {
        radix::ceil_div(self.rows, self.block)
    }

    /// The rows of a block; none past the last block.
    pub(super) fn rows_of(&self, block: i64) -> Range<i64> {
        let first = block * self.block;
        first..(first + self.block).min(self.rows)
    }

    /// Shows `visit` the `count` rows from `first` on, in runs that are evenly spaced along the last dim: the offsets of
    /// the run's first row in source and destination, and the number of its rows.
    #[inline(always)]
    pub(super) fn each_run(&self, first: i64, count: i64, mut visit: impl FnMut(isize, isize, i64)) {
        let Some((&(inner, inner_from, inner_to), outer)) = self.dims.split_last() else {
            return visit(0, 0, 1);
        };
        if outer.is_empty() {
            return visit(first as isize * inner_from, first as isize * inner_to, count);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_has_blocks_of_so_many_rows_and_knows_which_side_is_wide() {
        let form = |row, from, to| Form::of_rows(vec![(1000, from, to)], row);
        // 32 rows, or as many as make 256 bytes; but no more than make 16 KiB. Of long ones as many as make 2 MiB.
        let blocks = [(1, 256), (2, 128), (8, 32), (512, 32), (1024, 16), (2047, 8), (2048, 1024), (1 << 20, 2)];
        for (row, block) in blocks.into_iter().chain([(1 << 21, 1), (1 << 22, 1)]) {
            let form = form(row, 1 << 30, 1 << 30);
            assert_eq!((form.rows, form.block, form.blocks()), (1000, block, (999 + block) / block), "{row}");
        }
        for (from, to, wide) in [(20, 10, true), (-20, 10, true), (10, 20, false), (10, -20, false), (10, 10, false)] {
            assert_eq!(form(10, from, to).wide_source, wide);
        }
        for (row, from, to, prefetched) in [
            (512, 4096, 600, Some(4096)),
            (512, -4096, 600, Some(-4096)),
            (512, 600, 4096, Some(4096)),
            (513, 4096, 600, None),
            (512, 4095, 600, None),
            (512, 600, 4095, None),
        ] {
            assert_eq!(form(row, from, to).prefetched, prefetched);
        }
        // 80 rows are blocks of 32, 32 and 16.
        let form = Form::of_rows(vec![(16, 900, 900), (5, 100, 100)], 100);
        assert_eq!([0, 1, 2].map(|block| form.rows_of(block)), [0..32, 32..64, 64..80]);
        assert!(form.rows_of(3).is_empty());
    }

    #[test]
    fn dims_that_follow_each_other_in_both_arrays_are_one() {
        // 4 x 6 x 2 items of 8 bytes, all of the source, of which the destination is every other line of 12 items.
        let form = Form::new(vec![(4, 96, 192), (6, 16, 16), (2, 8, 8)], 8);
        assert_eq!((&form.dims[..], form.row, form.rows), (&[(4, 96, 192)][..], 96, 4));
        // Transposed in the source: no row is longer than an item, and the destination's order is kept.
        let form = Form::new(vec![(6, 8, 32), (1, 5, 5), (4, 48, 8)], 8);
        assert_eq!((&form.dims[..], form.row, form.rows), (&[(6, 8, 32), (4, 48, 8)][..], 8, 24));
    }

    #[test]
    fn the_rows_from_one_on_are_those_and_no_more() {
        // Two lines of five rows, in the source 100 and 10 apart, in the destination 50 and 7.
        let form = Form::of_rows(vec![(2, 100, 50), (5, 10, 7)], 1);
        let runs = |first, count| {
            let mut runs = Vec::new();
            form.each_run(first, count, |from, to, length| runs.push((from, to, length)));
            runs
        };
        assert_eq!(runs(0, 10), [(0, 0, 5), (100, 50, 5)]);
        assert_eq!(runs(1, 3), [(10, 7, 3)]);
        assert_eq!(runs(3, 6), [(30, 21, 2), (100, 50, 4)]);
        assert_eq!(runs(9, 1), [(140, 78, 1)]);
    }
}
