//! Checks for boxes that share elements, and for elements that none of them holds.
//!
//! That no two share an element is seen while they are put into the cells of a grid, or by looking each up in the tree
//! of all. If then the volumes do not add up, something is missing: dim by dim, the slabs up to an edge hold ever more
//! of what is missing, so that the first slab that lacks something is found by halving.

use crate::{
    error::{Error, Result},
    region::Region,
    room::Room as _,
    tiling::{Pieces, Poll, tiles::Ticker, tree::Tree},
};

/// Check that no two of the boxes `tiles` of `pieces`, which are in `tree`, share an element.
pub(super) fn no_overlap(pieces: &Pieces, tiles: &[u32], tree: &Tree, poll: Poll<'_>) -> Result<()> {
    let regions = pieces.regions();
    let (mut stack, mut ticker) = (Vec::new(), Ticker::new());
    for (number, &tile) in tiles.iter().enumerate() {
        ticker.tick(poll)?;
        let region = regions.get(tile as usize);
        let mut other = None;
        tree.search(
            region,
            |tile| tiles[tile as usize] as usize,
            regions,
            &mut stack,
            |found| {
                if found as usize > number {
                    other = Some(other.map_or(found, |other: u32| other.min(found)));
                }
                // The tile itself is found too; of those that share elements with many, any one will do.
                other.is_none()
            },
        );
        if let Some(other) = other {
            return Err(overlap(pieces, tile, tiles[other as usize]));
        }
    }
    Ok(())
}

/// The error that two pieces share elements.
fn overlap(pieces: &Pieces, first: u32, second: u32) -> Error {
    let regions = pieces.regions();
    let mut common = vec![0; 2 * regions.rank()];
    regions.get(first as usize).overlap_into(regions.get(second as usize), &mut common);
    let common = Region::of_row(&common);
    let (start, stop) = (common.start().to_vec(), common.stop().to_vec());
    let (first, second) = (pieces.owner(first as usize).0, pieces.owner(second as usize).0);
    Error::BoxesOverlap { first, second, start, stop }
}

/// A box within `whole` that none of `boxes`, which share no element, holds any part of; `None` if they fill it.
///
/// # Errors
/// What `poll` returns; [`Error::TooMany`] if there is no memory for the search.
///
/// ```
/// use shardwise_core::{parallel::never, region::Region, tiling::check::missing};
/// let boxes = [Region::of_row(&[0, 2]), Region::of_row(&[3, 5])];
/// assert_eq!(missing(Region::of_row(&[0, 5]), boxes.into_iter(), &mut never)?, Some((vec![2], vec![3])));
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
pub fn missing<'a>(
    whole: Region<'_>,
    boxes: impl Iterator<Item = Region<'a>> + Clone,
    poll: Poll<'_>,
) -> Result<Option<(Vec<i64>, Vec<i64>)>> {
    let mut ticker = Ticker::new();
    let mut covered = 0_i64;
    for region in boxes.clone() {
        ticker.tick(poll)?;
        covered = covered.saturating_add(clipped(whole, region, 0));
    }
    if covered >= whole.volume() {
        return Ok(None);
    }
    let what = "the boxes beside a gap";
    let mut here: Vec<Region<'a>> = Vec::new();
    for region in boxes.filter(|region| region.meets(whole)) {
        here.room(1, what)?;
        here.push(region);
    }
    let (mut start, mut stop) = (Vec::new(), Vec::new());
    for (dim, (low, high)) in whole.sides().enumerate() {
        // Between two neighbouring edges the boxes that are there at all are there throughout.
        let mut edges: Vec<i64> = Vec::new();
        edges.room(2 * here.len() + 2, what)?;
        edges.extend(here.iter().flat_map(|b| [b.start()[dim].max(low), b.stop()[dim].min(high)]));
        edges.extend([low, high]);
        edges.sort_unstable();
        edges.dedup();
        let below = volume_from(whole, dim + 1);
        let mut lacks = |edge: i64| -> Result<bool> {
            poll()?;
            let part = |b: &Region<'_>| (b.stop()[dim].min(edge) - b.start()[dim].max(low)).max(0);
            let held: i64 = here.iter().map(|b| part(b) * clipped(whole, *b, dim + 1)).sum();
            Ok(held < (edge - low) * below)
        };
        // Nothing is missing before the first edge, and something before the last.
        let (mut full, mut short) = (0, edges.len() - 1);
        while short - full > 1 {
            let middle = full + (short - full) / 2;
            if lacks(edges[middle])? { short = middle } else { full = middle }
        }
        let slab = (edges[full], edges[short]);
        start.push(slab.0);
        stop.push(slab.1);
        here.retain(|b| b.start()[dim] <= slab.0 && slab.1 <= b.stop()[dim]);
    }
    Ok(Some((start, stop)))
}

/// The elements of a box along the dims from `dim` on.
fn volume_from(region: Region<'_>, dim: usize) -> i64 {
    region.extents().skip(dim).fold(1, i64::saturating_mul)
}

/// The elements of `region` within `whole`, along the dims from `dim` on.
fn clipped(whole: Region<'_>, region: Region<'_>, dim: usize) -> i64 {
    let sides = whole.sides().zip(region.sides()).skip(dim);
    sides.map(|(a, b)| (a.1.min(b.1) - a.0.max(b.0)).max(0)).product()
}
