//! Boxes that lie anywhere, found by a tree of the boxes around them.
//!
//! Each node holds the box around half of its parent's tiles: those that start first along the dim in which they lie the
//! most side by side. For tiles that share no element a look-up takes time in the logarithm of their number and in the
//! number found, unless they are long and thin in several directions at once.

use crate::{
    error::Result,
    region::{Region, Regions},
    room::{self, Room as _},
    tiling::{
        Poll,
        cells::UNDER,
        tiles::{Finder, Ticker},
    },
};

/// The most tiles of a node that is not divided any more.
const LEAF: usize = 6;

#[derive(Debug)]
pub(super) struct Tree {
    nodes: Vec<Node>,
    /// The box around each node's tiles.
    around: Regions,
    /// The tiles, node by node.
    order: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    /// The tiles of the node, as a range of the order.
    begin: u32,
    end: u32,
    /// The second child; the first is the next node. 0 for a leaf.
    second: u32,
}

impl Tree {
    /// The tree of the boxes `tiles` of `regions`.
    pub(super) fn new(regions: &Regions, tiles: &[u32], poll: Poll<'_>) -> Result<Self> {
        let mut order: Vec<u32> = room::list(tiles.len(), format_args!("a tree of {} boxes", tiles.len()))?;
        order.extend(0..tiles.len() as u32);
        let mut tree = Self { nodes: Vec::new(), around: Regions::new(regions.rank()), order };
        let mut ticker = Ticker::new();
        // The ranges still to be made nodes of, and the node whose second child each is.
        let mut waiting = vec![(0, tiles.len(), None)];
        let mut row = vec![0; 2 * regions.rank()];
        while let Some((begin, end, parent)) = waiting.pop() {
            let number = tree.nodes.len();
            if let Some(parent) = parent {
                let parent: &mut Node = &mut tree.nodes[parent];
                parent.second = number as u32;
            }
            tree.nodes.room(1, format_args!("the nodes of a tree of {} boxes", tiles.len()))?;
            tree.nodes.push(Node { begin: begin as u32, end: end as u32, second: 0 });
            let box_of = |tile: u32| regions.get(tiles[tile as usize] as usize);
            let dim = widest(tree.order[begin..end].iter().map(|&tile| box_of(tile)), &mut row);
            tree.around.push(Region::of_row(&row))?;
            for _ in begin..end {
                ticker.tick(poll)?;
            }
            if end - begin > LEAF {
                let middle = (end - begin) / 2;
                tree.order[begin..end].select_nth_unstable_by_key(middle, |&tile| (box_of(tile).start()[dim], tile));
                waiting.push((begin + middle, end, Some(number)));
                waiting.push((begin, begin + middle, None));
            }
        }
        Ok(tree)
    }

    pub(super) fn finder<'a>(&'a self, regions: &'a Regions, tiles: &'a [u32]) -> TreeFinder<'a> {
        TreeFinder {
            tree: self,
            regions,
            tiles,
            stack: Vec::new(),
            found: Vec::new(),
            row: vec![0; 2 * regions.rank()],
        }
    }

    /// Shows `visit` the tiles that share elements with a box, in no order, until it answers false.
    pub(super) fn search(
        &self,
        region: Region<'_>,
        box_of: impl Fn(u32) -> usize,
        regions: &Regions,
        stack: &mut Vec<u32>,
        mut visit: impl FnMut(u32) -> bool,
    ) {
        stack.clear();
        stack.push(0);
        while let Some(number) = stack.pop() {
            if !self.around.get(number as usize).meets(region) {
                continue;
            }
            let node = self.nodes[number as usize];
            if node.second != 0 {
                stack.extend([node.second, number + 1]);
                continue;
            }
            for &tile in &self.order[node.begin as usize..node.end as usize] {
                if regions.get(box_of(tile)).meets(region) && !visit(tile) {
                    return;
                }
            }
        }
    }
}

/// Writes the box around all into `row`, and gives the dim in which they lie the most side by side: in which the whole is
/// the longest beside the mean of its parts.
fn widest<'a>(boxes: impl ExactSizeIterator<Item = Region<'a>> + Clone, row: &mut [i64]) -> usize {
    let rank = row.len() / 2;
    let count = boxes.len() as f64;
    let mut best = (0, -1.0);
    for dim in 0..rank {
        let (mut low, mut high, mut sum) = (i64::MAX, i64::MIN, 0.0);
        for region in boxes.clone() {
            let (start, stop) = (region.start()[dim], region.stop()[dim]);
            (low, high) = (low.min(start), high.max(stop));
            sum += stop as f64 - start as f64;
        }
        if low > high {
            (low, high) = (0, 0); // no boxes at all
        }
        (row[dim], row[rank + dim]) = (low, high);
        let side_by_side = (high as f64 - low as f64) * count / sum.max(1.0);
        if side_by_side > best.1 {
            best = (dim, side_by_side);
        }
    }
    best.0
}

pub(super) struct TreeFinder<'a> {
    tree: &'a Tree,
    regions: &'a Regions,
    tiles: &'a [u32],
    stack: Vec<u32>,
    found: Vec<u32>,
    row: Vec<i64>,
}

impl Finder for TreeFinder<'_> {
    fn under(&mut self, region: Region<'_>, visit: &mut dyn FnMut(i64, Region<'_>) -> Result<()>) -> Result<()> {
        let Self { tree, regions, tiles, stack, found, row } = self;
        found.clear();
        let mut refused = Ok(());
        tree.search(
            region,
            |tile| tiles[tile as usize] as usize,
            regions,
            stack,
            |tile| {
                refused = found.room(1, UNDER);
                if refused.is_ok() {
                    found.push(tile);
                }
                refused.is_ok()
            },
        );
        refused?;
        found.sort_unstable();
        for &tile in found.iter() {
            regions.get(tiles[tile as usize] as usize).overlap_into(region, row);
            visit(i64::from(tile), Region::of_row(row))?;
        }
        Ok(())
    }
}

/// Boxes that may share elements, to be found by where they lie.
#[derive(Debug)]
pub struct BoxTree {
    regions: Regions,
    all: Vec<u32>,
    tree: Tree,
}

impl BoxTree {
    /// The tree of these boxes.
    ///
    /// # Errors
    /// [`Error::TooMany`](crate::error::Error::TooMany) if they are more than 2³² − 1 or there is no memory for the tree; what `poll` returns.
    pub fn new(regions: Regions, poll: Poll<'_>) -> Result<Self> {
        let what = format_args!("{} boxes in a tree", regions.len());
        let count = u32::try_from(regions.len()).map_err(|_| room::none(what))?;
        let mut all = room::list(regions.len(), what)?;
        all.extend(0..count);
        let tree = Tree::new(&regions, &all, poll)?;
        Ok(Self { regions, all, tree })
    }

    /// The pairs of a box of the tree and one of `rows`, `start…, stop…` each, that share elements: the numbers of the
    /// former, in order for each of the latter, and those of the latter.
    ///
    /// # Errors
    /// [`Error::TooMany`](crate::error::Error::TooMany) if there is no memory for them; what `poll` returns.
    pub fn pairs(&self, rows: &[i64], poll: Poll<'_>) -> Result<[Vec<i64>; 2]> {
        let (mut ours, mut theirs, mut stack) = (Vec::new(), Vec::new(), Vec::new());
        let mut ticker = Ticker::new();
        let box_of = |tile: u32| self.all[tile as usize] as usize;
        for (number, row) in rows.chunks_exact((2 * self.regions.rank()).max(1)).enumerate() {
            ticker.tick(poll)?;
            let first = ours.len();
            let mut is_room = true;
            self.tree.search(Region::of_row(row), box_of, &self.regions, &mut stack, |tile| {
                is_room = ours.try_reserve(1).is_ok();
                if is_room {
                    ours.push(i64::from(tile));
                }
                is_room
            });
            ours[first..].sort_unstable();
            let what = format_args!("{} pairs of boxes", ours.len());
            if !is_room {
                return Err(room::none(what));
            }
            theirs.room(ours.len() - first, what)?;
            theirs.resize(ours.len(), number as i64);
        }
        Ok([ours, theirs])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::never;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pairs_are_those_that_share_an_element(
            held in prop::collection::vec((0..9_i64, 0..9_i64, 0..5_i64, 0..5_i64), 0..60),
            asked in prop::collection::vec((0..9_i64, 0..9_i64, 0..5_i64, 0..5_i64), 0..20),
        ) {
            let rows = |all: &[(i64, i64, i64, i64)]| -> Vec<[i64; 4]> {
                all.iter().map(|&(y, x, h, w)| [y, x, y + h, x + w]).collect()
            };
            let (held, asked) = (rows(&held), rows(&asked));
            let mut regions = Regions::new(2);
            held.iter().for_each(|row| regions.push(Region::of_row(row)).unwrap());
            let tree = BoxTree::new(regions, &mut never).unwrap();
            let elements = |row: &[i64; 4]| {
                let [top, left, bottom, right] = *row;
                (top..bottom).flat_map(move |y| (left..right).map(move |x| (y, x))).collect::<Vec<_>>()
            };
            let mut expected = Vec::new();
            for (b, one) in asked.iter().enumerate() {
                for (a, other) in held.iter().enumerate() {
                    if elements(one).iter().any(|at| elements(other).contains(at)) {
                        expected.push((a as i64, b as i64));
                    }
                }
            }
            let [ours, theirs] = tree.pairs(&asked.concat(), &mut never).unwrap();
            prop_assert_eq!(ours.into_iter().zip(theirs).collect::<Vec<_>>(), expected);
        }
    }
}
