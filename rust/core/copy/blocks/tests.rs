use super::*;
use crate::{
    copy::{strided::Strided, tuning::LARGEST_TURN},
    parallel,
};
use proptest::prelude::*;

/// An array in memory of its own: of any order of dims, with gaps between the items, and forwards or backwards.
#[derive(Debug)]
struct Array {
    bytes: Vec<u8>,
    first: usize,
    itemsize: usize,
    dims: Vec<(i64, isize)>,
}

impl Array {
    /// Every dim with the gap that comes after it, in items, and whether it is reversed; `order` is minor first.
    fn new(
        itemsize: usize,
        extents: &[i64],
        order: &[usize],
        gaps: &[(i64, bool)],
        byte: impl Fn(usize) -> u8,
    ) -> Self {
        let (mut next, mut first, mut dims) = (itemsize as i64, 0, vec![(0, 0); extents.len()]);
        for &dim in order.iter().filter(|&&dim| dim < extents.len()) {
            let (gap, reversed) = gaps[dim];
            let stride = next + gap * itemsize as i64;
            first += if reversed { stride * (extents[dim] - 1).max(0) } else { 0 };
            dims[dim] = (extents[dim], if reversed { -stride } else { stride } as isize);
            next = stride * extents[dim].max(1);
        }
        Self { bytes: (0..next as usize).map(byte).collect(), first: first as usize, itemsize, dims }
    }

    /// In C order, without gaps.
    fn plain(itemsize: usize, extents: &[i64], byte: impl Fn(usize) -> u8) -> Self {
        let order: Vec<usize> = (0..extents.len()).rev().collect();
        Self::new(itemsize, extents, &order, &vec![(0, false); extents.len()], byte)
    }

    fn region(&mut self) -> Strided {
        // SAFETY: the array is there, and not looked at, as long as its region is used.
        unsafe { Strided::new(self.bytes.as_mut_ptr().wrapping_add(self.first), self.itemsize, self.dims.clone()) }
    }

    /// The positions of the item's bytes.
    fn at(&self, index: &[i64]) -> Range<usize> {
        let offset: isize = index.iter().zip(&self.dims).map(|(&i, dim)| i as isize * dim.1).sum();
        let start = self.first.wrapping_add_signed(offset);
        start..start + self.itemsize
    }
}

/// The indices of a box, in C order.
fn indices(extent: &[i64]) -> Vec<Vec<i64>> {
    extent.iter().fold(vec![Vec::new()], |all, &n| {
        all.iter().flat_map(|index| (0..n).map(move |i| [&index[..], &[i]].concat())).collect()
    })
}

/// Source, where in it, destination, where in that, and extent.
type Box = (usize, Vec<i64>, usize, Vec<i64>, Vec<i64>);

/// Copies the boxes in both ways, a few turns at a time, and compares each byte of the destinations with what comes of
/// copying item by item; gives the groups.
fn check(sources: &mut [Array], destinations: &mut [Array], boxes: &[Box], turns_at_once: i64) -> Vec<Group> {
    let before: Vec<Vec<u8>> = destinations.iter().map(|array| array.bytes.clone()).collect();
    check_way(sources, destinations, boxes, turns_at_once, Way::Streaming);
    destinations.iter_mut().zip(before).for_each(|(array, bytes)| array.bytes.copy_from_slice(&bytes));
    check_way(sources, destinations, boxes, turns_at_once, Way::Ordinary)
}

fn check_way(
    sources: &mut [Array],
    destinations: &mut [Array],
    boxes: &[Box],
    turns_at_once: i64,
    way: Way,
) -> Vec<Group> {
    let mut expected: Vec<Vec<u8>> = destinations.iter().map(|array| array.bytes.clone()).collect();
    let mut items = 0;
    for (source, from, destination, to, extent) in boxes {
        for index in indices(extent) {
            let shifted = |by: &[i64]| by.iter().zip(&index).map(|(a, b)| a + b).collect::<Vec<_>>();
            let (source, at) = (&sources[*source], destinations[*destination].at(&shifted(to)));
            expected[*destination][at].copy_from_slice(&source.bytes[source.at(&shifted(from))]);
            items += source.itemsize as i64;
        }
    }
    let from: Vec<Strided> = sources.iter_mut().map(Array::region).collect();
    let to: Vec<Strided> = destinations.iter_mut().map(Array::region).collect();
    let mut copies = Copies::new(Disjoint::new(&from, &to, &mut parallel::never).unwrap(), boxes.len()).unwrap();
    for (source, from, destination, to, extent) in boxes {
        let sides: Vec<Side> =
            (from.iter().zip(to).zip(extent)).map(|((&from, &to), &extent)| Side { from, to, extent }).collect();
        copies.push(*source, *destination, 0, sides.into_iter()).unwrap();
    }
    let groups = copies.arrange().unwrap();
    let mut bytes = 0;
    for turn in (0..groups.iter().map(|group| group.turns).max().unwrap_or(0)).step_by(turns_at_once as usize) {
        let turns = |group: &Group| turn.min(group.turns)..(turn + turns_at_once).min(group.turns);
        bytes += copies.copy(groups.iter().map(|group| (group, turns(group))), &Contest::new(Some(way), 0));
    }
    assert_eq!(bytes, items);
    assert_eq!(groups.iter().map(|group| group.bytes).sum::<i64>(), items);
    for (array, expected) in destinations.iter().zip(expected) {
        assert!(array.bytes == expected, "{:?}", array.dims);
    }
    groups
}

fn noise(position: usize) -> u8 {
    (position.wrapping_mul(0x9E37_79B9) >> 13) as u8
}

proptest! {
    #[test]
    fn boxes_arrive_whatever_the_strides(
        itemsize in prop::sample::select(vec![1_usize, 2, 3, 4, 8, 16, 24]),
        extents in prop::collection::vec(0..7_i64, 0..4),
        tall in prop::sample::select(vec![1_i64, 1, 30]),
        orders in prop::collection::vec(Just(vec![0_usize, 1, 2]).prop_shuffle(), 3),
        gaps in prop::collection::vec(prop::collection::vec((0..3_i64, any::<bool>()), 3), 3),
        cuts in prop::collection::vec(0..7_i64, 3),
        one_source: bool,
        turns_at_once in 1..4_i64,
    ) {
        let mut extents = extents;
        if let Some(extent) = extents.first_mut() {
            *extent *= tall;
        }
        // Every dim in two parts: each corner goes from the one array to one of its own, or the other way round.
        let rank = extents.len();
        let corners: Vec<(Vec<i64>, Vec<i64>)> = (0..1_usize << rank)
            .map(|corner| {
                let side = |dim: usize| {
                    let cut = cuts[dim].min(extents[dim]);
                    if corner >> dim & 1 == 0 { (0, cut) } else { (cut, extents[dim] - cut) }
                };
                (0..rank).map(side).unzip()
            })
            .collect();
        // The destinations are zeros.
        let values = |is_source: bool| move |position| if is_source { noise(position) } else { 0 };
        let whole = vec![Array::new(itemsize, &extents, &orders[0], &gaps[0], values(one_source))];
        let parts: Vec<Array> = corners.iter().enumerate()
            .map(|(i, (_, extent))| Array::new(itemsize, extent, &orders[1 + i % 2], &gaps[1 + i % 2], values(!one_source))).collect();
        let boxes: Vec<Box> = corners.into_iter().enumerate()
            .map(|(i, (start, extent))| {
                let none = vec![0; rank];
                if one_source { (0, start, i, none, extent) } else { (i, none, 0, start, extent) }
            })
            .collect();
        let (mut sources, mut destinations) = if one_source { (whole, parts) } else { (parts, whole) };
        check(&mut sources, &mut destinations, &boxes, turns_at_once);
    }
}

proptest! {
    #[test]
    fn rows_that_are_streamed_arrive_wherever_lines_begin(
        row in 64..1500_i64,
        rows in 1..90_i64,
        columns in 1..4_i64,
        shifts in prop::collection::vec(0..70_i64, 2),
        gap in prop::sample::select(vec![0_i64, 0, 1, 16, 64, 4096]),
        to_wide: bool,
        turns_at_once in 1..4_i64,
    ) {
        // One wide array, beside columns of it that begin anywhere and are apart by a gap, or not at all.
        let wide = [rows, shifts[0] + columns * (row + gap)];
        let narrow = [rows, row];
        let mut whole = [Array::plain(1, &wide, noise)];
        let mut parts: Vec<Array> = (0..columns).map(|i| {
            let mut part = Array::plain(1, &narrow, |position| noise(position + 1000 * i as usize + 7));
            // So that the rows begin at other places of their lines.
            let shift = (shifts[1] + 3 * i) as usize;
            part.bytes.splice(0..0, vec![1; shift]);
            part.first += shift;
            part
        }).collect();
        let boxes: Vec<Box> = (0..columns as usize).map(|i| {
            let at = vec![0, shifts[0] + i as i64 * (row + gap)];
            if to_wide { (i, vec![0, 0], 0, at, narrow.to_vec()) } else { (0, at, i, vec![0, 0], narrow.to_vec()) }
        }).collect();
        if to_wide {
            check(&mut parts, &mut whole, &boxes, turns_at_once);
        } else {
            check(&mut whole, &mut parts, &boxes, turns_at_once);
        }
    }
}

proptest! {
    #[test]
    fn lines_that_neighbouring_sources_share_in_a_column_arrive_whole(
        heights in prop::collection::vec(1..70_i64, 2..5),
        widths in prop::collection::vec(prop::sample::select(vec![60_i64, 64, 65, 100, 128, 250]), 1..4),
        shift in 0..70_usize,
        omitted in prop::option::of(0..16_usize),
        turns_at_once in 1..4_i64,
    ) {
        // Sources of some rows each, and a column of all rows for each width; of some, one box is not copied.
        let (height, width): (i64, i64) = (heights.iter().sum(), widths.iter().sum());
        let mut sources: Vec<Array> = heights.iter().enumerate()
            .map(|(i, &rows)| Array::plain(1, &[rows, width + 1], |position| noise(position + 5000 * i)))
            .collect();
        let mut columns: Vec<Array> = widths.iter().enumerate().map(|(j, &columns)| {
            let mut array = Array::plain(1, &[height, columns], |_| 0);
            let shift = shift + 5 * j;
            array.bytes.splice(0..0, vec![1; shift]);
            array.first += shift;
            array
        }).collect();
        let starts = |sizes: &[i64]| -> Vec<i64> { (0..sizes.len()).map(|i| sizes[..i].iter().sum()).collect() };
        let (tops, lefts) = (starts(&heights), starts(&widths));
        let mut boxes: Vec<Box> = (0..heights.len()).flat_map(|i| (0..widths.len()).map(move |j| (i, j)))
            .map(|(i, j)| (i, vec![0, lefts[j]], j, vec![tops[i], 0], vec![heights[i], widths[j]]))
            .collect();
        if let Some(at) = omitted.filter(|&at| at < boxes.len()) {
            boxes.remove(at);
        }
        check(&mut sources, &mut columns, &boxes, turns_at_once);
    }
}

#[test]
fn a_group_is_split_until_each_part_has_little_in_a_turn() {
    // Two turns of three times as much as a part may have.
    let group = Group { jobs: 5..15, turns: 2, least_turns: 1, bytes: 6 * LARGEST_TURN };
    let parts: Vec<Group> = group.split().collect();
    assert_eq!(parts.iter().map(|part| part.jobs.clone()).collect::<Vec<_>>(), [5..9, 9..13, 13..15]);
    assert!(parts.iter().all(|part| (part.turns, part.bytes) == (2, 2 * LARGEST_TURN)));
    assert_eq!(Group::default().split().count(), 0);
}

#[test]
fn long_rows_are_cut_and_what_is_left_of_them_follows() {
    // Two rows of 18 pieces and 20,352 bytes, between arrays that are wider: blocks of 2 MiB.
    let mut sources = [Array::plain(1000, &[2, 1207], noise)];
    let mut destinations = [Array::plain(1000, &[2, 1209], |_| 0)];
    let boxes = [(0, vec![0, 5], 0, vec![0, 2], vec![2, 1200])];
    let groups = check(&mut sources, &mut destinations, &boxes, 1);
    assert_eq!(groups.iter().map(|group| (group.turns, group.least_turns)).collect::<Vec<_>>(), [(2, 1)]);
    // Exactly two pieces, beside rows that are short.
    let mut sources = [Array::plain(2, &[4, 20], noise), Array::plain(2, &[LONGEST_ROW], noise)];
    let mut destinations = [Array::plain(2, &[3, 8], |_| 0), Array::plain(2, &[LONGEST_ROW], |_| 0)];
    let boxes = [(0, vec![0, 3], 0, vec![0, 0], vec![3, 8]), (1, vec![0], 1, vec![0], vec![LONGEST_ROW])];
    check(&mut sources, &mut destinations, &boxes, 1);
}

#[test]
fn copies_of_one_group_may_have_any_number_of_blocks() {
    // Rows 0..3, 3..73 and 73..113 of one array, in blocks of 32: one, three and two.
    let mut sources = [Array::plain(4, &[113, 9], noise)];
    let mut destinations = [3, 70, 40].map(|rows| Array::plain(4, &[rows, 5], |_| 0));
    let parts = [(0, 3), (3, 70), (73, 40)].into_iter().enumerate();
    let boxes: Vec<Box> = parts.map(|(i, (start, rows))| (0, vec![start, 2], i, vec![0, 0], vec![rows, 5])).collect();
    let groups = check(&mut sources, &mut destinations, &boxes, 1);
    assert_eq!(groups.iter().map(|group| (group.turns, group.least_turns)).collect::<Vec<_>>(), [(3, 1)]);
}

#[test]
fn short_rows_of_a_wide_array_are_fetched_ahead_and_copied() {
    // Lines of 5,000 bytes, of which each of five arrays has 500: more than a tile of them, in three turns.
    let extent = [70, 500];
    let wide = |byte: fn(usize) -> u8| [Array::plain(1, &[70, 5000], byte)];
    let narrow = |byte: fn(usize) -> u8| [0; 5].map(|_| Array::plain(1, &extent, byte));
    let start = |i: usize| vec![0, 900 * i as i64];
    let out: Vec<Box> = (0..5).map(|i| (0, start(i), i, vec![0, 0], extent.to_vec())).collect();
    check(&mut wide(noise), &mut narrow(|_| 0), &out, 2);
    let back: Vec<Box> = (0..5).map(|i| (i, vec![0, 0], 0, start(i), extent.to_vec())).collect();
    check(&mut narrow(noise), &mut wide(|_| 0), &back, 2);
}

#[test]
fn rows_of_every_short_length_are_copied_whole() {
    for bytes in 1..300 {
        let mut sources = [Array::plain(1, &[3, 301], noise)];
        let mut destinations = [Array::plain(1, &[3, 302], |_| 0)];
        check(&mut sources, &mut destinations, &[(0, vec![0, 1], 0, vec![0, 2], vec![3, bytes])], 1);
    }
}

#[test]
fn arrays_of_other_items_and_boxes_outside_are_refused_and_empty_ones_cost_nothing() {
    let plain = |itemsize, extents: &[i64]| Array::plain(itemsize, extents, |_| 0);
    let mut arrays = [plain(2, &[4, 5]), plain(2, &[3, 6]), plain(4, &[4, 5]), plain(2, &[9])];
    let [source, like_it, other, flat] = arrays.each_mut().map(Array::region);
    assert_eq!((source.bytes(), source.itemsize(), source.dims()), (40, 2, &[(4, 10), (5, 2)][..]));
    let (from, to) = ([source], [like_it, other, flat]);
    let mut copies = Copies::new(Disjoint::new(&from, &to, &mut parallel::never).unwrap(), 1).unwrap();
    let mut push = |destination, from: [i64; 2], to: [i64; 2], extent: [i64; 2]| {
        let sides = [0, 1].map(|dim| Side { from: from[dim], to: to[dim], extent: extent[dim] });
        copies.push(0, destination, 0, sides.into_iter())
    };
    let (left, right) = ("an item of the source", "an item of the destination");
    let refused = Error::Length { left, left_len: 2, right, right_len: 4 };
    assert_eq!(push(1, [0, 0], [0, 0], [1, 1]), Err(refused));
    for (start, extent) in [([-1, 0], [1, 1]), ([0, 0], [-1, 1]), ([0, 6], [1, 0]), ([2, 0], [3, 1]), ([0, 3], [1, 3])]
    {
        assert_eq!(push(0, start, [0, 0], extent), Err(outside(0)), "{start:?} {extent:?}");
    }
    // The destination is the second array of an error only by its position, which is 0 as well.
    for (start, extent) in [([-1, 0], [1, 1]), ([4, 0], [0, 1]), ([2, 0], [2, 1]), ([0, 4], [1, 3])] {
        assert_eq!(push(0, [0, 0], start, extent), Err(outside(0)), "{start:?} {extent:?}");
    }
    assert_eq!(push(0, [4, 5], [3, 6], [0, 0]), Ok(()));
    assert_eq!(push(2, [0, 0], [0, 0], [1, 1]), Err(outside(0)));
    assert_eq!(copies.push(0, 0, 0, [Side::default()].into_iter()), Err(outside(0)));
    assert_eq!(copies.arrange().unwrap().len(), 0);
    assert!(matches!(
        Copies::new(Disjoint::new(&from, &to, &mut parallel::never).unwrap(), usize::MAX),
        Err(Error::TooMany { .. })
    ));
}
