//! Boxes of a tensor: start and stop per dim, half open.

/// A box by its two corners.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) start: Vec<i64>,
    pub(crate) stop: Vec<i64>,
}

impl Bounds {
    pub(crate) fn of(start: &[i64], stop: &[i64]) -> Self {
        Self { start: start.to_vec(), stop: stop.to_vec() }
    }

    /// Elements; the box lies in a tensor whose size was checked.
    pub(crate) fn volume(&self) -> i64 {
        volume(&self.start, &self.stop)
    }

    pub(crate) fn extent(&self, dim: usize) -> i64 {
        self.stop[dim] - self.start[dim]
    }

    /// What the box shares with another; none if it is nothing.
    pub(crate) fn overlap(&self, start: &[i64], stop: &[i64]) -> Option<Self> {
        overlaps(&self.start, &self.stop, start, stop).then(|| Self {
            start: self.start.iter().zip(start).map(|(a, b)| *a.max(b)).collect(),
            stop: self.stop.iter().zip(stop).map(|(a, b)| *a.min(b)).collect(),
        })
    }

    /// Grows to hold another.
    pub(crate) fn include(&mut self, other: &Self) {
        for dim in 0..self.start.len() {
            self.start[dim] = self.start[dim].min(other.start[dim]);
            self.stop[dim] = self.stop[dim].max(other.stop[dim]);
        }
    }
}

pub(crate) fn volume(start: &[i64], stop: &[i64]) -> i64 {
    sides_product(start.iter().zip(stop).map(|(start, stop)| stop - start))
}

/// A shape without elements may have other dims whose product is over 64 bits.
fn sides_product(sides: impl Iterator<Item = i64> + Clone) -> i64 {
    if sides.clone().any(|side| side <= 0) { 0 } else { sides.product() }
}

/// Whether two boxes share an element.
pub(crate) fn overlaps(start: &[i64], stop: &[i64], other_start: &[i64], other_stop: &[i64]) -> bool {
    (0..start.len()).all(|dim| start[dim].max(other_start[dim]) < stop[dim].min(other_stop[dim]))
}

/// The elements that two boxes share.
pub(crate) fn shared(start: &[i64], stop: &[i64], other_start: &[i64], other_stop: &[i64]) -> i64 {
    sides_product((0..start.len()).map(|dim| stop[dim].min(other_stop[dim]) - start[dim].max(other_start[dim])))
}

/// Below this many boxes, all pairs are compared.
const PAIRS: usize = 16;

/// Two of the boxes that share an element, by their numbers.
///
/// Boxes are parted at the median of their starts, along the dim that parts them best, until few are left; boxes that
/// lie on both sides are in both halves. Tilings of any form part well.
pub(crate) fn find_overlap(boxes: &[(&[i64], &[i64])]) -> Option<(usize, usize)> {
    let rank = boxes.first().map_or(0, |first| first.0.len());
    let holds = |&i: &usize| boxes[i].0.iter().zip(boxes[i].1).all(|(start, stop)| start < stop);
    let mut sets = vec![(0..boxes.len()).filter(holds).collect::<Vec<usize>>()];
    while let Some(set) = sets.pop() {
        let parted = if set.len() <= PAIRS { None } else { part(boxes, rank, &set) };
        if let Some(halves) = parted {
            sets.extend(halves);
            continue;
        }
        for (at, &a) in set.iter().enumerate() {
            for &b in &set[at + 1..] {
                if overlaps(boxes[a].0, boxes[a].1, boxes[b].0, boxes[b].1) {
                    return Some((a.min(b), a.max(b)));
                }
            }
        }
    }
    None
}

/// The set in two halves of which neither is nearly all of it.
fn part(boxes: &[(&[i64], &[i64])], rank: usize, set: &[usize]) -> Option<[Vec<usize>; 2]> {
    let mut best: Option<(usize, usize, i64)> = None;
    let mut starts = Vec::with_capacity(set.len());
    for dim in 0..rank {
        starts.clear();
        starts.extend(set.iter().map(|&i| boxes[i].0[dim]));
        let least = starts.iter().copied().min()?;
        let middle = set.len() / 2;
        let (_, &mut median, _) = starts.select_nth_unstable(middle);
        // Where more than half begin at the first place, the next one parts them.
        let next = || set.iter().map(|&i| boxes[i].0[dim]).filter(|&s| s > least).min();
        let Some(cut) = (if median > least { Some(median) } else { next() }) else {
            continue; // All begin at one place of this dim.
        };
        let left = set.iter().filter(|&&i| boxes[i].0[dim] < cut).count();
        let right = set.iter().filter(|&&i| boxes[i].1[dim] > cut).count();
        if best.is_none_or(|(most, ..)| left.max(right) < most) {
            best = Some((left.max(right), dim, cut));
        }
    }
    let (most, dim, cut) = best?;
    if most > set.len() * 9 / 10 {
        return None;
    }
    let left = set.iter().copied().filter(|&i| boxes[i].0[dim] < cut).collect();
    let right = set.iter().copied().filter(|&i| boxes[i].1[dim] > cut).collect();
    Some([left, right])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn overlaps_are_those_that_comparing_all_pairs_finds(
            corners in prop::collection::vec(prop::collection::vec((0..12_i64, 0..6_i64), 2), 0..60),
        ) {
            let boxes: Vec<(Vec<i64>, Vec<i64>)> = corners
                .iter()
                .map(|dims| (dims.iter().map(|d| d.0).collect(), dims.iter().map(|d| d.0 + d.1).collect()))
                .collect();
            let views: Vec<(&[i64], &[i64])> = boxes.iter().map(|(a, b)| (&a[..], &b[..])).collect();
            let share = |a: usize, b: usize| shared(views[a].0, views[a].1, views[b].0, views[b].1) > 0;
            let any = (0..views.len()).any(|a| (0..a).any(|b| share(a, b)));
            match find_overlap(&views) {
                Some((a, b)) => prop_assert!(a < b && share(a, b)),
                None => prop_assert!(!any),
            }
        }
    }

    #[test]
    fn rows_that_all_begin_at_the_first_column_are_parted_by_rows() {
        let rows: Vec<([i64; 2], [i64; 2])> = (0..1000).map(|i| ([0, i], [5, i + 1])).collect();
        let views: Vec<(&[i64], &[i64])> = rows.iter().map(|(a, b)| (&a[..], &b[..])).collect();
        let set: Vec<usize> = (0..rows.len()).collect();
        let halves = part(&views, 2, &set).unwrap();
        assert_eq!(halves.map(|half| half.len()), [500, 500]);
    }

    #[test]
    fn a_large_grid_has_none_until_one_box_grows() {
        let mut boxes: Vec<(Vec<i64>, Vec<i64>)> =
            (0..10_000_i64).map(|i| (vec![i / 100 * 3, i % 100 * 5], vec![i / 100 * 3 + 3, i % 100 * 5 + 5])).collect();
        let find = |boxes: &[(Vec<i64>, Vec<i64>)]| {
            find_overlap(&boxes.iter().map(|(a, b)| (&a[..], &b[..])).collect::<Vec<_>>())
        };
        assert_eq!(find(&boxes), None);
        boxes[777].1[1] += 1;
        assert_eq!(find(&boxes), Some((777, 778)));
    }
}
