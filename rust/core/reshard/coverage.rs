//! Boxes made by hand: whether they tile a tensor, and what of them goes where.
//!
//! Overlaps are looked for with a sweep along the dim in which the boxes begin at the most places. If there are none and
//! the volumes do not add up to the tensor's, something is missing, and the search for it narrows the tensor dim by dim
//! to a slab that the boxes do not fill.

use crate::{
    error::{Error, Result},
    partition::Partition,
    radix,
    reshard::intersect,
};

/// Boxes that tile a tensor, and the transfers that they give.
#[derive(Debug, Clone)]
pub struct Boxes {
    bounds: Vec<i64>,
    rows: Vec<i64>,
}

impl Boxes {
    /// The boxes of `bounds`, (boxes, dims, 2) in C order, and what each sends to every device of `destination`.
    ///
    /// # Errors
    /// [`Error::BoxBounds`], [`Error::BoxesOverlap`] or [`Error::BoxMissing`] if they do not tile its shape,
    /// [`Error::TooMany`] if the transfers are more than there is memory for.
    pub fn new(bounds: Vec<i64>, destination: &Partition) -> Result<Self> {
        check_coverage(&bounds, destination.shape())?;
        let rank = destination.shape().len();
        let count = if rank == 0 { 1 } else { bounds.len() / (2 * rank) };
        let mut rows = Vec::new();
        for index in 0..count {
            transfers(index as i64, &bounds[index * 2 * rank..(index + 1) * 2 * rank], destination, &mut rows)?;
        }
        let rows = sorted(&rows, 2 + 2 * rank)?;
        Ok(Self { bounds, rows })
    }

    /// The boxes.
    #[must_use]
    pub fn bounds(&self) -> &[i64] {
        &self.bounds
    }

    /// The transfers, in the order of the destination devices.
    #[must_use]
    pub fn rows(&self) -> &[i64] {
        &self.rows
    }
}

/// Appends the transfers of one box.
fn transfers(index: i64, bounds: &[i64], destination: &Partition, rows: &mut Vec<i64>) -> Result<()> {
    let mut sides: Vec<Vec<intersect::Overlap>> = Vec::with_capacity(destination.cuts().len());
    for (cut, side) in destination.cuts().iter().zip(bounds.chunks_exact(2)) {
        let mut overlaps = Vec::new();
        let most = usize::try_from(cut.shards().min(side[1] - side[0])).map_err(|_| too_many())?;
        overlaps.try_reserve_exact(most).map_err(|_| too_many())?;
        overlaps.extend(intersect::sources(cut, side[0], side[1]));
        sides.push(overlaps);
    }
    let mut starts = vec![0; sides.len()];
    let mut stops = vec![0; sides.len()];
    let sizes: Vec<i64> = sides.iter().map(|side| side.len() as i64).collect();
    for cell in 0..radix::product("transfers", &sizes)? {
        let mut shard = 0;
        for (dim, at) in radix::unravel(cell, &sizes).into_iter().enumerate() {
            let overlap = sides[dim][at as usize];
            (starts[dim], stops[dim]) = (overlap.start, overlap.stop);
            shard += overlap.source * destination.shard_strides()[dim];
        }
        let devices = destination.devices_holding(shard)?;
        rows.try_reserve(devices.len().saturating_mul(2 + 2 * sides.len())).map_err(|_| too_many())?;
        for device in devices {
            rows.extend([index, device]);
            rows.extend(&starts);
            rows.extend(&stops);
        }
    }
    Ok(())
}

/// The rows in the order of their destination devices, and of their sources for each.
fn sorted(rows: &[i64], width: usize) -> Result<Vec<i64>> {
    let (mut order, mut sorted): (Vec<&[i64]>, Vec<i64>) = Default::default();
    order.try_reserve_exact(rows.len() / width).map_err(|_| too_many())?;
    sorted.try_reserve_exact(rows.len()).map_err(|_| too_many())?;
    order.extend(rows.chunks_exact(width));
    // A device holds one shard, so it has one transfer at most from a box: no two keys are equal.
    order.sort_unstable_by_key(|row| (row[1], row[0]));
    order.iter().for_each(|row| sorted.extend_from_slice(row));
    Ok(sorted)
}

fn too_many() -> Error {
    Error::TooMany { what: "the transfers from these boxes".to_owned() }
}

/// Checks that the boxes of `bounds`, (boxes, dims, 2) in C order, tile a tensor of `shape`.
///
/// # Errors
/// [`Error::BoxBounds`] for a box that is not within the shape, [`Error::BoxesOverlap`] naming two boxes that share an
/// element, [`Error::BoxMissing`] naming a box of elements that none holds.
///
/// ```
/// use shardwise_core::{error::Error, reshard::coverage::check_coverage};
/// assert!(check_coverage(&[0, 2, 2, 5], &[5]).is_ok());
/// let gap = Err(Error::BoxMissing { start: vec![2], stop: vec![3] });
/// assert_eq!(check_coverage(&[0, 2, 3, 5], &[5]), gap);
/// let twice = Err(Error::BoxesOverlap { first: 0, second: 1, start: vec![2], stop: vec![3] });
/// assert_eq!(check_coverage(&[0, 3, 2, 5], &[5]), twice);
/// ```
pub fn check_coverage(bounds: &[i64], shape: &[i64]) -> Result<()> {
    let rank = shape.len();
    if rank == 0 {
        return Ok(());
    }
    let boxes: Vec<&[i64]> = bounds.chunks_exact(2 * rank).collect();
    for (index, bounds) in boxes.iter().enumerate() {
        for (dim, side) in bounds.chunks_exact(2).enumerate() {
            if side[0] < 0 || side[0] > side[1] || side[1] > shape[dim] {
                return Err(Error::BoxBounds { index, dim, start: side[0], stop: side[1], size: shape[dim] });
            }
        }
    }
    if shape.contains(&0) {
        return Ok(());
    }
    let mut filled: Vec<usize> = (0..boxes.len()).filter(|&i| volume(boxes[i]) > 0).collect();
    check_overlaps(&boxes, &mut filled, rank)?;
    // No two boxes share an element and all lie in the tensor, so the sum is at most its size.
    let covered: i64 = filled.iter().map(|&i| volume(boxes[i])).sum();
    if covered == radix::product("shape", shape)? {
        return Ok(());
    }
    let (start, stop) = missing(&boxes, filled, shape);
    Err(Error::BoxMissing { start, stop })
}

fn volume(bounds: &[i64]) -> i64 {
    bounds.chunks_exact(2).map(|side| side[1] - side[0]).product()
}

/// Sorts `filled` by their start along the dim of the sweep, and sweeps.
fn check_overlaps(boxes: &[&[i64]], filled: &mut [usize], rank: usize) -> Result<()> {
    let distinct = |dim: usize| {
        let mut starts: Vec<i64> = filled.iter().map(|&i| boxes[i][2 * dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let sweep = (0..rank).max_by_key(|&dim| distinct(dim)).unwrap_or(0);
    filled.sort_unstable_by_key(|&i| (boxes[i][2 * sweep], i));
    let mut active: Vec<usize> = Vec::new();
    for &i in filled.iter() {
        let bounds = boxes[i];
        active.retain(|&other| boxes[other][2 * sweep + 1] > bounds[2 * sweep]);
        for &other in &active {
            let sides = bounds.chunks_exact(2).zip(boxes[other].chunks_exact(2));
            let common: Vec<_> = sides.map(|(a, b)| (a[0].max(b[0]), a[1].min(b[1]))).collect();
            if common.iter().all(|(start, stop)| start < stop) {
                let (start, stop) = common.into_iter().unzip();
                return Err(Error::BoxesOverlap { first: i.min(other), second: i.max(other), start, stop });
            }
        }
        active.push(i);
    }
    Ok(())
}

/// A box that none of `filled`, which are disjoint and do not fill the tensor, holds any part of.
fn missing(boxes: &[&[i64]], mut filled: Vec<usize>, shape: &[i64]) -> (Vec<i64>, Vec<i64>) {
    let (mut start, mut stop) = (Vec::new(), Vec::new());
    for (dim, &size) in shape.iter().enumerate() {
        // Between two neighbouring edges the boxes that are there at all are there throughout.
        let mut edges: Vec<i64> = filled.iter().flat_map(|&i| [boxes[i][2 * dim], boxes[i][2 * dim + 1]]).collect();
        edges.extend([0, size]);
        edges.sort_unstable();
        edges.dedup();
        let below: i64 = shape[dim + 1..].iter().product();
        for slab in edges.windows(2) {
            let inside = |&i: &usize| boxes[i][2 * dim] <= slab[0] && slab[1] <= boxes[i][2 * dim + 1];
            let here: Vec<usize> = filled.iter().copied().filter(inside).collect();
            let covered: i64 = here.iter().map(|&i| volume(&boxes[i][2 * dim + 2..])).sum();
            if covered < below {
                start.push(slab[0]);
                stop.push(slab[1]);
                filled = here;
                break;
            }
        }
    }
    (start, stop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Cuts the box in two, again and again, at places that the seeds give.
    fn tiling(shape: &[i64], seeds: &[usize]) -> Vec<Vec<i64>> {
        let mut boxes = vec![shape.iter().flat_map(|&n| [0, n]).collect::<Vec<_>>()];
        for &seed in seeds {
            let mut part = boxes.remove(seed % boxes.len());
            let dim = seed / 7 % shape.len();
            let (start, stop) = (part[2 * dim], part[2 * dim + 1]);
            let middle = start + seed as i64 % (stop - start).max(1);
            let mut other = part.clone();
            part[2 * dim + 1] = middle;
            other[2 * dim] = middle;
            boxes.extend([part, other]);
        }
        boxes
    }

    proptest! {
        #[test]
        fn tilings_pass_and_spoiled_ones_name_a_box(
            shape in prop::collection::vec(1..7_i64, 1..4),
            seeds in prop::collection::vec(0..1000_usize, 0..9),
            pick in 0..1000_usize,
        ) {
            let boxes = tiling(&shape, &seeds);
            prop_assert_eq!(check_coverage(&boxes.concat(), &shape), Ok(()));
            let filled: Vec<usize> = (0..boxes.len()).filter(|&i| volume(&boxes[i]) > 0).collect();
            let victim = filled[pick % filled.len()];
            let without: Vec<_> = (0..boxes.len()).filter(|&i| i != victim).flat_map(|i| boxes[i].clone()).collect();
            match check_coverage(&without, &shape) {
                Err(Error::BoxMissing { start, stop }) => {
                    // The part named lies in the box that was taken away, and is not empty.
                    for (dim, side) in boxes[victim].chunks(2).enumerate() {
                        prop_assert!(side[0] <= start[dim] && start[dim] < stop[dim] && stop[dim] <= side[1]);
                    }
                }
                other => prop_assert!(false, "{other:?}"),
            }
            let mut twice = boxes.clone();
            twice.push(boxes[victim].clone());
            let named = matches!(
                check_coverage(&twice.concat(), &shape),
                Err(Error::BoxesOverlap { first, second, .. }) if first == victim && second == boxes.len()
            );
            prop_assert!(named);
        }
    }

    #[test]
    fn what_is_missing_is_not_cut_where_an_empty_box_lies() {
        let gap = Err(Error::BoxMissing { start: vec![2], stop: vec![5] });
        assert_eq!(check_coverage(&[0, 2, 3, 3], &[5]), gap);
        let text = check_coverage(&[0, 2, 0, 1], &[2, 3]).unwrap_err().to_string();
        assert_eq!(text, "the boxes leave a gap: none holds [0:2, 1:3]");
    }

    #[test]
    fn a_box_outside_the_shape_is_named() {
        // Also where the tensor has no elements, of which no shard can hold one.
        let named = |bounds: &[i64], shape: &[i64]| check_coverage(bounds, shape).unwrap_err().to_string();
        assert_eq!(named(&[0, 1], &[0]), "boxes[0] is [0, 1) along dim 0, which is not within [0, 0)");
        assert_eq!(named(&[0, 9, 0, 0], &[4, 0]), "boxes[0] is [0, 9) along dim 0, which is not within [0, 4)");
        assert_eq!(check_coverage(&[0, 4, 0, 0], &[4, 0]), Ok(()));
        assert_eq!(
            check_coverage(&[0, 2, 2, 6], &[5]).unwrap_err().to_string(),
            "boxes[1] is [2, 6) along dim 0, which is not within [0, 5)"
        );
        assert_eq!(named(&[-1, 5], &[5]), "boxes[0] is [-1, 5) along dim 0, which is not within [0, 5)");
        assert_eq!(named(&[0, 5, 3, 2], &[5]), "boxes[1] is [3, 2) along dim 0, which is not within [0, 5)");
    }
}
