//! Boxes that lie anywhere, found by a tree of the boxes around them.
//!
//! Each node holds the box around half of its parent's tiles: those that start first along the dim in which they lie the
//! most side by side. For tiles that share no element a look-up takes time in the logarithm of their number and in the
//! number found, unless they are long and thin in several directions at once.

use crate::{
    error::{Error, Result},
    region::{Region, Regions},
    tiling::{
        Poll,
        cells::room_for,
        tiles::{Finder, Ticker},
    },
};

/// Up to how many tiles are not divided any more.
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
    /// Which tiles, as a range of the order.
    begin: u32,
    end: u32,
    /// The second child; the first is the next node. 0 for a leaf.
    second: u32,
}

impl Tree {
    /// The tree of the boxes `tiles` of `regions`.
    pub(super) fn new(regions: &Regions, tiles: &[u32], poll: Poll<'_>) -> Result<Self> {
        let too_many = |_| Error::TooMany { what: format!("the nodes of a tree of {} boxes", tiles.len()) };
        let mut order: Vec<u32> = Vec::new();
        order.try_reserve_exact(tiles.len()).map_err(too_many)?;
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
            tree.nodes.try_reserve(1).map_err(too_many)?;
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
            sum += (stop - start) as f64;
        }
        if low > high {
            (low, high) = (0, 0); // no boxes at all
        }
        (row[dim], row[rank + dim]) = (low, high);
        let side_by_side = (high - low) as f64 * count / sum.max(1.0);
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
                refused = room_for(found, 1);
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
