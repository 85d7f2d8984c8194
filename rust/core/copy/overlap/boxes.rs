//! Which of many views of one array share a byte: their boxes, split until none is left that could.
//!
//! Views of one array have its strides, and each is a box of it. Of boxes it is known in `n log n` steps whether they
//! overlap, where comparing all pairs of 16,000 views takes minutes: along some dim they fall apart into groups that
//! share no position, each group along another dim, and so on until every box is alone. Groups of sources only are left
//! alone, for they may overlap.

use crate::{
    copy::overlap::item::{Item, Meeting},
    error::{Error, Result},
    tiling::Poll,
};

/// After how many boxes there is a poll.
const BOXES_PER_POLL: usize = 1 << 14;

/// A grid of bytes: the strides that most of the arrays have, each a multiple of the next, the last a multiple of 1.
pub(super) struct Lattice {
    strides: Vec<i128>,
    base: i128,
}

impl Lattice {
    /// The grid of arrays of which the first begins lowest.
    pub(super) fn of(items: &[Item<'_>]) -> Result<Self> {
        let mut times: Vec<(i128, usize)> = Vec::new();
        for stride in items.iter().flat_map(Item::strides) {
            match times.binary_search_by_key(&stride, |&(stride, _)| stride) {
                Ok(at) => times[at].1 += 1,
                Err(at) => {
                    times.try_reserve(1).map_err(|_| no_memory(items.len()))?;
                    times.insert(at, (stride, 1));
                }
            }
        }
        times.sort_by_key(|&(_, times)| std::cmp::Reverse(times));
        let mut strides: Vec<i128> = Vec::new();
        for (stride, _) in times {
            if strides.len() < MOST_STRIDES && strides.iter().all(|&other| stride % other == 0 || other % stride == 0) {
                strides.push(stride);
            }
        }
        strides.sort_unstable_by_key(|&stride| std::cmp::Reverse(stride));
        Ok(Self { strides, base: items.first().map_or(0, |item| item.low) })
    }

    /// The numbers of a box: start and stop along each stride, and of the bytes.
    fn width(&self) -> usize {
        2 * (self.strides.len() + 1)
    }

    /// Puts the box of an array at the end of `bounds`; none if it is not one: if it has other strides, or steps from one
    /// line into the next.
    fn push(&self, item: &Item<'_>, bounds: &mut Vec<i64>) -> bool {
        let before = bounds.len();
        let mut rest = item.low - self.base;
        let mut outer = None;
        let mut dims = 0;
        for &stride in self.strides.iter().chain([&1]) {
            let is_byte = bounds.len() - before + 2 == self.width();
            let (start, left) = (rest / stride, rest % stride);
            rest = left;
            let extent = if is_byte { item.itemsize() } else { item.extent(stride, &mut dims) };
            let stop = start + extent;
            let fits = outer.is_none_or(|outer| stop * stride <= outer);
            let (Ok(start), Ok(stop), true) = (i64::try_from(start), i64::try_from(stop), fits) else {
                bounds.truncate(before);
                return false;
            };
            bounds.extend([start, stop]);
            outer = Some(stride);
        }
        if dims == item.strides().count() {
            return true;
        }
        bounds.truncate(before);
        false
    }
}

/// Arrays of more dims than this are compared in pairs.
const MOST_STRIDES: usize = 64;

/// The boxes of those items that are boxes of a grid, by their positions among the items.
pub(super) struct Boxes<'i, 'a> {
    items: &'i [Item<'a>],
    width: usize,
    /// Start and stop, for each of `members`.
    bounds: Vec<i64>,
    members: Vec<usize>,
    /// The items that are not boxes.
    pub(super) others: Vec<usize>,
}

impl<'i, 'a> Boxes<'i, 'a> {
    pub(super) fn of(items: &'i [Item<'a>], poll: Poll<'_>) -> Result<Self> {
        let lattice = Lattice::of(items)?;
        let width = lattice.width();
        let (mut bounds, mut members, mut others) = (Vec::new(), Vec::new(), Vec::new());
        let slots = items.len().saturating_mul(width);
        bounds.try_reserve_exact(slots).map_err(|_| no_memory(items.len()))?;
        members.try_reserve_exact(items.len()).map_err(|_| no_memory(items.len()))?;
        for (i, item) in items.iter().enumerate() {
            if i % BOXES_PER_POLL == 0 {
                poll()?;
            }
            if lattice.push(item, &mut bounds) {
                members.push(i);
            } else {
                others.try_reserve(1).map_err(|_| no_memory(items.len()))?;
                others.push(i);
            }
        }
        Ok(Self { items, width, bounds, members, others })
    }

    fn side(&self, member: usize, dim: usize) -> (i64, i64) {
        let at = member * self.width + 2 * dim;
        (self.bounds[at], self.bounds[at + 1])
    }

    /// Two boxes that overlap, of which at least one is written to.
    pub(super) fn meeting(&self, poll: Poll<'_>) -> Result<Option<Meeting>> {
        let count = self.members.len();
        let mut order: Vec<usize> = Vec::new();
        let mut groups = Vec::new();
        order.try_reserve_exact(count).map_err(|_| no_memory(count))?;
        order.extend(0..count);
        groups.push((0..count, 0));
        let mut seen = 0_usize;
        while let Some((group, first)) = groups.pop() {
            seen += group.len();
            if seen >= BOXES_PER_POLL {
                seen = 0;
                poll()?;
            }
            let boxes = &mut order[group.clone()];
            if boxes.len() < 2 || !boxes.iter().any(|&member| self.items[self.members[member]].written) {
                continue;
            }
            let dims = self.width / 2;
            let split = (0..dims).map(|dim| (first + dim) % dims).find(|&dim| self.sort(boxes, dim));
            let Some(dim) = split else {
                if let Some(meeting) = self.sweep(boxes, poll)? {
                    return Ok(Some(meeting));
                }
                continue;
            };
            let (mut start, mut reach) = (group.start, i64::MIN);
            for at in group.clone() {
                let (low, high) = self.side(order[at], dim);
                if low >= reach && at > start {
                    groups.try_reserve(1).map_err(|_| no_memory(count))?;
                    groups.push((start..at, dim + 1));
                    start = at;
                }
                reach = reach.max(high);
            }
            groups.try_reserve(1).map_err(|_| no_memory(count))?;
            groups.push((start..group.end, dim + 1));
        }
        Ok(None)
    }

    /// Sorts boxes along a dim; whether they fall apart along it.
    fn sort(&self, boxes: &mut [usize], dim: usize) -> bool {
        boxes.sort_unstable_by_key(|&member| self.side(member, dim));
        let mut reach = self.side(boxes[0], dim).1;
        boxes[1..].iter().any(|&member| {
            let (low, high) = self.side(member, dim);
            let apart = low >= reach;
            reach = reach.max(high);
            apart
        })
    }

    /// The same as [`Boxes::meeting`] for boxes that fall apart along no dim, each compared with those that have begun
    /// along one dim and not ended yet.
    fn sweep(&self, boxes: &mut [usize], poll: Poll<'_>) -> Result<Option<Meeting>> {
        // Along the dim in which they are shortest, beside the reach of all.
        let share = |dim: usize| {
            let sides = || boxes.iter().map(|&member| self.side(member, dim));
            let (low, high) = sides().fold((i64::MAX, i64::MIN), |(a, b), (low, high)| (a.min(low), b.max(high)));
            sides().map(|(low, high)| (high - low) as f64).sum::<f64>() / (high - low).max(1) as f64
        };
        let dim = (0..self.width / 2).min_by(|&a, &b| share(a).total_cmp(&share(b))).unwrap_or(0);
        self.sort(boxes, dim);
        let mut active: [Vec<usize>; 2] = [Vec::new(), Vec::new()];
        let mut steps = 0;
        for &member in boxes.iter() {
            let (low, _) = self.side(member, dim);
            let item = &self.items[self.members[member]];
            for kind in [false, true] {
                let active = &mut active[usize::from(kind)];
                steps += active.len() + 1;
                active.retain(|&other| self.side(other, dim).1 > low);
                if !item.written && !kind {
                    continue;
                }
                if let Some(&other) = active.iter().find(|&&other| self.overlap(member, other)) {
                    return Ok(Some(Meeting(self.members[member], self.members[other])));
                }
            }
            if steps >= BOXES_PER_POLL {
                steps = 0;
                poll()?;
            }
            let active = &mut active[usize::from(item.written)];
            active.try_reserve(1).map_err(|_| no_memory(boxes.len()))?;
            active.push(member);
        }
        Ok(None)
    }

    fn overlap(&self, a: usize, b: usize) -> bool {
        (0..self.width / 2).all(|dim| {
            let ((low_a, high_a), (low_b, high_b)) = (self.side(a, dim), self.side(b, dim));
            low_a < high_b && low_b < high_a
        })
    }
}

fn no_memory(arrays: usize) -> Error {
    Error::TooMany { what: format!("the boxes of {arrays} arrays") }
}
