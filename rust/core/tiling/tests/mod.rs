//! Tests of tilings: by hand here, of every kind in `drawn`; and tilings drawn for other tests.

mod drawn;

use super::{boxes::*, flat::FlatRanges, grid::Grid, *};
use crate::{
    layout::Layout,
    mesh::Mesh,
    parallel::never,
    region::{Region, Regions},
    uneven::Uneven,
};
use proptest::prelude::*;

/// Cuts the box in two, again and again, at places that the seeds give: rows of starts and stops.
fn cut_apart(shape: &[i64], seeds: &[usize]) -> Regions {
    let mut rows = vec![[vec![0; shape.len()], shape.to_vec()].concat()];
    for &seed in seeds.iter().filter(|_| !shape.is_empty()) {
        let mut part = rows.remove(seed % rows.len());
        let dim = seed / 7 % shape.len();
        let (start, stop) = (part[dim], part[shape.len() + dim]);
        let middle = start + seed as i64 % (stop - start).max(1);
        let mut other = part.clone();
        part[shape.len() + dim] = middle;
        other[dim] = middle;
        rows.extend([part, other]);
    }
    let mut regions = Regions::new(shape.len());
    rows.iter().for_each(|row| regions.push(Region::of_row(row)).unwrap());
    regions
}

fn partition(shape: &[i64], seeds: &[usize]) -> Partition {
    let seed = |i: usize| seeds.get(i).copied().unwrap_or(3);
    let sizes = [1 + seed(0) as i64 % 3, 1 + seed(1) as i64 % 3, 1 + seed(2) as i64 % 2];
    let mesh = Arc::new(Mesh::new(&["x", "y", "z"], &sizes).unwrap());
    let mut specs = vec![Vec::new(); shape.len()];
    for (i, axis) in ["z", "x", "y"].into_iter().enumerate() {
        if let Some(spec) = specs.get_mut(seed(3 + i) % (shape.len() + 1)) {
            spec.push(axis);
        }
    }
    let layout = Arc::new(Layout::new(mesh, &specs, &[]).unwrap());
    Partition::new(layout, shape, Uneven::ALL[1 + seed(6) % 3]).unwrap()
}

/// Some tiling of a tensor of `shape`, of any kind, that `seeds` choose.
pub(crate) fn tiling_of(shape: &[i64], kind: usize, seeds: &[usize]) -> Arc<dyn Tiling> {
    let size: i64 = shape.iter().product();
    let seed = |i: usize| seeds.get(i).copied().unwrap_or(5);
    match kind % 6 {
        0 => Arc::new(partition(shape, seeds)),
        1 => {
            let chunks: Vec<i64> = shape.iter().enumerate().map(|(i, &n)| 1 + seed(i) as i64 % (n + 2)).collect();
            Arc::new(Grid::new(shape, &chunks, seed(7) % 2 == 0).unwrap())
        }
        2 => {
            let mut cuts: Vec<i64> = seeds.iter().map(|&seed| seed as i64 % (size + 1)).chain([0, size]).collect();
            cuts.sort_unstable();
            let mut ranges: Vec<_> = cuts.windows(2).map(|ends| (ends[0], ends[1])).collect();
            let shift = seed(0) % ranges.len();
            ranges.rotate_left(shift);
            if seed(1) % 2 == 0 {
                ranges.extend_from_within(..);
            }
            Arc::new(FlatRanges::new(shape, ranges.into_iter(), seed(1) % 2 == 0).unwrap())
        }
        3 => Arc::new(Boxes::one_each(shape, cut_apart(shape, seeds), false).unwrap()),
        // Boxes dealt out to holders, which have them one after the other, or below one another with a gap.
        _ => {
            let all = cut_apart(shape, seeds);
            let count = 1 + seed(0) % 4;
            let mut holders: Vec<(Regions, Array)> =
                (0..count).map(|_| (Regions::new(shape.len()), Array::Flat)).collect();
            for (i, region) in all.iter().enumerate() {
                holders[(i * 7 + seed(1)) % count].0.push(region).unwrap();
            }
            if kind % 6 == 5 && !shape.is_empty() {
                for (regions, array) in &mut holders {
                    let mut whole = shape.to_vec();
                    whole[0] = 1;
                    let mut starts = Vec::new();
                    for region in regions.iter() {
                        starts.extend([&[whole[0]][..], &vec![0; shape.len() - 1]].concat());
                        whole[0] += region.extents().next().unwrap() + 1;
                    }
                    *array = Array::Given { shape: whole, starts };
                }
            }
            let replicas = seed(2) % 2 == 0;
            if replicas {
                holders.extend_from_within(..);
            }
            Arc::new(Boxes::new(shape, &holders, replicas, &mut never).unwrap())
        }
    }
}

/// For each element of a piece, its place in the tensor and in its holder's array, both as C-order offsets.
pub(crate) fn elements(shape: &[i64], array: &[i64], piece: Piece<'_>) -> Vec<(i64, i64)> {
    let extents: Vec<i64> = piece.region.extents().collect();
    let count: i64 = extents.iter().product();
    let (outer, inner) = (radix::strides(shape), radix::strides(array));
    let at = |digits: &[i64], start: &[i64], strides: &[i64]| -> i64 {
        digits.iter().zip(start).zip(strides).map(|((digit, start), stride)| (digit + start) * stride).sum()
    };
    (0..count)
        .map(|i| {
            let digits = radix::unravel(i, &extents);
            let local = match piece.place {
                Place::At(start) => at(&digits, start, &inner),
                Place::Flat(offset) => offset + i,
            };
            (at(&digits, piece.region.start(), &outer), local)
        })
        .collect()
}

/// For each holder, the elements of its own array: the offset in the tensor, or -1 where it holds none.
pub(crate) fn arrays(tiling: &dyn Tiling) -> Vec<Vec<i64>> {
    (0..tiling.holders())
        .map(|holder| {
            let shape = tiling.array_shape(holder).unwrap();
            let mut array = vec![-1; shape.iter().product::<i64>() as usize];
            tiling
                .visit_pieces(holder, &mut |piece| {
                    for (offset, local) in elements(tiling.shape(), &shape, piece) {
                        assert_eq!(array[local as usize], -1, "two elements in one place");
                        array[local as usize] = offset;
                    }
                    Ok(())
                })
                .unwrap();
            array
        })
        .collect()
}

pub(crate) fn shapes() -> impl Strategy<Value = Vec<i64>> {
    prop::collection::vec(0..6_i64, 0..4)
}

pub(crate) fn seeds() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..1000_usize, 0..9)
}

fn boxes(shape: &[i64], bounds: &[i64]) -> Boxes {
    let count = bounds.len() / (2 * shape.len());
    Boxes::one_each(shape, Regions::of_bounds(shape.len(), count, bounds).unwrap(), false).unwrap()
}

#[test]
fn what_is_missing_is_not_cut_where_an_empty_box_lies() {
    let gap = Err(Error::BoxMissing { start: vec![2], stop: vec![5] });
    assert_eq!(boxes(&[5], &[0, 2, 3, 3]).check(&mut never), gap);
    let text = boxes(&[2, 3], &[0, 2, 0, 1]).check(&mut never).unwrap_err().to_string();
    assert_eq!(text, "the boxes leave a gap: none holds [0:2, 1:3]");
}

#[test]
fn a_box_outside_the_shape_is_named() {
    let named = |bounds: &[i64], shape: &[i64]| {
        let regions = Regions::of_bounds(shape.len(), bounds.len() / (2 * shape.len()), bounds).unwrap();
        Boxes::one_each(shape, regions, false).unwrap_err().to_string()
    };
    // Also where the tensor has no elements, of which no shard can hold one.
    assert_eq!(named(&[0, 1], &[0]), "holders[0]: its box is [0, 1) along dim 0, which is not within [0, 0)");
    assert_eq!(named(&[0, 2, 2, 6], &[5]), "holders[1]: its box is [2, 6) along dim 0, which is not within [0, 5)");
    assert_eq!(named(&[-1, 5], &[5]), "holders[0]: its box is [-1, 5) along dim 0, which is not within [0, 5)");
    assert_eq!(named(&[0, 5, 3, 2], &[5]), "holders[1]: its box is [3, 2) along dim 0, which is not within [0, 5)");
    assert_eq!(boxes(&[4, 0], &[0, 4, 0, 0]).check(&mut never), Ok(()));
}

/// Rows of a triangle and what is beside them: no grid, and no dim along which few boxes lie side by side.
fn staircase(steps: i64) -> Regions {
    let mut regions = Regions::new(2);
    for i in 0..steps {
        regions.push(Region::of_row(&[i, 0, i + 1, i])).unwrap();
        regions.push(Region::of_row(&[i, i, i + 1, steps])).unwrap();
    }
    regions
}

#[test]
fn many_boxes_are_checked_in_little_more_time_than_few() {
    let steps = 40_000;
    let stairs = Boxes::one_each(&[steps, steps], staircase(steps), false).unwrap();
    assert_eq!(stairs.check(&mut never), Ok(()));
    // A hundred thousand, with one missing in the middle, and one there twice.
    let mut bounds: Vec<i64> = (0..100_000).flat_map(|i| [i, i + 1, 0, 9]).collect();
    bounds[4 * 60_000 + 3] = 5;
    let gap = Err(Error::BoxMissing { start: vec![60_000, 5], stop: vec![60_001, 9] });
    assert_eq!(boxes(&[100_000, 9], &bounds).check(&mut never), gap);
    (bounds[4 * 60_000 + 3], bounds[4 * 70_000]) = (9, 69_999);
    let overlap = Error::BoxesOverlap { first: 69_999, second: 70_000, start: vec![69_999, 0], stop: vec![70_000, 9] };
    assert_eq!(boxes(&[100_000, 9], &bounds).check(&mut never), Err(overlap));
}

#[test]
fn a_poll_stops_every_check() {
    let stairs = || Boxes::one_each(&[20_000, 20_000], staircase(20_000), false).unwrap();
    let mut polls = 0;
    stairs()
        .check(&mut || {
            polls += 1;
            Ok(())
        })
        .unwrap();
    assert!(polls > 5, "{polls}");
    for stop in 0..polls {
        let mut left = stop;
        let mut poll = || {
            if left == 0 {
                Err(Error::Interrupted)
            } else {
                left -= 1;
                Ok(())
            }
        };
        assert_eq!(stairs().check(&mut poll), Err(Error::Interrupted));
    }
}

#[test]
fn ranges_that_leave_gaps_or_overlap_are_named_by_their_first_box() {
    let check = |ranges: &[(i64, i64)], replicas| {
        FlatRanges::new(&[3, 4], ranges.iter().copied(), replicas).unwrap().check(&mut never)
    };
    assert_eq!(check(&[(6, 12), (0, 6), (6, 6)], false), Ok(()));
    let gap = |start: [i64; 2], stop: [i64; 2]| Err(Error::BoxMissing { start: start.to_vec(), stop: stop.to_vec() });
    assert_eq!(check(&[(0, 6), (7, 12)], false), gap([1, 2], [2, 3]));
    assert_eq!(check(&[(2, 12)], false), gap([0, 0], [1, 2]));
    assert_eq!(check(&[(0, 6)], false), gap([1, 2], [2, 4]));
    assert_eq!(check(&[], false), gap([0, 0], [3, 4]));
    let both = |first, second, start: [i64; 2], stop: [i64; 2]| {
        Err(Error::BoxesOverlap { first, second, start: start.to_vec(), stop: stop.to_vec() })
    };
    assert_eq!(check(&[(4, 12), (0, 6)], false), both(0, 1, [1, 0], [1 + 1, 2]));
    assert_eq!(check(&[(0, 12), (0, 12)], false), both(0, 1, [0, 0], [3, 4]));
    assert_eq!(check(&[(0, 12), (0, 12)], true), Ok(()));
    assert_eq!(check(&[(0, 12), (0, 6)], true), both(0, 1, [0, 0], [1, 4]));
    let outside = FlatRanges::new(&[3, 4], [(0, 12), (11, 13)].into_iter(), false).unwrap_err();
    assert_eq!(outside.to_string(), "holders[1]: its range is [11, 13), which is not within [0, 12)");
}

#[test]
fn replicas_must_be_declared_and_identical() {
    let two = |bounds: &[i64], replicas| {
        Boxes::one_each(&[5], Regions::of_bounds(1, 2, bounds).unwrap(), replicas).unwrap().check(&mut never)
    };
    assert_eq!(two(&[0, 5, 0, 5], true), Ok(()));
    assert_eq!(
        two(&[0, 5, 0, 5], false).unwrap_err().to_string(),
        "holders[0] and holders[1] overlap: both hold [0:5]"
    );
    assert_eq!(two(&[0, 5, 0, 4], true).unwrap_err().to_string(), "holders[0] and holders[1] overlap: both hold [0:4]");
}

#[test]
fn boxes_that_do_not_fit_their_arrays_are_refused() {
    let one = |array: Array, bounds: &[i64]| {
        let regions = Regions::of_bounds(2, bounds.len() / 4, bounds).unwrap();
        Boxes::new(&[4, 4], &[(regions, array)], false, &mut never).map(|boxes| boxes.array_shape(0).unwrap())
    };
    let given = |shape: &[i64], starts: &[i64]| Array::Given { shape: shape.to_vec(), starts: starts.to_vec() };
    let (halves, whole) = ([0, 2, 0, 4, 2, 4, 0, 4], [0, 4, 0, 4]);
    assert_eq!(one(Array::Flat, &halves), Ok(vec![16]));
    assert_eq!(one(Array::Own, &whole), Ok(vec![4, 4]));
    assert_eq!(one(given(&[5, 4], &[0, 0, 3, 0]), &halves), Ok(vec![5, 4]));
    assert_eq!(one(given(&[20], &[12, 0]), &halves), Ok(vec![20]));
    for (array, bounds, what) in [
        (Array::Own, &halves[..], "has 2 boxes, but only one can have an array of its own"),
        (given(&[4, 4, 4], &[0, 0, 2, 0]), &halves, "has an array of rank 3; it must have rank 2 or 1"),
        (given(&[4, 4], &[0, 0]), &halves, "has 2 boxes, whose starts are 4 numbers, not 2"),
        (
            given(&[4, 4], &[0, 0, 3, 0]),
            &halves,
            "does not fit its box 1, from [3, 0] on, into an array of shape [4, 4]",
        ),
        (given(&[4, 4], &[-1, 0]), &whole, "does not fit its box 0, from [-1, 0] on, into an array of shape [4, 4]"),
        (given(&[20], &[12, 5]), &halves, "has its boxes 0 and 1 in the same place"),
        (given(&[9, 4], &[0, 0, 1, 0]), &halves, "has its boxes 0 and 1 in the same place"),
    ] {
        assert_eq!(one(array, bounds).unwrap_err().to_string(), format!("holders[0] {what}"));
    }
}

#[test]
fn scalar_boxes_are_refused_or_listed_without_a_look_at_each() {
    let scalars = |count| Regions::of_bounds(0, count, &[]).unwrap();
    let one =
        |count, array| Boxes::new(&[], &[(scalars(count), array)], false, &mut never).map(|boxes| boxes.holders());
    let given = || Array::Given { shape: Vec::new(), starts: Vec::new() };
    assert_eq!([one(1, Array::Own), one(1, Array::Flat), one(1, given())], [Ok(1), Ok(1), Ok(1)]);
    assert_eq!(one(3, Array::Flat), Ok(1));
    let text = |array, count| one(count, array).unwrap_err().to_string();
    assert_eq!(text(given(), 2), "holders[0] has its boxes 0 and 1 in the same place");
    // So many could not be looked at one by one.
    let many = usize::MAX / 4;
    assert_eq!(text(given(), many), "holders[0] has its boxes 0 and 1 in the same place");
    assert!(text(Array::Own, many).starts_with(&format!("holders[0] has {many} boxes, but only one")));
    assert!(matches!(one(many, Array::Flat), Err(Error::TooMany { .. })));
    assert!(matches!(Boxes::one_each(&[], scalars(many), true), Err(Error::TooMany { .. })));
}

#[test]
fn grids_of_any_size_cost_nothing_until_they_are_asked() {
    let grid = Grid::new(&[1 << 40, 1 << 20], &[3, 7], false).unwrap();
    assert_eq!(grid.counts(), [366_503_875_926, 149_797]);
    let tiles = grid.tiles(&mut never).unwrap();
    let mut found = Vec::new();
    let ask = [2, 6, 4, 8];
    tiles
        .finder()
        .under(Region::of_row(&ask), &mut |tile, common| {
            found.push((tile, common.text()));
            Ok(())
        })
        .unwrap();
    let expected = [(0, "[2:3, 6:7]"), (1, "[2:3, 7:8]"), (149_797, "[3:4, 6:7]"), (149_798, "[3:4, 7:8]")];
    assert_eq!(found, expected.map(|(tile, text)| (tile, text.to_owned())));
    for (chunks, text) in [
        (&[0, 7][..], "chunks[0] is 0; a chunk must have at least 1 element"),
        (&[3], "chunks has 1 dim but shape has 2"),
    ] {
        assert_eq!(Grid::new(&[8, 8], chunks, false).unwrap_err().to_string(), text);
    }
    assert!(matches!(Grid::new(&[1 << 40, 0], &[1, 1], true).unwrap().array_shape(0), Err(Error::OutOfRange { .. })));
}
